"""Ranks and process groups, and `agree`: the one collective in which ranks settle an error and leave together.

A rank that exits alone gets the others killed by torchrun before they can speak, and a rank that raises alone
leaves the others waiting in a collective. So whatever may fail on one rank only (reading a file, parsing a row)
runs inside ``with agreement():``, and every rank leaves that block with the same outcome.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from fsdp2kit.environment import is_main_process, rank_from_environment, world_size_from_environment
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.torch_compat import timeout_of

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where this process stands in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(*, timeout_minutes: float = 30.0, deterministic: bool = False) -> World:
    """Start the process group (gloo on CPU, gloo and NCCL on CUDA) and bind this process to its device.

    Without torchrun this is a world of one, which needs no free port. Calling it again returns the same world.

    Args:
        timeout_minutes: how long a collective may take before the job is given up.
        deterministic: allow only kernels that give the same bits every time, in this whole process.

    Raises:
        UserError: a machine has fewer CUDA devices than processes, or the environment names an impossible world.
    """
    size, local_size = world_size_from_environment()
    rank, local_rank = rank_from_environment()
    on_cuda = torch.cuda.is_available()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
        torch.use_deterministic_algorithms(True)
    if not dist.is_initialized():
        # Clipping under offload and asynchronous checkpoints move CPU tensors, hence gloo beside NCCL.
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        timeout = timedelta(minutes=timeout_minutes)
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        elif size > 1:
            todo = "start the run with torchrun, or take WORLD_SIZE out of the environment"
            raise UserError("environment variable WORLD_SIZE", f"{size} without a MASTER_ADDR to meet at", todo)
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    if not on_cuda:
        return World(rank, size, local_rank, local_size, torch.device("cpu"))
    with agreement():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                "torchrun --nproc-per-node",
                f"local rank {local_rank} has no CUDA device ({torch.cuda.device_count()} visible)",
                "start at most one process per device, or hide the devices with CUDA_VISIBLE_DEVICES=''",
            )
        torch.cuda.set_device(local_rank)
    return World(rank, size, local_rank, local_size, torch.device("cuda", local_rank))


def stop() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def background_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks for a thread's own collectives; None where there is one process. Collective.

    Beside training's, on the default group, they would come in another order on every rank, and hang.
    """
    if not dist.is_initialized():
        return None
    group = dist.new_group(backend="gloo", timeout=timeout_of())
    return group if isinstance(group, dist.ProcessGroup) else None


def agree(error: BaseException | None = None, *, group: dist.ProcessGroup | None = None) -> None:
    """Settle an error over all ranks: every rank calls this, and all return or all raise.

    A `UserError` on any rank is raised on every rank, that of the lowest rank winning. Any other error is raised
    as it is on the rank that had it, and as a `RunFailure` naming that rank on the others.

    Args:
        group: of all ranks, for work beside the training's own collectives. Default: the default group.

    Raises:
        UserError: a rank reported one.
        RunFailure: another rank failed in another way.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    picklable = error if error is None or isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    reports: list = [None] * dist.get_world_size()
    dist.all_gather_object(
        reports, picklable, group=group
    )  # on gloo: the group has a CPU half wherever it has a CUDA one
    for report in reports:
        if isinstance(report, UserError):
            raise report from (error if report is not error else None)
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report is not None:
            raise RunFailure(f"rank {rank} failed: {report}")


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended, or has not come within ``run.timeout_minutes``."""
    return isinstance(error, (dist.DistBackendError, dist.DistNetworkError)) or "gloo/transport" in str(error)


def leave(problem: UserError) -> NoReturn:
    """Print a user's mistake as one line on rank 0 and end this process with exit code 2, all ranks at once.

    Interpreter shutdown takes longer than the 0.3 s that torchrun gives the other ranks once one has left, so
    nobody returns through it.
    """
    if is_main_process():
        print(f"error: {problem}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    agree()
    os._exit(2)


@contextlib.contextmanager
def agreement(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run rank-local work that may fail, then `agree`. No collective belongs inside the block."""
    try:
        yield
    except Exception as error:
        agree(error, group=group)
    else:
        agree(group=group)


def one_per_machine_first(work: Callable[[], T]) -> T:
    """Run ``work`` on one rank of each machine, then on the others, which find its cache filled. Collective.

    However long it takes, no collective waits for it: tokenising or downloading for hours is no hanging rank.

    Raises:
        UserError: it failed on any rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    is_first = rank_from_environment()[1] == 0
    result: list[T] = []
    for turn in (True, False):
        future = _run_while_ranks_meet(work if is_first is turn else None)
        with agreement():
            if future is not None:
                result.append(future.result())
    return result[0]


def _run_while_ranks_meet(work: Callable[[], T] | None) -> Future[T] | None:
    """Run ``work`` in a thread; all ranks meet in a collective every half second until nobody works any more."""
    future: Future[T] | None = None
    with ThreadPoolExecutor(max_workers=1) as thread:
        if work is not None:
            future = thread.submit(work)
        busy = True
        while busy:
            if future is not None:
                wait([future], timeout=0.5)
            busy = sum_over_ranks([float(future is not None and not future.done())])[0] > 0
    return future


def sum_over_ranks(values: list[float]) -> list[float]:
    """Element-wise sum of a few host numbers over all ranks, in float64 on the CPU half of the process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def max_over_ranks(values: list[float]) -> list[float]:
    """Element-wise maximum of a few host numbers over all ranks, as `sum_over_ranks` has their sum."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def gather_objects(value: object, *, group: dist.ProcessGroup | None = None) -> list:
    """``value`` of every rank, on every rank, in rank order. `group`: as in `agree`."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values
