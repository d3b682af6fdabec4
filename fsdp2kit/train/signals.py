"""Asking the run to stop: signals and the time limit set a flag that the ranks agree on between two steps."""

from __future__ import annotations

import signal
import time
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """``with StopRequest(max_minutes=…) as stop:`` then ``stop.requested`` on this rank.

    SIGTERM is what torchrun and most schedulers send, SIGUSR1 what Slurm sends ahead of a time limit, SIGINT is
    Ctrl-C, and a second one interrupts as ever. The handlers that were there before come back at the end of the block.
    """

    def __init__(self, *, max_minutes: float | None = None, signals: bool = True) -> None:
        self._signals = _SIGNALS if signals else ()
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._received: str | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in self._signals:
            if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                continue  # a job in the background: the terminal's Ctrl-C is for another
            try:
                self._former[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread (a notebook's worker): signals stay the caller's
                break
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._former[number])  # pyright: ignore[reportArgumentType]

    @property
    def requested(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self.reason is not None

    @property
    def reason(self) -> str | None:
        """The signal's name, or ``run.max_minutes``."""
        if self._received is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return "run.max_minutes"
        return self._received
