"""A conversation's text, and where in it the assistant speaks, as the chat template says.

A chat template says where the assistant speaks in one of two ways. With ``{% generation %}`` markers it says so
itself. Without them, the conversation is rendered turn by turn: what an assistant turn adds after its generation
prompt is the assistant's, which is verified to be a piece of the whole text. Both give character spans of one text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from fsdp2kit.data.messages import Conversation, check_messages
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "all", "last"]
Span = tuple[int, int]  # characters [start, end)

_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
# Unicode noncharacters: no text holds them, and `_marked_spans` checks that.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
# The empty expression keeps Jinja's trim_blocks from eating a newline that opens the template.
_MACRO = "{% macro fsdp2kit_span() %}{{ '" + _OPEN + "' }}{{ caller() }}{{ '" + _CLOSE + "' }}{% endmacro %}{{ '' }}"


def render_spans(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, *, endings: tuple[str, ...], train_on: TrainOn
) -> tuple[str, list[Span]]:
    """The conversation's text and the ascending spans of it that are learnt, each with its end-of-turn token.

    Args:
        endings: what `special_strings` returns for the tokenizer.

    Raises:
        UserError: the messages are malformed, or the template cannot say which text is the assistant's.
    """
    messages = check_messages(conversation.messages, conversation.where)
    conversation = replace(conversation, messages=messages)
    template = _template(tokenizer, conversation)
    if train_on == "all" and not conversation.learn_from:
        text = _render(conversation, tokenizer)
        return text, [(0, len(text))]
    if _GENERATION.search(template):
        text, spans = _marked_spans(conversation, tokenizer, template)
        bos = tokenizer.bos_token
        spans = [_extend(text, span, tuple(ending for ending in endings if ending != bos)) for span in spans]
        if conversation.learn_from:
            begin = len(_render(conversation, tokenizer, turns=conversation.learn_from))
            spans = [span for span in spans if span[0] >= begin]
        spans = spans[-1:] if train_on == "last" else spans
    else:
        text, spans = _prefix_spans(conversation, tokenizer, endings, last_only=train_on == "last")
    return text, [_trim(text, span, endings) for span in spans]


def special_strings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Everything that may end a turn: the special tokens, the longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if tokenizer.eos_token:
        added.add(str(tokenizer.eos_token))
    return tuple(sorted(added, key=lambda text: (-len(text), text)))


def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template says itself, with ``{% generation %}``, what the assistant's text is."""
    template = tokenizer.chat_template
    return isinstance(template, str) and bool(_GENERATION.search(template))


