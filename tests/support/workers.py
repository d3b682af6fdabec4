"""A pool of real gloo processes: importing torch and transformers costs seconds, so tests share the workers."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing as mp
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

# Forks of a process that has imported what takes seconds to import.
FORKS = mp.get_context("forkserver")
_RECIPES = ["recipes.sft", "recipes.dpo", "recipes.distill", "recipes.grpo"]
_BENCH = ["tools.bench", "tools.benchmarks.gpu", "tools.benchmarks.peers"]
FORKS.set_forkserver_preload([*_RECIPES, *_BENCH, "pytest", "tests.support.cases", "tests.support.frozen"])

ROOT = Path(__file__).parents[2]
COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # ranks that compile on a busy machine are minutes apart

# Threads of process groups wake up a hundred times a second: three groups take 0.4 % of a core, also while a worker
# waits for its next test. Workers with more threads than this are replaced, which takes 0.2 s.
_MOST_THREADS = 30


def _serve(connection: Any, rank: int, size: int, store_path: str) -> None:
    """One worker: run functions sent by the parent, all in one process group, until one ends it or fails."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _stay_on_one_core()
    for number in itertools.count():
        store = dist.FileStore(f"{store_path}-{number}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
        while dist.is_initialized():  # the runner ends its process group itself
            function, args, kwargs = connection.recv()
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
            torch.manual_seed(0)
            os.chdir(ROOT)  # the last function may have gone to a folder that is no longer there
            try:
                connection.send((True, function(*args, **kwargs)))
            except BaseException:
                if dist.is_initialized():  # the other ranks may wait for this one
                    dist.destroy_process_group()
                connection.send((False, traceback.format_exc()))
        forget_groups()


def _stay_on_one_core() -> None:
    """Under `pytest -n` with a worker for each core, stay on that worker's core: its ranks share caches."""
    count, name = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)), os.environ.get("PYTEST_XDIST_WORKER", "")
    if not count or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if count >= len(cores):
        os.sched_setaffinity(0, {cores[int(name.removeprefix("gw")) % len(cores)]})


def forget_groups() -> None:
    """Clear what DTensor keeps by mesh: it has the names of process groups that are gone after a run."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    for found in vars(_redistribute).values():
        if hasattr(found, "cache_clear"):
            found.cache_clear()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()


def _threads_of(pid: int) -> int:
    """How many threads a process has; 0 if the system does not say."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 (a list of names alone)
    except OSError:
        return 0


class WorkerPool:
    """Runs a top-level function on ranks 0 … size − 1 of a gloo group and returns every rank's result."""

    def __init__(self) -> None:
        self._workers: dict[int, list[tuple[Any, Any]]] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._count = itertools.count()

    def run(self, size: int, function: Callable, *args: Any, timeout: float = 600.0, **kwargs: Any) -> list[Any]:
        """``[function(*args, **kwargs) for each rank]``.

        Raises:
            AssertionError: a rank raised; the message holds the traceback of each one that did.
            TimeoutError: a rank gave no answer.
            EOFError: a rank has died.
        """
        workers = self._workers.get(size) or self._start(size)
        for _, connection in workers:
            connection.send((function, args, kwargs))
        replies = []
        for rank, (_, connection) in enumerate(workers):
            try:
                if not connection.poll(timeout):
                    raise TimeoutError(f"rank {rank} of {function.__name__} gave no answer in {timeout:.0f} s")
                replies.append(connection.recv())
            except (TimeoutError, EOFError):
                self._stop(size)
                raise
        failures = [f"rank {rank}:\n{reply}" for rank, (good, reply) in enumerate(replies) if not good]
        if failures or any(_threads_of(process.pid) > _MOST_THREADS for process, _ in workers):
            self._stop(size)
        if failures:
            raise AssertionError("\n".join(failures))
        return [reply for _, reply in replies]

    def _start(self, size: int) -> list[tuple[Any, Any]]:
        store_path = str(Path(self._folder.name, f"store-{next(self._count)}"))
        workers = self._workers[size] = []
        for rank in range(size):
            ours, theirs = FORKS.Pipe()
            process = FORKS.Process(target=_serve, args=(theirs, rank, size, store_path), daemon=True)
            process.start()
            workers.append((process, ours))
        return workers

    def _stop(self, size: int) -> None:
        for process, connection in self._workers.pop(size):
            process.kill()
            process.join()
            connection.close()

    def close(self) -> None:
        """Kill the workers."""
        for size in list(self._workers):
            self._stop(size)
        self._folder.cleanup()


def run_command(
    module: str, *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE ARGUMENT …``; its output and exit code."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = start_command(module, *arguments, stdout=stdout, stderr=stderr, cwd=cwd, **environment)
        process.join(300)
        said, complained = (path.read_text(encoding="utf-8") for path in (stdout, stderr))
    assert process.exitcode is not None, "it has not ended"
    return subprocess.CompletedProcess(arguments, process.exitcode, said, complained)


def start_command(
    module: str, *arguments: str, stdout: Path, stderr: Path, cwd: Path | None = None, **environment: str
) -> Any:
    """``python -m MODULE ARGUMENT …`` as a fork of a process that has imported everything."""
    process = FORKS.Process(target=_be_command, args=(module, arguments, environment, str(stdout), str(stderr), cwd))
    process.start()
    return process


def start_ranks(
    size: int, logs: Path, module: str, *arguments: str, cwd: Path | None = None
) -> tuple[list[Any], list[Path]]:
    """Start a command on every rank of a job, as torchrun does; each rank's process, and the path of its output."""
    paths = [logs / f"rank-{rank}.log" for rank in range(size)]
    local = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)} for rank in range(size)]
    return start_job(paths, [(module, *arguments)] * size, local, cwd=cwd), paths


def start_job(
    paths: Sequence[Path],
    commands: Sequence[Sequence[str]],
    local: Sequence[dict[str, str]],
    *,
    cwd: Path | None = None,
) -> list[Any]:
    """Start a process for each rank of a job: its module and arguments, and what it has in its environment alone."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(commands))}
    return [
        start_command(*command, stdout=path, stderr=path, cwd=cwd, **job, **own, RANK=str(rank))
        for rank, (path, command, own) in enumerate(zip(paths, commands, local, strict=True))
    ]


@contextlib.contextmanager
def ending(ranks: list[Any]) -> Iterator[None]:
    """Kill the ranks of `start_ranks` at the end of the block."""
    try:
        yield
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _be_command(
    module: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    stdout: str,
    stderr: str,
    cwd: Path | None = None,
) -> None:
    from fsdp2kit.job.process import end_process

    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.orig_argv = [sys.executable, f"{module.replace('.', '/')}.py", *arguments]
    end_process(importlib.import_module(module).main(list(arguments)))
