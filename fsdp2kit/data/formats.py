"""What a row is: from the columns of each format to token ids and masks.

Every row becomes one text with character spans, and is tokenised once, as a whole; the tokenizer's offsets then carry
the spans over to tokens. transformers' own ``assistant_masks`` is not used: where a span begins or ends in a space
that the tokenizer's offsets leave out, it loses turns or runs on to the end of the text, without a word.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fsdp2kit.config.data_schema import COLUMNS
from fsdp2kit.config.schema import ColumnsConfig, DataConfig, DataFormat
from fsdp2kit.data.chat import Chat, Span, TrainOn, check_messages, render_spans
from fsdp2kit.data.rows import Row, without_none
from fsdp2kit.data.template import check_tools
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SIDES = ("chosen", "rejected")
WRAPPED = ("prompt_completion", "preference")  # formats whose plain texts `data.wrap` is about

Encoded = tuple[list[int], list[bool]]  # token ids, and whether each is supervised


@dataclass(frozen=True)
class RowFormat:
    """How rows become tokens."""

    format: DataFormat
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    train_on: TrainOn = "assistant"
    wrap: Literal["none", "chat"] = "none"

    def column(self, name: str) -> str:
        """What the data calls our column ``name``."""
        return getattr(self.columns, name, None) or name


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better and the worse, with the answers' tokens supervised."""

    chosen: Encoded
    rejected: Encoded


@dataclass(frozen=True)
class Prompt:
    """What a model is asked, whose response is sampled."""

    row: Mapping[str, Any]
    """All columns."""
    messages: list[dict[str, Any]] | str
    """A conversation, or a text for a tokenizer without a chat template."""
    ids: list[int]


def row_format(section: DataConfig) -> RowFormat:
    """The format of ``[data]``."""
    return RowFormat(section.format, section.columns, section.train_on, section.wrap)


def row_key(row: Mapping[str, Any], how: RowFormat) -> int:
    """64 bits that a row's content decides, alike for copies of it: those columns that its format reads."""
    content = {name: row[called] for name in COLUMNS[how.format] if (called := how.column(name)) in row}
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


