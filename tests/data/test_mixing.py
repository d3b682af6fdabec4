"""A mix: shares, per-source epochs, and batches that are as pure as those of one source."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2kit.data.loader import Loader, Share, build_loader
from fsdp2kit.data.packing import furthest_behind, plan_mix, shares, source_epochs
from tests.data.helpers.documents import as_documents

SEQ_LEN, GLOBAL = 16, 4
MESHES = [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)]


def corpus(source: int, documents: int) -> list[list[tuple[int, bool]]]:
    """Documents of 12 tokens that say where they come from: 1000 × (source + 1) + document."""
    return [[(1000 * (source + 1) + number, True)] * 12 for number in range(documents)]


def mixed(sizes: list[int], epochs: list[float], *, dp: int = 1, rank: int = 0, micro: int = 1) -> Loader:
    sources = [as_documents(corpus(source, size)) for source, size in enumerate(sizes)]
    share, names = Share(SEQ_LEN, GLOBAL, micro, rank, dp, 1), [f"s{source}" for source in range(len(sizes))]
    return build_loader(sources, share=share, pack=True, shuffle=True, seed=5, names=names, epochs=epochs)


def firsts(batches) -> list[int]:
    """The first token of every row: which document it holds, and of which source."""
    return [ids[0] for batch in batches for ids in batch.input_ids.tolist()]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_every_stretch_has_nearly_the_shares_of_the_whole(counts: list[int]) -> None:
    mix = plan_mix(counts)
    assert np.bincount(mix.sources, minlength=len(counts)).tolist() == counts
    for source, count in enumerate(counts):
        assert mix.turns[mix.sources == source].tolist() == list(range(count))
        taken = np.cumsum(mix.sources == source)
        ideal = np.arange(1, len(mix) + 1) * count / len(mix)
        assert np.abs(taken - ideal).max() <= len(counts)


def test_shares_and_temperature() -> None:
    assert shares([3, 1], temperature=1.0) == pytest.approx([0.75, 0.25])
    assert shares([9, 1], temperature=2.0) == pytest.approx([0.75, 0.25])
    assert shares([1e12, 1], temperature=0.01) == pytest.approx([1, 0])
    of = {"tokens": [600, 200], "epochs": [None, None]}
    assert source_epochs(**of, weights=[None, None], temperature=1.0) == pytest.approx([1, 1])
    assert source_epochs(**of, weights=[1, 1], temperature=1.0) == pytest.approx([400 / 600, 2])
    assert source_epochs(**of, weights=[None, None], temperature=1e9) == pytest.approx([400 / 600, 2])
    assert source_epochs(tokens=[600, 200], epochs=[0.5, 3], weights=[None] * 2, temperature=1.0).tolist() == [0.5, 3]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=3),
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0]), min_size=3, max_size=3),
    st.integers(0, 20),
)
def test_a_global_batch_is_the_same_on_every_mesh(sizes, epochs, index) -> None:
    epochs = epochs[: len(sizes)]
    reference = [mixed(sizes, epochs, micro=GLOBAL).batch(index)]
    for dp, micro in MESHES:
        ranks = [mixed(sizes, epochs, dp=dp, rank=rank, micro=micro).batch(index) for rank in range(dp)]
        flat = [batch for batches in ranks for batch in batches]
        assert firsts(flat) == firsts(reference[0])
        counted = np.sum([batch.tokens_by_source for batch in flat], axis=0).tolist()
        assert counted == list(reference[0][0].tokens_by_source)
        assert sum(counted) == sum(batch.supervised_tokens for batch in flat)


def test_fractions_of_an_epoch_go_on_where_they_stopped() -> None:
    loader = mixed([8, 4], [0.5, 2.0])  # a pass: 4 rows of the first, 8 of the second
    assert (loader.packs_per_epoch, loader.steps_per_epoch) == (12, 3)
    passes = []
    for epoch in range(4):
        seen = [token for step in range(3) for token in firsts(loader.batch(epoch * 3 + step))]
        passes.append(seen)
        second = [token for token in seen if token >= 2000]
        assert sorted(second) == sorted(2 * [2000 + at for at in range(4)])
    first = [[token for token in seen if token < 2000] for seen in passes]
    assert sorted(first[0] + first[1]) == sorted(first[2] + first[3]) == [1000 + at for at in range(8)]
    assert first[0] + first[1] != first[2] + first[3], "shuffled anew"
    assert loader.tokens_per_epoch == 12 * 12
    assert loader.source_names == ("s0", "s1")


def test_a_source_without_a_weight_has_its_own_tokens() -> None:
    assert source_epochs([600, 200], weights=[None, 600], epochs=[None] * 2, temperature=1.0) == pytest.approx(
        [2 / 3, 2]
    )


@pytest.mark.parametrize(
    ("of", "tokens", "expected"),
    [([0.25, 0.75], [0, 0], 1), ([0.25, 0.75], [1, 2], 1), ([0.25, 0.75], [0, 3], 0), ([0.5, 0.5], [3, 3], 0)],
)
def test_the_source_that_lacks_most_tokens_of_its_share_is_next(
    of: list[float], tokens: list[int], expected: int
) -> None:
    assert furthest_behind(np.array(of), tokens) == expected
