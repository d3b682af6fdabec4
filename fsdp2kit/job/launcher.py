"""``fsdp2kit run TOML --nproc N``: start the ranks of one host, and end as they end. torchrun is for several hosts.

Signals go on to the ranks, which may take as long as they need to save; a second Ctrl-C interrupts them. What a rank
has to say it says itself: this process adds a line only about a rank that was killed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes

from fsdp2kit.console import show
from fsdp2kit.job import stop

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_NAME = "fsdp2kit run"
_POLL_SECONDS = 0.1
_INTERRUPTED_SECONDS = 10.0  # that ranks have to end after a second Ctrl-C


def launch(arguments: Sequence[str], *, ranks: int) -> int:
    """Start Python with ``arguments`` on each rank; returns the exit code.

    Returns:
        0 if all ranks have ended with 0, also after a request to stop; 2 after a user's mistake; 130 if they were
        interrupted; else 1.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it tells of each signal and exit code
    stop.listen_no_more()
    signals = _Signals()
    # Ranks leave the address of their own store here (`fsdp2kit.job.meeting`), so that no port is taken in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as torchrun
        stop.LAUNCHER: _NAME,
    }
    numbers = range(ranks)
    with tempfile.TemporaryDirectory(prefix="fsdp2kit-") as folder:
        context = start_processes(
            name="fsdp2kit",
            entrypoint=sys.executable,
            args={rank: tuple(arguments) for rank in numbers},
            envs={rank: {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in numbers},
            logs_specs=DefaultLogsSpecs(log_dir=folder),  # nothing is redirected
        )
        signals.go_to(context)
        while (result := context.wait(timeout=1, period=_POLL_SECONDS)) is None:
            signals.end_if_interrupted()
    codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    return exit_code_of(codes, interrupted=signals.interrupts > 1)


class _Signals:
    """Signals to this process, which go on to the ranks."""

    def __init__(self) -> None:
        # A job under nohup, or in the background of a script, begins with some of them ignored, and so do its ranks.
        self._numbers = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        self._context: PContext | None = None
        self._waiting: list[int] = []
        self.interrupts = 0
        """How often Ctrl-C came."""
        self._since = 0.0
        self._take()

    def _take(self) -> None:
        for number in self._numbers:
            signal.signal(number, self._send)
        for number in set(_FORWARDED) - set(self._numbers):
            signal.signal(number, signal.SIG_IGN)

    def go_to(self, context: PContext) -> None:
        """Send signals to these ranks, also what has come before."""
        self._take()  # `start_processes` has installed handlers of its own
        self._context = context
        for number in self._waiting:
            self._send(number, None)

    def _send(self, number: int, _frame: FrameType | None) -> None:
        if self._context is None:
            self._waiting.append(number)
            return
        if number == signal.SIGINT:
            self.interrupts += 1
            self._since = time.monotonic()
        for pid in self._context.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end_if_interrupted(self) -> None:
        """Kill ranks that do not end after a second Ctrl-C: they may wait in a call that does not return."""
        if self.interrupts > 1 and time.monotonic() - self._since >= _INTERRUPTED_SECONDS:
            self._send(signal.SIGKILL, None)


def exit_code_of(codes: dict[int, int], *, interrupted: bool) -> int:
    """This process's exit code.

    Args:
        codes: of ranks that did not end with 0; −n: by signal n.
        interrupted: a second Ctrl-C came.
    """
    if not codes:
        return 0
    if interrupted:
        return 130
    killed = {rank: -code for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM}
    for rank, number in sorted(killed.items()):
        todo = "see its lines above (dmesg says if memory ran out), and start the run again: it resumes"
        show(f"error: {_NAME}: rank {rank} was ended by {signal.Signals(number).name}; {todo}", file=sys.stderr)
    return 2 if 2 in codes.values() else 1
