"""What needs more than one field to be said, but for data: functions that the table of `translate` calls in order."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsdp2kit.config.foreign import DTYPE_WORDS, STRATEGY_WORDS, spellings
from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import (
    SWITCH,
    Field,
    Told,
    as_bool,
    as_float,
    as_int,
    as_parts,
    as_text,
    as_words,
    one_of,
)

STRATEGIES = spellings(STRATEGY_WORDS)
_GROUPS = ("mesh.dp_replicate", "mesh.dp_shard")


def set_launch(draft: Draft) -> None:
    """Processes as the file says, at last from its group sizes, else one."""
    slots = ("processes", "processes of a node", "nodes", "host", "port")
    processes, per_node, machines, host, port = (draft.take(slot, "in the command line at the top") for slot in slots)
    groups = [as_int(field) for key in _GROUPS if (field := draft.take(key, f'{key} is "auto"'))]
    nodes = max(1, as_int(machines)) if machines else 1
    size = as_int(processes) if processes else as_int(per_node) * nodes if per_node else 0
    if size < 1 and len(groups) == 2:
        size = groups[0] * groups[1]
    if size < 1:
        size, draft.is_guess = 1, True
        draft.warnings.append("the file does not say how many processes there are: one is assumed; give --world-size")
    if size % nodes:
        draft.warnings.append(f"{machines}: {size} processes do not spread over them; one node was taken")
        nodes = 1
    draft.world_size, draft.nodes = size, nodes
    draft.endpoint = f"{host.value if host else 'HOST'}:{port.value if port else 29500}"


def set_model(draft: Draft) -> None:
    """``model.path``, or ``model.config`` with random weights; ``model.tokenizer``, a directory."""
    path = draft.take("model.path")
    config = [field for field in draft.fields if field.name.startswith("model_config.")]
    if path is not None:
        draft.was("model.path", draft.relative(as_text(path)), path)
    elif any(field.name == "model_config.model_type" for field in config):
        draft.fill("model.weights", "random", "a model from a config")
    else:
        draft.fill("model.path", "your-org/your-model", "what your script loads")
        draft.needs.append("model.path=MODEL")
    for field in config:
        draft.note(field, "the default")
        draft.was(f"model.config.{field.name.removeprefix('model_config.')}", field.value, field)
    tokenizer = draft.take("model.tokenizer", "a Hugging Face directory is needed; the model's own is used")
    if tokenizer is not None and not as_text(tokenizer).endswith((".model", ".json")):
        draft.was("model.tokenizer", draft.relative(as_text(tokenizer)), tokenizer)


def set_frozen(draft: Draft) -> None:
    """``model.freeze``: llama-recipes' ``freeze_layers`` with ``num_freeze_layers``, or a list of names."""
    frozen = draft.take("model.freeze", "every parameter is trained")
    number = draft.take("frozen layers", "nothing is frozen")
    if frozen is not None and isinstance(frozen.value, list):
        draft.was("model.freeze", as_words(frozen), frozen)
    elif frozen is not None and as_bool(frozen):
        layers = [f"*.layers.{index}.*" for index in range(as_int(number) if number else 1)]
        draft.was("model.freeze", layers, frozen, number)


def set_adapters(draft: Draft) -> None:
    """``[lora]``, where a switch or the method turns adapters on, or where nothing but a rank is said of them."""
    switch, method = draft.take("adapter switch"), draft.take("adapter method", "the whole model is trained")
    kind = method.word if method else "lora"
    rank = draft.take("lora.rank", _NO_ADAPTERS)
    details = [(key, draft.take(key, _NO_ADAPTERS), convert) for key, convert in _OF_ADAPTERS]
    everywhere = draft.take("all linear layers", "the default" if rank else _NO_ADAPTERS)
    four_bits = draft.take("lora.quantize", "weights are not quantised")
    if four_bits is not None and not as_bool(four_bits):
        four_bits = None
    if not (as_bool(switch) if switch else rank if method is None else kind not in ("full", "freeze", "none")):
        if four_bits is not None:
            draft.warnings.append(f"{four_bits}: not offered without adapters; weights would be stored unquantised")
        return
    if kind not in ("lora", "qlora"):
        draft.warnings.append(f"{method}: not offered; the whole model would be trained")
        return
    draft.was("lora.rank", 8 if rank is None else as_int(rank), rank or switch or method)
    draft.note(switch if rank else None, "lora.rank")
    draft.note(method, "lora.rank")
    for key, field, convert in details:
        if field is not None:
            draft.was(key, convert(field), field)
    if everywhere is not None and as_bool(everywhere):
        draft.was("lora.target_modules", "all-linear", everywhere)
    if kind == "qlora" or four_bits is not None:
        draft.was("lora.quantize", "nf4", four_bits or method)


