"""Long work on one rank: the others wait in short collectives, whatever the timeout of a collective is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2kit.errors import UserError
from fsdp2kit.job import status
from fsdp2kit.job.distributed import one_per_machine_first
from tests.support.workers import WorkerPool


def waits(fails: bool) -> tuple[str, float, int]:
    """Runs in a worker: what came of work that takes two seconds on the first rank.

    And the longest collective, and how many positions the rank has passed.
    """
    longest, original, before = 0.0, dist.all_reduce, status.position().number

    def timed(*arguments, **options):
        nonlocal longest
        started = time.perf_counter()
        result = original(*arguments, **options)
        longest = max(longest, time.perf_counter() - started)
        return result

    def work() -> str:
        if os.environ["LOCAL_RANK"] == "0":
            time.sleep(2)
            if fails:
                raise UserError("work", "failed", "mend it")
        return f"done by {os.environ['LOCAL_RANK']}"

    dist.all_reduce = timed
    try:
        return one_per_machine_first(work), longest, status.position().number - before
    except UserError as error:
        return str(error), longest, status.position().number - before
    finally:
        dist.all_reduce = original


@pytest.mark.full
def test_nobody_waits_long_in_a_collective(pool: WorkerPool) -> None:
    results = pool.run(2, waits, False)
    assert [outcome for outcome, _, _ in results] == ["done by 0", "done by 1"]
    assert max(longest for _, longest, _ in results) < 1.5
    passed = {
        passed for _, _, passed in results
    }  # nobody is late meanwhile, and all are at the same position after it
    assert len(passed) == 1
    assert min(passed) > 4
    assert [outcome for outcome, _, _ in pool.run(2, waits, True)] == ["work: failed; mend it"] * 2


def _frames(*files: str) -> Any:
    """A thread's frames, the innermost first, of functions in these files."""
    outer: Any = None
    for line, file in reversed([*enumerate(files, start=1)]):
        outer = SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name="f"), f_lineno=line, f_back=outer)
    return outer


TORCH = "/x/site-packages/torch"
DISTRIBUTED, OPS = f"{TORCH}/distributed/distributed_c10d.py", f"{TORCH}/_ops.py"


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        ([DISTRIBUTED], True),
        ([f"{TORCH}/distributed/fsdp/_param.py"], False),
        ([f"{TORCH}/distributed/tensor/_api.py"], False),
        ([OPS, "/mine.py", DISTRIBUTED], True),
        ([OPS, "/mine.py", "/mine.py", DISTRIBUTED], False),
        (["/mine.py", DISTRIBUTED], False),
        ([], False),
    ],
)
def test_what_is_waiting_in_a_collective(files: list[str], waits: bool) -> None:
    assert status.is_waiting(_frames(*files)) is waits


def test_waiting_for_the_device_ends_with_the_next_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_now", status.Position(4, 2, "", "backward"))
    status.enter_device_wait()
    assert status.is_waiting(None)
    status.enter("optimizer")
    assert not status.is_waiting(None)
    assert str(status.position()) == "step 2, optimizer"
    status.begin("evaluating")
    assert str(status.position()) == "step 2, evaluating"
    status.begin_run()
    assert (str(status.position()), status.position().number) == ("starting", 8)


def test_the_place_of_work_is_the_users_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or ours, which may be installed among the libraries."""
    monkeypatch.setattr(status, "_PACKAGE", "/x/site-packages/fsdp2kit")
    library, own = f"{TORCH}/nn/module.py", "/home/me/recipes/mine.py"
    assert status.place_of(_frames(library, own, "/home/me/other.py")) == "recipes/mine.py:2 in f"
    assert status.place_of(_frames(library, "<frozen runpy>")) == "nn/module.py:1 in f"
    assert status.place_of(_frames(library, "/x/site-packages/fsdp2kit/job/mesh.py", own)) == "job/mesh.py:2 in f"
    assert status.place_of(None) == ""


def _order(folder: Path) -> tuple[list[str], str]:
    """In which order the ranks of a machine do their work, and in which phase they are after it."""

    def work() -> list[str]:
        time.sleep(0.1 if os.environ["LOCAL_RANK"] == "0" else 0)
        (folder / os.environ["LOCAL_RANK"]).touch()
        return sorted(path.name for path in folder.iterdir())

    status.enter("reading data")
    return one_per_machine_first(work), status.position().phase


def test_the_first_rank_of_a_machine_is_done_before_the_others_begin(pool: WorkerPool, tmp_path: Path) -> None:
    first, *others = pool.run(3, _order, tmp_path)
    assert first == (["0"], "reading data")
    assert all("0" in found and phase == "reading data" for found, phase in others)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}
