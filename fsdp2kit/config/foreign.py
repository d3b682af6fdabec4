"""What transformers, TRL, axolotl, torchtune, torchtitan, llama-factory, accelerate and FSDP1 call our keys.

`migrate` translates their configurations with these tables. `load` uses them to suggest our key or value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

# foreign.toml says what each table is.
_TABLES: dict[str, dict[str, str]] = {
    name: {key: " ".join(text.split()) for key, text in table.items()}
    for name, table in tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
NAMES, WITHOUT_KEY, NOT_OFFERED = (_TABLES[name] for name in ("names", "without_key", "not_offered"))
STRATEGY_WORDS, DTYPE_WORDS, ADAMW_WORDS = (
    {words: value for value, words in _TABLES[name].items()} for name in ("strategies", "dtypes", "optimizers")
)

# Prefixes without a meaning: fsdp_use_orig_params, mixed_precision_reduce_dtype.
_PREFIXES = re.compile(r"^((fsdp|use|enable|parallelism_config)_|(mixed_precision|mp)_+(?=.*(dtype|classes)))+")


def spellings(meanings: Mapping[str, Any]) -> dict[str, Any]:
    """The meaning of each word; keys of ``meanings`` are spellings, separated by spaces."""
    return {word: meaning for words, meaning in meanings.items() for word in words.split()}


def names_of(key: str) -> list[str]:
    """What other tools call one of our keys, and their fields whose replacement begins with this key."""
    slots = [slot for slot, todo in _TABLES["instead"].items() if re.findall(r"[a-z_]+\.[a-z_]+", todo)[:1] == [key]]
    return [*NAMES.get(key, "").split(), *slots, *(name for slot in slots for name in NAMES.get(slot, "").split())]


def snake_case(key: str) -> str:
    """``trainBatchSize``, ``--train-batch-size`` and ``TRAIN_BATCH_SIZE`` as ``train_batch_size``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.lstrip("-")).replace("-", "_").lower()


def plain_name(key: str) -> str:
    """A key in `snake_case`, without a prefix that has no meaning: ``fsdp_offload`` → ``offload``."""
    return _PREFIXES.sub("", snake_case(key))


def advise_on_path(location: Sequence[str], known: Collection[str]) -> str | None:
    """What to write instead of a key that another tool has in this section; None if we know of none."""
    return _reason(".".join(map(snake_case, location)), location[-1], known) if len(location) > 1 else None


def advise_on_key(location: Sequence[str], value: Any, known: Collection[str]) -> str | None:
    """What to write instead of a key or section that another tool has; None if we know of none.

    Args:
        location: the parts of the key, ``["optimizer", "learning_rate"]``.
        value: the key's value; the keys of an unknown section are looked up.
        known: our keys.
    """
    section = SECTION_OF.get(snake_case(location[0]), location[0])
    is_foreign = section != location[0] and section in known
    if len(location) == 1 and isinstance(value, Mapping):
        inner = (advise_on_key([*location, name], item, known) for name, item in value.items())
        return next(filter(None, inner), f"[{location[0]}] is [{section}] here" if is_foreign else None) or _reason(
            snake_case(location[0]), location[0], known
        )
    if is_foreign and f"{section}.{location[-1]}" in known:
        return f"{location[-1]} is {section}.{location[-1]} here"
    name = plain_name(location[-1])
    for candidate in (".".join([*map(snake_case, location[:-1]), name]), name):
        if reason := _reason(candidate, location[-1], known):
            return reason
    return None


def _reason(foreign: str, name: str, known: Collection[str]) -> str | None:
    """What to write instead of a foreign name."""
    for slot in _SLOTS.get(foreign, ()):
        if slot in known:
            return f"{name} is {slot} here"
        if slot in _TABLES["instead"] or slot not in NAMES:
            return f"{name}: {_TABLES['instead'].get(slot, slot)}"
    return None


def advise_on_value(given: Any, options: Collection[str]) -> str | None:
    """The one of ``options`` that another tool calls ``given``; None if there is none."""
    word = re.sub(r"[\s-]+", "_", str(given).strip().rpartition(".")[2].lower())
    meant = next((table[word] for table in _VALUES if table.get(word) in options), word)
    return meant if meant in options else None


# For each foreign name our keys, or why there is no key.
_SLOTS: dict[str, list[str]] = {}
for _slot, _names in (NAMES | WITHOUT_KEY | NOT_OFFERED).items():
    for _name in _names.split():
        _SLOTS.setdefault(_name, []).append(_slot)
SECTION_OF = spellings({names: section for section, names in _TABLES["sections"].items()})
# Sections that only one recipe has.
RECIPE_OF = {"dpo": "dpo", "distill": "distill", **dict.fromkeys(("rollout", "weight_sync", "grpo", "reward"), "grpo")}
_VALUES = [spellings(table) for table in (STRATEGY_WORDS, DTYPE_WORDS, ADAMW_WORDS)]
