"""The translation of an FSDP1 configuration as one table: what each field of the file becomes, in the TOML's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp2kit.migrate import data, rules
from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import (
    Field,
    Spellings,
    Told,
    as_bool,
    as_float,
    as_int,
    as_parts,
    as_strategy,
    at_least,
    read_fields,
    switch,
)
from fsdp2kit.migrate.names import WARNED_OF, WITHOUT_KEY


@dataclass(frozen=True)
class Row:
    """One key, and a field that it may come from. The first row that finds a value for a key writes its line."""

    key: str
    convert: Callable[[Field], Any]
    """To the key's value, or `Told`; None: the field says nothing about it."""
    note: str = ""
    """Beside the line."""
    otherwise: str = "another field decides"
    """What becomes of a field without a line."""
    slot: str = ""
    """The field's in `NAMES`, if that is not the key."""

    def __call__(self, draft: Draft) -> None:
        """Write the line, if the file has the field."""
        field = draft.take(self.slot or self.key, self.otherwise)
        value = None if field is None else self.convert(field)
        if field is None or value is None or draft.get(self.key) is not None:
            return
        told = value if isinstance(value, Told) else Told(value)
        draft.was(self.key, told.value, field, told.note or self.note)
        if told.warning:
            draft.warnings.append(f"{field}: {told.warning}")


@dataclass(frozen=True)
class Default:
    """A key without a field: a value, or what the file's program takes (`Program`'s field ``of``, unless None)."""

    key: str
    value: Any = None
    why: str = ""
    of: str = ""

    def __call__(self, draft: Draft) -> None:
        """Write the line, if there is none yet."""
        if self.of:
            draft.fill(self.key, getattr(draft.program, self.of), draft.program.default)
        draft.fill(self.key, self.value, f"not in the file: {self.why}")


def _as_text(field: Field) -> str:
    return str(field.value)


def _as_attention(field: Field) -> str:
    known = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
    return field.word if field.word in known else "sdpa"


def _as_depth(field: Field) -> int:
    return field.value if type(field.value) is int else int(as_bool(field))


def _strategy_among(field: Field) -> str | None:
    """The strategy in transformers' ``fsdp = "full_shard auto_wrap offload"``."""
    return next((told.value for one in as_parts(field) if (told := as_strategy.find(one))), None)


def _half_if_on(dtype: str) -> Callable[[Field], Any]:
    """A converter of a switch for a dtype; "auto" is on where the device can, as every one here can."""
    return lambda field: (
        _as_compute_dtype(replace(field, value=dtype)) if field.word == "auto" or as_bool(field) else None
    )


def _cosine_or_constant(field: Field) -> Told:
    """A schedule, also by the name of its function in transformers; what is not offered becomes one that is."""
    if told := _SCHEDULES.find(replace(field, value=field.word.removeprefix("get_"))):
        return told
    if "cosine" in field.word:
        note = "without restarts" if "restart" in field.word else ""
        return Told("cosine", note, "not offered; one half cosine over the whole run was written")
    return Told("constant", "that one is not offered", "not offered; constant was written")


