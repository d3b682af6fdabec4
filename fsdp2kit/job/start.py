"""A job: its process group, mesh, locked run directory, and a record of what was run.

with start_job(config) as job:
    ...
    job.open_run_dir(dtypes=plan.ledger)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli
import torch

import fsdp2kit
from fsdp2kit.config import TrainingConfig, dump_toml
from fsdp2kit.config.checks import check_config
from fsdp2kit.console import heard_by, say
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.files.local import load_json, open_own, read_json_object, read_regular, read_text, replace_file
from fsdp2kit.files.redaction import cleaned, without_secrets
from fsdp2kit.job import distributed, status, stop, tracebacks
from fsdp2kit.job.distributed import World, agreement
from fsdp2kit.job.events import Events, changes, flat
from fsdp2kit.job.hosts import check_hosts
from fsdp2kit.job.layout import Layout
from fsdp2kit.job.mesh import Mesh, build_mesh
from fsdp2kit.job.stop import Stopped

logger = logging.getLogger(__name__)

# Errors of fcntl if another process has the lock; any other error means that the file system has no locks.
_TAKEN = (errno.EACCES, errno.EAGAIN)

# What a run adds to and what it replaces in its directory, where others may have put links and pipes.
_ADDED_TO = (".lock", "events.jsonl", "metrics.jsonl", "samples.jsonl")
_REPLACED = ("config.toml", "environment.json")


@dataclass(frozen=True)
class Job:
    """This process's part in a job; see `start_job`."""

    config: TrainingConfig
    world: World
    mesh: Mesh
    environment: dict[str, Any]
    """Versions, devices, mesh, git commit and, from `open_run_dir` on, the dtype ledger: ``environment.json``."""
    closing: ExitStack = field(default_factory=ExitStack)
    """Closed when the job ends, in reverse order."""
    events: Events = field(default_factory=Events)
    """``events.jsonl``, on the main rank from `open_run_dir` on."""

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run.dir)

    @property
    def is_main(self) -> bool:
        return self.world.is_main

    def open_run_dir(self, *, dtypes: Any = None) -> None:
        """Create and lock the run directory, and write ``config.toml`` and ``environment.json``. Collective.

        Call it after everything that may refuse the run, so that a refused start leaves no files.

        Args:
            dtypes: the plan's dtype ledger, a dataclass.

        Raises:
            UserError: another process has the run directory, or it cannot be written to.
        """
        self.environment["dtype_ledger"] = asdict(dtypes) if dtypes is not None else None
        with agreement():
            if self.is_main:
                self.closing.enter_context(lock_run_dir(self.run_dir))
                self.environment["start"] = start = begin_start(self.run_dir)
                self.closing.push(_put_back_if_refused(self.run_dir, start=start))
                before, text = _read_config(self.run_dir), dump_toml(self.config)
                write_record(self.run_dir, config_text=text, environment=self.environment)
                self.events.open_in(self.run_dir, start=start)
                told = {name: self.environment.get(name) for name in ("world_size", "hosts", "mesh", "command")}
                changed = changes(before, _flat_config(without_secrets(text))) if before else {}
                self.events.record("start", **told, changed=changed)
        tracebacks.keep_in(self.run_dir / "errors", nccl=self.world.device.type == "cuda")


@contextlib.contextmanager
def start_job(config: TrainingConfig) -> Iterator[Job]:
    """Start the process group and build the mesh: ``with start_job(config) as job``. Collective.

    The job has ``mesh``, ``world``, ``run_dir``, and ``open_run_dir(dtypes=plan.ledger)``, which creates and locks the
    run directory. The process group stays up afterwards; `fsdp2kit.run`, or another caller, ends it.

    Raises:
        UserError: the config does not fit the world it runs in, or its hosts differ (`check_hosts`).
    """
    world = distributed.start(timeout_minutes=config.run.timeout_minutes, deterministic=config.run.deterministic)
    distributed.begin_job()
    tracebacks.keep_nowhere()
    status.begin_run()
    with agreement():  # a login, or an optional package, may be on one machine alone
        sizes = check_config(config, world_size=world.size, local_world_size=world.ranks_per_node)
    check_hosts(config, world)
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    layout = Layout(sizes, config.fsdp, world.hosts)
    say(*layout.draw())
    environment = describe_environment(world_size=world.size, mesh=asdict(sizes))
    events = Events(is_kept=world.is_main, clean=without_secrets)
    job = Job(config, world, mesh, {**environment, "hosts": layout.ranks()}, events=events)
    with job.closing, _recording(events):
        yield job


@contextlib.contextmanager
def _recording(events: Events) -> Iterator[None]:
    """Record the block's warnings, and the error that ends it."""

    def end_stopped() -> None:
        request = stop.current()
        events.record("stop", reason=request.reason if request else None)
        events.record("end", outcome="stopped")

    try:
        with heard_by(events.hear), stop.last_word(end_stopped):
            yield
    except Stopped:
        end_stopped()
        raise
    except (Exception, KeyboardInterrupt) as error:
        is_lost, name = distributed.is_lost_rank(error), type(error).__name__
        text = str(error) if isinstance(error, (UserError, RunFailure)) else f"{name}: {error}".removesuffix(": ")
        kind = "refusal" if _is_refusal(error) else "failure"
        events.record(kind, text=text.partition("\n")[0], **({"lost": True} if is_lost else {}))
        raise
    else:
        if "end" not in events.recorded:  # a recipe with a loop of its own
            events.record("end", outcome="done")
    finally:
        events.close()


def _is_refusal(error: BaseException | None) -> bool:
    """Whether an error refuses a start: it is the user's, and no step was begun."""
    return isinstance(error, UserError) and not status.position().step


