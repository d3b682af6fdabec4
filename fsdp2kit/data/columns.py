"""A row → its columns by our names: those that are required are there, and texts of JSON are read.

Each format reads other columns (`fsdp2kit.config.data_formats.COLUMNS`).
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from fsdp2kit.config.data_formats import COLUMNS
from fsdp2kit.config.sections.data import ColumnsConfig, DataConfig
from fsdp2kit.data.fields import media_in, no_media
from fsdp2kit.data.json_texts import KeyTwice, load_json, parsed
from fsdp2kit.data.names import ALSO, CONVERSATIONS, FLAGS, MASKS, WEIGHTS
from fsdp2kit.data.rows import Row, without_none
from fsdp2kit.errors import UserError


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

    def refuse_media(self) -> None:
        """Refuse a row with a column of what its messages show: ``image``, ``images``, ``video``, …"""
        if name := media_in(self.all):
            raise no_media(self.where, repr(name), name)

    def conversations(self) -> dict[str, Any]:
        """The columns with a conversation, by the data's names, without those that this row lacks: JSON is read."""
        names = (self.called("messages"),) if self.is_named("messages") else CONVERSATIONS
        found = {name: self.from_json(name) for name in names if self.all.get(name) is not None}
        if self.is_named("messages") and not found:
            raise self.missing("messages")
        return found

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


def is_plain_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a text, and not one of JSON that `messages_in` reads."""
    try:
        return isinstance(messages_in(value, ""), str)
    except UserError:  # messages that no row may have
        return False


def messages_in(value: Any, where: str) -> Any:
    """A text read as JSON if that gives a list of messages; any other value unchanged: a text may be other JSON.

    Raises:
        UserError: it gives messages, with two values of one key, or is other JSON that no row may have. It names
            ``where``.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    with contextlib.suppress(json.JSONDecodeError):
        try:
            found = load_json(value, where)
        except KeyTwice:
            if _are_messages(load_json(value, where, keeps_last=True)):
                raise
            return value
        if _are_messages(found):
            return found
    return value


def _are_messages(found: list[Any]) -> bool:
    return bool(found) and all(
        isinstance(one, dict) and isinstance(one.get("role", one.get("from")), str) for one in found
    )


def row_key(row: Mapping[str, Any], section: DataConfig) -> int:
    """A 64-bit digest of the columns that the row's format reads, so that copies of a row have the same key."""
    names = [name for name in COLUMNS[section.format] if name != "loss_mask"]  # copies may be learnt in other parts
    content = {name: row[called] for name in names if (called := section.column(name)) in row}
    return content_key(without_none(content))


def content_key(content: Any) -> int:
    """A 64-bit digest of a value's JSON."""
    text = json.dumps(content, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
