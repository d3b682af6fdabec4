"""A row's columns by our names for them, and what to say of a row that lacks one."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp2kit.config.data_schema import DataConfig
from fsdp2kit.data.chat import Chat, Tokenizer, check_messages
from fsdp2kit.data.rows import Row
from fsdp2kit.data.template import check_tools, parsed
from fsdp2kit.errors import UserError

Messages = list[dict[str, Any]]

# What other data calls a column.
ALSO = {
    "prompt": ("question", "instruction", "query", "input", "problem", "messages", "conversations", "history"),
    "completion": ("response", "answer", "output"),
    "chosen": ("better", "winner", "accepted", "preferred"),
    "rejected": ("worse", "loser", "dispreferred"),
}
_CONVERSATIONS = ("messages", "conversations")  # in this order, where `[data.columns]` names none


class Columns:
    """One row of a block of rows.

    Args:
        block: the rows that are read together, this one among them.
        follows: whether rows before the block have the columns of ``section``.
    """

    def __init__(
        self, row: Row, section: DataConfig, tokenizer: Tokenizer, *, block: Sequence[Row] = (), follows: bool = False
    ) -> None:
        self.all, self.where, self.section, self.tokenizer = row.parse(), row.where, section, tokenizer
        self._block, self._follows = block, follows

    def get(self, name: str) -> Any:
        """A column's value; None where the row has none."""
        return self.all.get(self.section.column(name))

    def is_named(self, name: str) -> bool:
        """Whether ``[data.columns]`` says what the column is called."""
        return getattr(self.section.columns, name) is not None

    def given(self, name: str) -> Any:
        """A column that rows need not have, unless ``[data.columns]`` says what it is called."""
        return self[name] if self.is_named(name) else self.get(name)

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise self.missing(name)
        return value

    def messages(self) -> Messages | None:
        """The row's conversation: the column that is named, or one of the defaults; None where it has none.

        Raises:
            UserError: both defaults are there, and differ; the named one is missing; its JSON is broken.
        """
        names = self.conversations()
        if self.is_named("messages") and not names:
            raise self.missing("messages")
        found = [check_messages(self.from_json(name), self.where, name=name) for name in names]
        if len(found) > 1 and found[0] != found[1]:
            raise self.ambiguous(*(("messages", name) for name in names))
        return found[0] if found else None

    def conversations(self) -> list[str]:
        """What the data calls those columns that `messages` reads and this row has."""
        names = (self.section.column("messages"),) if self.is_named("messages") else _CONVERSATIONS
        return [name for name in names if self.all.get(name) is not None]

    def from_json(self, name: str) -> Any:
        """A column by the data's name for it, read as JSON where it is a text that begins a list or an object."""
        value = self.all.get(name)
        is_json = isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
        return parsed(value, self.where, name) if is_json else value

    def ambiguous(self, *choices: tuple[str, str]) -> UserError:
        """The row has several columns, each given as ours and its name, that may be meant and differ."""
        names = " and ".join(repr(name) for _, name in choices)
        todo = " or ".join(f'data.columns.{column} = "{name}"' for column, name in choices)
        return UserError(self.where, f"the row has {names}, which differ", f"say which is meant: {todo}")

    def missing(self, column: str) -> UserError:
        """The row lacks a column that it needs; the advice fits all rows of its block."""
        name, names = self.section.column(column), [other for other, value in self.all.items() if value is not None]
        has, rows = f"the row has no {name!r} (it has: {', '.join(names) or 'nothing'})", self.rows_with(column)
        others_have = self._follows or bool(rows)
        if others_have:  # what is misspelt is no column of theirs
            near = _nearest(column, name, [one for one in names if not any(one in row for row in rows)])
            what = f"{has}, and other rows have one"
            todo = f"rename {near!r}, or drop the row" if near else "add it, or drop the row"
        else:
            everywhere = [one for one in names if all(row.parse().get(one) is not None for row in self._block)]
            near = _nearest(column, name, everywhere)
            todo = f'set data.columns.{column} = "{near or "…"}"'
            guess = f"did you mean {near!r}? {todo}" if near else f"say what the column is called ({todo})"
            # What learns from pairs of answers, or from prompts, takes no other format.
            is_fixed = self.section.format in ("preference", "prompts")
            rest = 'train on other data with recipe = "sft"' if is_fixed else "set data.format to what the data is"
            what, todo = has, f"{guess}, or {rest}"
        if name in self.all and (others_have or near is None):
            return UserError(self.where, f"{name!r} is null", "fill it in, or drop the row")
        return UserError(self.where, what, todo)

    def rows_with(self, column: str) -> list[dict[str, Any]]:
        """The rows of the block that have a column which this one lacks."""
        names = {self.section.column(column)}
        if column == "messages" and not self.is_named(column):
            names |= set(_CONVERSATIONS)
        rows = [row.parse() for row in self._block]
        return [row for row in rows if any(row.get(name) is not None for name in names)]

    def chat(self, messages: Messages, *, learn_from: int = 0) -> Chat:
        """Messages with the row's tools, and its variables for the template, as transformers and TRL call them."""
        variables = self.from_json("chat_template_kwargs") or {}
        if not isinstance(variables, Mapping):
            raise UserError(self.where, "chat_template_kwargs is no object", 'write {"enable_thinking": false}')
        tools, where = check_tools(self.get("tools"), self.where), self.where
        return Chat(messages, self.tokenizer, where=where, tools=tools, variables=variables, learn_from=learn_from)


def messages_in(value: Any) -> Any:
    """The list of messages whose JSON a text is; any other value as it is: a text may well be other JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    with contextlib.suppress(json.JSONDecodeError, RecursionError):
        found = json.loads(value)
        if found and all(isinstance(one, dict) and isinstance(one.get("role", one.get("from")), str) for one in found):
            return found
    return value


def _nearest(column: str, name: str, names: Sequence[str]) -> str | None:
    """Which of a row's columns is meant by ``name``, one of other data's names first; None where none is like it."""
    alike = [one for one in names if one.lower() in ALSO.get(column, ()) or column in one.lower().split("_")]
    return next(iter([*alike, *difflib.get_close_matches(name, names, n=1)]), None)
