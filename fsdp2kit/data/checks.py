"""Checks of the data before a run: its first rows, and the steps of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp2kit.config.data_formats import ASKED
from fsdp2kit.console import counted
from fsdp2kit.data.build import RANDOM, build_data, read_beginning
from fsdp2kit.data.cache import Cache
from fsdp2kit.data.documents import find_document_warnings
from fsdp2kit.data.rows import first_rows
from fsdp2kit.data.sources import held_out_sets, locate, training_sets
from fsdp2kit.data.tables import is_tokenised
from fsdp2kit.data.tokens import encode_prompts, encode_rows
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import is_url
from fsdp2kit.model.tokenizer import build_tokenizer

ROWS_CHECKED = 8
_BYTES_COUNTED = 4 << 20  # tokenised in about three seconds
_BYTES_DIGESTED = 1 << 30  # read in about three seconds


def check_first_rows(config: Any) -> list[str]:
    """Read the first rows of every set on this machine, and encode them if the tokenizer is here, too.

    It needs no cache, no hub and no process group.

    Returns:
        What is not on this machine: "tokenizer", and the TOML keys of hub datasets and URLs.

    Raises:
        UserError: a set is missing or empty, or one of its first rows is malformed.
    """
    if config.data.format == "synthetic":
        return []
    unchecked = []
    tokenizer = None
    cache = Cache(Path(config.run.dir))
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
        if is_url(section.path) or locate(section, key).kind == "hub":
            unchecked.append(key)
            continue
        rows = first_rows(section, key, ROWS_CHECKED, cache=cache)
        if tokenizer is None:
            for row in rows:
                row.parse()
        elif section.format in ASKED:
            encode_prompts(rows, section, tokenizer)
        else:
            encode_rows(rows, section, tokenizer)
    return unchecked


def count_steps(config: Any, *, model: Any = None) -> list[str]:
    """What a start would say about the data and its steps; nothing if that takes more than seconds.

    The data must be on this machine: synthetic, or tokenised before, or so little that it can be tokenised now. That
    fills the cache.

    Args:
        model: as `build_data`'s.

    Raises:
        UserError: as `build_data` does.
    """
    no_text = config.data.format == "synthetic" and model is None
    if no_text:
        return [f"data: random tokens ({RANDOM})"]
    if config.data.format in ASKED:
        return []
    if config.data.streaming:
        return _beginnings_of(config)
    sets = []
    tokenizer = None
    if config.data.format != "synthetic":
        tokenizer = build_tokenizer(config.model, local_files_only=True)
        sets = [*training_sets(config.data), *(held_out_sets(config) if config.evaluates else [])]
    bytes_left = _BYTES_COUNTED
    for section, key, _ in sets:
        assert tokenizer is not None, "only synthetic data needs no tokenizer"
        location = locate(section, key, cache=Cache(Path(config.run.dir)))
        size = sum(Path(file).stat().st_size * (1 if location.is_text else 4) for file in location.files)
        if size > bytes_left and (size > _BYTES_DIGESTED or not is_tokenised(location, section, tokenizer)):
            what = f"steps of an epoch not counted: {key} is {size / 2**20:,.0f} MiB to be tokenised"
            return [what, *_beginnings_of(config)]
        bytes_left -= min(size, bytes_left)
    data = build_data(config, tokenizer=tokenizer, model=model)
    return [*data.describe(), f"train: {counted(data.total_steps, 'step')}"]


def _beginnings_of(config: Any) -> list[str]:
    """What a start would say of the first rows of the training data that is on this machine."""
    cache = Cache(Path(config.run.dir))
    lines = []
    tokenizer = build_tokenizer(config.model, local_files_only=True)
    for one in training_sets(config.data):
        path = one.section.path
        if path is None or is_url(path) or locate(one.section, one.key).kind == "hub":
            continue
        found = read_beginning(one, tokenizer, count=ROWS_CHECKED, cache=cache)
        of = f"{one.key}, its first {counted(found.report.rows, 'row')}"
        texts = find_document_warnings(found, tokenizer)
        lines += [*found.notes, *(f"warning: {text}" for text in found.warnings)]
        lines += [f"warning: {of}: {text}" for text in texts]
    return lines
