"""The rows of a source, as a memory-mapped `datasets.Dataset`.

Rows of text files are kept as the JSON of each and parsed when they are read; all else is as `datasets` reads it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2kit.data.sources import Source, find_source, is_url
from fsdp2kit.data.textrows import iterate_rows
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

# The two columns of rows that were written as text.
_JSON, _WHERE = "fsdp2kit_json", "fsdp2kit_where"


def load_rows(path: str, *, split: str = "train", key: str = "data.path") -> Dataset:
    """The rows of a JSONL, JSON, parquet, CSV, TSV, Arrow or text file, a glob, a folder of them, or a hub dataset.

    A line of a text file is a row. Read rows with `read_row`. The result lives in the `datasets` cache; several
    processes may load at once.

    Raises:
        UserError: the path or the split does not exist, a suffix is unknown, a row is malformed, or there is none.
    """
    return load_source(find_source(path, split=split, key=key))


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
        raise unreadable(source, error.__cause__ or error) from error
    except (OSError, ValueError) as error:  # a hub dataset that is missing is a FileNotFoundError
        raise unreadable(source, error) from error
    if not len(rows):
        raise empty(source)
    return rows


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as it was written: JSON parsed, and None (which Arrow puts for missing keys) left out elsewhere."""
    if _JSON in row:
        return json.loads(row[_JSON])
    return {key: _without_none(value) for key, value in row.items() if value is not None}


def name_rows(batch: Mapping[str, list], indices: Sequence[int], source: Source) -> list[str]:
    """How errors call the rows of a batch (a list for each column): ``file:line`` where lines are known."""
    return batch[_WHERE] if _WHERE in batch else [name_row(source, index) for index in indices]


def name_row(source: Source, index: int) -> str:
    """How errors call a row of files that know no lines: the file, and the row within it where that can be told."""
    if len(source.files) == 1 and source.kind != "saved":
        return f"{source.files[0]}: row {index}"
    return f"{source.path}: row {index}"


def name_exactly(where: str, source: Source) -> str:
    """A name of `name_row` with the very file of several, where the kind of file can say how many rows it has."""
    prefix = f"{source.path}: row "
    if source.kind != "parquet" or len(source.files) < 2 or not where.startswith(prefix):
        return where
    import fsspec
    import pyarrow.parquet

    row = int(where.removeprefix(prefix))
    for file in source.files:
        with fsspec.open(file, "rb") as content:
            count = pyarrow.parquet.read_metadata(content).num_rows
        if row < count:
            return f"{file}: row {row}"
        row -= count
    return where


def empty(source: Source) -> UserError:
    """The error of a source without rows."""
    return UserError(source.where, "there are no rows", "give data with at least one row")


def unreadable(source: Source, error: BaseException) -> UserError:
    """The error of a source that `datasets` cannot read."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    what = f"cannot be read as {source.kind} ({reason})"
    return UserError(source.where, what, "check the path, the split and the file")


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


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


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
    if source.is_text:
        with contextlib.closing(_text_rows(source.files, digest=None)) as peek:
            if next(peek, None) is None:
                raise empty(source)
        text = datasets.Value("string")
        # The digest is part of what `datasets` keys its cache with: an edited file is read anew.
        return datasets.Dataset.from_generator(
            _text_rows,
            features=datasets.Features({_JSON: text, _WHERE: text}),
            gen_kwargs={"files": source.files, "digest": source.digest()},
        )
    files = [_fetched(file) if is_url(file) else file for file in source.files]
    return datasets.load_dataset(source.kind, data_files=files, split="train")


def _fetched(url: str) -> str:
    """A local copy of a remote file, made anew when that changes; `datasets` itself refuses URLs when offline."""
    import datasets
    import fsspec

    storage = str(Path(datasets.config.HF_DATASETS_CACHE) / "fsdp2kit" / "files")
    return fsspec.open_local(f"filecache::{url}", filecache={"cache_storage": storage, "check_files": True})  # pyright: ignore


def _text_rows(files: Sequence[str], digest: str | None) -> Generator[dict[str, str], None, None]:
    """Every row's JSON text and its name, each parsed once to find the malformed."""
    for file in files:
        for row in iterate_rows(file):
            yield {_JSON: json.dumps(row.value, ensure_ascii=False), _WHERE: row.where}
