"""Columns of a row that its format does not read: which are refused, and which are named at the start.

A column that changes what is learnt, or what the model sees before it, must be read, or the row is refused. Which
columns these are is in `fsdp2kit.data.names`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from fsdp2kit.config.data_formats import ASKED, COLUMNS, DataFormat
from fsdp2kit.data.columns import RowColumns, messages_in
from fsdp2kit.data.names import (
    CUMULATIVE,
    FUNCTIONS,
    LENGTHS,
    MASKS,
    MEDIA_KEYS,
    NUMBERS,
    POSITIONS,
    REFUSED,
    WEIGHTS,
    Refused,
    When,
)
from fsdp2kit.errors import UserError

# Columns without which a row is an error of its own, which names the nearest one.
_REQUIRED = {"messages", "conversations", "prompt", "completion", "instruction", "output", "text", "input_ids"}
_REQUIRED |= {"chosen", "rejected"}
_TEXTS = {"system", "input"}  # optional columns whose values are texts; those of others are lists or objects
_ALIKE = 0.9  # similarity of names
_SHORTEST_ALIKE = 7  # letters from which on it counts


def check_unread(row: RowColumns, variables: frozenset[str]) -> list[str]:
    """The columns of a row that its format does not read. Prompts have none: a reward or environment gets all.

    Args:
        variables: what the chat template reads beside the messages; empty if it does not render the row.

    Raises:
        UserError: a column changes what is learnt, or what the model sees before it. It names the row and the column.
    """
    format = row.section.format
    read = _read(format, tuple(row.named.items()))
    for name in _suspects(format, tuple(row.all), read, variables):
        value = row.all[name]
        is_read = name in read and (name not in WEIGHTS or _is_list(row, name, value))
        if is_read or _is_empty(value):
            continue
        for refused in _refusals_of(format, name):
            if not any(_has(row, other) for other in refused.unless) and _IS_REFUSED[refused.when](row, name, value):
                raise _refusal(row, f"{name!r} {refused.what}", refused.todo.format(name=name), name)
        if name in variables and _template_arguments(row).get(name) != value:
            what = f"{name!r} is also a variable of the chat template, which is not given it"
            raise _refusal(row, what, f'write it as chat_template_kwargs: {{"{name}": …}}', name)
        near = _near_miss(name, read)
        may_be_meant = _is_text(value) if near in _TEXTS else _is_list(row, name, value)
        if near is not None and may_be_meant and _is_empty(row.all.get(near)):
            raise _refusal(row, f"{name!r} is not read; did you mean {near!r}?", f"rename it to {near}", name)
    if format in ASKED:
        return []
    return [name for name, value in row.all.items() if name not in read and not _is_empty(value)]


def _refusal(row: RowColumns, what: str, todo: str, name: str) -> UserError:
    return UserError(row.where, what, f'{todo}, or set data.columns.ignore = ["{name}"] to pass over it')


@lru_cache(maxsize=64)
def _read(format: DataFormat, named: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """The data's names of all columns that a format reads, or looks at."""
    called = dict(named)
    names = set(COLUMNS[format])
    if "messages" in called:
        names.discard("conversations")
    if "tools" in names and "tools" not in called:
        names.add(FUNCTIONS)
    if format in ("tokens", "chat") and "loss_mask" not in called:
        names.update(MASKS, WEIGHTS)
    if format == "tokens":
        names.update(POSITIONS, LENGTHS, CUMULATIVE, NUMBERS, ["attention_mask"])
    elif format != "text":
        names.update(MEDIA_KEYS)
    return frozenset(called.get(name, name) for name in names)


@lru_cache(maxsize=1024)
def _suspects(
    format: DataFormat, names: tuple[str, ...], read: frozenset[str], variables: frozenset[str]
) -> tuple[str, ...]:
    """The names of a row's columns whose values have to be looked at: few, so that most rows cost nothing."""
    return tuple(
        name
        for name in names
        if name in WEIGHTS
        or (name not in read and (name in variables or _refusals_of(format, name) or _near_miss(name, read)))
    )


