"""The formats of rows: the columns and the keys of ``[data]`` that each reads."""

from __future__ import annotations

from typing import Any, Literal

DataFormat = Literal[
    "chat", "prompt_completion", "alpaca", "text", "tokens", "preference", "prompts", "rows", "synthetic"
]

Overlong = Literal["truncate", "drop", "split", "error"]

_OPTIONS = ("system", "tools", "chat_template_kwargs")

# The columns that each format reads.
COLUMNS: dict[DataFormat, tuple[str, ...]] = {
    "chat": ("messages", "conversations", "loss_mask", *_OPTIONS),
    "prompt_completion": ("prompt", "completion", *_OPTIONS),
    "alpaca": ("instruction", "input", "output", "history", *_OPTIONS),
    "text": ("text",),
    "tokens": ("input_ids", "labels", "loss_mask"),
    "preference": ("prompt", "chosen", "rejected", *_OPTIONS),
    "prompts": ("messages", "conversations", "prompt", *_OPTIONS),
    "rows": (),
    "synthetic": (),
}

_ROWS: tuple[DataFormat, ...] = tuple(one for one in COLUMNS if one != "synthetic")

_TOKENISED: tuple[DataFormat, ...] = tuple(one for one in _ROWS if one not in ("prompts", "rows"))

# The formats that use a key of ``[data]``, for keys that not every format uses. `COLUMNS` says it of columns.
USED_BY: dict[str, tuple[DataFormat, ...]] = {
    **dict.fromkeys(("path", "name", "split", "limit", "formatter"), _ROWS),
    **dict.fromkeys(("sources", "temperature", "streaming", "workers"), _TOKENISED),
    "overlong": _ROWS,
    "wrap": ("prompt_completion", "preference"),
    "train_on": tuple(one for one in _TOKENISED if one not in ("text", "tokens")),
    "prefetch": (*_TOKENISED, "synthetic"),
}

# Values that say what is done anyway in a format that does not use the key. Rows of tokens that say otherwise are
# refused.
IDLE: dict[tuple[str, DataFormat], Any] = {("train_on", "text"): "all", ("train_on", "tokens"): "all"}

# Formats of rows with answers that the chat template may render.
RENDERED: tuple[DataFormat, ...] = ("chat", "prompt_completion", "alpaca")

# Formats of rows that the model answers itself: they have no documents before it does.
ASKED: tuple[DataFormat, ...] = ("prompts", "rows")
