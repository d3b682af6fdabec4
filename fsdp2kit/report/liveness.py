"""Whether a process has a run directory's lock, asked without refusing it to a run."""

from __future__ import annotations

import errno
import json
import os
import platform
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: pages are read there, runs are not made
    fcntl = None

# `lock_run_dir` takes byte 0 of the file, then all of it: a lock on byte 1 keeps a run waiting, and refuses none.
_ASKED = 1


def is_locked(lock: Path) -> bool | None:
    """Whether a live process has the POSIX lock of a file (`fsdp2kit.job.run_directory.lock_run_dir`).

    It tries to share a lock on one byte, and gives it back at once: a run that starts at this moment waits for it.

    Returns:
        None if it cannot be told from this host: the file system has no locks, or another host had it last and may
        hold it where this host does not see it.
    """
    if fcntl is None:
        return None
    try:
        # A process that closes any descriptor of a file loses its own lock on it; and its own lock does not show.
        if not lock.is_file():
            return False
        if _is_open_here(lock):
            return True
        handle = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)  # what is there may be a pipe
    except OSError:  # not ours to read, or there is no /dev/fd
        return None
    try:
        if _conflicts(handle):
            return True
        return None if _owner_host(handle) not in (None, platform.node()) else False
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    finally:
        os.close(handle)


def _conflicts(handle: int) -> bool:
    """Whether another process's lock keeps this one from sharing a lock on the file."""
    assert fcntl is not None
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _ASKED)
        fcntl.lockf(handle, fcntl.LOCK_UN, 1, _ASKED)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return True
        raise
    return False


def _is_open_here(lock: Path) -> bool:
    """Whether this process has the file open, as one that trains does."""
    ours = lock.stat()
    for path in Path("/dev/fd").iterdir():
        try:
            one = os.fstat(int(path.name))
        except (OSError, ValueError):  # of the listing itself, closed by now
            continue
        if (one.st_dev, one.st_ino) == (ours.st_dev, ours.st_ino):
            return True
    return False


def _owner_host(handle: int) -> str | None:
    """The host that last locked the file, as the file says."""
    try:
        host = json.loads(os.pread(handle, 4096, 0))["host"]
    except (ValueError, KeyError, TypeError, RecursionError):  # nothing is written there yet
        return None
    return host if isinstance(host, str) else None
