"""A rank that fails or is lost: one line on each host that says which, where and since when.

Every rank writes its position and a counter (its beat) to the job's store, which rank 0's host keeps, about once a
second. When a collective fails, the first rank to notice reads what all have written (`Diagnosis`) and leaves one line
in the store. A rank that does not end by itself then, because it waits for ever, is ended by its thread. Tracebacks of
ranks that only wait for a lost one go to the run directory (`tracebacks`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from fsdp2kit.console import counted, runs_of, show
from fsdp2kit.job import status
from fsdp2kit.job import stop as stop_request
from fsdp2kit.job.status import Position
from fsdp2kit.job.tracebacks import path_of, write_traceback
from fsdp2kit.torch_compat import nccl_error

AGAIN = "start the run again: it resumes from its newest complete checkpoint"
LOST, DONE = "lost another rank", "done"
"""How a rank has ended, besides its own errors."""
_MOST_GROUPS = 4
_LINE, _EXPLAINERS, _WARNINGS = "fsdp2kit/line", "fsdp2kit/explainers", "fsdp2kit/warnings"
_CLIENT_SECONDS = 10.0
_GRACE_SECONDS = 10.0
_LEAVE_SECONDS = 5.0
_LOST_SECONDS = 15.0  # and the explanation takes seconds, too
_LATE = 0.95  # of run.timeout_minutes without a change of position


@dataclass(frozen=True)
class Report:
    """What a rank has written to the store last."""

    position: Position
    place: str = ""
    """Where its main thread is in the code; empty while it waits in a collective."""
    beat: int = 0
    end: str = ""
    """How it ended: its own error, `LOST` or `DONE`. Empty while it runs."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Report:
        values = json.loads(text)
        return cls(**{**values, "position": Position(**values["position"])})


