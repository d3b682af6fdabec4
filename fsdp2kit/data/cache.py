"""Where tokens and copies of downloaded data are kept: in `datasets`' cache, or elsewhere if that cannot be written.

A container may have a read-only home. The files only save time, so a cache that cannot be written stops no run.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp2kit.console import show
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import is_main_process

_TODO = "set HF_HOME, or HF_DATASETS_CACHE, to a folder that can be written"


@dataclass(frozen=True)
class Cache:
    """`datasets`' cache, and the folders that replace it if it cannot be written."""

    run_dir: Path | None = None
    """If it exists, its folder ``cache`` is the first replacement; a temporary folder is the second."""

    def file(self, name: str) -> Path:
        """The path of one of our files, which is read if it exists and written otherwise."""
        cached = _datasets_cache() / "fsdp2kit" / name
        # A cache that others have filled may be read-only.
        return cached if cached.is_file() else self.writable() / "fsdp2kit" / name

    def writable(self) -> Path:
        """`datasets`' cache or its replacement. A line on stderr names a replacement once."""
        cache = _datasets_cache()
        run_dir = self.run_dir if self.run_dir is not None and self.run_dir.is_dir() else None
        return cache if (why := _refusal(cache)) is None else _replacement(cache, why, run_dir)

    def for_hub(self) -> Path:
        """The cache with data sets of the hub: `datasets`' own if it exists, even if it cannot be written."""
        cache = _datasets_cache()
        return cache if cache.is_dir() else self.writable()


DEFAULT = Cache()


def _datasets_cache() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE)


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Turn the error that a folder's disk is full into one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        todo = "free space there, or set HF_HOME, or HF_DATASETS_CACHE, to a folder on another disk"
        raise UserError(f"the cache {folder}", os.strerror(error.errno), todo) from error


@functools.cache
def _replacement(cache: Path, why: str, run_dir: Path | None) -> Path:
    try:
        folders = [Path(tempfile.gettempdir(), f"fsdp2kit-{os.getuid()}")]
    except OSError:  # no folder for temporary files either
        folders = []
    if run_dir is not None:
        folders.insert(0, run_dir / "cache")
    for folder in folders:
        # In a shared temporary folder, another user may have made this folder and put tokens into it.
        if _refusal(folder) is None and (folder.parent == run_dir or folder.stat().st_uid == os.getuid()):
            if is_main_process():
                show(f"the cache {cache} cannot be written ({why}): {folder} is used; {_TODO}", file=sys.stderr)
            return folder
    raise UserError(f"the cache {cache}", f"cannot be written ({why})", _TODO)


def _refusal(folder: Path) -> str | None:
    """Why a folder cannot be created or written to; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return None
