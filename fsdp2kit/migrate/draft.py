"""The new TOML: its lines, each with the field it comes from, notes on fields without a line, and its text."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fsdp2kit.config.foreign import NAMES
from fsdp2kit.files.remote import is_url
from fsdp2kit.migrate.fields import TABLE, Field, program_of
from fsdp2kit.migrate.values import Told

_SECTIONS = (
    *("run", "model", "model.config", "lora", "mesh", "fsdp", "activation_checkpointing", "compile"),
    *("data", "data.columns", "train", "optimizer", "lr_schedule", "eval", "checkpoint", "wandb", "profile"),
)
_WIDTH = 120
_ANOTHER = "another field decides"
_UNUSED = {slot: fate for fate, slots in TABLE["unused"].items() for slot in slots}


class Draft:
    """The keys of the TOML, each with the reason for its value, and what becomes of every field."""

    def __init__(self, fields: list[Field], *, source: str, path: str) -> None:
        self.fields = fields
        self.source = source
        self.program = program_of(fields)
        self.defaults: dict[str, Any] = TABLE["defaults"].get(self.program, {})
        """The program's defaults by key, for what the file leaves out."""
        self.path = path
        """The path that the TOML will have: it is in its first line, and paths in it are relative to it."""
        self.world_size = 1
        self.nodes = 1
        self.endpoint = "HOST:29500"
        self.is_guess = False
        """The number of processes is a guess."""
        self.recipe = ("pretrain", "")
        """The recipe, and why that one."""
        self.needs: list[str] = []
        """Overrides that the command needs, because the file lacks them."""
        self.warnings: list[str] = []
        """What this run would train differently; for stderr."""
        self.fates: dict[str, str] = {}
        """What becomes of the field at a path; "" if a line says it."""
        self._lines: dict[str, tuple[Any, str]] = {}

    def take(self, slot: str) -> Field | None:
        """The first field that has one of a slot's names (a key of `NAMES`) and a value.

        Until a line or a note says more, ``[unused]`` of fields.toml says what becomes of it.
        """
        named = [field for field in self.fields if field.name in NAMES[slot].split()]
        first = next((field for field in named if field.is_given), None)
        for field in named:
            if field.path in self.fates:
                continue
            fate = _UNUSED.get(slot, _ANOTHER) if field.is_given else "the default"
            if first is not None and field is not first and field.is_given:
                fate = f"{first.path} says it too"
                if field.value != first.value:
                    fate += ", and says otherwise: that one was used"
                    self.warnings.append(f"{field} contradicts {first}; the latter was used")
            self.fates[field.path] = fate
        return first

    def set(self, key: str, value: Any, why: str) -> None:
        """Write ``section.name = value`` with a comment."""
        self._lines[key] = (value, why)

    def was(self, key: str, value: Any, *fields: Field | None, note: str = "") -> None:
        """Write ``section.name = value`` with the fields it comes from. It writes nothing without a value or a field.

        Args:
            value: the value, or `Told`.
        """
        given = [field for field in fields if field is not None]
        told = value if isinstance(value, Told) else Told(value)
        if told.value is None or not given:
            return
        self.set(key, told.value, "; ".join(filter(None, [f"was {' and '.join(map(str, given))}", told.note or note])))
        self.fates.update((field.path, "") for field in given)
        if told.warning:
            self.warnings.append(f"{given[0]}: {told.warning}")

    def fill(self, key: str, value: Any = None, why: str = "yours to set") -> None:
        """Write a default if there is no line yet: the program's, or FSDP1's, or else the given value."""
        for program in (self.program, "FSDP1 and torch"):
            if key in (defaults := TABLE["defaults"].get(program, {})):
                value = defaults[key]
                why = f"the default of {program}"
                break
        if key not in self._lines and value is not None:
            self.set(key, value, f"not in the file: {why}")

    def get(self, key: str) -> Any:
        """The value of a key, or None."""
        return self._lines.get(key, (None, ""))[0]

    def note(self, field: Field | None, text: str) -> None:
        """Say what becomes of a field that gets no line."""
        if field is not None:
            self.fates[field.path] = text

    def overrule(self, field: Field, key: str) -> None:
        """Say which field gave the key its line instead of this one."""
        if self.fates[field.path] == _ANOTHER:
            self.note(field, f"{_ANOTHER}: {key} {self._lines[key][1]}")

    def explain(self, names: str, why: str) -> list[Field]:
        """Say why fields of these names (separated by spaces) get no line; returns those that have a value."""
        named = [field for field in self.fields if field.name in names.split()]
        for field in named:
            self.note(field, why if field.is_given else "the default")
        return [field for field in named if field.is_given]

    @property
    def unknown(self) -> list[str]:
        """The fields that no row and no rule asked for."""
        return [str(field) for field in self.fields if field.path not in self.fates]

    @property
    def toml(self) -> str:
        """The text. Its first line is the command that runs it."""
        lines = [f"# {self._command()}", f"# Translated from {self.source} by fsdp2kit migrate-fsdp1.", ""]
        lines += _key_lines("recipe", *self.recipe)
        for section in _SECTIONS:
            keys = [key for key in self._lines if _section_of(key) == section]
            if keys:
                lines += ["", f"[{section}]"]
            for key in keys:
                lines += _key_lines(key.removeprefix(f"{section}."), *self._lines[key])
        notes = [f"{field}: {fate}" for field in self.fields if (fate := self.fates.get(field.path))]
        lines += _list_lines("Without a key of their own:", notes)
        lines += _list_lines("Unknown to this tool, so not translated:", self.unknown)
        return "\n".join(lines) + "\n"

    def _command(self) -> str:
        words = " ".join([self.path, *self.needs])
        if self.world_size == 1:
            return f"fsdp2kit run {words}"
        local = self.world_size // self.nodes
        if self.nodes == 1:
            return f"fsdp2kit run {self.path} --nproc {local}" + "".join(f" {need}" for need in self.needs)
        launch = f"torchrun --nnodes {self.nodes} --nproc-per-node {local}"
        return f"{launch} --rdzv-backend c10d --rdzv-endpoint {self.endpoint} -m fsdp2kit.run {words}"

    def relative(self, path: str) -> str:
        """A path that exists in the working directory, relative to the TOML; other paths and hub ids as they are."""
        if is_url(path) or Path(path).is_absolute() or not Path(path).exists():
            return path
        return os.path.relpath(path, Path(self.path).parent)


def _section_of(key: str) -> str:
    """The innermost section of a key; the key's name may have dots, as in ``model.config.a.b``."""
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
    lines = ["", f"# {title}"] if entries else []
    for entry in entries:
        lines += textwrap.wrap(entry, _WIDTH, initial_indent="# - ", subsequent_indent="#   ")
    return lines


def _as_toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_as_toml(one)}' for name, one in value.items())} }}"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip()
