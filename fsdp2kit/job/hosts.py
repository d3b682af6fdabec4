"""What all hosts of a job must share or have alike, checked at the start, before anything is read or built.

Rank 0 broadcasts what its host has: versions, settings, a short look at each input, and the names of new files in the
directories that every host writes to. The first rank of each other host compares that with its own, and looks for
those files. Two collectives; none if all ranks are on one host.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch.distributed as dist

import fsdp2kit
from fsdp2kit.config.local_paths import flat_settings, input_paths, shared_directories
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import World, agreement

SHARE = 'put it on a disk that all hosts share, or use URLs: checkpoint.dir and checkpoint.export_dir = "s3://…"'
_COPY = "copy it to every host, or put it on a disk that all of them share"

_VISIBLE_SECONDS = 4.0  # that a network file system may take to show another host's new file
_LOOK_SECONDS = 3.0  # for all inputs; what is not looked at by then is only checked to be there
_FILES = 4096  # of one input that are listed
_FILES_READ = 64  # of one input that are read
_END_BYTES = 2**16  # of a file that are read at both ends


@dataclass(frozen=True)
class Look:
    """What lies at a path on one host."""

    path: str
    there: bool = False
    files: dict[str, str] = field(default_factory=dict)
    """Sizes by relative name, for some files with a digest of the first and last 64 KiB; empty: not compared."""


@dataclass(frozen=True)
class Token:
    """A new file in a directory that every host writes to, or in the nearest directory above it that exists."""

    above: int
    """How many directories above."""
    name: str


@dataclass(frozen=True)
class HostFacts:
    """What one host has."""

    host: str
    versions: dict[str, str]
    settings: dict[str, str]
    """By TOML key. A local path is replaced by "a local path": hosts may have it elsewhere."""
    inputs: dict[str, Look]
    """By TOML key."""
    tokens: dict[str, Token]
    """By TOML key; of rank 0's host only."""


def check_hosts(config: TrainingConfig, world: World, *, seconds: float = _VISIBLE_SECONDS) -> None:
    """Refuse a job whose hosts do not share what all of them write, or differ in what they read. Collective.

    Local directories of checkpoints and of the export must be shared. Inputs may be copies. Clocks may differ.

    Args:
        seconds: that a shared directory may take to show a new file.

    Raises:
        UserError: the first difference, with the hosts, the path or name, and both values.
    """
    firsts = [world.hosts.index(host) for host in dict.fromkeys(world.hosts)]
    if len(firsts) < 2:
        return
    found = None
    problem = None
    with contextlib.ExitStack() as tokens:
        try:
            if world.rank in firsts:
                found = _facts(config, world, tokens)
        except Exception as error:
            problem = error
        of_main: list[HostFacts | None] = [found]
        dist.broadcast_object_list(of_main, src=0)
        with agreement():
            if problem is not None:
                raise problem
            if found is not None and of_main[0] is not None and not world.is_main:
                _compare(found, of_main[0])
                _find_tokens(of_main[0], found.host, shared_directories(config), seconds=seconds)


def _facts(config: TrainingConfig, world: World, closing: contextlib.ExitStack) -> HostFacts:
    deadline = time.monotonic() + _LOOK_SECONDS
    inputs = {key: look(path, deadline) for key, path in _inputs(config).items()}
    local = {key for key, one in inputs.items() if one.there}
    settings = {key: "a local path" if key in local else value for key, value in flat_settings(config).items()}
    tokens: dict[str, Token] = {}
    if world.is_main:
        for key, directory in shared_directories(config).items():
            tokens[key] = closing.enter_context(_token(key, directory))
    return HostFacts(world.hosts[world.rank], versions(), settings, inputs, tokens)


def _inputs(config: TrainingConfig) -> dict[str, str]:
    code = getattr(sys.modules.get(type(config).__module__), "__file__", None)
    return {**input_paths(config), **({"recipe": str(code)} if code else {})}


def versions() -> dict[str, str]:
    """Versions that all hosts must have alike, by name; fsdp2kit's with a digest of its source files."""
    root = Path(fsdp2kit.__file__).parent
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.pyi")]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        **{name: metadata.version(name) for name in ("torch", "transformers")},
        "fsdp2kit": f"{fsdp2kit.__version__} (source {digest.hexdigest()})",
    }


def look(path: str, deadline: float) -> Look:
    """A short look at a file, a folder, or the files of a pattern; a hub id or a URL is not there.

    Args:
        deadline: of `time.monotonic`; files are not compared after it.
    """
    root = Path(path)
    try:
        if root.is_file():
            return Look(path, True, {"it": _describe(root, read=True)})
        if root.is_dir():
            return Look(path, True, _list(root, _files_below(root), deadline))
        if root.is_absolute() and (files := _matches(path)):
            return Look(path, True, _list(Path(os.path.commonpath([file.parent for file in files])), files, deadline))
    except OSError:  # reading it for the run says why
        return Look(path, True)
    return Look(path)


