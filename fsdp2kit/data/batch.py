"""Micro-batches: rows of documents as the tensors that a model is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fsdp2kit.data.documents import Document
from fsdp2kit.data.formats import IGNORED
from fsdp2kit.errors import UserError

# Padding is cut into documents so short that attention over them costs next to nothing.
_PADDING = 64


@dataclass(frozen=True)
class Row:
    """The documents that share a row of a batch, all of one source. None of them: a row that fills a batch up."""

    documents: Sequence[Document] = ()
    source: int = 0


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank, on the CPU."""

    input_ids: Tensor
    """int64 [B, S]."""
    labels: Tensor
    """int64 [B, S], shifted: ``labels[:, t]`` is the target after token ``t``; −100 is ignored."""
    position_ids: Tensor
    """int64 [B, S], from 0 at every document; padding is short documents of its own."""
    supervised_tokens: int
    """Labels other than −100."""
    input_tokens: int
    """Tokens that are not padding."""
    attention_pairs: int
    """Sum over documents of length², for counting floating-point operations; padding is left out."""
    tokens_by_source: tuple[int, ...] = ()
    """Supervised tokens of each source of a mix; empty without a mix."""
    sources: Tensor | None = None
    """int64 [B]: the source of each row of a mix; None without a mix."""

    @property
    def places(self) -> int:
        """B × S: tokens and padding."""
        return self.input_ids.numel()


@dataclass(frozen=True)
class Share:
    """How a global batch of rows is cut into the micro-batches of one data-parallel rank."""

    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    pad_id: int
    sources: int = 1

    def __post_init__(self) -> None:
        if self.global_batch_size % (self.dp_size * self.micro_batch_size):
            raise UserError(
                "train.global_batch_size",
                f"{self.global_batch_size} is not a multiple of dp {self.dp_size} × micro_batch_size "
                f"{self.micro_batch_size}",
                f"use a multiple of {self.dp_size * self.micro_batch_size}",
            )

    @property
    def rows(self) -> range:
        """Which rows of a global batch this rank reads."""
        count = self.global_batch_size // self.dp_size
        return range(self.dp_rank * count, (self.dp_rank + 1) * count)

    def batches(self, rows: Sequence[Row]) -> list[Batch]:
        """The micro-batches of this rank's rows, in order."""
        size = self.micro_batch_size
        return [self._batch(rows[at : at + size]) for at in range(0, len(rows), size)]

    def _batch(self, rows: Sequence[Row]) -> Batch:
        shape = len(rows), self.seq_len
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        position_ids = np.zeros(shape, dtype=np.int64)
        tokens = pairs = 0
        by_source = [0] * self.sources
        for line, row in enumerate(rows):
            start = 0
            for ids, supervised in row.documents:
                stop = start + len(ids)
                input_ids[line, start:stop] = ids
                labels[line, start : stop - 1] = np.where(supervised[1:], ids[1:], IGNORED)
                position_ids[line, start:stop] = np.arange(len(ids))
                tokens, pairs, start = tokens + len(ids), pairs + len(ids) ** 2, stop
            position_ids[line, start:] = np.arange(self.seq_len - start) % _PADDING
            by_source[row.source] += int((labels[line] != IGNORED).sum())
        return Batch(
            torch.from_numpy(input_ids),
            torch.from_numpy(labels),
            torch.from_numpy(position_ids),
            supervised_tokens=sum(by_source),
            input_tokens=tokens,
            attention_pairs=pairs,
            tokens_by_source=tuple(by_source) if self.sources > 1 else (),
            sources=torch.tensor([row.source for row in rows]) if self.sources > 1 else None,
        )
