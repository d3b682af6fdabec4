"""A tokenizer's special tokens, and texts that quote them.

A chat template's special tokens become tokens. Where a message quotes one of them, like ``<|im_end|>`` in a question
about chat templates, it stays text: otherwise an answer would end within itself, and a question could hold turns that
nobody took. Special tokens that the template never writes, such as those that a user added, come from data alone, and
are read as tokens.

While a conversation is rendered, a stand-in takes the place of the first character of each quoted token. All special
tokens of the rendered text are then the template's own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase as Tokenizer

from fsdp2kit.data.template import Template
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import special_vocabulary, stop_tokens

# Unicode noncharacters, which text must not hold. `fsdp2kit.data.template` uses U+FDD0 and U+FDD1.
_STAND_INS = [chr(at) for at in range(0xFDD2, 0xFDF0)]
_FIRST, *_DIGITS = [chr(plane << 16 | 0xFFFE | low) for plane in range(1, 17) for low in (0, 1)]
_NAMES = ("role", "type")  # their values name something, and no text of a message
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class SpecialTokens:
    """The texts of a tokenizer's special tokens."""

    texts: tuple[str, ...]
    """All of them, the longest first. Any may end a turn."""
    stops: tuple[str, ...]
    """Those at which generation stops, the longest first."""
    bos: str
    """Begins a text; "" without one."""
    eos: str
    """Ends a text; "" without one."""
    guarded: frozenset[str]
    """Those that a conversation's texts only quote: the template's own, and those that begin, end or fill up texts."""

    def may_be_in(self, text: str) -> bool:
        """Whether a text may hold a special token: one begins like it. Fast."""
        return any(first in text for first in self._firsts) and self._begins.search(text) is not None

    def starts_in(self, text: str) -> list[int]:
        """Where special tokens begin in a text, ascending; they may overlap."""
        return [found.start() for found in self._begins.finditer(text) if self.at(text, found.start())]

    def found_in(self, text: str) -> list[str]:
        """The special tokens that begin in a text, in their order."""
        return [self.at(text, start) for start in self.starts_in(text)]

    def at(self, text: str, start: int) -> str:
        """The longest special token that begins at a place in a text; "" without one."""
        for size in self._sizes:
            if text[start : start + size] in self._known:
                return text[start : start + size]
        return ""

    def end_of_stop(self, text: str, end: int) -> int:
        """Where the stop token ends that follows a place in a text, perhaps after space; without one the place."""
        space = _SPACE.match(text, end)
        start = space.end() if space else end
        return next((start + len(stop) for stop in self.stops if text.startswith(stop, start)), end)

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.texts)

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return sorted({len(text) for text in self.texts}, reverse=True)

    @functools.cached_property
    def _firsts(self) -> list[str]:
        return sorted({text[0] for text in self.texts})

    @functools.cached_property
    def _begins(self) -> re.Pattern[str]:
        """Matches the first character of what may be a special token, which it tells by the second."""
        seconds: dict[str, set[str]] = {}
        for text in self.texts:
            seconds.setdefault(text[0], set()).add(text[1:2])
        choices = []
        for first, after in sorted(seconds.items()):
            is_alone = "" in after
            letters = "".join(re.escape(one) for one in sorted(after))
            choices.append(re.escape(first) + ("" if is_alone else f"(?=[{letters}])"))
        return re.compile("|".join(choices) or r"(?!)")


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """The special tokens of a tokenizer."""
    eos = str(tokenizer.eos_token or "")
    added = tokenizer.added_tokens_decoder
    stops = {added[at].content for at in stop_tokens(tokenizer) if at in added}
    stops = {text for text in (*stops, eos) if text}
    texts = {text for text in special_vocabulary(tokenizer) if text} | stops
    named = {str(one) for one in tokenizer.special_tokens_map.values() if isinstance(one, str | AddedToken)}
    template = tokenizer.chat_template or ""
    source = "\n".join(template.values()) if isinstance(template, dict) else template
    guarded = {text for text in texts if text in stops or text in named}
    guarded |= _written(tokenizer, source, tuple(sorted(texts)))
    bos = str(tokenizer.bos_token or "")
    return SpecialTokens(_longest_first(texts), _longest_first(stops), bos, eos, frozenset(guarded))


