"""What a row is: from the columns of each format to token ids and masks.

Every row becomes one text with character spans, and is tokenised once, as a whole; the tokenizer's offsets then carry
the spans over to tokens. transformers' own ``assistant_masks`` is not used: where a span begins or ends in a space
that the tokenizer's offsets leave out, it loses turns or runs on to the end of the text, without a word.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fsdp2kit.config.data_schema import COLUMNS, DataConfig
from fsdp2kit.data.chat import Chat, Span, Tokenizer, check_messages, supervised_spans, turn_endings
from fsdp2kit.data.columns import ALSO, Columns, Messages, messages_in
from fsdp2kit.data.rows import Row, without_none
from fsdp2kit.errors import UserError

_SIDES = ("chosen", "rejected")
WRAPPED = ("prompt_completion", "preference")  # formats whose plain texts `data.wrap` is about

Encoded = tuple[list[int], list[bool]]  # token ids, and whether each is supervised


@dataclass(frozen=True)
class Prompt:
    """What a model is asked, whose response is sampled."""

    row: Mapping[str, Any]
    """All columns."""
    messages: list[dict[str, Any]] | str
    """A conversation, or a text for a tokenizer without a chat template."""
    ids: list[int]


def rows_together(section: DataConfig) -> int:
    """Rows of tokens that belong together: the two answers of a preference."""
    return 2 if section.format == "preference" else 1


def row_key(row: Mapping[str, Any], section: DataConfig) -> int:
    """64 bits that a row's content decides, alike for copies of it: those columns that its format reads."""
    content = {name: row[called] for name in COLUMNS[section.format] if (called := section.column(name)) in row}
    return content_key(without_none(content))