def _as_targets(field: Field) -> str | list[str]:
    return "all-linear" if field.word in ("all", "all_linear") else as_words(field)


_NO_ADAPTERS = "no adapters are trained"
_OF_ADAPTERS: tuple[tuple[str, Callable[[Field], Any]], ...] = (
    ("lora.alpha", as_int),
    ("lora.dropout", as_float),
    ("lora.target_modules", _as_targets),
    ("lora.modules_to_save", as_words),
    ("lora.rslora", as_bool),
    ("lora.dora", as_bool),
)


def set_resharding(draft: Draft) -> None:
    """``fsdp.reshard_after_forward``; where no other field names the strategy, that (accelerate, fsdp_version 1)."""
    reshard = draft.take("fsdp.reshard_after_forward")
    if reshard is None:
        return
    strategy = STRATEGIES.get(reshard.word) if isinstance(reshard.value, str) else None
    if reshard.word in SWITCH:
        strategy = "full_shard" if as_bool(reshard) else "shard_grad_op"
    if strategy is not None and draft.get("fsdp.strategy") is None:
        draft.was("fsdp.strategy", strategy, reshard)
    else:
        value = as_bool(reshard) if reshard.word in SWITCH else as_int(reshard)
        draft.was("fsdp.reshard_after_forward", value, reshard)


def set_mesh(draft: Draft) -> None:
    """``[mesh]``, after the strategy, which a number of replicas changes."""
    is_hybrid = draft.get("fsdp.strategy").startswith("hybrid")
    for key in _GROUPS:
        field = draft.take(key)
        size = as_int(field) if field else 0
        if size < 1 or (key == "mesh.dp_replicate" and size == 1 and not is_hybrid):
            continue
        if draft.is_guess and size > 1:
            draft.note(field, f"{key} = {size} once --world-size is known")
        else:
            draft.was(key, size, field)
    if draft.get("mesh.dp_replicate") and not is_hybrid:
        hybrid = "hybrid_shard_zero2" if draft.get("fsdp.strategy") == "shard_grad_op" else "hybrid_shard"
        draft.set("fsdp.strategy", hybrid, "was a replicate size above 1")


_as_unit = one_of(
    {
        "transformer_based_wrap transformer transformer_layer transformer_auto_wrap layer 1": "layer",
        "size_based_wrap size size_based size_based_auto_wrap_policy 2": "size",
        "no_wrap none no root 3 false": "root",
    }
)
# A model's layer: LlamaDecoderLayer, GPT2Block; not the block of experts inside one.
_LAYER = re.compile(r"DecoderLayer$|(?<!Moe)(?<!MoE)(?<!MOE)Block$")


def set_units(draft: Draft) -> None:
    """``fsdp.unit`` with ``min_params`` and ``unit_classes``: what FSDP1's wrap policy said."""
    policy, least = draft.take("fsdp.unit"), draft.take("fsdp.min_params")
    number = max(0, as_int(least)) if least else 0
    # transformers' older field: a number alone means by size.
    unit = _as_unit(policy) if policy and policy.word != "true" else "size" if number else "layer"
    draft.was("fsdp.unit", unit, policy or (least if unit == "size" else None))
    draft.note(least, f'not used with unit = "{unit}"')
    if unit == "size" and number:
        draft.was("fsdp.min_params", number, least)
    found = "decoder layers are found by themselves (transformers' _no_split_modules)"
    classes = draft.take("fsdp.unit_classes", found)
    # Of a list for many models most layers are not in this one. What is named beside them becomes a unit too.
    names = as_words(classes)
    layers = [name for name in names if _LAYER.search(name)]
    layers = layers or [name for name in names if name.endswith("Layer")] or names[:1]
    extra = [name for name in names if name not in layers]
    if extra and unit == "layer":
        draft.was("fsdp.unit_classes", extra, classes, note=f"{found}; the model must have these")


