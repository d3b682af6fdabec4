"""Which documents share a pack, and in which order the packs of several sources are read.

Both are decided from the documents' lengths alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackPlan:
    """``plan[i]`` holds the documents of pack ``i``; every document is in exactly one pack."""

    documents: np.ndarray
    """int64 [documents]: indices of documents, pack after pack."""
    borders: np.ndarray
    """int64 [packs + 1]: pack ``i`` is ``documents[borders[i] : borders[i + 1]]``."""

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, pack: int) -> np.ndarray:
        return self.documents[self.borders[pack] : self.borders[pack + 1]]


def plan_packs(
    lengths: np.ndarray, *, seq_len: int, window: int = 1024, advance: Callable[[int], object] = lambda count: None
) -> PackPlan:
    """Put whole documents into packs of ``seq_len`` tokens: best fit, longest first within a window.

    Each document goes to the open pack that it fills best. Documents are taken ``window`` at a time, so a pack holds
    near neighbours only, and at most ``window`` packs stay open. Packs are numbered by their first document.

    Args:
        lengths: integers [documents], each from 1 to ``seq_len``.
        advance: called after each window with its number of documents.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not (lengths.min() >= 1 and lengths.max() <= seq_len):
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()}; expected 1 to seq_len = {seq_len}")
    pack_of = np.empty(len(lengths), dtype=np.int64)
    # Room and pack are one integer, room × shift + pack, in one sorted list. Ties go to the oldest pack.
    shift = 1 + len(lengths)
    open_packs: list[int] = []
    packs = 0
    for start in range(0, len(lengths), window):
        part = lengths[start : start + window]
        order = np.argsort(-part, kind="stable")
        placed = []
        for length in part[order].tolist():
            fit = bisect_left(open_packs, length * shift)
            if fit < len(open_packs):
                room, pack = divmod(open_packs.pop(fit), shift)
            else:
                room = seq_len
                pack = packs
                packs += 1
            if room > length:
                insort(open_packs, (room - length) * shift + pack)
            placed.append(pack)
        pack_of[start + order] = placed
        del open_packs[:-window]  # closes the fullest
        advance(len(part))
    # Number the packs by their first document, and list each one's documents in their order.
    first = np.full(packs, len(lengths), dtype=np.int64)
    np.minimum.at(first, pack_of, np.arange(len(lengths)))
    number = np.empty(packs, dtype=np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(packs)
    pack_of = number[pack_of]
    borders = np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=packs))]).astype(np.int64)
    return PackPlan(np.argsort(pack_of, kind="stable").astype(np.int64), borders)


def plan_single(lengths: np.ndarray) -> PackPlan:
    """One document a pack, in the given order."""
    return PackPlan(np.arange(len(lengths)), np.arange(len(lengths) + 1))


@dataclass(frozen=True)
class Mix:
    """The order of packs in one pass over all sources: position ``p`` is pack ``turns[p]`` of ``sources[p]``."""

    sources: np.ndarray
    """int64 [packs]."""
    turns: np.ndarray
    """int64 [packs], counted from 0 within each source."""
    counts: np.ndarray
    """int64 [sources]: packs of each source in a pass."""

    def __len__(self) -> int:
        return len(self.sources)


def plan_mix(counts: Sequence[int]) -> Mix:
    """Spread each source's packs evenly over a pass, so that every part of it has nearly the shares of the whole.

    Args:
        counts: packs of each source in a pass.
    """
    sources = np.repeat(np.arange(len(counts)), counts)
    turns = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((turns + 0.5) / np.asarray(counts)[sources], kind="stable")
    return Mix(sources[order], turns[order], np.asarray(counts, dtype=np.int64))


def furthest_behind(shares: np.ndarray, tokens: Sequence[int]) -> int:
    """The source whose next pack is read from a mix of streams: the one furthest behind its share of the tokens.

    Args:
        shares: float64 [sources], with the sum 1.
        tokens: read of each source so far.
    """
    return int((shares * (sum(tokens) + 1) - tokens).argmax())


def shares(weights: Sequence[float], *, temperature: float) -> np.ndarray:
    """weight^(1 / temperature), normalised: float64 [sources]."""
    # Token counts to a high power would overflow; their logarithms do not.
    logs = np.log(np.asarray(weights, dtype=np.float64)) / temperature
    raised = np.exp(logs - logs.max())
    return raised / raised.sum()


def source_epochs(
    tokens: Sequence[int],
    *,
    weights: Sequence[float | None],
    epochs: Sequence[float | None],
    temperature: float,
) -> np.ndarray:
    """How often each source is read in one pass over the mix, float64 [sources].

    Without epochs, a pass has as many tokens as all sources together.

    Args:
        tokens: of each source.
        weights: relative shares of the tokens; None is the source's own number of tokens.
        epochs: given for all sources or for none.
    """
    if all(one is not None for one in epochs):
        return np.asarray(epochs, dtype=np.float64)
    wanted = [count if weight is None else weight for count, weight in zip(tokens, weights, strict=True)]
    return shares(wanted, temperature=temperature) * sum(tokens) / np.asarray(tokens)
