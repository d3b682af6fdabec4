"""Private memory of this process, and the peak of one side of a comparison while the other is idle.

Private memory is what a process does not share with the file cache: ``RssAnon`` of ``/proc/self/status``. Pages of a
memory-mapped safetensors file that are only read do not count, for the kernel can drop them at any time.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
_SAMPLE_SECONDS = 0.001


class PrivateMemory:
    """``with PrivateMemory() as memory:`` then ``memory.peak``: bytes above those at the start of the block.

    A thread samples about every millisecond; what lives shorter than that, or while the main thread holds the
    interpreter's lock, is missed.
    """

    def __enter__(self) -> PrivateMemory:
        give_back_memory()
        self._baseline = self._highest = private_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self._highest = max(self._highest, private_bytes())

    def forget_peak(self) -> None:
        """Forget the peak so far, but not what there was at the start of the block."""
        give_back_memory()
        self._highest = private_bytes()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_SECONDS):
            self._highest = max(self._highest, private_bytes())

    @property
    def peak(self) -> int:
        """Bytes above those at the start of the block."""
        return self._highest - self._baseline

    @property
    def highest(self) -> int:
        """Bytes, all that the process had."""
        return self._highest


def peak_of(build: Callable[[], T], run: Callable[[T], object], *, device: torch.device) -> tuple[T, int | None]:
    """What ``build`` returned, and the bytes that it and ``run`` on it needed at the peak of ``run``.

    Counted above what was there before: the allocator's on CUDA, private memory on a CPU (None where the system does
    not tell). What building needs for a moment only is left out.
    """
    if device.type == "cuda":
        give_back_memory()
        before = torch.cuda.memory_allocated(device)
        built = build()
        torch.cuda.reset_peak_memory_stats(device)
        run(built)
        return built, torch.cuda.max_memory_allocated(device) - before
    if not sys.platform.startswith("linux"):
        built = build()
        run(built)
        return built, None
    with PrivateMemory() as memory:
        built = build()
        memory.forget_peak()
        run(built)
    return built, memory.peak


def private_bytes() -> int:
    """Private (anonymous) resident memory of this process, in bytes."""
    with Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def give_back_memory() -> None:
    """Return freed memory to the system, so that a later measurement does not start from what an earlier one left."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
