"""Whether a run was asked to stop: by a signal, by the end of torchrun, or by its time limit."""

from __future__ import annotations

import signal
import time
from types import FrameType

from fsdp2kit import torchrun
from fsdp2kit.distributed import is_lost_rank
from fsdp2kit.failures import outlive_torchrun

# What schedulers and Ctrl-C send.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """``with StopRequest(max_minutes=…) as stop:`` then ``stop.requested`` on this rank.

    torchrun and most schedulers send SIGTERM, Slurm SIGUSR1 ahead of a time limit, Ctrl-C SIGINT; a second SIGINT
    interrupts as usual. The former handlers are restored at the end of the block. A torchrun that was killed sends
    nothing; `reason` notices that it is gone.
    """

    def __init__(self, *, max_minutes: float | None = None, signals: bool = True) -> None:
        self._signals = _SIGNALS if signals else ()
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._received: str | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        torchrun.stop_watching()
        for number in self._signals:
            if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                continue  # a background job: Ctrl-C in the terminal is not for it
            try:
                self._former[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread (e.g. a notebook's): the caller handles signals
                break
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        if isinstance(error, Exception):
            outlive_torchrun(error, is_lost=is_lost_rank(error))

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
        """The signal's name, that torchrun is gone, or ``run.max_minutes``."""
        if self._received is not None:
            return self._received
        if torchrun.is_gone():
            return "torchrun has ended"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "run.max_minutes"
        return None
