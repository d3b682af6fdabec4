"""What the rows of a data set are: the format that a recipe can read, the names of columns, and lengths in tokens."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.config.sections.data import DataConfig
from fsdp2kit.data.columns import messages_in, read_columns
from fsdp2kit.data.formats.table import FORMATS, looks_unwrapped
from fsdp2kit.data.names import ALSO
from fsdp2kit.data.rows import Row, RowReader, estimate_rows
from fsdp2kit.data.sources import is_url, locate
from fsdp2kit.data.template import Tokenizer
from fsdp2kit.data.tokens import encode_prompts, encode_rows
from fsdp2kit.errors import UserError
from fsdp2kit.starter.rewards import reference_of

MEASURED = 1000  # rows that are read, and tokenised for their lengths
# Tokens in a sequence of the batch: at least, and at most where long texts are split.
_SHORTEST = 128
_MOST_OF_TEXT = 4096
_TEXTS = ("text", "content", "document", "body", "article", "code")


@dataclass(frozen=True)
class Guess:
    """How a recipe reads rows."""

    format: str
    columns: dict[str, str]
    """The data's names of columns, where they differ from ours."""
    is_chat: bool
    """Whether rows hold messages, which need a chat template."""


@dataclass(frozen=True)
class DataFacts:
    """What was found out about the rows."""

    guess: Guess
    wrap: bool
    """Whether plain prompts should be put into the chat template."""
    count: int | None
    """Rows of the set, estimated from the first ones; None: not known."""
    lengths: np.ndarray | None
    """int64, tokens of each row that was measured, both answers of a preference together; None: no tokenizer."""
    has_reference: bool
    """Whether rows have an answer that a reward may compare with."""


def read_first(data: DataConfig) -> tuple[list[Row], int | None] | None:
    """The first rows of a set and how many it has; None for data that is not on this machine.

    Raises:
        UserError: the data is missing, empty or malformed.
    """
    assert data.path is not None, "there are rows to read"
    if is_url(data.path) or (location := locate(data)).kind == "hub":
        return None
    reader = RowReader(location)
    with contextlib.closing(iter(reader)) as rows:
        first = list(itertools.islice(rows, MEASURED))
        if len(first) < MEASURED:
            return first, len(first)
        count = estimate_rows(location, reader.position, len(first))
        return first, None if count is None else round(count)


def guess_format(rows: Sequence[Mapping[str, Any]], kind: str, *, where: str) -> Guess:
    """The format that rows have for a recipe.

    Args:
        kind: the default ``data.format`` of the recipe: "chat", "text", "preference", "prompts", ….
        where: names the data in errors.

    Raises:
        UserError: the rows are in no format that the recipe reads.
    """
    names = [name for name in rows[0] if all(row.get(name) is not None for row in rows)]
    chat = next((name for name in names if _is_conversation([row[name] for row in rows])), None)
    found = {
        "preference": _preference,
        "prompts": _prompts,
        "text": _text,
        "synthetic": _text,
    }.get(kind, _answers)(rows, names, chat)
    if found is not None:
        return found
    what = f"its rows have the columns {', '.join(names) or 'that all rows share: none'}, which are no {kind} data"
    others = {"preference": _preference, "chat": _answers, "text": _text}
    recipe = {"preference": "dpo", "chat": "sft", "text": "pretrain"}
    fitting = [recipe[name] for name, guess in others.items() if name != kind and guess(rows, names, chat)]
    todo = f"use recipe {fitting[0]}, or " if fitting else ""
    raise UserError(where, what, f"{todo}rename them as `fsdp2kit docs data`, Formats, says")


def _is_conversation(values: Sequence[Any]) -> bool:
    """Whether all are lists of messages, or their JSON."""
    found = [messages_in(value, "data.path") for value in values]
    return all(
        isinstance(one, list) and one and all(isinstance(each, dict) and {"role", "from"} & {*each} for each in one)
        for one in found
    )


def _named(name: str, names: Sequence[str]) -> str | None:
    """The column that is called ``name`` here: that one, or one that other data calls so."""
    if name in names:
        return name
    return next((one for other in ALSO.get(name, ()) for one in names if one.lower() == other), None)


def _renamed(**columns: str | None) -> dict[str, str]:
    return {ours: theirs for ours, theirs in columns.items() if theirs is not None and theirs != ours}


