"""Packing neither loses, repeats, splits nor reorders documents, and fills its packs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2kit.data.packing import plan_packs, plan_single

LENGTHS = st.lists(st.integers(1, 40), max_size=120)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(40, 80), st.integers(1, 50))
def test_every_document_once_in_order_and_within_its_pack(lengths: list[int], seq_len: int, window: int) -> None:
    plan = plan_packs(np.array(lengths), seq_len=seq_len, window=window)
    packs = [plan[pack].tolist() for pack in range(len(plan))]
    assert sorted(document for pack in packs for document in pack) == list(range(len(lengths)))
    assert all(pack and pack == sorted(pack) for pack in packs)
    assert all(sum(lengths[document] for document in pack) <= seq_len for pack in packs)
    assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)
    again = plan_packs(np.array(lengths), seq_len=seq_len, window=window)
    assert np.array_equal(plan.documents, again.documents)
    assert np.array_equal(plan.borders, again.borders)


def test_packs_are_nearly_full() -> None:
    lengths = np.minimum(2048, np.random.RandomState(0).lognormal(5, 1, 20000).astype(int) + 2)
    plan = plan_packs(lengths, seq_len=2048)
    assert lengths.sum() / (len(plan) * 2048) > 0.99


def test_a_pack_is_filled_by_what_fits_best() -> None:
    plan = plan_packs(np.array([6, 5, 4, 5, 3]), seq_len=10)
    assert [plan[pack].tolist() for pack in range(len(plan))] == [[0, 2], [1, 3], [4]]


def test_single_documents_keep_their_order() -> None:
    plan = plan_single(np.array([3, 1, 2]))
    assert [plan[pack].tolist() for pack in range(len(plan))] == [[0], [1], [2]]


@pytest.mark.parametrize("lengths", [[3, 11], [0, 3]])
def test_lengths_out_of_range(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="expected 1 to seq_len = 10"):
        plan_packs(np.array(lengths), seq_len=10)


@pytest.mark.parametrize(
    ("lengths", "window", "packs"),
    [
        ([7, 7, 3], 9, [[0, 2], [1]]),  # of two packs with the same room, the older one
        ([10, 7, 7, 3, 3], 9, [[0], [1, 3], [2, 4]]),  # nothing is put into a full one
        ([6, 5, 4, 5], 1, [[0], [1, 2], [3]]),  # at the end of a window the fullest is closed
    ],
)
def test_which_pack_is_filled(lengths: list[int], window: int, packs: list[list[int]]) -> None:
    plan = plan_packs(np.array(lengths), seq_len=10, window=window)
    assert [plan[pack].tolist() for pack in range(len(plan))] == packs