def _matches(pattern: str) -> list[Path]:
    if not any(sign in pattern for sign in "*?["):
        return []
    anchor = Path(pattern).anchor
    return sorted(Path(anchor).glob(str(Path(pattern).relative_to(anchor))))


def _files_below(root: Path) -> Iterator[Path]:
    """Files in order of their names, without hidden ones and Python's caches."""
    for folder, names, files in os.walk(root, followlinks=True):
        names[:] = sorted(name for name in names if not name.startswith(".") and name != "__pycache__")
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _list(root: Path, files: Iterable[Path], deadline: float) -> dict[str, str]:
    """A description of each file by its name relative to a folder; empty if there are too many to look at."""
    found = []
    for path in files:
        if len(found) == _FILES or time.monotonic() > deadline:
            return {}
        found.append(path)
    every = -(-len(found) // _FILES_READ)
    listed = {}
    for number, path in enumerate(found):
        if time.monotonic() > deadline:
            return {}
        if path.is_file():
            listed[os.path.relpath(path, root)] = _describe(path, read=number % every == 0)
    return listed


def _describe(path: Path, *, read: bool) -> str:
    if not read:
        return f"{path.stat().st_size} bytes"
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size  # of now: NFS asks the server when a file is opened
        digest.update(stream.read(_END_BYTES))
        if size > _END_BYTES:
            stream.seek(max(_END_BYTES, size - _END_BYTES))
            digest.update(stream.read(_END_BYTES))
    return f"{size} bytes {digest.hexdigest()}"


def _compare(ours: HostFacts, main: HostFacts) -> None:
    """
    Raises:
        UserError: at the first difference: a version, an input, a setting.
    """
    for name, version in main.versions.items():
        if ours.versions[name] != version:
            what = f"{version} on {main.host} and {ours.versions[name]} on {ours.host}"
            raise UserError(name, what, "install the same version on every host")
    for key, one in ours.inputs.items():
        if key in main.inputs:
            _compare_input(key, one, main.inputs[key], ours.host, main.host)
    for key in dict.fromkeys([*main.settings, *ours.settings]):
        here = ours.settings.get(key, "not set")
        there = main.settings.get(key, "not set")
        if here != there:
            what = f"{there[:80]} on {main.host} and {here[:80]} on {ours.host}"
            raise UserError(key, what, "start every host with the same TOML and overrides")


def _compare_input(key: str, ours: Look, main: Look, host: str, main_host: str) -> None:
    if ours.there != main.there:
        (has, its), (lacks, other) = ((main_host, main.path), (host, ours.path))[:: -1 if ours.there else 1]
        what = f"{its} is on {has}, but {'' if other == its else f'{other} is '}not on {lacks}"
        raise UserError(key, what, _COPY)
    if not ours.files or not main.files or ours.files == main.files:
        return
    names = [*main.files, *ours.files]
    name = next(name for name in names if ours.files.get(name) != main.files.get(name))
    here = ours.files.get(name)
    there = main.files.get(name)
    if here is None or there is None:
        how = f"{name} is only on {host if there is None else main_host}"
    elif (size := here.split()[0]) != (size_there := there.split()[0]):
        how = f"{name} has {size_there} bytes on {main_host} and {size} on {host}"
    else:
        how = f"{name} has other contents"
    place = "" if main.path == ours.path else f" ({ours.path})"
    raise UserError(key, f"{main.path} is not the same on {main_host} and on {host}{place}: {how}", _COPY)


@contextlib.contextmanager
def _token(key: str, directory: Path) -> Iterator[Token]:
    """A new file there, or in the nearest directory above that exists; deleted at the end."""
    folder = directory
    above = 0
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
        above += 1
    file = folder / f".fsdp2kit-start-{uuid.uuid4().hex}"
    try:
        file.touch(exist_ok=False)
    except OSError as error:
        what = f"{folder} cannot be written to ({error.strerror or error})"
        raise UserError(key, what, f"choose another {key}") from None
    try:
        yield Token(above, file.name)
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def _find_tokens(main: HostFacts, host: str, directories: dict[str, Path], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for key, token in main.tokens.items():
        directory = directories[key]
        folder = [directory, *directory.parents][token.above]
        if not _appears(folder, token.name, deadline):
            what = f"{directory} is not shared: what {main.host} writes there is not seen on {host}"
            raise UserError(key, what, SHARE)


def _appears(folder: Path, name: str, deadline: float) -> bool:
    while True:
        with contextlib.suppress(OSError):
            # NFS asks the server for a name that is new to it; others show new files when they list the directory.
            if (folder / name).exists() or name in os.listdir(folder):  # noqa: PTH208 (names alone)
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
