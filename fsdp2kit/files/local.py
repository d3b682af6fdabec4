"""Files that survive a crash: replaced whole, synced, digested; and folders of the package. No torch here.

Also files that somebody else may have put there: `open_regular` waits for no pipe, `load_json` raises one kind of
error, `is_plain_name` tells names that lead out of a directory, and what is written follows no link.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fsdp2kit.errors import UserError, causes

CHUNK_BYTES = 1 << 22
# Windows has neither; pages of runs are read there.
_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that `path` is either as it was before or complete, also after a crash.

    On a disk this writes a temporary file beside it, syncs it and renames it. An object store does the same by itself.
    """
    if isinstance(content, str):  # a path in it may have bytes that are no text
        content = content.encode(errors="surrogateescape")
    if not isinstance(path, Path):
        path.write_bytes(content)
        return
    # A name that nobody can guess: a link of that name, put there before, would be followed.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(create_new(temporary), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def replace_json(path: Path, value: dict[str, Any]) -> None:
    """`replace_file` by a JSON object."""
    replace_file(path, json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def writing(place: Path, *, where: str) -> Iterator[None]:
    """Around what writes into a directory that the user chose: errors of the file system are the user's.

    Args:
        where: what the user would change, e.g. the key ``run.dir``.

    Raises:
        UserError: the place cannot be written to.
    """
    todo = f"choose another {where}"
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise UserError(where, f"{place} is a file, or lies under one", todo) from None
    except OSError as error:
        raise UserError(where, f"{place} cannot be written to ({error.strerror or error})", todo) from None


def create_new(path: Path) -> int:
    """A descriptor of a new file, for writing. It fails where anything has that name, also a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file that this run writes: a regular file, made if it is not there, and never a link.

    Args:
        flags: of `os.open`, e.g. ``os.O_WRONLY | os.O_APPEND``.

    Raises:
        OSError: it is a link, a pipe, a device or a directory, or it cannot be opened.
    """
    try:
        handle = os.open(path, flags | os.O_CREAT | _NO_LINK | _NO_WAIT, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise _not_regular(path, "is a link") from None
        if error.errno == errno.ENXIO or path.is_fifo():
            raise _not_regular(path) from None
        raise
    return _checked(handle, path)


def open_regular(path: Path) -> BinaryIO:
    """A file for reading, which must be a regular file or a link to one: a pipe would be waited for for ever.

    Objects of an object store are opened as they are.

    Raises:
        OSError: it is a pipe, a device, a socket or a directory, or it cannot be opened.
    """
    if not isinstance(path, Path):
        return path.open("rb")
    try:
        handle = os.open(path, os.O_RDONLY | _NO_WAIT)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _not_regular(path) from None
        raise
    except ValueError as error:  # a NUL in its name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    return os.fdopen(_checked(handle, path), "rb")


def read_regular(path: Path) -> bytes:
    """The contents of a file that must be regular; see `open_regular`."""
    with open_regular(path) as stream:
        return stream.read()


def read_text(path: Path) -> str:
    """The text of a file that must be regular, without a byte-order mark.

    Raises:
        OSError: as `open_regular`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_regular(path).decode("utf-8-sig")


def read_json(path: Path) -> Any:
    """The JSON in a file that must be regular.

    Raises:
        OSError: as `open_regular`.
        ValueError: it is no JSON; see `load_json`.
    """
    return load_json(read_regular(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """As `read_json`, for a file that must hold an object; anything else is a ValueError, too."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a JSON {type(found).__name__}, not an object")
    return found


def load_json(text: str | bytes) -> Any:
    """JSON that somebody else may have written; a byte-order mark at its begin is passed over.

    Raises:
        ValueError: it is no JSON, not UTF-8, nested too deep, or has an integer of more than 4300 digits.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def is_plain_name(name: Any) -> bool:
    """Whether this is the relative path, with ``/``, of something inside a directory, as our own records name files.

    Not: absolute paths, ``..``, empty parts (``a//b``, URLs), backslashes, drives (``C:x``), control characters.
    """
    if not isinstance(name, str) or name == "":
        return False
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or ":" in parts[0]:
        return False
    return not any(character == "\\" or ord(character) < 32 or ord(character) == 127 for character in name)


def _checked(handle: int, path: Path) -> int:
    """The descriptor, if it is of a regular file; else it is closed."""
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise _not_regular(path)


def _not_regular(path: Path, what: str = "is no regular file") -> OSError:
    return OSError(errno.EINVAL, what, str(path))


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


def sha256(path: Path, *, advance: Callable[[int], object] = lambda size: None, most: int | None = None) -> str:
    """Hex digest of a regular file's contents, read in blocks of 4 MiB.

    Args:
        advance: is called with the size of each block.
        most: bytes that are read at most; None: all.
    """
    digest = hashlib.sha256()
    left = most
    with open_regular(path) as stream:
        while block := stream.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)):
            digest.update(block)
            advance(len(block))
            left = None if left is None else left - len(block)
    return digest.hexdigest()


def bundled_folder(name: str) -> Path:
    """``recipes``, ``toml`` or ``docs`` of the package: inside it in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
