"""A conversation's text, and where in it the assistant speaks, as the chat template says.

A chat template says where the assistant speaks in one of two ways. With ``{% generation %}`` markers it says so
itself. Without them, the conversation is rendered turn by turn: what an assistant turn adds after its generation
prompt is the assistant's, which is verified to be a piece of the whole text. Both give character spans of one text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fsdp2kit.data.messages import Conversation
from fsdp2kit.data.rendering import CLOSE, OPEN, Chat, Piece, marks_answers, render_together
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "all", "last"]
Span = tuple[int, int]  # characters [start, end)

_BORDERS = re.compile(f"([{OPEN}{CLOSE}])")


def render_spans(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    endings: tuple[str, ...],
    train_on: TrainOn,
) -> list[tuple[str, list[Span]]]:
    """Each conversation's text and the ascending spans of it that are learnt, each with its end-of-turn token.

    Args:
        conversations: with messages that `check_messages` returned.
        endings: what `special_strings` returns for the tokenizer.

    Raises:
        UserError: the template refuses the messages, or cannot say which text is the assistant's.
    """
    chats = [Chat(conversation, tokenizer) for conversation in conversations]
    render_together(((chat, piece) for chat in chats for piece in _wanted_pieces(chat, train_on)), tokenizer)
    bos = tokenizer.bos_token
    closing = tuple(ending for ending in endings if ending != bos)
    return [_chat_spans(chat, endings, closing, train_on) for chat in chats]


def _chat_spans(
    chat: Chat, endings: tuple[str, ...], closing: tuple[str, ...], train_on: TrainOn
) -> tuple[str, list[Span]]:
    if train_on == "all" and not chat.conversation.learn_from:
        text = chat.text()
        return text, [(0, len(text))]
    if chat.has_markers:
        text, spans = _marked_spans(chat)
        spans = [_extend(text, span, closing) for span in spans]
        if chat.conversation.learn_from:
            begin = len(chat.text(chat.conversation.learn_from))
            spans = [span for span in spans if span[0] >= begin]
        spans = spans[-1:] if train_on == "last" else spans
    else:
        text, spans = _prefix_spans(chat, endings, train_on)
    return text, [_trim(text, span, endings) for span in spans]


def special_strings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Everything that may end a turn: the special tokens, the longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if tokenizer.eos_token:
        added.add(str(tokenizer.eos_token))
    return tuple(sorted(added, key=lambda text: (-len(text), text)))


def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's chat template says itself what the assistant's text is."""
    template = tokenizer.chat_template
    return isinstance(template, str) and marks_answers(template)


def _wanted_pieces(chat: Chat, train_on: TrainOn) -> list[Piece]:
    """What `_chat_spans` is certain to ask for, of a chat that it does not refuse."""
    count, learn_from = len(chat.messages), chat.conversation.learn_from
    whole = Piece(count)
    if train_on == "all" and not learn_from:
        return [whole]
    if chat.has_markers:
        return [whole, Piece(count, marked=True)]
    turns = _learnt_turns(chat, train_on)
    prompts = [Piece(turn, prompt=True) for turn in turns if turn]
    return [whole, *prompts, *(Piece(turn + 1) for turn in turns if turn + 1 < count)]


def _learnt_turns(chat: Chat, train_on: TrainOn) -> list[int]:
    """Positions of the assistant's messages that are learnt."""
    turns = [at for at, message in enumerate(chat.messages) if message["role"] == "assistant"]
    return [at for at in turns if at >= chat.conversation.learn_from][-1 if train_on == "last" else 0 :]


def _marked_spans(chat: Chat) -> tuple[str, list[Span]]:
    """Spans between ``{% generation %}`` and ``{% endgeneration %}``."""
    spans: list[Span] = []
    text, opened = "", None
    for piece in _BORDERS.split(chat.text(marked=True)):
        if piece == OPEN:
            opened = len(text)
        elif piece == CLOSE and opened is not None:
            spans.append((opened, len(text)))
            opened = None
        else:
            text += piece
    if opened is not None or text != chat.text():
        raise UserError(
            chat.where,
            "the chat template's {% generation %} markers cannot be located in its text",
            "let the markers enclose the assistant's text alone, without nesting or filters over them",
        )
    return text, spans


