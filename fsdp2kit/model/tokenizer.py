"""The tokenizer, with the user's chat template if one is given, and the special tokens that the template needs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.config.section import TEMPLATES, may_be_hub_id, ready_template
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import todo_of_cache
from fsdp2kit.job.distributed import agreement
from fsdp2kit.model.assets import eos_ids, find_hf_dir
from fsdp2kit.model.hf_config import load_hf_config

# A directory must hold one of these; transformers would otherwise make up an empty tokenizer from config.json.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
)

# What templates write between turns as single tokens.
_MARKER = re.compile(r"<[|｜][^\s<>|｜]+[|｜]>|<(?:start|end)_of_turn>")
_ANSWER = "fsdp2kit_answer"
_QUESTION = {"role": "user", "content": "a"}
_SAID = {"role": "assistant", "content": _ANSWER}
_CALL = {"id": "a12345678", "type": "function", "function": {"name": "a", "arguments": {"a": _ANSWER}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "content": "a", "name": "a", "tool_call_id": "a12345678"}


@dataclass(frozen=True)
class TokenizerFacts:
    """What a run knows of a tokenizer beside what its files say. It travels with the tokenizer, also to processes."""

    new: tuple[int, ...] = ()
    """Ids that `build_tokenizer` added to the vocabulary, ascending."""
    stops: tuple[int, ...] = ()
    """Ids at which generation of the model stops, beside the tokenizer's EOS."""
    day: date | None = None
    """The day that the chat template writes; None: today."""


def facts_of(tokenizer: PreTrainedTokenizerBase) -> TokenizerFacts:
    """What is known of a tokenizer; of one from elsewhere nothing."""
    return vars(tokenizer).get("fsdp2kit_facts", TokenizerFacts())


def set_facts(tokenizer: PreTrainedTokenizerBase, **facts: Any) -> None:
    """Change some of the `TokenizerFacts` of a tokenizer, in its attribute ``fsdp2kit_facts``."""
    vars(tokenizer)["fsdp2kit_facts"] = replace(facts_of(tokenizer), **facts)


