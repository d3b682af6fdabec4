"""Rows to token ids and masks, once: kept as an Arrow file in the `datasets` cache.

The cache is keyed by content, tokenizer, template and format, and by nothing else: another ``seq_len`` or another
policy for long documents reads the same file, an edited file does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fsdp2kit.data.formats import Source, find_source, load_source, name_rows, quiet, read_row
from fsdp2kit.data.masks import Encoded, encode_chats
from fsdp2kit.data.messages import Conversation
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Format = Literal["chat", "text"]
# Part of the cache key: raise it with any change to what is stored below.
_LAYOUT = 1
_BATCH = 256


def tokenise(path: str, *, split: str, format: Format, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """One row of tokens for each row of the data, memory-mapped.

    Columns: ``ids`` (list of int32), ``supervised`` (list of bool), ``length`` (int64), ``targets`` (int64:
    supervised tokens, the first token never being a target), ``first_target`` (int64: position of the first of
    them, −1 without any), ``largest_id`` (int64), ``digest`` (16 bytes over ids and mask).

    Raises:
        UserError: the data cannot be read, or a row does not have the columns and types of its format.
    """
    import datasets

    source = find_source(path, split=split)
    content = source.digest()
    rows = None
    if content is None:  # a hub dataset: the names of its cache files hold its revision, configuration and split
        rows = load_source(source)
        content = json.dumps([len(rows), [file["filename"] for file in rows.cache_files]])
    key = _key(content, format, tokenizer)
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "fsdp2kit" / f"{key}.arrow"
    if cache.is_file():
        return datasets.Dataset.from_file(str(cache))
    rows = load_source(source) if rows is None else rows
    cache.parent.mkdir(parents=True, exist_ok=True)
    with quiet():
        return rows.map(
            _encoder(source, format, tokenizer),
            with_indices=True,
            batched=True,
            batch_size=_BATCH,
            remove_columns=rows.column_names,
            features=_features(),
            cache_file_name=str(cache),  # written beside it and moved there: another process sees all or nothing
            new_fingerprint=key,
        )


def name_source_row(path: str, *, split: str, index: int) -> str:
    """How errors call a row of the data: ``file:line`` where lines are known. Opens the data anew."""
    rows = load_source(find_source(path, split=split))
    return name_rows(rows[index : index + 1], [index], path)[0]


def _features() -> Any:
    from datasets import Features, List, Value

    whole = Value("int64")
    return Features(
        {
            "ids": List(Value("int32")),
            "supervised": List(Value("bool")),
            "length": whole,
            "targets": whole,
            "first_target": whole,
            "largest_id": whole,
            "digest": Value("binary"),
        }
    )


def _key(content: str, format: Format, tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of everything that the stored tokens depend on."""
    import transformers

    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.update(truncation=None, padding=None)  # left behind by the last call, and overridden by ours
    else:
        state = tokenizer.get_vocab()
    parts = [
        _LAYOUT,
        content,
        format,
        transformers.__version__,
        type(tokenizer).__name__,
        state,
        tokenizer.special_tokens_map,
        tokenizer.chat_template if format == "chat" else None,
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _encoder(
    source: Source, format: Format, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, list], list[int]], dict[str, list]]:
    """The function that `Dataset.map` calls with a batch of rows (a list for each column) and their indices."""

    def encode(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        parsed = [read_row(dict(zip(batch, values, strict=True))) for values in zip(*batch.values(), strict=True)]
        names = name_rows(batch, indices, source.path)
        encode_rows = _encode_chat_rows if format == "chat" else _encode_text_rows
        return _columns(encode_rows(parsed, names, tokenizer))

    return encode


def _encode_chat_rows(
    rows: list[dict[str, Any]], names: list[str], tokenizer: PreTrainedTokenizerBase
) -> list[Encoded]:
    conversations = []
    for row, where in zip(rows, names, strict=True):
        if "messages" not in row:
            raise _lacks(where, "messages", row)
        conversations.append(Conversation(row["messages"], row.get("tools") or None, where))
    return encode_chats(conversations, tokenizer)


def _encode_text_rows(
    rows: list[dict[str, Any]], names: list[str], tokenizer: PreTrainedTokenizerBase
) -> list[Encoded]:
    """Special tokens as the tokenizer adds them, and an end-of-text token where there is one. All supervised."""
    for row, where in zip(rows, names, strict=True):
        if "text" not in row:
            raise _lacks(where, "text", row)
        if not isinstance(row["text"], str):
            kind = type(row["text"]).__name__
            raise UserError(where, f"text is of type {kind}", "give rows with a string `text`")
    encoding = tokenizer([row["text"] for row in rows], truncation=False, verbose=False)
    end = tokenizer.eos_token_id
    encoded = []
    for ids in encoding["input_ids"]:
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        encoded.append((ids, [True] * len(ids)))
    return encoded


def _lacks(where: str, column: str, row: dict[str, Any]) -> UserError:
    return UserError(
        where,
        f"the row has no {column!r} (it has: {', '.join(map(str, row)) or 'nothing'})",
        f"rename a column to {column!r}, or set data.format to what the data is",
    )


def _columns(encoded: list[Encoded]) -> dict[str, list]:
    columns: dict[str, list] = {name: [] for name in _features()}
    for ids, supervised in encoded:
        tokens, mask = np.asarray(ids, dtype=np.int32), np.asarray(supervised, dtype=bool)
        targets = np.flatnonzero(mask[1:]) + 1
        columns["ids"].append(tokens)
        columns["supervised"].append(mask)
        columns["length"].append(len(tokens))
        columns["targets"].append(len(targets))
        columns["first_target"].append(int(targets[0]) if len(targets) else -1)
        columns["largest_id"].append(int(tokens.max()) if len(tokens) else -1)
        columns["digest"].append(
            hashlib.blake2b(tokens.astype("<i4").tobytes() + mask.tobytes(), digest_size=16).digest()
        )
    return columns
