"""Long work on one rank: the others wait in short collectives, whatever the timeout of a collective is."""

from __future__ import annotations

import os
import time

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
