"""Which tokens of a row are learnt: spans of its text, carried over to tokens.

Every row becomes one text with character spans, and is tokenised once, as a whole; the tokenizer's offsets then carry
the spans over to tokens. transformers' own ``assistant_masks`` is not used: where a span begins or ends in a space
that the tokenizer's offsets leave out, it loses turns or runs on to the end of the text, without a word.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fsdp2kit.data.messages import Conversation, check_messages
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
    conversation = Conversation(check_messages(messages, where), tools, where)
    return encode_chats([conversation], tokenizer, train_on=train_on)[0]


def encode_chats(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, *, train_on: TrainOn = "assistant"
) -> list[Encoded]:
    """`encode_chat` for many conversations with checked messages, rendered and tokenised together.

    Raises:
        UserError: as `encode_chat`; or the tokenizer is not a fast one, and so knows no offsets.
    """
    if not conversations:
        return []
    require_offsets(tokenizer)
    endings = special_strings(tokenizer)
    texts, spans = zip(*render_spans(conversations, tokenizer, endings=endings, train_on=train_on), strict=True)
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
        return_attention_mask=False,
        return_token_type_ids=False,
        truncation=False,
        verbose=False,
    )
    assert encoding.encodings is not None, "a fast tokenizer has them (`require_offsets`)"
    # Offsets of one row at a time: those of a batch are a tuple a token, which keep the garbage collector busy.
    rows = zip(encoding["input_ids"], encoding.encodings, spans, strict=True)
    return [(ids, _mask(row.offsets, where)) for ids, row, where in rows]


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

    Some tokenizers leave the space out of a space's own offsets: an empty token counts where it stands. Tokens that
    the tokenizer adds at the end stand nowhere, at ``(0, 0)``, and do not count.
    """
    count = len(offsets)
    while count > 1 and offsets[count - 1] == (0, 0):
        count -= 1
    mask = [False] * len(offsets)
    for start, end in spans:
        # Tokens are in the order of their characters, so those of a span are neighbours.
        first = bisect_left(offsets, (start,), hi=count)
        while first > 0 and max(offsets[first - 1][1], offsets[first - 1][0] + 1) > start:
            first -= 1
        last = bisect_left(offsets, (end,), hi=count)
        mask[first:last] = [True] * (last - first)
    return mask
