"""Conversations as rows hold them: checked, and brought to transformers' own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2kit.errors import UserError

# What ShareGPT-style data calls the roles.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
_TODO = 'a row needs "messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'


@dataclass(frozen=True)
class Conversation:
    """One row of chat data; ``where`` names it in errors, e.g. ``chat.jsonl:17``."""

    messages: Any
    tools: Any = None
    where: str = "messages"
    learn_from: int = 0
    """Position of the first message that may be learnt: those before it are a prompt."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, like ``enable_thinking``."""


def check_messages(messages: Any, where: str, *, name: str = "messages") -> list[dict[str, Any]]:
    """The messages as a list of dicts without their None values (pyarrow fills in missing keys with None).

    ShareGPT's ``{"from": "human", "value": "…"}`` becomes ``{"role": "user", "content": "…"}``.

    Raises:
        UserError: naming the row and the message that is not of the form ``{"role": …, "content": …}``.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise UserError(where, f"{name} is {_kind(messages)}, not a list", _TODO)
    if not messages:
        raise UserError(where, f"{name} is empty", _TODO)
    return [_check_message(message, where, f"{name}[{position}]") for position, message in enumerate(messages)]


def _check_message(message: Any, where: str, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(where, f"{name} is {_kind(message)}, not an object", _TODO)
    message = {key: value for key, value in message.items() if value is not None}
    if "from" in message and "role" not in message:
        role, content = message.pop("from"), message.pop("value", None)
        message = {"role": _ROLES.get(role, role) if isinstance(role, str) else role, **message}
        if content is not None:
            message["content"] = content
    if not isinstance(message.get("role"), str):
        raise UserError(where, f"{name} has no role", _TODO)
    content = message.get("content")
    if content is None and not (message.get("tool_calls") or message.get("reasoning_content")):
        raise UserError(where, f"{name} has no content", _TODO)
    if content is not None and not isinstance(content, (str, list)):
        raise UserError(where, f"{name}.content is {_kind(content)}, not text", _TODO)
    return message


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
