"""Which ranks failed, are lost or late, from what each has reported: one line that names them and their hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from fsdp2kit import status
from fsdp2kit.console import counted, runs_of
from fsdp2kit.status import Position
from fsdp2kit.tracebacks import path_of

AGAIN = "start the run again: it resumes from its newest complete checkpoint"
LOST, DONE = "lost another rank", "done"
"""How a rank has ended, besides its own errors."""
_MOST_GROUPS = 4


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
