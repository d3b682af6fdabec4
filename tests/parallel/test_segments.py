"""Segments cover exactly what transformers' own masks show, each query-key pair once."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Llama4TextConfig

from fsdp2kit.parallel.context_parallel.batch import attention_inputs
from fsdp2kit.parallel.context_parallel.layout import AttentionPath, Method, indices_of
from fsdp2kit.parallel.context_parallel.segments import (
    cut_documents,
    document_starts,
    plan_segments,
    read_segments,
)
from tests.parallel.helpers.segments import positions_of, transformers_mask


@st.composite
def packings(draw: st.DrawFn) -> tuple[int, Tensor]:
    """A cp and rows of documents whose length suits it."""
    cp = draw(st.integers(1, 4))
    length = 2 * cp * draw(st.integers(1, 6))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        cuts = draw(st.sets(st.integers(1, length - 1), max_size=6))
        borders = [0, *sorted(cuts), length]
        rows.append(positions_of([b - a for a, b in itertools.pairwise(borders)]))
    return cp, torch.stack(rows)


def _shown(position_ids: Tensor, *, method: Method | None, rank: int, cp: int, window: int | None) -> Tensor:
    """How often each query of the rank meets each key, by their indices in the sequence: ``[B, S, S]``."""
    table = plan_segments(document_starts(position_ids), method=method, rank=rank, cp=cp, window=window)
    return _shown_by(table, position_ids.shape, method=method, rank=rank, cp=cp)


def _shown_by(table: Tensor, shape: torch.Size, *, method: Any, rank: int, cp: int) -> Tensor:
    batch, length = shape
    count = torch.zeros(batch, length, length, dtype=torch.int64)
    queries = indices_of(rank, cp=cp, length=length, method=method)
    for segment in read_segments(table):
        owner = (rank - segment.step) % cp
        keys = indices_of(owner, cp=cp, length=length, method=method if method == "ring" else None)
        n, m = segment.q_stop - segment.q_start, segment.k_stop - segment.k_start
        for i in range(n):
            for j in range(m):
                past = j - (i + m - n)
                if (segment.left < 0 or past >= -segment.left) and (segment.right < 0 or past <= segment.right):
                    count[segment.row, queries[segment.q_start + i], keys[segment.k_start + j]] += 1
    return count


@settings(max_examples=60, deadline=None)
@given(packings(), st.sampled_from([None, 1, 3, 7]), st.sampled_from([None, "ring", "allgather"]))
def test_segments_are_transformers_mask(packing: tuple[int, Tensor], window: int | None, method: str | None) -> None:
    cp, position_ids = packing
    expected = transformers_mask(position_ids, window).long()
    ranks = range(cp if method else 1)
    found = sum(_shown(position_ids, method=method, rank=rank, cp=cp, window=window) for rank in ranks)
    assert torch.equal(found, expected)


@settings(max_examples=30, deadline=None)
@given(packings(), st.integers(1, 9))
def test_chunks_are_those_of_each_document_alone(packing: tuple[int, Tensor], chunk: int) -> None:
    """By transformers' mask of each document by itself, in segments and in our own masks."""
    cp, position_ids = packing
    batch, length = position_ids.shape
    starts = document_starts(position_ids)
    expected = torch.zeros(batch, length, length, dtype=torch.int64)
    for row, borders in enumerate(starts):
        for a, b in itertools.pairwise(borders):
            expected[row, a:b, a:b] = transformers_mask(torch.arange(b - a)[None], None, chunk=chunk)[0].long()
    for method in (None, "ring", "allgather"):
        ranks = range(cp if method else 1)
        tables = [
            plan_segments(cut_documents(starts, chunk), method=method, rank=r, cp=cp, window=None) for r in ranks
        ]
        found = sum(_shown_by(tables[r], position_ids.shape, method=method, rank=r, cp=cp) for r in ranks)
        assert torch.equal(found, expected)
    config = Llama4TextConfig(num_hidden_layers=1, layer_types=["chunked_attention"], attention_chunk_size=chunk)
    path, device = AttentionPath("ulysses", "sdpa"), torch.device("cpu")
    mask = attention_inputs(position_ids, config, path=path, cp_rank=0, cp=1, device=device)["attention_mask"]
    assert torch.equal(mask[:, 0].long(), expected)


def test_a_table_is_as_long_for_one_document_as_for_many() -> None:
    """A compiled layer is compiled for each length of the table."""
    for method, window in itertools.product((None, "ring", "allgather"), (None, 7)):
        sizes = {
            plan_segments(
                document_starts(positions_of(lengths)[None]), method=method, rank=1, cp=2, window=window
            ).shape
            for lengths in ([2048], [1, 2047], [1000, 48, 1000], [16] * 128)
        }
        assert sizes == {(128, 8)}
    many = plan_segments(document_starts(torch.zeros(1, 2048)), method=None, rank=0, cp=1, window=None)
    assert len(read_segments(many)) == len(many) == 2048, "no document is lost where there are more"


def test_nothing_unseen_is_planned_and_work_is_balanced() -> None:
    cp, length = 4, 64
    plain = document_starts(torch.arange(length)[None])
    work = []
    for rank in range(cp):
        segments = read_segments(plan_segments(plain, method="ring", rank=rank, cp=cp, window=None))
        assert len(segments) == cp, "one rectangle a step"
        work.append(sum((s.q_stop - s.q_start) * (s.k_stop - s.k_start) / (1 + (s.right == 0)) for s in segments))
    assert len(set(work)) == 1, "zigzag gives every rank the same work"
    documents = document_starts(positions_of([8] * 8)[None])
    for rank in range(cp):
        segments = read_segments(plan_segments(documents, method="ring", rank=rank, cp=cp, window=None))
        assert {segment.step for segment in segments} == {0}, "documents within their chunks meet no other rank's"