def content_key(content: Any) -> int:
    """64 bits that a value, as JSON, decides."""
    text = json.dumps(content, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def key_border(share: float) -> int:
    """The `row_key` that this share of all rows is below."""
    return int(share * 2**64)


def hold_out_border(keys: np.ndarray, held_out: float) -> int:
    """The `row_key` below which rows are held out: a share of them, or (an int) so many, with their copies.

    Args:
        keys: of all rows, uint64.
    """
    everything = np.unique(keys)
    if isinstance(held_out, int):
        return int(everything[min(held_out, len(everything)) - 1]) + 1
    return max(key_border(held_out), int(everything[0]) + 1)


def looks_unwrapped(row: Row, section: DataConfig, tokenizer: Tokenizer) -> bool:
    """Whether a row's prompt is a plain text, without special tokens, although the tokenizer has a chat template.

    Args:
        section: its format is one of `WRAPPED`.
    """
    columns = row.parse()
    answer = messages_in(columns.get(section.column("chosen" if section.format == "preference" else "completion")))
    prompt = messages_in(columns.get(section.column("prompt"))) or answer  # which may begin with it
    if section.wrap == "chat" or not tokenizer.chat_template:
        return False
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        return False
    return not any(token.special and token.content in prompt for token in tokenizer.added_tokens_decoder.values())


def encode_rows(
    rows: Sequence[Row], section: DataConfig, tokenizer: Tokenizer, *, follows: bool = False
) -> list[Encoded]:
    """Token ids and masks of rows, in their order: one of each, or of preferences two, the better answer first.

    Supervised are the assistant's tokens and its end-of-turn tokens, not the whitespace after them; a token of which
    any character is the assistant's counts as the assistant's. The template alone decides on BOS.

    Args:
        section: its `format`, `columns`, `train_on` and `wrap` say what rows are.
        follows: whether rows before these were encoded; then advice to read other columns would break them.

    Raises:
        UserError: a row is malformed, lacks a column of its format or holds another type; the template cannot say
            which tokens are the assistant's.
    """
    named = [Columns(row, section, tokenizer, block=rows, follows=follows) for row in rows]
    if section.format == "tokens":
        return [_tokens(row) for row in named]
    if section.format != "text":
        return _encode([text for row in named for text in _texts_of(row)], section, tokenizer)
    texts = [_text(row) for row in named]
    # Special tokens as the tokenizer adds them. All are supervised.
    encoding = tokenizer(texts, truncation=False, verbose=False) if texts else {"input_ids": []}
    return [_ended(ids, [True] * len(ids), tokenizer) for ids in encoding["input_ids"]]


def chats_of(rows: Sequence[Row], section: DataConfig, tokenizer: Tokenizer) -> list[Chat]:
    """The conversations that `encode_rows` renders: one of each row, or of preferences two; plain texts are left out.

    Raises:
        UserError: as `encode_rows`.
    """
    if section.format in ("text", "tokens"):
        return []
    named = [Columns(row, section, tokenizer, block=rows) for row in rows]
    return [text for row in named for text in _texts_of(row) if isinstance(text, Chat)]


def _texts_of(row: Columns) -> Sequence[Chat | _Plain]:
    """What a row with prompts and answers is: a text, or of a preference two."""
    kind = row.section.format
    if kind == "preference":
        return _answers(row)
    if kind == "alpaca":
        return [_alpaca(row)]
    if kind == "prompt_completion":
        prompt, completion = messages_in(row["prompt"]), row["completion"]
        return [_pair(row, prompt, completion if isinstance(prompt, str) else messages_in(completion))]
    if kind != "chat":
        raise ValueError(f"rows of the format {kind!r} are not encoded here")
    messages = row.messages()
    if messages is None:
        raise row.missing("messages")
    return [row.chat(messages)]


def encode_prompts(rows: Sequence[Row], section: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """Rows with ``messages``, whose last answer is left out, or with a ``prompt``, as they are put to the model.

    Raises:
        UserError: a row is malformed, has neither or both, or the template refuses it.
    """
    found = []
    for row in [Columns(one, section, tokenizer, block=rows) for one in rows]:
        asked = _asked(row)
        if isinstance(asked, str):
            ids = tokenizer(asked, verbose=False)["input_ids"]
        else:
            chat = row.chat(asked)
            asked = chat.messages
            ids = tokenizer(chat.text(prompt=True), add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise UserError(row.where, "the prompt is empty", "drop the row")
        found.append(Prompt(row.all, asked, ids))
    return found


def _asked(row: Columns) -> Messages | str:
    """What a row of prompts asks: the column that is named or there; a text where the tokenizer has no template."""
    prompt = None if row.is_named("messages") else messages_in(row.given("prompt"))
    messages = None if row.is_named("prompt") else row.messages()
    given = [] if prompt is None else [check_messages(_wrapped(prompt, "user"), row.where, name="prompt")]
    found = [one[: -1 if one[-1]["role"] == "assistant" else None] for one in (*given, messages) if one is not None]
    if not found:
        raise row.missing("prompt" if row.rows_with("prompt") else "messages")
    if not all(found):
        raise UserError(row.where, "there is no prompt before the answer", "begin with a user's message")
    if found[0] != found[-1]:
        raise row.ambiguous(("prompt", "prompt"), ("messages", row.conversations()[0]))
    return prompt if isinstance(prompt, str) and row.tokenizer.chat_template is None else found[0]


def _alpaca(row: Columns) -> Chat:
    """The conversation that an Alpaca row stands for, with the ``system`` and ``history`` that some data adds."""
    asked, answer = row["instruction"], row["output"]
    if about := row.get("input"):
        asked = f"{asked}\n\n{about}"
    messages = [{"role": "system", "content": row.all["system"]}] if row.all.get("system") else []
    for turn in (*(row.from_json("history") or ()), (asked, answer)):
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise UserError(row.where, "history holds what is no pair", 'write [["question", "answer"], …]')
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return row.chat(check_messages(messages, row.where))


class _Plain(NamedTuple):
    """A prompt and its answer, as one text."""

    text: str
    start: int
    """Of what is supervised."""


def _pair(row: Columns, prompt: Any, answer: Any) -> Chat | _Plain:
    """A prompt with its answer, as texts or as messages; only the answer is supervised, unless all is."""
    if row.section.wrap == "chat":
        prompt, answer = _wrapped(prompt, "user"), _wrapped(answer, "assistant")
    learns_all = row.section.train_on == "all"
    if isinstance(prompt, str) != isinstance(answer, str):
        what = "prompt and completion are a text and a list of messages"
        raise UserError(row.where, what, "give two of a kind")
    if isinstance(prompt, str):
        if not answer.strip():
            what = "the completion is empty, so the model would learn to end the text at once"
            raise UserError(row.where, what, "drop the row")
        return _Plain(prompt + answer, 0 if learns_all else len(prompt))
    before = check_messages(prompt, row.where, name="prompt")
    messages = [*before, *check_messages(answer, row.where, name="completion")]
    return row.chat(messages, learn_from=0 if learns_all else len(before))


def _wrapped(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _answers(row: Columns) -> list[Chat | _Plain]:
    """``chosen`` and ``rejected``, each with the ``prompt``: that of the row, or what both begin with."""
    answers: list[Any] = [messages_in(row[name]) for name in _SIDES]
    prompt, where = messages_in(row.given("prompt")), row.where
    are_texts = isinstance(answers[0], str)
    if are_texts != isinstance(answers[1], str):
        raise UserError(where, "chosen and rejected are a text and a list of messages", "give two of a kind")
    if are_texts:
        if prompt is None:
            if set(ALSO["prompt"]) & {name.lower() for name, value in row.all.items() if value}:
                raise row.missing("prompt")
            prompt = _shared_text(*answers) or None
        if isinstance(prompt, str) and all(answer.startswith(prompt) for answer in answers):
            answers = [answer[len(prompt) :] for answer in answers]
    else:
        answers = [check_messages(one, where, name=name) for one, name in zip(answers, _SIDES, strict=True)]
        prompt, repeated = _said_before(prompt, answers, where)
        answers = [answer[repeated:] for answer in answers]
    if prompt is None:
        raise UserError(where, "chosen and rejected share no prompt", "give rows with a prompt of their own")
    return [_pair(row, prompt, answer) for answer in answers]


def _said_before(prompt: Any, answers: Sequence[Messages], where: str) -> tuple[Messages | None, int]:
    """The messages before two answers, and how many of them the answers repeat; None: there are none.

    The answers may begin with more of the conversation than the prompt has, or with its last messages.
    """
    # Each answer keeps one message at least.
    shared = answers[0][: _common(answers[0][:-1], answers[1][:-1])]
    if prompt is None:
        return shared or None, len(shared)
    if isinstance(prompt, str):
        said = [message["content"].strip() for message in shared if isinstance(message.get("content"), str)]
        if shared and prompt.strip() not in said:
            what = "chosen and rejected are conversations that share a beginning, and prompt is none of its messages"
            raise UserError(where, what, "make the prompt a list of messages, or leave out what is said twice")
        return shared or _wrapped(prompt, "user"), len(shared)
    prompt = check_messages(prompt, where, name="prompt")
    for start in range(len(shared) - len(prompt) + 1):
        if shared[start : start + len(prompt)] == prompt:
            return shared[: start + len(prompt)], start + len(prompt)
    sizes = range(min(len(prompt), len(shared)), 0, -1)
    return prompt, next((size for size in sizes if prompt[-size:] == shared[:size]), 0)


def _shared_text(one: str, other: str) -> str:
    """What two texts begin with, up to the end of a word; the space after it is the answers'."""
    shared = one[: _common(one, other)]
    end = max((at for at, letter in enumerate(shared) if letter.isspace()), default=0)
    return shared[: end if shared[end : end + 1] == " " else end + 1] if end else ""


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many letters or messages two answers begin with alike."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def _tokens(row: Columns) -> Encoded:
    """Rows of token ids, with the labels of transformers' collators: each token itself, or −100; not shifted."""
    where, ids = row.where, _integers(row["input_ids"], "input_ids", row.where)
    if wrong := next((token for token in ids if not 0 <= token < 2**31), None):
        raise UserError(where, f"input_ids holds {wrong}", "token ids are not negative, and fit into 32 bits")
    from fsdp2kit.model.loss_head import IGNORE  # here, so that other formats' worker processes need no torch

    labels = row.get("labels")
    if 0 in (row.all.get("attention_mask") or []):
        raise UserError(where, "attention_mask holds zeros: the row is padded", "give rows without padding")
    if labels is None or row.section.train_on == "all":
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


def _text(row: Columns) -> str:
    text = row["text"]
    if not isinstance(text, str):
        raise UserError(row.where, f"text is of type {type(text).__name__}", "give rows with a string `text`")
    return text


def _encode(rows: Sequence[Chat | _Plain], section: DataConfig, tokenizer: Tokenizer) -> list[Encoded]:
    """Tokenise texts, supervising the tokens that overlap their spans; plain texts get an end-of-text token, too.

    Raises:
        UserError: the tokenizer is not a fast one, and so cannot say which characters a token stands for.
    """
    if not tokenizer.is_fast:
        raise UserError(
            "model.tokenizer",
            f"{type(tokenizer).__name__} gives no character offsets, which data with prompts needs",
            "use a fast tokenizer (one with a tokenizer.json)",
        )
    encoded, endings = [], turn_endings(tokenizer)
    for kind, alike in itertools.groupby(rows, key=type):
        texts, spans = [], []
        for row in alike:
            if isinstance(row, Chat):
                text, of_text = supervised_spans(row, endings, section.train_on)
            else:
                text, of_text = row.text, [(row.start, len(row.text))]
            texts.append(text)
            spans.append(of_text)
        encoding = tokenizer(
            texts,
            add_special_tokens=kind is _Plain,
            return_attention_mask=False,
            return_token_type_ids=False,
            truncation=False,
            verbose=False,
        )
        assert encoding.encodings is not None, "a fast tokenizer has them"
        # Offsets of one row at a time: those of a batch are a tuple a token, which keep the garbage collector busy.
        for ids, of_row, of_text in zip(encoding["input_ids"], encoding.encodings, spans, strict=True):
            mask = _mask(of_row.offsets, of_text)
            encoded.append(_ended(ids, mask, tokenizer) if kind is _Plain else (ids, mask))
    return encoded


def _ended(ids: list[int], mask: list[bool], tokenizer: Any) -> Encoded:
    """The row with the end-of-text token, supervised, whether or not the tokenizer adds one."""
    end = tokenizer.eos_token_id
    if end is None:
        return ids, mask
    if ids and ids[-1] == end:
        return ids, [*mask[:-1], True]
    return [*ids, end], [*mask, True]


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
