"""What the loop needs to know of saves that are carried out in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Saving:
    """Saves that go on in the background; by default there are none."""

    wait_until_staged: Callable[[], None] = lambda: None
    """Returns when parameters and optimizer state may change."""
    has_failed: Callable[[], bool] = lambda: False
    """Whether this rank knows of a failed save."""
    finish: Callable[[], None] = lambda: None
    """Collective: waits for the save under way, and raises what went wrong, on every rank."""
