"""Global batches of data that is read whole, and the share of them that one data-parallel rank reads.

A global batch is a pure function of (documents, seed, index): neither the mesh nor the micro-batch size takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fsdp2kit.data.batch import Batch, Row, Share
from fsdp2kit.data.documents import Documents
from fsdp2kit.data.mixing import Mix, plan_mix
from fsdp2kit.data.packing import PackPlan, plan_packs, plan_single


@dataclass(frozen=True)
class Part:
    """One source's documents, packed into rows."""

    documents: Documents
    plan: PackPlan
    """Rows of documents, as positions in ``order``."""
    order: np.ndarray
    """int64 [documents]: the order in which documents were packed."""
    name: str = ""

    def read(self, row: int, source: int) -> Row:
        """The documents of a row."""
        return Row([self.documents[document] for document in self.order[self.plan[row]].tolist()], source)


@dataclass(frozen=True)
class Loader:
    """One data-parallel rank's view of the global batches; see `build_loader`."""

    parts: tuple[Part, ...]
    mix: Mix
    share: Share
    shuffle: bool
    seed: int

    @property
    def seq_len(self) -> int:
        return self.share.seq_len

    @property
    def rows_per_epoch(self) -> int:
        return len(self.mix)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch, the last one filled up with fully masked rows."""
        return -(-len(self.mix) // self.share.global_batch_size)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens in an epoch, without padding; for a mix with fractions, the mean over epochs."""
        tokens = [int(part.documents.lengths.sum()) / len(part.plan) for part in self.parts]
        return round(float(np.dot(tokens, self.mix.counts)))

    @property
    def packing_efficiency(self) -> float:
        """Tokens over places: 1 without any padding."""
        return self.tokens_per_epoch / (len(self.mix) * self.seq_len)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources of a mix; empty without a mix."""
        return tuple(part.name for part in self.parts) if len(self.parts) > 1 else ()

    def batch(self, index: int) -> list[Batch]:
        """This rank's micro-batches of global batch ``index`` (0-based, running on over epochs), in order.

        Only this rank's documents are read.
        """
        epoch, step = divmod(index, self.steps_per_epoch)
        first = step * self.share.global_batch_size
        return self.share.batches([self._row(epoch, first + at) for at in self.share.rows])

    def _row(self, epoch: int, position: int) -> Row:
        if position >= len(self.mix):
            return Row()  # fills up the last batch of an epoch
        source = int(self.mix.sources[position])
        part = self.parts[source]
        # How many rows of this source came before, in all epochs: its own passes go on where the last epoch stopped.
        turn = epoch * int(self.mix.counts[source]) + int(self.mix.turns[position])
        own_epoch, place = divmod(turn, len(part.plan))
        if self.shuffle:
            place = int(permutation(len(part.plan), self.seed, 1 + own_epoch, source)[place])  # 0 is that of documents
        return part.read(place, source)


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
    share = Share(seq_len, global_batch_size, micro_batch_size, dp_rank, dp_size, pad_id)
    part = build_part(documents, seq_len=seq_len, pack=pack, shuffle=shuffle, seed=seed)
    return build_mixed_loader([part], [1.0], share=share, shuffle=shuffle, seed=seed)


def build_part(
    documents: Documents, *, seq_len: int, pack: bool, shuffle: bool, seed: int, name: str = "", source: int = 0
) -> Part:
    """Pack one source's documents.

    Args:
        source: its number in the mix.
    """
    order = permutation(len(documents), seed, 0, source) if shuffle else np.arange(len(documents))
    lengths = documents.lengths[order]
    return Part(documents, plan_packs(lengths, seq_len=seq_len) if pack else plan_single(lengths), order, name)


def build_mixed_loader(
    parts: Sequence[Part], epochs: Sequence[float], *, share: Share, shuffle: bool, seed: int
) -> Loader:
    """The loader of a mix.

    Args:
        epochs: how often one pass over the mix goes through each part.
    """
    counts = [max(1, round(times * len(part.plan))) for times, part in zip(epochs, parts, strict=True)]
    return Loader(tuple(parts), plan_mix(counts), replace(share, sources=len(parts)), shuffle, seed)


@lru_cache(maxsize=32)
def permutation(count: int, seed: int, stream: int, source: int = 0) -> np.ndarray:
    """A permutation of ``range(count)``, the same on every machine and numpy: PCG64's raw bits never change."""
    entropy = [seed, stream, source] if source else [seed, stream]
    shuffled = np.argsort(np.random.PCG64(entropy).random_raw(count), kind="stable")
    shuffled.flags.writeable = False  # it is shared
    return shuffled
