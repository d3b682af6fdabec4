"""Whether a run is asked to stop: by a signal, by the end of what started it, by its time limit, or on another rank.

A thread hears signals at once, also while the main thread computes or waits in a collective. It prints a line.
Work that takes long asks `requested` where it can be left, and raises `Stopped`. `agreement` of `job/distributed.py`
makes all ranks raise it. The training loop then saves a checkpoint.

Until the first step of a start changes the model (`begin_to_change`) there is nothing to save, so a run ends wherever
it is: one rank by an exception in its main thread, several once all of them know (`fsdp2kit.job.lost_ranks`).

torch is not imported here: signals are heard while it is imported.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import fsdp2kit
from fsdp2kit import console
from fsdp2kit.job import status

# What schedulers, Ctrl-C and a terminal that closes send.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A job in the background of a script, and one under nohup, begin with these ignored: they are not for it.
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
_LOOK_SECONDS = 0.5
_LEAVE_SECONDS = 4.0  # that the main thread has to end a start by itself
_ANSWER_SECONDS = 30.0  # that other ranks have to say whether they end with this one


class Stopped(BaseException):
    """Work was left because the run is asked to stop. No failure, so ``except Exception`` does not catch it."""


class StopRequest:
    """``with StopRequest(max_minutes=…) as stop:`` then ``stop.requested`` on this rank.

    A block inside another one shares its request. A second Ctrl-C interrupts as usual. The former handlers are
    restored at the end of the outermost block.

    Args:
        max_minutes: ``run.max_minutes``; counts in this block alone.
        signals: whether signals ask to stop.
        ends_start: whether a request ends the run wherever it is, until `begin_to_change`.
        ends_process: whether such an end may be that of the process, where the main thread does not get to it.
    """

    def __init__(
        self,
        *,
        max_minutes: float | None = None,
        signals: bool = True,
        ends_start: bool = False,
        ends_process: bool = False,
    ) -> None:
        self._minutes, self._signals = max_minutes, signals
        self._is_start, self._ends_process, self.is_early = ends_start, ends_process, False
        self._is_alone = os.environ.get("WORLD_SIZE", "1").strip() in ("", "1")
        self._deadline: float | None = None
        self._received: str | None = None
        self._is_told = False  # by another rank
        self._is_announced = False
        self._interrupts_heard = self._interrupts_handled = 0
        self._has_raised = False
        self._former: dict[int, object] = {}
        self._outer: StopRequest | None = None
        self._over = threading.Event()
        self._decision = threading.Lock()
        self._agreed_to_end = False
        self._others_go_on = threading.Event()
        self._shares = False
        self._callbacks: list[Callable[[], object]] = []
        self.is_first_here: Callable[[], bool] = is_first_local_rank
        """Whether this rank prints the line about a request for its host."""

    def __enter__(self) -> StopRequest:
        global _now, _runs
        deadline = None if self._minutes is None else time.monotonic() + 60 * self._minutes
        if _now is not None:
            self._outer = _now
            _now._deadline = deadline
            return _now
        self._deadline = deadline
        _runs += 1
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakes = self._handle_signals()
        _now = self
        self._thread = threading.Thread(target=self._listen, daemon=True, name="fsdp2kit-stop")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _now
        if self._outer is not None:
            self._outer._deadline = None
            return
        if self._wakes:
            signal.set_wakeup_fd(-1)
        for number, handler in self._former.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        _now = None
        self._over.set()
        self._wake(0)
        self._thread.join()
        if self.reason is not None and not self._is_announced:
            self._announce()
        with self._decision:  # another thread may be in `hear_of`
            os.close(self._read)
            os.close(self._write)
            self._write = -1

    def _handle_signals(self) -> bool:
        """Install the handlers; whether signals wake the thread by themselves."""
        try:
            for number in _SIGNALS if self._signals else ():
                if number in _MAY_BE_IGNORED and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._former[number] = signal.signal(number, self._handle)
            if not self._former:
                return False
            # The interpreter writes to it when a signal comes; a handler runs when the main thread gets to it.
            former = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except ValueError:  # not the main thread (e.g. a notebook's): the caller handles signals
            return False
        if former != -1:  # an event loop's
            signal.set_wakeup_fd(former, warn_on_full_buffer=False)
        return former == -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler. It takes no lock and prints nothing: the main thread may be doing either."""
        self._received = self._received or signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupts_handled += 1
            # Two may come while the main thread is in one call: then this is called once.
            if max(self._interrupts_handled, self._interrupts_heard) > 1:
                former = self._former[number]
                interrupt = former if callable(former) else signal.default_int_handler
                interrupt(number, frame)
        if not self._wakes:
            self._wake(number)
        if self._is_start and self._is_alone and not self.is_early and not self._has_raised:
            self._has_raised = True
            raise Stopped(self._received)

    def _wake(self, number: int) -> None:
        with suppress(OSError):  # full: it will wake up
            os.write(self._write, bytes([number]))

    def _listen(self) -> None:
        """The thread."""
        since = 0.0
        while not self._over.is_set():
            if select.select([self._read], [], [], _LOOK_SECONDS)[0]:
                for number in os.read(self._read, 64):
                    self._interrupts_heard += number == signal.SIGINT
                    if number in self._former:
                        self._received = self._received or signal.Signals(number).name
            if self._over.is_set() or self.reason is None:
                continue
            if not self._is_announced:
                since = time.monotonic()
                self._announce()
            self._end_start(time.monotonic() - since)

    def _announce(self) -> None:
        """Say that the request was heard, and call those who wait for it."""
        self._is_announced = True
        if not self._is_told and self.is_first_here():
            if self._is_start and self._received:
                then = "the run ends at once, and saves nothing"
            else:
                then = "what is under way ends where it can, a checkpoint follows, and the run ends"
            again = "; Ctrl-C again interrupts at once" if self._received == "SIGINT" else ""
            console.say_here(f"asked to stop ({self.reason}) in {status.position()}: {then}{again}")
        for callback in [*self._callbacks]:
            with suppress(Exception):
                callback()

    def _end_start(self, seconds: float) -> None:
        """End this process if its main thread has not done so in time.

        Ranks that share requests end together: `fsdp2kit.job.lost_ranks` sees to it.

        Args:
            seconds: since the request.
        """
        if not (self._is_start and self._ends_process and self._received):
            return
        waits = 0.0 if self.is_early else _LEAVE_SECONDS
        if (self._is_alone or not self._shares) and seconds >= waits and self.agree_to_end():
            leave()

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a request."""
        return self.reason is not None

    @property
    def reason(self) -> str | None:
        """The signal's name, that torchrun is gone, or ``run.max_minutes``; as another rank says if it was asked."""
        if self._received is not None:
            return self._received
        if launcher_is_gone() and not (self._is_start and self._ends_process):  # until then `torchrun.watch` notices
            return f"{launcher()} has ended"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "run.max_minutes"
        return None

    @property
    def received(self) -> str | None:
        """`reason` where a signal asks to stop, on this rank or on another."""
        return self._received

    def lift_time_limit(self) -> None:
        """What is left of this block has no limit."""
        self._deadline = None

    def hear_of(self, reason: str) -> None:
        """Another rank was asked."""
        if self.reason is None:
            self._is_told = True
            self._received = reason
        with self._decision:
            self._wake(0)

    def share(self, is_first_here: Callable[[], bool]) -> None:
        """Ranks tell each other of requests from now on.

        Args:
            is_first_here: whether this rank is the first of its host that asks.
        """
        self._shares, self.is_first_here = True, is_first_here

    def agree_to_end(self) -> bool:
        """Whether this rank has nothing to save. Then `begin_to_change` waits for what the other ranks say."""
        with self._decision:
            self._agreed_to_end = self._is_start and self._ends_process
            return self._agreed_to_end

    def go_on(self) -> None:
        """Another rank has something to save, so this one goes on until all of them stop together."""
        self._others_go_on.set()

    def begin_to_change(self) -> None:
        """From now on there is something to save."""
        if not self._is_start:
            return
        with self._decision:
            self._is_start = self._agreed_to_end
        if self._is_start:
            self._others_go_on.wait(_ANSWER_SECONDS)  # and usually the process ends
            self._is_start = False

    def when_asked(self, callback: Callable[[], object]) -> None:
        """Have something called in the thread as soon as this rank knows of a request."""
        self._callbacks.append(callback)
        if self.requested:
            callback()


