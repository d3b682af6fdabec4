"""The run directory: its lock, and the record of a run, which is ``config.toml`` and ``environment.json``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli

from fsdp2kit.errors import UserError
from fsdp2kit.files.local import (
    load_json,
    open_own,
    read_json_object,
    read_regular,
    read_text,
    replace_file,
    writing,
)
from fsdp2kit.files.redaction import cleaned, without_secrets
from fsdp2kit.job.events import flat

logger = logging.getLogger(__name__)

# Errors of fcntl if another process has the lock; any other error means that the file system has no locks.
_TAKEN = (errno.EACCES, errno.EAGAIN)
_READER_SECONDS = 2.0

# What a run adds to and what it replaces in its directory, where others may have put links and pipes.
_ADDED_TO = (".lock", "events.jsonl", "metrics.jsonl", "samples.jsonl")
_REPLACED = ("config.toml", "environment.json")


@contextlib.contextmanager
def lock_run_dir(path: str | Path) -> Iterator[None]:
    """Create the run directory and lock it against other jobs.

    The kernel releases the lock when the process ends, so a killed job can be resumed at once. The file ``.lock``
    stays and names the process that had it last.
    """
    path = Path(path)
    with writing(path, where="run.dir"):
        path.mkdir(parents=True, exist_ok=True)
        _check_written(path)
        handle = open_own(path / ".lock", os.O_RDWR)
    try:
        # POSIX locks, not flock: children do not inherit them, and over NFS they hold between machines.
        # The first run to lock byte 0 has the directory.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        _lock_all(handle)
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


def _lock_all(handle: int) -> None:
    """Lock the whole file, where readers ask whether a run has it (`fsdp2kit.report.liveness`).

    A reader locks another byte than the first for a moment. One that was suspended in it is not waited for.
    """
    end = time.monotonic() + _READER_SECONDS
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        if time.monotonic() > end:
            return
        time.sleep(0.01)


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
    with writing(path, where="run.dir"):
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
    with writing(path, where="run.dir"):
        path.mkdir(parents=True, exist_ok=True)
        config = path / "config.toml"
        text = without_secrets(config_text)
        if not config.exists() or read_regular(config) != text.encode():
            if config.exists():
                config.rename(free_path(path, "config", ".toml", first=1))
            replace_file(config, text)
        replace_file(path / "environment.json", json.dumps(cleaned(environment), indent=2, default=str) + "\n")


class RecordBefore:
    """``config.toml`` and ``environment.json`` of a run directory, as the start before has left them."""

    def __init__(self, path: Path) -> None:
        environment = path / "environment.json"
        self._path = path
        self._environment = read_regular(environment) if environment.is_file() else None
        self._configs = set(path.glob("config.*.toml"))
        self.config = _read_config(path)
        """The config by dotted key; {} without one."""

    def put_back(self, *, start: int) -> None:
        """Give the run its record back, since the start ``start`` was refused. A first start keeps its own."""
        if self._environment is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError):  # the refusal is what the user must see
            for file in set(self._path.glob("config.*.toml")) - self._configs:
                file.replace(self._path / "config.toml")
            record = {**load_json(self._environment), "start": start}  # numbers of starts are not used twice
            replace_file(self._path / "environment.json", json.dumps(record, indent=2) + "\n")


def flat_config(text: str) -> dict[str, Any]:
    """A resolved config by dotted key, without what is about one start alone."""
    return {key: value for key, value in flat(tomli.loads(text)).items() if key not in ("run.dir", "run.resume")}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return flat_config(read_text(path / "config.toml"))
    except (OSError, ValueError, RecursionError):
        return {}


def free_path(folder: Path, stem: str, suffix: str, *, first: int) -> Path:
    """``folder/stem.<n>suffix`` with the lowest n ≥ first that no file has."""
    number = first
    while (path := folder / f"{stem}.{number}{suffix}").exists():
        number += 1
    return path


def _owner(handle: int) -> str:
    try:
        found = load_json(os.pread(handle, 4096, 0))
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock and has not yet written its name
        return "another process"
