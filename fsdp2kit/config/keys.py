"""Every key of a TOML, read from the recipes' JSON schemas: what it is, what it may be, and a search over all.

The schemas hold what the config classes hold, and a test keeps them current. Reading them takes no pydantic and no
torch, so `fsdp2kit keys` answers at once.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp2kit.config.foreign import names_of

Schema = Mapping[str, Any]
NOT_SET = "not set"
REQUIRED = "required"
_QUESTION_WORDS = "a an and do doe how i in is it many my number of often on the to what which with"
# Stand in a key's name for what the user chooses: the number of an entry, a name.
_CHOSEN = ("N", "NAME")


@dataclass(frozen=True)
class ConfigKey:
    """One key of a TOML, as some recipes have it."""

    name: str
    """Dotted, as in an override: ``fsdp.strategy``, ``reward.N.weight`` (a number from 0), ``eval.sets.NAME.path``."""
    type: str
    choices: tuple[str, ...]
    """Texts it may be; empty for other types."""
    default: str
    """In TOML syntax, or `NOT_SET`, or `REQUIRED`."""
    doc: str
    variant: str = ""
    """Which variant of the section has it, ``name = "muon"``; empty: all of them."""
    recipes: tuple[str, ...] = ()
    """The recipes that have it like this."""

    @property
    def section(self) -> str:
        """The section it is written under; empty for a key at the top."""
        return self.name.partition(".")[0] if "." in self.name else ""

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints of it."""
        return {
            "key": self.name,
            "type": self.type,
            "choices": list(self.choices),
            "default": None if self.default in (NOT_SET, REQUIRED) else self.default,
            "required": self.default == REQUIRED,
            "doc": self.doc,
            "variant": self.variant or None,
            "recipes": list(self.recipes),
        }


@dataclass(frozen=True)
class KeyReference:
    """The keys and sections of some recipes."""

    keys: tuple[ConfigKey, ...]
    sections: Mapping[str, str]
    """A line for each section."""
    recipes: tuple[str, ...]

    def find(self, name: str) -> list[ConfigKey]:
        """The keys of that dotted name, and those inside it; in any case, with or without a table's brackets."""
        asked = name.strip("[]").lower().split(".")
        return [key for key in self.keys if _starts_with(key.name.split("."), asked)]

    def search(self, words: Sequence[str]) -> list[ConfigKey]:
        """The keys whose names or docs have the most of the words, if it is half of them; the best first.

        Rare words count more, and words of the name more than those of the doc.
        """
        every = [word for text in words for word in _words(text)]
        asked = [word for word in every if word not in _QUESTION_WORDS.split()] or every
        texts = [_Text(key, self.sections.get(key.section, "")) for key in self.keys]
        rarity = {}
        for word in asked:
            having = sum(text.score(word) > 0 for text in texts)
            rarity[word] = math.log(1 + len(texts) / (1 + having))
        ranked: list[tuple[int, float, ConfigKey]] = []
        for text in texts:
            scores = [text.score(word) * rarity[word] for word in asked]
            ranked.append((sum(score > 0 for score in scores), sum(scores) + text.bonus(asked), text.key))
        most = max(found for found, _, _ in ranked)
        ranked = [one for one in ranked if one[0] == most and 0 < len(asked) <= 2 * most]
        return [key for _, _, key in sorted(ranked, key=lambda one: -one[1])]

    def near(self, name: str, *, most: int = 3) -> list[str]:
        """The sections and keys that a name is probably meant to be, the likeliest first."""
        last: dict[str, str] = {}
        for key in self.keys:
            last.setdefault(key.name.rpartition(".")[2], key.name)
        whole = {name: name for name in (*self.sections, *(key.name for key in self.keys))}
        candidates = {**last, **whole}
        close = difflib.get_close_matches(name.strip("[]"), candidates, n=most, cutoff=0.6)
        return list(dict.fromkeys(candidates[one] for one in close))


