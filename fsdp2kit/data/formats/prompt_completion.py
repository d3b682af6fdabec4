"""Rows of the format "prompt_completion": ``prompt`` and ``completion``, two texts or two lists of messages."""

from __future__ import annotations

from typing import Any

from fsdp2kit.data.columns import RowColumns, messages_in
from fsdp2kit.data.conversation import (
    Conversation,
    PlainText,
    as_messages,
    check_is_plain,
    conversation_of,
    with_system,
)
from fsdp2kit.data.messages import Messages, check_messages, nothing_said
from fsdp2kit.errors import UserError


def read_prompt_completion(row: RowColumns) -> list[Conversation | PlainText]:
    """The row's prompt with its completion."""
    row.refuse_media()
    prompt = messages_in(row["prompt"], row.where)
    completion = row["completion"]
    if not isinstance(prompt, str):  # behind a text, messages in JSON are an answer like any other text
        completion = messages_in(completion, row.where)
    check_kinds(row, prompt, completion, "completion")
    prompt = text_or_messages(prompt, row.where, "prompt")
    completion = text_or_messages(completion, row.where, "completion")
    return [answered(row, prompt, completion)]


def check_kinds(row: RowColumns, prompt: Any, answer: Any, name: str) -> None:
    """Refuse a text beside messages, unless texts are put into the chat template; ``name`` is the answer's column."""
    if row.section.wrap != "chat" and isinstance(prompt, str) != isinstance(answer, str):
        what = f"prompt and {name} are a text and a list of messages"
        raise UserError(row.where, what, "give two of a kind")


def text_or_messages(value: Any, where: str, name: str) -> str | Messages:
    """A text as it is, messages in OpenAI's form; ``name`` is that of their column."""
    return value if isinstance(value, str) else check_messages(value, where, name=name)


def answered(row: RowColumns, prompt: str | Messages, answer: str | Messages) -> Conversation | PlainText:
    """A prompt with its answer, two texts or messages. The prompt is supervised only under ``train_on = "all"``."""
    learns_all = row.section.train_on == "all"
    if isinstance(prompt, str) and isinstance(answer, str) and row.section.wrap != "chat":
        check_is_plain(row)
        if not answer.strip():
            what = "the completion is empty, so the model would learn to end the text at once"
            raise UserError(row.where, what, "drop the row")
        return PlainText(prompt + answer, 0 if learns_all else len(prompt), row.where)
    if answer == []:  # it only repeats the prompt
        raise nothing_said(row.where, "completion")
    before = with_system(row, as_messages(prompt, "user"))
    messages = [*before, *as_messages(answer, "assistant")]
    return conversation_of(row, messages, learn_from=0 if learns_all else len(before))
