"""A configuration file as flat fields, and what their values mean in the spellings that people have for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fsdp2kit.errors import UserError

# Tables whose name says nothing about the fields in them; other tables stay part of the name: `optimizer.lr`.
_PLAIN_TABLES = {
    *("fsdp_config", "fsdp", "fsdp_plugin", "fsdp_args", "parallelism_config", "parallelism", "distributed"),
    *("train_config", "training", "train", "training_args", "training_arguments", "trainer", "args", "config"),
}
# Other names of the table that FSDP1's MixedPrecision was made from.
_MIXED_PRECISION = {"mixed_precision_policy", "mixed_precision_config", "mp_policy", "mixed_precision_kwargs"}


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
    def is_null(self) -> bool:
        """Whether null is what the field says: FSDP1's word for no prefetch."""
        return self.value is None and self.name.startswith("backward_prefetch")

    def mistake(self, todo: str) -> UserError:
        """The error for a value that makes no sense."""
        return UserError(f"{self.file}: {self.path}", f"{self.value!r} is not understood", todo)


def find(fields: Iterable[Field], names: str) -> Field | None:
    """The first field of any of these names, separated by spaces; null and "" count as not given."""
    wanted = names.split()
    return next((one for one in fields if one.name in wanted and (one.value not in (None, "") or one.is_null)), None)


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
        # trainBatchSize, --train-batch-size and TRAIN_BATCH_SIZE are train_batch_size.
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key).lstrip("-")).replace("-", "_").lower()
        short = snake.removeprefix("fsdp_")
        if isinstance(value, Mapping) and value:
            table = "mixed_precision" if short in _MIXED_PRECISION else short
            inside = name if snake in _PLAIN_TABLES else f"{name}{table}."
            yield from _flatten(value, path=f"{path}{key}.", name=inside, file=file)
        else:
            yield Field(f"{path}{key}", f"{name}{short}", value, file)


def as_bool(field: Field) -> bool:
    """A truth value, as YAML and shell scripts write it."""
    if field.word in ("true", "yes", "on", "1"):
        return True
    if field.word in ("false", "no", "off", "0", "none"):
        return False
    raise field.mistake("write true or false")


def as_float(field: Field) -> float:
    """A number, or a text that is one (YAML reads ``1e-5`` as a text)."""
    try:
        return float(str(field.value).replace("_", ""))
    except ValueError:
        raise field.mistake("write a number") from None


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


def as_words(field: Field) -> list[str]:
    """A list of names, written as a list or as one text with commas or spaces."""
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


class Spellings:
    """A converter of words, by all the spellings of each value (separated by spaces)."""

    def __init__(self, *meanings: tuple[str, Any], otherwise: Told | None = None) -> None:
        self._meanings = [(spellings.split(), value) for spellings, value in meanings]
        self._otherwise = otherwise

    def find(self, field: Field) -> Told | None:
        """What the word means, or None."""
        value = next((value for spellings, value in self._meanings if field.word in spellings), None)
        return value if value is None or isinstance(value, Told) else Told(value)

    def __call__(self, field: Field) -> Told:
        """What the word means; else what unknown ones mean, or a `UserError` with the known ones."""
        told = self.find(field) or self._otherwise
        if told is None:
            raise field.mistake(f"known: {', '.join(spellings[0] for spellings, _ in self._meanings)}")
        return told


_WITHIN_NODE = "shards over the ranks of a node, unless [mesh] says otherwise"
as_strategy = Spellings(
    ("full_shard 1 zero3 zero_3 zero_stage_3", "full_shard"),
    (
        "shard_grad_op 2 zero2 zero_2 zero_stage_2",
        Told("shard_grad_op", "ZeRO-2: parameters stay whole between forward and backward"),
    ),
    ("no_shard 3 ddp", Told("no_shard", "replicated, like DDP; it never was ZeRO-1")),
    ("hybrid_shard 4", Told("hybrid_shard", _WITHIN_NODE)),
    ("hybrid_shard_zero2 _hybrid_shard_zero2 5", Told("hybrid_shard_zero2", _WITHIN_NODE)),
)


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


@dataclass(frozen=True)
class Program:
    """What a program takes where its configuration says nothing; None: it insists on the field, or nobody knows."""

    name: str
    """For comments."""
    lr: float | None = None
    micro_batch_size: int | None = None
    epochs: int | None = None
    max_grad_norm: float | None = None
    schedule: str | None = None
    weight_decay: float | None = None
    pads: bool = False
    """Whether a row of the batch is one padded document unless the file asks for packing."""

    @property
    def default(self) -> str:
        """The comment of a value that is this program's."""
        return f"not in the file: the default of {self.name}"


# transformers.TrainingArguments.
TRANSFORMERS = Program("transformers", 5e-5, 8, 3, max_grad_norm=1.0, schedule="linear", weight_decay=0.0, pads=True)
# axolotl's schema; what it leaves unset is TrainingArguments', as max_grad_norm is.
AXOLOTL = Program("axolotl", epochs=1, max_grad_norm=1.0, schedule="cosine", weight_decay=0.0, pads=True)
OTHER = Program("torch")


def program_of(fields: list[Field]) -> Program:
    """The program whose configuration the file is: what a field that is not there means depends on it."""
    names = {field.name for field in fields}
    if "base_model" in names and names & {"datasets", "micro_batch_size", "pretraining_dataset"}:
        return AXOLOTL
    legacy = find(fields, "fsdp")  # fsdp = "full_shard auto_wrap"
    if names & _TRAINING_ARGUMENTS or (legacy is not None and any(map(as_strategy.find, as_parts(legacy)))):
        return TRANSFORMERS
    if "output_dir" in names and len(names & _BESIDE_OUTPUT_DIR) >= 2 and not names & _OTHER_LOOPS:
        return TRANSFORMERS
    return OTHER
