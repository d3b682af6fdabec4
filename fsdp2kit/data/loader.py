"""Global batches, and the share of them that one data-parallel rank reads.

A global batch is a pure function of (documents, seed, index): neither the mesh nor the micro-batch size takes part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fsdp2kit.data.documents import Documents
from fsdp2kit.data.packing import PackPlan, plan_packs, plan_single
from fsdp2kit.errors import UserError

IGNORED = -100  # cross-entropy's ignore_index
_EMPTY = -1  # a row that fills up the last batch of an epoch


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank, on the CPU."""

    input_ids: Tensor
    """int64 [B, S]."""
    labels: Tensor
    """int64 [B, S], shifted: ``labels[:, t]`` is the target after token ``t``; −100 is ignored."""
    position_ids: Tensor
    """int64 [B, S], from 0 at every document; padding is a document of its own."""
    supervised_tokens: int
    """Labels other than −100."""
    input_tokens: int
    """Tokens that are not padding."""
    attention_pairs: int
    """Sum over documents of length², for counting floating-point operations; padding is left out."""


@dataclass(frozen=True)
class Loader:
    """One data-parallel rank's view of the global batches; see `build_loader`."""

    documents: Documents
    plan: PackPlan
    """Rows of documents, as positions in ``document_order``."""
    document_order: np.ndarray
    """int64 [documents]: the order in which documents were packed."""
    seq_len: int
    shuffle: bool
    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    seed: int
    pad_id: int

    @property
    def rows_per_epoch(self) -> int:
        return len(self.plan)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch, the last one filled up with fully masked rows."""
        return -(-len(self.plan) // self.global_batch_size)

    @property
    def packing_efficiency(self) -> float:
        """Tokens over places: 1 without any padding."""
        return float(self.documents.lengths.sum()) / (len(self.plan) * self.seq_len)

    def batch(self, index: int) -> list[Batch]:
        """This rank's micro-batches of global batch ``index`` (0-based, running on over epochs), in order.

        Only this rank's documents are read.
        """
        epoch, step = divmod(index, self.steps_per_epoch)
        share = self.global_batch_size // self.dp_size
        first = step * self.global_batch_size + self.dp_rank * share
        rows = self._epoch_order(epoch)[first : first + share].tolist()
        rows += [_EMPTY] * (share - len(rows))
        return [
            self._micro_batch(rows[at : at + self.micro_batch_size]) for at in range(0, share, self.micro_batch_size)
        ]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.plan))
        return _permutation(len(self.plan), self.seed, 1 + epoch)  # 0 is the order of the documents

    def _micro_batch(self, rows: list[int]) -> Batch:
        shape = len(rows), self.seq_len
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        position_ids = np.zeros(shape, dtype=np.int64)
        tokens = pairs = 0
        for line, row in enumerate(rows):
            start = 0
            for document in self.document_order[self.plan[row]].tolist() if row != _EMPTY else []:
                ids, supervised = self.documents[document]
                stop = start + len(ids)
                input_ids[line, start:stop] = ids
                labels[line, start : stop - 1] = np.where(supervised[1:], ids[1:], IGNORED)
                position_ids[line, start:stop] = np.arange(len(ids))
                tokens, pairs, start = tokens + len(ids), pairs + len(ids) ** 2, stop
            position_ids[line, start:] = np.arange(self.seq_len - start)
        return Batch(
            torch.from_numpy(input_ids),
            torch.from_numpy(labels),
            torch.from_numpy(position_ids),
            supervised_tokens=int((labels != IGNORED).sum()),
            input_tokens=tokens,
            attention_pairs=pairs,
        )


def build_loader(
    documents: Documents,
    *,
    seq_len: int,
    pack: bool,
    shuffle: bool,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    seed: int,
    pad_id: int,
) -> Loader:
    """Plan the rows once, from the documents' lengths; every rank comes to the same plan.

    Args:
        seq_len: tokens in a row, at least the longest document's.
        pack: put several documents into a row; otherwise each is padded to ``seq_len``.
        shuffle: permute the documents before they are packed, and the rows in every epoch, by ``seed``.
        global_batch_size: rows in a global batch; rank r reads rows [r × n, (r + 1) × n) of it, n = global ÷ dp_size.
        micro_batch_size: rows in a `Batch`.
        pad_id: input token of padding, which is never a target.

    Raises:
        UserError: ``global_batch_size`` is not a multiple of ``dp_size × micro_batch_size``.
        ValueError: a document is longer than ``seq_len``.
    """
    if global_batch_size % (dp_size * micro_batch_size):
        raise UserError(
            "train.global_batch_size",
            f"{global_batch_size} is not a multiple of dp {dp_size} × micro_batch_size {micro_batch_size}",
            f"use a multiple of {dp_size * micro_batch_size}",
        )
    order = _permutation(len(documents), seed, 0) if shuffle else np.arange(len(documents))
    lengths = documents.lengths[order]
    return Loader(
        documents=documents,
        plan=plan_packs(lengths, seq_len=seq_len) if pack else plan_single(lengths),
        document_order=order,
        seq_len=seq_len,
        shuffle=shuffle,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        seed=seed,
        pad_id=pad_id,
    )


@lru_cache(maxsize=8)
def _permutation(count: int, seed: int, stream: int) -> np.ndarray:
    """A permutation of ``range(count)``, the same on every machine and numpy: PCG64's raw bits never change."""
    permutation = np.argsort(np.random.PCG64([seed, stream]).random_raw(count), kind="stable")
    permutation.flags.writeable = False  # it is shared
    return permutation
