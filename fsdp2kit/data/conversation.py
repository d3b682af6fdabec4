"""A row → its columns by our names → what it says: conversations, or plain texts outside any chat template.

Each format reads other columns (`fsdp2kit.config.data_formats.COLUMNS`). No chat template is asked here.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase as Tokenizer

from fsdp2kit.config.data_formats import COLUMNS
from fsdp2kit.config.sections.data import ColumnsConfig, DataConfig
from fsdp2kit.data.messages import (
    Messages,
    check_messages,
    learnt_turns,
    marks_of,
    media_in,
    messages_in,
    no_media,
    same_at_start,
)
from fsdp2kit.data.names import ALSO, CONVERSATIONS, FLAGS, FUNCTIONS, MASKS, WEIGHTS
from fsdp2kit.data.rows import Row, parsed, without_none
from fsdp2kit.errors import UserError

WRAPPED = ("prompt_completion", "preference")
"""Formats with plain texts that `data.wrap` puts into the chat template."""
_SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form, and which of them are supervised. A chat template renders them."""

    messages: Messages
    where: str
    """Names the row in errors."""
    tools: Any = None
    """Schemas, as `check_tools` returns them."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the template, like ``enable_thinking``."""
    turns: tuple[int, ...] = ()
    """The turns that are learnt, by their indices. All of them are the assistant's."""
    learn_from: int = 0
    """Index of the first message that may be learnt; the messages before it are a prompt."""
    is_prompt: bool = False
    """Whether the model continues it, and nothing of it is learnt."""
    skips_turns: bool = False
    """Whether a message says that it is not learnt."""

    @property
    def has_system_twice(self) -> bool:
        """Whether two system messages follow each other."""
        return ("system", "system") in itertools.pairwise(message["role"] for message in self.messages)


class PlainText(NamedTuple):
    """A prompt and its answer as one plain text, outside any chat template."""

    text: str
    start: int
    """The first supervised character."""
    where: str = ""
    """Names the row in errors."""


def answers_per_row(section: DataConfig) -> int:
    """Answers that a row has, each tokenised with its prompt: 2 for preferences, the better one first; otherwise 1."""
    return 2 if section.format == "preference" else 1


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


def conversations_in(row: RowColumns) -> Sequence[Conversation | PlainText]:
    """A row's conversations or plain texts, one for each of its answers. Not for rows of tokens."""
    format = row.section.format
    if format == "text":
        return [PlainText(_text_in(row), 0, row.where)]
    _refuse_media(row)
    if format == "preference":
        return _answers(row)
    if format == "alpaca":
        return [_alpaca(row)]
    if format == "prompt_completion":
        prompt = messages_in(row["prompt"], row.where)
        completion = row["completion"]
        return [_pair(row, prompt, completion if isinstance(prompt, str) else messages_in(completion, row.where))]
    if format != "chat":
        raise ValueError(f"rows of the format {format!r} are not encoded here")
    messages = _messages(row)
    if messages is None:
        raise row.missing("messages")
    return [_conversation(row, messages)]


def prompt_in(row: RowColumns, *, has_template: bool) -> Conversation | str:
    """The prompt of a row of the format "prompts": a text if there is no chat template, otherwise a conversation.

    It is in the column that ``[data.columns]`` names, or in a default column. An answer at the end is cut off.
    """
    _refuse_media(row)
    prompt = None if row.is_named("messages") else messages_in(row.given("prompt"), row.where)
    messages = None if row.is_named("prompt") else _messages(row)
    found: list[Messages] = []
    if prompt is not None:
        found.append(_with_system(row, check_messages(_wrapped(prompt, "user"), row.where, name="prompt")))
    if messages is not None:
        found.append(messages)
    found = [one[:-1] if one[-1]["role"] == "assistant" else one for one in found]
    if not found:
        raise row.missing("prompt" if row.rows_with("prompt") else "messages")
    if not all(found):
        raise UserError(row.where, "there is no prompt before the answer", "begin with a user's message")
    if found[0] != found[-1]:
        raise row.ambiguous(("prompt", "prompt"), ("messages", row.conversations()[0]))
    if isinstance(prompt, str) and not has_template:
        _check_is_plain(row)
        return prompt
    variables = _variables(row)
    return prompt_of(found[0], where=row.where, tools=_tools(row), variables=variables)


