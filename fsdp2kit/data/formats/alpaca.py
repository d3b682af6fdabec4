"""Rows of the format "alpaca": ``instruction``, ``input`` and ``output``, and the ``history`` that some data has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp2kit.data.columns import RowColumns
from fsdp2kit.data.conversation import Conversation, conversation_of, with_system
from fsdp2kit.data.messages import check_messages
from fsdp2kit.errors import UserError


def read_alpaca(row: RowColumns) -> list[Conversation]:
    """The row's conversation: the history, then the instruction with the input below it, then the output."""
    row.refuse_media()
    asked = row["instruction"]
    answer = row["output"]
    if about := row.get("input"):
        asked = f"{asked}\n\n{about}"
    history = row.from_json("history") or []
    if not isinstance(history, Sequence):
        raise UserError(row.where, f"history is of type {type(history).__name__}", 'write [["question", "answer"], …]')
    turns: list[dict[str, Any]] = []
    for turn in (*history, (asked, answer)):
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise UserError(row.where, "history holds what is no pair", 'write [["question", "answer"], …]')
        turns += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages = check_messages(turns, row.where)
    messages = with_system(row, messages)
    return [conversation_of(row, messages)]
