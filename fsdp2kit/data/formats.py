"""Formats of rows: which columns each one reads, and the texts, conversations or token ids that they make of a row."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdp2kit.config.data_schema import COLUMNS, ColumnsConfig, DataConfig
from fsdp2kit.data.chat import Chat, check_messages, check_no_media, check_tools, same_at_start
from fsdp2kit.data.rows import Row, load_json, without_none
from fsdp2kit.data.template import Tokenizer, parsed
from fsdp2kit.errors import UserError
from fsdp2kit.model.loss_head import IGNORE

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


def chats_of(rows: Sequence[Row], section: DataConfig, tokenizer: Tokenizer) -> list[Chat]:
    """The conversations of the rows' answers; plain texts are left out."""
    if section.format in ("text", "tokens"):
        return []
    named = [Columns(row, section, tokenizer, block=rows) for row in rows]
    return [text for row in named for text in texts_of(row) if isinstance(text, Chat)]


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
        row.check_has_no_system()
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
        row.check_has_no_system()
        if not answer.strip():
            what = "the completion is empty, so the model would learn to end the text at once"
            raise UserError(row.where, what, "drop the row")
        return Plain(prompt + answer, 0 if learns_all else len(prompt))
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


def labelled_ids(row: Columns) -> tuple[list[int], list[bool]]:
    """A row's ``input_ids``, and whether each is supervised: its label is the token itself, not −100.

    Labels are those of transformers' collators: not shifted.
    """
    where, ids = row.where, _integers(row["input_ids"], "input_ids", row.where)
    if wrong := [token for token in ids if not 0 <= token < 2**31]:
        raise UserError(where, f"input_ids holds {wrong[0]}", "token ids are not negative, and fit into 32 bits")
    labels, mask = row.given("labels"), row.all.get("attention_mask")
    if mask is not None and 0 in _integers(mask, "attention_mask", where):
        raise UserError(where, "attention_mask holds zeros: the row is padded", "give rows without padding")
    if labels is None or row.section.train_on == "all":
        return ids, [True] * len(ids)
    labels = _integers(labels, "labels", where)
    if len(labels) != len(ids):
        raise UserError(where, f"{len(labels)} labels for {len(ids)} input_ids", "give one label a token")
    for at, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, IGNORE):
            what = f"labels[{at}] is {label}, neither input_ids[{at}] = {token} nor {IGNORE}"
            raise UserError(where, what, "labels are not shifted here: the loss shifts them")
    return ids, [label != IGNORE for label in labels]


def _integers(value: Any, name: str, where: str) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise UserError(where, f"{name} is of type {type(value).__name__}", f"give {name} as a list of integers")
    if wrong := [item for item in value if type(item) is not int]:
        raise UserError(where, f"{name} holds {wrong[0]!r}", f"give {name} as a list of integers")
    return list(value)


def text_in(row: Columns) -> str:
    text = row["text"]
    if not isinstance(text, str):
        raise UserError(row.where, f"text is of type {type(text).__name__}", "give rows with a string `text`")
    return text


def row_key(row: Mapping[str, Any], section: DataConfig) -> int:
    """A 64-bit digest of the columns that the row's format reads, so that copies of a row have the same key."""
    content = {name: row[called] for name in COLUMNS[section.format] if (called := section.column(name)) in row}
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
        self.all, self.where, self.section, self.tokenizer = row.parse(), row.where, section, tokenizer
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
        found = [check_messages(self.from_json(name), self.where, name=name) for name in names]
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

    def check_has_no_system(self) -> None:
        """Refuse a system prompt beside a plain text."""
        if self.all.get("system"):
            what = "the row has a system prompt, and its prompt is a plain text"
            raise UserError(self.where, what, 'put texts into the chat template, or rename the column "system"')

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
        tools, where = check_tools(self.get("tools"), self.where), self.where
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


def _nearest(column: str, name: str, names: Sequence[str]) -> str | None:
    """The column of a row that ``name`` most likely means, names of other data first; None if none is similar."""
    alike = [one for one in names if one.lower() in ALSO.get(column, ()) or column in one.lower().split("_")]
    return next(iter([*alike, *difflib.get_close_matches(name, names, n=1)]), None)
