"""Random tokens in documents of random lengths: what models are timed on where no data is at hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fsdp2kit.data.batch import Batch
from fsdp2kit.data.formats import IGNORED


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much is run of each variant."""

    seq_len: int = 8192
    """Tokens a row."""
    rows: int = 1
    """Rows a forward pass."""
    micro_batches: int = 1
    """Forward passes a step."""
    steps: int = 15
    """Optimizer steps of a variant."""
    warmup: int = 5
    """Of these, how many do not count."""

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.seq_len * self.rows * self.micro_batches


DRY_RUN = Workload(seq_len=64, rows=2, steps=3, warmup=1)


@dataclass(frozen=True)
class SyntheticBatches:
    """Documents packed into rows without padding; a loader for one rank."""

    vocab_size: int
    workload: Workload
    steps_per_epoch: int = 1_000_000

    def batch(self, index: int, /) -> list[Batch]:
        """Global batch ``index``, a function of it alone."""
        generator = np.random.default_rng(index)
        return [self._micro_batch(generator) for _ in range(self.workload.micro_batches)]

    def _micro_batch(self, generator: np.random.Generator) -> Batch:
        shape = self.workload.rows, self.workload.seq_len
        ids = generator.integers(0, self.vocab_size, size=shape)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        pairs = 0
        for row in range(shape[0]):
            start = 0
            while start < shape[1]:
                length = min(int(generator.integers(shape[1] // 16, shape[1] // 2)), shape[1] - start)
                stop = start + length
                positions[row, start:stop] = np.arange(length)
                labels[row, start : stop - 1] = ids[row, start + 1 : stop]
                pairs, start = pairs + length**2, stop
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(labels),
            torch.from_numpy(positions),
            supervised_tokens=int((labels != IGNORED).sum()),
            input_tokens=ids.size,
            attention_pairs=pairs,
        )
