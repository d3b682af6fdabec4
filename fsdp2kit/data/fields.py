"""What a field of a message, or a column of a row, holds: a text, a thought within a text, or media.

It is asked of the messages as the data writes them, and again of the fields and texts that a chat template shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp2kit.data.names import ENCLOSED, HARMLESS, MEDIA_KEYS, SPOKEN, USUAL
from fsdp2kit.errors import UserError

_LETTERS = re.compile(r"[^\W\d_]")
_LONGEST_WORD = 64


def is_text(field: str, value: Any, role: str = "") -> bool:
    """Whether a field may hold a text that another tool would learn or show; ids, dates, figures and words do not.

    Args:
        role: of the message.
    """
    if field == "name":  # of a speaker; a result's is that of its function
        return isinstance(value, str) and role != "tool" and value.lower() not in ("", role)
    if field in ENCLOSED:
        return bool(value)
    return value not in USUAL.get(field, ()) and _holds_text(field, value)


def _holds_text(field: str, value: Any) -> bool:
    if field in HARMLESS:
        return False
    if isinstance(value, Mapping):
        return any(_holds_text(key, item) for key, item in value.items())
    if isinstance(value, list):
        return any(_holds_text(field, item) for item in value)
    if not isinstance(value, str) or not _LETTERS.search(value):
        return False
    return field in SPOKEN or len(value.strip()) > _LONGEST_WORD or len(value.split()) > 1


def shortened(value: Any) -> str:
    """A value in a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:60] + "…"


def same_at_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many letters or messages are the same at the beginning of two texts or conversations."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def media_in(fields: Mapping[str, Any]) -> str | None:
    """The key of a message, or column of a row, that holds an image, a video or audio; a list of nulls is empty."""
    for key in MEDIA_KEYS:
        value = fields.get(key)
        if value and (not isinstance(value, list) or any(value)):
            return key
    return None


def no_media(where: str, name: str, key: str) -> UserError:
    """The error of a row that holds an image, a video or audio.

    Args:
        name: of what holds it.
        key: one of `MEDIA_KEYS`.
    """
    kind = key.removesuffix("s")
    return UserError(where, f"{name} is of type {kind}, and only text is trained", "drop the row, or its images")


# What stands around a thought in a content.
_TAGS = ("think", "thinking", "thought", "thoughts", "reasoning", "reason", "analysis", "scratchpad", "reflection")
_THOUGHT_PAIRS = [
    *((f"<{tag}>", f"</{tag}>") for tag in _TAGS),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
]
OPENING = _THOUGHT_PAIRS[0][0]
"""Begins a thought; a generation prompt may open it."""
CLOSING = _THOUGHT_PAIRS[0][1]
_FIRST = {opening[0] for opening, _ in _THOUGHT_PAIRS}


def thought_in(content: str) -> tuple[str, str] | None:
    """The thought that a content begins with and what follows it; None without one."""
    text = content.lstrip()
    if text[:1] not in _FIRST:  # most contents have none
        return None
    for opening, closing in _THOUGHT_PAIRS:
        before, found, rest = text.partition(closing)
        if found and before.startswith(opening):
            return before[len(opening) :].strip(), rest.lstrip()
    return None


def empty_thought(content: str) -> str:
    """The tags of an empty thought that a content begins with; "" without one."""
    found = thought_in(content)
    if found is None or found[0]:
        return ""
    return "".join(content[: len(content) - len(found[1])].split())


def without_thoughts(content: str) -> list[str]:
    """A content without its thoughts, in the ways in which templates cut them out; empty if it has none."""
    found = []
    for opening, closing in _THOUGHT_PAIRS:
        if closing in content:
            pattern = f"{re.escape(opening)}.*?{re.escape(closing)}"
            found += [content.rpartition(closing)[2], re.sub(pattern, "", content, flags=re.DOTALL)]
    return found
