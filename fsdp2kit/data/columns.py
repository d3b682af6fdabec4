"""A row's columns by our names for them, and the errors of columns that are missing, or that would go unread.

A column that changes what is learnt, or what the model sees before it, must be read, or the row is refused. Which
columns these are is in `fsdp2kit.data.names`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from fsdp2kit.config.data_schema import ASKED, COLUMNS, ColumnsConfig, DataConfig, DataFormat
from fsdp2kit.data.messages import messages_in
from fsdp2kit.data.names import (
    ALSO,
    CONVERSATIONS,
    CUMULATIVE,
    FLAGS,
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
from fsdp2kit.data.rows import Row, parsed
from fsdp2kit.errors import UserError

# Columns without which a row is an error of its own, which names the nearest one.
_REQUIRED = {"messages", "conversations", "prompt", "completion", "instruction", "output", "text", "input_ids"}
_REQUIRED |= {"chosen", "rejected"}
_TEXTS = {"system", "input"}  # optional columns whose values are texts; those of others are lists or objects
_ALIKE = 0.9  # similarity of names
_SHORTEST_ALIKE = 7  # letters from which on it counts


class RowColumns:
    """A row's columns by our names for them, and the errors about a column that is missing.

    Args:
        columns: of the row, by the data's names.
        where: names the row in errors.
        named: what ``[data.columns]`` calls columns, by our names.
        block: the columns of the rows that are read together, with this one.
        follows: whether rows before the block have the columns of ``section``.
    """

    def __init__(
        self,
        columns: dict[str, Any],
        where: str,
        section: DataConfig,
        *,
        named: Mapping[str, str],
        block: Sequence[dict[str, Any]],
        follows: bool,
    ) -> None:
        self.where = where
        self.section = section
        self.whole = columns
        """All columns, by the data's names."""
        self.all = columns
        """Those that `data.columns.ignore` does not pass over."""
        if section.columns.ignore:
            self.all = {name: value for name, value in columns.items() if name not in section.columns.ignore}
        self.named = named
        self._block = block
        self._follows = follows

    def called(self, name: str) -> str:
        """The data's name for our column ``name``."""
        return self.named.get(name) or name

    def get(self, name: str) -> Any:
        """A column's value; None if the row has none."""
        return self.all.get(self.called(name))

    def is_named(self, name: str) -> bool:
        """Whether ``[data.columns]`` says what the column is called."""
        return name in self.named

    def given(self, name: str) -> Any:
        """An optional column's value; the column is required if ``[data.columns]`` names it."""
        return self[name] if self.is_named(name) else self.get(name)

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise self.missing(name)
        return value

    def from_json(self, name: str) -> Any:
        """A column by the data's name for it. A text that begins like a list or an object is read as JSON."""
        value = self.all.get(name)
        is_json = isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
        return parsed(value, self.where, name) if is_json else value

    def conversations(self) -> list[str]:
        """The data's names of the columns with a conversation, without those that this row lacks."""
        names = (self.called("messages"),) if self.is_named("messages") else CONVERSATIONS
        return [name for name in names if self.all.get(name) is not None]

    def masks(self, count: int, items: str) -> dict[str, list[bool]]:
        """What the row's masks say is learnt, by the data's names: the mask that is named, or all known ones.

        Args:
            count: entries that each must have.
            items: what these stand for, for errors: "messages", "input_ids".
        """
        is_named = self.is_named("loss_mask")
        if is_named:
            self["loss_mask"]  # required
            names = [self.called("loss_mask")]
        else:
            names = [name for name in _MASK_NAMES if self.all.get(name) is not None]
        found = {}
        for name in names:
            value = self.from_json(name)
            if name not in MASKS and not isinstance(value, list) and not is_named:
                continue  # it speaks of the whole row, and is no mask
            found[name] = _zeros_and_ones(value, name, self.where)
            if len(value) != count:
                what = f"{name} has {len(value)} entries for {count} {items}"
                todo = f'give one for each, or set data.columns.ignore = ["{name}"]'
                if items == "messages" and self.all.get("input_ids") is not None:
                    todo = f'{todo}; rows that are tokenised already are data.format = "tokens"'
                raise UserError(self.where, what, todo)
        return found

    def ambiguous(self, *choices: tuple[str, str]) -> UserError:
        """The error of a row with two columns that may be meant and differ; each is given by our name and its own."""
        names = " and ".join(repr(name) for _, name in choices)
        todo = " or ".join(f'data.columns.{column} = "{name}"' for column, name in choices)
        return UserError(self.where, f"the row has {names}, which differ", f"say which is meant: {todo}")

    def missing(self, column: str) -> UserError:
        """The error of a row without a required column; its advice fits all rows of the block."""
        name = self.called(column)
        names = [other for other, value in self.all.items() if value is not None]
        has = f"the row has no {name!r} (it has: {', '.join(names) or 'nothing'})"
        rows = self.rows_with(column)
        others_have = self._follows or bool(rows)
        if others_have:  # a misspelt name is not a column of theirs
            near = _nearest(column, name, [one for one in names if not any(one in row for row in rows)])
            what = f"{has}, and other rows have one"
            todo = f"rename {near!r}, or drop the row" if near else "add it, or drop the row"
        else:
            everywhere = [one for one in names if all(row.get(one) is not None for row in self._block)]
            near = _nearest(column, name, everywhere)
            if column in ColumnsConfig.model_fields:
                todo = f'set data.columns.{column} = "{near or "…"}"'
                guess = f"did you mean {near!r}? {todo}" if near else f"say what the column is called ({todo})"
            else:  # the format reads it under this name alone
                guess = f"did you mean {near!r}? Rename it" if near else "add the column"
            # Recipes that learn from pairs of answers, or from prompts, take no other format.
            is_fixed = self.section.format in ("preference", "prompts")
            rest = 'train on other data with recipe = "sft"' if is_fixed else "set data.format to what the data is"
            what = has
            todo = f"{guess}, or {rest}"
        if name in self.all and (others_have or near is None):
            return UserError(self.where, f"{name!r} is null", "fill it in, or drop the row")
        return UserError(self.where, what, todo)

    def rows_with(self, column: str) -> list[dict[str, Any]]:
        """The columns of those rows of the block that have a column which this row lacks."""
        names = {self.called(column)}
        if column == "messages" and not self.is_named(column):
            names |= set(CONVERSATIONS)
        return [row for row in self._block if any(row.get(name) is not None for name in names)]


