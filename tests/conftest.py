"""Fixtures that every test may use."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

# Set before torch is imported anywhere: no test may wait for a hub, and two ranks share two cores.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled", OMP_NUM_THREADS="1")
# Ranks outnumber cores and talk all the time: this lets a rank work until it waits, not until another one wakes up.
with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

from tests.support.passed import WritePassed, split_passed
from tests.support.workers import ROOT, WorkerPool

TESTS = Path(__file__).parent
# The files that take longest with `--full`. They come first, so no worker of `pytest -n` is left alone with one at the
# end.
LONGEST = (
    "parallel/test_parity.py",
    "parallel/test_experts.py",
    "train/test_balance.py",
    "cluster/test_two_hosts.py",
    "parallel/test_expert_adapters.py",
    "job/test_lost_ranks.py",
    "job/test_meeting.py",
    "rl/test_rollouts.py",
    "starter/test_new.py",
    "parallel/test_few_experts.py",
    "planner/test_memory.py",
    "parity/test_check.py",
    "planner/test_plan_tool.py",
    "parallel/test_lora.py",
    "job/test_signals.py",
    "weights/test_load.py",
    "recipes/test_lora.py",
    "checkpoint/test_chaos.py",
    "tools/test_bench.py",
    "recipes/test_resume.py",
    "train/test_loop.py",
    "parallel/test_traffic.py",
    "tools/test_peers.py",
    "model/test_loss_head.py",
    "optim/test_options.py",
    "parallel/test_expert_traffic.py",
    "docs/test_readme.py",
    "test_face.py",
    "parallel/test_float8.py",
    "tools/test_fsdp1_baseline.py",
    "planner/test_communication.py",
    "recipes/test_dpo.py",
    "parallel/test_isolation.py",
    "data/test_stream.py",
    "recipes/test_evaluation.py",
    "parallel/test_kept_dtypes.py",
    "recipes/test_bad_input.py",
    "data/test_properties.py",
    "checkpoint/test_checkpoints.py",
    "recipes/test_elastic.py",
    "checkpoint/test_kept_dtypes.py",
    "migrate/test_arguments.py",
    "data/test_cache.py",
    "model/test_new_tokens.py",
)


@pytest.fixture(scope="session", autouse=True)
def _forks_stand_at_the_root() -> None:
    """Start what processes are forked from before a test goes to a folder that is removed after it.

    They hear signals as in a terminal: a job in the background, or under nohup, begins with some of them ignored.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    os.chdir(ROOT)
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Real gloo processes, started once for the whole run."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start every test with the same seed and without a process group."""
    import torch
    from torch import distributed as dist

    torch.manual_seed(0)
    if dist.is_initialized():  # in this process, not in the pool's
        dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`, as `make test-all` does")
    parser.addoption("--write-passed", metavar="FILE", type=Path, help="write the names of tests that pass to FILE")
    parser.addoption("--leave-out", metavar="FILE", type=Path, help="leave out the tests that FILE names")


def pytest_configure(config: pytest.Config) -> None:
    """Note which tests pass, in the process that hears of all of them."""
    path = config.getoption("--write-passed")
    is_worker = hasattr(config, "workerinput")
    if path and not is_worker:
        config.pluginmanager.register(WritePassed(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without a device or ``TRY_ON_CPU``, and `full` and `slow` tests unless they are asked for."""
    import torch

    if path := config.getoption("--leave-out"):
        items[:], passed = split_passed(items, path)
        config.hook.pytest_deselected(items=passed)
    order = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    asked_for_slow = "slow" in (config.getoption("-m") or "")
    asked_for_full = asked_for_slow or config.getoption("--full")
    for item in items:
        if item.get_closest_marker("gpu") and not (torch.cuda.is_available() or os.environ.get("TRY_ON_CPU")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("full") and not asked_for_full:
            item.add_marker(pytest.mark.skip(reason="full; run with `pytest --full`"))
        if item.get_closest_marker("slow"):
            skip = pytest.mark.skip(reason="slow; run with `pytest -m slow`")
            item.add_marker(pytest.mark.timeout(3600) if asked_for_slow else skip)


def pytest_collection_finish() -> None:
    """Keep garbage collection away from what imports and collection made, which stays to the end."""
    gc.freeze()
