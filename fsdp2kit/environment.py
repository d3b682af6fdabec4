"""This process: what torchrun says of it in environment variables, checked, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from fsdp2kit.errors import UserError

_IMPORTED = time.monotonic()


def world_size_from_environment() -> tuple[int, int]:
    """``(WORLD_SIZE, LOCAL_WORLD_SIZE)`` as torchrun sets them; 1 and WORLD_SIZE where it did not.

    Raises:
        UserError: one of them is no number of processes.
    """
    size = _size("WORLD_SIZE", default=1)
    return size, _size("LOCAL_WORLD_SIZE", default=size)


def rank_from_environment() -> tuple[int, int]:
    """``(RANK, LOCAL_RANK)`` as torchrun sets them; 0 and 0 where it did not.

    Raises:
        UserError: one of them is no rank of a world of that size.
    """
    size, local_size = world_size_from_environment()
    return _rank("RANK", size=size), _rank("LOCAL_RANK", size=local_size)


def is_main_process() -> bool:
    """Whether this process is the one that speaks; where the environment makes no sense, every one does."""
    try:
        return rank_from_environment()[0] == 0
    except UserError:
        return True


def seconds_alive() -> float:
    """Seconds since this process began; where the system does not say (not Linux), since this module was imported."""
    try:
        status = Path("/proc/self/stat").read_text(encoding="utf-8")
        after_name = status.rpartition(")")[2].split()  # the name before it may hold anything
        began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime, in clock ticks since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, IndexError, ValueError):
        return time.monotonic() - _IMPORTED


def end_process(code: int) -> NoReturn:
    """End this process as `sys.exit` would, but for the interpreter's own teardown.

    Before Python 3.14 that teardown ends every C++ thread that asks for the interpreter's lock, and one of gloo's that
    is just letting go of a finished collective takes the process along ("terminate called without an active
    exception", PyTorch #190489): now and then a finished run would exit with -6.
    """
    # As the interpreter does: pools of threads (torch's compiler has one) are told to end before they are waited for.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or it is closed
                stream.flush()
    os._exit(code)


def _size(name: str, *, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.strip().isdecimal() or int(text) < 1:
        raise UserError(f"environment variable {name}", f"{text!r} is not a number of processes", f"set e.g. {name}=8")
    return int(text)


def _rank(name: str, *, size: int) -> int:
    text = os.environ.get(name, "0")
    if not text.strip().isdecimal() or int(text) >= size:
        what = f"{text!r} is not one of the {size} ranks from 0 on"
        raise UserError(f"environment variable {name}", what, "start the run with torchrun, which sets it")
    return int(text)
