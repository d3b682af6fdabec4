"""Rows of the format "prompts": what the model is asked, in ``prompt`` or in the columns of a conversation."""

from __future__ import annotations

from fsdp2kit.data.columns import RowColumns, messages_in
from fsdp2kit.data.conversation import (
    Conversation,
    ambiguous,
    as_messages,
    check_is_plain,
    only_conversation,
    prompt_of,
    tools_in,
    variables_in,
    with_system,
)
from fsdp2kit.data.messages import Messages, check_messages
from fsdp2kit.errors import UserError


def read_prompt(row: RowColumns, *, has_template: bool) -> Conversation | str:
    """The row's prompt: a text if there is no chat template, otherwise a conversation.

    It is in the column that ``[data.columns]`` names, or in a default column. An answer at the end is cut off.
    """
    row.refuse_media()
    prompt = None if row.is_named("messages") else messages_in(row.given("prompt"), row.where)
    conversations = {} if row.is_named("prompt") else row.conversations()
    if prompt is None and not conversations:
        raise row.missing("prompt" if row.rows_with("prompt") else "messages")
    said: list[Messages] = []
    if prompt is not None:
        said.append(check_messages(as_messages(prompt, "user"), row.where, name="prompt"))
    if conversations:
        said.append(only_conversation(row, conversations))
    found = [with_system(row, one) for one in said]
    found = [one[:-1] if one[-1]["role"] == "assistant" else one for one in found]
    if not all(found):
        raise UserError(row.where, "there is no prompt before the answer", "begin with a user's message")
    if found[0] != found[-1]:
        raise ambiguous(row, ("prompt", "prompt"), ("messages", next(iter(conversations))))
    if isinstance(prompt, str) and not has_template:
        check_is_plain(row)
        return prompt
    variables = variables_in(row)
    return prompt_of(found[0], where=row.where, tools=tools_in(row), variables=variables)
