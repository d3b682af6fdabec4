"""How long this process has run, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

_IMPORTED = time.monotonic()
_has_begun = False
_counts_from: float | None = None  # of the monotonic clock; None: from the start of the process


def count_from_now() -> None:
    """From now on `seconds_alive` counts from here: a run begins in a process that has done other things."""
    global _counts_from
    _counts_from = time.monotonic()


def begin_job() -> None:
    """The first job of a process began with it; `seconds_alive` counts another one from here."""
    global _has_begun
    if _has_begun:
        count_from_now()
    _has_begun = True


def seconds_alive() -> float:
    """Seconds since this process began, or since `count_from_now`; if unknown, since this module was imported."""
    if _counts_from is not None:
        return time.monotonic() - _counts_from
    try:
        status = Path("/proc/self/stat").read_text(encoding="utf-8")
        after_name = status.rpartition(")")[2].split()  # the process name may contain anything
        began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime, in clock ticks since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, IndexError, ValueError):
        return time.monotonic() - _IMPORTED


def end_process(code: int) -> NoReturn:
    """End this process like `sys.exit`, but without the interpreter's teardown.

    Before Python 3.14 the teardown ends C++ threads that ask for the interpreter's lock. If a gloo thread is releasing
    a finished collective at that moment, the process aborts ("terminate called without an active exception", PyTorch
    #190489), and a finished run exits with -6.
    """
    # As the interpreter does: tell thread pools (torch's compiler has one) to end, then join them.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # a broken pipe, or closed
                stream.flush()
    os._exit(code)
