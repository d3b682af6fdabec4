"""Files that survive a crash: synced, replaced whole, digested; paths and pictures of command lines. No torch here."""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp2kit.errors import UserError, causes

CHUNK_BYTES = 1 << 22


def user_path(text: str) -> Path:
    """A path from a command line, with ``~`` expanded: a shell leaves it in ``--out=~/x``."""
    return Path(text).expanduser()


def positive(text: str) -> int:
    """A whole number above 0 from a command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def new_figure(flag: str = "--png", **options: Any) -> Any:
    """An empty figure of matplotlib.

    Raises:
        UserError: it is not installed, which ``flag`` needs.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(flag, "needs matplotlib, which is not installed", 'pip install "fsdp2kit[plot]"') from None
    return Figure(**options)


def write_figure(figure: Any, path: Path) -> None:
    """Write it as a PNG.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as problem:
        raise UserError(str(path), f"cannot be written ({problem.strerror})", "choose another --png") from None


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that, also after a crash, `path` is either as it was before or whole.

    On a disk a temporary file is written beside it, synced, and renamed. An object store replaces files whole itself.
    """
    content = content.encode() if isinstance(content, str) else content
    if not isinstance(path, Path):
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def todo_of_cache(error: BaseException | None) -> str | None:
    """Advice if Hugging Face's cache cannot be written; None for any other error."""
    refused = [
        Path(cause.filename)
        for cause in causes(error)
        if isinstance(cause, OSError)
        and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        and isinstance(cause.filename, str)
    ]
    if not refused:
        return None
    import datasets
    from huggingface_hub import constants

    caches = {
        "HF_HOME": constants.HF_HOME,
        "HF_HUB_CACHE": constants.HF_HUB_CACHE,
        "HF_DATASETS_CACHE": datasets.config.HF_DATASETS_CACHE,
    }
    for variable, cache in caches.items():
        # In the cache, or a folder above it that cannot be made.
        if any(path.is_relative_to(cache) or Path(cache).is_relative_to(path) for path in refused):
            return f"set {variable} to a folder that can be written"
    return None


def sync(path: Path) -> None:
    """Flush a file's contents, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(root: Path) -> None:
    """`sync` every file and directory under `root`, and `root` itself; on an object store there is nothing to do."""
    if isinstance(root, Path):
        for path in (*root.rglob("*"), root):
            sync(path)


def sha256(path: Path, *, advance: Callable[[int], object] = lambda size: None) -> str:
    """Hex digest of a file's contents, read in blocks of 4 MiB; ``advance`` is called with the size of each."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(CHUNK_BYTES):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
