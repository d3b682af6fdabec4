"""Paths on this machine's disks or in an object store (``s3://…``), and what can be done with either.

A place in an object store is an object of universal-pathlib with a path's methods. A store has no renames, links,
locks, syncs and limits of space; a request takes long, and a folder is no thing of its own. Callers use the functions
below, which know the difference; only stores of checkpoints and exports, which work in another order there, ask
`is_remote`. No torch here.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsdp2kit.errors import UserError
from fsdp2kit.files.local import open_regular

_CLIENTS = ("aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs", "adlfs")
"""Packages whose errors are failures of an object store."""
_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EFBIG}


def is_url(text: str) -> bool:
    """Whether a text is a URL, as ``s3://bucket/data.jsonl``, and no path."""
    return "://" in text


def path_on_disk(text: str) -> Path | None:
    """The path of a text, ``~`` expanded; also of a ``file://`` URL. None for any other URL."""
    if not is_url(text):
        return Path(text).expanduser()
    scheme, _, rest = text.partition("://")
    return Path(rest) if scheme in ("file", "local") else None


def to_path(text: str | Path) -> Path:
    """`path_on_disk`; for ``s3://…`` and any other URL that fsspec knows, an object with a path's methods.

    A path, or such an object, is returned as it is.

    Raises:
        UserError: fsspec does not know the URL, needs a package for it, or does not reach it.
    """
    if not isinstance(text, str):
        return text
    if (path := path_on_disk(text)) is not None:
        return path
    from upath import UPath  # takes a while to import

    try:
        remote = UPath(text)
        remote.exists()  # connects: a missing package or credentials show here
    except ImportError as error:
        raise UserError(text, str(error), "install that package") from None
    except ValueError as error:
        raise UserError(text, str(error), "use a URL that fsspec knows, e.g. s3://bucket/folder") from None
    except Exception as error:  # every store has errors of its own
        what = f"cannot be reached ({type(error).__name__}: {error})"
        raise UserError(text, what, "check the URL and your credentials") from None
    return cast(Path, remote)


def is_remote(path: Path) -> bool:
    """Whether it lies in an object store."""
    return not isinstance(path, Path)


def fsspec_url(path: Path) -> str | None:
    """What fsspec's own readers and writers are given for a place in an object store; None on a disk."""
    return str(path) if is_remote(path) else None


def check_writable(directory: Path, *, where: str) -> None:
    """Make a directory, and a file in it for a moment.

    Args:
        where: what the user would mend, e.g. a TOML key.

    Raises:
        UserError: one of them cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{uuid.uuid4().hex}"  # ranks of several hosts do this at once
        probe.touch()
        probe.unlink()
    except NotImplementedError as error:  # of a protocol that only reads
        raise UserError(where, f"{directory} cannot be written ({error})", "choose a place that can be") from error
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, "error")
        what = f"{directory} cannot be written ({error.strerror or error}, {reason})"
        raise UserError(where, what, "choose a directory that every process can write") from error


@contextlib.contextmanager
def on_disk(folder: Path) -> Iterator[Path]:
    """The folder, or a temporary copy on the disk of a remote one, where transformers can read it."""
    if not is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        remote: Any = folder
        if folder.is_dir():
            remote.fs.get(f"{remote.path.rstrip('/')}/", f"{name}/", recursive=True)
        yield Path(name)


def fill(folder: Path, write: Callable[[Path], object]) -> set[str]:
    """Have `write`, which knows disks only, put small files into a folder on a disk or an object store.

    Returns:
        The names of its files, relative to the folder; on a disk of all files that are there now.
    """
    with contextlib.nullcontext(folder) if not is_remote(folder) else tempfile.TemporaryDirectory() as disk:
        write(Path(disk))
        if is_remote(folder):
            remote: Any = folder
            remote.fs.put(f"{disk}/", f"{remote.path.rstrip('/')}/", recursive=True)
        return {path.relative_to(disk).as_posix() for path in Path(disk).rglob("*") if path.is_file()}


def file_names(folder: Path) -> set[str]:
    """The names of a folder's files; in an object store, where a look at each is a request, of all that it lists."""
    return {entry.name for entry in folder.iterdir() if is_remote(entry) or entry.is_file()}


def can_read_in_threads(path: Path) -> bool:
    """Whether two threads may read there at once; not every object store's files allow it."""
    return not is_remote(path)


@contextlib.contextmanager
def part_of_file(path: Path, offset: int, length: int) -> Iterator[io.BufferedReader | io.BytesIO]:
    """A stream of ``length`` bytes of a regular file; those of an object store are read at once."""
    if is_remote(path):  # where each seek would be a request
        with path.open("rb") as file:
            file.seek(offset)
            yield io.BytesIO(file.read(length))
        return
    with cast(io.BufferedReader, open_regular(path)) as file:
        yield io.BufferedReader(_Window(file.raw, offset, length))


def flush_to_disk(file: BinaryIO, path: Path) -> None:
    """Have the disk keep what was written to an open file; an object store does so as the file is closed."""
    if not is_remote(path):
        file.flush()
        os.fsync(file.fileno())


def drop_cache(file: BinaryIO, path: Path) -> None:
    """Have the system write what there is of an open file to the disk now, and keep its cache for other files."""
    if not is_remote(path) and hasattr(os, "posix_fadvise"):  # not on macOS
        file.flush()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def free_bytes(directory: Path) -> int | None:
    """Room on the disk of a directory; None: an object store has no end.

    Raises:
        OSError: the disk cannot be asked.
    """
    return None if is_remote(directory) else shutil.disk_usage(directory).free


def on_one_disk(one: Path, other: Path) -> bool:
    """Whether two directories share the room of a disk."""
    if is_remote(one) or is_remote(other):
        return False
    return one.stat().st_dev == other.stat().st_dev


def how_to_mend(path: Path) -> str:
    """What the user should do about a place where writing failed."""
    if is_remote(path):
        return "see that the store can be reached and written to"
    return f"free space there, or mend {path}"


def is_storage_error(cause: BaseException, path: Path) -> bool:
    """Whether an error is of the disk that a path is on (full, read-only, failed), or of its object store."""
    if isinstance(cause, OSError) and cause.errno in _OF_DISKS:
        return True
    if not is_remote(path):
        return False
    # Clients of stores also raise `OSError` without a file.
    is_clients = isinstance(cause, OSError) and cause.filename is None
    return is_clients or type(cause).__module__.partition(".")[0] in _CLIENTS


class _Window(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(wanted)
        self._position += count
        return count
