"""One run directory, one job: rank 0 holds a lock on it for as long as its process lives."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
from pathlib import Path

from fsdp2kit.errors import UserError

LOCK = ".lock"
logger = logging.getLogger(__name__)

# What fcntl says where another process has the lock; anything else means that this file system has no locks.
_TAKEN = (errno.EACCES, errno.EAGAIN)


class RunDirClaim:
    """The hold that a process has on a run directory; leaving it as a context manager, or dying, lets go."""

    def __init__(self, handle: int | None = None) -> None:
        self._handle = handle

    def __enter__(self) -> RunDirClaim:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def claim_run_dir(path: Path, *, is_main: bool) -> RunDirClaim:
    """Create the run directory and lock it against other jobs, on the main rank; on the others, do nothing.

    The lock is the kernel's, so a process that was killed has none and its job can be resumed at once. The file
    ``.lock`` stays; it names the process that had it last. Only one rank works here, so a caller with several wraps
    this in `agreement()`.

    Raises:
        UserError: another process has the run directory, or it cannot be made.
    """
    if not is_main:
        return RunDirClaim()
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except (FileExistsError, NotADirectoryError):
        raise UserError("run.dir", f"{path} is a file, or lies under one", "choose another run.dir") from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError("run.dir", f"{path} cannot be written to ({reason})", "choose another run.dir") from None
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
    return RunDirClaim(handle)


def _owner(handle: int) -> str:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock, and has not yet written who it is
        return "another process"
