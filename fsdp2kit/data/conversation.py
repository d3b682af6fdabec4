"""A row's columns → its conversations, or plain texts outside any chat template, which is not asked here.

The columns hold texts, or messages as the data writes them. These become OpenAI's, and both become conversations.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase as Tokenizer

from fsdp2kit.config.sections.data import DataConfig
from fsdp2kit.data.columns import RowColumns, messages_in, refuse_media, text_in, written_in
from fsdp2kit.data.fields import same_at_start
from fsdp2kit.data.inputs import tools_in, variables_in
from fsdp2kit.data.messages import Messages, check_messages, learnt_turns, marks_of, nothing_said, read_messages
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


def conversations_in(row: RowColumns) -> Sequence[Conversation | PlainText]:
    """A row's conversations or plain texts, one for each of its answers. Not for rows of tokens."""
    format = row.section.format
    if format == "text":
        return [PlainText(text_in(row), 0, row.where)]
    written = written_in(row)
    said = read_messages(written, row.where, may_be_text=format in WRAPPED)
    if format == "preference":
        prompt, answers = _prompt_and_answers(row, said)
        return [_answered(row, prompt, answer) for answer in answers]
    if format == "prompt_completion":
        return [_answered(row, said["prompt"], said["completion"])]
    messages = _with_system(row, _only(row, said))
    return [_conversation(row, messages)]


def prompt_in(row: RowColumns, *, has_template: bool) -> Conversation | str:
    """The prompt of a row of the format "prompts": a text if there is no chat template, otherwise a conversation.

    It is in the column that ``[data.columns]`` names, or in a default column. An answer at the end is cut off.
    """
    refuse_media(row)
    prompt = None if row.is_named("messages") else messages_in(row.given("prompt"), row.where)
    conversations = {} if row.is_named("prompt") else row.conversations()
    if prompt is None and not conversations:
        raise row.missing("prompt" if row.rows_with("prompt") else "messages")
    said: list[Messages] = []
    if prompt is not None:
        said.append(check_messages(_wrapped(prompt, "user"), row.where, name="prompt"))
    if conversations:
        said.append(_only(row, read_messages(conversations, row.where)))
    found = [_with_system(row, one) for one in said]
    found = [one[:-1] if one[-1]["role"] == "assistant" else one for one in found]
    if not all(found):
        raise UserError(row.where, "there is no prompt before the answer", "begin with a user's message")
    if found[0] != found[-1]:
        raise _ambiguous(row, ("prompt", "prompt"), ("messages", next(iter(conversations))))
    if isinstance(prompt, str) and not has_template:
        _check_is_plain(row)
        return prompt
    variables = variables_in(row)
    return prompt_of(found[0], where=row.where, tools=tools_in(row), variables=variables)


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


def looks_unwrapped(row: RowColumns, tokenizer: Tokenizer) -> bool:
    """Whether a row's prompt is a plain text without special tokens, although the tokenizer has a chat template.

    Args:
        row: of one of the formats `WRAPPED`.
    """
    side = "chosen" if row.section.format == "preference" else "completion"
    answer = messages_in(row.whole.get(row.called(side)), row.where)
    prompt = messages_in(row.whole.get(row.called("prompt")), row.where) or answer  # which may begin with it
    if row.section.wrap == "chat" or not tokenizer.chat_template:
        return False
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        return False
    return not any(token.special and token.content in prompt for token in tokenizer.added_tokens_decoder.values())


def _only(row: RowColumns, said: Mapping[str, Messages]) -> Messages:
    """The row's conversation. The row may have both default columns if they say the same."""
    found = list(said.values())
    if len(found) > 1 and found[0] != found[1]:
        raise _ambiguous(row, *(("messages", name) for name in said))
    return found[0]


def _ambiguous(row: RowColumns, *choices: tuple[str, str]) -> UserError:
    """The error of a row with two columns that may be meant and differ; each is given by our name and its own."""
    names = " and ".join(repr(name) for _, name in choices)
    todo = " or ".join(f'data.columns.{column} = "{name}"' for column, name in choices)
    return UserError(row.where, f"the row has {names}, which differ", f"say which is meant: {todo}")


def _prompt_and_answers(row: RowColumns, said: Mapping[str, Any]) -> tuple[str | Messages, list[Any]]:
    """The row's ``prompt``, or else what ``chosen`` and ``rejected`` both begin with, and the two without it."""
    prompt = said.get("prompt")
    answers = [said[name] for name in _SIDES]
    if not isinstance(answers[0], str):
        prompt, repeated = _said_before(prompt, answers, row.where)
        answers = [answer[count:] for answer, count in zip(answers, repeated, strict=True)]
    elif prompt is None:
        prompt = _shared_text(*answers) or None
        answers = [answer[len(prompt or "") :] for answer in answers]
    elif isinstance(prompt, str) and row.section.wrap != "chat":  # where it is a message, no answer can repeat it
        answers = _without_prompt(answers, prompt)
    if prompt is None:
        raise UserError(row.where, "chosen and rejected share no prompt", "give rows with a prompt of their own")
    return prompt, answers


def _answered(row: RowColumns, prompt: str | Messages, answer: str | Messages) -> Conversation | PlainText:
    """A prompt with its answer, two texts or messages. The prompt is supervised only under ``train_on = "all"``."""
    learns_all = row.section.train_on == "all"
    if isinstance(prompt, str) and isinstance(answer, str) and row.section.wrap != "chat":
        _check_is_plain(row)
        if not answer.strip():
            what = "the completion is empty, so the model would learn to end the text at once"
            raise UserError(row.where, what, "drop the row")
        return PlainText(prompt + answer, 0 if learns_all else len(prompt), row.where)
    if answer == []:  # it only repeats the prompt
        raise nothing_said(row.where, "completion")
    before = _with_system(row, _wrapped(prompt, "user"))
    messages = [*before, *_wrapped(answer, "assistant")]
    return _conversation(row, messages, learn_from=0 if learns_all else len(before))


def _wrapped(value: str | Messages, role: str) -> Messages:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _without_prompt(answers: Sequence[str], prompt: str) -> list[str]:
    """Two answers without the prompt that both begin with. One that goes on inside of a word only happens to begin so,
    and one alone quotes it."""
    rest = [one.removeprefix(prompt) for one in answers if one.startswith(prompt)]
    is_inside = prompt[-1:].isalnum() and any(one[:1].isalnum() for one in rest)
    return rest if len(rest) == len(answers) and not is_inside else list(answers)


def _said_before(
    prompt: str | Messages | None, answers: Sequence[Messages], where: str
) -> tuple[Messages | None, list[int]]:
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


def _check_is_plain(row: RowColumns) -> None:
    """Refuse a system prompt or tools beside a plain text, which would lack them."""
    if row.all.get("system"):
        what = "the row has a system prompt, and its prompt is a plain text"
        raise UserError(row.where, what, 'put texts into the chat template, or rename the column "system"')
    if tools_in(row):
        what = "the row has tools, and its prompt is a plain text"
        raise UserError(row.where, what, "put texts into the chat template, or leave the tools out")


def _conversation(row: RowColumns, messages: Messages, *, learn_from: int = 0) -> Conversation:
    """The messages with the row's ``tools`` and ``chat_template_kwargs``, and what is learnt of them."""
    variables = variables_in(row)
    tools = tools_in(row)
    marks = marks_of(messages, row.where)
    turns = learnt_turns(messages, marks, learn_from, row.section.train_on, row.where)
    return Conversation(messages, row.where, tools, variables, turns, learn_from, skips_turns=False in marks)
