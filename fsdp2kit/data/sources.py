"""Where rows come from: files on this machine or behind an fsspec URL, a saved dataset, or the hub."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import fsspec

from fsdp2kit.config.section import may_be_hub_id
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
_SPLIT = re.compile(r"[^\[\]+]+(\[(-?\d+%?)?:(-?\d+%?)?\])?")  # a name, perhaps with a slice


@dataclass(frozen=True)
class Source:
    """Files of one kind, a folder written by `save_to_disk`, or a hub dataset."""

    path: str
    split: str
    kind: str
    """A kind of file ("json", "csv", "text", "parquet", "arrow"), "saved" or "hub"."""
    files: tuple[str, ...] = ()
    """Paths or URLs, in the order in which they are read."""
    key: str = "data.path"
    """The TOML key that names it, for errors."""
    limit: int | None = None
    """How many rows are read, the first ones."""

    @property
    def split_name(self) -> str:
        """The split without a slice: "train" of "train[:95%]"."""
        return self.split.partition("[")[0]

    @property
    def where(self) -> str:
        """How errors call it."""
        return f"{self.key}: {self.path}"

    @property
    def is_text(self) -> bool:
        """Whether it is files whose rows are written as text, which know their line."""
        return self.kind in ("json", "csv", "text")

    def digest(self) -> str | None:
        """Digest of the content, whatever the files' names; None for a hub dataset, which has no files here yet.

        Files behind a URL are not read for it: their filesystem says by size, time or tag whether they changed.
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


def find_source(path: str, *, split: str, key: str = "data.path", limit: int | None = None) -> Source:
    """Decide what ``path`` is, without reading it.

    Args:
        split: its name, or a slice of it as `datasets` writes them: ``train[:95%]``, ``train[1000:2000]``.
        limit: how many rows are read, the first ones of the split.

    The files of a folder belong to the split that their names or folders mention (``train``, ``validation``,
    ``test`` and the usual synonyms), or all to "train" when none mentions one.

    Raises:
        UserError: there is no such file, folder or split, or a suffix is unknown. A hub dataset is not looked up yet.
    """
    source = _find(path, split, key)
    if source.kind != "hub" and not _SPLIT.fullmatch(split):  # a hub's splits are left to `datasets`
        todo = 'give a name or one slice of it: "train[:95%]", "train[1000:2000]"'
        raise UserError(_split_key(key), f"{split!r} is no split", todo)
    return replace(source, limit=limit)


def _find(path: str, split: str, key: str) -> Source:
    try:
        filesystem, root = fsspec.core.url_to_fs(path if is_url(path) else str(Path(path).expanduser()))
        full_name = filesystem.unstrip_protocol if is_url(path) else str
        if filesystem.isfile(root):
            return _of_files(path, [path if is_url(path) else root], split, key)
        if re.search(r"[*?\[]", path) and not filesystem.isdir(root):
            matches = [full_name(match) for match in filesystem.glob(root)] if is_url(path) else _matches(path)
            return _of_files(path, matches, split, key)
        found, folder = list(map(full_name, filesystem.find(root))), full_name(root)
        is_folder = filesystem.isdir(root)
    except (OSError, ValueError, ImportError) as error:
        what = f"cannot be opened ({first_line(error)})"
        raise UserError(f"{key}: {path}", what, "check the path, and the credentials for a URL") from None
    if not is_url(path):
        found = [file for file in found if Path(file).is_file()]  # not a dangling link, which editors leave as locks
    if {f"{folder}/state.json", f"{folder}/dataset_dict.json"} & {*found}:
        return Source(folder, split, "saved", tuple(sorted(file for file in found if file.endswith(".arrow"))), key)
    if found or is_folder:
        return _of_folder(path, found, folder, split, key)
    if may_be_hub_id(path):
        return Source(path, split, "hub", (), key)
    raise UserError(
        f"{key}: {path}",
        "no such file or folder",
        "check the path: in a TOML it is relative to the TOML, in an override to the working directory",
    )


def _matches(pattern: str) -> list[str]:
    """Files on the disk that match. `pathlib` looks into linked directories as a shell does, and fsspec does not."""
    path = Path(pattern).expanduser()
    return [str(match) for match in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if match.is_file()]


def is_url(path: str) -> bool:
    """Whether a path is an fsspec URL, ``s3://bucket/data.jsonl``."""
    return "://" in path


def suffix_of(file: str) -> str:
    """The suffix that tells the kind of a file, without that of its compression: ``.jsonl``."""
    path = PurePosixPath(file.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def first_line(error: BaseException) -> str:
    """The beginning of what an error says, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _of_files(path: str, files: list[str], split: str, key: str) -> Source:
    if not files:
        raise UserError(f"{key}: {path}", "the pattern matches no file", "check the pattern")
    if split.partition("[")[0] != "train":
        todo = f'leave {_split_key(key)} at "train" or a slice of it ("train[:95%]"), or give another path'
        raise UserError(f"{key}: {path}", f"a file has no split {split!r}", todo)
    return Source(path, split, _kind_of(path, files, key), tuple(sorted(files)), key)


def _of_folder(path: str, files: list[str], root: str, split: str, key: str) -> Source:
    files = sorted(file for file in files if suffix_of(file) in _KINDS)
    if not files:
        raise UserError(f"{key}: {path}", "the folder holds no data file", f"known: {', '.join(_KINDS)}")
    split_of = {file: _split_of(file.removeprefix(root)) for file in files}
    known = sorted({name for name in split_of.values() if name})
    asked = split.partition("[")[0]
    wanted = next((name for name, synonyms in _SPLITS.items() if asked in synonyms), asked)
    if not known:
        known, split_of = ["train"], dict.fromkeys(files, "train")
    chosen = [file for file in files if split_of[file] == wanted]
    if not chosen:
        raise UserError(f"{key}: {path}", f"there is no split {asked!r}", f"the folder has: {', '.join(known)}")
    return Source(path, split, _kind_of(path, chosen, key), tuple(chosen), key)


def _split_key(key: str) -> str:
    return key.removesuffix("path") + "split" if key.endswith("path") else key


def _split_of(relative: str) -> str | None:
    words = re.split(r"[^a-z0-9]+", relative.lower())
    return next((name for name, synonyms in _SPLITS.items() if any(word in synonyms for word in words)), None)


def _kind_of(path: str, files: list[str], key: str) -> str:
    kinds = {_KINDS.get(suffix_of(file), suffix_of(file)) for file in files}
    if unknown := sorted(kinds - set(_KINDS.values())):
        raise UserError(f"{key}: {path}", f"unknown suffix {unknown[0]!r}", f"known: {', '.join(_KINDS)}")
    if len(kinds) > 1:
        what = f"files of several kinds ({', '.join(sorted(kinds))})"
        raise UserError(f"{key}: {path}", what, "give a glob of one kind")
    return kinds.pop()
