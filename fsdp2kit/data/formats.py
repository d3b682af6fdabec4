"""Formats of rows: which columns each one reads, and the texts, conversations or token ids that they make of a row."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdp2kit.config.data_formats import COLUMNS
from fsdp2kit.config.schema import ColumnsConfig, DataConfig
from fsdp2kit.data.chat import Chat, check_messages, check_no_media, check_tools, same_at_start
from fsdp2kit.data.column_names import FUNCTIONS, MASKS, WEIGHTS
from fsdp2kit.data.fields import FLAGS
from fsdp2kit.data.rows import Row, load_json, without_none
from fsdp2kit.data.template import Tokenizer, parsed
from fsdp2kit.errors import UserError

Messages = list[dict[str, Any]]

# Other names of a column in published data.
ALSO = {
    "prompt": ("question", "instruction", "query", "input", "problem", "messages", "conversations", "history"),
    "completion": ("response", "answer", "output"),
    "chosen": ("better", "winner", "accepted", "preferred"),
    "rejected": ("worse", "loser", "dispreferred"),
}
_CONVERSATIONS = ("messages", "conversations")  # read in this order unless `[data.columns]` names one
_SIDES = ("chosen", "rejected")
WRAPPED = ("prompt_completion", "preference")  # formats with plain texts that `data.wrap` puts into the template


class Plain(NamedTuple):
    """A prompt and its answer as one plain text, outside any chat template."""

    text: str
    start: int
    """The first supervised character."""
    where: str = ""
    """Names the row in errors."""


def answers_per_row(section: DataConfig) -> int:
    """Answers that a row has, each tokenised with its prompt: 2 for preferences, the better one first; otherwise 1."""
    return 2 if section.format == "preference" else 1


def texts_of(row: Columns) -> Sequence[Chat | Plain]:
    """The conversation or plain text of each of a row's answers. Not for the formats "text" and "tokens"."""
    check_no_media(row.all, row.where)
    kind = row.section.format
    if kind == "preference":
        return _answers(row)
    if kind == "alpaca":
        return [_alpaca(row)]
    if kind == "prompt_completion":
        prompt, completion = messages_in(row["prompt"], row.where), row["completion"]
        return [_pair(row, prompt, completion if isinstance(prompt, str) else messages_in(completion, row.where))]
    if kind != "chat":
        raise ValueError(f"rows of the format {kind!r} are not encoded here")
    messages = row.messages()
    if messages is None:
        raise row.missing("messages")
    return [row.chat(messages)]


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


def asked_in(row: Columns) -> Messages | str:
    """The prompt of a row of the format "prompts": a text if the tokenizer has no template, otherwise messages.

    It is in the column that ``[data.columns]`` names, or in a default column. An answer at the end is cut off.
    """
    check_no_media(row.all, row.where)
    prompt = None if row.is_named("messages") else messages_in(row.given("prompt"), row.where)
    messages = None if row.is_named("prompt") else row.messages()
    given = [] if prompt is None else [check_messages(_wrapped(prompt, "user"), row.where, name="prompt")]
    given = [row.with_system(one) for one in given]
    found = [one[: -1 if one[-1]["role"] == "assistant" else None] for one in (*given, messages) if one is not None]
    if not found:
        raise row.missing("prompt" if row.rows_with("prompt") else "messages")
    if not all(found):
        raise UserError(row.where, "there is no prompt before the answer", "begin with a user's message")
    if found[0] != found[-1]:
        raise row.ambiguous(("prompt", "prompt"), ("messages", row.conversations()[0]))
    if isinstance(prompt, str) and row.tokenizer.chat_template is None:
        row.check_is_plain()
        return prompt
    return found[0]


def _alpaca(row: Columns) -> Chat:
    """The conversation of an Alpaca row, with the ``system`` and ``history`` that some data has."""
    asked, answer = row["instruction"], row["output"]
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
    return row.chat(row.with_system(check_messages(messages, row.where)))


