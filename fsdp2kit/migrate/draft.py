"""The TOML that is being made: its lines with what they were, notes on what has no line, and its text."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fsdp2kit.migrate.fields import Field, Program, find, program_of
from fsdp2kit.migrate.names import NAMES

_SECTIONS = (
    *("run", "model", "model.config", "mesh", "fsdp", "activation_checkpointing", "compile", "data", "data.columns"),
    *("train", "optimizer", "lr_schedule", "eval", "checkpoint", "wandb", "profile"),
)
_WIDTH = 120


class Draft:
    """Keys of the TOML, each with the reason for its value; and what the rules of the translation may ask about."""

    def __init__(
        self, fields: list[Field], *, toml: str, world_size: int | None, model: str | None, data: str | None
    ) -> None:
        self.fields = fields
        self.given_world_size, self.given_model, self.given_data = world_size, model, data
        self.program: Program = program_of(fields)
        self.toml = toml
        """The path that the TOML will have: it is in its first line, and paths in it are relative to it."""
        self.world_size, self.nodes, self.endpoint = 1, 1, "HOST:29500"
        self.is_guess = False
        """Whether nobody said how many processes there are."""
        self.recipe = ("pretrain", "")
        """The recipe, and why that one."""
        self.needs: list[str] = []
        """Overrides that the command line must give, because the file does not."""
        self.notes: list[tuple[str, str]] = []
        """Fields without a key of their own, and what becomes of them."""
        self.warnings: list[str] = []
        """What would be trained differently, for stderr."""
        self._lines: dict[str, tuple[Any, str]] = {}
        self._known: dict[str, tuple[str, str]] = {}

    def take(self, slot: str, otherwise: str = "another field decides") -> Field | None:
        """The first field of any of a slot's names; null and "" count as not given.

        Args:
            slot: a key of `NAMES`.
            otherwise: what is said of the field if neither a line nor a note names it in the end.
        """
        return self.take_names(NAMES[slot], otherwise)

    def take_names(self, names: str, otherwise: str) -> Field | None:
        """The same by the names themselves, separated by spaces."""
        for name in names.split():
            self._known.setdefault(name, (names, otherwise))
        return find(self.fields, names)

    def set(self, key: str, value: Any, why: str) -> None:
        """Write ``section.name = value`` with a comment."""
        self._lines[key] = (value, why)

    def was(self, key: str, value: Any, field: Field | None, more: str = "") -> None:
        """Write ``section.name = value`` for a field, if the file has it."""
        if field is not None:
            self.set(key, value, f"was {field}" + (f"; {more}" if more else ""))

    def fill(self, key: str, value: Any, why: str) -> None:
        """Write a default: only if there is one, and no line for the key yet."""
        if value is not None and key not in self._lines:
            self.set(key, value, why)

    def get(self, key: str) -> Any:
        """The value of a key, or None."""
        return self._lines.get(key, (None, ""))[0]

    def why(self, key: str) -> str:
        """The comment of a key, or nothing."""
        return self._lines.get(key, (None, ""))[1]

    def note(self, field: Field | None, text: str) -> None:
        """Say what becomes of a field that gets no line."""
        if field is not None:
            self.notes.append((str(field), text))

    def account(self) -> list[Field]:
        """A note for each field that was asked for and that nothing names yet; returns those that nobody asked for."""
        reasons = [self.recipe[1], *(why for _, why in self._lines.values()), *(name for name, _ in self.notes)]
        unknown = []
        for field in self.fields:
            named = re.compile(rf"(?<![\w.]){re.escape(str(field))}(?![\w.])")
            if any(map(named.search, reasons)):
                continue
            if field.name not in self._known:
                unknown.append(field)
                continue
            names, otherwise = self._known[field.name]
            first = find(self.fields, names)
            if field.value in (None, ""):
                self.note(field, "the default")
            elif first is field or first is None:
                self.note(field, otherwise)
            elif field.value == first.value:
                self.note(field, f"{first.path} says it too")
            else:
                self.note(field, f"{first.path} says it too, and says otherwise: that one was used")
                self.warnings.append(f"{field} contradicts {first}; the latter was used")
        return unknown

    def text(self, *, source: str, unknown: Sequence[Field]) -> str:
        """The TOML. Its first line is the command that runs it."""
        lines = [f"# {self._command()}", f"# Translated from {source} by tools/migrate_fsdp1.py.", ""]
        lines += _key_lines("recipe", *self.recipe)
        for section in _SECTIONS:
            keys = [key for key in self._lines if _section_of(key) == section]
            if keys:
                lines += ["", f"[{section}]"]
            for key in keys:
                lines += _key_lines(key.removeprefix(f"{section}."), *self._lines[key])
        lines += _list_lines("Without a key of their own:", [f"{field}: {text}" for field, text in self.notes])
        lines += _list_lines("Unknown to this tool, so not translated:", [str(field) for field in unknown])
        return "\n".join(lines) + "\n"

    def _command(self) -> str:
        run = " ".join(["-m fsdp2kit.run", self.toml, *self.needs])
        if self.world_size == 1:
            return f"python {run}"
        local = f"--nproc-per-node {self.world_size // self.nodes}"
        if self.nodes == 1:
            return f"torchrun {local} {run}"
        return f"torchrun --nnodes {self.nodes} {local} --rdzv-backend c10d --rdzv-endpoint {self.endpoint} {run}"

    def relative(self, path: str) -> str:
        """A path that was relative to where one stood, relative to the TOML; hub ids and others as they are."""
        if "://" in path or Path(path).is_absolute() or not Path(path).exists():
            return path
        return os.path.relpath(path, Path(self.toml).parent)


def _section_of(key: str) -> str:
    """The innermost section that a key is in; its name may have dots of its own, as in ``model.config.a.b``."""
    return max((section for section in _SECTIONS if key.startswith(f"{section}.")), key=len)


def _key_lines(name: str, value: Any, why: str) -> list[str]:
    """``name = value # why``; a long reason goes above."""
    line = f"{name} = {_as_toml(value)}"
    if not why:
        return [line]
    if len(line) + len(why) + 3 <= _WIDTH:
        return [f"{line} # {why}"]
    return [*textwrap.wrap(why, _WIDTH, initial_indent="# ", subsequent_indent="# "), line]


def _list_lines(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    lines = ["", f"# {title}"]
    for entry in entries:
        lines += textwrap.wrap(entry, _WIDTH, initial_indent="# - ", subsequent_indent="#   ")
    return lines


def _as_toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_as_toml(one)}' for name, one in value.items())} }}"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip()
