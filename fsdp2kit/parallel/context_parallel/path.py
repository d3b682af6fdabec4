"""The way that a model's attention goes: a method over the ranks, and a kernel on each."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2kit.parallel.context_parallel.layout import Method

VARLEN = "varlen"
"""Our own attention over segments, in place of a transformers implementation."""


@dataclass(frozen=True)
class AttentionPath:
    """What attention a model gets; `choose_path` decides it once, and everything that must agree is given it."""

    method: Method | None
    """None without context parallelism."""
    kernel: str
    """A transformers attention implementation, or "varlen"."""
    reason: str = ""
    """Why this method."""
    kernel_reason: str = ""
    masks_every_row: bool = False
    """Whether rows of one document get a mask as well, which they do not need: a layer is compiled for rows with a
    mask, and once more for rows without."""

    def __str__(self) -> str:
        words = [] if self.method is None else [f"context parallelism: {self.method} ({self.reason})"]
        why = f" ({self.kernel_reason})" if self.kernel_reason else ""
        return ", ".join([*words, f"attention: {self.kernel}{why}"])