def _preference(rows: Sequence[Mapping[str, Any]], names: list[str], chat: str | None) -> Guess | None:
    chosen = _named("chosen", names)
    rejected = _named("rejected", names)
    if chosen is None or rejected is None:
        return None
    is_chat = _is_conversation([row[chosen] for row in rows])
    prompt = _named("prompt", [name for name in names if name not in (chosen, rejected)])
    if is_chat and prompt != "prompt":  # both answers begin with it
        prompt = None
    is_chat = is_chat or (prompt is not None and _is_conversation([row[prompt] for row in rows]))
    return Guess("preference", _renamed(chosen=chosen, rejected=rejected, prompt=prompt), is_chat)


def _prompts(rows: Sequence[Mapping[str, Any]], names: list[str], chat: str | None) -> Guess | None:
    if "prompt" in names:
        return Guess("prompts", {}, _is_conversation([row["prompt"] for row in rows]))
    if chat is not None:
        is_default = chat in ("messages", "conversations")
        return Guess("prompts", {} if is_default else {"messages": chat}, True)
    prompt = _named("prompt", names)
    return None if prompt is None else Guess("prompts", {"prompt": prompt}, False)


def _answers(rows: Sequence[Mapping[str, Any]], names: list[str], chat: str | None) -> Guess | None:
    """Rows with one answer each, for sft and distill."""
    if {"chosen", "rejected"} <= {*names}:
        return None
    if {"prompt", "completion"} <= {*names}:
        return Guess("prompt_completion", {}, _is_conversation([row["prompt"] for row in rows]))
    if chat is not None:
        is_default = chat in ("messages", "conversations")
        return Guess("chat", {} if is_default else {"messages": chat}, True)
    if {"instruction", "output"} <= {*names}:
        return Guess("alpaca", {}, True)
    prompt = _named("prompt", names)
    completion = _named("completion", names)
    if prompt is not None and completion is not None and prompt != completion:
        return Guess("prompt_completion", _renamed(prompt=prompt, completion=completion), False)
    return _text(rows, names, chat)


def _text(rows: Sequence[Mapping[str, Any]], names: list[str], chat: str | None) -> Guess | None:
    if "input_ids" in names:
        return Guess("tokens", {}, False)
    text = next((name for name in _TEXTS if name in names and isinstance(rows[0][name], str)), None)
    return None if text is None else Guess("text", _renamed(text=text), False)


def measure(
    rows: Sequence[Row], count: int | None, guess: Guess, data: DataConfig, tokenizer: Tokenizer | None
) -> DataFacts:
    """Tokenise rows as the run will.

    Args:
        data: with the guessed format and columns.
        tokenizer: with a chat template if the rows need one; None: nothing is measured.

    Raises:
        UserError: a row is malformed.
    """
    has_reference = reference_of(dict(rows[0].parse())) is not None
    if tokenizer is None:
        return DataFacts(guess, False, count, None, has_reference)
    wrap = guess.format in FORMATS and looks_unwrapped(read_columns(rows[:1], data)[0], tokenizer)
    section = data.model_copy(update={"wrap": "chat"}) if wrap else data
    if guess.format == "prompts":
        lengths = np.array([len(one.ids) for one in encode_prompts(rows, section, tokenizer)])
    else:
        answers = np.array([len(ids) for ids, _ in encode_rows(rows, section, tokenizer)])
        lengths = answers.reshape(-1, FORMATS[section.format].answers).sum(axis=1)
    return DataFacts(guess, wrap, count, lengths, has_reference)


def needs_template(guess: Guess, model: ModelConfig, tokenizer: Tokenizer | None) -> bool:
    """Whether the rows need a chat template that the tokenizer lacks."""
    return guess.is_chat and tokenizer is not None and not tokenizer.chat_template and model.chat_template is None


def choose_length(lengths: np.ndarray, *, context: int | None, more: int = 0, is_text: bool = False) -> int:
    """The smallest of 128, 192, 256, 384, 512, … that holds 99 % of the rows, and at most the model's context.

    Args:
        context: positions that the model was made for; None: not known.
        more: tokens beside each row, those of a response.
        is_text: long texts are split, so that they do not decide.
    """
    wanted = int(np.percentile(lengths, 99, method="inverted_cdf")) + more
    if is_text:
        wanted = min(wanted, _MOST_OF_TEXT)
    size = _SHORTEST
    while size < wanted:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return min(size, context) if context else size
