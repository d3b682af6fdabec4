"""Which tokens of a conversation are learnt: the assistant's, up to and including its end-of-turn token.

A chat template says where the assistant speaks in one of two ways. With ``{% generation %}`` markers it says so
itself. Without them, the conversation is rendered turn by turn: what an assistant turn adds after its generation
prompt is the assistant's. Both give character spans of one text, which is tokenised once, as a whole; the
tokenizer's offsets then carry the spans over to tokens. transformers' own ``assistant_masks`` is not used: where a
span begins or ends in a space that the tokenizer's offsets leave out, it loses turns or runs on to the end of the
text, without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # characters [start, end)
Encoded = tuple[list[int], list[bool]]  # token ids, and whether each is supervised

_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
# Unicode noncharacters: no text holds them, and `_marked_spans` checks that.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
# The empty expression keeps Jinja's trim_blocks from eating a newline that opens the template.
_MACRO = "{% macro fsdp2kit_span() %}{{ '" + _OPEN + "' }}{{ caller() }}{{ '" + _CLOSE + "' }}{% endmacro %}{{ '' }}"


@dataclass(frozen=True)
class Conversation:
    """One row of chat data; ``where`` names it in errors, e.g. ``chat.jsonl:17``."""

    messages: Any
    tools: Any = None
    where: str = "messages"


def encode_chat(
    messages: Any, tokenizer: PreTrainedTokenizerBase, *, tools: Any = None, where: str = "messages"
) -> Encoded:
    """Token ids of a conversation and, for each, whether the model is to learn it.

    Args:
        messages: list of ``{"role": …, "content": …}``; anything else the template knows passes through.
        tools: list of JSON schemas, for templates that take tools.
        where: names the row in errors.

    Returns:
        ``(ids, supervised)`` of equal length. Supervised are the assistant's tokens and the end-of-turn token, not
        the whitespace after it; a token of which any character is the assistant's counts as the assistant's. The
        template alone decides on BOS.

    Raises:
        UserError: the messages are malformed, or the template cannot say which tokens are the assistant's.
    """
    return encode_chats([Conversation(messages, tools, where)], tokenizer)[0]


def encode_chats(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """`encode_chat` for many conversations, tokenised in one call (fast tokenizers use threads for it).

    Raises:
        UserError: as `encode_chat`; or the tokenizer is not a fast one, and so knows no offsets.
    """
    if not tokenizer.is_fast:
        raise UserError(
            "model.tokenizer",
            f"{type(tokenizer).__name__} gives no character offsets, which chat data needs",
            "use a fast tokenizer (one with a tokenizer.json)",
        )
    if not conversations:
        return []
    endings = _special_strings(tokenizer)
    texts, spans = zip(*(_render_spans(one, tokenizer, endings) for one in conversations), strict=True)
    encoding = tokenizer(
        list(texts), add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
    )
    pairs = zip(encoding["input_ids"], encoding["offset_mapping"], spans, strict=True)
    return [(ids, _mask(offsets, where)) for ids, offsets, where in pairs]


def _render_spans(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, endings: tuple[str, ...]
) -> tuple[str, list[Span]]:
    """The conversation's text and the assistant's spans in it, ascending."""
    messages = check_messages(conversation.messages, conversation.where)
    conversation = Conversation(messages, conversation.tools, conversation.where)
    template = _template(tokenizer, conversation)
    if _GENERATION.search(template):
        text, spans = _marked_spans(conversation, tokenizer, template)
        bos = tokenizer.bos_token
        spans = [_extend(text, span, tuple(ending for ending in endings if ending != bos)) for span in spans]
    else:
        text, spans = _prefix_spans(conversation, tokenizer, endings)
    return text, [_trim(text, span, endings) for span in spans]


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """The messages as a list of dicts without their None values (pyarrow fills in missing keys with None).

    Raises:
        UserError: naming the row and the message that is not of the form ``{"role": …, "content": …}``.
    """
    todo = 'a row needs "messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise UserError(where, f"messages is {_kind(messages)}, not a list", todo)
    if not messages:
        raise UserError(where, "messages is empty", todo)
    checked = []
    for position, message in enumerate(messages):
        name = f"messages[{position}]"
        if not isinstance(message, Mapping):
            raise UserError(where, f"{name} is {_kind(message)}, not an object", todo)
        message = {key: value for key, value in message.items() if value is not None}
        if not isinstance(message.get("role"), str):
            raise UserError(where, f"{name} has no role", todo)
        content = message.get("content")
        if content is None and not (message.get("tool_calls") or message.get("reasoning_content")):
            raise UserError(where, f"{name} has no content", todo)
        if content is not None and not isinstance(content, (str, list)):
            raise UserError(where, f"{name}.content is {_kind(content)}, not text", todo)
        checked.append(message)
    return checked


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _special_strings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Everything that may end a turn: the special tokens, the longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if tokenizer.eos_token:
        added.add(str(tokenizer.eos_token))
    return tuple(sorted(added, key=lambda text: (-len(text), text)))


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
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, endings: tuple[str, ...]
) -> tuple[str, list[Span]]:
    """What each assistant turn adds to its generation prompt, verified to be a piece of the whole text."""
    messages = conversation.messages
    whole = _render(conversation, tokenizer)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if turn == 0:
            raise UserError(
                conversation.where,
                "the conversation begins with the assistant, so nothing says where its text begins",
                "begin with a user or system message, or use a chat template with {% generation %} markers",
            )
        prompt = _render(conversation, tokenizer, turns=turn, prompt=True)
        until = whole if turn + 1 == len(messages) else _render(conversation, tokenizer, turns=turn + 1)
        if not (until.startswith(prompt) and whole.startswith(until)):
            raise UserError(
                conversation.where,
                f"the chat template renders the assistant's messages[{turn}] differently within the conversation and "
                "when it is generated (some drop earlier reasoning), so the mask would be wrong",
                "set model.chat_template to a template with {% generation %} markers, or use single-turn rows",
            )
        if prompt == _render(conversation, tokenizer, turns=turn):
            _refuse_header(until[len(prompt) :], message, conversation.where, endings)
        spans.append((len(prompt), len(until)))
    return whole, spans


def _refuse_header(added: str, message: dict[str, Any], where: str, endings: tuple[str, ...]) -> None:
    """A template that has no generation prompt must not make the turn's header part of the assistant's text.

    Templates like Mistral's need no prompt (the user's turn ends in ``[/INST]``); those add no special token and
    role before the content.
    """
    content = message.get("content")
    header = added[: max(added.find(content.strip()), 0)] if isinstance(content, str) else ""
    if message["role"] in header and any(ending in header for ending in endings):
        raise UserError(
            where,
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


def _mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token, given by its characters, overlaps one of the ascending spans.

    Some tokenizers leave the space out of a space's own offsets: an empty token counts where it stands.
    """
    mask = []
    remaining = iter(spans)
    span = next(remaining, None)
    for start, end in offsets:
        while span is not None and span[1] <= start:
            span = next(remaining, None)
        mask.append(span is not None and start < span[1] and max(end, start + 1) > span[0])
    return mask
