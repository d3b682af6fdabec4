"""Packs → global batches → a data-parallel rank's share, as micro-batches of tensors.

A global batch is a pure function of (documents, seed, index): neither the mesh nor the micro-batch size takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fsdp2kit.config.checks import resolve_accumulation
from fsdp2kit.console import progress_bar
from fsdp2kit.data.documents import Document, Documents
from fsdp2kit.data.packing import Mix, PackPlan, plan_mix, plan_packs, plan_single
from fsdp2kit.model.loss_head import IGNORE

# Padding is cut into documents so short that attention over them costs next to nothing.
_PADDING = 64


@dataclass(frozen=True)
class Pack:
    """The documents of one sequence, all of one source. An empty pack fills up a batch."""

    documents: Sequence[Document] = ()
    source: int = 0
    together: int = 1
    """Neighbouring documents that belong together: 2 for the two answers of a preference."""
    per_token: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)
    """More inputs of an objective, by name: for each document, float32 [L], one value a token."""


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
    """Sum over documents of length², without padding, to count floating-point operations."""
    tokens_by_source: tuple[int, ...] = ()
    """Supervised tokens of each source of a mix; empty without a mix."""
    sources: Tensor | None = None
    """int64 [B]: the source of each pack of a mix; None without a mix."""
    per_target: Mapping[str, Tensor] = field(default_factory=dict)
    """More inputs of an objective, by name: [B, S], one value a label. Preferences have ``documents``, int64: the
    number of each token's document in the micro-batch. Pair p has the better answer 2p and the worse one 2p + 1;
    padding has −1."""
    rows: range = range(0)
    """The numbers of its packs in the order of training, from 1; empty if they have none."""
    num_documents: int = 0
    """Documents in ``per_target["documents"]``; 0 without preferences."""
    lengths: Tensor | None = None
    """int64 [B]: how many tokens of each row come before its padding; None: rows have no padding."""

    @property
    def num_items(self) -> int:
        """What a summed loss is normalised by: supervised tokens, or pairs of preferences."""
        return self.num_documents // 2 if self.num_documents else self.supervised_tokens

    @property
    def capacity(self) -> int:
        """B × S: tokens and padding."""
        return self.input_ids.numel()


def batch_of(
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    length_multiple: int = 1,
) -> Batch:
    """A data-parallel rank's rows of a global batch that is at hand as tensors, as one micro-batch.

    Where ``dp_size`` does not divide the rows, rows without a target fill the batch up; where ``length_multiple`` does
    not divide their length, tokens without a target.

    Args:
        input_ids: int64 ``[B, S]`` on the host, as are the others.
        labels: shifted, −100 is no target.
        position_ids: from 0 in every row and at every document.
    """
    count, length = input_ids.shape
    rows = -(-count // dp_size)
    padded_length = -(-length // length_multiple) * length_multiple
    mine = slice(dp_rank * rows, (dp_rank + 1) * rows)
    lengths = torch.zeros(rows, dtype=torch.int64)
    lengths[: len(input_ids[mine])] = length

    def fill(values: Tensor, padding: Tensor) -> Tensor:
        if values.shape == padding.shape:
            return values
        padding[: values.shape[0], :length] = values
        return padding

    shape = (rows, padded_length)
    tokens = fill(input_ids[mine], torch.zeros(shape, dtype=torch.int64))
    targets = fill(labels[mine], torch.full(shape, IGNORE, dtype=torch.int64))
    # The padding of a row begins a document of its own.
    of_padding = torch.zeros(shape, dtype=torch.int64)
    of_padding[:] = torch.arange(padded_length) % _PADDING
    of_padding[: len(input_ids[mine]), length:] = torch.arange(padded_length - length) % _PADDING
    positions = fill(position_ids[mine], of_padding)
    return Batch(
        tokens,
        targets,
        positions,
        supervised_tokens=int((targets != IGNORE).sum()),
        input_tokens=int(lengths.sum()),
        attention_pairs=_pairs(positions, lengths),
        lengths=None if bool((lengths == padded_length).all()) else lengths,
    )


def _pairs(position_ids: Tensor, lengths: Tensor) -> int:
    """Sum of length² over the documents of each row's first ``lengths`` tokens."""
    pairs = 0
    for positions, length in zip(position_ids, lengths.tolist(), strict=True):
        starts = (positions[:length] == 0).nonzero().squeeze(1)
        sizes = torch.diff(starts, append=torch.tensor([length]))
        pairs += int(sizes.square().sum())
    return pairs