def read_keys(schemas: Mapping[str, Schema]) -> KeyReference:
    """All keys of recipes, by the recipes' names; a key that several have alike is one.

    Args:
        schemas: each recipe's JSON schema, as ``Config.model_json_schema()`` gives it.
    """
    recipes_of: dict[ConfigKey, list[str]] = {}
    sections: dict[str, str] = {}
    for recipe, schema in schemas.items():
        for name, field in schema["properties"].items():
            if members := _members(field, schema):
                doc = field.get("description") or members[0].get("description", "")
                sections[name] = _shared(sections.get(name, _line(doc)), _line(doc))
        for key in _keys_of(schema, schema, ""):
            recipes_of.setdefault(key, []).append(recipe)
    keys = [replace(key, recipes=tuple(recipes)) for key, recipes in recipes_of.items()]
    order = {name: number for number, name in enumerate(dict.fromkeys(key.name for key in keys))}
    places = {name: number for number, name in enumerate(sections)}
    # What belongs together stands together, though later recipes brought some of it.
    keys.sort(key=lambda key: (places.get(key.section, -1), order[key.name]))
    return KeyReference(tuple(keys), sections, tuple(schemas))


def _keys_of(table: Schema, root: Schema, prefix: str, variant: str = "") -> Iterator[ConfigKey]:
    """The keys of a table, each followed by those inside it."""
    for name, field in table.get("properties", {}).items():
        dotted = f"{prefix}{name}"
        members = _members(field, root)
        if not members or prefix:  # a section itself is no key; a table inside one is
            yield _key(dotted, field, root, required=name in table.get("required", ()), variant=variant)
        placeholder = {"array": ".N", "object": ".NAME"}.get(field.get("type", ""), "")
        tag = field.get("discriminator", {}).get("propertyName")
        yield from (
            _merged(members, root, f"{dotted}{placeholder}.", tag, field)
            if tag
            else (key for member in members for key in _keys_of(member, root, f"{dotted}{placeholder}."))
        )


def _merged(members: Sequence[Schema], root: Schema, prefix: str, tag: str, field: Schema) -> Iterator[ConfigKey]:
    """The keys of a section with variants: once where all have them alike, else with the variant that has them."""
    chosen = [_key(f"{prefix}{tag}", member["properties"][tag], root) for member in members]
    choices = tuple(choice for key in chosen for choice in key.choices)
    docs = dict.fromkeys(key.doc for key in chosen)
    default = json.dumps(field.get("default", {}).get(tag))
    yield ConfigKey(f"{prefix}{tag}", " | ".join(choices), choices, default, " ".join(docs))
    variants: dict[ConfigKey, list[str]] = {}
    for member, key in zip(members, chosen, strict=True):
        for one in _keys_of(member, root, prefix):
            if one.name != f"{prefix}{tag}":
                variants.setdefault(one, []).extend(key.choices)
    for key, names in variants.items():
        yield key if len(names) == len(choices) else replace(key, variant=f"{tag} = {' or '.join(names)}")


def _key(name: str, field: Schema, root: Schema, *, required: bool = False, variant: str = "") -> ConfigKey:
    default = REQUIRED if required else json.dumps(field.get("default"), ensure_ascii=False)
    choices = tuple(json.dumps(one) for one in _choices(field))
    default = NOT_SET if default == "null" else default
    return ConfigKey(name, _type(field, root), choices, default, _line(field.get("description", "")), variant)


def _members(field: Schema, root: Schema) -> list[Schema]:
    """The tables that a field is or holds; several for a union."""
    if "$ref" in field:
        return [root["$defs"][field["$ref"].rpartition("/")[2]]]
    inner = [*field.get("oneOf", ()), *field.get("anyOf", ())]
    for name in ("items", "additionalProperties"):
        if isinstance(field.get(name), Mapping):
            inner.append(field[name])
    return [member for one in inner for member in _members(one, root)]


def _choices(field: Schema) -> list[Any]:
    if "const" in field:
        return [field["const"]]
    inner = [choice for one in field.get("anyOf", ()) for choice in _choices(one)]
    return [*field.get("enum", ()), *inner]


