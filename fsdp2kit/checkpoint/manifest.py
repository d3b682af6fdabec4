"""The manifest: written last, so that a checkpoint is complete if and only if it has one. No torch here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import AfterValidator, NonNegativeInt, StringConstraints, TypeAdapter, ValidationError

from fsdp2kit.checkpoint.store import MANIFEST
from fsdp2kit.console import progress_bar
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.files.local import is_plain_name, load_json, open_regular, replace_json, sha256, sync_tree
from fsdp2kit.files.redaction import cleaned
from fsdp2kit.files.remote import to_path
from fsdp2kit.job.progress import Progress
from fsdp2kit.weights.recorded_parts import RecordedParts

_T = TypeVar("_T")

FORMAT = 1
USE_ANOTHER = 'use another checkpoint, or let run.resume = "auto" find the newest complete one'


def _inside(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError(f"{name!r} does not name a file inside the checkpoint")
    return name


Inside = Annotated[str, AfterValidator(_inside)]
"""The name of a file inside the checkpoint, relative to it."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size in bytes and the SHA-256 of its contents, in hex."""

    size: NonNegativeInt
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint that is not a tensor."""

    step: NonNegativeInt
    progress: dict[str, Any]
    """The fields of `fsdp2kit.job.progress.Progress`."""
    identity: dict[str, str]
    """What may not change when the run is resumed."""
    tied: dict[str, str]
    """Each further name of a tied parameter → the name it is stored under."""
    export_dtype: str | None
    """Default dtype of a Hugging Face export."""
    files: dict[Inside, FileRecord]
    """Every other file of the checkpoint, by its path relative to the checkpoint."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions, mesh, devices, … of the run that wrote it."""
    kept_in_float32: dict[str, list[str]] = field(default_factory=dict)
    """Dtype of an export → tensors that stay in float32 in it; only of a model with code of its own."""
    format: int = FORMAT

    def in_float32(self, dtype: str) -> list[str]:
        """The tensors that stay in float32 in an export of another dtype, of a model with code of its own."""
        return self.kept_in_float32.get(dtype, [])


@dataclass(frozen=True)
class _Content:
    """A content in a manifest's environment, as `fsdp2kit.data.contents` has it."""

    digest: str
    rows: int | None
    files: dict[str, str]
    otherwise: str


@dataclass(frozen=True)
class _Environment(RecordedParts):
    """What is read of a manifest's environment."""

    contents: dict[str, _Content] = field(default_factory=dict)
    mesh: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


def record_files(root: Path, paths: Iterable[Path]) -> dict[str, FileRecord]:
    """Sizes and digests of `paths`, keyed by their paths relative to `root`."""
    return {
        path.relative_to(root).as_posix(): FileRecord(size=path.stat().st_size, sha256=sha256(path))
        for path in sorted(paths)
    }


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Complete a checkpoint: record the files that `manifest` does not list yet, sync all, write the manifest last.

    Secrets in its texts are left out.
    """
    present = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    others = record_files(checkpoint, [present[name] for name in present.keys() - manifest.files.keys()])
    texts = {"identity": cleaned(manifest.identity), "environment": cleaned(manifest.environment)}
    manifest = replace(manifest, files={**manifest.files, **others}, **texts)
    sync_tree(checkpoint)
    replace_json(checkpoint / MANIFEST, asdict(manifest))


def no_manifest(checkpoint: Path, todo: str) -> UserError:
    """The error of a directory that is no complete checkpoint; of a run's directory, it says where these are."""
    what = f"has no {MANIFEST}, so it is incomplete or was not written by fsdp2kit"
    if (checkpoint / "checkpoints").is_dir():
        what = "is a run's directory, not a checkpoint"
        todo = f"name one of those in {checkpoint / 'checkpoints'}"
    return UserError(str(checkpoint), what, todo)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a complete checkpoint."""
    with _reading(checkpoint), open_regular(checkpoint / MANIFEST) as stream:
        return _parse(stream.read())


@contextlib.contextmanager
def open_manifest(checkpoint: Path) -> Iterator[Manifest]:
    """`read_manifest`, of a checkpoint that is `in_use` while this lasts."""
    with contextlib.ExitStack() as opened:
        with _reading(checkpoint):
            stream = opened.enter_context(open_regular(checkpoint / MANIFEST))
            _lock(stream)
            manifest = _parse(stream.read())
        yield manifest


@contextlib.contextmanager
def in_use(checkpoint: Path) -> Iterator[None]:
    """While this lasts, `fsdp2kit.checkpoint.store.deletable` says no, to whatever process asks.

    The open manifest is locked (flock): the kernel releases the lock when the process ends, and several may hold it.
    Without a manifest, or on a file system without locks, there is no promise.
    """
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(Exception):  # a client's, say: who reads the manifest says what is wrong
            _lock(opened.enter_context(open_regular(checkpoint / MANIFEST)))
        yield


def _lock(manifest: BinaryIO) -> None:
    # An object store has no locks, and its files no descriptor.
    with contextlib.suppress(OSError, TypeError):
        fcntl.flock(manifest, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextlib.contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Errors of reading a manifest as a `UserError`."""
    path = checkpoint / MANIFEST
    if not checkpoint.is_dir():
        raise UserError(str(checkpoint), "there is no such checkpoint directory", "give the path of one")
    try:
        yield
    except FileNotFoundError:
        todo = f"{USE_ANOTHER}; to start from the weights alone, set model.weights to this path"
        raise no_manifest(checkpoint, todo) from None
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error})", USE_ANOTHER) from error
    except _OtherFormat as error:
        what = f"has format {error}; this fsdp2kit reads format {FORMAT}"
        raise UserError(str(path), what, "use the fsdp2kit that it was written by") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"is not a checkpoint's manifest ({type(error).__name__}: {error})"
        raise UserError(str(path), what, USE_ANOTHER) from error