@lru_cache(maxsize=4096)
def _refusals_of(format: DataFormat, name: str) -> tuple[Refused, ...]:
    plain = name.lower().replace("-", "_")
    return tuple(one for one in REFUSED if format in one.formats and plain in one.names)


@lru_cache(maxsize=4096)
def _near_miss(name: str, read: frozenset[str]) -> str | None:
    """The optional column of a format that a name most likely misspells."""
    letters = _letters(name)
    for other in sorted(read - _REQUIRED):
        close = min(len(letters), len(other)) >= _SHORTEST_ALIKE
        if _letters(other) == letters:
            return other
        if close and difflib.SequenceMatcher(None, _letters(other), letters).ratio() >= _ALIKE:
            return other
    return None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).rstrip("s")


def _template_arguments(row: RowColumns) -> Mapping[str, Any]:
    given = row.from_json("chat_template_kwargs")
    return given if isinstance(given, Mapping) else {}


def _has(row: RowColumns, name: str) -> bool:
    return not _is_empty(row.get(name))


def _is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, an empty text, list or object, or a list of nulls."""
    if value is None or (isinstance(value, (str, list, dict)) and not value):
        return True
    return isinstance(value, list) and all(item is None for item in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip()[:1] not in ("[", "{")


def _number(value: Any) -> float | None:
    """A number, or a text of one, as CSV has it."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, (int, float)) else None


def _is_list(row: RowColumns, name: str, value: Any) -> bool:
    return isinstance(value, (list, dict)) or (isinstance(value, str) and not _is_text(value))


def _is_not(number: float) -> Callable[[RowColumns, str, Any], bool]:
    """Whether a value is another number, or a list that holds another one."""

    def check(row: RowColumns, name: str, value: Any) -> bool:
        found = [_number(one) for one in (value if isinstance(value, list) else [value])]
        return any(one is not None and one != number for one in found)

    return check


def _is_word(*words: str) -> Callable[[RowColumns, str, Any], bool]:
    """Whether a truth value, or a text or number for one, is one of some words."""

    def check(row: RowColumns, name: str, value: Any) -> bool:
        return isinstance(value, (str, int)) and str(value).strip().lower() in words

    return check


def _is_not_asked(row: RowColumns, name: str, value: Any) -> bool:
    """Whether a text is missing from what the row asks."""
    asked = [row.get(one) for one in ("prompt", "instruction", "chosen")]
    plain = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in asked if one is not None]
    if not isinstance(value, str) or not value.strip():
        return False
    quoted = json.dumps(value.strip(), ensure_ascii=False)[1:-1]
    return not any(value.strip() in one or quoted in one for one in plain)


def _is_beside_instruction(row: RowColumns, name: str, value: Any) -> bool:
    return row.called("prompt") == "instruction" and _is_not_asked(row, name, value)


def _lacks_system(row: RowColumns, name: str, value: Any) -> bool:
    """Whether a text is given and no conversation of the row begins with a system prompt."""
    if not isinstance(value, str) or not value.strip():
        return False
    for one in ("messages", "conversations", "prompt", "chosen"):
        messages = messages_in(row.get(one), row.where)
        first = messages[0] if isinstance(messages, list) and messages else None
        if isinstance(first, Mapping) and first.get("role", first.get("from")) in ("system", "developer"):
            return False
    return True


_IS_REFUSED: dict[When, Callable[[RowColumns, str, Any], bool]] = {
    "given": lambda row, name, value: True,
    "list": _is_list,
    "not one": _is_not(1),
    "false": _is_word("false"),
    "bad": _is_word("false", "0"),
    "true": _is_word("true", "1"),
    "not zero": _is_not(0),
    "not asked": _is_not_asked,
    "beside": _is_beside_instruction,
    "no system": _lacks_system,
}
