"""What a row is: from the columns of each format to token ids and masks.

Every row becomes one text with character spans, and is tokenised once, as a whole; the tokenizer's offsets then carry
the spans over to tokens. transformers' own ``assistant_masks`` is not used: where a span begins or ends in a space
that the tokenizer's offsets leave out, it loses turns or runs on to the end of the text, without a word.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fsdp2kit.config.schema import ColumnsConfig, DataConfig
from fsdp2kit.data.chat import Conversation, Span, TrainOn, check_messages, render_spans
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Format = Literal["chat", "prompt_completion", "text", "tokens", "preference"]
Encoded = tuple[list[int], list[bool]]  # token ids, and whether each is supervised


@dataclass(frozen=True)
class RowFormat:
    """How rows become tokens."""

    format: Format
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    train_on: TrainOn = "assistant"

    def column(self, name: str) -> str:
        """What the data calls our column ``name``."""
        return getattr(self.columns, name) or name


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better and the worse, with the answers' tokens supervised."""

    chosen: Encoded
    rejected: Encoded


def row_format(section: DataConfig, *, format: str | None = None, columns: ColumnsConfig | None = None) -> RowFormat:
    """The format of ``[data]``, or where they are given that of one of its sources."""
    return RowFormat(format or section.format, columns or section.columns, section.train_on)  # pyright: ignore


def encode_rows(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], how: RowFormat, tokenizer: PreTrainedTokenizerBase
) -> list[Encoded]:
    """Token ids and masks of rows, in their order.

    Args:
        names: what errors call each row.

    Raises:
        UserError: a row lacks a column of its format or holds another type; or the format is "preference".
    """
    if not rows:
        return []
    if how.format == "preference":
        raise UserError("data.format", f'"{how.format}" has two answers a row', "encode it with `encode_preferences`")
    named = list(zip(rows, names, strict=True))
    if how.format == "chat":
        return encode_chats([_conversation(*one, how) for one in named], tokenizer, train_on=how.train_on)
    if how.format == "prompt_completion":
        columns = ("prompt", "completion")
        pairs = [(*(_column(row, name, where, how) for name in columns), row, where) for row, where in named]
        return _encode_pairs(pairs, how, tokenizer)
    if how.format == "text":
        return _encode_texts([_text(*one, how) for one in named], tokenizer)
    return [_tokens(*one, how) for one in named]


def encode_preferences(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], how: RowFormat, tokenizer: PreTrainedTokenizerBase
) -> list[Preference]:
    """Rows with ``chosen`` and ``rejected``, and a ``prompt`` unless both are whole conversations that share one.

    Raises:
        UserError: as `encode_rows`.
    """
    sides = []
    for name in ("chosen", "rejected"):
        other = "rejected" if name == "chosen" else "chosen"
        pairs = []
        for row, where in zip(rows, names, strict=True):
            answer = _column(row, name, where, how)
            prompt = row.get(how.column("prompt"))
            if prompt is None:
                prompt, answer = _shared_prompt(answer, _column(row, other, where, how), where, name)
            pairs.append((prompt, answer, row, where))
        sides.append(_encode_pairs(pairs, how, tokenizer))
    return [Preference(chosen, rejected) for chosen, rejected in zip(*sides, strict=True)]


def _conversation(row: Mapping[str, Any], where: str, how: RowFormat) -> Conversation:
    name = how.column("messages")
    if name not in row and how.columns.messages is None and "conversations" in row:
        name = "conversations"
    messages = check_messages(_column(row, "messages", where, how, name=name), where, name=name)
    return Conversation(messages, _tools(row, where, how), where, options=_options(row, where))


def _tools(row: Mapping[str, Any], where: str, how: RowFormat) -> Any:
    tools = row.get(how.column("tools")) or None
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) or None
    except json.JSONDecodeError as error:
        raise UserError(where, f"its tools are not valid JSON ({error.msg})", "give a list of JSON schemas") from None