def build_tokenizer(section: ModelConfig, *, local_files_only: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``model.tokenizer``, or of ``model.path`` where that is left out. Collective.

    A machine fetches a hub's files once. ``model.chat_template`` replaces the tokenizer's own template, also in what
    is saved. Where its turns do not end in ``eos_token``, its markers become special tokens; `new_tokens` says which.
    `stop_tokens` says where generation of the model at ``model.path`` stops.

    Args:
        local_files_only: look in the hub's cache, but never ask the hub.

    Raises:
        UserError: no source is given, it is missing or cannot be loaded, or the template cannot be read.
    """
    key, source = ("model.tokenizer", section.tokenizer) if section.tokenizer else ("model.path", section.path)
    if source is None:
        raise UserError("model.tokenizer", "no tokenizer and no model.path is given", "give a directory or a hub id")
    with agreement():
        _check_source(key, source)
    if not local_files_only:
        find_hf_dir(source, key=key, with_weights=False)
    with agreement():
        try:
            tokenizer = _load(
                key, source, trust_remote_code=section.trust_remote_code, local_files_only=local_files_only
            )
        except UserError:
            # transformers reads the config for it, too, which may be at fault.
            if key == "model.path" and Path(source, "config.json").is_file():
                load_hf_config(section, local_files_only=local_files_only)
            raise
        _ADDED[_key_of(source)] = (tuple(sorted(tokenizer.added_tokens_decoder)), tokenizer.vocab_size)
        if section.chat_template is not None:
            tokenizer.chat_template = _read_template(section.chat_template)
            set_facts(tokenizer, new=_add_markers(tokenizer))
        elif isinstance(tokenizer.chat_template, str):
            # transformers takes the byte-order mark of a file for text, and it would be learnt.
            tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
        if section.path is not None:
            is_here = local_files_only or key == "model.path"  # the machine has fetched it
            set_stop_tokens(tokenizer, eos_ids(section.path, local_files_only=is_here))
    return tokenizer


def new_tokens(tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Ids that `build_tokenizer` added to the vocabulary, ascending."""
    return facts_of(tokenizer).new if tokenizer is not None else ()


def tokens_beyond(tokenizer: PreTrainedTokenizerBase, rows: int) -> tuple[int, ...]:
    """Ids of added tokens for which an embedding of ``rows`` rows has none, ascending.

    Empty if tokens that were not added lack rows, too: the tokenizer is another model's.
    """
    return _beyond(tuple(sorted(tokenizer.added_tokens_decoder)), tokenizer.vocab_size, rows)


def added_beyond(section: ModelConfig, rows: int) -> tuple[int, ...]:
    """`tokens_beyond` of the tokenizer that `build_tokenizer` loads, without the tokens of ``model.chat_template``.

    A tokenizer that was loaded before is not loaded again. Empty if there is none on this machine. Collective.
    """
    source = section.tokenizer or section.path
    if source is None:
        return ()
    if _key_of(source) not in _ADDED:
        try:
            build_tokenizer(section.model_copy(update={"chat_template": None}), local_files_only=True)
        except UserError:
            return ()
    return _beyond(*_ADDED[_key_of(source)], rows)


# By source: the ids of added tokens, and the size of the vocabulary without them.
_ADDED: dict[tuple[Any, ...], tuple[tuple[int, ...], int]] = {}


def _key_of(source: str) -> tuple[Any, ...]:
    """Identifies a tokenizer: its source and, for a directory, the times of its files."""
    folder = Path(source).expanduser()
    files = [folder / name for name in (*_TOKENIZER_FILES, "added_tokens.json", "special_tokens_map.json")]
    return source, *(file.stat().st_mtime_ns for file in files if file.is_file())


def _beyond(added: Sequence[int], size: int, rows: int) -> tuple[int, ...]:
    return tuple(token for token in added if token >= rows) if size <= rows else ()


def check_same_tokens(section: ModelConfig) -> None:
    """Refuse a ``model.tokenizer`` that gives texts other ids than the model's own tokenizer does.

    Tokens may be added, other special tokens chosen, and reserved ones renamed. Only files on this machine are read:
    if ``model.path`` has no tokenizer there, there is nothing to compare.

    Raises:
        UserError: it names a token or a text, with the ids of both tokenizers.
    """
    own = section.path
    given = section.tokenizer
    if own is None or given is None or own == given or _has_same_files(own, given):
        return
    try:
        # A directory without a tokenizer would get one made up.
        for key, source in (("model.path", own), ("model.tokenizer", given)):
            _check_source(key, source)
        load: Any = partial(_load, trust_remote_code=section.trust_remote_code, local_files_only=True)
        known = load("model.path", own)
        other = load("model.tokenizer", given)
    except UserError:
        return
    if difference := _difference(known, other):
        what = f"gives tokens other ids than the tokenizer of model.path ({own}) does: {difference}"
        todo = "leave model.tokenizer out, or if the model is to learn new tokens from scratch, set preflight.allow = "
        raise UserError(f"model.tokenizer: {given}", what, f'{todo}["other_tokenizer"]')


# Letters of several scripts, digits, spaces, code, and what Unicode's normal forms change.
_SAMPLE = (
    "The quick brown fox, it's 12,345.67 km/h!  Two spaces\tand a tab\n\n  def f(x): return {'a': [x ** 2]}  # ok\n"
    "Größe naïve Ελληνικά Русский العربية עברית हिन्दी 日本語のテキスト 中文 한국어 ไทย 👩‍💻 ﬁ ½ é \u00a0end"
)
_CLASHES = 0.01  # share of a vocabulary whose ids may stand for other texts: reserved tokens that were renamed


def _has_same_files(own: str, given: str) -> bool:
    """Whether two tokenizers are the same in tokenizer.json but for tokens that one of them adds.

    It saves loading both.
    """
    try:
        files = [(Path(source).expanduser() / "tokenizer.json").read_bytes() for source in (own, given)]
        if files[0] == files[1]:
            return True
        parts = [json.loads(file) for file in files]
    except (OSError, ValueError):
        return False
    added = [{token["content"]: token["id"] for token in one.get("added_tokens") or ()} for one in parts]
    if any(added[1][text] != token for text, token in added[0].items() if text in added[1]):
        return False
    return all(parts[0].get(name) == parts[1].get(name) for name in ("model", "normalizer", "pre_tokenizer"))


def _difference(known: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str:
    """What tells the ids of two tokenizers apart, in words; "" for nothing."""
    ids = known.get_vocab()
    others = other.get_vocab()
    moved = sorted((text for text, token in ids.items() if others.get(text, token) != token), key=ids.__getitem__)
    # Tokens of plain text first: people recognise them.
    plain = [text for text in moved if text.isascii() and text.isalpha()] or moved
    if plain:
        text = plain[0]
        count = f"{len(moved):,} of {len(ids):,} tokens differ"
        return f"{text!r} has id {ids[text]} there, and {others[text]} here ({count})"
    reserved = known.added_tokens_decoder
    texts = {token: text for text, token in others.items()}
    clashes = [text for text, token in ids.items() if token not in reserved and texts.get(token, text) != text]
    clashes.sort(key=ids.__getitem__)
    if len(clashes) > _CLASHES * len(ids):
        text = clashes[0]
        return f"id {ids[text]} is {text!r} there, and {texts[ids[text]]!r} here ({len(clashes):,} ids differ)"
    before, after = (one.encode(_SAMPLE, add_special_tokens=False) for one in (known, other))
    if before == after:
        return ""
    at = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
    text = str(known.decode(before[at : at + 4]))
    return f"{text!r} becomes {before[at : at + 4]} there, and {after[at : at + 4]} here"


def set_stop_tokens(tokenizer: PreTrainedTokenizerBase, ids: Collection[int]) -> None:
    """Say at which ids generation of the model stops, beside the tokenizer's EOS; `build_tokenizer` does."""
    set_facts(tokenizer, stops=tuple(ids))


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids at which generation stops, ascending: the tokenizer's EOS, and those of the model's generation config.

    `build_tokenizer` reads the config. Of a tokenizer from elsewhere the EOS alone is known.
    """
    own = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    return tuple(sorted({*own, *facts_of(tokenizer).stops}))


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The special tokens that end an answer; empty where there is none, or no template.

    It is the one that the chat template puts after an answer. Some templates, like GLM-4's, put none: the answer then
    ends at the marker of the next role, if generation stops at it, or else at the EOS.
    """
    special = special_vocabulary(tokenizer)
    answered = _rendered(tokenizer, [_QUESTION, _SAID])
    if _ANSWER not in answered:
        return set()
    after = answered.partition(_ANSWER)[2].lstrip()
    if found := [text for text in special if after.startswith(text)]:
        return {special[max(found, key=len)]}
    stops = {text: at for text, at in special.items() if at in stop_tokens(tokenizer)}
    markers = set()
    for turns in ([_SAID, _QUESTION], [_CALLED, _RESULT]):
        after = _rendered(tokenizer, [_QUESTION, *turns]).rpartition(_ANSWER)[2]
        if found := [text for text in stops if text in after]:
            markers.add(stops[min(found, key=after.index)])
    return markers or {at for text, at in stops.items() if text == tokenizer.eos_token}


def ends_answers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template itself puts a special token after answers, and after tool calls if it takes any."""
    special = tuple(special_vocabulary(tokenizer))
    texts = [_rendered(tokenizer, [_QUESTION, said]) for said in (_SAID, _CALLED)]
    return all(text.rstrip().endswith(special) for text in texts if _ANSWER in text)


def special_vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The ids of a tokenizer's special tokens, by their texts: its EOS, and added tokens that are special."""
    special = {token.content: at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    if isinstance(tokenizer.eos_token_id, int):
        special[str(tokenizer.eos_token)] = tokenizer.eos_token_id
    return special


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that may end a turn or a text."""
    special = {at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(special | set(stop_tokens(tokenizer)))


def _probe(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """A conversation as the chat template renders it, with a prompt for more, and what comes after its answer."""
    answered = _rendered(tokenizer, [_QUESTION, _SAID])
    asked = _rendered(tokenizer, [{"role": "system", "content": "a"}, _QUESTION], prompt=True)
    return answered + asked, answered.partition(_ANSWER)[2].lstrip()


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
    """The messages under the chat template; "" if it refuses them, or there is none."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except Exception:  # a template may raise anything; reading the rows reports it
        return ""


def _add_markers(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    text, after = _probe(tokenizer)
    if tokenizer.eos_token and after.startswith(str(tokenizer.eos_token)):  # Zephyr's other markers are plain text
        return ()
    vocabulary = tokenizer.get_vocab()
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    markers = [marker for marker in dict.fromkeys(_MARKER.findall(text)) if marker not in special]
    tokenizer.add_tokens(markers, special_tokens=True)
    return tuple(sorted(tokenizer.get_vocab()[marker] for marker in markers if marker not in vocabulary))


def _check_source(key: str, source: str) -> None:
    """Refuse what cannot be a tokenizer before transformers asks a hub for it."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in _TOKENIZER_FILES):
            what = f"the directory holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)})"
            raise UserError(f"{key}: {source}", what, "set model.tokenizer to a directory or hub id that has one")
    elif path.exists():
        raise UserError(f"{key}: {source}", "is a file", "give the directory that holds the tokenizer's files")
    elif not may_be_hub_id(source):
        raise UserError(f"{key}: {source}", "no such directory", "check the path (paths are relative to the TOML)")


def _load(key: str, source: str, *, trust_remote_code: bool, local_files_only: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(
            str(Path(source).expanduser()) if Path(source).expanduser().is_dir() else source,
            trust_remote_code=trust_remote_code,
            local_files_only=local_files_only,
        )
    except Exception as error:
        # Broken files surface as OSError, ValueError, KeyError, JSONDecodeError or the bare Exception of tokenizers.
        reason = str(error).strip().split("\n")[0]
        what = f"the tokenizer cannot be loaded ({type(error).__name__}: {reason})"
        todo = todo_of_cache(error) or "check its files, or set model.tokenizer to another directory or hub id"
        raise UserError(f"{key}: {source}", what, todo) from error


def _read_template(value: str) -> str:
    path = ready_template(value) or Path(value)
    where = f"model.chat_template: {value}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        ready = ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.jinja")))
        todo = f"give the path of a Jinja template file, or the name of a ready one ({ready})"
        raise UserError(where, f"cannot be read ({error})", todo) from None
    if not text.strip():
        raise UserError(where, "is empty", "give a template, or leave the key out")
    return text