def prompt_of(
    messages: Messages, *, where: str, tools: Any = None, variables: Mapping[str, Any] | None = None
) -> Conversation:
    """A conversation that the model continues.

    Args:
        tools: schemas, as `check_tools` returns them.

    Raises:
        UserError: what a message says of whether it is learnt cannot be read.
    """
    marks_of(messages, where)
    return Conversation(messages, where, tools, variables or {}, is_prompt=True)


def looks_unwrapped(row: Row, section: DataConfig, tokenizer: Tokenizer) -> bool:
    """Whether a row's prompt is a plain text without special tokens, although the tokenizer has a chat template.

    Args:
        section: its format is one of `WRAPPED`.
    """
    columns = row.parse()
    side = "chosen" if section.format == "preference" else "completion"
    answer = messages_in(columns.get(section.column(side)), row.where)
    prompt = messages_in(columns.get(section.column("prompt")), row.where) or answer  # which may begin with it
    if section.wrap == "chat" or not tokenizer.chat_template:
        return False
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        return False
    return not any(token.special and token.content in prompt for token in tokenizer.added_tokens_decoder.values())


def row_key(row: Mapping[str, Any], section: DataConfig) -> int:
    """A 64-bit digest of the columns that the row's format reads, so that copies of a row have the same key."""
    names = [name for name in COLUMNS[section.format] if name != "loss_mask"]  # copies may be learnt in other parts
    content = {name: row[called] for name in names if (called := section.column(name)) in row}
    return content_key(without_none(content))