def _options(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Variables for the template, like ``enable_thinking``, by the name that transformers and TRL use."""
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise UserError(where, "chat_template_kwargs is no object", 'write {"enable_thinking": false}')
    return dict(options)


def _encode_pairs(
    pairs: Sequence[tuple[Any, Any, Mapping[str, Any], str]], how: RowFormat, tokenizer: PreTrainedTokenizerBase
) -> list[Encoded]:
    """Prompts with their answers, as texts or as messages; only the answers are supervised, unless all is."""
    chats: dict[int, Conversation] = {}
    texts: dict[int, tuple[str, str]] = {}
    for at, (prompt, answer, row, where) in enumerate(pairs):
        if isinstance(prompt, str) and isinstance(answer, str):
            texts[at] = (prompt, answer)
            continue
        if isinstance(prompt, str) or isinstance(answer, str):
            raise UserError(where, "prompt and completion are a text and a list of messages", "give two of a kind")
        before = check_messages(prompt, where, name="prompt")
        messages = [*before, *check_messages(answer, where, name="completion")]
        chats[at] = Conversation(messages, _tools(row, where, how), where, len(before), _options(row, where))
    of_chats = encode_chats(list(chats.values()), tokenizer, train_on=how.train_on)
    of_texts = _encode_text_pairs(list(texts.values()), how.train_on, tokenizer)
    encoded = dict(zip([*chats, *texts], [*of_chats, *of_texts], strict=True))
    return [encoded[at] for at in range(len(pairs))]


def _encode_text_pairs(
    pairs: Sequence[tuple[str, str]], train_on: TrainOn, tokenizer: PreTrainedTokenizerBase
) -> list[Encoded]:
    """Each prompt with its completion as one text, and an end-of-text token, which is supervised."""
    if not pairs:
        return []
    require_offsets(tokenizer)
    texts = [prompt + completion for prompt, completion in pairs]
    spans: list[list[Span]] = [
        [(0 if train_on == "all" else len(prompt), len(prompt + rest))] for prompt, rest in pairs
    ]
    encoded = encode_spans(texts, spans, tokenizer, add_special_tokens=True)
    return [_ended(ids, mask, tokenizer) for ids, mask in encoded]


def _encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """Special tokens as the tokenizer adds them, and an end-of-text token where there is one. All supervised."""
    encoding = tokenizer(list(texts), truncation=False, verbose=False)
    return [_ended(ids, [True] * len(ids), tokenizer) for ids in encoding["input_ids"]]


def _ended(ids: list[int], mask: list[bool], tokenizer: Any) -> Encoded:
    """The row with the end-of-text token, supervised, whether or not the tokenizer adds one."""
    end = tokenizer.eos_token_id
    if end is None:
        return ids, mask
    if ids and ids[-1] == end:
        return ids, [*mask[:-1], True]
    return [*ids, end], [*mask, True]


def _tokens(row: Mapping[str, Any], where: str, how: RowFormat) -> Encoded:
    """Rows of token ids, with the labels of transformers' collators: each token itself, or −100; not shifted."""
    ids = _integers(_column(row, "input_ids", where, how), "input_ids", where)
    if wrong := next((token for token in ids if not 0 <= token < 2**31), None):
        raise UserError(where, f"input_ids holds {wrong}", "token ids are not negative, and fit into 32 bits")
    from fsdp2kit.model.loss_head import IGNORE  # here, so that other formats' worker processes need no torch

    labels = row.get(how.column("labels"))
    if 0 in (row.get("attention_mask") or []):
        raise UserError(where, "attention_mask holds zeros: the row is padded", "give rows without padding")
    if labels is None or how.train_on == "all":
        return ids, [True] * len(ids)
    labels = _integers(labels, "labels", where)
    if len(labels) != len(ids):
        raise UserError(where, f"{len(labels)} labels for {len(ids)} input_ids", "give one label a token")
    for at, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, IGNORE):
            what = f"labels[{at}] is {label}, neither input_ids[{at}] = {token} nor {IGNORE}"
            raise UserError(where, what, "labels are not shifted here: the loss shifts them")
    return ids, [label != IGNORE for label in labels]


def _integers(value: Any, name: str, where: str) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise UserError(where, f"{name} is of type {type(value).__name__}", f"give {name} as a list of integers")
    if wrong := next((item for item in value if type(item) is not int), None):
        raise UserError(where, f"{name} holds {wrong!r}", f"give {name} as a list of integers")
    return list(value)


def _text(row: Mapping[str, Any], where: str, how: RowFormat) -> str:
    text = _column(row, "text", where, how)
    if not isinstance(text, str):
        raise UserError(where, f"text is of type {type(text).__name__}", "give rows with a string `text`")
    return text


def _column(row: Mapping[str, Any], column: str, where: str, how: RowFormat, *, name: str | None = None) -> Any:
    name = name or how.column(column)
    if row.get(name) is None:
        raise UserError(
            where,
            f"the row has no {name!r} (it has: {', '.join(map(str, row)) or 'nothing'})",
            f'say what the column is called with data.columns.{column} = "…", or set data.format to what the data is',
        )
    return row[name]


def _shared_prompt(answer: Any, other: Any, where: str, name: str) -> tuple[Any, Any]:
    """The messages that two conversations share, and the rest of the first."""
    mine, theirs = (check_messages(messages, where, name=label) for messages, label in ((answer, name), (other, "it")))
    shared = 0
    while shared < min(len(mine), len(theirs)) - 1 and mine[shared] == theirs[shared]:
        shared += 1
    if not shared:
        raise UserError(where, "chosen and rejected share no prompt", "give rows with a prompt of their own")
    return mine[:shared], mine[shared:]


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
    texts, spans = zip(*render_spans(conversations, tokenizer, train_on=train_on), strict=True)
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
