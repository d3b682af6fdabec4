"""The sets of rows that ``[data]`` and ``[eval]`` name, and where their rows are.

Rows are in files on this machine or behind an fsspec URL, in a saved dataset, or on the hub.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec

from fsdp2kit.config.data_schema import DataConfig, DataPathConfig
from fsdp2kit.config.section import may_be_hub_id
from fsdp2kit.data.cache import DEFAULT, Cache
from fsdp2kit.errors import UserError

_KINDS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_END = r"(-?(\d+|(\d\d?|100)%))?"  # of a slice
_SPLIT = re.compile(rf"[^\[\]+]+(\[{_END}:{_END}\])?")  # a name, perhaps with a slice


@dataclass(frozen=True)
class Location:
    """Where a set's rows are: files of one kind, a folder written by `save_to_disk`, or a hub dataset."""

    path: str
    split: str
    kind: str
    """A kind of file ("json", "csv", "text", "parquet", "arrow"), "saved" or "hub"."""
    files: tuple[str, ...] = ()
    """Paths or URLs, in the order in which they are read."""
    key: str = "data.path"
    """The TOML key that names the set, for errors."""
    limit: int | None = None
    """Only this many rows are read, the first ones."""
    cache: Cache = DEFAULT
    """For its tokens, and for copies of what is remote."""

    @property
    def split_name(self) -> str:
        """The split without a slice: "train" of "train[:95%]"."""
        return self.split.partition("[")[0]

    @property
    def where(self) -> str:
        """Names the set in errors."""
        return f"{self.key}: {self.path}"

    @property
    def is_text(self) -> bool:
        """Whether the rows are lines of text files, so that errors can name the line."""
        return self.kind in ("json", "csv", "text")

    def digest(self) -> str | None:
        """Digest of the content, but not of the files' names; None for a hub dataset, which has no files here yet.

        Files behind a URL are not read: their filesystem tells by size, time or tag whether they have changed.
        """
        if not self.files:
            return None
        part = self.split if self.kind == "saved" else self.split[len(self.split_name) :]
        chosen = ":".join(str(one) for one in (self.kind, part, self.limit) if one)
        digest = hashlib.blake2b(chosen.encode(), digest_size=16)
        for file in self.files:
            digest.update(suffix_of(file).encode())
            if is_url(file):
                filesystem, name = fsspec.core.url_to_fs(file)
                digest.update(str(filesystem.ukey(name)).encode())
                continue
            with Path(file).open("rb") as content:
                digest.update(Path(file).stat().st_size.to_bytes(8, "little"))
                while block := content.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()


class RowSet(NamedTuple):
    """A set of rows that a config names: a source, or a held-out set."""

    section: DataConfig
    """``[data]`` with the set's own path, split, format and columns."""
    key: str
    """The TOML key that names it, for errors."""
    name: str = ""
    """Name in the metrics; "" for a set without one."""


def training_sets(data: DataConfig) -> list[RowSet]:
    """The training data: ``data.path``, or each of ``data.sources``."""
    sets = [
        RowSet(_with_rows(data, part, limit=part.limit or data.limit), f"data.sources.{at}.path", name)
        for at, (part, name) in enumerate(zip(data.sources, data.source_names(), strict=True))
    ]
    return sets or [RowSet(data, "data.path")]


def held_out_sets(config: Any) -> list[RowSet]:
    """The evaluation's own sets, without rows that are held out of the training data."""
    data, evaluation = config.data, config.eval
    sets = [
        RowSet(_with_rows(data, part, limit=part.limit), f"eval.sets.{name}.path", name)
        for name, part in evaluation.sets.items()
    ]
    if evaluation.path is not None or (isinstance(evaluation.split, str) and evaluation.split != data.split):
        sets.append(RowSet(_with_rows(data, evaluation), "eval.path" if evaluation.path else "eval.split"))
    return sets


def _with_rows(data: DataConfig, part: Any, *, limit: int | None = None) -> DataConfig:
    """``[data]`` with the path, split, format and columns that a source or a held-out set has of its own."""
    own = {name: getattr(part, name, None) for name in ("path", "split", "format", "columns")}
    return data.model_copy(
        update={"limit": limit, **{name: value for name, value in own.items() if value is not None}}
    )


