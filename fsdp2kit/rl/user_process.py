"""A process that runs the user's code: a reward function, or environments.

It can be killed if that code hangs. It does not import the trainer's modules, as multiprocessing's children would.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

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
        """Wait for a message; whether one came in time.

        Raises:
            Stopped: the run is asked to stop, and none has come.
        """
        deadline = time.monotonic() + seconds
        while not self.connection.poll(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            stop.check()
            if time.monotonic() >= deadline:
                return False
        return True

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
