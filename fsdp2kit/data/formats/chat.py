"""Rows of the format "chat": a conversation in ``messages``, or in ShareGPT's ``conversations``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp2kit.data.columns import RowColumns
from fsdp2kit.data.conversation import Conversation, conversation_of, only_conversation, with_system
from fsdp2kit.errors import UserError


def read_chat(row: RowColumns) -> list[Conversation]:
    """The row's conversation."""
    row.refuse_media()
    written = row.conversations()
    if not written:
        raise row.missing("messages")
    written = {name: _with_masks(row, messages) for name, messages in written.items()}
    messages = only_conversation(row, written)
    messages = with_system(row, messages)
    return [conversation_of(row, messages)]


def _with_masks(row: RowColumns, messages: Any) -> Any:
    """The messages, each with its entry of the row's masks as its field ``loss_mask``."""
    if not isinstance(messages, list):
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
