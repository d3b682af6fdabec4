"""Conversations: their messages, their text, and where in it the assistant speaks, as the chat template says.

A chat template says where the assistant speaks in one of two ways. With ``{% generation %}`` markers it says so
itself. Without them, the conversation is rendered turn by turn: what an assistant turn adds after its generation
prompt is the assistant's, which is verified to be a piece of the whole text. Both give character spans of one text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "all", "last"]
Span = tuple[int, int]  # characters [start, end)

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

_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
# Unicode noncharacters: no text holds them, and whoever reads a marked text checks that.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
# The empty expression keeps Jinja's trim_blocks from eating a newline that opens the template.
_MACRO = "{% macro fsdp2kit_span() %}{{ '" + _OPEN + "' }}{{ caller() }}{{ '" + _CLOSE + "' }}{% endmacro %}{{ '' }}"
_BORDERS = re.compile(f"([{_OPEN}{_CLOSE}])")


@dataclass(frozen=True)
class Conversation:
    """One row of chat data; ``where`` names it in errors, e.g. ``chat.jsonl:17``."""

    messages: Any
    tools: Any = None
    where: str = "messages"
    learn_from: int = 0
    """Index of the first message that may be supervised: those before it are a prompt."""
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


def render_spans(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn,
) -> list[tuple[str, list[Span]]]:
    """Each conversation's text and the ascending spans of it that are supervised, each with its end-of-turn token.

    Args:
        conversations: with messages that `check_messages` returned.

    Raises:
        UserError: the template refuses the messages, or cannot say which text is the assistant's.
    """
    chats = [Chat(conversation, tokenizer) for conversation in conversations]
    render_together(((chat, piece) for chat in chats for piece in _wanted_pieces(chat, train_on)), tokenizer)
    endings = _special_strings(tokenizer)
    closing = tuple(ending for ending in endings if ending != tokenizer.bos_token)
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


def _special_strings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
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
    turns = _supervised_turns(chat, train_on)
    prompts = [Piece(turn, prompt=True) for turn in turns if turn]
    return [whole, *prompts, *(Piece(turn + 1) for turn in turns if turn + 1 < count)]


def _supervised_turns(chat: Chat, train_on: TrainOn) -> list[int]:
    """Indices of the assistant's messages that are supervised."""
    turns = [at for at, message in enumerate(chat.messages) if message["role"] == "assistant"]
    return [at for at in turns if at >= chat.conversation.learn_from][-1 if train_on == "last" else 0 :]


def _marked_spans(chat: Chat) -> tuple[str, list[Span]]:
    """Spans between ``{% generation %}`` and ``{% endgeneration %}``."""
    spans: list[Span] = []
    text, opened = "", None
    for piece in _BORDERS.split(chat.text(marked=True)):
        if piece == _OPEN:
            opened = len(text)
        elif piece == _CLOSE and opened is not None:
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
    for turn in _supervised_turns(chat, train_on):
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


class Piece(NamedTuple):
    """Which text of a conversation: that of its first ``turns`` messages."""

    turns: int
    prompt: bool = False
    """With the generation prompt after them."""
    marked: bool = False
    """With `_OPEN` and `_CLOSE` around what ``{% generation %}`` encloses."""


class Chat:
    """A conversation and its texts, each rendered when it is first asked for."""

    def __init__(self, conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> None:
        self.conversation = conversation
        self.messages: list[dict] = conversation.messages
        self.where = conversation.where
        self.has_markers = marks_answers(_template(tokenizer, conversation))
        self._tokenizer = tokenizer
        self._texts: dict[Piece, str] = {}

    def text(self, turns: int | None = None, *, prompt: bool = False, marked: bool = False) -> str:
        """The text of the first ``turns`` messages, all by default; see `Piece`.

        Raises:
            UserError: the template refuses the messages.
        """
        piece = Piece(len(self.messages) if turns is None else turns, prompt, marked)
        if piece not in self._texts:
            try:
                self._texts[piece] = _render([(self, piece)], self._tokenizer)[0]
            except _refusals() as error:
                raise UserError(
                    self.where,
                    f"the chat template refuses the messages ({error})",
                    "change the row to what the template accepts, or set model.chat_template",
                ) from None
        return self._texts[piece]

    def keep(self, piece: Piece, text: str) -> None:
        """Spare `text` the work of rendering ``piece``."""
        self._texts[piece] = text


def render_together(wanted: Iterable[tuple[Chat, Piece]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Render texts that will be asked for, many in a call: most of a call's time is not the template's.

    Chats with tools or variables of their own are left out, and so is every text of a call in which the template
    refuses one: these are rendered one by one when they are asked for, where the error has a row.
    """
    groups: dict[tuple[bool, bool], list[tuple[Chat, Piece]]] = {}
    for chat, piece in wanted:
        if not chat.conversation.tools and not chat.conversation.options:
            groups.setdefault((piece.prompt, piece.marked), []).append((chat, piece))
    for group in groups.values():
        try:
            texts = _render(group, tokenizer)
        except _refusals():
            continue
        for (chat, piece), text in zip(group, texts, strict=True):
            chat.keep(piece, text)


@lru_cache(maxsize=16)
def marks_answers(template: str) -> bool:
    """Whether a chat template says itself, with ``{% generation %}``, what the assistant's text is."""
    return bool(_GENERATION.search(template))


def _render(wanted: Sequence[tuple[Chat, Piece]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of one kind (with prompt or not, marked or not), of conversations with the same tools and variables."""
    chat, piece = wanted[0]
    conversation = chat.conversation
    texts = tokenizer.apply_chat_template(
        [chat.messages[: piece.turns] for chat, piece in wanted],
        tools=conversation.tools,
        chat_template=_marked(_template(tokenizer, conversation)) if piece.marked else None,
        add_generation_prompt=piece.prompt,
        tokenize=False,
        **conversation.options,
    )
    assert isinstance(texts, list)
    return texts  # pyright: ignore[reportReturnType]


@lru_cache(maxsize=16)
def _marked(template: str) -> str:
    """The template with `_OPEN` and `_CLOSE` around what its markers enclose.

    The tag is a Jinja call block. As a call of a macro that puts a character of ours on either side, it renders the
    same text with the borders to be seen.
    """
    template = _END_GENERATION.sub(r"{%\1 endcall \2%}", template)
    return _MACRO + _GENERATION.sub(r"{%\1 call fsdp2kit_span() \2%}", template)


def _template(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> str:
    try:
        return tokenizer.get_chat_template(tools=conversation.tools)
    except ValueError as error:
        raise UserError(
            "model.chat_template",
            f"the tokenizer has no chat template to use ({str(error).splitlines()[0]})",
            "set model.chat_template to a Jinja file, or use an instruction-tuned model's tokenizer",
        ) from None


def _refusals() -> tuple[type[Exception], ...]:
    """What a template raises for messages that it does not take."""
    from jinja2 import TemplateError

    return TemplateError, TypeError, ValueError, KeyError
