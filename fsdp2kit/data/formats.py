"""Rows from files, folders and the hub, as a memory-mapped `datasets.Dataset`.

JSON is kept as the text of each row and parsed when it is read: Arrow would give every row the union of all rows'
keys, filled with None (tool schemas suffer), and refuses rows whose types differ. All else is read by `datasets`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

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
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# The two columns of rows that came from JSON.
_JSON, _WHERE = "fsdp2kit_json", "fsdp2kit_where"


@dataclass(frozen=True)
class Source:
    """Where rows come from: local files of one kind, a folder written by `save_to_disk`, or a hub dataset."""

    path: str
    split: str
    kind: str
    """A `datasets` builder ("json", "parquet", "csv", "arrow", "text"), "saved" or "hub"."""
    files: tuple[Path, ...] = ()

    def digest(self) -> str | None:
        """Digest of the files' bytes, whatever their names; None for a hub dataset, which has no files here yet."""
        if not self.files:
            return None
        chosen = f"{self.kind}:{self.split}" if self.kind == "saved" else self.kind
        digest = hashlib.blake2b(chosen.encode(), digest_size=16)
        for path in self.files:
            digest.update(path.stat().st_size.to_bytes(8, "little") + path.suffix.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()


def load_rows(path: str, *, split: str = "train") -> Dataset:
    """The rows of a JSONL, JSON, parquet, CSV, TSV, Arrow or text file, a glob, a folder of them, or a hub dataset.

    A line of a text file is a row. The files of a folder belong to the split that their names or folders mention
    (``train``, ``validation``, ``test`` and the usual synonyms), or all to "train" when none mentions one. Read rows
    with `read_row`. The result lives in the `datasets` cache; several processes may load at once.

    Raises:
        UserError: the path or the split does not exist, a suffix is unknown, a row is malformed, or there is none.
    """
    return load_source(find_source(path, split=split))


def find_source(path: str, *, split: str) -> Source:
    """Decide what ``path`` is, without reading it.

    Raises:
        UserError: as `load_rows`, except for a hub dataset, which is not looked up yet.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        if (local / "state.json").is_file() or (local / "dataset_dict.json").is_file():
            return Source(path, split, "saved", tuple(sorted(local.rglob("*.arrow"))))
        return _source_of_folder(path, local, split)
    if local.is_file():
        files = [local]
    elif re.search(r"[*?\[]", path):
        files = sorted(match for match in _glob(local) if match.is_file())
        if not files:
            raise UserError(f"data.path: {path}", "the pattern matches no file", "check the pattern")
    elif _HUB_ID.fullmatch(path) and Path(path).suffix not in _KINDS:
        return Source(path, split, "hub")
    else:
        raise UserError(
            f"data.path: {path}",
            "no such file or folder",
            "check the path: in a TOML it is relative to the TOML, in an override to the working directory",
        )
    if split != "train":
        raise UserError(
            f"data.path: {path}", f"a file has no split {split!r}", 'leave the split at "train", or give another path'
        )
    return Source(path, split, _kind_of(path, files), tuple(files))


def load_source(source: Source) -> Dataset:
    """The rows of a source that `find_source` found.

    Raises:
        UserError: as `load_rows`.
    """
    import datasets

    try:
        with quiet():
            rows = _load(source)
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise _unreadable(source, error.__cause__ or error) from error
    except (OSError, ValueError) as error:  # a hub dataset that is missing is a FileNotFoundError
        raise _unreadable(source, error) from error
    if not len(rows):
        raise _empty(source)
    return rows


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as it was written: JSON parsed, and None (which Arrow puts for missing keys) left out elsewhere."""
    if _JSON in row:
        return json.loads(row[_JSON])
    return {key: _without_none(value) for key, value in row.items() if value is not None}


def name_rows(batch: Mapping[str, list], indices: Sequence[int], path: str) -> list[str]:
    """How errors call the rows of a batch (a list for each column): ``file:line`` where lines are known."""
    return batch[_WHERE] if _WHERE in batch else [f"{path}: row {index}" for index in indices]


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _glob(pattern: Path) -> Iterator[Path]:
    root = Path(pattern.anchor) if pattern.is_absolute() else Path()
    return root.glob(str(pattern.relative_to(pattern.anchor)))


def _source_of_folder(path: str, folder: Path, split: str) -> Source:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix.lower() in _KINDS)
    if not files:
        raise UserError(f"data.path: {path}", "the folder holds no data file", f"known: {', '.join(_KINDS)}")
    split_of = {file: _split_of(file.relative_to(folder)) for file in files}
    known = sorted({name for name in split_of.values() if name})
    wanted = next((name for name, synonyms in _SPLITS.items() if split in synonyms), split)
    if not known:
        known, split_of = ["train"], dict.fromkeys(files, "train")
    chosen = [file for file in files if split_of[file] == wanted]
    if not chosen:
        raise UserError(f"data.path: {path}", f"there is no split {split!r}", f"the folder has: {', '.join(known)}")
    return Source(path, split, _kind_of(path, chosen), tuple(chosen))


