"""Ranks that are lost, late or fail: which one, on which host, since when; and nobody is left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2kit.errors import RunFailure
from fsdp2kit.job import distributed, lost_ranks, status, tracebacks
from fsdp2kit.job.lost_ranks import RankReport, Watch, name_ranks
from fsdp2kit.job.status import Position
from tests.job.helpers import steps_done
from tests.support.models import full, slow
from tests.support.short_run import TOML
from tests.support.workers import ending, start_ranks

HOST = platform.node()

RECIPE = """
import sys, time
import torch.distributed as dist
sys.path.insert(0, {root!r})
from fsdp2kit.data.loader import Loader
from recipes import sft
from recipes.sft import Config

def cross_entropy(model, inputs):
    act_in("forward")
    return original_loss(model, inputs)

def batch(self, index):
    act_in("data")
    return original_batch(self, index)

def act_in(where):
    calls[where] += 1
    if where == {where!r} and calls[where] == 3 and dist.get_rank() == {rank}:
        {act}

def main(config):
    sft.cross_entropy, Loader.batch = cross_entropy, batch
    sft.main(config)

calls = {{"forward": 0, "data": 0}}
original_loss, original_batch = sft.cross_entropy, Loader.batch
"""


def start(
    folder: Path, size: int, *options: str, act: str = "pass", where: str = "forward", rank: int = -1
) -> tuple[list[Any], list[Path], Path]:
    """Start an endless run in which one rank runs a line of code in a forward, or while it reads data.

    Returns:
        The ranks, their logs and the run directory.
    """
    root = str(Path(__file__).parents[2])
    (folder / "own.py").write_text(RECIPE.format(root=root, act=act, where=where, rank=rank))
    (folder / "run.toml").write_text(TOML.replace('recipe = "sft"', 'recipe = "own.py"'))
    fixed = ["train.steps=1000000", f"run.dir={folder / 'run'}", "checkpoint.every=0", "data.prefetch=0"]
    fixed.append(f"train.global_batch_size={size}")
    ranks, logs = start_ranks(size, folder, "fsdp2kit.run", str(folder / "run.toml"), *fixed, *options)
    return ranks, logs, folder / "run"


def outcome(ranks: list[Any], logs: list[Path], *, seconds: float = 90) -> tuple[list[Any], list[str]]:
    """Exit codes, and the lines of error with the numbers of the ranks that printed them."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.1, deadline - time.monotonic()))
    lines = [line for log in logs for line in log.read_text().splitlines() if line.startswith("error: ")]
    return [rank.exitcode for rank in ranks], lines


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_named_once(tmp_path: Path, killed: int) -> None:
    ranks, logs, run_dir = start(tmp_path, 2)
    with ending(ranks):
        deadline = time.monotonic() + 240
        while steps_done(run_dir) < 3 and ranks[0].is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(ranks[killed].pid, signal.SIGKILL)
        codes, lines = outcome(ranks, logs)
    said = "".join(log.read_text() for log in logs)
    assert codes[1 - killed] == 1, said
    [line] = lines
    what = (
        "to which all ranks report, does not answer" if killed == 0 else "gives no sign of life since the report from "
    )
    assert re.match(rf"error: step \d+, [^:]+: rank {killed} on {HOST},? {what}", line), line
    assert "Traceback" not in said
    kept = (run_dir / "errors" / f"rank-{1 - killed}.txt").read_text()
    assert "Traceback" in kept
    assert "gloo/transport" in kept


SHORT = "run.timeout_minutes=0.1"


@pytest.mark.full
def test_a_rank_that_sleeps_is_named_with_its_place_and_ended(tmp_path: Path) -> None:
    """In its forward, where the others wait for its parameters."""
    ranks, logs, run_dir = start(tmp_path, 2, SHORT, act="time.sleep(1000)", rank=1)
    with ending(ranks):
        codes, lines = outcome(ranks, logs)
    said = "".join(log.read_text() for log in logs)
    assert codes == [1, 1], said
    [line] = lines
    where = rf"error: step 3, forward, \w+: rank 1 on {HOST} is still in step 3, forward, at [^/]+/own.py:20"
    assert re.match(where + r" in act_in, and has not come within run.timeout_minutes = 0.1; ", line), line
    assert f"{run_dir}/errors/rank-1.txt" in line
    assert "time.sleep(1000)" in (run_dir / "errors" / "rank-1.txt").read_text()
    assert "Traceback" not in said


