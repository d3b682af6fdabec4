"""Whether a run is asked to stop: by a signal, by the end of what started it, by its time limit, or on another rank.

A thread hears signals at once, also while the main thread computes or waits in a collective. It prints a line.
Work that takes long asks `requested` where it can be left, and raises `Stopped`. `agreement` of `job/distributed.py`
makes all ranks raise it. The training loop then saves a checkpoint.

Until the first step of a start changes the model (`begin_to_change`) there is nothing to save, so a run ends wherever
it is: one rank by an exception in its main thread, several once all of them know (`fsdp2kit.job.lost_ranks`).

`StopRequest` is what this rank knows, `Listener` hears it, `UnsavedStart` is what ends at once.

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


class UnsavedStart:
    """The start of a run, until its first step changes the model: there is nothing to save.

    A request ends it wherever it is: one rank by `Stopped` in its main thread, several once all of them know.

    Args:
        ends_process: whether that may be the end of the process, where the main thread does not get to it.
        is_over: there is no such start, or no more.
    """

    def __init__(self, *, ends_process: bool = False, is_over: bool = False) -> None:
        self.is_over = is_over
        self.is_importing = False
        """Whether nobody would catch `Stopped` yet: the process still imports what it needs."""
        self._may_end_process = ends_process
        self._has_agreed = False
        self._others_go_on = threading.Event()
        self._decision = threading.Lock()

    @property
    def ends_process(self) -> bool:
        """Whether a request may end the process now."""
        return self._may_end_process and not self.is_over

    def agree_to_end(self) -> bool:
        """Whether this rank has nothing to save. Then `begin_to_change` waits for what the other ranks say."""
        with self._decision:
            self._has_agreed = self.ends_process
            return self._has_agreed

    def go_on(self) -> None:
        """Another rank has something to save, so this one goes on until all of them stop together."""
        self._others_go_on.set()

    def begin_to_change(self) -> None:
        """From now on there is something to save."""
        if self.is_over:
            return
        with self._decision:
            self.is_over = not self._has_agreed
        if not self.is_over:
            self._others_go_on.wait(_ANSWER_SECONDS)  # and usually the process ends
            self.is_over = True


class StopRequest:
    """What this rank knows of a request to stop its run.

    Args:
        start: what a request ends at once.
    """

    def __init__(self, start: UnsavedStart) -> None:
        self.start = start
        self.received: str | None = None
        """`reason` where a signal asks to stop, on this rank or on another."""
        self.deadline: float | None = None
        """Of `time.monotonic`: ``run.max_minutes`` is over."""
        self.is_told = False
        """Whether another rank was asked, and not this one."""
        self.is_shared = False
        """Whether ranks tell each other of requests."""
        self.is_first_here: Callable[[], bool] = is_first_local_rank
        """Whether this rank prints the line about a request for its host."""
        self._callbacks: list[Callable[[], object]] = []

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a request."""
        return self.reason is not None

    @property
    def reason(self) -> str | None:
        """The signal's name, that torchrun is gone, or ``run.max_minutes``; as another rank says if it was asked."""
        if self.received is not None:
            return self.received
        if launcher_is_gone() and not self.start.ends_process:  # until then `meeting.watch` notices
            return f"{launcher()} has ended"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "run.max_minutes"
        return None

    def lift_time_limit(self) -> None:
        """What is left of this block has no limit."""
        self.deadline = None

    def share(self, is_first_here: Callable[[], bool]) -> None:
        """Ranks tell each other of requests from now on.

        Args:
            is_first_here: whether this rank is the first of its host that asks.
        """
        self.is_shared = True
        self.is_first_here = is_first_here

    def when_asked(self, callback: Callable[[], object]) -> None:
        """Have something called in the listener's thread as soon as this rank knows of a request."""
        self._callbacks.append(callback)
        if self.requested:
            callback()

    def call_back(self) -> None:
        """Call those who wait for a request."""
        for callback in [*self._callbacks]:
            with suppress(Exception):
                callback()


