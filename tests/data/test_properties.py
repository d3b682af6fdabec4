"""What must hold for any data, mesh and moment of stopping, against documents taken apart by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from fsdp2kit.data.documents import Documents
from fsdp2kit.data.loader import Batch, Loader, Share, build_loader
from fsdp2kit.model.loss_head import IGNORE
from fsdp2kit.parallel.context_parallel.batch import slice_batch
from fsdp2kit.parallel.context_parallel.layout import AttentionPath
from tests.data.helpers.documents import as_documents

SEQ_LEN, GLOBAL, PAD = 16, 8, 1
Method = Literal["ulysses", "ring"]
Mesh = tuple[int, int, int, Method]  # dp, cp, micro-batch size, context-parallel method
MESHES: list[Mesh] = [
    (dp, cp, micro, method)
    for dp in (1, 2, 4, 8)
    for cp in (1, 2, 4)
    for micro in (1, 2, 4)
    for method in ("ulysses", "ring")
    if 8 % (dp * micro) == 0
]
DOCUMENT = st.lists(st.tuples(st.integers(2, 90), st.booleans()), min_size=2, max_size=SEQ_LEN)
CORPUS = st.lists(DOCUMENT, min_size=1, max_size=40)
Rows = list[tuple[list[int], list[int], list[int]]]  # ids, labels and positions of each row of a global batch


def loader(documents: Documents, *, dp: int, rank: int, micro: int, **options) -> Loader:
    share = Share(SEQ_LEN, GLOBAL, micro, rank, dp, PAD)
    return build_loader([documents], share=share, **{"pack": True, "shuffle": True, "seed": 0, **options})


def whole_rows(batch: Batch, cp: int, method: Method) -> Rows:
    """A micro-batch put together from what each context-parallel rank's model is given of it."""
    parts: dict[int, list[torch.Tensor]] = {}
    for rank in range(cp):
        sharded = slice_batch(
            batch,
            config=LlamaConfig(num_hidden_layers=1),
            path=AttentionPath(method if cp > 1 else None, "sdpa"),
            cp_rank=rank,
            cp=cp,
            device=torch.device("cpu"),
        )
        held = torch.stack([sharded[name] for name in ("input_ids", "labels", "position_ids")])
        if method == "ulysses" or cp == 1:
            parts[rank] = [held]
        else:  # zigzag: one early stretch and one late
            parts[rank], parts[2 * cp - 1 - rank] = ([piece] for piece in held.chunk(2, dim=2))
    whole = torch.cat([piece for number in sorted(parts) for piece in parts[number]], dim=2)
    return list(zip(*whole.tolist(), strict=True))


def global_batch(documents: Documents, index: int, mesh: Mesh, **options) -> Rows:
    """The whole mesh's rows, put together from what each of its ranks computes on."""
    dp, cp, micro, method = mesh
    rows: Rows = []
    for rank in range(dp):
        for batch in loader(documents, dp=dp, rank=rank, micro=micro, **options).batch(index):
            assert batch.supervised_tokens == int((batch.labels != IGNORE).sum())
            assert batch.input_tokens == int((batch.input_ids != PAD).sum())
            rows += whole_rows(batch, cp, method)
    return rows


def taken_apart(rows: Rows) -> Iterator[list[tuple[int, bool]]]:
    """The documents in some rows, found by their positions alone; a first token counts as unsupervised."""
    for ids, labels, positions in rows:
        starts = [at for at, position in enumerate(positions) if position == 0]
        for start, stop in zip(starts, [*starts[1:], SEQ_LEN], strict=True):
            targets = [IGNORE, *labels[start : stop - 1]]
            assert labels[stop - 1] == IGNORE, "a document's last token has no target"
            assert positions[start:stop] == list(range(stop - start))
            assert all(target in (IGNORE, token) for token, target in zip(ids[start:stop], targets, strict=True))
            document = [(token, target != IGNORE) for token, target in zip(ids[start:stop], targets, strict=True)]
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
@given(
    CORPUS,
    st.lists(st.sampled_from(MESHES), min_size=2, max_size=4),
    st.integers(0, 9),
    st.fixed_dictionaries({"seed": st.integers(0, 3), "pack": st.booleans(), "shuffle": st.booleans()}),
)
def test_a_global_batch_is_the_same_on_every_mesh(corpus, meshes, index, options) -> None:
    documents = as_documents(corpus)
    first, *others = (global_batch(documents, index, mesh, **options) for mesh in meshes)
    assert len(first) == GLOBAL
    assert all(other == first for other in others)
