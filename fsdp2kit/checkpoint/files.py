"""Durable files: written, synced and digested, so that what a manifest states is on the disk."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 22


def sync(path: Path) -> None:
    """Flush a file's contents, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(root: Path) -> None:
    """`sync` every file and directory under `root`, and `root` itself."""
    for path in root.rglob("*"):
        sync(path)
    sync(root)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that `path` is either absent, as before, or whole: by way of a synced temporary file."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sha256(path: Path) -> str:
    """Hex digest of a file's contents, read in pieces of 4 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def in_use(path: Path) -> Iterator[None]:
    """While this lasts, `deletable` says no, to whatever process asks; on a file system without locks, no promise.

    The lock is of the open file (flock), so that it is the kernel's to let go of, and several may hold it at once.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stream = stack.enter_context(path.open("rb"))
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def deletable(path: Path) -> Iterator[bool]:
    """Whether nobody has `path` `in_use`; while this lasts, nobody begins to."""
    with path.open("r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # no locks on this file system
            pass
        yield True