_NO_SCALER = "fp16 needs a gradient scaler, which is not offered; bfloat16 was written"
_HALF = {
    words: Told("bfloat16", "fp16 needs a gradient scaler", _NO_SCALER)
    for words, name in DTYPE_WORDS.items()
    if name == "float16"
}
as_dtype = one_of({**DTYPE_WORDS, **_HALF})
_as_compute_dtype = one_of(
    {
        **DTYPE_WORDS,
        **_HALF,
        "fp8 float8": Told("bfloat16", "see docs/float8.md", "see docs/float8.md; bfloat16 was written"),
    }
)


def set_param_dtype(draft: Draft) -> None:
    """``fsdp.param_dtype``: the first field that names one or is switched on; what is off leaves it to the next."""
    switches = {"pure_bf16": "bf16", "fsdp.param_dtype": "", "fp16": "fp16", "bf16": "bf16", "mixed precision": "bf16"}
    off = None
    for slot, dtype in {**switches, "dtype": ""}.items():
        field = draft.take(slot)
        if field is None or draft.get("fsdp.param_dtype") is not None:
            continue
        if field.word in ("false", "no", "off", "0", "none") or (field.word == "auto" and not dtype):
            off = off or field
            continue
        is_on = bool(dtype) and field.word in ("true", "yes", "on", "1", "auto")
        note = 'shards stay float32; fsdp.storage_dtype = "bfloat16" would store it so' if slot == "dtype" else ""
        value = _as_compute_dtype(replace(field, value=dtype) if is_on else field)
        draft.was("fsdp.param_dtype", value, field, note=note)
    if draft.get("fsdp.param_dtype") is None:
        draft.was("fsdp.param_dtype", "float32", off)


def fill_reduce_dtype(draft: Draft) -> None:
    """FSDP1 takes the dtype of the computation, after which this comes."""
    if draft.get("fsdp.param_dtype") != "float32":
        why = 'FSDP1 then reduces gradients in param_dtype; "float32" is exact, for twice the bytes'
        draft.fill("fsdp.reduce_dtype", draft.get("fsdp.param_dtype"), why)


def set_ignored(draft: Draft) -> None:
    """``fsdp.ignored_modules`` and, since nothing reduces their gradients, ``model.freeze``, after that is written.

    FSDP1 has names, accelerate a regular expression, whose alternatives are names of their own.
    """
    ignored = draft.take("fsdp.ignored_modules", "every parameter is sharded")
    if ignored is None or ignored.value == []:
        return
    names = [name for one in as_words(ignored) for name in one.strip("()^$").split("|") if name]
    patterns = [re.sub(r"(\.weight)?(\.bias)?$", "", name.replace(r"\.", ".").replace(".*", "*")) for name in names]
    if not all(re.fullmatch(r"[\w.*]+", one) and one.strip(".*") for one in patterns):
        draft.note(ignored, "not names of modules: write fsdp.ignored_modules and model.freeze yourself")
        draft.warnings.append(f"{ignored}: not translated; set fsdp.ignored_modules and model.freeze")
        return
    modules = list(dict.fromkeys(patterns))
    inside = [name if name.endswith("*") else f"{name}.*" for name in modules]
    frozen = list(dict.fromkeys([*(draft.get("model.freeze") or []), *inside]))
    frozen_here = Told(frozen, "nothing reduces ignored gradients", "these modules are frozen here (model.freeze)")
    draft.was("model.freeze", frozen_here, ignored, draft.take("model.freeze"))
    draft.was("fsdp.ignored_modules", modules, ignored)