@dataclass(frozen=True)
class Share:
    """The packs of a global batch that one data-parallel rank reads: [r × n, (r + 1) × n), n = global ÷ dp_size."""

    seq_len: int
    global_batch_size: int
    micro_batch_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    pad_id: int = 0
    """Input token of padding, which is never a target."""

    def __post_init__(self) -> None:
        resolve_accumulation(self.global_batch_size, self.micro_batch_size, dp=self.dp_size)

    @property
    def packs(self) -> range:
        """The numbers of the packs of a global batch that this rank reads."""
        count = self.global_batch_size // self.dp_size
        return range(self.dp_rank * count, (self.dp_rank + 1) * count)

    def batches(self, packs: Sequence[Pack], *, sources: int, index: int | None = None) -> list[Batch]:
        """The micro-batches of this rank's packs, in order.

        Args:
            sources: the number of a mix's sources.
            index: of the global batch, if its packs have numbers.
        """
        size = self.micro_batch_size
        rows = range(0)
        if index is not None:
            first = 1 + index * self.global_batch_size + self.packs.start
            rows = range(first, first + len(packs))
        return [self._batch(packs[at : at + size], sources, rows[at : at + size]) for at in range(0, len(packs), size)]

    def _batch(self, packs: Sequence[Pack], sources: int, rows: range) -> Batch:
        shape = len(packs), self.seq_len
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        position_ids = np.zeros(shape, dtype=np.int64)
        lengths = np.zeros(len(packs), dtype=np.int64)
        pairs = 0
        by_source = [0] * sources
        values = {name: np.zeros(shape, dtype=np.float32) for pack in packs for name in pack.per_token}
        has_pairs = any(pack.together > 1 for pack in packs)
        document_ids = np.full(shape, -1, dtype=np.int64)
        count = 0
        for line, pack in enumerate(packs):
            start = 0
            for number, (ids, supervised) in enumerate(pack.documents):
                stop = start + len(ids)
                input_ids[line, start:stop] = ids
                labels[line, start : stop - 1] = np.where(supervised[1:], ids[1:], IGNORE)
                position_ids[line, start:stop] = np.arange(len(ids))
                document_ids[line, start:stop] = count
                for name, of_documents in pack.per_token.items():
                    values[name][line, start : stop - 1] = of_documents[number][1:]
                count += 1
                pairs += len(ids) ** 2
                start = stop
            lengths[line] = start
            position_ids[line, start:] = np.arange(self.seq_len - start) % _PADDING
            by_source[pack.source] += int((labels[line] != IGNORE).sum())
        values |= {"documents": document_ids} if has_pairs else {}
        return Batch(
            torch.from_numpy(input_ids),
            torch.from_numpy(labels),
            torch.from_numpy(position_ids),
            supervised_tokens=sum(by_source),
            input_tokens=int(lengths.sum()),
            attention_pairs=pairs,
            tokens_by_source=tuple(by_source) if sources > 1 else (),
            sources=torch.tensor([pack.source for pack in packs]) if sources > 1 else None,
            per_target={name: torch.from_numpy(value) for name, value in values.items()},
            num_documents=count if has_pairs else 0,
            rows=rows,
            lengths=torch.from_numpy(lengths),
        )


@dataclass(frozen=True)
class Part:
    """One source's documents and their packs."""

    documents: Documents
    plan: PackPlan
    """Packs of indices into ``documents``."""
    name: str


