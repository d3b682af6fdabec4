"""A look at the first rows, for ``--check``: without the cache, the hub or a process group."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.formats import RowFormat, encode_preferences, encode_rows, row_format
from fsdp2kit.data.rows import empty
from fsdp2kit.data.sources import Source, find_source, is_url
from fsdp2kit.data.stream import open_stream
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 8


def named_sets(config: Any) -> list[tuple[str, str, str, RowFormat]]:
    """``(TOML key, path, split, format)`` of every set of rows that a training config names."""
    data: DataConfig = config.data
    found = []
    if data.path is not None:
        found.append(("data.path", data.path, data.split, row_format(data)))
    parts = [(f"data.sources.{at}.path", part) for at, part in enumerate(data.sources)]
    parts += [(f"eval.sets.{name}.path", part) for name, part in config.eval.sets.items()]
    for key, part in parts:
        found.append((key, part.path, part.split, row_format(data, format=part.format, columns=part.columns)))
    if config.eval.path is not None:
        found.append(("eval.path", config.eval.path, config.eval.split, row_format(data)))
    return found


def check_first_rows(config: Any) -> list[str]:
    """Read and, where the tokenizer is on this machine, encode the first rows of every set that is.

    Returns:
        What is not: the tokenizer, and the TOML keys of hub datasets and URLs.

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
    for key, path, split, how in named_sets(config):
        source = None if is_url(path) else find_source(path, split=split, key=key)
        if source is None or source.kind == "hub":
            unchecked.append(key)
        else:
            _check_rows(source, how, tokenizer)
    return unchecked


def _check_rows(source: Source, how: RowFormat, tokenizer: PreTrainedTokenizerBase | None) -> None:
    with open_stream(source) as stream:
        rows = list(itertools.islice(stream, ROWS))
    if not rows:
        raise empty(source)
    if tokenizer is None:
        return
    encode = encode_preferences if how.format == "preference" else encode_rows
    encode([row.value for row in rows], [row.where for row in rows], how, tokenizer)
