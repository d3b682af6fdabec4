"""The sets of rows that ``[data]`` and ``[eval]`` name, and a look at the first rows of each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.chat import Tokenizer
from fsdp2kit.data.formats import WRAPPED, encode_prompts, encode_rows, looks_unwrapped
from fsdp2kit.data.rows import Row, RowReader
from fsdp2kit.data.sources import find_source, is_url
from fsdp2kit.distributed import agreement
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer

ROWS_CHECKED = 8


class RowSet(NamedTuple):
    """A set of rows that a config names."""

    section: DataConfig
    """``[data]`` with the set's own path, split, format and columns."""
    key: str
    """The TOML key that names it, for errors."""
    name: str = ""


def training_sets(data: DataConfig) -> list[RowSet]:
    """What is trained on: ``data.path``, or each of ``data.sources``."""
    sets = []
    for at, part in enumerate(data.sources):
        name = part.name or Path(part.path).name.partition(".")[0] or str(at)  # in the metrics
        sets.append(RowSet(_with_rows(data, part, limit=part.limit or data.limit), f"data.sources.{at}.path", name))
    return sets or [RowSet(data, "data.path")]


def held_out_sets(config: Any) -> list[RowSet]:
    """What is evaluated on, but for rows held out of the training data."""
    data, evaluation = config.data, config.eval
    sets = [
        RowSet(_with_rows(data, part, limit=part.limit), f"eval.sets.{name}.path", name)
        for name, part in evaluation.sets.items()
    ]
    if evaluation.path is not None or (isinstance(evaluation.split, str) and evaluation.split != data.split):
        sets.append(RowSet(_with_rows(data, evaluation), "eval.path" if evaluation.path else "eval.split"))
    return sets


def _with_rows(data: DataConfig, part: Any, *, limit: int | None = None) -> DataConfig:
    """``[data]`` with what one of its sources or a held-out set says of its own rows."""
    own = {name: getattr(part, name, None) for name in ("path", "split", "format", "columns")}
    return data.model_copy(
        update={"limit": limit, **{name: value for name, value in own.items() if value is not None}}
    )


def first_rows(section: DataConfig, key: str, count: int, *, download: bool = False) -> list[Row]:
    """The first rows of a set; for ``download`` see `RowReader`."""
    with contextlib.closing(iter(RowReader(find_source(section, key), download=download))) as rows:
        return list(itertools.islice(rows, count))


def check_first_rows(config: Any) -> list[str]:
    """Read and, where the tokenizer is on this machine, encode the first rows of every set that is.

    Neither the cache nor the hub nor a process group is needed.

    Returns:
        What is not here: the tokenizer, and the TOML keys of hub datasets and URLs.

    Raises:
        UserError: a set is missing or empty, or one of its first rows is malformed.
    """
    if config.data.format == "synthetic":
        return []
    unchecked, tokenizer = [], None
    try:
        tokenizer = build_tokenizer(config.model, local_files_only=True)
    except UserError:
        source = config.model.tokenizer or config.model.path
        if source is None or Path(source).is_absolute():
            raise
        unchecked.append("tokenizer")
    for section, key, _ in (*training_sets(config.data), *held_out_sets(config)):
        if section.path is None or key == "eval.split":
            continue
        if is_url(section.path) or find_source(section, key).kind == "hub":
            unchecked.append(key)
            continue
        rows = first_rows(section, key, ROWS_CHECKED)
        if tokenizer is None:
            for row in rows:
                row.parse()
        elif section.format == "prompts":
            encode_prompts(rows, section, tokenizer)
        else:
            encode_rows(rows, section, tokenizer)
    return unchecked


def find_unwrapped(sets: Sequence[RowSet], tokenizer: Tokenizer) -> tuple[str, ...]:
    """A warning of each set whose first row is plain text although the tokenizer has a chat template."""
    found = []
    with agreement():
        for section, key, _ in sets:
            if section.format in WRAPPED and section.path:
                [row] = first_rows(section, key, 1, download=not section.streaming)
                if looks_unwrapped(row, section, tokenizer):
                    found.append(key)
    what = "prompts are plain texts, outside the tokenizer's chat template; an instruct model expects it"
    return tuple(f'{key}: {what}: set data.wrap = "chat"' for key in found)