@pytest.mark.full
def test_a_rank_that_is_late_is_named_with_its_phase(tmp_path: Path) -> None:
    """It reads its data for ever, while the others wait to compare their batches."""
    ranks, logs, _ = start(tmp_path, 3, SHORT, act="time.sleep(1000)", where="data", rank=1)
    with ending(ranks):
        codes, lines = outcome(ranks, logs)
    assert codes == [1, 1, 1], lines
    [line] = lines
    assert line.startswith("error: step 3, exchanging the batch's counts, all_reduce: rank 1 on")
    assert f"rank 1 on {HOST} is still in step 3, reading data, at data/build.py:" in line


@pytest.mark.parametrize("rank", [slow(0), full(2)])
def test_a_rank_that_is_stopped_gives_no_sign_of_life(tmp_path: Path, rank: int) -> None:
    """Rank 0's store then takes calls and never answers, as on a host whose link is cut."""
    act = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    ranks, logs, _ = start(tmp_path, 3, SHORT, act=act, rank=rank)
    with ending(ranks):
        codes, lines = outcome([one for number, one in enumerate(ranks) if number != rank], logs)
    assert codes == [1, 1], lines
    [line] = lines
    what = "gives no sign of life since the report from " if rank else "to which all ranks report, does not answer; "
    assert re.match(rf"error: step 3, .*: rank {rank} on {HOST},? {what}", line), line


@pytest.mark.parametrize("rank", [1, slow(0)])
def test_the_others_point_to_a_rank_that_failed(tmp_path: Path, rank: int) -> None:
    ranks, logs, run_dir = start(tmp_path, 2, act="raise ValueError('a bug')", rank=rank)
    with ending(ranks):
        codes, lines = outcome(ranks, logs)
    own, other = (logs[number].read_text() for number in (rank, 1 - rank))
    assert codes == [1, 1], own + other
    assert own.count("Traceback") == 1
    assert "ValueError: a bug" in own
    assert "Traceback" not in other
    [line] = lines
    assert line in other
    assert re.match(
        rf"error: step 3, \w+.*: rank {rank} on {HOST} failed in step 3, forward: ValueError: a bug; ", line
    )
    assert f"{run_dir}/errors/rank-{rank}.txt" in line
    assert "ValueError: a bug" in (run_dir / "errors" / f"rank-{rank}.txt").read_text()


@pytest.mark.full
def test_the_others_point_to_a_rank_whose_disk_is_full(tmp_path: Path) -> None:
    act = "import fsdp2kit.errors; raise fsdp2kit.errors.StorageFailure('x: no space left; free some', alone=True)"
    ranks, logs, _ = start(tmp_path, 2, act=act, rank=0)
    with ending(ranks):
        codes, lines = outcome(ranks, logs)
    said = "".join(log.read_text() for log in logs)
    assert codes == [1, 1], said
    assert "Traceback" not in said
    own, of_other = lines
    assert own == "error: x: no space left; free some"
    assert f"rank 0 on {HOST} failed in step 3, forward: StorageFailure: x: no space left; free some; see " in of_other


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def watch_of(store: dist.TCPStore, rank: int, **options: Any) -> Watch:
    """A rank of four on two hosts, with quick beats."""
    watch = Watch(store, rank=rank, hosts=("a", "a", "b", "b"), minutes=0.01, **options)
    watch.period = 0.5 if options else 0.2
    return watch


