"""Ranks and process groups, and `agree`, by which all ranks handle an error together.

If one rank exits alone, torchrun kills the others before they can report. If one raises alone, the others hang in a
collective. So work that may fail on a single rank (reading a file, parsing a row) runs inside ``with agreement():``,
and every rank leaves that block with the same outcome.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import platform
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2kit.console import show
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.job import lost_ranks, meeting, status
from fsdp2kit.job.stop import Stopped
from fsdp2kit.job.tracebacks import write_traceback
from fsdp2kit.torch_compat import all_gather_single, sharded_where_it_lies, timeout_of

T = TypeVar("T")

_hosts: tuple[str, ...] = ()  # of the ranks of the process group, as `World.hosts`


@dataclass(frozen=True)
class World:
    """This process's rank and device, and the number of ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    hosts: tuple[str, ...] = ()
    """The machine of each rank, by name; empty: all ranks are on one machine."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def ranks_per_node(self) -> int:
        """As `ranks_per_node` finds it; `local_size` where the machines are not known."""
        return ranks_per_node(self.hosts) or self.local_size


def start(*, timeout_minutes: float = 30.0, deterministic: bool = False) -> World:
    """Start the process group (gloo on CPU, gloo and NCCL on CUDA) and bind this process to its device. Collective.

    Without torchrun there is one rank, and no free port is needed. Calling it again returns the same world.

    Args:
        timeout_minutes: limit of each collective, and of the time until the ranks have met.
        deterministic: allow only deterministic kernels, in the whole process.

    Raises:
        UserError: a machine has fewer CUDA devices than processes, or the environment names an impossible world.
        RunFailure: the ranks have not met within that time.
    """
    global _hosts  # `agree` names them
    rank, size, local_rank, local_size = ranks_from_environment()
    on_cuda = torch.cuda.is_available()
    store = None
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
        torch.use_deterministic_algorithms(True)
    if not dist.is_initialized():
        allow_connections(size)
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")  # `tracebacks.keep_in` says where
        # Clipping under offload and asynchronous checkpoints move CPU tensors, hence gloo beside NCCL.
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        timeout = timedelta(minutes=timeout_minutes)
        meeting.watch()
        if "MASTER_ADDR" in os.environ:
            store = meeting.meet(backend, rank=rank, size=size, timeout=timeout)
        elif size > 1:
            todo = "start the run with torchrun, or take WORLD_SIZE out of the environment"
            raise UserError("environment variable WORLD_SIZE", f"{size} without a MASTER_ADDR to meet at", todo)
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_stop_at_exit)
    machine = _number("GROUP_RANK", "SLURM_NODEID", default=rank // local_size)
    hosts = _hosts = name_machines(gather_objects((machine, platform.node())))
    if size > 1:
        status.watch_waiting()
    if store is not None and size > 1:
        lost_ranks.watch(store, rank=rank, hosts=hosts, minutes=timeout_minutes, asks=on_cuda)
    if not on_cuda:
        return World(rank, size, local_rank, local_size, torch.device("cpu"), hosts)
    with agreement():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                "torchrun --nproc-per-node",
                f"local rank {local_rank} has no CUDA device ({torch.cuda.device_count()} visible)",
                "start at most one process per device, or hide the devices with CUDA_VISIBLE_DEVICES=''",
            )
        torch.cuda.set_device(local_rank)
    return World(rank, size, local_rank, local_size, torch.device("cuda", local_rank), hosts)


def allow_connections(world_size: int) -> None:
    """Raise this process's limit of open files, if many ranks need it; never above what the system allows.

    Gloo connects every rank to every other in each of its groups, on CUDA too: for all ranks, for a background save,
    and along dp. Rank 0 also serves the store, with two connections of each rank. Many systems begin with a limit of
    1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 6 * world_size + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def name_machines(found: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """A name for each rank's machine: its host name, with the machine's number where several have that name.

    Args:
        found: each rank's machine, as a number, and that machine's host name.
    """
    numbers: dict[str, set[int]] = {}
    for number, name in found:
        numbers.setdefault(name, set()).add(number)
    return tuple(f"{name} (node {number})" if len(numbers[name]) > 1 else name for number, name in found)


def ranks_per_node(hosts: Sequence[str]) -> int:
    """The most ranks that blocks of equal size can have with no block over two nodes, if a node's are neighbours.

    Args:
        hosts: the machine of each rank.
    """
    return math.gcd(*Counter(hosts).values())


def stop() -> None:
    """Destroy the process group, if there is one."""
    global _hosts
    _hosts = ()
    atexit.unregister(_stop_at_exit)
    lost_ranks.stop()
    status.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def _stop_at_exit() -> None:
    """Destroy the process group of a script that does not: its threads would abort the interpreter's teardown.

    See `end_process` of `job/process.py`. After an error the other ranks may be in a collective, for which destroying
    would wait.
    """
    if getattr(sys, "last_value", None) is None:
        stop()


def rank() -> int:
    """This process's rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def background_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks for a background thread's collectives; None without a process group. Collective.

    On the default group they would mix with training's collectives, in a different order on each rank, and hang.
    """
    if not dist.is_initialized():
        return None
    group = dist.new_group(backend="gloo", timeout=timeout_of())
    return group if isinstance(group, dist.ProcessGroup) else None


def work_on_this_device() -> Callable[[], object]:
    """A function that makes a new thread work on this thread's device.

    A thread starts on the machine's first device. Waiting for a stream there creates a context, which takes that
    device's memory, once for every rank. DCP's writer does so.
    """
    if not torch.cuda.is_available():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device; to CUDA from pinned memory, so that the host does not wait for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def agree(error: BaseException | None = None, *, group: dist.ProcessGroup | None = None) -> None:
    """Share an error with all ranks: every rank calls this, and all return or all raise.

    A `UserError` on any rank is raised on every rank; if there are several, the lowest rank's, with the name of its
    host if rank 0 runs on another one. Any other error is raised unchanged on its own rank, and on the others as a
    `RunFailure` that names the rank. `Stopped` on any rank is raised on every rank, unless there is an error.

    Args:
        group: a group of all ranks, for background work. Default: the default group.
    """
    if not reduce_numbers([float(error is not None)], group=group)[0]:
        return  # one number of each rank, in place of an object
    picklable = error
    if error is not None and not isinstance(error, (UserError, Stopped)):
        picklable = f"{type(error).__name__}: {error}"
    reports = gather_objects(picklable, group=group)
    for rank, report in enumerate(reports):
        if isinstance(report, UserError) and report is not error:
            raise _naming_host(report, rank) from error
    if error is not None and not isinstance(error, Stopped):
        raise error
    for rank, report in enumerate(reports):
        if report is not None and not isinstance(report, Stopped):
            raise RunFailure(f"rank {rank} failed: {report}")
    raise next(report for report in reports if report is not None)


def host_of(rank: int) -> str:
    """The name of a rank's machine; this machine's where they are not known."""
    return _hosts[rank] if rank < len(_hosts) else platform.node()


def _naming_host(error: UserError, rank: int) -> UserError:
    host = host_of(rank)
    if host == host_of(0) or f"on {host}" in str(error):
        return error
    return UserError(error.where, f"{error.what} (on host {host})", error.todo)


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank ended, or did not arrive within ``run.timeout_minutes``."""
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, kinds) or "gloo/transport" in str(error)


def leave(problem: UserError | RunFailure, *, code: int = 2, alone: bool = False) -> NoReturn:
    """Print an error as one line on rank 0 and end this process with that exit code. All ranks end at once.

    It skips the interpreter's shutdown: that takes longer than the 0.3 s that torchrun gives the other ranks after one
    has exited.

    Args:
        alone: the other ranks do not call this. They are told.
    """
    if is_main_process():
        show(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 1:
        write_traceback("".join(traceback.format_exception(problem)))
    if alone:
        lost_ranks.announce(problem)
    else:
        agree()
    os._exit(code)


@contextlib.contextmanager
def agreement(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run rank-local work that may fail, then `agree`. The block must not contain collectives."""
    try:
        yield
    except (Exception, Stopped) as error:
        agree(error, group=group)
    else:
        agree(group=group)


def one_per_machine_first(work: Callable[[], T]) -> T:
    """Run ``work`` on one rank of each machine, then on the others, which find the cache filled. Collective.

    No collective times out meanwhile, even if tokenising or downloading takes hours. A failure on any rank is raised
    on all, as by `agree`.
    """
    if world_size() == 1:
        return work()
    is_first = ranks_from_environment().local_rank == 0
    phase = status.position().phase
    result: list[T] = []
    with ThreadPoolExecutor(max_workers=1) as thread:
        for turn in (True, False):
            future = thread.submit(work) if is_first is turn else None
            busy = True
            while busy:  # idle ranks wait in a collective that ends every half second
                status.enter("one rank of each machine first")  # a new position: nobody is late
                if future is not None:
                    wait([future], timeout=0.5)
                busy = reduce_numbers([float(future is not None and not future.done())])[0] > 0
            with agreement():
                if future is not None:
                    result.append(future.result())
    status.enter(phase)
    return result[0]


def reduce_numbers(
    values: list[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Element-wise sum (or maximum, …) of a few host numbers over all ranks, in float64 on gloo.

    Args:
        group: as in `agree`.
    """
    if world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=op, group=group)
    return tensor.tolist()


def gather_numbers(values: list[float]) -> list[list[float]]:
    """A few host numbers of each rank in rank order, in float64 on gloo. Collective."""
    if world_size() == 1:
        return [values]
    mine = torch.tensor(values, dtype=torch.float64)
    found = mine.new_empty(world_size() * len(values))
    all_gather_single(found, mine)
    return found.view(-1, len(values)).tolist()


def gather_objects(value: object, *, group: dist.ProcessGroup | None = None) -> list:
    """``value`` of each rank in rank order, on every rank. `group`: as in `agree`, or a group of some ranks."""
    values = [value] * (world_size() if group is None else dist.get_world_size(group))
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)  # on gloo, which every group has, also with CUDA
    return values


def local_part(tensor: Any) -> Tensor:
    """This rank's shard, or the tensor itself where it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, local: Tensor, shape: torch.Size | None = None) -> Tensor:
    """``local``, on its device, as this rank's shard of a tensor that is sharded like ``tensor``.

    Args:
        shape: of the whole tensor; None: ``tensor``'s.
    """
    if not isinstance(tensor, DTensor):
        return local
    return sharded_where_it_lies(local, tensor, shape or tensor.shape)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters, those that are sharded over one mesh together; no operation takes several meshes."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


class RanksOfEnvironment(NamedTuple):
    """This process's place in its job, as torchrun's variables say."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def ranks_from_environment() -> RanksOfEnvironment:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them; without it there is one rank.

    Raises:
        UserError: one of them is not a number of processes, or a rank is not below it.
    """
    size = _size("WORLD_SIZE", default=1)
    local_size = _size("LOCAL_WORLD_SIZE", default=size)
    rank = _rank("RANK", size=size)
    return RanksOfEnvironment(rank, size, _rank("LOCAL_RANK", size=local_size), local_size)


def _number(*names: str, default: int) -> int:
    """The first of these environment variables that is set to a number."""
    texts = [os.environ.get(name, "").strip() for name in names]
    return next((int(text) for text in texts if text.isdecimal()), default)


def is_main_process() -> bool:
    """Whether this process prints. Every process does if the environment names no valid rank."""
    try:
        return ranks_from_environment().rank == 0
    except UserError:
        return True


def _size(name: str, *, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.strip().isdecimal() or int(text) < 1:
        raise UserError(f"environment variable {name}", f"{text!r} is not a number of processes", f"set e.g. {name}=8")
    return int(text)


def _rank(name: str, *, size: int) -> int:
    text = os.environ.get(name, "0")
    if not text.strip().isdecimal() or int(text) >= size:
        what = f"{text!r} is not one of the {size} ranks from 0 on"
        raise UserError(f"environment variable {name}", what, "start the run with torchrun, which sets it")
    return int(text)
