"""Files that survive a crash: replaced whole, synced, digested; and folders of the package. No torch here."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from fsdp2kit.errors import causes

CHUNK_BYTES = 1 << 22


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that `path` is either as it was before or complete, also after a crash.

    On a disk this writes a temporary file beside it, syncs it and renames it. An object store does the same by itself.
    """
    if isinstance(content, str):  # a path in it may have bytes that are no text
        content = content.encode(errors="surrogateescape")
    if not isinstance(path, Path):
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def todo_of_cache(error: BaseException | None) -> str | None:
    """What to do if the error is that Hugging Face's cache cannot be written; None for any other error."""
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
        # The refused path lies in the cache, or is a folder above it that cannot be made.
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
    """`sync` every file and directory under `root`, and `root` itself. Does nothing on an object store."""
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


def bundled_folder(name: str) -> Path:
    """``recipes``, ``toml`` or ``docs`` of the package: inside it in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