class _OtherFormat(Exception):
    """A manifest of another format than `FORMAT`."""


def _parse(content: bytes) -> Manifest:
    """The manifest in a file's bytes; `_reading` has the errors of what is none."""
    raw = load_json(content)
    if raw["format"] != FORMAT:
        raise _OtherFormat(raw["format"])
    known = {one.name: raw[one.name] for one in fields(Manifest)}
    manifest = _typed(Manifest, known)
    _typed(_Environment, manifest.environment)
    if manifest.progress.keys() == {field.name for field in fields(Progress)}:  # else of another version
        _typed(Progress, manifest.progress)
    return manifest


def _typed(kind: type[_T], value: dict[str, Any]) -> _T:
    """A value of JSON as a dataclass; a ValueError says what in it has another type."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def read_progress(checkpoint: Path, manifest: Manifest) -> Progress:
    """The progress that a checkpoint was saved at."""
    known = {field.name for field in fields(Progress)}
    saved = {"unevaluated": None, **manifest.progress}  # checkpoints of before 2026-11-28 lack it
    if differing := sorted(known ^ saved.keys()):
        what = f"records another kind of progress: {', '.join(differing)} is not in both"
        raise UserError(str(checkpoint), what, "use the fsdp2kit that it was written by")
    return Progress(**saved)


def holds_best(checkpoint: Path, progress: Progress) -> bool:
    """Whether a checkpoint is that of this very history's best step; False too where it is not there or unreadable."""
    with contextlib.suppress(Exception):
        return read_manifest(checkpoint).progress.get("best_eval_loss") == progress.best_eval_loss
    return False


def check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    """Check that every file is there, a regular one, with the size the manifest states; this reads none of it."""
    for name, record in manifest.files.items():
        path = checkpoint / name
        try:
            found = path.stat()
        except OSError:
            raise UserError(str(path), "is missing from the checkpoint", USE_ANOTHER) from None
        if not stat.S_ISREG(found.st_mode):
            raise UserError(str(path), "is no regular file", USE_ANOTHER)
        if found.st_size != record.size:
            raise UserError(str(path), f"has {found.st_size} bytes instead of {record.size}", USE_ANOTHER)


def check_shared(checkpoint: Path, manifest: Manifest) -> None:
    """Check that this rank sees what every rank wrote, before it writes a manifest that says so."""
    try:
        check_sizes(checkpoint, manifest)
    except UserError as error:
        reason = "checkpoints must be on a filesystem that all nodes share"
        raise RunFailure(f"{error.where}: {error.what}: {reason}") from error


def check_contents(checkpoint: Path, manifest: Manifest, *, rank: int = 0, world_size: int = 1) -> None:
    """Check size and digest of every file; with `world_size` > 1, of this rank's share of them.

    Each rank checks the files that the same rank wrote; on a resume it usually reads those anyway.
    """
    share = {}
    for name, record in manifest.files.items():
        match = re.fullmatch(r"__(\d+)_\d+\.distcp", name)  # DCP's name for what a rank wrote
        if (int(match[1]) if match else 0) % world_size == rank:
            share[name] = record
    check_sizes(checkpoint, replace(manifest, files=share))
    with progress_bar(f"verifying {checkpoint.name}", total=sum(record.size for record in share.values())) as bar:
        for name, record in share.items():
            try:
                digest = sha256(checkpoint / name, advance=bar.advance, most=record.size)
            except OSError as error:
                what = f"cannot be read ({error.strerror or error})"
                raise UserError(str(checkpoint / name), what, USE_ANOTHER) from error
            if digest != record.sha256:
                what = "does not have the checksum it was written with"
                raise UserError(str(checkpoint / name), what, USE_ANOTHER)


def verify(checkpoint: str | Path) -> str:
    """Check the manifest, and the size and SHA-256 of every file; return one line that says what was found.

    Raises:
        UserError: the checkpoint is incomplete or damaged; the error names the file.
    """
    checkpoint = to_path(checkpoint)
    with open_manifest(checkpoint) as manifest:
        check_contents(checkpoint, manifest)
    size = sum(record.size for record in manifest.files.values())
    return f"{checkpoint}: whole: step {manifest.step}, {len(manifest.files)} files, {size / 2**30:.2f} GiB"
