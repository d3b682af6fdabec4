"""Where tokens and copies of downloaded data are kept: in `datasets`' cache, or elsewhere if that cannot be written.

A container may have a read-only home. What is kept only saves time, so a run is not refused for it.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path

from fsdp2kit.distributed import is_main_process
from fsdp2kit.errors import UserError

_TODO = "set HF_HOME, or HF_DATASETS_CACHE, to a folder that can be written"
_run_dir: Path | None = None


def keep_beside(run_dir: Path) -> None:
    """From here on a folder of this run directory, which exists, stands in for a cache that cannot be written."""
    global _run_dir
    _run_dir = run_dir
    _stand_in.cache_clear()


def cached_file(name: str) -> Path:
    """The path of a file of ours in the cache, to be read or, where it is not there, to be written."""
    cache = _datasets_cache() / "fsdp2kit"
    if (cache / name).is_file():  # a cache that others have filled may be read-only
        return cache / name
    return writable_cache() / "fsdp2kit" / name


def writable_cache() -> Path:
    """`datasets`' cache, or a folder that stands in for it. A line on the console names that folder once.

    Raises:
        UserError: nothing can be written.
    """
    cache = _datasets_cache()
    return cache if (why := _refuses(cache)) is None else _stand_in(cache, why)


def hub_cache() -> Path:
    """What `datasets` reads data sets of the hub from: its cache if it is there, even if it cannot be written."""
    cache = _datasets_cache()
    return cache if cache.is_dir() else writable_cache()


def _datasets_cache() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE)


@functools.cache
def _stand_in(cache: Path, why: str) -> Path:
    try:
        folders = [Path(tempfile.gettempdir(), f"fsdp2kit-{os.getuid()}")]
    except OSError:  # no folder for temporary files either
        folders = []
    if _run_dir is not None:
        folders.insert(0, _run_dir / "cache")
    for folder in folders:
        # In a shared temporary folder another user may have made this one and put tokens into it.
        if _refuses(folder) is None and (folder.parent == _run_dir or folder.stat().st_uid == os.getuid()):
            if is_main_process():
                print(f"the cache {cache} cannot be written ({why}): {folder} is used; {_TODO}", file=sys.stderr)
            return folder
    raise UserError(f"the cache {cache}", f"cannot be written ({why})", _TODO)


def _refuses(folder: Path) -> str | None:
    """Why a folder cannot be made or written to; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return None