_DTYPES = (("float32 fp32 float no 32 32_true false", "float32"), ("bfloat16 bf16 bf16_mixed amp_bf16", "bfloat16"))
_FLOAT16, _FLOAT8 = "float16 fp16 half 16 16_mixed amp_fp16", "fp8 float8"
_NO_SCALER = "fp16 needed a gradient scaler, which is not offered; bfloat16 needs none"
_as_dtype = Spellings(*_DTYPES, (_FLOAT16, "float16"), (_FLOAT8, "float8"))
_as_compute_dtype = Spellings(
    *_DTYPES,
    (_FLOAT16, Told("bfloat16", _NO_SCALER, f"{_NO_SCALER}; bfloat16 was written")),
    (_FLOAT8, Told("bfloat16", "float8 is not offered", "float8 is not offered; bfloat16 was written")),
)
_as_prefetch = Spellings(
    ("backward_pre pre 1 true", Told(1, "the next unit is gathered while this one's gradients are computed")),
    (
        "backward_post post 2",
        Told(
            0,
            "BACKWARD_POST gathers the next unit when this one's gradients are computed and it is freed: one unit is "
            "whole at a time, and no computation hides the gather. 0 does that; 1 (BACKWARD_PRE) hides it and holds "
            "two",
        ),
    ),
    ("no_prefetch none no 3 false", 0),
)
# "paged_adamw_32bit", "adamw_anyprecision" and the like are others.
_OTHER_ADAMW = "another implementation than the file's; docs/optimizers.md says which"
_as_optimizer = Spellings(
    (
        "adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_fused fused_adamw adamw_torch_xla "
        "adamw_torch_npu_fused adam_w",
        "adamw",
    ),
    ("adamw_8bit adamw_bnb_8bit adamw_torch_8bit adamw8bit", Told("adamw_8bit", warning=_OTHER_ADAMW)),
    ("muon", Told("muon", warning=_OTHER_ADAMW)),
    otherwise=Told("adamw", warning="not offered; plain AdamW was written, whose state is float32"),
)
_SCHEDULES = Spellings(
    ("constant constant_with_warmup", "constant"),
    ("linear", "linear"),
    (
        "cosine cosine_with_min_lr cosine_schedule_with_warmup cosine_annealing cosineannealinglr "
        "cosine_with_warmup cosine_with_min_lr_schedule_with_warmup cosine_annealing_lr",
        "cosine",
    ),
    ("wsd warmup_stable_decay", "wsd"),
)