def _pair(row: Columns, prompt: Any, answer: Any) -> Chat | Plain:
    """A prompt with its answer, as texts or as messages. The prompt is supervised only under ``train_on = "all"``."""
    if row.section.wrap == "chat":
        prompt, answer = _wrapped(prompt, "user"), _wrapped(answer, "assistant")
    learns_all = row.section.train_on == "all"
    if isinstance(prompt, str) != isinstance(answer, str):
        what = "prompt and completion are a text and a list of messages"
        raise UserError(row.where, what, "give two of a kind")
    if isinstance(prompt, str):
        row.check_is_plain()
        if not answer.strip():
            what = "the completion is empty, so the model would learn to end the text at once"
            raise UserError(row.where, what, "drop the row")
        return Plain(prompt + answer, 0 if learns_all else len(prompt), row.where)
    before = row.with_system(check_messages(prompt, row.where, name="prompt"))
    messages = [*before, *check_messages(answer, row.where, name="completion")]
    return row.chat(messages, learn_from=0 if learns_all else len(before))


def _wrapped(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _answers(row: Columns) -> list[Chat | Plain]:
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


def text_in(row: Columns) -> str:
    text = row["text"]
    if not isinstance(text, str):
        raise UserError(row.where, f"text is of type {type(text).__name__}", "give rows with a string `text`")
    return text


def row_key(row: Mapping[str, Any], section: DataConfig) -> int:
    """A 64-bit digest of the columns that the row's format reads, so that copies of a row have the same key."""
    names = [name for name in COLUMNS[section.format] if name != "loss_mask"]  # copies may be learnt in other parts
    content = {name: row[called] for name in names if (called := section.column(name)) in row}
    return content_key(without_none(content))


def content_key(content: Any) -> int:
    """A 64-bit digest of a value's JSON."""
    text = json.dumps(content, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Columns:
    """A row's columns by our names for them, and the errors about a column that is missing.

    Args:
        block: the rows that are read together, with this one.
        follows: whether rows before the block have the columns of ``section``.
    """

    def __init__(
        self, row: Row, section: DataConfig, tokenizer: Tokenizer, *, block: Sequence[Row] = (), follows: bool = False
    ) -> None:
        self.where, self.section, self.tokenizer = row.where, section, tokenizer
        self.whole = row.parse()
        """All columns, by the data's names."""
        self.all = self.whole
        """Those that `data.columns.ignore` does not pass over."""
        if section.columns.ignore:
            self.all = {name: value for name, value in self.whole.items() if name not in section.columns.ignore}
        self._block, self._follows = block, follows

    def get(self, name: str) -> Any:
        """A column's value; None if the row has none."""
        return self.all.get(self.section.column(name))

    def is_named(self, name: str) -> bool:
        """Whether ``[data.columns]`` says what the column is called."""
        return getattr(self.section.columns, name, None) is not None

    def given(self, name: str) -> Any:
        """An optional column's value; the column is required if ``[data.columns]`` names it."""
        return self[name] if self.is_named(name) else self.get(name)

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise self.missing(name)
        return value

    def messages(self) -> Messages | None:
        """The row's conversation, in the column that is named or in a default one; None if it has neither default.

        The row may have both defaults if they are the same.
        """
        names = self.conversations()
        if self.is_named("messages") and not names:
            raise self.missing("messages")
        found = [check_messages(self._flagged(self.from_json(name)), self.where, name=name) for name in names]
        if len(found) > 1 and found[0] != found[1]:
            raise self.ambiguous(*(("messages", name) for name in names))
        return self.with_system(found[0]) if found else None

    def with_system(self, messages: Messages) -> Messages:
        """The messages, behind the system prompt in the row's column ``system`` unless they begin with it."""
        system = self.all.get("system")
        if not system:
            return messages
        if not isinstance(system, str):
            what = f"system is of type {type(system).__name__}, not text"
            raise UserError(self.where, what, "make it a text, or rename the column")
        if messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": system}, *messages]
        if messages[0].get("content") != system:
            what = "the row's column system is not the system prompt that its messages begin with"
            raise UserError(self.where, what, "leave one of them out")
        return messages

    def check_is_plain(self) -> None:
        """Refuse a system prompt or tools beside a plain text, which would lack them."""
        if self.all.get("system"):
            what = "the row has a system prompt, and its prompt is a plain text"
            raise UserError(self.where, what, 'put texts into the chat template, or rename the column "system"')
        if self.tools():
            what = "the row has tools, and its prompt is a plain text"
            raise UserError(self.where, what, "put texts into the chat template, or leave the tools out")

    def conversations(self) -> list[str]:
        """The data's names of the columns that `messages` reads, without those that this row lacks."""
        names = (self.section.column("messages"),) if self.is_named("messages") else _CONVERSATIONS
        return [name for name in names if self.all.get(name) is not None]

    def from_json(self, name: str) -> Any:
        """A column by the data's name for it. A text that begins like a list or an object is read as JSON."""
        value = self.all.get(name)
        is_json = isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
        return parsed(value, self.where, name) if is_json else value

    def ambiguous(self, *choices: tuple[str, str]) -> UserError:
        """The error of a row with two columns that may be meant and differ; each is given by our name and its own."""
        names = " and ".join(repr(name) for _, name in choices)
        todo = " or ".join(f'data.columns.{column} = "{name}"' for column, name in choices)
        return UserError(self.where, f"the row has {names}, which differ", f"say which is meant: {todo}")

    def missing(self, column: str) -> UserError:
        """The error of a row without a required column; its advice fits all rows of the block."""
        name, names = self.section.column(column), [other for other, value in self.all.items() if value is not None]
        has, rows = f"the row has no {name!r} (it has: {', '.join(names) or 'nothing'})", self.rows_with(column)
        others_have = self._follows or bool(rows)
        if others_have:  # a misspelt name is not a column of theirs
            near = _nearest(column, name, [one for one in names if not any(one in row for row in rows)])
            what = f"{has}, and other rows have one"
            todo = f"rename {near!r}, or drop the row" if near else "add it, or drop the row"
        else:
            everywhere = [one for one in names if all(row.parse().get(one) is not None for row in self._block)]
            near = _nearest(column, name, everywhere)
            if column in ColumnsConfig.model_fields:
                todo = f'set data.columns.{column} = "{near or "…"}"'
                guess = f"did you mean {near!r}? {todo}" if near else f"say what the column is called ({todo})"
            else:  # the format reads it under this name alone
                guess = f"did you mean {near!r}? Rename it" if near else "add the column"
            # Recipes that learn from pairs of answers, or from prompts, take no other format.
            is_fixed = self.section.format in ("preference", "prompts")
            rest = 'train on other data with recipe = "sft"' if is_fixed else "set data.format to what the data is"
            what, todo = has, f"{guess}, or {rest}"
        if name in self.all and (others_have or near is None):
            return UserError(self.where, f"{name!r} is null", "fill it in, or drop the row")
        return UserError(self.where, what, todo)

    def rows_with(self, column: str) -> list[dict[str, Any]]:
        """The columns of those rows of the block that have a column which this row lacks."""
        names = {self.section.column(column)}
        if column == "messages" and not self.is_named(column):
            names |= set(_CONVERSATIONS)
        rows = [row.parse() for row in self._block]
        return [row for row in rows if any(row.get(name) is not None for name in names)]

    def chat(self, messages: Messages, *, learn_from: int = 0) -> Chat:
        """The messages under the chat template, with the row's ``tools`` and ``chat_template_kwargs``."""
        variables = self.from_json("chat_template_kwargs") or {}
        if not isinstance(variables, Mapping):
            raise UserError(self.where, "chat_template_kwargs is no object", 'write {"enable_thinking": false}')
        tools, where = self.tools(), self.where
        train_on = None if self.section.format == "prompts" else self.section.train_on
        return Chat(
            messages,
            self.tokenizer,
            where=where,
            tools=tools,
            variables=variables,
            learn_from=learn_from,
            train_on=train_on,
        )

    def tools(self) -> Any:
        """The schemas of the row's tools, from ``tools`` or its former name ``functions``; None without any."""
        tools = check_tools(self.get("tools"), self.where)
        if self.is_named("tools"):
            return tools
        functions = self._functions()
        if tools and functions and _schemas(tools) != _schemas(functions):
            what = f"the row has 'tools' and '{FUNCTIONS}', which differ"
            raise UserError(self.where, what, f'say which is meant: data.columns.tools = "tools" or "{FUNCTIONS}"')
        return tools or functions

    def _functions(self) -> Any:
        """The schemas in the column ``functions`` in the form of ``tools``; None without any."""
        found = parsed(self.all.get(FUNCTIONS), self.where, FUNCTIONS)
        found = [found] if isinstance(found, Mapping) else found
        if not found:
            return None
        todo = 'give [{"name": "…", "description": "…", "parameters": {…}}]'
        if not isinstance(found, list):
            raise UserError(self.where, f"{FUNCTIONS} is of type {type(found).__name__}, not a list of schemas", todo)
        tools = []
        for at, one in enumerate(found):
            schema = parsed(one, self.where, f"{FUNCTIONS}[{at}]")
            function = schema.get("function", schema) if isinstance(schema, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise UserError(self.where, f"{FUNCTIONS}[{at}] is no schema with a name", todo)
            tools.append(schema if "function" in schema else {"type": "function", "function": schema})
        return check_tools(tools, self.where)

    def masks(self, count: int, items: str) -> dict[str, list[bool]]:
        """What the row's masks say is learnt, by the data's names: the mask that is named, or all known ones.

        Args:
            count: entries that each must have.
            items: what these stand for, for errors: "messages", "input_ids".
        """
        if self.is_named("loss_mask"):
            self["loss_mask"]  # required
            names = [self.section.column("loss_mask")]
        else:
            names = [name for name in (*MASKS, *WEIGHTS, *FLAGS) if self.all.get(name) is not None]
        found = {}
        for name in dict.fromkeys(names):
            value = self.from_json(name)
            if name not in MASKS and not isinstance(value, list) and not self.is_named("loss_mask"):
                continue  # it speaks of the whole row, and is no mask
            found[name] = _zeros_and_ones(value, name, self.where)
            if len(value) != count:
                what = f"{name} has {len(value)} entries for {count} {items}"
                todo = f'give one for each, or set data.columns.ignore = ["{name}"]'
                if items == "messages" and self.all.get("input_ids") is not None:
                    todo = f'{todo}; rows that are tokenised already are data.format = "tokens"'
                raise UserError(self.where, what, todo)
        return found

    def _flagged(self, messages: Any) -> Any:
        """A conversation with each entry of the row's masks in its message, as ``loss_mask``."""
        if self.section.format != "chat" or not isinstance(messages, list):
            return messages
        for name, learnt in self.masks(len(messages), "messages").items():
            flagged = []
            for at, (message, is_learnt) in enumerate(zip(messages, learnt, strict=True)):
                if isinstance(message, Mapping):
                    said = message.get("loss_mask")
                    if said is not None and said != is_learnt:
                        what = f"{name}[{at}] is {int(is_learnt)}, and messages[{at}] has loss_mask = {said}"
                        raise UserError(self.where, what, "let both say the same, or leave one out")
                    message = {**message, "loss_mask": int(is_learnt)}
                flagged.append(message)
            messages = flagged
        return messages


def messages_in(value: Any, where: str) -> Any:
    """A text read as JSON if that gives a list of messages; any other value unchanged: a text may be other JSON.

    Raises:
        UserError: it is JSON that no row may have; it names ``where``.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    with contextlib.suppress(json.JSONDecodeError):
        found = load_json(value, where)
        if found and all(isinstance(one, dict) and isinstance(one.get("role", one.get("from")), str) for one in found):
            return found
    return value


def _schemas(tools: Any) -> Any:
    """Schemas without what is around them, to compare them."""
    return [one.get("function", one) if isinstance(one, Mapping) else one for one in tools]


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