@dataclass(frozen=True)
class Loader:
    """One data-parallel rank's share of the global batches; see `build_loader`."""

    parts: tuple[Part, ...]
    mix: Mix
    share: Share
    shuffle: bool
    seed: int

    @property
    def fingerprint(self) -> str:
        """Digest of every token id and mask bit of all documents."""
        return " ".join(part.documents.fingerprint for part in self.parts)

    @property
    def packs_per_epoch(self) -> int:
        return len(self.mix)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch; empty packs fill up the last one."""
        return -(-len(self.mix) // self.share.global_batch_size)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens in an epoch, without padding; for a mix with fractions, the mean over epochs."""
        tokens = [int(part.documents.lengths.sum()) / len(part.plan) for part in self.parts]
        return round(float(np.dot(tokens, self.mix.counts)))

    @property
    def packing_efficiency(self) -> float:
        """Tokens over positions: 1 without any padding."""
        return self.tokens_per_epoch / (len(self.mix) * self.share.seq_len)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources of a mix; empty without a mix."""
        return tuple(part.name for part in self.parts) if len(self.parts) > 1 else ()

    def batch(self, index: int) -> list[Batch]:
        """This rank's micro-batches of global batch ``index``, in order; only its own documents are read.

        Args:
            index: counted from 0, on and on over the epochs.
        """
        epoch, step = divmod(index, self.steps_per_epoch)
        first = step * self.share.global_batch_size
        packs = [self.pack(epoch, first + at) for at in self.share.packs]
        return self.share.batches(packs, sources=len(self.parts), index=index)

    def row(self, number: int) -> Pack:
        """The pack with that number in the order of training, from 1; see `Batch.rows`."""
        index, at = divmod(number - 1, self.share.global_batch_size)
        epoch, step = divmod(index, self.steps_per_epoch)
        return self.pack(epoch, step * self.share.global_batch_size + at)

    def state(self, index: int) -> None:
        """None: unlike a stream, this loader needs no state to make batch ``index`` again."""

    def pack(self, epoch: int, position: int) -> Pack:
        """A pack of an epoch, by its position in that epoch."""
        if position >= len(self.mix):
            return Pack(together=self.parts[0].documents.together)  # fills up an epoch's last batch
        source = int(self.mix.sources[position])
        part = self.parts[source]
        # Packs of this source so far, in all epochs: its own passes continue where the last epoch stopped.
        turn = epoch * int(self.mix.counts[source]) + int(self.mix.turns[position])
        own_epoch, number = divmod(turn, len(part.plan))
        if self.shuffle:  # stream 0 permutes the documents
            number = int(permutation(len(part.plan), self.seed, 1 + own_epoch, source)[number])
        documents = [part.documents[at] for at in part.plan[number].tolist()]
        return Pack(documents, source, part.documents.together)


def build_loader(
    sources: Sequence[Documents],
    *,
    share: Share,
    pack: bool,
    shuffle: bool,
    seed: int,
    names: Sequence[str] = ("",),
    epochs: Sequence[float] = (1.0,),
) -> Loader:
    """Plan the packs once, from the documents' lengths; every rank makes the same plan.

    Args:
        sources: the documents of each source of a mix, or of a single one.
        share: no document is longer than its ``seq_len``.
        pack: put several documents into a pack; otherwise each is padded to ``seq_len``.
        shuffle: permute the documents before they are packed, and the packs in every epoch, by ``seed``.
        names: of the sources.
        epochs: how often each source is read in one pass over the mix.
    """
    parts = []
    for number, (documents, name) in enumerate(zip(sources, names, strict=True)):
        together = documents.together
        lengths = documents.lengths.reshape(-1, together).sum(1)
        order = permutation(len(lengths), seed, 0, number) if shuffle else np.arange(len(lengths))
        lengths = lengths[order]
        with progress_bar(f"packing {name}".strip(), unit="documents", total=len(lengths)) as bar:
            plan = plan_packs(lengths, seq_len=share.seq_len, advance=bar.advance) if pack else plan_single(lengths)
        planned = order[plan.documents][:, None] * together + np.arange(together)
        parts.append(Part(documents, PackPlan(planned.flatten(), plan.borders * together), name))
    counts = [max(1, round(times * len(part.plan))) for times, part in zip(epochs, parts, strict=True)]
    return Loader(tuple(parts), plan_mix(counts), share, shuffle, seed)


@lru_cache(maxsize=32)
def permutation(count: int, seed: int, stream: int, source: int = 0) -> np.ndarray:
    """A permutation of ``range(count)``, the same on every machine and numpy: PCG64's raw bits never change."""
    entropy = [seed, stream, source] if source else [seed, stream]
    shuffled = np.argsort(np.random.PCG64(entropy).random_raw(count), kind="stable")
    shuffled.flags.writeable = False  # callers share it
    return shuffled