def _type(field: Schema, root: Schema) -> str:
    """A field's type in words: ``integer ≥ 1``, ``"none" | "nf4"``, ``list of texts``."""
    if choices := [json.dumps(one) for one in field.get("enum", [field["const"]] if "const" in field else [])]:
        return " | ".join(choices)
    if alternatives := field.get("anyOf"):
        return " | ".join(_type(one, root) for one in alternatives if one.get("type") != "null")
    if "$ref" in field or "oneOf" in field:
        return "table"
    kind = field.get("type", "any value")
    if kind in ("integer", "number"):
        return kind + _range(field, whole=kind == "integer")
    if kind == "array":
        if "prefixItems" in field:
            return f"[{', '.join(_type(one, root) for one in field['prefixItems'])}]"
        return f"list of {_several(field.get('items', {}), root)}"
    if kind == "object":
        inner = field.get("additionalProperties")
        return f"table of {_several(inner, root)}" if isinstance(inner, Mapping) else "table"
    if kind == "string":
        return "duration" if "[smh]" in field.get("pattern", "") else "text"
    return "true | false" if kind == "boolean" else kind


def _several(field: Schema, root: Schema) -> str:
    words = _type(field, root)
    return f"{words}s" if words in ("text", "table") else words


def _range(field: Schema, *, whole: bool) -> str:
    """`` ≥ 0 and < 1``; `` ≥ 1`` for an integer above 0."""
    low = field.get("minimum")
    above = field.get("exclusiveMinimum")
    if whole and above is not None:
        low = above + 1
        above = None
    bounds = {"≥": low, ">": above, "≤": field.get("maximum"), "<": field.get("exclusiveMaximum")}
    given = [f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None]
    return f" {' and '.join(given)}" if given else ""


def _line(text: str) -> str:
    return " ".join(text.split())


def _shared(one: str, other: str) -> str:
    """The line about a section. If recipes differ, the part before the first one's colon."""
    return one if one == other else one.partition(":")[0].rstrip(".") + "."


def _starts_with(parts: Sequence[str], asked: Sequence[str]) -> bool:
    """Whether a key begins with the parts that were asked for; any word stands for a number or name of the user's."""
    if len(asked) > len(parts):
        return False
    return all(part == word or part in _CHOSEN for part, word in zip(parts, asked, strict=False))


def _words(text: str) -> list[str]:
    """Lower-case stems: "Held-out sets" and "held out set" are the same, as are "stopping" and "stop"."""
    stems = [re.sub(r"(?<=\w{3})(ing|ed|es|s|e)$", "", word) for word in re.findall(r"[a-z0-9]+", text.lower())]
    return [re.sub(r"(?<=\w{2})([bdgmnpt])\1$", r"\1", stem) for stem in stems]


class _Text:
    """What a search reads of a key: its name, its doc, its section's line, and what other tools call it."""

    def __init__(self, key: ConfigKey, section: str) -> None:
        self.key = key
        self._name = set(_words(key.name))
        self._doc = _words(f"{key.doc} {' '.join(key.choices)}")
        self._about = set(_words(section))
        self._foreign = [" ".join(_words(name)) for name in names_of(key.name)]

    def bonus(self, asked: Sequence[str]) -> float:
        """What all words together say: they are most of the key's own name, or its name in another tool."""
        own = _words(self.key.name.rpartition(".")[2])
        share = sum(word in asked for word in own) / max(1, len(own))
        phrase = " ".join(asked)
        together = len(asked) > 1 and any(phrase in text for text in (" ".join(own), " ".join(self._doc)))
        is_inside = any(f".{one}." in self.key.name for one in _CHOSEN)
        elsewhere = any(phrase == name or (len(asked) > 1 and phrase in name) for name in self._foreign)
        return 6 * share + 2 * together + 12 * elsewhere - 6 * is_inside

    def score(self, word: str) -> float:
        """How much one word of a search says for this key; 0: it is nowhere."""
        if word in self._name:
            return 4.0
        if word in self._doc:
            return 2.0 + (word in self._doc[:8])
        if any(word in name.split() for name in self._foreign):
            return 1.5
        if word in self._about:
            return 1.0
        is_long = len(word) > 3
        return 0.5 if is_long and any(one.startswith(word) for one in (*self._name, *self._doc)) else 0.0
