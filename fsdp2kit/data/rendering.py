"""Conversations through the chat template: each text rendered once, those of many rows in one call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from fsdp2kit.data.messages import Conversation
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
# Unicode noncharacters: no text holds them, and whoever reads a marked text checks that.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
# The empty expression keeps Jinja's trim_blocks from eating a newline that opens the template.
_MACRO = "{% macro fsdp2kit_span() %}{{ '" + OPEN + "' }}{{ caller() }}{{ '" + CLOSE + "' }}{% endmacro %}{{ '' }}"


class Piece(NamedTuple):
    """Which text of a conversation: that of its first ``turns`` messages."""

    turns: int
    prompt: bool = False
    """With the generation prompt after them."""
    marked: bool = False
    """With `OPEN` and `CLOSE` around what ``{% generation %}`` encloses."""


class Chat:
    """A conversation and its texts, each rendered when it is first asked for."""

    def __init__(self, conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> None:
        self.conversation = conversation
        self.has_markers = marks_answers(_template(tokenizer, conversation))
        self._tokenizer = tokenizer
        self._texts: dict[Piece, str] = {}

    @property
    def messages(self) -> list[dict]:
        return self.conversation.messages

    @property
    def where(self) -> str:
        return self.conversation.where

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
    """The template with `OPEN` and `CLOSE` around what its markers enclose.

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