def set_class_dtypes(draft: Draft) -> None:
    """``fsdp.class_dtypes``, after ``param_dtype``; of FSDP1's default, batch norms, a decoder has none."""
    is_float32 = draft.get("fsdp.param_dtype") == "float32"
    otherwise = "everything computes in float32" if is_float32 else "FSDP1's default: a decoder has no batch norm"
    classes = draft.take("fsdp.class_dtypes", otherwise)
    names = [re.sub(r"^<class|[<>'\"]", "", one).strip().rpartition(".")[2] for one in as_words(classes)]
    known = [one for one in names if one and not re.fullmatch(r"_?(Sync)?BatchNorm(\dd)?", one)]
    if known and not is_float32:
        note = "the model must have these classes"
        draft.was("fsdp.class_dtypes", dict.fromkeys(known, "float32"), classes, note=note)


def set_offloaded_activations(draft: Draft) -> None:
    """``activation_checkpointing.offload``, which offloads the inputs of layers that are checkpointed."""
    mode, to_host = "activation_checkpointing.mode", draft.take("activation_checkpointing.offload")
    if to_host is not None and as_bool(to_host) and draft.get(mode) != "full":
        more = 'and so mode = "full": what is kept for backward is each layer\'s input'
        draft.was(mode, Told("full", more, more), to_host)
    draft.was("activation_checkpointing.offload", as_bool(to_host) if to_host else None, to_host)


