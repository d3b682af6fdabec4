"""A rank's part of what all ranks have: it asks for these responses, and scores these groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdp2kit.job.distributed import gather_objects, rank, world_size


def my_part(items: Sequence[Any]) -> Sequence[Any]:
    """This rank's part of items that all ranks have: those with the numbers r, r + R, … on rank r of R."""
    return items[rank() :: world_size()]


def my_groups(items: Sequence[Any], n: int) -> list[Any]:
    """The items of this rank's groups of ``n``, of the items of all groups."""
    return [items[group * n + turn] for group in my_part(range(len(items) // n)) for turn in range(n)]


def from_all_ranks(mine: Sequence[Any] | np.ndarray) -> list[Any]:
    """Gather every rank's `my_part` and restore the order. Collective."""
    parts = gather_objects(mine)
    return [parts[number % len(parts)][number // len(parts)] for number in range(sum(map(len, parts)))]