def locate(section: DataConfig | DataPathConfig, key: str = "data.path", *, cache: Cache = DEFAULT) -> Location:
    """Find out what a set's ``path`` is, without reading rows.

    The files of a folder belong to the split that their names or folders mention (``train``, ``validation``,
    ``test`` and the usual synonyms), or all to "train" when none mentions one.

    Args:
        section: its `path`, `split` (a name or a slice of it, as `datasets` writes them) and `limit` are read.
        key: the TOML key that names the path, for errors.
    """
    path, split = section.path, section.split
    if path is None:
        raise UserError(key, f'is required by data.format = "{section.format}"', "name a file, folder, URL or hub id")
    where, split_key = f"{key}: {path}", key.removesuffix("path") + "split" if key.endswith("path") else key
    try:
        files, folder = _list_files(path)
    except (OSError, ValueError, ImportError) as error:
        what = f"cannot be opened ({first_line(error)})"
        raise UserError(where, what, "check the path, and the credentials for a URL") from None
    name = split.partition("[")[0]
    if folder is None and not files:
        raise UserError(where, "the pattern matches no file", "check the pattern")
    if folder is None and name != "train":
        todo = f'leave {split_key} at "train" or a slice of it ("train[:95%]"), or give another path'
        raise UserError(where, f"a file has no split {split!r}", todo)
    if folder == "" and may_be_hub_id(path):  # `datasets` checks its split
        return Location(path, split, "hub", (), key, section.limit, cache)
    if folder == "":
        todo = "check the path: in a TOML it is relative to the TOML, in an override to the working directory"
        raise UserError(where, "no such file or folder", todo)
    if {f"{folder}/state.json", f"{folder}/dataset_dict.json"} & {*files}:
        path, kind, files = str(folder), "saved", [file for file in files if file.endswith(".arrow")]
    else:
        files = files if folder is None else _of_split(files, folder, name, where)
        kind = _kind_of(files, where)
    if not _SPLIT.fullmatch(split):
        todo = 'give a name or one slice of it: "train[:95%]", "train[1000:2000]"'
        raise UserError(split_key, f"{split!r} is no split", todo)
    return Location(path, split, kind, tuple(sorted(files)), key, section.limit, cache)


def _list_files(path: str) -> tuple[list[str], str | None]:
    """``(files, folder)``: a path's or pattern's files, with None; or those below a folder, "" if it is missing."""
    if not is_url(path):
        path = str(Path(path).expanduser())
    filesystem, root = fsspec.core.url_to_fs(path)
    full_name = filesystem.unstrip_protocol if is_url(path) else str
    if filesystem.isfile(root):
        return [path if is_url(path) else root], None
    if re.search(r"[*?\[]", path) and not filesystem.isdir(root):
        if is_url(path):
            return [full_name(match) for match in filesystem.glob(root)], None
        # `pathlib` looks into linked directories as a shell does; fsspec does not.
        anchor = Path(path).anchor
        matches = Path(anchor).glob(str(Path(path).relative_to(anchor)))
        parts = Path(path).parts
        free = next(at for at, part in enumerate(parts) if re.search(r"[*?\[]", part))
        asked = _is_hidden(parts[free:])
        return [str(one) for one in matches if one.is_file() and (asked or not _is_hidden(one.parts[free:]))], None
    below = len(root.rstrip("/"))
    found = [full_name(file) for file in filesystem.find(root) if not _is_hidden(file[below:].split("/"))]
    if not is_url(path):
        found = [file for file in found if Path(file).is_file()]  # editors leave dangling links as locks
    return found, full_name(root) if found or filesystem.isdir(root) else ""


def _is_hidden(parts: Sequence[str]) -> bool:
    """Whether one of a path's parts is hidden, like Jupyter's copies in ``.ipynb_checkpoints``."""
    return any(part.startswith(".") for part in parts)


def is_url(path: str) -> bool:
    """Whether a path is an fsspec URL, ``s3://bucket/data.jsonl``."""
    return "://" in path


def suffix_of(file: str) -> str:
    """The suffix of a file's kind, like ``.jsonl``, before that of a compression."""
    path = PurePosixPath(file.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _of_split(files: list[str], folder: str, asked: str, where: str) -> list[str]:
    files = [file for file in files if suffix_of(file) in _KINDS]
    if not files:
        raise UserError(where, "the folder holds no data file", f"known: {', '.join(_KINDS)}")
    split_of = {file: _split_of(file.removeprefix(folder)) for file in files}
    if not any(split_of.values()):
        split_of = dict.fromkeys(files, "train")
    wanted = next((name for name, synonyms in _SPLITS.items() if asked in synonyms), asked)
    chosen = [file for file in files if split_of[file] == wanted]
    if not chosen:
        known = ", ".join(sorted({name for name in split_of.values() if name}))
        raise UserError(where, f"there is no split {asked!r}", f"the folder has: {known}")
    return chosen


def _split_of(relative: str) -> str | None:
    words = re.split(r"[^a-z0-9]+", relative.lower())
    return next((name for name, synonyms in _SPLITS.items() if any(word in synonyms for word in words)), None)


def _kind_of(files: list[str], where: str) -> str:
    kinds = {_KINDS.get(suffix_of(file), suffix_of(file)) for file in files}
    if unknown := sorted(kinds - set(_KINDS.values())):
        raise UserError(where, f"unknown suffix {unknown[0]!r}", f"known: {', '.join(_KINDS)}")
    if len(kinds) > 1:
        raise UserError(where, f"files of several kinds ({', '.join(sorted(kinds))})", "give a glob of one kind")
    return kinds.pop()