class Listener:
    """Hears requests to stop: by handlers of signals, and by a thread that also looks at the clock.

    The thread says that a request was heard, and ends a start that does not end by itself. A second Ctrl-C interrupts
    as usual.

    Args:
        request: what is heard.
        signals: whether signals ask to stop.
    """

    def __init__(self, request: StopRequest, *, signals: bool = True) -> None:
        self.request = request
        self._signals = signals
        self._is_alone = os.environ.get("WORLD_SIZE", "1").strip() in ("", "1")
        self._is_announced = False
        self._has_raised = False
        self._interrupts_heard = 0
        self._interrupts_handled = 0
        self._former: dict[int, object] = {}
        self._over = threading.Event()
        self._closing = threading.Lock()

    def begin(self) -> None:
        """Install the handlers and start the thread."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakes = self._handle_signals()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="fsdp2kit-stop")
        self._thread.start()

    def end(self) -> None:
        """Restore the former handlers."""
        if self._wakes:
            signal.set_wakeup_fd(-1)
        for number, handler in self._former.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._over.set()
        self._wake(0)
        self._thread.join()
        if self.request.requested and not self._is_announced:
            self._announce()
        with self._closing:  # another thread may be in `hear_of`
            os.close(self._read)
            os.close(self._write)
            self._write = -1

    def hear_of(self, reason: str) -> None:
        """Another rank was asked."""
        if not self.request.requested:
            self.request.is_told = True
            self.request.received = reason
        with self._closing:
            self._wake(0)

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
        request = self.request
        request.received = request.received or signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupts_handled += 1
            # Two may come while the main thread is in one call: then this is called once.
            if max(self._interrupts_handled, self._interrupts_heard) > 1:
                former = self._former[number]
                interrupt = former if callable(former) else signal.default_int_handler
                interrupt(number, frame)
        if not self._wakes:
            self._wake(number)
        start = request.start
        if self._is_alone and not start.is_over and not start.is_importing and not self._has_raised:
            self._has_raised = True
            raise Stopped(request.received)

    def _wake(self, number: int) -> None:
        with suppress(OSError):  # full: it will wake up
            os.write(self._write, bytes([number]))

    def _listen(self) -> None:
        """The thread."""
        request = self.request
        since = 0.0
        while not self._over.is_set():
            if select.select([self._read], [], [], _LOOK_SECONDS)[0]:
                for number in os.read(self._read, 64):
                    self._interrupts_heard += number == signal.SIGINT
                    if number in self._former:
                        request.received = request.received or signal.Signals(number).name
            if self._over.is_set() or not request.requested:
                continue
            if not self._is_announced:
                since = time.monotonic()
                self._announce()
            self._end_start(time.monotonic() - since)

    def _announce(self) -> None:
        """Say that the request was heard, and call those who wait for it."""
        request = self.request
        self._is_announced = True
        if not request.is_told and request.is_first_here():
            if request.received and not request.start.is_over:
                then = "the run ends at once, and saves nothing"
            else:
                then = "what is under way ends where it can, a checkpoint follows, and the run ends"
            again = "; Ctrl-C again interrupts at once" if request.received == "SIGINT" else ""
            console.say_here(f"asked to stop ({request.reason}) in {status.position()}: {then}{again}")
        request.call_back()

    def _end_start(self, seconds: float) -> None:
        """End this process if its main thread has not done so in time.

        Ranks that share requests end together: `fsdp2kit.job.lost_ranks` sees to it.

        Args:
            seconds: since the request.
        """
        request = self.request
        if not request.received or not request.start.ends_process:
            return
        waits = 0.0 if request.start.is_importing else _LEAVE_SECONDS
        ends_by_itself = self._is_alone or not request.is_shared
        if ends_by_itself and seconds >= waits and request.start.agree_to_end():
            leave()


_listener: Listener | None = None  # of the outermost block
_runs = 0
_last_words: list[Callable[[], object]] = []


def _begin(request: StopRequest, *, signals: bool = True) -> Listener:
    """Listen from here on."""
    global _listener, _runs
    listener = Listener(request, signals=signals)
    listener.begin()
    _runs += 1
    _listener = listener
    return listener


def _end(listener: Listener) -> None:
    global _listener
    try:
        listener.end()
    finally:  # a second Ctrl-C may come meanwhile
        _listener = None


@contextmanager
def listening(
    *, max_minutes: float | None = None, signals: bool = True, start: UnsavedStart | None = None
) -> Iterator[StopRequest]:
    """``with listening(max_minutes=…) as asked:`` then ``asked.requested`` on this rank.

    A block inside another one shares its request. The former handlers of signals are restored at the end of the
    outermost block.

    Args:
        max_minutes: ``run.max_minutes``; counts in this block alone.
        signals: whether signals ask to stop.
        start: what a request ends at once; None: nothing.
    """
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    if _listener is not None:
        request = _listener.request
        request.deadline = deadline
        try:
            yield request
        finally:
            request.deadline = None
        return
    request = StopRequest(start or UnsavedStart(is_over=True))
    request.deadline = deadline
    listener = _begin(request, signals=signals)
    try:
        yield request
    finally:
        _end(listener)


def listen_from_the_start() -> None:
    """Hear signals from here on, in a process that will run once it has imported what it needs: `running` goes on."""
    if _listener is not None:  # `python -m fsdp2kit run` comes here twice
        return
    start = UnsavedStart(ends_process=True)
    start.is_importing = True
    _begin(StopRequest(start))


def listen_no_more() -> None:
    """This process will not run itself."""
    if _listener is not None and _listener.request.start.is_importing:
        _end(_listener)


@contextmanager
def running(*, ends_process: bool) -> Iterator[StopRequest]:
    """Hear requests to stop a run, from before its start to its end.

    Args:
        ends_process: as of `UnsavedStart`.
    """
    if _listener is not None and _listener.request.start.is_importing:
        listener = _listener
        listener.request.start.is_importing = False
        try:
            yield listener.request
        finally:
            _end(listener)
        return
    with listening(start=UnsavedStart(ends_process=ends_process)) as request:
        yield request


def current() -> StopRequest | None:
    """The request of the run in this process; None where nothing runs."""
    return None if _listener is None else _listener.request


def hear_of(reason: str) -> None:
    """Another rank was asked to stop."""
    if _listener is not None:
        _listener.hear_of(reason)


def run_number() -> int:
    """How many runs this process has begun to listen for; the same on every rank of a job."""
    return _runs


def requested() -> bool:
    """Whether this rank knows that the run is asked to stop."""
    return _listener is not None and _listener.request.requested


def check() -> None:
    """Raise `Stopped` if the run is asked to stop. For work whose ranks leave it together, as under `agreement`."""
    if _listener is not None and (reason := _listener.request.reason) is not None:
        raise Stopped(reason)


def begin_to_change() -> None:
    """Say that the model is about to change, so that from now on there is something to save."""
    if _listener is not None:
        _listener.request.start.begin_to_change()


def when_asked(callback: Callable[[], object]) -> None:
    """Have something called, in a thread, as soon as this rank knows of a request."""
    if _listener is not None:
        _listener.request.when_asked(callback)


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
