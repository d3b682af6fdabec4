"""Which tokens of a row are learnt: spans of its text, carried over to tokens.

Every row becomes one text with character spans, and is tokenised once, as a whole; the tokenizer's offsets then carry
the spans over to tokens. transformers' own ``assistant_masks`` is not used: where a span begins or ends in a space
that the tokenizer's offsets leave out, it loses turns or runs on to the end of the text, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fsdp2kit.data.messages import Conversation
from fsdp2kit.data.spans import Span, TrainOn, render_spans, special_strings
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], list[bool]]  # token ids, and whether each is supervised


def encode_chat(
    messages: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Any = None,
    train_on: TrainOn = "assistant",
    where: str = "messages",
) -> Encoded:
    """Token ids of a conversation and, for each, whether the model is to learn it.

    Args:
        messages: list of ``{"role": …, "content": …}``; anything else the template knows passes through.
        tools: list of JSON schemas, for templates that take tools.
        train_on: the assistant's turns, the last of them, or every token.
        where: names the row in errors.

    Returns:
        ``(ids, supervised)`` of equal length. Supervised are the assistant's tokens and the end-of-turn token, not
        the whitespace after it; a token of which any character is the assistant's counts as the assistant's. The
        template alone decides on BOS.

    Raises:
        UserError: the messages are malformed, or the template cannot say which tokens are the assistant's.
    """
    return encode_chats([Conversation(messages, tools, where)], tokenizer, train_on=train_on)[0]


def encode_chats(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, *, train_on: TrainOn = "assistant"
) -> list[Encoded]:
    """`encode_chat` for many conversations, tokenised in one call (fast tokenizers use threads for it).

    Raises:
        UserError: as `encode_chat`; or the tokenizer is not a fast one, and so knows no offsets.
    """
    if not conversations:
        return []
    require_offsets(tokenizer)
    endings = special_strings(tokenizer)
    rendered = [render_spans(one, tokenizer, endings=endings, train_on=train_on) for one in conversations]
    texts, spans = zip(*rendered, strict=True)
    return encode_spans(texts, spans, tokenizer, add_special_tokens=False)


def encode_spans(
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_special_tokens: bool,
) -> list[Encoded]:
    """Tokenise texts, supervising the tokens that overlap each one's ascending spans."""
    encoding = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        truncation=False,
        verbose=False,
    )
    pairs = zip(encoding["input_ids"], encoding["offset_mapping"], spans, strict=True)
    return [(ids, _mask(offsets, where)) for ids, offsets, where in pairs]


def require_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the tokenizer can say which characters a token stands for.

    Raises:
        UserError: it is not a fast one.
    """
    if not tokenizer.is_fast:
        raise UserError(
            "model.tokenizer",
            f"{type(tokenizer).__name__} gives no character offsets, which data with prompts needs",
            "use a fast tokenizer (one with a tokenizer.json)",
        )


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