def content_key(content: Any) -> int:
    """A 64-bit digest of a value's JSON."""
    text = json.dumps(content, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _text_in(row: RowColumns) -> str:
    text = row["text"]
    if not isinstance(text, str):
        raise UserError(row.where, f"text is of type {type(text).__name__}", "give rows with a string `text`")
    return text


def _alpaca(row: RowColumns) -> Conversation:
    """The conversation of an Alpaca row, with the ``system`` and ``history`` that some data has."""
    asked = row["instruction"]
    answer = row["output"]
    if about := row.get("input"):
        asked = f"{asked}\n\n{about}"
    messages: Messages = []
    history = row.from_json("history") or []
    if not isinstance(history, Sequence):
        raise UserError(row.where, f"history is of type {type(history).__name__}", 'write [["question", "answer"], …]')
    for turn in (*history, (asked, answer)):
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise UserError(row.where, "history holds what is no pair", 'write [["question", "answer"], …]')
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return _conversation(row, _with_system(row, check_messages(messages, row.where)))


def _pair(row: RowColumns, prompt: Any, answer: Any) -> Conversation | PlainText:
    """A prompt with its answer, as texts or as messages. The prompt is supervised only under ``train_on = "all"``."""
    if row.section.wrap == "chat":
        prompt = _wrapped(prompt, "user")
        answer = _wrapped(answer, "assistant")
    learns_all = row.section.train_on == "all"
    if isinstance(prompt, str) != isinstance(answer, str):
        what = "prompt and completion are a text and a list of messages"
        raise UserError(row.where, what, "give two of a kind")
    if isinstance(prompt, str):
        _check_is_plain(row)
        if not answer.strip():
            what = "the completion is empty, so the model would learn to end the text at once"
            raise UserError(row.where, what, "drop the row")
        return PlainText(prompt + answer, 0 if learns_all else len(prompt), row.where)
    before = _with_system(row, check_messages(prompt, row.where, name="prompt"))
    messages = [*before, *check_messages(answer, row.where, name="completion")]
    return _conversation(row, messages, learn_from=0 if learns_all else len(before))


def _wrapped(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _answers(row: RowColumns) -> list[Conversation | PlainText]:
    """``chosen`` and ``rejected``, each with the row's ``prompt``, or else with what both begin with."""
    where = row.where
    answers: list[Any] = [messages_in(row[name], where) for name in _SIDES]
    prompt = messages_in(row.given("prompt"), where)
    are_texts = isinstance(answers[0], str)
    if are_texts != isinstance(answers[1], str):
        raise UserError(where, "chosen and rejected are a text and a list of messages", "give two of a kind")
    if are_texts:
        if prompt is None:
            if set(ALSO["prompt"]) & {name.lower() for name, value in row.all.items() if value}:
                raise row.missing("prompt")
            prompt = _shared_text(*answers) or None
            answers = [answer[len(prompt or "") :] for answer in answers]
        elif isinstance(prompt, str) and row.section.wrap != "chat":  # where it is a message, no answer can repeat it
            answers = _without_prompt(answers, prompt)
    else:
        answers = [check_messages(one, where, name=name) for one, name in zip(answers, _SIDES, strict=True)]
        prompt, repeated = _said_before(prompt, answers, where)
        answers = [answer[count:] for answer, count in zip(answers, repeated, strict=True)]
    if prompt is None:
        raise UserError(where, "chosen and rejected share no prompt", "give rows with a prompt of their own")
    return [_pair(row, prompt, answer) for answer in answers]


def _without_prompt(answers: Sequence[str], prompt: str) -> list[str]:
    """Two answers without the prompt that both begin with. One that goes on inside of a word only happens to begin so,
    and one alone quotes it."""
    rest = [one.removeprefix(prompt) for one in answers if one.startswith(prompt)]
    is_inside = prompt[-1:].isalnum() and any(one[:1].isalnum() for one in rest)
    return rest if len(rest) == len(answers) and not is_inside else list(answers)


def _said_before(prompt: Any, answers: Sequence[Messages], where: str) -> tuple[Messages | None, list[int]]:
    """The messages before two answers (None without any), and how many of these messages each of them repeats.

    Both may repeat a longer conversation than the prompt, or only its last messages; one alone may repeat the prompt.
    """
    # Each answer keeps one message at least.
    shared = answers[0][: same_at_start(answers[0][:-1], answers[1][:-1])]
    if prompt is None:
        return shared or None, [len(shared)] * 2
    if isinstance(prompt, str):
        said = [message["content"].strip() for message in shared if isinstance(message.get("content"), str)]
        if shared and prompt.strip() not in said:
            what = "chosen and rejected are conversations that share a beginning, and prompt is none of its messages"
            raise UserError(where, what, "make the prompt a list of messages, or leave out what is said twice")
        return shared or _wrapped(prompt, "user"), [len(shared)] * 2
    prompt = check_messages(prompt, where, name="prompt")
    for start in range(len(shared) - len(prompt) + 1):
        if shared[start : start + len(prompt)] == prompt:
            return shared[: start + len(prompt)], [start + len(prompt)] * 2
    alone = [len(prompt) if one[: len(prompt)] == prompt else 0 for one in answers]
    sizes = range(min(len(prompt), len(shared)), 0, -1)
    return prompt, alone if any(alone) else [next((size for size in sizes if prompt[-size:] == shared[:size]), 0)] * 2


def _shared_text(one: str, other: str) -> str:
    """What two texts begin with, up to the end of a word. The space after the word belongs to the answers."""
    shared = one[: same_at_start(one, other)]
    end = max((at for at, letter in enumerate(shared) if letter.isspace()), default=0)
    return shared[: end if shared[end : end + 1] == " " else end + 1] if end else ""


def _messages(row: RowColumns) -> Messages | None:
    """The row's conversation, in the column that is named or in a default one; None if it has neither default.

    The row may have both defaults if they are the same.
    """
    names = row.conversations()
    if row.is_named("messages") and not names:
        raise row.missing("messages")
    found = [check_messages(_flagged(row, row.from_json(name)), row.where, name=name) for name in names]
    if len(found) > 1 and found[0] != found[1]:
        raise row.ambiguous(*(("messages", name) for name in names))
    return _with_system(row, found[0]) if found else None


def _flagged(row: RowColumns, messages: Any) -> Any:
    """A conversation with each entry of the row's masks in its message, as ``loss_mask``."""
    if row.section.format != "chat" or not isinstance(messages, list):
        return messages
    for name, learnt in row.masks(len(messages), "messages").items():
        flagged = []
        for at, (message, is_learnt) in enumerate(zip(messages, learnt, strict=True)):
            if isinstance(message, Mapping):
                said = message.get("loss_mask")
                if said is not None and said != is_learnt:
                    what = f"{name}[{at}] is {int(is_learnt)}, and messages[{at}] has loss_mask = {said}"
                    raise UserError(row.where, what, "let both say the same, or leave one out")
                message = {**message, "loss_mask": int(is_learnt)}
            flagged.append(message)
        messages = flagged
    return messages


def _with_system(row: RowColumns, messages: Messages) -> Messages:
    """The messages, behind the system prompt in the row's column ``system`` unless they begin with it."""
    system = row.all.get("system")
    if not system:
        return messages
    if not isinstance(system, str):
        what = f"system is of type {type(system).__name__}, not text"
        raise UserError(row.where, what, "make it a text, or rename the column")
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0].get("content") != system:
        what = "the row's column system is not the system prompt that its messages begin with"
        raise UserError(row.where, what, "leave one of them out")
    return messages


def _refuse_media(row: RowColumns) -> None:
    """Refuse a row with a column of what its messages show: ``image``, ``images``, ``video``, …"""
    if name := media_in(row.all):
        raise no_media(row.where, repr(name), name)


def _check_is_plain(row: RowColumns) -> None:
    """Refuse a system prompt or tools beside a plain text, which would lack them."""
    if row.all.get("system"):
        what = "the row has a system prompt, and its prompt is a plain text"
        raise UserError(row.where, what, 'put texts into the chat template, or rename the column "system"')
    if _tools(row):
        what = "the row has tools, and its prompt is a plain text"
        raise UserError(row.where, what, "put texts into the chat template, or leave the tools out")


def _conversation(row: RowColumns, messages: Messages, *, learn_from: int = 0) -> Conversation:
    """The messages with the row's ``tools`` and ``chat_template_kwargs``, and what is learnt of them."""
    variables = _variables(row)
    tools = _tools(row)
    marks = marks_of(messages, row.where)
    turns = learnt_turns(messages, marks, learn_from, row.section.train_on, row.where)
    return Conversation(messages, row.where, tools, variables, turns, learn_from, skips_turns=False in marks)


def _variables(row: RowColumns) -> Mapping[str, Any]:
    """What the row passes to the chat template."""
    variables = row.from_json("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise UserError(row.where, "chat_template_kwargs is no object", 'write {"enable_thinking": false}')
    return variables


def _tools(row: RowColumns) -> Any:
    """The schemas of the row's tools, from ``tools`` or its former name ``functions``; None without any."""
    tools = check_tools(row.get("tools"), row.where)
    if row.is_named("tools"):
        return tools
    functions = _functions(row)
    if tools and functions and _schemas(tools) != _schemas(functions):
        what = f"the row has 'tools' and '{FUNCTIONS}', which differ"
        raise UserError(row.where, what, f'say which is meant: data.columns.tools = "tools" or "{FUNCTIONS}"')
    return tools or functions


def _functions(row: RowColumns) -> Any:
    """The schemas in the column ``functions`` in the form of ``tools``; None without any."""
    found = row.all.get(FUNCTIONS)
    if not found:
        return None
    found = parsed(found, row.where, FUNCTIONS)
    found = [found] if isinstance(found, Mapping) else found
    if not found:
        return None
    todo = 'give [{"name": "…", "description": "…", "parameters": {…}}]'
    if not isinstance(found, list):
        raise UserError(row.where, f"{FUNCTIONS} is of type {type(found).__name__}, not a list of schemas", todo)
    tools = []
    for at, one in enumerate(found):
        schema = parsed(one, row.where, f"{FUNCTIONS}[{at}]")
        function = schema.get("function", schema) if isinstance(schema, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(row.where, f"{FUNCTIONS}[{at}] is no schema with a name", todo)
        tools.append(schema if "function" in schema else {"type": "function", "function": schema})
    return check_tools(tools, row.where)


def _schemas(tools: Any) -> Any:
    """Schemas without what is around them, to compare them."""
    return [one.get("function", one) if isinstance(one, Mapping) else one for one in tools]


def check_tools(tools: Any, where: str) -> Any:
    """Tool schemas as a list of objects; None without tools. Any part may be a string of JSON."""
    if tools is None:
        return None
    tools = parsed(tools, where, "tools")
    if not isinstance(tools, list):
        return tools or None
    tools = [parsed(tool, where, f"tools[{at}]") for at, tool in enumerate(tools)]
    for at, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("parameters"), str):
            parameters = parsed(function["parameters"], where, f"tools[{at}].parameters")
            function = {**function, "parameters": parameters}
            tools[at] = {**tool, "function": function} if "function" in tool else function
    return tools or None