def _prefix_spans(chat: Chat, endings: tuple[str, ...], train_on: TrainOn) -> tuple[str, list[Span]]:
    """What each assistant turn adds to its generation prompt, verified to be a piece of the whole text."""
    whole = chat.text()
    spans = []
    for turn in _learnt_turns(chat, train_on):
        if turn == 0:
            raise UserError(
                chat.where,
                "the conversation begins with the assistant, so nothing says where its text begins",
                "begin with a user or system message, or use a chat template with {% generation %} markers",
            )
        prompt = chat.text(turn, prompt=True)
        until = _turn_end(chat, turn, whole=whole, endings=endings)
        if not (until.startswith(prompt) and whole.startswith(until)):
            raise _rewritten(chat.where, turn, last_only=train_on == "last")
        _refuse_header(chat, turn, added=until[len(prompt) :], prompt=prompt, endings=endings)
        spans.append((len(prompt), len(until)))
    return whole, spans


def _turn_end(chat: Chat, turn: int, *, whole: str, endings: tuple[str, ...]) -> str:
    """The text up to the end of ``messages[turn]``.

    Templates like Phi-3's close a text, not a turn, with a token of its own, unless a generation prompt follows:
    what comes after the assistant's last turn but not before a generation prompt is no turn's.
    """
    is_last = turn + 1 == len(chat.messages)
    text = whole if is_last else chat.text(turn + 1)
    closing = next((ending for ending in endings if text.endswith(ending)), "")
    if not closing:
        return text
    shorter = text[: -len(closing)]
    if not is_last:
        return shorter if whole.startswith(shorter) and not whole.startswith(text) else text
    if not shorter.rstrip().endswith(endings):
        return text
    going_on = chat.text(prompt=True)
    return shorter if going_on.startswith(shorter) and not going_on.startswith(text) else text


def _rewritten(where: str, turn: int, *, last_only: bool) -> UserError:
    advice = 'set data.train_on = "last" to learn the last answer of each row, ' if not last_only else ""
    return UserError(
        where,
        f"the chat template renders the assistant's messages[{turn}] differently within the conversation and "
        "when it is generated (some drop earlier reasoning), so the mask would be wrong",
        f"{advice}set model.chat_template to a template with {{% generation %}} markers, or use single-turn rows",
    )


def _refuse_header(chat: Chat, turn: int, *, added: str, prompt: str, endings: tuple[str, ...]) -> None:
    """A template that has no generation prompt must not make the turn's header part of the assistant's text.

    Templates like Mistral's need no prompt (the user's turn ends in ``[/INST]``); those add no special token and
    role before the content.
    """
    message = chat.messages[turn]
    content = message.get("content")
    header = added[: max(added.find(content.strip()), 0)] if isinstance(content, str) else ""
    if message["role"] not in header or not any(ending in header for ending in endings):
        return
    if prompt == chat.text(turn):
        raise UserError(
            chat.where,
            f"the chat template ignores add_generation_prompt, so {header!r} would be learnt as the assistant's text",
            "set model.chat_template to a template with a generation prompt or {% generation %} markers",
        )


def _extend(text: str, span: Span, endings: tuple[str, ...]) -> Span:
    """The span with the special token that follows, unless it ends in one already."""
    start, end = span
    if text[start:end].rstrip().endswith(endings):
        return span
    for ending in endings:
        if text.startswith(ending, end):
            return start, end + len(ending)
    return span


def _trim(text: str, span: Span, endings: tuple[str, ...]) -> Span:
    """The span without whitespace after its end-of-turn token: nobody generates that."""
    start, end = span
    stripped = text[start:end].rstrip()
    return (start, start + len(stripped)) if stripped.endswith(endings) else span
