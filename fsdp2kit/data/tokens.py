"""Rows to token ids and masks, once: kept as Arrow files in the `datasets` cache.

The cache is keyed by content, tokenizer, template and format, and by nothing else: another ``seq_len`` or another
policy for long documents reads the same files, an edited file does not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import numpy as np

from fsdp2kit.data.formats import RowFormat, encode_rows
from fsdp2kit.data.masks import Encoded
from fsdp2kit.data.rows import load_source, name_exactly, name_rows, quiet, read_row
from fsdp2kit.data.sources import Source
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Part of the cache key: raise it with any change to what is stored below.
_LAYOUT = 2
NO_ENDING = -1
_BATCH = 256
_ROWS_A_WORKER = 4096  # a process takes seconds to start
_MOST_WORKERS = 16


def tokenise(
    source: Source, *, how: RowFormat, tokenizer: PreTrainedTokenizerBase, workers: int | Literal["auto"] = 0
) -> Dataset:
    """One row of tokens for each row of the data, memory-mapped.

    Columns: ``ids`` (list of int32), ``supervised`` (list of bool), ``length`` (int64), ``targets`` (int64:
    supervised tokens, the first token never being a target), ``ending`` (int64: the special token that the last
    supervised token is, which ends a turn or a text; −1 where it is none), ``largest_id`` (int64), ``digest`` (16
    bytes over ids and mask).

    Args:
        workers: processes; the result does not depend on it.

    Raises:
        UserError: the data cannot be read, or a row does not have the columns and types of its format.
    """
    import datasets

    content = source.digest()
    rows = None
    if content is None:  # a hub dataset: the names of its cache files hold its revision, configuration and split
        rows = load_source(source)
        content = json.dumps([len(rows), [file["filename"] for file in rows.cache_files]])
    key = cache_key(content, how, tokenizer)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "fsdp2kit"
    index = folder / f"{key}.json"
    if (cached := _read_index(index)) is not None:
        return cached
    rows = load_source(source) if rows is None else rows
    processes = _processes(workers, len(rows))
    folder.mkdir(parents=True, exist_ok=True)
    # Forked processes warn of the threads that the tokenizer had unless they are told to start none.
    with quiet(), mock.patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "false"} if processes else {}):
        encoded = rows.map(
            _encoder(source, how, tokenizer),
            with_indices=True,
            batched=True,
            batch_size=_BATCH,
            num_proc=processes,
            remove_columns=rows.column_names,
            features=_features(),
            cache_file_name=str(folder / f"{key}.arrow"),  # of several processes each adds its number
            new_fingerprint=key,
        )
    _write_index(index, encoded)
    return encoded


def cache_key(content: str, how: RowFormat, tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of everything that the tokens of some content depend on."""
    import transformers

    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.update(truncation=None, padding=None)  # left behind by the last call, and overridden by ours
    else:
        state = tokenizer.get_vocab()
    parts = [
        _LAYOUT,
        content,
        how.format,
        how.columns.model_dump(exclude_none=True),
        how.train_on,
        transformers.__version__,
        type(tokenizer).__name__,
        state,
        tokenizer.special_tokens_map,
        None if how.format in ("text", "tokens") else tokenizer.chat_template,
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _processes(workers: int | Literal["auto"], rows: int) -> int | None:
    """How many processes `Dataset.map` starts; None for none."""
    if workers == "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(cores, _MOST_WORKERS, rows // _ROWS_A_WORKER)
        return workers if workers > 1 else None
    return min(workers, rows) or None


def _read_index(index: Path) -> Dataset | None:
    """The cached table, if all files that its index names are there."""
    import datasets

    try:
        files = [index.parent / name for name in json.loads(index.read_text())]
    except (OSError, ValueError):
        return None
    if not all(file.is_file() for file in files):
        return None
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])


def _write_index(index: Path, table: Dataset) -> None:
    # Written last, beside it and moved there: another process sees a whole table or none.
    beside = index.with_suffix(f".{os.getpid()}.partial")
    beside.write_text(json.dumps([Path(file["filename"]).name for file in table.cache_files]))
    beside.replace(index)


def _features() -> Any:
    from datasets import Features, List, Value

    whole = Value("int64")
    return Features(
        {
            "ids": List(Value("int32")),
            "supervised": List(Value("bool")),
            "length": whole,
            "targets": whole,
            "ending": whole,
            "largest_id": whole,
            "digest": Value("binary"),
        }
    )


def _encoder(
    source: Source, how: RowFormat, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, list], list[int]], dict[str, list]]:
    """The function that `Dataset.map` calls with a batch of rows (a list for each column) and their indices."""
    special = special_ids(tokenizer)

    def encode(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        parsed = [read_row(dict(zip(batch, values, strict=True))) for values in zip(*batch.values(), strict=True)]
        try:
            encoded = encode_rows(parsed, name_rows(batch, indices, source), how, tokenizer)
        except UserError as error:
            raise UserError(name_exactly(error.where, source), error.what, error.todo) from None
        return _columns(encoded, special)

    return encode


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that may end a turn or a text."""
    ids = {at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(ids | ({tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set()))


def ending_of(ids: np.ndarray, supervised: np.ndarray, special: frozenset[int]) -> int:
    """The special token that the last supervised token is; `NO_ENDING` where it is none."""
    learnt = np.flatnonzero(supervised)
    last = int(ids[learnt[-1]]) if len(learnt) else NO_ENDING
    return last if last in special else NO_ENDING


def _columns(encoded: list[Encoded], special: frozenset[int]) -> dict[str, list]:
    columns: dict[str, list] = {name: [] for name in _features()}
    for ids, supervised in encoded:
        tokens, mask = np.asarray(ids, dtype=np.int32), np.asarray(supervised, dtype=bool)
        columns["ids"].append(tokens)
        columns["supervised"].append(mask)
        columns["length"].append(len(tokens))
        columns["targets"].append(int(mask[1:].sum()))
        columns["ending"].append(ending_of(tokens, mask, special))
        columns["largest_id"].append(int(tokens.max()) if len(tokens) else -1)
        columns["digest"].append(
            hashlib.blake2b(tokens.astype("<i4").tobytes() + mask.tobytes(), digest_size=16).digest()
        )
    return columns
