"""Peak memory, of the whole process and of each phase of a step."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

PHASES = ("forward", "backward", "optimizer")
"""Of a step. Forward begins with moving the micro-batch over; the gradient norm and clipping are the optimizer's."""

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory since the last reset: the allocator's on CUDA, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


class PhaseMemory:
    """Reads the peak at each border between two phases, and resets it.

    Both are the host's own bookkeeping, which waits for nothing: the allocator's counters on CUDA, on Linux the
    kernel's high-water mark of the resident set (``/proc/self/clear_refs``, some ten microseconds). Elsewhere there
    are no phases, and only the whole peak is known.

    Args:
        by_phase: False: never reset, for whoever measures the peak around all this.
    """

    def __init__(self, device: torch.device, *, by_phase: bool) -> None:
        self._device = device
        self._reset = _reset_of(device) if by_phase else None
        self._highest = 0
        self.phases: dict[str, int] = {}
        """Highest peak of each phase so far, in bytes; empty where there are none."""

    def start(self) -> None:
        """A step begins: what was before it belongs to no phase."""
        self._close(None)

    def end(self, phase: str) -> None:
        """The phase that began at the last border is over."""
        self._close(phase)

    @property
    def highest(self) -> int:
        """Peak of the process so far, in bytes."""
        return max(self._highest, peak_memory_bytes(self._device))

    def _close(self, phase: str | None) -> None:
        if self._reset is None:
            return
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _resident_peak()
        # Read before the reset, after which nobody knows it any more.
        self._highest = max(self._highest, peak)
        if phase is not None:
            self.phases[phase] = max(self.phases.get(phase, 0), peak)
        self._reset()


def _reset_of(device: torch.device) -> Callable[[], object] | None:
    """What sets the peak to what is used now; None where that cannot be."""
    if device.type == "cuda":
        return lambda: torch.cuda.reset_peak_memory_stats(device)
    try:
        _resident_peak()
        _reset_resident_peak()
    except (OSError, StopIteration):
        return None
    return _reset_resident_peak


def _reset_resident_peak() -> None:
    _RESET.write_text("5", encoding="ascii")  # 5: the high-water mark, and no page is touched (proc(5))


def _resident_peak() -> int:
    with _STATUS.open(encoding="ascii", errors="replace") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
