"""A configuration file as flat fields: what their values mean, and what its program takes for what it leaves out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from fsdp2kit.config.foreign import plain_name, snake_case, spellings
from fsdp2kit.errors import UserError

T = TypeVar("T")

# Tables whose name says nothing about the fields in them; other tables stay part of the name: `optimizer.lr`.
_PLAIN_TABLES = {
    *("fsdp_config", "fsdp", "fsdp_plugin", "fsdp_args", "parallelism_config", "parallelism", "distributed"),
    *("train_config", "training", "train", "training_args", "training_arguments", "trainer", "args", "config"),
    *("mixed_precision", "mixed_precision_policy", "mixed_precision_config", "mp_policy", "mixed_precision_kwargs"),
}


@dataclass(frozen=True)
class Field:
    """One value of the file."""

    path: str
    """Where it is, as written: ``fsdp_config.fsdp_sharding_strategy``."""
    name: str
    """Its name in one spelling: ``sharding_strategy``."""
    value: Any
    file: Path

    def __str__(self) -> str:
        return f"{self.path} = {json.dumps(self.value, default=str)}"

    @property
    def word(self) -> str:
        """The value as one lower-case word, without the class it is of: ``torch.bfloat16`` → ``bfloat16``."""
        return re.sub(r"[\s-]+", "_", str(self.value).strip().rpartition(".")[2].lower())

    @property
    def is_given(self) -> bool:
        """Null and "" say nothing, but of prefetch: there null is FSDP1's word for none."""
        return self.value not in (None, "") or (self.value is None and self.name.startswith("backward_prefetch"))

    def mistake(self, todo: str) -> UserError:
        """The error for a value that makes no sense."""
        return UserError(f"{self.file}: {self.path}", f"{self.value!r} is not understood", todo)


def read_fields(path: Path) -> list[Field]:
    """Read a JSON or YAML file; an ``fsdp_config`` that names another file is read as well, if it is there.

    Raises:
        UserError: there is no such file, or it is not a table of fields.
    """
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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"cannot be read ({error})", "give a JSON or YAML file") from None
    try:
        # JSON first: YAML 1.1 reads the number 1e-5 as a text.
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
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
            inside = name if snake in _PLAIN_TABLES else f"{name}{short}."
            yield from _flatten(table, path=f"{path}{key}{'[0]' if is_only else ''}.", name=inside, file=file)
        else:
            yield Field(f"{path}{key}", f"{name}{short}", value, file)


# The words of a switch, in fields that may hold a name or a number instead.
SWITCH = ("true", "false")


def _converter(kind: type[T], todo: str) -> Callable[[Field], T]:
    adapter = TypeAdapter(kind)

    def convert(field: Field) -> T:
        try:
            return adapter.validate_python(field.value)
        except ValidationError:
            raise field.mistake(todo) from None

    return convert


as_bool = _converter(bool, "write true or false")
"""A truth value, as YAML and shell scripts write it."""
as_float = _converter(float, "write a number")
"""A number, or a text that is one (YAML reads ``1e-5`` as a text)."""


def as_int(field: Field) -> int:
    """A whole number; ``1e8`` and ``"100_000_000"`` are."""
    number = as_float(field)
    if number != int(number):
        raise field.mistake("write a whole number")
    return int(number)


def at_least(least: int) -> Callable[[Field], int | None]:
    """A converter to a whole number; to None below ``least``, where programs put switches and shares."""
    return lambda field: as_int(field) if as_float(field) >= least else None


def switch(on: Any, off: Any = None) -> Callable[[Field], Any]:
    """A converter of a truth value to one of two others."""
    return lambda field: on if as_bool(field) else off


def as_text(field: Field) -> str:
    return str(field.value)


def as_words(field: Field | None) -> list[str]:
    """A list of names, written as a list or as one text with commas or spaces; none without a field."""
    if field is None:
        return []
    parts = field.value if isinstance(field.value, list) else re.split(r"[,\s]+", str(field.value))
    return [str(part).strip() for part in parts if str(part).strip()]


def as_parts(field: Field) -> list[Field]:
    """The same, each name a field."""
    return [replace(field, value=one) for one in as_words(field)]


class Told(NamedTuple):
    """A key's value, a comment beside it, and a warning if it is not what the field says."""

    value: Any
    note: str = ""
    warning: str = ""


def one_of(meanings: Mapping[str, Any], otherwise: Any = None) -> Callable[[Field], Any]:
    """A converter of a word by its `spellings`; without ``otherwise`` an unknown one is a `UserError`."""
    known = spellings(meanings)

    def convert(field: Field) -> Any:
        if field.word not in known and otherwise is None:
            raise field.mistake(f"known: {', '.join(words.split()[0] for words in meanings)}")
        return known.get(field.word, otherwise)

    return convert


# What FSDP1 and torch take for what a configuration leaves out, by key; and what programs take first.
OF_FSDP1 = {
    "fsdp.strategy": "full_shard",
    "fsdp.param_dtype": "float32",
    "train.max_grad_norm": 0.0,
    "optimizer.betas": [0.9, 0.999],
    "lr_schedule.name": "constant",
}
_OF_TRAINING_ARGUMENTS = {
    "train.micro_batch_size": 8,
    "train.epochs": 3,
    "train.max_grad_norm": 1.0,
    "optimizer.lr": 5e-5,
    "optimizer.weight_decay": 0.0,
    "lr_schedule.name": "linear",
    "data.pack": False,
}
# axolotl's schema insists on a batch size and a rate; what else it leaves unset is TrainingArguments'.
_OF_AXOLOTL = {
    "train.epochs": 1,
    "train.max_grad_norm": 1.0,
    "optimizer.weight_decay": 0.0,
    "lr_schedule.name": "cosine",
    "data.pack": False,
    "data.train_on": "assistant",
}
# Each of these alone tells transformers' TrainingArguments (TRL's configs are subclasses).
_TRAINING_ARGUMENTS = {
    *("per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "lr_scheduler_type"),
    *("save_strategy", "eval_strategy", "evaluation_strategy", "logging_strategy", "save_total_limit"),
    *("logging_steps", "report_to", "gradient_checkpointing_kwargs", "dataloader_num_workers"),
}
# output_dir was its one required argument; with two of these beside it, and no other loop's name, the file is its.
_BESIDE_OUTPUT_DIR = {
    *("gradient_accumulation_steps", "bf16", "fp16", "learning_rate", "gradient_checkpointing", "max_steps"),
    *("save_steps", "max_grad_norm", "weight_decay", "warmup_steps", "warmup_ratio", "optim"),
}
_OTHER_LOOPS = {"train_batch_size", "batch_size_training", "batch_size", "train_micro_batch_size_per_gpu"}


def defaults_of(fields: list[Field]) -> tuple[str, dict[str, Any]]:
    """The program whose configuration the file is, and what it takes for what the file leaves out, by key."""
    names = {field.name for field in fields}
    if "base_model" in names and {"datasets", "datasets.path", "micro_batch_size", "pretraining_dataset"} & names:
        return "axolotl", _OF_AXOLOTL
    is_named = any(
        field.name == "fsdp" and field.word not in SWITCH for field in fields
    )  # fsdp = "full_shard auto_wrap"
    is_alike = "output_dir" in names and len(names & _BESIDE_OUTPUT_DIR) >= 2 and not names & _OTHER_LOOPS
    if is_named or is_alike or names & _TRAINING_ARGUMENTS:
        return "transformers", _OF_TRAINING_ARGUMENTS
    if "dataset._component_" in names:
        return "torchtune", {"data.pack": False}
    return "a plain loop", {}
