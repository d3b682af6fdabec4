"""Rows of the format "prompt_completion": ``prompt`` and ``completion``, two texts or two lists of messages."""

from __future__ import annotations

from fsdp2kit.data.columns import RowColumns, messages_in
from fsdp2kit.data.conversation import (
    Conversation,
    PlainText,
    answered,
    check_kinds,
    text_or_messages,
)


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