# In the order of the lines of each section; a function is a rule, which needs more than one field.
TABLE: tuple[Callable[[Draft], None], ...] = (
    rules.set_launch,
    Row("model.weights", switch("random"), otherwise="the model's own weights"),
    rules.set_model,
    rules.set_tokenizer,
    Row("model.attention", _as_attention),
    Row("model.attention", switch("flash_attention_2", "sdpa"), otherwise="model.attention", slot="flash attention"),
    Row("model.trust_remote_code", as_bool),
    Row("model.liger", as_bool, "norms, RoPE, MLPs; of the loss: model.loss_kernel"),
    rules.set_frozen,
    data.set_data,
    data.set_train_on,
    data.set_rows,
    data.set_order,
    Row("fsdp.strategy", as_strategy),
    Row("fsdp.strategy", _strategy_among, otherwise="always on", slot="fsdp"),
    rules.set_resharding,
    Default("fsdp.strategy", "full_shard", "FSDP1's default"),
    rules.set_mesh,
    Row("mesh.cp", at_least(2), otherwise="mesh.cp is 1"),
    rules.set_units,
    Row("fsdp.param_dtype", switch("bfloat16"), slot="pure_bf16"),
    Row("fsdp.param_dtype", _as_compute_dtype),
    Row(
        "fsdp.param_dtype",
        lambda field: None if field.word in rules.SWITCH else _as_compute_dtype(field),
        slot="mixed precision",
    ),
    Row("fsdp.param_dtype", _half_if_on("float16"), slot="fp16"),
    Row("fsdp.param_dtype", _half_if_on("bfloat16"), slot="bf16"),
    Row("fsdp.param_dtype", lambda field: "bfloat16" if field.word == "true" else None, slot="mixed precision"),
    Row(
        "fsdp.param_dtype",
        lambda field: None if field.word == "auto" else _as_compute_dtype(field),
        'shards stay float32; fsdp.storage_dtype = "bfloat16" would store it so',
        slot="dtype",
    ),
    Row("fsdp.param_dtype", lambda _: "float32", slot="mixed precision"),
    Row("fsdp.param_dtype", lambda _: "float32", slot="dtype"),
    Default("fsdp.param_dtype", "float32", "without mixed precision FSDP1 computes in float32"),
    Row("fsdp.reduce_dtype", _as_dtype),
    rules.fill_reduce_dtype,
    Row("fsdp.output_dtype", _as_dtype),
    Row("fsdp.storage_dtype", _as_dtype),
    Row("fsdp.storage_dtype", switch("bfloat16"), "updates below 1/512 of a parameter are lost", slot="pure_bf16"),
    rules.set_ignored,
    rules.set_class_dtypes,
    Row(
        "fsdp.offload",
        lambda field: "params" if "offload" in [one.word for one in as_parts(field)] else None,
        slot="fsdp",
    ),
    rules.set_offload,
    Row("fsdp.backward_prefetch", _as_prefetch),
    Row("fsdp.forward_prefetch", _as_depth, "units ahead"),
    Row("fsdp.reduce_every_micro_batch", as_bool),
    Row("fsdp.reduce_every_micro_batch", switch(False, True), slot="no_sync"),
    rules.set_recomputation,
    Row("compile.enabled", lambda field: field.word not in ("false", "no", "none", "0"), "each layer"),
    rules.set_batches,
    rules.set_length,
    rules.set_clipping,
    Default("train.max_grad_norm", 0.0, "nothing is clipped unless a loop does it", of="max_grad_norm"),
    Row("train.log_every", at_least(1), otherwise="a share of the run; train.log_every counts steps"),
    Row("optimizer.name", _as_optimizer),
    Row("optimizer.lr", as_float),
    Default("optimizer.lr", of="lr"),
    rules.set_betas,
    Row("optimizer.eps", as_float),
    Row("optimizer.weight_decay", as_float, "not of norms and biases"),
    Default("optimizer.weight_decay", of="weight_decay"),
    rules.fill_weight_decay,
    Row("lr_schedule.name", _cosine_or_constant),
    Default("lr_schedule.name", "constant", "no schedule", of="schedule"),
    rules.set_warmup,
    rules.set_floor,
    rules.set_evaluation,
    Row("run.dir", _as_text),
    Row("run.seed", as_int),
    Row("run.deterministic", as_bool),
    Row("run.timeout_minutes", lambda field: as_int(field) / 60, "seconds"),
    rules.set_checkpoints,
    Row("checkpoint.keep", at_least(1), otherwise="checkpoint.keep is at least 1"),
    Row("checkpoint.export_hf", switch("final", "never")),
    Row("wandb.project", _as_text),
    rules.set_wandb,
    Row("wandb.name", _as_text),
    Row("profile.enabled", as_bool),
)


@dataclass(frozen=True)
class Translation:
    """A TOML's text, and what its reader must know before running it."""

    toml: str
    warnings: list[str]
    unknown: list[str]
    world_size: int
    nodes: int


def translate(
    source: Path, *, toml: str, world_size: int | None = None, model: str | None = None, data: str | None = None
) -> Translation:
    """Translate an FSDP1 configuration file.

    Args:
        source: JSON, or YAML.
        toml: the path that the TOML will have: it is in its first line, and paths in it are relative to it.
        world_size: processes in the job; None: what the file says, else one.
        model: a model instead of the file's; data: likewise.

    Raises:
        UserError: the file cannot be read, or one of its values makes no sense.
    """
    draft = Draft(read_fields(source), toml=toml, world_size=world_size, model=model, data=data)
    for entry in TABLE:
        entry(draft)
    draft.fill("run.dir", f"runs/{source.stem}", "not in the file")
    for why, names in WITHOUT_KEY.items():
        for name in names.split():
            draft.take_names(f"{name} mixed_precision.{name} mixed_precision_{name}", why)
    for names, why, is_warned_of, warning in WARNED_OF:
        for field in (draft.take_names(name, why) for name in names.split()):
            if field is not None and is_warned_of(field):
                draft.warnings.append(f"{field}: {warning}")
    unknown = draft.account()
    return Translation(
        toml=draft.text(source=source.name, unknown=unknown),
        warnings=draft.warnings,
        unknown=[str(field) for field in unknown],
        world_size=draft.world_size,
        nodes=draft.nodes,
    )