_now: StopRequest | None = None
_runs = 0
_last_words: list[Callable[[], object]] = []


def listen_from_the_start() -> None:
    """Hear signals from here on, in a process that will run once it has imported what it needs: `running` goes on."""
    request = StopRequest(ends_start=True, ends_process=True)
    request.is_early = True
    request.__enter__()


def listen_no_more() -> None:
    """This process will not run itself."""
    if _now is not None and _now.is_early:
        _now.__exit__()


@contextmanager
def running(*, ends_process: bool) -> Iterator[StopRequest]:
    """Hear requests to stop a run, from before its start to its end.

    Args:
        ends_process: as of `StopRequest`.
    """
    if _now is not None and _now.is_early:
        request = _now
        request.is_early = False
        try:
            yield request
        finally:
            request.__exit__()
        return
    with StopRequest(ends_start=True, ends_process=ends_process) as request:
        yield request


def current() -> StopRequest | None:
    """The request of the run in this process; None where nothing runs."""
    return _now


def run_number() -> int:
    """How many runs this process has begun to listen for; the same on every rank of a job."""
    return _runs


def requested() -> bool:
    """Whether this rank knows that the run is asked to stop."""
    return _now is not None and _now.requested


def check() -> None:
    """Raise `Stopped` if the run is asked to stop. For work whose ranks leave it together, as under `agreement`."""
    if _now is not None and (reason := _now.reason) is not None:
        raise Stopped(reason)


def begin_to_change() -> None:
    """Say that the model is about to change, so that from now on there is something to save."""
    if _now is not None:
        _now.begin_to_change()


def when_asked(callback: Callable[[], object]) -> None:
    """Have something called, in a thread, as soon as this rank knows of a request."""
    if _now is not None:
        _now.when_asked(callback)


@contextmanager
def last_word(callback: Callable[[], object]) -> Iterator[None]:
    """Have something called if the process ends by `leave` within the block."""
    _last_words.append(callback)
    try:
        yield
    finally:
        _last_words.remove(callback)


def leave() -> NoReturn:
    """End this process, with exit code 0, from any thread. It has nothing to save."""
    for callback in [*_last_words]:
        with suppress(Exception):
            callback()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(0)


def be_a_worker() -> None:
    """Hear nothing any more, in a process that a rank has forked: what asks the run to stop is for the rank alone.

    A terminal's Ctrl-C, and torchrun's signals, reach all processes of a group.
    """
    with suppress(OSError):  # it leads a session
        os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


def is_first_local_rank() -> bool:
    """Whether this rank is the first of its host, as torchrun counts them."""
    return os.environ.get("LOCAL_RANK", "0").strip() in ("", "0")


def launcher_is_gone() -> bool:
    """Whether torchrun, or ``fsdp2kit run --nproc``, started this process and has ended since."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != fsdp2kit.PARENT


def launcher() -> str:
    """What started this rank, in messages."""
    return os.environ.get(LAUNCHER, "torchrun")


LAUNCHER = "FSDP2KIT_LAUNCHER"
"""The environment variable that names what started the ranks, unless that is torchrun."""