def set_batches(draft: Draft) -> None:
    """``micro_batch_size`` (FSDP1's loops count per device) and ``global_batch_size`` (the whole job's)."""
    key, default = "train.global_batch_size", draft.defaults.get("train.micro_batch_size", 1)
    batch, whole, smaller = draft.take("batch per device"), draft.take(key), draft.take("train.micro_batch_size")
    rounds = draft.take("accumulation", "derived: global_batch_size ÷ (ranks × micro_batch_size)")
    dp = max(1, draft.world_size // (draft.get("mesh.cp") or 1))
    per_step = max(1, as_int(batch)) if batch else default
    micro = max(1, as_int(smaller)) if smaller else per_step
    accumulation = max(1, as_int(rounds)) if rounds else 1
    if smaller is not None and batch is not None:
        accumulation = max(accumulation, per_step // micro)
        draft.note(batch, f"per device and step: {accumulation} micro-batches of {micro}")
    if whole is not None:
        asked = as_int(whole)
        if not (smaller or batch):
            micro = math.gcd(asked // dp, micro) or 1
        fitting = max(1, asked // (dp * micro)) * dp * micro
        more = f"{dp} data-parallel ranks × {micro} × accumulation"
        if fitting != asked:
            more = f"made {fitting}, a multiple of {more}"
        draft.was(key, Told(fitting, more, more if fitting != asked else ""), whole)
    else:
        guess = "; give --world-size if there are more ranks" if draft.is_guess else ""
        product = f"per device {micro} × {dp} data-parallel ranks × accumulation {accumulation}{guess}"
        draft.set(key, micro * dp * accumulation, product)
    if field := smaller or batch:
        draft.was("train.micro_batch_size", micro, field, note="per device, as FSDP1's loops count")
    elif micro == default:
        draft.fill("train.micro_batch_size", micro, "yours to set")
    else:
        draft.set("train.micro_batch_size", micro, "not in the file: what divides the global batch")


def set_length(draft: Draft) -> None:
    """``train.steps`` or ``train.epochs``."""
    steps, epochs = draft.take("train.steps", "epochs decide"), draft.take("train.epochs", "train.steps decides")
    if steps is not None and as_int(steps) > 0:
        draft.was("train.steps", as_int(steps), steps)
    elif draft.get("data.format") != "synthetic" and (epochs or "train.epochs" in draft.defaults):
        draft.was("train.epochs", max(1, math.ceil(as_float(epochs))) if epochs else None, epochs)
        draft.fill("train.epochs")
    else:
        draft.note(steps, "not a number of steps")
        draft.note(epochs, "synthetic tokens have no end")
        draft.fill("train.steps", 100)


def set_clipping(draft: Draft) -> None:
    """``train.max_grad_norm``: of a number, or of a switch with a number beside it."""
    norm, clip = draft.take("train.max_grad_norm"), draft.take("clipping")
    if clip is not None and clip.word in SWITCH:
        number = (as_float(norm) if norm else 1.0) if as_bool(clip) else 0.0
        draft.was("train.max_grad_norm", number, clip, norm)
    elif found := norm or clip:
        draft.was("train.max_grad_norm", as_float(found), found, note="the norm of the whole global batch")


def set_betas(draft: Draft) -> None:
    """``optimizer.betas``, of one field or two."""
    betas, first, second = (draft.take(slot) for slot in ("optimizer.betas", "first beta", "second beta"))
    if betas is not None and len(as_words(betas)) != 2:
        raise betas.mistake("write two numbers")
    if betas is not None:
        draft.was("optimizer.betas", [as_float(one) for one in as_parts(betas)], betas)
    else:
        pair = [as_float(first) if first else 0.9, as_float(second) if second else 0.999]
        draft.was("optimizer.betas", pair, first, second)


def set_floor(draft: Draft) -> None:
    """``lr_schedule.min_lr_ratio``, of schedules that have a floor."""
    least = draft.take("lr_schedule.min_lr_ratio", "this schedule has no floor")
    if least is not None and draft.get("lr_schedule.name") in ("cosine", "wsd"):
        draft.was("lr_schedule.min_lr_ratio", as_float(least), least)


def set_warmup(draft: Draft) -> None:
    """``lr_schedule.warmup_steps`` or ``warmup_ratio``."""
    key, share_key, steps = "lr_schedule.warmup_steps", "lr_schedule.warmup_ratio", draft.get("train.steps")
    warmup, ratio = draft.take(key), draft.take(share_key)
    if warmup is not None and as_float(warmup) >= 1:
        draft.was(key, as_int(warmup), warmup)
    elif (share := ratio or warmup) is not None:
        draft.was(share_key, as_float(share), share)
    elif draft.program == "axolotl":
        why = "axolotl takes 3 % of the steps, at most 100"
        draft.fill(*((key, min(int(0.03 * steps), 100), why) if steps else (share_key, 0.03, why)))


def set_evaluation(draft: Draft) -> None:
    """``[eval]``, where the file names held-out data."""
    path, split, every, batches, asked = (
        draft.take(slot, "held-out data are needed: eval.path, or another eval.split")
        for slot in ("eval.path", "eval.split", "eval.every", "eval.steps", "evaluates")
    )
    draft.note(asked, "eval.every says when, in steps; 0 does not evaluate")
    share = draft.take("held-out share", "no rows are held out")
    number = as_float(share) if share is not None and draft.get("data.path") and path is None else 0
    if share is not None and number > 0:
        draft.was("eval.split", int(number) if number >= 1 else number, share)
        draft.fill("eval.every", 100, "in steps: yours to set")
        return
    trained = (draft.get("data.path"), draft.get("data.split") or "train")
    held_out = draft.relative(as_text(path)) if path is not None else trained[0]
    split_name = as_text(split) if split is not None else "train"
    is_off = asked is not None and asked.word in ("no", "false")
    if is_off or held_out is None or (held_out, split_name) == trained:
        return
    if every is not None and as_float(every) >= 1:
        draft.was("eval.every", as_int(every), every)
    else:
        draft.note(every, "a share of the run; eval.every counts steps")
        draft.fill("eval.every", 100, "in steps: yours to set")
    draft.was("eval.path", held_out, path)
    draft.was("eval.split", split_name, split)
    draft.note(batches, "all of them")
    draft.was("eval.steps", (as_int(batches) or None) if batches else None, batches, note="global batches")


def set_checkpoints(draft: Draft) -> None:
    """``checkpoint.every``, in steps."""
    every = draft.take("checkpoint.every", "a checkpoint is written every 30 minutes, and at the end")
    when = draft.take("save strategy", "checkpoint.every says when, in steps or as a time; 0: at the end")
    if every is not None and not (when and when.word in ("no", "epoch")) and as_int(every) >= 0:
        draft.was("checkpoint.every", as_int(every), every)


def set_wandb(draft: Draft) -> None:
    """``wandb.mode``; without a word about it, a project alone asks for it."""
    report, use = draft.take("reports"), draft.take("wandb.mode")
    names = {one.word for one in as_parts(report)} if report else set()
    is_wanted = as_bool(use) if use else bool({"wandb", "all"} & names) if report else bool(draft.get("wandb.project"))
    draft.was("wandb.mode", "auto" if is_wanted else "disabled", use or report)
    if not is_wanted:
        draft.fill("wandb.mode", "disabled", "no tracker is named")
