"""The next global batch: read by every rank for itself, settled over all of them in one collective."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fsdp2kit.distributed import agree, sum_over_ranks
from fsdp2kit.errors import UserError


class Batches(Protocol):
    """What the loop needs of a loader."""

    @property
    def steps_per_epoch(self) -> int: ...

    def batch(self, index: int, /) -> Sequence[Any]:
        """This data-parallel rank's micro-batches of a global batch."""
        ...


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of one global batch, and the token counts of the whole of it."""

    micro_batches: Sequence[Any]
    supervised_tokens: int
    input_tokens: int
    attention_pairs: int
    places: int
    """Tokens and padding."""
    tokens_by_source: Mapping[str, int]
    """Supervised tokens of each source of a mix."""
    stop: bool
    """Whether any rank was asked to stop."""
    save_failed: bool
    """Whether any rank knows of a save that failed."""
    seconds: float
    """How long this rank waited for the data."""


def next_batch(
    batches: Batches,
    index: int,
    *,
    stop: bool,
    cp_size: int,
    source_names: Sequence[str] = (),
    save_failed: bool = False,
) -> GlobalBatch:
    """Read this rank's share of global batch ``index`` and settle errors, stops and counts over all ranks.

    Args:
        stop: whether this rank was asked to stop.
        source_names: of the sources of a mix, whose tokens are counted apart.
        save_failed: whether this rank knows of a save that failed.

    Raises:
        UserError: a rank could not read its rows, or the batch has no supervised token.
    """
    start = time.perf_counter()
    micro_batches: Sequence[Any] = []
    error: Exception | None = None
    try:
        micro_batches = batches.batch(index)
    except Exception as problem:
        error = problem
    seconds = time.perf_counter() - start
    names = ("supervised_tokens", "input_tokens", "attention_pairs", "places")
    counts = [float(sum(getattr(batch, name) for batch in micro_batches)) for name in names]
    # As many numbers on a rank whose batch failed.
    for number in range(len(source_names)):
        counts.append(float(sum(batch.tokens_by_source[number] for batch in micro_batches)))
    flags = [float(error is not None), float(stop), float(save_failed)]
    failed, stops, failed_saves, *sums = sum_over_ranks([*flags, *counts])
    if failed:
        agree(error)
    # Context-parallel ranks read the same rows, each of which was therefore counted cp_size times.
    supervised, inputs, pairs, places, *by_source = (round(value / cp_size) for value in sums)
    if not supervised:
        raise UserError(f"global batch {index}", "has no supervised token", "look at that part of the data")
    named = dict(zip(source_names, by_source, strict=True))
    return GlobalBatch(
        micro_batches, supervised, inputs, pairs, places, named, bool(stops), bool(failed_saves), seconds
    )
