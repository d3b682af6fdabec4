"""The user's code, a reward function or environments: the process that runs it, and what identifies it.

The process can be killed if that code hangs. It does not import the trainer's modules, as multiprocessing's children
would.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from fsdp2kit.data.contents import Content
from fsdp2kit.job import stop

IMPORT_SECONDS = 120.0
"""How long the user's modules may take to be imported."""
_LOOK_SECONDS = 0.25


class UserProcess:
    """A Python process and a connection to it.

    Args:
        program: Python's arguments up to the program. Two follow: the connection's file descriptor, and ``code``.
        code: what the user named, ``module:name`` or ``path.py:name``.
    """

    connection: Connection
    """To the process."""

    def __init__(self, program: Sequence[str], code: str) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        handle = theirs.fileno()
        command = [sys.executable, *program, str(handle), code]
        # A session of its own keeps Ctrl-C in the terminal away from it: the trainer finishes its step.
        self._process = subprocess.Popen(command, pass_fds=[handle], stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()

    def has_answer(self, seconds: float) -> bool:
        """Wait for a message; whether one came in time. Raises `Stopped` as `comes_in_time` does."""
        return comes_in_time(self.connection.poll, seconds)

    def exit_code(self, seconds: float = 10.0) -> int | None:
        """Wait for its end; None if it does not end in time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)
        return self._process.returncode

    def kill(self) -> None:
        """End it with all that it started, whatever it is doing."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def comes_in_time(wait: Callable[[float], bool], seconds: float) -> bool:
    """Wait for something in short slices, so that a request to stop is noticed; whether it came in time.

    Args:
        wait: waits for it for so many seconds at most, and returns whether it is there.

    Raises:
        Stopped: the run is asked to stop, and it has not come.
    """
    deadline = time.monotonic() + seconds
    while not wait(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
        stop.check()
        if time.monotonic() >= deadline:
            return False
    return True


def content_of_code(function: str, files: Mapping[str, str], *, otherwise: str) -> Content:
    """What identifies the user's code.

    Args:
        function: ``path.py:name`` or ``module:name``; only the last part of a path counts.
        files: digests of its source files, and of its options.
        otherwise: as `Content` has it.
    """
    where, _, name = function.rpartition(":")
    digest = hashlib.blake2b(repr([f"{Path(where).name}:{name}", files]).encode(), digest_size=8).hexdigest()
    return Content(digest, files=files, otherwise=otherwise)
