"""A process that runs the user's code: a reward function, or environments.

It can be killed if that code hangs. It does not import the trainer's modules, as multiprocessing's children would.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

IMPORT_SECONDS = 120.0
"""How long the user's modules may take to be imported."""


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