def _put_back_if_refused(path: Path, *, start: int) -> Callable[..., None]:
    """An exit callback that gives a run its ``config.toml`` and ``environment.json`` back if this start is refused.

    A first start, which has none before it, keeps its own.
    """
    config, environment = path / "config.toml", path / "environment.json"
    before = read_regular(environment) if environment.is_file() else None
    kept = set(path.glob("config.*.toml"))

    def put_back(_kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if before is None or not _is_refusal(error):
            return
        with contextlib.suppress(OSError, ValueError, TypeError):  # the refusal is what the user must see
            for file in set(path.glob("config.*.toml")) - kept:
                file.replace(config)
            record = {**load_json(before), "start": start}  # numbers of starts are not used twice
            replace_file(environment, json.dumps(record, indent=2) + "\n")

    return put_back


@contextlib.contextmanager
def lock_run_dir(path: str | Path) -> Iterator[None]:
    """Create the run directory and lock it against other jobs.

    The kernel releases the lock when the process ends, so a killed job can be resumed at once. The file ``.lock``
    stays and names the process that had it last.
    """
    path = Path(path)
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        _check_written(path)
        handle = open_own(path / ".lock", os.O_RDWR)
    try:
        # POSIX locks, not flock: children do not inherit them, and over NFS they hold between machines.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            owner = _owner(handle)
            os.close(handle)
            todo = "wait for it or stop it, or choose another run.dir"
            raise UserError("run.dir", f"{path} is in use by {owner}", todo) from None
        logger.warning("%s: its file system has no locks (%s); start no other job in it", path, error.strerror)
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": platform.node()}).encode(), 0)
    try:
        yield
    finally:
        os.close(handle)


def _check_written(path: Path) -> None:
    """Refuse a run directory where something else is in the place of a file that the run writes."""
    for name in (*_ADDED_TO, *_REPLACED):
        file = path / name
        is_link = name in _ADDED_TO and file.is_symlink()
        if is_link or (file.exists() and not file.is_file()):
            what = f"{file} cannot be written to: it is {'a link' if is_link else 'no regular file'}"
            raise UserError("run.dir", what, "remove it, or choose another run.dir")


def begin_start(path: Path) -> int:
    """The number of this start of a run, from 1.

    Tracebacks and NCCL's records of the start before move to ``errors/start-<number>/``.
    """
    try:
        before = int(read_json_object(path / "environment.json")["start"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # the first start
        before = 0
    errors = path / "errors"
    with _writing(path):
        for file in sorted(path for pattern in ("rank-*", "nccl-rank-*") for path in errors.glob(pattern)):
            kept = errors / f"start-{before}"
            kept.mkdir(exist_ok=True)
            free = free_path(kept, file.stem, file.suffix, first=2) if (kept / file.name).exists() else None
            file.rename(free or kept / file.name)
    return before + 1


def write_record(path: str | Path, *, config_text: str, environment: Mapping[str, Any]) -> None:
    """Write ``config.toml`` and ``environment.json`` into a run directory.

    A different ``config.toml`` of an earlier start is kept as ``config.<n>.toml``, the oldest as 1.
    """
    path = Path(path)
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        config, text = path / "config.toml", without_secrets(config_text)
        if not config.exists() or read_regular(config) != text.encode():
            if config.exists():
                config.rename(free_path(path, "config", ".toml", first=1))
            replace_file(config, text)
        replace_file(path / "environment.json", json.dumps(cleaned(environment), indent=2, default=str) + "\n")


def _read_config(path: Path) -> dict[str, Any]:
    """`_flat_config` of a run directory's ``config.toml``; {} without one."""
    try:
        return _flat_config(read_text(path / "config.toml"))
    except (OSError, ValueError, RecursionError):
        return {}


def _flat_config(text: str) -> dict[str, Any]:
    """A resolved config by dotted key, without what is about one start alone."""
    return {key: value for key, value in flat(tomli.loads(text)).items() if key not in ("run.dir", "run.resume")}


def describe_environment(*, world_size: int, mesh: Mapping[str, int]) -> dict[str, Any]:
    """What is needed to repeat the run, as plain values for JSON.

    Args:
        world_size: number of processes.
        mesh: size of each mesh dimension by name.
    """
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "command": without_secrets(shlex.join(map(without_secrets, sys.orig_argv))),
        "versions": {
            "fsdp2kit": fsdp2kit.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers", "datasets", "safetensors")},
            "cuda": torch.version.cuda,
        },
        "devices": devices or [_cpu_name()],
        "world_size": world_size,
        "mesh": dict(mesh),
        "git": _git_state(),
    }


def free_path(folder: Path, stem: str, suffix: str, *, first: int) -> Path:
    """``folder/stem.<n>suffix`` with the lowest n ≥ first that no file has."""
    number = first
    while (path := folder / f"{stem}.{number}{suffix}").exists():
        number += 1
    return path


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into `UserError`."""
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise UserError("run.dir", f"{path} is a file, or lies under one", "choose another run.dir") from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError("run.dir", f"{path} cannot be written to ({reason})", "choose another run.dir") from None


def _owner(handle: int) -> str:
    try:
        found = load_json(os.pread(handle, 4096, 0))
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock and has not yet written its name
        return "another process"


def _cpu_name() -> str:
    """The processor and how many of its cores this process may use, e.g. ``AMD EPYC, 2 cores``."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.processor() or platform.machine()}, {cores} cores"


def _git_state() -> dict[str, Any] | None:
    """The working directory's commit and whether files differ from it; None without a repository or without git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None