@pytest.mark.full
def test_silent_ranks_are_named_before_a_time_out_that_ends_processes(
    store: dist.TCPStore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As NCCL's does; here no collective ever fails. Ranks that live say where they are."""
    monkeypatch.setattr(tracebacks, "_folder", tmp_path)
    monkeypatch.setenv("RANK", "0")  # of both, which write here
    for rank, phase in ((2, "backward"), (3, "forward")):
        store.set(f"fsdp2kit/rank/{rank}", RankReport(Position(9 - rank // 3, 12, "", phase), beat=5).encode())
    watches = [watch_of(store, rank, asks=True) for rank in (1, 0)]
    deadline, said = time.monotonic() + 40, ""
    while "\n" not in said and time.monotonic() < deadline:
        time.sleep(0.1)
        said += capfd.readouterr().err
    stacks = tmp_path / "rank-0.txt"
    assert eventually(lambda: stacks.is_file() and stacks.read_text().count("at the warning:\n") == 2)
    time.sleep(3 * watches[0].period)
    for watch in watches:
        watch.stop()
    assert said.startswith(f"warning: {status.position()}: ranks 2 and 3 on b give no sign of life since ")
    assert "the report from step 12, forward; see whether" in said
    assert said.count("\n") == 1
    assert stacks.read_text().count("at the warning:\n") == 2  # once each


def test_ranks_of_a_host_print_once_and_later_ones_repeat_the_first(store: dist.TCPStore) -> None:
    """Rank 3 fails by itself. Rank 1 notices, then rank 0, of the same host, and rank 2."""
    watches = [watch_of(store, rank) for rank in (1, 0, 2)]
    store.set("fsdp2kit/rank/3", RankReport(Position(7, 12, "", "forward"), end="ValueError: a bug").encode())
    for watch in watches:
        watch._over.set()  # only what they are asked
    lines = [watch.explain(RuntimeError("gloo/transport")) for watch in watches]
    assert lines[0].startswith(f"{status.position()}: rank 3 on b failed in step 12, forward: ValueError: a bug; ")
    assert lines[1:] == ["", lines[0]]


class Gone:
    """A store on a host that is lost: its calls fail, or never return."""

    def __init__(self, answers: bool) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        if not self._answers:
            time.sleep(60)
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize("answers", [True, False])
def test_a_store_that_is_gone_is_said_once_a_host(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(lost_ranks, "_CLIENT_SECONDS", 1.0)
    watches = [watch_of(store, rank) for rank in (1, 2, 3)]
    for watch in watches:
        watch._over.set()
        watch.period, watch._store = 0.01, Gone(answers)  # type: ignore[assignment]
    monkeypatch.setattr(lost_ranks, "_CLIENT_SECONDS", 0.1)
    lines = [watch.explain(RuntimeError("gloo/transport")) for watch in watches]
    assert "rank 0 on a, to which all ranks report, does not answer; " in lines[0]
    assert lines[1:] == [lines[0], ""]


def eventually(holds: Callable[[], bool], *, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def report_of(store: dist.TCPStore, rank: int) -> RankReport:
    return RankReport.decode(store.get(f"fsdp2kit/rank/{rank}"))


@pytest.mark.parametrize("is_gone", [False, full(True)])
def test_a_rank_that_is_stuck_while_it_handles_an_error_ends(
    is_gone: bool, store: dist.TCPStore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After run.timeout_minutes, 0.6 s here; the store may have ended with rank 0 by then."""
    ended: list[int] = []
    monkeypatch.setattr(lost_ranks, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(os, "_exit", lambda code: (ended.append(code), watch._over.set()))
    watch = watch_of(store, 2)
    try:
        raise RuntimeError("an upload that never ends")
    except RuntimeError:
        started = time.monotonic()
        if is_gone:
            monkeypatch.setattr(watch, "_connect", lambda: Gone(answers=True))
            watch._store = Gone(answers=True)  # type: ignore[assignment]
        else:
            store.set("fsdp2kit/line", "step 3: rank 1 on a failed")
        assert eventually(lambda: ended == [1])
    assert time.monotonic() - started >= 0.6
    assert capfd.readouterr().err == ("" if is_gone else "error: step 3: rank 1 on a failed\n")


def test_an_error_that_every_rank_raises_is_not_told_of_one(
    store: dist.TCPStore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has ended with it; rank 0 still closes what is open, and then shows its own traceback."""
    ended: list[int] = []
    monkeypatch.setattr(lost_ranks, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(os, "_exit", ended.append)
    watch = watch_of(store, 0)
    watch._minutes = 1
    try:
        raise RunFailure("step 3: the loss is not finite")
    except RunFailure:
        store.set("fsdp2kit/line", "step 3: rank 1 on a failed in step 3: RunFailure: step 3: the loss is not finite")
        beat = report_of(store, 0).beat
        assert eventually(lambda: report_of(store, 0).beat >= beat + 3)
    watch._over.set()
    assert (ended, capfd.readouterr().err) == ([], "")


def test_the_main_thread_handles_an_exception() -> None:
    @contextlib.contextmanager
    def closing() -> Iterator[None]:
        try:
            yield
        finally:
            seen.append(status.is_failing())

    seen = [status.is_failing()]
    with closing():
        pass
    with contextlib.suppress(ValueError), closing():
        raise ValueError
    assert [*seen, status.is_failing()] == [False, False, True, False]


def test_nobody_is_late_for_a_rank_that_works(store: dist.TCPStore) -> None:
    """Others tokenise at the same position, as this rank does, or before it; late is only who others wait for."""
    watch, mine = watch_of(store, 0), status.position()
    behind = replace(mine, number=mine.number - 1)
    store.set("fsdp2kit/rank/3", RankReport(behind, "x.py:3 in read").encode())
    watch._over.set()
    for rank in (1, 2):
        store.set(
            f"fsdp2kit/rank/{rank}", RankReport(mine, "x.py:3 in read", end="done" if rank == 1 else "").encode()
        )
    beats = itertools.count(1)
    read = watch._read
    watch._read = lambda: [replace(report, beat=next(beats)) for report in read()]
    assert watch._diagnosis().find("here", None) is None
    store.set("fsdp2kit/rank/3", RankReport(mine, "x.py:3 in read").encode())
    assert watch._diagnosis().find("here", None) is None
    line = watch._diagnosis().find("here", RuntimeError("gloo/transport"))
    where = f"ranks 2 and 3 on b are still in {mine}, at x.py:3 in read"
    assert line is not None
    assert line.startswith(f"here: {where}, and have not come within run.timeout_minutes = 0.01; ")


@pytest.mark.parametrize("of_user", ["", "/elsewhere/rank-"])
def test_records_of_nccl_go_to_the_run_directory(
    of_user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracebacks, "_folder", None)
    monkeypatch.setattr(tracebacks, "_is_users", bool(of_user))
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", of_user)
    tracebacks.keep_in(tmp_path / "gloo" / "errors")
    assert not (tmp_path / "gloo").exists()
    tracebacks.keep_in(tmp_path / "errors", nccl=True)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == (of_user or str(tmp_path / "errors" / "nccl-rank-"))
    assert (tmp_path / "errors").is_dir() != bool(of_user)


def test_a_rank_reports_again_after_a_broken_connection(store: dist.TCPStore) -> None:
    watch = watch_of(store, 1)
    watch._store = Gone(answers=True)  # type: ignore[assignment]
    beat = report_of(store, 1).beat
    assert eventually(lambda: report_of(store, 1).beat > beat)
    watch._over.set()


def test_a_rank_that_waits_for_ever_after_a_lost_one_ends(
    store: dist.TCPStore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a background save's collective, say; the main thread never says which rank is lost."""
    ended: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    watch = watch_of(store, 0)
    watch._over.set()
    store.set("fsdp2kit/line", "step 3: rank 2 on b gives no sign of life")
    for name, value in (("_watch", watch), ("_LOST_SECONDS", 0.1), ("_ending", threading.Lock())):
        monkeypatch.setattr(lost_ranks, name, value)
    monkeypatch.setattr(os, "_exit", ended.append)
    try:
        lost_ranks.outlive_torchrun(RuntimeError("gloo/transport"), is_lost=True)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert eventually(lambda: ended == [1])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "error: step 3: rank 2 on b gives no sign of life\n" in capfd.readouterr().err


def test_what_nccls_watchdog_finds_is_explained_and_ends_the_rank(
    store: dist.TCPStore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A collective on a device raises nothing: the main thread would wait until torch ends the process."""
    ended: list[int] = []
    found: list[str | None] = [None]
    monkeypatch.setattr(tracebacks, "_folder", tmp_path)
    monkeypatch.setenv("RANK", "0")
    for name, value in (("nccl_error", lambda: found[0]), ("_ending", threading.Lock())):
        monkeypatch.setattr(lost_ranks, name, value)
    monkeypatch.setattr(os, "_exit", lambda code: (ended.append(code), watch._over.set()))
    for rank in (1, 2, 3):
        store.set(f"fsdp2kit/rank/{rank}", RankReport(Position(9, 12, "", "backward"), beat=5).encode())
    watch = watch_of(store, 0, asks=True)
    watch.period, watch._minutes = 0.1, 100.0  # no warning before
    beat = report_of(store, 0).beat
    assert eventually(lambda: report_of(store, 0).beat > beat + 2)
    assert not ended

    found[0] = "COMM_ERROR"

    assert eventually(lambda: ended == [1])
    said = capfd.readouterr().err
    assert said.startswith(
        f"error: {status.position()}: rank 1 on a gives no sign of life since the report from step 12"
    )
    assert "NCCL failed (COMM_ERROR). It waited here:" in (tmp_path / "rank-0.txt").read_text()


def test_no_thread_is_left_after_the_end(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(lost_ranks, "_watch", watch_of(store, 1))
    status.watch_waiting()
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert {"fsdp2kit-status", "fsdp2kit-waiting"} <= names
    distributed.stop()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("fsdp2kit-")]
    status.watch_waiting()  # as a second run in one process does
    assert eventually(lambda: status.take_looks()[0] > 0)
    status.stop()


def test_ranks_by_name() -> None:
    named = {(3,): "rank 3", (2, 3): "ranks 2 and 3", (0, 1, 2, 5, 8, 9, 10): "ranks 0–2, 5 and 8–10"}
    assert [name_ranks(ranks) for ranks in named] == list(named.values())


def test_a_silent_host_is_lost_since_the_earliest_position_of_its_ranks() -> None:
    steps = (9, 5, 3)
    reports = [lost_ranks.RankReport(status.Position(step, step, "")) for step in steps]
    found = lost_ranks.Diagnosis(0, ["a", "b", "b"], 1.0, 0.01, lambda: reports).find("here", RuntimeError())
    assert found is not None
    assert "ranks 1 and 2 on b give no sign of life since the report from step 3;" in found


NETWORK = "a collective failed, although no rank is silent or late: gloo"


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (
            {1: {"beat": 0}, 2: {"end": "ValueError: a bug"}, 3: {"end": "OSError"}},
            "rank 2 on b failed in step 3: Valu",
        ),
        ({1: {"beat": 0, "end": "done"}, 2: {"beat": 0, "end": "lost another rank"}}, NETWORK),
        (
            {1: {"number": 8}, 3: {"number": 6}},
            "rank 1 on a is still in step 3, and rank 3 on b is still in step 3, and",
        ),
        (
            {2: {"number": 10}, 3: {"place": "x.py:3 in f"}},
            "rank 3 on b is still in step 3, at x.py:3 in f, and has not",
        ),
        ({3: {"place": "moves"}}, NETWORK),
        (
            {1: {"beat": 0}, 2: {"beat": 0}},
            "rank 1 on a gives no sign of life since the report from step 3, and rank 2",
        ),
    ],
    ids=["failed", "ended", "late", "stuck", "moving", "silent"],
)
def test_who_is_to_blame(others: dict[int, dict[str, Any]], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks on two hosts at position 9; all others live and wait there too, but for these fields."""
    monkeypatch.setattr(status, "_now", Position(9, 3, ""))
    beats = itertools.count(1)

    def report(rank: int, beat: int) -> RankReport:
        fields = {"number": 9, "beat": beat, "place": "", "end": "", **others.get(rank, {})}
        place = f"x.py:{beat} in f" if fields["place"] == "moves" else fields["place"]
        return RankReport(Position(fields["number"], 3, ""), place, fields["beat"], fields["end"])

    def read() -> list[RankReport]:
        beat = next(beats)
        return [report(rank, beat) for rank in range(4)]

    found = lost_ranks.Diagnosis(0, "aabb", 1.0, 0.01, read).find("here", RuntimeError("gloo\nmore"))
    assert found is not None
    assert found.startswith(f"here: {says}")


def test_of_many_silent_hosts_four_are_named_and_the_ranks_of_the_others_counted() -> None:
    reports = [RankReport(Position(1, 1, ""))] * 13
    found = lost_ranks.Diagnosis(0, "abbccddeeffgg", 1.0, 0.001, lambda: reports).find("here", RuntimeError())
    assert found is not None
    assert found.count("give no sign of life") == 4
    assert ", and so on for 4 more ranks; see whether" in found


@pytest.mark.parametrize(("ranks", "seconds"), [(4, 1.0), (256, 1.0), (1024, 4.0)])
def test_many_ranks_report_less_often(ranks: int, seconds: float, store: dist.TCPStore) -> None:
    watch = Watch(store, rank=0, hosts=["a"] * ranks, minutes=1.0)
    watch._over.set()
    assert watch.period == seconds
