"""A configuration file as flat fields. fields.toml says what becomes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli
import yaml

from fsdp2kit.config.foreign import plain_name, snake_case
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import load_json, read_text

TABLE: dict[str, Any] = tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Field:
    """One value of the file."""

    path: str
    """Its place in the file, as written: ``fsdp_config.fsdp_sharding_strategy``."""
    name: str
    """Its name in one spelling: ``sharding_strategy``."""
    value: Any
    file: Path

    def __str__(self) -> str:
        return f"{self.path} = {json.dumps(self.value, default=str)}"

    @property
    def word(self) -> str:
        """The value as one lower-case word, without its class: ``torch.bfloat16`` → ``bfloat16``."""
        return re.sub(r"[\s-]+", "_", str(self.value).strip().rpartition(".")[2].lower())

    @property
    def is_given(self) -> bool:
        """It has a value: not null or "". For prefetch, null is FSDP1's word for none."""
        return self.value not in (None, "") or (self.value is None and self.name.startswith("backward_prefetch"))

    @property
    def is_switch(self) -> bool:
        """The value is true or false, in a field that may hold a name or a number instead."""
        return self.word in ("true", "false")

    def mistake(self, todo: str) -> UserError:
        """The error for a value that makes no sense."""
        return UserError(f"{self.file}: {self.path}", f"{self.value!r} is not understood", todo)


def read_fields(path: Path) -> list[Field]:
    """Read a JSON or YAML file, and the file that its ``fsdp_config`` names, if it is there."""
    values = _read(path)
    other = values.get("fsdp_config")
    found = list(_flatten(values, path="", name="", file=path))
    if isinstance(other, str):
        inner = next((file for file in (path.parent / other, Path(other)) if file.is_file()), None)
        if inner is not None:
            found = [field for field in found if field.path != "fsdp_config"]
            found += _flatten(_read(inner), path=f"{inner.name}: ", name="", file=path)
    if any(field.name == "train_micro_batch_size_per_gpu" for field in found):
        # DeepSpeed's names: its train_batch_size is the whole job's.
        found = [replace(one, name="global_batch_size") if one.name == "train_batch_size" else one for one in found]
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"cannot be read ({error})", "give a JSON or YAML file") from None
    try:
        # JSON first: YAML 1.1 reads the number 1e-5 as a text.
        values = load_json(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(str(path), f"cannot be parsed: {error}", "mend that line") from None
    if not isinstance(values, dict):
        raise UserError(str(path), "is not a table of fields", "give a JSON object or a YAML mapping")
    return values


def _flatten(values: Mapping[str, Any], *, path: str, name: str, file: Path) -> Iterator[Field]:
    for key, value in values.items():
        snake, short = snake_case(str(key)), plain_name(str(key))
        # A list of one table, as axolotl has for its data, is that table.
        is_only = isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping)
        table = value[0] if is_only else value
        if isinstance(table, Mapping) and table:
            inside = name if snake in TABLE["names"]["plain_tables"].split() else f"{name}{short}."
            yield from _flatten(table, path=f"{path}{key}{'[0]' if is_only else ''}.", name=inside, file=file)
        else:
            yield Field(f"{path}{key}", f"{name}{short}", value, file)


def program_of(fields: list[Field]) -> str:
    """The program whose configuration the file is."""
    names, known = {field.name for field in fields}, {key: set(text.split()) for key, text in TABLE["names"].items()}
    if "base_model" in names and names & known["axolotl"]:
        return "axolotl"
    is_named = any(field.name == "fsdp" and not field.is_switch for field in fields)  # fsdp = "full_shard auto_wrap"
    is_alike = "output_dir" in names and len(names & known["beside_output_dir"]) >= 2
    if is_named or names & known["training_arguments"] or (is_alike and not names & known["other_loops"]):
        return "transformers"
    if "train_micro_batch_size_per_gpu" in names:
        return "DeepSpeed"
    if names & known["llama_recipes"]:
        return "llama-recipes"
    return "torchtune" if "dataset._component_" in names else "a plain loop"
