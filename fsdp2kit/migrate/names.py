"""What programs take for what a configuration leaves out, and of which fields a translation warns.

What they call their fields is in `fsdp2kit.config.foreign`; `read_fields` has taken ``fsdp_``, ``use_``, ``enable_``
and the like from the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp2kit.config.foreign import NOT_OFFERED
from fsdp2kit.migrate.fields import SWITCH, Field, as_float, as_words

(_QUANTISED,) = NOT_OFFERED

# Fields without which something else is trained: names, what becomes of them, when that is warned of, the warning.
WARNED_OF: tuple[tuple[str, str, Callable[[Field], Any], str], ...] = (
    (
        "unfrozen_parameters",
        "model.freeze names what is not trained: the rest of what this names, which only the model knows",
        bool,
        "set model.freeze; every parameter would be trained",
    ),
    (
        NOT_OFFERED[_QUANTISED],
        _QUANTISED,
        lambda field: field.word not in ("false", "no", "none"),
        "not offered; weights would be stored unquantised",
    ),
    (
        "datasets.roles_to_train datasets.train_on_eos",
        "the assistant's turns are learnt, with their ends",
        lambda field: not {"assistant", "gpt", "turn"}.issuperset(as_words(field)),
        "not translated: the assistant's turns are learnt, with their ends",
    ),
    ("gamma lr_gamma", "StepLR is not offered", lambda field: as_float(field) != 1, "StepLR is not offered"),
    ("distributed_type", "always FSDP2 here", lambda field: field.word != "fsdp", "this is not an FSDP configuration"),
)

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