def _split_of(relative: Path) -> str | None:
    words = re.split(r"[^a-z0-9]+", relative.as_posix().lower())
    return next((name for name, synonyms in _SPLITS.items() if any(word in synonyms for word in words)), None)


def _kind_of(path: str, files: list[Path]) -> str:
    kinds = {_KINDS.get(file.suffix.lower(), file.suffix) for file in files}
    if unknown := sorted(kinds - set(_KINDS.values())):
        raise UserError(f"data.path: {path}", f"unknown suffix {unknown[0]!r}", f"known: {', '.join(_KINDS)}")
    if len(kinds) > 1:
        raise UserError(
            f"data.path: {path}", f"files of several kinds ({', '.join(sorted(kinds))})", "give a glob of one kind"
        )
    return kinds.pop()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings from `datasets` within the block; every rank would print its own."""
    import datasets

    verbosity, bars = datasets.utils.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


def _load(source: Source) -> Dataset:
    import datasets

    if source.kind == "hub":
        return datasets.load_dataset(source.path, split=source.split)
    if source.kind == "saved":
        saved = datasets.load_from_disk(str(Path(source.path).expanduser()))
        if isinstance(saved, datasets.Dataset):
            saved = datasets.DatasetDict({"train": saved})
        if source.split not in saved:
            raise ValueError(f"there is no split {source.split!r}; it has {', '.join(map(str, saved))}")
        return saved[source.split]
    files = [str(file) for file in source.files]
    if source.kind == "json":
        if next(_json_rows(files, digest=None), None) is None:
            raise _empty(source)
        text = datasets.Value("string")
        # The digest is part of what `datasets` keys its cache with: an edited file is read anew.
        return datasets.Dataset.from_generator(
            _json_rows,
            features=datasets.Features({_JSON: text, _WHERE: text}),
            gen_kwargs={"files": files, "digest": source.digest()},
        )
    options: dict[str, Any] = {"sep": "\t"} if source.files[0].suffix.lower() == ".tsv" else {}
    return datasets.load_dataset(source.kind, data_files=files, split="train", **options)


def _json_rows(files: list[str], digest: str | None) -> Iterator[dict[str, str]]:
    """Every row's JSON text and its name, each parsed once to find the malformed."""
    for file in files:
        with Path(file).open("rb") as lines:
            first = lines.readline().lstrip(b"\xef\xbb\xbf \t\r\n")
            lines.seek(0)
            if file.lower().endswith(".json") and first[:1] in (b"[", b""):
                yield from _json_array(file, lines.read())
                continue
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf").strip()
                if line:
                    row = _parse(line, f"{file}:{number}")
                    _check_object(row, f"{file}:{number}")
                    yield {_JSON: line.decode("utf-8"), _WHERE: f"{file}:{number}"}


def _json_array(file: str, data: bytes) -> Iterator[dict[str, str]]:
    rows = _parse(data, file) if data.strip() else []
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        where = f"{file}: row {number}"
        _check_object(row, where)
        yield {_JSON: json.dumps(row, ensure_ascii=False), _WHERE: where}


def _parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        position = where if error.lineno == 1 else f"{where}:{error.lineno}"
        raise UserError(
            position, f"not valid JSON ({error.msg}, column {error.colno})", "one JSON object a line (.jsonl)"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(where, f"not UTF-8 ({error.reason} at byte {error.start})", "save the file as UTF-8") from None


def _check_object(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise UserError(where, f"a row is a JSON {type(row).__name__}, not an object", 'write {"messages": […]}')


def _empty(source: Source) -> UserError:
    return UserError(f"data.path: {source.path}", "there are no rows", "give data with at least one row")


def _unreadable(source: Source, error: BaseException) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UserError(
        f"data.path: {source.path}",
        f"cannot be read as {source.kind} ({reason})",
        "check the path, the split and the file",
    )
