"""Global batches: the same rows for any mesh and micro-batch, pure in the index, exact over an epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from fsdp2kit.data.documents import Counts, Documents
from fsdp2kit.data.loader import Batch, Loader, Share, batch_of, build_loader, permutation
from fsdp2kit.errors import UserError
from fsdp2kit.model.loss_head import IGNORE

PAD = 7


def make_documents(lengths: list[int], *, together: int = 1) -> Documents:
    """Document i holds the tokens 1000 i, 1000 i + 1, …; every third token is unsupervised."""

    def read(index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = 1000 * (index + 1) + np.arange(lengths[index])
        return ids, ids % 3 > 0

    report = Counts(len(lengths), len(lengths), sum(lengths), 0)
    return Documents(np.array(lengths, dtype=np.int64), "x", report, 10**6, read, together=together)


def make_loader(documents: Documents, *, pack: bool = True, shuffle: bool = True, seed: int = 3, **share) -> Loader:
    own = Share(**{"seq_len": 16, "global_batch_size": 4, "pad_id": PAD, **share})
    return build_loader([documents], share=own, pack=pack, shuffle=shuffle, seed=seed)


def rows(batches: list[Batch]) -> tuple[list, list, list]:
    parts = [(batch.input_ids, batch.labels, batch.position_ids) for batch in batches]
    return tuple(torch.cat(part).tolist() for part in zip(*parts, strict=True))


def test_labels_are_shifted_and_stay_within_their_document() -> None:
    loader = make_loader(make_documents([4, 3, 9]), shuffle=False, seq_len=8 + 4, global_batch_size=2)
    ids, labels, positions = rows(loader.batch(0))
    assert ids == [[*range(1000, 1004)] + [PAD] * 8, [*range(2000, 2003), *range(3000, 3009)]]
    assert positions == [[*range(4), *range(8)], [*range(3), *range(9)]]
    for row_ids, row_labels, row_positions in zip(ids, labels, positions, strict=True):
        for at in range(12):
            follows = at + 1 < 12 and row_positions[at + 1] == row_positions[at] + 1 and row_ids[at] != PAD
            target = row_ids[at + 1] if follows and row_ids[at + 1] % 3 else IGNORE
            assert row_labels[at] == target


def test_a_short_last_batch_is_filled_with_masked_rows() -> None:
    loader = make_loader(make_documents([16] * 5))
    assert (loader.packs_per_epoch, loader.steps_per_epoch) == (5, 2)
    last = loader.batch(1)
    assert [batch.input_tokens for batch in last] == [16, 0, 0, 0]
    empty = last[-1]
    assert empty.input_ids.tolist() == [[PAD] * 16]
    assert empty.labels.tolist() == [[IGNORE] * 16]
    assert empty.position_ids.tolist() == [list(range(16))]
    assert (empty.supervised_tokens, empty.attention_pairs) == (0, 0)
    assert all(tensor.dtype == torch.int64 for tensor in (empty.input_ids, empty.labels, empty.position_ids))


def test_micro_batches_without_pairs_number_their_documents_as_the_others_do() -> None:
    """A loss of pairs reads the numbers on every rank; a rank may have nothing but filling rows."""
    loader = make_loader(make_documents([6, 6, 7, 7], together=2), micro_batch_size=2)
    with_pairs, empty = loader.batch(0)
    assert with_pairs.per_target["documents"].max() == 3
    assert (empty.per_target["documents"] == -1).all()


def test_batches_are_pure_in_the_index_and_epochs_differ() -> None:
    documents = make_documents([5, 9, 12, 3, 16, 7, 11, 2, 6] * 4)
    loader = make_loader(documents)
    forwards = [rows(loader.batch(index)) for index in range(2 * loader.steps_per_epoch)]
    again = make_loader(documents)
    assert [rows(again.batch(index)) for index in reversed(range(2 * loader.steps_per_epoch))] == forwards[::-1]
    assert forwards[: loader.steps_per_epoch] != forwards[loader.steps_per_epoch :]
    assert forwards != [rows(make_loader(documents, seed=4).batch(at)) for at in range(len(forwards))]
    plain = make_loader(documents, shuffle=False, pack=False)
    assert rows(plain.batch(0))[0][0][:5] == [1000, 1001, 1002, 1003, 1004]
    assert rows(plain.batch(0)) == rows(plain.batch(plain.steps_per_epoch))


def test_only_the_own_share_is_read() -> None:
    documents, seen = make_documents([16] * 8), []
    spy = Documents(
        documents.lengths, "x", documents.report, 0, lambda index: (seen.append(index), documents.read(index))[1]
    )
    make_loader(spy, shuffle=False, dp_rank=1, dp_size=2).batch(0)
    assert seen == [2, 3]


def test_the_counts_of_a_batch() -> None:
    documents = make_documents([8, 8, 12])
    [batch] = make_loader(documents, global_batch_size=2, micro_batch_size=2).batch(0)
    assert (batch.capacity, batch.input_tokens, batch.attention_pairs) == (2 * 16, 28, 64 + 64 + 144)
    assert batch.supervised_tokens == sum(int(documents[at][1][1:].sum()) for at in range(3)) < 28


def test_packing_efficiency() -> None:
    assert make_loader(make_documents([8, 8, 12])).packing_efficiency == 28 / 32
    assert make_loader(make_documents([8, 8, 12]), pack=False).packing_efficiency == 28 / 48


def test_an_indivisible_batch() -> None:
    with pytest.raises(UserError, match="4 is not a multiple of dp 2 × micro_batch_size 3; use 6,"):
        make_loader(make_documents([4]), dp_size=2, micro_batch_size=3)


def test_padding_is_cut_into_documents_of_64_tokens() -> None:
    [batch] = make_loader(make_documents([4]), seq_len=200, global_batch_size=1).batch(0)
    assert batch.position_ids.tolist() == [[*range(4), *range(64), *range(64), *range(64), *range(4)]]


def test_a_row_is_found_by_its_number_in_any_epoch() -> None:
    loader = make_loader(make_documents([16, 12, 15, 11, 13]), dp_rank=1, dp_size=2, micro_batch_size=2)
    seen = []
    for index in range(3 * loader.steps_per_epoch):
        for batch in loader.batch(index):
            seen += batch.rows
            for ids, number, length in zip(batch.input_ids, batch.rows, batch.lengths, strict=True):
                documents = [one for one, _ in loader.row(number).documents]
                assert np.concatenate([np.array([], dtype=int), *documents]).tolist() == ids[:length].tolist()
    assert seen == [number for number in range(1, 25) if (number - 1) % 4 >= 2]


def test_rows_at_hand_are_filled_up_to_a_multiple_and_over_the_ranks() -> None:
    ids = torch.arange(1, 16).view(3, 5)
    positions = torch.tensor([[0, 1, 2, 0, 1]] * 3)
    of = {"dp_size": 2, "length_multiple": 4}
    parts = [batch_of(ids, ids + 1, positions, dp_rank=rank, **of) for rank in range(2)]
    found, labels, places = rows(parts)
    assert found == pad(ids, (0, 3, 0, 1)).tolist()
    assert labels == pad(ids + 1, (0, 3, 0, 1), value=IGNORE).tolist()
    assert places == [[0, 1, 2, 0, 1, 0, 1, 2]] * 3 + [list(range(8))]
    assert [part.lengths.tolist() for part in parts] == [[5, 5], [5, 0]]
    counts = [(part.supervised_tokens, part.input_tokens, part.attention_pairs) for part in parts]
    assert counts == [(10, 10, 2 * (9 + 4)), (5, 5, 9 + 4)]


def test_a_permutation_is_that_of_its_bits_and_of_each_argument() -> None:
    bits = np.random.Generator(np.random.PCG64([3, 1])).integers(2**64, size=50, dtype=np.uint64)
    assert permutation(50, 3, 1).tolist() == sorted(range(50), key=lambda at: bits[at])
    orders = [(3, 1, 0), (4, 1, 0), (3, 2, 0), (3, 1, 1), (3, 1, 2)]
    assert len({tuple(permutation(50, *order).tolist()) for order in orders}) == len(orders)
