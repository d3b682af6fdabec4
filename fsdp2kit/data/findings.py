"""What is noticed of rows while they are encoded: kept beside their tokens, and said at the start."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields

from fsdp2kit.console import counted

_MOST_NAMED = 8  # columns


@dataclass
class Findings:
    """What a person should know of a set's rows, as counts."""

    rows: int = 0
    unread: list[str] = field(default_factory=list)
    """Columns that the format does not read."""
    conversations: int = 0
    systems_twice: int = 0
    """Conversations with two system messages in a row."""
    first_systems_twice: int | None = None
    """The number of the first row with such a conversation, from 0."""
    unwrapped: bool = False
    """Whether a prompt is plain text although the tokenizer has a chat template."""
    own_bos: int = 0
    """Texts that begin with the BOS, which the tokenizer adds as well."""
    own_eos: int = 0
    """Texts that end with the EOS, which the tokenizer adds as well."""
    quoting: int = 0
    """Conversations that quote the chat template's special tokens."""
    first_quoting: str | None = None
    """Where the first of them is."""
    own_special: list[str] = field(default_factory=list)
    """Special tokens in conversations that the chat template does not write."""

    def note_row(self, *, unread: Iterable[str], systems_twice: Sequence[bool]) -> None:
        """Count a row.

        Args:
            unread: its columns that the format does not read.
            systems_twice: for each of its conversations, whether two system messages follow each other.
        """
        self.unread += [name for name in unread if name not in self.unread]
        self.conversations += len(systems_twice)
        self.systems_twice += sum(systems_twice)
        if any(systems_twice) and self.first_systems_twice is None:
            self.first_systems_twice = self.rows
        self.rows += 1

    def note_affixes(self, *, has_bos: bool, has_eos: bool) -> None:
        self.own_bos += has_bos
        self.own_eos += has_eos

    def note_special(self, where: str, own: Iterable[str], *, quotes: bool) -> None:
        self.quoting += quotes
        if quotes and self.first_quoting is None:
            self.first_quoting = where
        self.own_special += [token for token in own if token not in self.own_special]

    def add(self, other: Findings) -> None:
        """Add the findings of the rows that follow."""
        if self.first_systems_twice is None and other.first_systems_twice is not None:
            self.first_systems_twice = self.rows + other.first_systems_twice
        self.unread += [name for name in other.unread if name not in self.unread]
        self.unwrapped |= other.unwrapped
        self.rows += other.rows
        self.conversations += other.conversations
        self.systems_twice += other.systems_twice
        self.own_bos += other.own_bos
        self.own_eos += other.own_eos
        self.quoting += other.quoting
        self.first_quoting = self.first_quoting or other.first_quoting
        self.own_special += [token for token in other.own_special if token not in self.own_special]

    def warnings(self, key: str, name: Callable[[int], str]) -> list[str]:
        """What a person should look at before training.

        Args:
            key: the TOML key that names the set.
            name: names a row by its number, from 0.
        """
        found = []
        if self.unwrapped:
            what = "prompts are plain texts, outside the tokenizer's chat template; an instruct model expects it"
            found.append(f'{what}: set data.wrap = "chat"')
        if self.first_systems_twice is not None:
            what = f"{self.systems_twice:,} of {counted(self.conversations, 'conversation')} have two system messages"
            first = name(self.first_systems_twice)
            found.append(f"{what} in a row, first in {first}: make them one, or drop one")
        return [f"{key}: {text}" for text in found]

    def notes(self, key: str) -> list[str]:
        """What was done with the rows, which is right most of the time; ``key`` as of `warnings`."""
        found = []
        for count, does, token in ((self.own_bos, "begins", "BOS"), (self.own_eos, "ends", "EOS")):
            if count:
                what = f"the {token} token {does} {counted(count, 'text')}, and the tokenizer adds it as well"
                found.append(f"{what}: one is kept")
        if self.quoting:
            does = "quotes" if self.quoting == 1 else "quote"
            what = f"{counted(self.quoting, 'conversation')} {does} special tokens of the chat template"
            found.append(f"{what}, first in {self.first_quoting}: they are read as text")
        if self.own_special:
            some = ", ".join(self.own_special[:_MOST_NAMED])
            found.append(f"special tokens in conversations, which the chat template does not write: {some}")
        if self.unread:
            more = len(self.unread) - _MOST_NAMED
            others = f" and {more} more" if more > 0 else ""
            found.append(f"columns not read: {', '.join(self.unread[:_MOST_NAMED])}{others}")
        return [f"{key}: {text}" for text in found]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Findings:
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})