_USER = {"role": "user", "content": "a"}
_CALL = {"type": "function", "id": "call00000", "function": {"name": "b", "arguments": {"c": "d"}}}
# What templates write special tokens around: every role, a call and its result.
_PROBES: list[list[dict[str, Any]]] = [
    [_USER],
    [{"role": "system", "content": "e"}, _USER],
    [_USER, {"role": "assistant", "content": "f"}, _USER],
    [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "b", "tool_call_id": "call00000", "content": "g"},
    ],
]


@functools.lru_cache(maxsize=4)
def _written(tokenizer: Any, source: str, texts: tuple[str, ...]) -> frozenset[str]:
    """The special tokens that a chat template writes: as they stand in it, or put together with a role."""
    found = {text for text in texts if text in source}
    for messages in _PROBES if source else ():
        with contextlib.suppress(UserError):  # it may not take the role, or only objects or JSON as arguments
            rendered = Template(tokenizer, tools=None, variables={}, where="model.chat_template").render(messages)
            found |= {text for text in texts if text in rendered}
    return frozenset(found)


def _longest_first(texts: set[str]) -> tuple[str, ...]:
    return tuple(sorted(texts, key=lambda text: (-len(text), text)))


def without_quotes(values: Any, special: SpecialTokens, *, where: str) -> tuple[Any, dict[str, str], list[str]]:
    """Nested lists and dicts with stand-ins in the texts that quote special tokens.

    A token may also be quoted in parts: by two texts that follow each other. Without quotes, the values are returned
    as they are.

    Returns:
        The values, what each stand-in stands for, and the special tokens in the texts that are no quotes.

    Raises:
        UserError: no stand-in is left, since the texts hold all of them; it names ``where``.
    """
    texts: list[str] = []
    names: set[str] = set()
    _collect(values, texts, names)
    joined = "".join(texts)
    if not special.may_be_in(joined) and not special.may_be_in("\n".join(names)):
        return values, {}, []
    texts.clear()
    _changed(values, lambda text: texts.append(text) or text, special)
    joined = "".join(texts)
    found = {start: special.at(joined, start) for start in special.starts_in(joined)}
    starts = [start for start, token in found.items() if token in special.guarded]
    own = sorted({token for token in found.values() if token not in special.guarded})
    if not starts:
        return values, {}, own
    free = [one for one in _STAND_INS if one not in joined]
    quoted = dict.fromkeys(joined[start] for start in starts)
    if len(quoted) > len(free):
        what = "the row quotes a special token, and holds all of Unicode's noncharacters U+FDD2 to U+FDEF"
        raise UserError(where, what, "take the noncharacters out of the row, or drop the row")
    stand_in_of = dict(zip(quoted, free, strict=False))
    letters = list(joined)
    for start in starts:
        letters[start] = stand_in_of[letters[start]]
    ends = itertools.accumulate(map(len, texts))
    parts = iter(["".join(letters[end - len(text) : end]) for text, end in zip(texts, ends, strict=True)])
    changed = _changed(values, lambda _: next(parts), special)
    return changed, {one: letter for letter, one in stand_in_of.items()}, own


