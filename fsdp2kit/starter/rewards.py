"""Rewards to begin with in recipe "grpo", until there is one for the task; docs/grpo.md says what they are given."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

REFERENCES = ("answer", "solution", "completion", "response", "output", "reference", "target", "label")
"""Columns that may hold the answer to a row's prompt, the likeliest first."""


def words_in_common(completions: list[Any], **columns: Any) -> list[float | None]:
    """How well a response's words are those of the row's own answer: the F1 of both bags of words, from 0 to 1.

    The answer is in one of the columns `REFERENCES`, or is the last message of a conversation. None without one.
    """
    found = []
    for at, completion in enumerate(completions):
        answer = reference_of({name: values[at] for name, values in columns.items()})
        found.append(None if answer is None else _f1(_text_of(completion), answer))
    return found


def is_finished(completions: list[Any], truncated: list[bool], **columns: Any) -> list[float]:
    """1 for a response that ends by itself within rollout.max_new_tokens, else 0."""
    return [0.0 if is_cut else 1.0 for is_cut in truncated]


def reference_of(row: dict[str, Any]) -> str | None:
    """The answer that a row has to its own prompt; None if it has none."""
    for name in REFERENCES:
        if isinstance(row.get(name), (str, int, float)):
            return str(row[name])
    messages = row.get("messages") or row.get("conversations")
    last = messages[-1] if isinstance(messages, list) and messages else {}
    if not isinstance(last, dict):
        return None
    text = last.get("content", last.get("value"))
    is_answer = last.get("role", last.get("from")) in ("assistant", "gpt")
    return text if is_answer and isinstance(text, str) else None


def _text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def _f1(one: str, other: str) -> float:
    bags = [Counter(re.findall(r"\w+", text.lower())) for text in (one, other)]
    shared = sum((bags[0] & bags[1]).values())
    return 2 * shared / max(1, sum(bags[0].values()) + sum(bags[1].values()))
