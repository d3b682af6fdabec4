"""How the rows of several sources alternate: evenly, in the shares that the weights ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mix:
    """The order of one pass over all sources: position ``p`` takes the ``turns[p]``-th row of ``sources[p]``."""

    sources: np.ndarray
    """int64 [rows]."""
    turns: np.ndarray
    """int64 [rows], counting up from 0 within each source."""
    counts: np.ndarray
    """int64 [sources]: rows that a pass takes of each."""

    def __len__(self) -> int:
        return len(self.sources)


def plan_mix(counts: Sequence[int]) -> Mix:
    """Spread each source's rows evenly over a pass, so that every stretch of it has nearly the shares of the whole.

    Args:
        counts: rows of each source in a pass.
    """
    sources = np.repeat(np.arange(len(counts)), counts)
    turns = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((turns + 0.5) / np.asarray(counts)[sources], kind="stable")
    return Mix(sources[order], turns[order], np.asarray(counts, dtype=np.int64))


def shares(weights: Sequence[float], *, temperature: float) -> np.ndarray:
    """weight^(1 / temperature), normalised: float64 [sources]."""
    # Logarithms: token counts to a high power would overflow.
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
    """How often one pass over the mix goes through each source, float64 [sources].

    A pass has as many tokens as all sources together, unless epochs say otherwise.

    Args:
        tokens: of each source.
        weights: share of the tokens, relative; None is the source's own number of tokens.
        epochs: given for all sources or for none.
    """
    if all(one is not None for one in epochs):
        return np.asarray(epochs, dtype=np.float64)
    wanted = [count if weight is None else weight for count, weight in zip(tokens, weights, strict=True)]
    return shares(wanted, temperature=temperature) * sum(tokens) / np.asarray(tokens)