_MASK_NAMES = tuple(dict.fromkeys((*MASKS, *WEIGHTS, *FLAGS)))


def read_columns(rows: Sequence[Row], section: DataConfig, *, follows: bool = False) -> list[RowColumns]:
    """The columns of rows that are read together.

    Args:
        section: its `format`, `columns` and `train_on` are read.
        follows: whether rows before these have its columns.
    """
    named = section.columns.model_dump(exclude_none=True, exclude={"ignore"})
    block = [row.parse() for row in rows]
    return [
        RowColumns(columns, row.where, section, named=named, block=block, follows=follows)
        for columns, row in zip(block, rows, strict=True)
    ]


def _zeros_and_ones(value: Any, name: str, where: str) -> list[bool]:
    """A mask: a list of 0 and 1, also as truth values or floats."""
    todo = f"give {name} as a list of 0 and 1"
    if not isinstance(value, list):
        raise UserError(where, f"{name} is of type {type(value).__name__}", todo)
    for at, one in enumerate(value):
        if not isinstance(one, (bool, int, float)) or one not in (0, 1):
            raise UserError(
                where, f"{name}[{at}] is {one!r}, and a token or turn is learnt wholly or not at all", todo
            )
    return [one == 1 for one in value]


def _nearest(column: str, name: str, names: Sequence[str]) -> str | None:
    """The column of a row that ``name`` most likely means, names of other data first; None if none is similar."""
    alike = [one for one in names if one.lower() in ALSO.get(column, ()) or column in one.lower().split("_")]
    return next(iter([*alike, *difflib.get_close_matches(name, names, n=1)]), None)


def check_columns(row: RowColumns, *, variables: frozenset[str]) -> None:
    """Refuse a row with a column that changes what is learnt, or what the model sees before it, and is not read.

    Args:
        variables: those that the chat template reads beside the messages; none if it does not render the row.

    Raises:
        UserError: it names the row and the column.
    """
    format = row.section.format
    read = _names_read(row)
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


def unread_columns(row: RowColumns) -> list[str]:
    """The columns of a row that its format does not read. Prompts have none: a reward or environment gets all."""
    if row.section.format in ASKED:
        return []
    read = _names_read(row)
    return [name for name, value in row.all.items() if name not in read and not _is_empty(value)]


def _refusal(row: RowColumns, what: str, todo: str, name: str) -> UserError:
    return UserError(row.where, what, f'{todo}, or set data.columns.ignore = ["{name}"] to pass over it')


def _names_read(row: RowColumns) -> frozenset[str]:
    """The data's names of all columns that a format reads, or looks at."""
    return _read(row.section.format, tuple(row.named.items()))


@lru_cache(maxsize=64)
def _read(format: DataFormat, named: tuple[tuple[str, str], ...]) -> frozenset[str]:
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
