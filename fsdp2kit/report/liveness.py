"""Whether a process has a run directory's lock, asked without taking it."""

from __future__ import annotations

import errno
import json
import os
import platform
import struct
import sys
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: pages are read there, runs are not made
    fcntl = None

# `struct flock` of fcntl(2), as Linux and macOS lay it out: type, whence, start, length, process id.
_IS_BSD = sys.platform == "darwin" or "bsd" in sys.platform
_LAYOUT = "@qqihh" if _IS_BSD else "@hhqqi"


def is_locked(lock: Path) -> bool | None:
    """Whether a live process has the POSIX lock of a file (`fsdp2kit.job.start.lock_run_dir`).

    It asks the kernel with F_GETLK and takes no lock, so a run that starts at this moment is not refused.

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
    """Whether another process's lock keeps this one from locking the file."""
    assert fcntl is not None
    wanted = (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET) if _IS_BSD else (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    found = struct.unpack_from(_LAYOUT, fcntl.fcntl(handle, fcntl.F_GETLK, struct.pack(_LAYOUT + "0q", *wanted)))
    return found[3 if _IS_BSD else 0] != fcntl.F_UNLCK


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