def _collect(value: Any, texts: list[str], names: set[str]) -> None:
    """Append the texts of a nested value in their order, and add its keys, and the texts under `_NAMES`."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, dict):
        for key, one in value.items():
            names.add(str(key))
            if key in _NAMES and isinstance(one, str):
                names.add(one)
            else:
                _collect(one, texts, names)
    elif isinstance(value, list | tuple):
        for one in value:
            _collect(one, texts, names)


def _changed(value: Any, change: Callable[[str], str], special: SpecialTokens) -> Any:
    """The nested value with each text changed. Keys and names are left, unless they quote a special token."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        found = {}
        for key, one in value.items():
            name = change(key) if isinstance(key, str) and special.starts_in(key) else key
            is_name = key in _NAMES and isinstance(one, str) and not special.starts_in(one)
            found[name] = one if is_name else _changed(one, change, special)
        return found
    if isinstance(value, list | tuple):
        return [_changed(one, change, special) for one in value]
    return value


def restored(text: str, stand_ins: Mapping[str, str]) -> str:
    """The text with the characters that stand-ins stand for."""
    return text.translate({ord(one): letter for one, letter in stand_ins.items()})


def encode_quotes(
    text: str,
    usual: Sequence[int],
    stand_ins: Mapping[str, str],
    tokenizer: Tokenizer,
    special: SpecialTokens,
    *,
    where: str,
) -> tuple[list[int], list[tuple[int, int]]]:
    """The token ids of a text with stand-ins, and each token's characters.

    The special tokens of the text get their ids, and what stood in the place of stand-ins is encoded as plain text.

    Args:
        usual: the token ids that the tokenizer gives the text, without special tokens around it.

    Raises:
        UserError: the tokenizer cannot encode special tokens as text; it names ``where``.
    """
    what = f"the row quotes a special token, which {type(tokenizer).__name__} cannot read as text"
    todo = "take the quoted token out of the row, or drop the row"
    if not tokenizer.is_fast:
        raise UserError(where, what, f"use a fast tokenizer (one with a tokenizer.json), or {todo}")
    backend, aliases, ids_of = _for_quotes(tokenizer, len(tokenizer), special.texts)
    parts = []
    end = 0
    for start in special.starts_in(text):
        if start >= end:
            token = special.at(text, start)
            parts += [text[end:start], aliases.get(token, token)]
            end = start + len(token)
    aliased = "".join([*parts, text[end:]])
    # The copy must read the text as the tokenizer does, with the aliases in the place of special tokens.
    checked = backend.encode(aliased, add_special_tokens=False)
    is_usual = [ids_of.get(one, one) for one in checked.ids] == list(usual)
    found = backend.encode(restored(aliased, stand_ins), add_special_tokens=False)
    special_ids = {*ids_of.values()}
    unknown = tokenizer.unk_token_id  # of characters, which quote nothing
    from_text = [one for one in found.ids if one != unknown and one in special_ids]
    if _FIRST in text or not is_usual or from_text:
        raise UserError(where, what, todo)
    return [ids_of.get(one, one) for one in found.ids], found.offsets


@functools.lru_cache(maxsize=1)
def _for_quotes(tokenizer: Any, _: int, texts: tuple[str, ...]) -> tuple[Backend, dict[str, str], dict[int, int]]:
    """A copy of a fast tokenizer that reads special tokens as text.

    Special tokens themselves are written as aliases, which are as long as the tokens and occur in no text.

    Returns:
        The copy, the alias of each text, and the special token's id for the id of each alias.
    """
    backend: Backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    added = {token.content: (at, token) for at, token in tokenizer.added_tokens_decoder.items()}
    aliases: dict[str, str] = {}
    ids_of: dict[int, int] = {}
    of_size: dict[int, Any] = {}
    for text in texts:
        # The first character begins aliases alone, so none of them is found within another.
        numbers = of_size.setdefault(len(text), itertools.product(_DIGITS, repeat=len(text) - 1))
        digits = next(numbers, None)
        if digits is None or text not in added:
            continue
        at, token = added[text]
        alias = _FIRST + "".join(digits)
        like = AddedToken(
            alias,
            special=False,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
            normalized=token.normalized,
        )
        backend.add_tokens([like])
        aliases[text] = alias
        new = backend.token_to_id(alias)
        assert new is not None, "it was added"
        ids_of[new] = at
    return backend, aliases, ids_of