@dataclass(frozen=True)
class Diagnosis:
    """What a rank finds in the reports of all.

    Args:
        rank: this rank.
        hosts: of every rank, by name.
        minutes: ``run.timeout_minutes``.
        period: seconds between two reports of a rank.
        read: returns every rank's last report.
    """

    rank: int
    hosts: Sequence[str]
    minutes: float
    period: float
    read: Callable[[], list[Report]]

    def find(self, at: str, error: BaseException | None) -> str | None:
        """Name the ranks that failed, are lost or late, in one line. Takes up to four periods.

        Args:
            at: position of the collective.
            error: the collective's; None: it has not failed yet, and the result is None if no such rank is found.
        """
        mine, before = status.position(), self.read()
        others = [rank for rank in range(len(self.hosts)) if rank != self.rank]
        deadline = time.monotonic() + 4 * self.period
        while True:
            time.sleep(self.period / 4)
            now = self.read()
            running = [rank for rank in others if not now[rank].end]
            silent = [rank for rank in running if now[rank].beat == before[rank].beat]
            failed = [rank for rank in others if now[rank].end not in ("", LOST, DONE)]
            if failed or not silent or time.monotonic() >= deadline:
                break
        if failed:
            return f"{at}: {self.describe_failed(failed[0], now[failed[0]])}"
        if silent:
            # One position a host, its earliest: each rank wrote its last report at another moment.
            earliest: dict[str, Position] = {}
            for rank in sorted(silent, key=lambda rank: now[rank].position.number):
                earliest.setdefault(self.hosts[rank], now[rank].position)
            since = "gives no sign of life since the report from"
            what = self._group(silent, lambda rank: str(earliest[self.hosts[rank]]), since)
            todo = "see whether that host, its network and its processes are up (dmesg says if memory ran out)"
            return f"{at}: {what}; {todo}, and {AGAIN}"
        # Work may take long: nobody is late for a rank that works, too.
        if error is None and not status.is_waiting(status.main_frame()):
            return None
        late = [rank for rank in running if now[rank].position.number < mine.number]
        if not late:
            same = [rank for rank in running if now[rank].position.number == mine.number]
            late = [rank for rank in same if now[rank].place and now[rank].place == before[rank].place]
        if late:
            what = self._group(late, lambda rank: _where(now[rank]), "is still in")
            have = "have" if len(late) > 1 else "has"
            todo = f"what it waits for there is the cause; stacks: {path_of(late[0])}"
            return f"{at}: {what}, and {have} not come within run.timeout_minutes = {self.minutes:g}; {todo}"
        if error is None:
            return None
        what = f"a collective failed, although no rank is silent or late: {str(error).partition(chr(10))[0]}"
        todo = (
            "see the network between the hosts, and whether the ranks of a recipe of yours call the same collectives"
        )
        return f"{at}: {what}; {todo}"

    def describe_failed(self, rank: int, report: Report) -> str:
        what = f"rank {rank} on {self.hosts[rank]} failed in {report.position}: {report.end}"
        return f"{what}; see that host's log, or {path_of(rank)}"

    def _group(self, ranks: Sequence[int], text: Callable[[int], str], verb: str) -> str:
        """``ranks 2–4 on host-b give no sign of life since step 3``: by host and text, four at most."""
        groups: dict[tuple[str, str], list[int]] = {}
        for rank in ranks:
            groups.setdefault((self.hosts[rank], text(rank)), []).append(rank)
        plural = {"gives": "give", "is": "are"}
        first, _, rest = verb.partition(" ")
        texts = [
            f"{name_ranks(some)} on {host} {plural[first] if len(some) > 1 else first} {rest} {what}"
            for (host, what), some in groups.items()
        ]
        more = sum(len(some) for some in list(groups.values())[_MOST_GROUPS:])
        return ", and ".join(texts[:_MOST_GROUPS]) + (f", and so on for {counted(more, 'more rank')}" if more else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 2 and 3``, ``ranks 0–2, 5 and 8–15``; the ranks are in order."""
    parts: list[str] = []
    for first, last in runs_of(ranks):
        parts += [f"{first}–{last}"] if last - first > 1 else map(str, range(first, last + 1))
    text = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _where(report: Report) -> str:
    return f"{report.position}, at {report.place}" if report.place else str(report.position)


class Watch:
    """This rank's part in reporting; `watch` makes it.

    Args:
        store: the job's.
        hosts: of every rank, by name.
        minutes: ``run.timeout_minutes``.
        asks: whether to ask NCCL for errors, and to look for lost ranks before a time-out: NCCL ends a process without
            an exception.
    """

    def __init__(
        self, store: dist.TCPStore, *, rank: int, hosts: Sequence[str], minutes: float, asks: bool = False
    ) -> None:
        # A connection of its own: training's may be busy for as long as a collective takes to begin.
        self._address = store.host, store.port
        self._store = self._connect()
        self.rank, self.hosts, self._minutes, self._asks = rank, tuple(hosts), minutes, asks
        # 256 reports a second at most, whatever the number of ranks.
        self.period = max(1.0, len(hosts) / 256)
        self._beat, self._end, self._over, self._knows, self._warnings = 0, "", threading.Event(), False, 0
        self._written: status.Position | None = None  # the position of the last report
        self._asked, self._answer = "", ""  # about a request to stop: its keys in the store, and what this rank said
        self.leaves = False
        """Whether this process ends, as all ranks have agreed to because they have nothing to save."""
        self._failed_at: float | None = None  # when this rank's thread saw that another rank has failed, or is gone
        self._write()
        self._thread = threading.Thread(target=self._report, daemon=True, name="fsdp2kit-status")
        self._thread.start()

    def _connect(self) -> dist.TCPStore:
        short = timedelta(seconds=_CLIENT_SECONDS)
        return dist.TCPStore(*self._address, is_master=False, timeout=short, wait_for_workers=False)

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    def is_first_asked(self) -> bool:
        """Whether this rank says for its host that it is asked to stop: the first that was, and no rank has failed."""
        with suppress(RuntimeError, OSError):
            if self._store.check([_LINE]):  # torchrun ends the others
                return False
            return self._store.add(f"fsdp2kit/run {stop_request.run_number()} asked on {self.host}", 1) == 1
        return stop_request.is_first_local_rank()

    def stop(self) -> None:
        """Stop reporting, at the end of a run. Rank 0, which keeps the store, waits a moment for the others."""
        self._over.set()
        self._thread.join(timeout=self.period)
        self._end = DONE
        _within(self.period * 3, self._write_and_wait)

    def announce(self, error: BaseException) -> None:
        """Tell the other ranks of this rank's own failure. Rank 0, which keeps the store, waits until they know."""
        self._end = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")
        if self.rank == 0:
            _ignore_sigterm()
        _within(self.period * 5, self._announce)

    def explain(self, error: BaseException) -> str:
        """The line about a collective that failed, "" if another rank of this host prints it. Takes a few seconds.

        All ranks get the same line, from the first that asks.
        """
        self._end = LOST
        if self._knows:
            return ""
        at = ", ".join(part for part in (str(status.position()), _collective_of(error)) if part)
        found = _within(self.period * 8 + _CLIENT_SECONDS / 2, lambda: self._explain(at, error))
        if found is not None:
            return found
        # Without a store the ranks cannot agree on who prints: it is the lowest one of this host that can be alive.
        others = [rank for rank, host in enumerate(self.hosts) if host == self.host and rank > 0]
        what = f"rank 0 on {self.hosts[0]}, to which all ranks report, does not answer"
        todo = f"see whether that host, its network and its processes are up, and {AGAIN}"
        return f"{at}: {what}; {todo}" if self.rank == min(others, default=0) else ""

    def _diagnosis(self) -> Diagnosis:
        return Diagnosis(self.rank, self.hosts, self._minutes, self.period, self._read)

    def _announce(self) -> None:
        mine = Report(status.position(), end=self._end)
        self._store.compare_set(_LINE, "", f"{mine.position}: {self._diagnosis().describe_failed(self.rank, mine)}")
        self._write_and_wait()

    def _write_and_wait(self) -> None:
        self._write()
        deadline = time.monotonic() + 3 * self.period
        while self.rank == 0 and time.monotonic() < deadline and not all(report.end for report in self._read()):
            time.sleep(self.period / 20)

    def _explain(self, at: str, error: BaseException) -> str:
        self._write()
        is_first, deadline = self._store.add(_EXPLAINERS, 1) == 1, time.monotonic() + 5 * self.period
        while not is_first and not self._store.check([_LINE]) and time.monotonic() < deadline:
            time.sleep(self.period / 10)
        if not self._store.check([_LINE]):  # the first that asks may be killed before it has an answer
            self._store.compare_set(_LINE, "", self._diagnosis().find(at, error) or "")
        line = self._take_line()
        if self.rank == 0:  # the other hosts still have to read it
            time.sleep(2 * self.period)
        return line

    def _take_line(self) -> str:
        """The line, for the first rank of each host that asks; "" for the others."""
        self._knows = True
        is_first = self._store.add(f"fsdp2kit/said on {self.host}", 1) == 1
        return self._store.get(_LINE).decode() if is_first else ""

    def _write(self) -> None:
        position = status.position()
        # Only a rank that stays where it is may hold up others; reading its stack while it runs is not free of risk.
        stays, self._written = position == self._written, position
        place = status.place_of_work() if stays and not self._end else ""
        self._store.set(_key(self.rank), Report(position, place, self._beat, self._end).encode())

    def _read(self) -> list[Report]:
        keys = [_key(rank) for rank in range(len(self.hosts))]
        if self._store.check(keys):
            return [Report.decode(text) for text in self._store.multi_get(keys)]
        texts = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        return [Report(Position()) if text is None else Report.decode(text) for text in texts]

    def _report(self) -> None:
        """The thread: write the beat; end this process after another one's failure if it does not end by itself."""
        since, number, asks, is_connected = time.monotonic(), -1, self._asks, True
        while not self._over.wait(self.period):
            self._beat += 1
            if status.position().number != number:
                since, number, asks = time.monotonic(), status.position().number, self._asks
            if self._asks and not self._ends_by_itself() and (error := nccl_error()):
                where = f"NCCL failed ({error}). It waited here:\n{_main_stack()}"
                _explain_and_end(self, RuntimeError(f"NCCL: {error}"), where)
            try:
                if not is_connected:
                    socket.create_connection(self._address, timeout=_CLIENT_SECONDS).close()  # torch would print
                    self._store, is_connected = self._connect(), True
                self._write()
                has_failed = self._store.check([_LINE])
                if not has_failed:
                    self._share_stop()
                self._failed_at = (self._failed_at or time.monotonic()) if has_failed else None
                if has_failed and not self._ends_by_itself():
                    self._end_soon()
                elif asks and time.monotonic() - since >= 60 * self._minutes * _LATE:
                    asks = False
                    self._warn(number)
                if self._asks:
                    self._keep_stack()
            except (RuntimeError, OSError):  # rank 0 has ended, or its host is lost, or this connection alone
                is_connected, self._failed_at = False, self._failed_at or time.monotonic()
                if status.is_failing() and not self._ends_by_itself():
                    self._end_soon()

    def _share_stop(self) -> None:
        """Tell the other ranks of a request to stop, and hear of theirs.

        Each rank says whether it has something to save. If none has, all end here.
        """
        request = stop_request.current()
        if request is None:
            return
        key = f"fsdp2kit/stop of run {stop_request.run_number()}"
        reason = request.received  # the others look at their own clocks and launchers
        if reason is not None and self._asked != key:
            self._store.compare_set(key, "", f"{reason} on rank {self.rank}")
        if self._asked != key and self._store.check([key]):
            self._asked = key
            request.hear_of(self._store.get(key).decode())
            self._answer = "ends" if request.agree_to_end() else "goes on"
            self._store.add(f"{key}: {self._answer}", 1)
        if self._asked == key and self._answer == "ends":
            if self._store.add(f"{key}: goes on", 0):
                self._answer = "goes on"
                request.go_on()
            elif self._store.add(f"{key}: ends", 0) == len(self.hosts):
                self._leave(key)

    def _leave(self, key: str) -> NoReturn:
        """End this process once all ranks do: a rank that still worked would miss those that have gone."""
        self.leaves = True
        with suppress(RuntimeError, OSError):  # rank 0, which keeps the store, has left
            left, deadline = self._store.add(f"{key}: left", 1), time.monotonic() + _LEAVE_SECONDS
            while left < len(self.hosts) and time.monotonic() < deadline:
                time.sleep(self.period / 20)
                left = self._store.add(f"{key}: left", 0)
            if self.rank == 0:
                time.sleep(self.period / 4)
        stop_request.leave()

    def _ends_by_itself(self) -> bool:
        """Whether it has said how it ends, or handles an error, which may be one that every rank raises.

        An upload may take minutes then; after run.timeout_minutes it is one that never ends.
        """
        is_late = self._failed_at is not None and time.monotonic() - self._failed_at >= 60 * self._minutes
        return bool(self._end) or (status.is_failing() and not is_late)

    def _warn(self, number: int) -> None:
        is_first = self._store.add(f"fsdp2kit/warned at {number}", 1) == 1
        if is_first and (line := self._diagnosis().find(str(status.position()), None)):
            show(f"warning: {line}", file=sys.stderr, flush=True)
            self._store.add(_WARNINGS, 1)

    def _keep_stack(self) -> None:
        """After a warning, write down where this rank is; a time-out of NCCL leaves no time for it."""
        if (warnings := self._store.add(_WARNINGS, 0)) > self._warnings:
            self._warnings = warnings
            write_traceback(f"It was here at the warning:\n{_main_stack()}")

    def _end_soon(self) -> None:
        """Print the line, and end this process unless it ends by itself."""
        with suppress(RuntimeError, OSError):  # the store has ended with rank 0
            if line := self._take_line():
                show(f"error: {line}", file=sys.stderr, flush=True)
                write_traceback(f"error: {line}")
        if self._over.wait(_GRACE_SECONDS) or self._ends_by_itself():
            return
        write_traceback(f"It waited here when another rank had ended:\n{_main_stack()}")
        os._exit(1)


_watch: Watch | None = None
_ending = threading.Lock()


def watch(store: dist.TCPStore, *, rank: int, hosts: Sequence[str], minutes: float, asks: bool) -> None:
    """Report to the other ranks from now on; see `Watch`. Every rank calls it."""
    global _watch
    _watch = Watch(store, rank=rank, hosts=hosts, minutes=minutes, asks=asks)
    if (request := stop_request.current()) is not None:
        request.share(_watch.is_first_asked)


def stop() -> None:
    """Stop reporting."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def announce(error: BaseException) -> None:
    """Tell the other ranks why this one ends."""
    if _watch is not None:
        _watch.announce(error)


def end_failed(error: Exception) -> int:
    """End after this rank's own failure: print and keep the traceback, tell the others. Returns the exit code.

    Where ranks do not report (one rank, or a group that someone else has started), the error is raised.
    """
    write_traceback("".join(traceback.format_exception(error)))
    if _watch is None:
        raise error
    show("".join(traceback.format_exception(error)), end="", file=sys.stderr)
    sys.stderr.flush()
    _watch.announce(error)
    return 1


def end_lost(error: Exception) -> NoReturn:
    """End after a collective that failed because of another rank: one line a host, and exit code 1."""
    if _watch is None:
        what = "another rank has ended, or has not answered within run.timeout_minutes"
        show(f"error: {what}; what follows is not the cause", file=sys.stderr)
        raise error
    _ignore_sigterm()
    _explain_and_end(_watch, error)


def outlive_torchrun(error: Exception, *, is_lost: bool) -> None:
    """Ignore SIGTERM, which torchrun sends as soon as one rank has ended, 30 seconds before it kills.

    Args:
        error: what ends this rank.
        is_lost: because of another rank. Then this one has ended `_LOST_SECONDS` later, even if it still waits.
    """
    if _watch is None:
        return
    _ignore_sigterm()
    if is_lost:  # a save in the background may wait for that rank, too
        timer = threading.Timer(_LOST_SECONDS, _explain_and_end, (_watch, error))
        timer.daemon, timer.name = True, "fsdp2kit-end"
        timer.start()


def _explain_and_end(watch: Watch, error: Exception, text: str = "") -> NoReturn:
    """For the main thread, or for another if that does not get here. ``text`` is written in place of a traceback."""
    if watch.leaves:  # its thread is about to end this process
        time.sleep(_LEAVE_SECONDS)
    _ending.acquire()  # and never released
    text = text or "".join(traceback.format_exception(error))
    if not write_traceback(text):
        show(text, file=sys.stderr)
    if line := watch.explain(error):
        show(f"error: {line}", file=sys.stderr)
        write_traceback(f"error: {line}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _ignore_sigterm() -> None:
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _key(rank: int) -> str:
    return f"fsdp2kit/rank/{rank}"


def _main_stack() -> str:
    return "".join(traceback.format_stack(status.main_frame()))


def _collective_of(error: BaseException) -> str:
    """The function of torch.distributed in which an error was raised, such as ``all_reduce``; "" if in none."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame.name for frame in frames if frame.filename.endswith("distributed_c10d.py")]
    return next((name for name in reversed(found) if name != "wrapper"), "")


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of ``work``; None if it fails, or takes longer. A store on a lost host may never answer."""
    results: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError, OSError):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True, name="fsdp2kit-explain")
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
