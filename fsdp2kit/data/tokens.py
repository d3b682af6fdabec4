"""Rows → tokens: each row's token ids, and which of them are supervised.

A row becomes one text with character spans and is tokenised once, as a whole; the tokenizer's offsets map the spans to
tokens. transformers' ``assistant_masks`` is not used. If a span begins or ends in a space that the offsets leave out,
it silently loses turns or runs on to the end of the text.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp2kit.config.data_schema import DataConfig
from fsdp2kit.data.chat import Chat, Span, supervised_spans
from fsdp2kit.data.formats import Columns, Plain, asked_in, labelled_ids, text_in, texts_of
from fsdp2kit.data.rows import Row
from fsdp2kit.data.special import SpecialTokens, encode_quotes, special_tokens
from fsdp2kit.data.template import Tokenizer
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import stop_tokens

NO_ENDING = -1
Encoded = tuple[list[int], list[bool]]  # token ids, and whether each is supervised


@dataclass(frozen=True)
class Prompt:
    """A prompt that responses are sampled for."""

    row: Mapping[str, Any]
    """All columns of its row."""
    messages: list[dict[str, Any]] | str
    """A conversation; a text if the tokenizer has no chat template. Empty where an environment makes it."""
    ids: list[int]
    """Token ids of the messages with the generation prompt, or of the text."""


def encode_rows(
    rows: Sequence[Row], section: DataConfig, tokenizer: Tokenizer, *, follows: bool = False
) -> list[Encoded]:
    """Token ids and masks of the rows' answers, in their order (`answers_per_row`).

    The assistant's tokens and its end-of-turn tokens are supervised, the whitespace after them is not. A token is the
    assistant's if any of its characters is. The chat template alone decides whether there is a BOS.

    Args:
        section: its `format`, `columns`, `train_on` and `wrap` are read.
        follows: whether rows before these were encoded. An error then does not advise to read other columns.
    """
    named = [Columns(row, section, tokenizer, block=rows, follows=follows) for row in rows]
    if section.format == "tokens":
        return [labelled_ids(row) for row in named]
    if section.format != "text":
        return _encode([text for row in named for text in texts_of(row)], section, tokenizer)
    texts = [text_in(row) for row in named]
    # The tokenizer adds its special tokens. Every token is supervised.
    encoding = tokenizer(texts, truncation=False, verbose=False) if texts else {"input_ids": []}
    return [_ended(ids, [True] * len(ids), tokenizer) for ids in encoding["input_ids"]]


def encode_prompts(rows: Sequence[Row], section: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of rows of the format "prompts", tokenised with the generation prompt.

    Rows of the format "rows" have none: an environment makes them, each time a row is asked.
    """
    if section.format == "rows":
        return [Prompt(row.parse(), [], []) for row in rows]
    found, special = [], special_tokens(tokenizer)
    for row in [Columns(one, section, tokenizer, block=rows) for one in rows]:
        asked = asked_in(row)
        if isinstance(asked, str):
            ids = tokenizer(asked, verbose=False)["input_ids"]
        else:
            chat = row.chat(asked)
            asked = chat.messages
            ids = encode_prompt(chat, tokenizer, special)
        if not ids:
            raise UserError(row.where, "the prompt is empty", "drop the row")
        found.append(Prompt(row.all, asked, ids))
    return found


def encode_prompt(chat: Chat, tokenizer: Tokenizer, special: SpecialTokens) -> list[int]:
    """Token ids of a conversation with the generation prompt.

    Raises:
        UserError: it quotes a special token, and cannot be encoded without it.
    """
    chat = chat.quoting(special, prompt=True)
    return encode_text(chat.text(prompt=True), chat, tokenizer, special)


def encode_text(text: str, chat: Chat, tokenizer: Tokenizer, special: SpecialTokens) -> list[int]:
    """Token ids of a part of the text of a conversation, which `Chat.quoting` returned.

    Raises:
        UserError: it quotes a special token, and cannot be encoded without it.
    """
    if chat.stand_ins:
        return encode_quotes(text, chat.stand_ins, tokenizer, special, where=chat.where)[0]
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _encode(rows: Sequence[Chat | Plain], section: DataConfig, tokenizer: Tokenizer) -> list[Encoded]:
    """Tokenise texts and supervise the tokens that overlap their spans; plain texts get an end-of-text token."""
    if not tokenizer.is_fast:
        raise UserError(
            "model.tokenizer",
            f"{type(tokenizer).__name__} gives no character offsets, which data with prompts needs",
            "use a fast tokenizer (one with a tokenizer.json)",
        )
    encoded, special = [], special_tokens(tokenizer)
    for kind, alike in itertools.groupby(rows, key=type):
        texts, spans, quoting = [], [], dict[int, Chat]()
        for row in alike:
            if isinstance(row, Chat):
                chat = row.quoting(special)
                text, of_text = supervised_spans(chat, special, section.train_on)
                if chat.stand_ins:
                    quoting[len(texts)] = chat
            else:
                text, of_text = row.text, [(row.start, len(row.text))]
            texts.append(text)
            spans.append(of_text)
        encoding = tokenizer(
            texts,
            add_special_tokens=kind is Plain,
            return_attention_mask=False,
            return_token_type_ids=False,
            truncation=False,
            verbose=False,
        )
        assert encoding.encodings is not None, "a fast tokenizer has them"
        # Read the offsets row by row: a batch's are one tuple a token, which slows the garbage collector.
        for at, (ids, of_text) in enumerate(zip(encoding["input_ids"], spans, strict=True)):
            offsets = encoding.encodings[at].offsets
            if chat := quoting.get(at):
                ids, offsets = encode_quotes(texts[at], chat.stand_ins, tokenizer, special, where=chat.where)
            mask = _mask(offsets, of_text)
            encoded.append(_ended(ids, mask, tokenizer) if kind is Plain else (ids, mask))
    return encoded


def _ended(ids: list[int], mask: list[bool], tokenizer: Any) -> Encoded:
    """The tokens with a supervised end-of-text token, whether or not the tokenizer has added one."""
    end = tokenizer.eos_token_id
    if end is None:
        return ids, mask
    if ids and ids[-1] == end:
        return ids, [*mask[:-1], True]
    return [*ids, end], [*mask, True]


def _mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token, given by its characters, overlaps one of the ascending spans.

    Some tokenizers give a space's token empty offsets: it counts as one character where it stands. Tokens that the
    tokenizer adds at the end have the offsets ``(0, 0)`` and are not supervised.
    """
    count = len(offsets)
    while count > 1 and offsets[count - 1] == (0, 0):
        count -= 1
    mask = [False] * len(offsets)
    for start, end in spans:
        # Tokens are in the order of their characters, so a span's tokens are neighbours.
        first = bisect_left(offsets, (start,), hi=count)
        while first > 0 and max(offsets[first - 1][1], offsets[first - 1][0] + 1) > start:
            first -= 1
        last = bisect_left(offsets, (end,), hi=count)
        mask[first:last] = [True] * (last - first)
    return mask


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that may end a turn or a text."""
    ids = {at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(ids | {*stop_tokens(tokenizer)})


def ending_of(ids: np.ndarray, supervised: np.ndarray, special: frozenset[int]) -> int:
    """The last supervised token if it is special; otherwise `NO_ENDING`."""
    targets = np.flatnonzero(supervised)
    last = int(ids[targets[-1]]) if len(targets) else NO_ENDING
    return last if last in special else NO_ENDING
