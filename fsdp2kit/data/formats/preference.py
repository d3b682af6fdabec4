"""Rows of the format "preference": two answers to one prompt, ``chosen`` and ``rejected``, as texts or messages.

Their ``prompt`` may be a column of its own, or what both answers begin with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp2kit.data.columns import RowColumns, messages_in
from fsdp2kit.data.conversation import (
    Conversation,
    PlainText,
    answered,
    as_messages,
    check_kinds,
    text_or_messages,
)
from fsdp2kit.data.fields import same_at_start
from fsdp2kit.data.messages import Messages
from fsdp2kit.data.names import ALSO
from fsdp2kit.errors import UserError


def read_preference(row: RowColumns) -> list[Conversation | PlainText]:
    """The row's prompt with each of its answers, the better one first."""
    row.refuse_media()
    chosen = messages_in(row["chosen"], row.where)
    rejected = messages_in(row["rejected"], row.where)
    prompt = messages_in(row.given("prompt"), row.where)
    _check_columns(row, prompt, chosen, rejected)
    chosen = text_or_messages(chosen, row.where, "chosen")
    rejected = text_or_messages(rejected, row.where, "rejected")
    if prompt is not None:
        prompt = text_or_messages(prompt, row.where, "prompt")
    prompt, answers = _apart(row, prompt, [chosen, rejected])
    return [answered(row, prompt, answer) for answer in answers]


def _check_columns(row: RowColumns, prompt: Any, chosen: Any, rejected: Any) -> None:
    """Refuse answers of two kinds, a prompt of another kind, and texts beside a column that may be their prompt."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError(row.where, "chosen and rejected are a text and a list of messages", "give two of a kind")
    if not isinstance(chosen, str):  # messages may begin with a text that is the prompt
        return
    if prompt is not None:
        check_kinds(row, prompt, chosen, "chosen")
        return
    others = {name.lower() for name, value in row.all.items() if value}
    if others & set(ALSO["prompt"]):
        raise row.missing("prompt")


def _apart(row: RowColumns, prompt: str | Messages | None, answers: list[Any]) -> tuple[str | Messages, list[Any]]:
    """The row's prompt, or else what the two answers both begin with, and the answers without it."""
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
        return shared or as_messages(prompt, "user"), [len(shared)] * 2
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
