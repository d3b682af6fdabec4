"""A faster way of computing is tried beside the plain one before a run uses it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

INSTEAD = "the run goes on with the plain operations, which take more time and memory"


def succeeds(what: str, trial: Callable[[], bool]) -> bool:
    """Whether ``trial`` returns True. Otherwise a warning says what happened.

    Raises:
        torch.OutOfMemoryError: the trial ran out of memory.
    """
    try:
        agrees = trial()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.warning("%s cannot be used here (%s); %s", what, reason_of(error), INSTEAD)
        return False
    if not agrees:
        logger.warning("%s computes other numbers than the plain operations here; %s", what, INSTEAD)
    return agrees


def reason_of(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