def _template(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> str:
    try:
        return tokenizer.get_chat_template(tools=conversation.tools)
    except ValueError as error:
        raise UserError(
            "model.chat_template",
            f"the tokenizer has no chat template to use ({str(error).splitlines()[0]})",
            "set model.chat_template to a Jinja file, or use an instruction-tuned model's tokenizer",
        ) from None


def _render(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    *,
    turns: int | None = None,
    prompt: bool = False,
    template: str | None = None,
) -> str:
    """Text of the first ``turns`` messages, with the generation prompt after them if ``prompt``."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            conversation.messages[:turns],
            tools=conversation.tools,
            chat_template=template,
            add_generation_prompt=prompt,
            tokenize=False,
            **conversation.options,
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise UserError(
            conversation.where,
            f"the chat template refuses the messages ({error})",
            "change the row to what the template accepts, or set model.chat_template",
        ) from None
    assert isinstance(text, str)
    return text


def _marked_spans(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, template: str
) -> tuple[str, list[Span]]:
    """Spans between ``{% generation %}`` and ``{% endgeneration %}``.

    The tag is a Jinja call block. As a call of a macro that puts a character of ours on either side, it renders the
    same text with the borders to be seen.
    """
    template = _END_GENERATION.sub(r"{%\1 endcall \2%}", template)
    template = _MACRO + _GENERATION.sub(r"{%\1 call fsdp2kit_span() \2%}", template)
    spans: list[Span] = []
    text, opened = "", None
    for piece in re.split(f"([{_OPEN}{_CLOSE}])", _render(conversation, tokenizer, template=template)):
        if piece == _OPEN:
            opened = len(text)
        elif piece == _CLOSE and opened is not None:
            spans.append((opened, len(text)))
            opened = None
        else:
            text += piece
    if opened is not None or text != _render(conversation, tokenizer):
        raise UserError(
            conversation.where,
            "the chat template's {% generation %} markers cannot be located in its text",
            "let the markers enclose the assistant's text alone, without nesting or filters over them",
        )
    return text, spans


def _prefix_spans(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, endings: tuple[str, ...], *, last_only: bool
) -> tuple[str, list[Span]]:
    """What each assistant turn adds to its generation prompt, verified to be a piece of the whole text."""
    messages = conversation.messages
    whole = _render(conversation, tokenizer)
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [at for at in turns if at >= conversation.learn_from][-1 if last_only else 0 :]
    spans = []
    for turn in turns:
        if turn == 0:
            raise UserError(
                conversation.where,
                "the conversation begins with the assistant, so nothing says where its text begins",
                "begin with a user or system message, or use a chat template with {% generation %} markers",
            )
        prompt = _render(conversation, tokenizer, turns=turn, prompt=True)
        until = _turn_end(conversation, tokenizer, turn, whole=whole, endings=endings)
        if not (until.startswith(prompt) and whole.startswith(until)):
            raise _rewritten(conversation.where, turn, last_only=last_only)
        _refuse_header(conversation, tokenizer, turn, added=until[len(prompt) :], prompt=prompt, endings=endings)
        spans.append((len(prompt), len(until)))
    return whole, spans


def _turn_end(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    turn: int,
    *,
    whole: str,
    endings: tuple[str, ...],
) -> str:
    """The text up to the end of ``messages[turn]``.

    Templates like Phi-3's close a text, not a turn, with a token of its own, unless a generation prompt follows:
    what comes after the assistant's last turn but not before a generation prompt is no turn's.
    """
    is_last = turn + 1 == len(conversation.messages)
    text = whole if is_last else _render(conversation, tokenizer, turns=turn + 1)
    closing = next((ending for ending in endings if text.endswith(ending)), "")
    if not closing:
        return text
    shorter = text[: -len(closing)]
    if not is_last:
        return shorter if whole.startswith(shorter) and not whole.startswith(text) else text
    if not shorter.rstrip().endswith(endings):
        return text
    going_on = _render(conversation, tokenizer, prompt=True)
    return shorter if going_on.startswith(shorter) and not going_on.startswith(text) else text


def _rewritten(where: str, turn: int, *, last_only: bool) -> UserError:
    advice = 'set data.train_on = "last" to learn the last answer of each row, ' if not last_only else ""
    return UserError(
        where,
        f"the chat template renders the assistant's messages[{turn}] differently within the conversation and "
        "when it is generated (some drop earlier reasoning), so the mask would be wrong",
        f"{advice}set model.chat_template to a template with {{% generation %}} markers, or use single-turn rows",
    )


def _refuse_header(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    turn: int,
    *,
    added: str,
    prompt: str,
    endings: tuple[str, ...],
) -> None:
    """A template that has no generation prompt must not make the turn's header part of the assistant's text.

    Templates like Mistral's need no prompt (the user's turn ends in ``[/INST]``); those add no special token and
    role before the content.
    """
    message = conversation.messages[turn]
    content = message.get("content")
    header = added[: max(added.find(content.strip()), 0)] if isinstance(content, str) else ""
    if message["role"] not in header or not any(ending in header for ending in endings):
        return
    if prompt == _render(conversation, tokenizer, turns=turn):
        raise UserError(
            conversation.where,
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
