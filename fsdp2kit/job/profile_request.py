"""Whether a running job is asked for a profile: by SIGUSR2, or by a file ``profile-now`` in its run directory."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

FILE = "profile-now"


class NotedSignal:
    """A handler that notes that its signal came."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


@contextlib.contextmanager
def noting_sigusr2() -> Iterator[NotedSignal]:
    """Note SIGUSR2 within this block, instead of dying of it.

    A block inside another one shares its handler: what came while a run started is there when it trains.
    """
    former = signal.getsignal(signal.SIGUSR2)
    if isinstance(former, NotedSignal):
        yield former
        return
    noted = NotedSignal()
    try:
        signal.signal(signal.SIGUSR2, noted)
    except ValueError:  # not the main thread (e.g. a notebook's): the caller handles signals
        yield noted
        return
    try:
        yield noted
    finally:
        signal.signal(signal.SIGUSR2, former)


class ProfileRequest:
    """Whether this rank was asked for a profile, by its signal or by a file.

    Args:
        noted: by `noting_sigusr2`.
        file: None on ranks that leave it to another one to look.
        message: called with a line for the user.
    """

    def __init__(self, noted: NotedSignal, *, file: Path | None, message: Callable[[str], None]) -> None:
        self._noted, self._file, self._message = noted, file, message

    @property
    def is_asked(self) -> bool:
        """Whether a request waits."""
        try:
            return self._noted.came or (self._file is not None and self._file.exists())
        except OSError:  # a network disk that is not there for a moment
            return False

    def take(self) -> None:
        """Forget what waits, and remove the file; call it when a profile begins."""
        self._noted.came = False
        try:
            if self._file is not None:
                self._file.unlink(missing_ok=True)
        except OSError as error:  # it would ask again and again
            self._message(f"{self._file}: cannot be removed ({error.strerror}), so it is not looked for any more")
            self._file = None