def looks_unwrapped(row: Row, how: RowFormat, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a row's prompt is a plain text, without special tokens, although the tokenizer has a chat template."""
    columns = row.parse()
    answer = columns.get(how.column("chosen" if how.format == "preference" else "completion"))
    prompt = columns.get(how.column("prompt")) or answer  # which may begin with it
    if how.wrap == "chat" or how.format not in WRAPPED or not tokenizer.chat_template:
        return False
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        return False
    return not any(token.special and token.content in prompt for token in tokenizer.added_tokens_decoder.values())


def encode_rows(rows: Sequence[Row], how: RowFormat, tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """Token ids and masks of rows, in their order.

    Supervised are the assistant's tokens and its end-of-turn tokens, not the whitespace after them; a token of which
    any character is the assistant's counts as the assistant's. The template alone decides on BOS.

    Raises:
        UserError: a row is malformed, lacks a column of its format or holds another type; the template cannot say
            which tokens are the assistant's; or the format is "preference".
    """
    named = [(row.parse(), row.where) for row in rows]
    if how.format == "preference":
        raise UserError("data.format", f'"{how.format}" has two answers a row', "encode it with `encode_preferences`")
    if how.format in ("chat", "alpaca"):
        chat = _chat if how.format == "chat" else _alpaca
        return _encode_chats([chat(*one, how, tokenizer) for one in named], how, tokenizer)
    if how.format == "prompt_completion":
        columns = ("prompt", "completion")
        pairs = [(*(_column(row, name, where, how) for name in columns), row, where) for row, where in named]
        return _encode_pairs(pairs, how, tokenizer)
    if how.format == "tokens":
        return [_tokens(*one, how) for one in named]
    texts = [_text(*one, how) for one in named]
    # Special tokens as the tokenizer adds them. All are supervised.
    encoding = tokenizer(texts, truncation=False, verbose=False) if texts else {"input_ids": []}
    return [_ended(ids, [True] * len(ids), tokenizer) for ids in encoding["input_ids"]]


def encode_preferences(rows: Sequence[Row], how: RowFormat, tokenizer: PreTrainedTokenizerBase) -> list[Preference]:
    """Rows with ``chosen`` and ``rejected``, and a ``prompt`` unless both begin with it.

    Raises:
        UserError: as `encode_rows`.
    """
    chosen, rejected = [], []
    for row, where in [(one.parse(), one.where) for one in rows]:
        answers = [_column(row, name, where, how) for name in _SIDES]
        prompt, answers = _split_prompt(row, answers, where, how)
        chosen.append((prompt, answers[0], row, where))
        rejected.append((prompt, answers[1], row, where))
    sides = (_encode_pairs(side, how, tokenizer) for side in (chosen, rejected))
    return [Preference(*pair) for pair in zip(*sides, strict=True)]


def encode_prompts(rows: Sequence[Row], how: RowFormat, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Rows with ``messages``, of which a last answer is left out, or with a ``prompt``, as they are put to the model.

    Raises:
        UserError: a row is malformed, has neither, or the template refuses it.
    """
    found = []
    for row, where in [(one.parse(), one.where) for one in rows]:
        is_named = how.columns.prompt is not None
        prompt = _column(row, "prompt", where, how) if is_named else row.get("prompt")
        if isinstance(prompt, str) and tokenizer.chat_template is None:
            found.append(Prompt(row, prompt, tokenizer(prompt, verbose=False)["input_ids"]))
            continue
        if prompt is None:
            chat = _chat(row, where, how, tokenizer)
        else:
            messages = check_messages(_wrapped(prompt, "user"), where, name="prompt")
            chat = Chat(messages, tokenizer, where=where, **_options(row, where, how))
        asked = chat.messages[: -1 if chat.messages[-1]["role"] == "assistant" else None]
        if not asked:
            raise UserError(where, "there is no prompt before the answer", "begin with a user's message")
        text = chat.text(len(asked), prompt=True)
        found.append(Prompt(row, asked, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))
    if empty := next((row.where for row, one in zip(rows, found, strict=True) if not one.ids), None):
        raise UserError(empty, "the prompt is empty", "drop the row")
    return found


def _chat(row: Mapping[str, Any], where: str, how: RowFormat, tokenizer: PreTrainedTokenizerBase) -> Chat:
    name = how.column("messages")
    if name not in row and how.columns.messages is None and "conversations" in row:
        name = "conversations"
    messages = check_messages(_column(row, "messages", where, how, name=name), where, name=name)
    return Chat(messages, tokenizer, where=where, **_options(row, where, how))


def _alpaca(row: Mapping[str, Any], where: str, how: RowFormat, tokenizer: PreTrainedTokenizerBase) -> Chat:
    """The conversation that an Alpaca row stands for, with the ``system`` and ``history`` that some data adds."""
    asked, answer = (_column(row, name, where, how) for name in ("instruction", "output"))
    if about := row.get(how.column("input")):
        asked = f"{asked}\n\n{about}"
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for turn in (*(row.get("history") or ()), (asked, answer)):
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise UserError(where, "history holds what is no pair", 'write [["question", "answer"], …]')
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return Chat(check_messages(messages, where), tokenizer, where=where, **_options(row, where, how))


def _options(row: Mapping[str, Any], where: str, how: RowFormat) -> dict[str, Any]:
    """A row's tools, and its variables for the template, by the name that transformers and TRL use."""
    variables = row.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise UserError(where, "chat_template_kwargs is no object", 'write {"enable_thinking": false}')
    return {"tools": check_tools(row.get(how.column("tools")), where), "variables": variables}


def _encode_pairs(
    pairs: Sequence[tuple[Any, Any, Mapping[str, Any], str]], how: RowFormat, tokenizer: PreTrainedTokenizerBase
) -> list[Encoded]:
    """Prompts with their answers, as texts or as messages; only the answers are supervised, unless all is.

    Each text gets an end-of-text token, which is supervised.
    """
    encoded: list[Encoded] = []
    if how.wrap == "chat":
        pairs = [(_wrapped(one, "user"), _wrapped(two, "assistant"), row, where) for one, two, row, where in pairs]
    for kinds, group in itertools.groupby(
        pairs, key=lambda pair: (isinstance(pair[0], str), isinstance(pair[1], str))
    ):
        alike = list(group)
        if kinds == (True, True):
            if silent := next((where for _, answer, _, where in alike if not answer.strip()), None):
                what = "the completion is empty, so the model would learn to end the text at once"
                raise UserError(silent, what, "drop the row")
            texts = [prompt + answer for prompt, answer, *_ in alike]
            starts = [0 if how.train_on == "all" else len(prompt) for prompt, *_ in alike]
            spans = [[(start, len(text))] for start, text in zip(starts, texts, strict=True)]
            masked = _encode_spans(texts, spans, tokenizer, add_special_tokens=True)
            encoded += [_ended(ids, mask, tokenizer) for ids, mask in masked]
        elif kinds == (False, False):
            chats = []
            for prompt, answer, row, where in alike:
                before = check_messages(prompt, where, name="prompt")
                messages = [*before, *check_messages(answer, where, name="completion")]
                options = _options(row, where, how)
                learn_from = 0 if how.train_on == "all" else len(before)
                chats.append(Chat(messages, tokenizer, where=where, learn_from=learn_from, **options))
            encoded += _encode_chats(chats, how, tokenizer)
        else:
            what = "prompt and completion are a text and a list of messages"
            raise UserError(alike[0][3], what, "give two of a kind")
    return encoded


def _wrapped(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


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


# What other data calls a column.
_ALSO = {
    "prompt": ("question", "instruction", "query", "input", "problem"),
    "completion": ("response", "answer", "output"),
    "chosen": ("better", "winner", "accepted", "preferred"),
    "rejected": ("worse", "loser", "dispreferred"),
}


def _column(row: Mapping[str, Any], column: str, where: str, how: RowFormat, *, name: str | None = None) -> Any:
    name = name or how.column(column)
    if row.get(name) is None:
        raise _missing(row, column, where, how, name)
    return row[name]


def _missing(row: Mapping[str, Any], column: str, where: str, how: RowFormat, name: str) -> UserError:
    names = [other for other, value in row.items() if value is not None]
    alike = [other for other in names if other.lower() in _ALSO.get(column, ()) or column in other.lower().split("_")]
    near = [*alike, *difflib.get_close_matches(name, names, n=1)]
    if name in row and not near:
        return UserError(where, f"{name!r} is null", "fill it in, or drop the row")
    what = f"the row has no {name!r} (it has: {', '.join(names) or 'nothing'})"
    todo = f'set data.columns.{column} = "{near[0] if near else "…"}"'
    guess = f"did you mean {near[0]!r}? {todo}" if near else f"say what the column is called ({todo})"
    # What learns from pairs of answers, or from prompts, takes no other format.
    is_fixed = how.format in ("preference", "prompts")
    rest = 'train on other data with recipe = "sft"' if is_fixed else "set data.format to what the data is"
    return UserError(where, what, f"{guess}, or {rest}")


def _split_prompt(row: Mapping[str, Any], answers: list[Any], where: str, how: RowFormat) -> tuple[Any, list[Any]]:
    """The prompt of two answers, and the answers without it: in much data both begin with the prompt."""
    prompt = _column(row, "prompt", where, how) if how.columns.prompt else row.get("prompt")
    are_texts = [isinstance(answer, str) for answer in answers]
    if len(set(are_texts)) > 1:
        raise UserError(where, "chosen and rejected are a text and a list of messages", "give two of a kind")
    if prompt is not None and (are_texts[0] or not isinstance(prompt, str)):
        return prompt, _without_prompt(prompt, answers, where)
    if are_texts[0] and (set(_ALSO["prompt"]) & {name.lower() for name, value in row.items() if value}):
        raise _missing(row, "prompt", where, how, "prompt")
    if not are_texts[0]:
        answers = [check_messages(one, where, name=name) for one, name in zip(answers, _SIDES, strict=True)]
    shared: Any = _shared_text(*answers) if are_texts[0] else _shared_messages(*answers)
    if prompt is None and not shared:
        raise UserError(where, "chosen and rejected share no prompt", "give rows with a prompt of their own")
    if prompt is not None and not shared:
        return [{"role": "user", "content": prompt}], answers
    if prompt is not None and prompt.strip() not in [_text_of(message).strip() for message in shared]:
        what = "chosen and rejected are conversations that share a beginning, and prompt is none of its messages"
        raise UserError(where, what, "make the prompt a list of messages, or leave out what is said twice")
    return shared, [answer[len(shared) :] for answer in answers]


def _without_prompt(prompt: Any, answers: list[Any], where: str) -> list[Any]:
    """The answers to a prompt of their kind, which some data repeat in both."""
    if not isinstance(answers[0], str):
        answers = [check_messages(one, where, name=name) for one, name in zip(answers, _SIDES, strict=True)]
        prompt = check_messages(prompt, where, name="prompt")
    repeated = bool(prompt) and all(answer[: len(prompt)] == prompt for answer in answers)
    return [answer[len(prompt) :] for answer in answers] if repeated else answers


def _shared_text(one: str, other: str) -> str:
    """What two texts begin with, up to the end of a word; the space after it is the answers'."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    shared = "".join(letter for letter, _ in pairs)
    end = max((at for at, letter in enumerate(shared) if letter.isspace()), default=0)
    return shared[: end if shared[end : end + 1] == " " else end + 1] if end else ""


def _shared_messages(one: list[Any], other: list[Any]) -> list[Any]:
    """The messages that two conversations begin with; each keeps one at least."""
    pairs = zip(one[:-1], other[:-1], strict=False)
    return [message for message, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _encode_chats(chats: Sequence[Chat], how: RowFormat, tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    rendered = render_spans(chats, tokenizer, train_on=how.train_on)
    texts, spans = [text for text, _ in rendered], [spans for _, spans in rendered]
    return _encode_spans(texts, spans, tokenizer, add_special_tokens=False)


def _encode_spans(
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_special_tokens: bool,
) -> list[Encoded]:
    """Tokenise texts, supervising the tokens that overlap each one's ascending spans.

    Raises:
        UserError: the tokenizer is not a fast one, and so cannot say which characters a token stands for.
    """
    if not tokenizer.is_fast:
        raise UserError(
            "model.tokenizer",
            f"{type(tokenizer).__name__} gives no character offsets, which data with prompts needs",
            "use a fast tokenizer (one with a tokenizer.json)",
        )
    if not texts:
        return []
    encoding = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        truncation=False,
        verbose=False,
    )
    assert encoding.encodings is not None, "a fast tokenizer has them"
    # Offsets of one row at a time: those of a batch are a tuple a token, which keep the garbage collector busy.
    rows = zip(encoding["input_ids"], encoding.encodings, spans, strict=True)
    return [(ids, _mask(row.offsets, where)) for ids, row, where in rows]


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
