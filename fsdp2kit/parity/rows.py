"""Synthetic rows that both sides of a comparison train on. `Batch`, the loader's container, feeds them to our loop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fsdp2kit.data.batch import Batch

IGNORED = -100


@dataclass(frozen=True)
class Rows:
    """A global batch, ``[B, S]`` each: token ids, shifted labels (−100 ignored), positions restarting at documents."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor

    @property
    def targets(self) -> int:
        """Labels that are not ignored."""
        return int((self.labels != IGNORED).sum())

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.input_ids[rows], self.labels[rows], self.position_ids[rows])

    def split(self, size: int) -> list[Rows]:
        """Micro-batches of ``size`` rows."""
        return [self[at : at + size] for at in range(0, len(self.input_ids), size)]

    def as_batch(self) -> Batch:
        """What our loader would hand out for these rows."""
        lengths = [length for row in self.position_ids for length in document_lengths(row)]
        return Batch(
            self.input_ids,
            self.labels,
            self.position_ids,
            supervised_tokens=self.targets,
            input_tokens=self.input_ids.numel(),
            attention_pairs=sum(length**2 for length in lengths),
        )


def document_lengths(positions: Tensor) -> list[int]:
    """Lengths of the documents of a row, from its restarting positions."""
    starts = [*(positions == 0).nonzero().squeeze(1).tolist(), len(positions)]
    return [stop - start for start, stop in itertools.pairwise(starts)]


def make_rows(seed: int, *, rows: int, length: int, vocabulary: int) -> Rows:
    """Packed rows of random documents: short ones, one as long as its row, a padded row, unequal numbers of targets.

    Documents are supervised from a random place on, so some rows have many targets and some few.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, (rows, length))
    labels, positions = np.full((rows, length), IGNORED), np.zeros((rows, length), dtype=np.int64)
    for row in range(rows):
        start = 0
        while start < length:
            size = length if row == 0 else int(rng.integers(2, length // 2))
            stop = min(start + size, length)
            positions[row, start:stop] = np.arange(stop - start)
            prompt = int(rng.integers(0, stop - start))
            labels[row, start + prompt : stop - 1] = ids[row, start + prompt + 1 : stop]
            start = stop
        if row == rows - 1:
            labels[row, length // 2 :] = IGNORED  # as padding is
    return Rows(*(torch.from_numpy(array.astype(np.int64)) for array in (ids, labels, positions)))


def _whole_rows(seed: int, *, rows: int, length: int, vocabulary: int) -> Rows:
    """Rows of one document each, the first quarter a prompt; the first row ends in the middle, as padding would do."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, (rows, length + 1))
    labels = ids[:, 1:].copy()
    labels[:, : length // 4] = IGNORED
    labels[0, length // 2 :] = IGNORED
    positions = np.tile(np.arange(length), (rows, 1))
    return Rows(*(torch.from_numpy(array.astype(np.int64)) for array in (ids[:, :-1], labels, positions)))


def make_batches(
    steps: int, *, seed: int = 0, rows: int, length: int, vocabulary: int, pack: bool = True
) -> list[Rows]:
    """One global batch a step, of packed rows, or of rows that are one document each."""
    make = make_rows if pack else _whole_rows
    return [make(seed * 1000 + step, rows=rows, length=length, vocabulary=vocabulary) for step in range(steps)]


@dataclass(frozen=True)
class DealtOut:
    """Global batches as our loop reads them: a data-parallel rank's rows, in micro-batches."""

    batches: Sequence[Rows]
    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return len(self.batches)

    def batch(self, index: int) -> list[Batch]:
        batch = self.batches[index]
        share = len(batch.input_ids) // self.dp_size
        mine = batch[self.dp_rank * share : (self.dp_rank + 1) * share]
        return [micro.as_batch() for micro in mine.split(self.micro_batch_size)]
