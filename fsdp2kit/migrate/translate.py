"""The translation of an FSDP1 configuration as one table: what each field of the file becomes, in the TOML's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2kit.config.foreign import ADAMW_WORDS, NOT_OFFERED, STRATEGY_WORDS, WITHOUT_KEY
from fsdp2kit.migrate import data, rules
from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import (
    Field,
    Told,
    as_bool,
    as_float,
    as_int,
    as_parts,
    as_text,
    as_words,
    at_least,
    one_of,
    read_fields,
    switch,
)


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
    beside: str = ""
    """Only where this key has a line."""

    def __call__(self, draft: Draft) -> None:
        """Write the line, if the file has the field."""
        field = draft.take(self.slot or self.key, self.otherwise)
        if field is not None and draft.get(self.key) is None and (not self.beside or draft.get(self.beside)):
            draft.was(self.key, self.convert(field), field, note=self.note)


def default(key: str, value: Any = None, why: str = "", *, beside: str = "") -> Callable[[Draft], None]:
    """A key that no row has found: what the file's program takes, else the value; `beside` as a `Row`'s."""
    return lambda draft: draft.fill(key, value, why) if not beside or draft.get(beside) else None


def _as_schedule(field: Field) -> Any:
    """A schedule, also by the name of its function; what is not offered becomes one that is."""
    word = "wsd" if "stable_decay" in field.word else field.word
    name = next((name for name in ("cosine", "linear", "constant", "wsd") if name in word), None)
    if name is None:
        return Told("constant", warning="not offered; constant was written")
    is_repeated = "restart" in word or "cycl" in word
    return Told(name, warning="not offered; one half cosine over the whole run was written" if is_repeated else "")


def _as_packing(field: Field) -> Told:
    return Told(as_bool(field), _PACKS if as_bool(field) else "")


def _as_selective(field: Field) -> str | None:
    """Of a switch; a number is that of the layers from one checkpointed to the next."""
    return "selective" if type(field.value) is not int and as_bool(field) else None


def _as_mode(field: Field) -> str:
    return field.word if field.word in ("full", "selective", "none") else "full" if as_bool(field) else "none"


_PACKS = "documents in a row do not see each other; train.global_batch_size then counts packs of seq_len tokens"
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_as_prefetch = one_of(
    {
        "backward_pre pre 1 true": 1,
        "backward_post post 2": Told(0, "the nearest, docs/fsdp1_to_fsdp2.md says why; 1 hides the gathers"),
        "no_prefetch none no 3 false": 0,
    }
)
# "paged_adamw_32bit", "adamw_anyprecision" and the like are others.
_OTHER_ADAMW = "another implementation than the file's; docs/optimizers.md says which"
_as_optimizer = one_of(
    {
        **{
            words: Told(name, warning=_OTHER_ADAMW if name == "adamw_8bit" else "")
            for words, name in ADAMW_WORDS.items()
        },
        "muon": Told("muon", warning=_OTHER_ADAMW),
    },
    otherwise=Told("adamw", warning="not offered; plain AdamW was written, whose state is float32"),
)


# In the order of the lines of each section; a function is a rule, which needs more than one field.
TABLE: tuple[Callable[[Draft], None], ...] = (
    rules.set_launch,
    Row("model.weights", switch("random"), otherwise="the model's own weights"),
    rules.set_model,
    Row("model.attention", one_of(dict(zip(_ATTENTION, _ATTENTION, strict=True)), otherwise="sdpa")),
    Row("model.attention", switch("flash_attention_2", "sdpa"), otherwise="model.attention", slot="flash attention"),
    Row("model.trust_remote_code", as_bool),
    Row("model.liger", as_bool, "norms, RoPE, MLPs; the loss is computed in chunks here"),
    rules.set_frozen,
    rules.set_adapters,
    data.set_data,
    data.set_train_on,
    Row("data.seq_len", as_int),
    default("data.seq_len", 2048, "our default, set your own"),
    Row("data.pack", _as_packing),
    Row("data.pack", lambda field: Told(True, _PACKS) if field.word == "packing" else False, slot="batching strategy"),
    # run_clm's blocks are cut from concatenated texts.
    Row(
        "data.pack", lambda field: field.name == "block_size" or None, _PACKS, slot="data.seq_len", beside="data.path"
    ),
    default("data.pack", True, f"our default, false if your loop pads; {_PACKS}", beside="data.path"),
    Row("data.shuffle", as_bool, otherwise=data.RANDOM, beside="data.path"),
    Row("data.streaming", as_bool, otherwise=data.RANDOM, beside="data.path"),
    Row("fsdp.strategy", one_of(STRATEGY_WORDS)),
    # transformers' fsdp = "full_shard auto_wrap offload"
    Row(
        "fsdp.strategy",
        lambda field: next(
            (rules.STRATEGIES[one.word] for one in as_parts(field) if one.word in rules.STRATEGIES), None
        ),
        otherwise="always on",
        slot="fsdp",
    ),
    rules.set_resharding,
    default("fsdp.strategy"),
    rules.set_mesh,
    Row("mesh.cp", at_least(2), otherwise="mesh.cp is 1"),
    rules.set_units,
    rules.set_param_dtype,
    default("fsdp.param_dtype"),
    Row("fsdp.reduce_dtype", rules.as_dtype),
    rules.fill_reduce_dtype,
    Row("fsdp.output_dtype", rules.as_dtype),
    Row("fsdp.storage_dtype", rules.as_dtype),
    Row("fsdp.storage_dtype", switch("bfloat16"), "updates below 1/512 of a parameter are lost", slot="pure_bf16"),
    rules.set_ignored,
    rules.set_class_dtypes,
    Row("fsdp.offload", lambda field: "params" if "offload" in as_words(field) else None, slot="fsdp"),
    Row("fsdp.offload", lambda field: "params" if field.word == "params" or as_bool(field) else None),
    Row("fsdp.offload", switch("optimizer"), otherwise="fsdp.offload", slot="offload of the optimizer"),
    Row("fsdp.offload", lambda _: "none"),
    Row("fsdp.backward_prefetch", _as_prefetch),
    Row("fsdp.forward_prefetch", lambda field: field.value if type(field.value) is int else int(as_bool(field))),
    Row("fsdp.reduce_every_micro_batch", as_bool),
    Row("fsdp.reduce_every_micro_batch", lambda field: not as_bool(field), slot="no_sync"),
    Row("activation_checkpointing.mode", _as_selective, slot="activation_checkpointing.every"),
    Row("activation_checkpointing.mode", _as_mode),
    Row("activation_checkpointing.every", lambda field: field.value if type(field.value) is int else None),
    default("activation_checkpointing.mode", "full", "of every n-th layer", beside="activation_checkpointing.every"),
    rules.set_offloaded_activations,
    Row("compile.enabled", lambda field: field.word not in ("false", "no", "none", "0"), "each layer"),
    rules.set_batches,
    rules.set_length,
    rules.set_clipping,
    default("train.max_grad_norm"),
    Row("train.log_every", at_least(1), otherwise="a share of the run; train.log_every counts steps"),
    Row("optimizer.name", _as_optimizer),
    Row("optimizer.lr", as_float),
    default("optimizer.lr"),
    rules.set_betas,
    default("optimizer.betas"),
    Row("optimizer.eps", as_float),
    Row("optimizer.weight_decay", as_float, "not of norms and biases"),
    # torch's own, for a loop whose learning rate is known
    lambda draft: draft.fill("optimizer.weight_decay", 0.01 if draft.get("optimizer.lr") else None, "torch's AdamW's"),
    Row("lr_schedule.name", _as_schedule),
    default("lr_schedule.name"),
    rules.set_warmup,
    rules.set_floor,
    rules.set_evaluation,
    Row("run.dir", as_text),
    Row("run.seed", as_int),
    Row("run.deterministic", as_bool),
    Row("run.timeout_minutes", lambda field: as_int(field) / 60, "seconds"),
    rules.set_checkpoints,
    Row("checkpoint.keep", at_least(1), otherwise="checkpoint.keep is at least 1"),
    Row("checkpoint.export_hf", switch("final", "never")),
    Row("wandb.project", as_text),
    rules.set_wandb,
    Row("wandb.name", as_text),
    Row("profile.enabled", as_bool),
)

# Fields without which something else is trained: names, what becomes of them, when that is warned of, the warning.
WARNED_OF: tuple[tuple[str, str, Callable[[Field], Any], str], ...] = (
    (
        "unfrozen_parameters",
        "model.freeze names what is not trained: the rest of what this names, which only the model knows",
        bool,
        "set model.freeze; every parameter would be trained",
    ),
    *(
        (
            names,
            why,
            lambda field: field.word not in ("false", "no", "none"),
            "not offered; weights would be stored unquantised",
        )
        for why, names in NOT_OFFERED.items()
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


def translate(
    source: Path, *, toml: str, world_size: int | None = None, model: str | None = None, data: str | None = None
) -> Draft:
    """Translate an FSDP1 configuration file: `Draft.toml` is the result.

    Args:
        source: JSON, or YAML.
        toml: the path that the TOML will have: it is in its first line, and paths in it are relative to it.
        world_size: processes in the job; None: what the file says, else one.
        model: a model instead of the file's; data: likewise.

    Raises:
        UserError: the file cannot be read, or one of its values makes no sense.
    """
    given = [
        Field("--world-size", "num_processes", world_size, source),
        Field("--model", "model_path", model, source),
        Field("--data", "data_path", data, source),
    ]
    fields = [*(field for field in given if field.value is not None), *read_fields(source)]
    draft = Draft(fields, source=source.name, path=toml)
    for write in TABLE:
        write(draft)
    draft.fill("run.dir", f"runs/{source.stem}")
    for why, names in WITHOUT_KEY.items():
        draft.explain(names, why)
    for names, why, is_warned_of, warning in WARNED_OF:
        draft.warnings += [f"{field}: {warning}" for field in draft.explain(names, why) if is_warned_of(field)]
    return draft
