"""What must hold for any data, mesh and moment of stopping, against documents taken apart by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from fsdp2kit.data.batch import Batch
from fsdp2kit.data.documents import Documents, Report
from fsdp2kit.data.formats import IGNORED
from fsdp2kit.data.loader import Loader, build_loader
from fsdp2kit.parallel.context_parallel.batch import shard_batch

SEQ_LEN, GLOBAL, PAD = 16, 8, 1
MESHES = [(dp, cp, micro) for dp in (1, 2, 4, 8) for cp in (1, 2, 4) for micro in (1, 2, 4) if 8 % (dp * micro) == 0]
DOCUMENT = st.lists(st.tuples(st.integers(2, 90), st.booleans()), min_size=2, max_size=SEQ_LEN)
CORPUS = st.lists(DOCUMENT, min_size=1, max_size=40)
Rows = list[tuple[list[int], list[int], list[int]]]  # ids, labels and positions of each row of a global batch


def as_documents(corpus: list[list[tuple[int, bool]]]) -> Documents:
    def read(index: int) -> tuple[np.ndarray, np.ndarray]:
        ids, supervised = zip(*corpus[index], strict=True)
        return np.array(ids), np.array(supervised)

    lengths = np.array([len(document) for document in corpus])
    return Documents(lengths, "x", Report(len(corpus), len(corpus), int(lengths.sum()), 0, 0, 0, 0, 0), 90, read)


def loader(documents: Documents, *, dp: int, rank: int, micro: int, pack: bool = True, seed: int = 0) -> Loader:
    return build_loader(
        documents,
        seq_len=SEQ_LEN,
        pack=pack,
        shuffle=True,
        global_batch_size=GLOBAL,
        micro_batch_size=micro,
        dp_rank=rank,
        dp_size=dp,
        seed=seed,
        pad_id=PAD,
    )


def part(batch: Batch, cp_rank: int, cp: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a context-parallel rank's model is given of a micro-batch."""
    sharded = shard_batch(
        batch.input_ids,
        batch.labels,
        batch.position_ids,
        config=LlamaConfig(num_hidden_layers=1),
        attention="sdpa",
        cp_rank=cp_rank,
        cp_size=cp,
        device=torch.device("cpu"),
    )
    return sharded.input_ids, sharded.labels, sharded.position_ids


def global_batch(documents: Documents, index: int, mesh: tuple[int, int, int], **options) -> Rows:
    """The whole mesh's rows, put together from what each of its ranks computes on."""
    dp, cp, micro = mesh
    rows: Rows = []
    for rank in range(dp):
        for batch in loader(documents, dp=dp, rank=rank, micro=micro, **options).batch(index):
            parts = [part(batch, cp_rank, cp) for cp_rank in range(cp)]
            whole = [torch.cat(pieces, dim=1).tolist() for pieces in zip(*parts, strict=True)]
            rows += zip(*whole, strict=True)
    return rows


def taken_apart(rows: Rows) -> Iterator[list[tuple[int, bool]]]:
    """The documents in some rows, found by their positions alone; a first token counts as unsupervised."""
    for ids, labels, positions in rows:
        starts = [at for at, position in enumerate(positions) if position == 0]
        for start, stop in zip(starts, [*starts[1:], SEQ_LEN], strict=True):
            targets = [IGNORED, *labels[start : stop - 1]]
            assert labels[stop - 1] == IGNORED, "a document's last token has no target"
            assert positions[start:stop] == list(range(stop - start))
            assert all(target in (IGNORED, token) for token, target in zip(ids[start:stop], targets, strict=True))
            document = [(token, target != IGNORED) for token, target in zip(ids[start:stop], targets, strict=True)]
            if document != [(PAD, False)] * len(document):
                yield document


@settings(max_examples=25, deadline=None)
@given(CORPUS, st.booleans(), st.sampled_from(MESHES), st.integers(0, 2))
def test_an_epoch_gives_back_every_token_once_and_in_order(corpus, pack, mesh, epoch) -> None:
    documents = as_documents(corpus)
    steps = loader(documents, dp=1, rank=0, micro=1, pack=pack).steps_per_epoch
    rows = [row for at in range(steps) for row in global_batch(documents, epoch * steps + at, mesh, pack=pack)]
    expected = [[(document[0][0], False), *document[1:]] for document in corpus]
    assert sorted(taken_apart(rows)) == sorted(expected)


@settings(max_examples=25, deadline=None)
@given(CORPUS, st.lists(st.sampled_from(MESHES), min_size=2, max_size=4), st.integers(0, 9), st.integers(0, 3))
def test_a_global_batch_is_the_same_on_every_mesh(corpus, meshes, index, seed) -> None:
    documents = as_documents(corpus)
    first, *others = (global_batch(documents, index, mesh, seed=seed) for mesh in meshes)
    assert len(first) == GLOBAL
    assert all(other == first for other in others)


@settings(max_examples=25, deadline=None)
@given(CORPUS, st.lists(st.tuples(st.integers(0, 3), st.sampled_from(MESHES)), min_size=1, max_size=4))
def test_stopped_anywhere_and_taken_up_on_another_mesh(corpus, legs) -> None:
    documents = as_documents(corpus)
    stream: list[Rows] = []
    for steps, mesh in legs:
        stream += [global_batch(documents, len(stream) + at, mesh) for at in range(steps)]
    assert stream == [global_batch(documents, index, (1, 1, 8)) for index in range(len(stream))]
