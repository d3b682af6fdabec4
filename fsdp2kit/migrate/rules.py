"""What needs more than one field to be said, but for data: functions that the table of `translate` calls in order."""

from __future__ import annotations

import math
import re

from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import (
    AXOLOTL,
    Spellings,
    Told,
    as_bool,
    as_float,
    as_int,
    as_parts,
    as_strategy,
    as_words,
)

# The words of a switch, in fields that may hold a name or a number instead.
SWITCH = ("true", "false")


def set_resharding(draft: Draft) -> None:
    """``fsdp.reshard_after_forward``; where no other field names the strategy, that (accelerate, fsdp_version 1)."""
    reshard = draft.take("fsdp.reshard_after_forward")
    if reshard is None:
        return
    is_switch = reshard.word in SWITCH
    told = as_strategy.find(reshard) if isinstance(reshard.value, str) else None
    if is_switch:
        told = Told("full_shard" if as_bool(reshard) else "shard_grad_op")
    if told is not None and draft.get("fsdp.strategy") is None:
        draft.was("fsdp.strategy", told.value, reshard, told.note)
    else:
        draft.was("fsdp.reshard_after_forward", as_bool(reshard) if is_switch else as_int(reshard), reshard)


def set_offload(draft: Draft) -> None:
    """``fsdp.offload``; the optimizer's comes with the parameters'."""
    params = draft.take("fsdp.offload")
    optimizer = draft.take("offload of the optimizer", "fsdp.offload")
    if params is not None:
        is_on = params.word == "params" or as_bool(params)
        more = "shards, gradients and optimizer step on the host" if is_on else ""
        draft.was("fsdp.offload", "params" if is_on else "none", params, more)
    if optimizer is not None and as_bool(optimizer) and draft.get("fsdp.offload") != "params":
        draft.was("fsdp.offload", "optimizer", optimizer)


_GROUPS = ("mesh.dp_replicate", "mesh.dp_shard")


def set_launch(draft: Draft) -> None:
    """Processes from the command line, else from the file (at last from its group sizes), else one."""
    told = "in the command line at the top"
    processes, per_node = draft.take("processes", told), draft.take("processes of a node", told)
    machines = draft.take("nodes", told)
    host, port = draft.take("host", told), draft.take("port", told)
    groups = [as_int(field) for key in _GROUPS if (field := draft.take(key, f'{key} is "auto"'))]
    nodes = max(1, as_int(machines)) if machines else 1
    found = as_int(processes) if processes else as_int(per_node) * nodes if per_node else None
    if found is None and len(groups) == 2 and min(groups) > 0:
        found = groups[0] * groups[1]
    asked = draft.given_world_size
    size = asked or found or 1
    if size % nodes:
        draft.warnings.append(f"{machines}: {size} processes do not spread over them; one node was taken")
        nodes = 1
    if asked and found and asked != found:
        draft.warnings.append(f"--world-size {asked} was used; the file says {found}")
    if asked is None and found is None:
        draft.warnings.append("the file does not say how many processes there are: one is assumed; give --world-size")
    draft.world_size, draft.nodes, draft.is_guess = size, nodes, asked is None and found is None
    draft.endpoint = f"{host.value if host else 'HOST'}:{port.value if port else 29500}"


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


_UNITS = Spellings(
    ("transformer_based_wrap transformer transformer_layer transformer_auto_wrap layer 1", "layer"),
    ("size_based_wrap size size_based size_based_auto_wrap_policy 2", "size"),
    ("no_wrap none no root 3 false", "root"),
)
# A model's layer: LlamaDecoderLayer, GPT2Block; not the block of experts inside one.
_LAYER = re.compile(r"DecoderLayer$|(?<!Moe)(?<!MoE)(?<!MOE)Block$")


def set_units(draft: Draft) -> None:
    """``fsdp.unit`` with ``min_params`` and ``unit_classes``: what FSDP1's wrap policy said."""
    policy = draft.take("fsdp.unit")
    least = draft.take("fsdp.min_params")
    number = max(0, as_int(least)) if least else 0
    # transformers' older field: a number alone means by size.
    unit = _UNITS(policy).value if policy and policy.word != "true" else "size" if number else "layer"
    if policy is not None:
        draft.was("fsdp.unit", unit, policy, "the model names its layer class itself" if unit == "layer" else "")
    if unit == "size":
        draft.fill("fsdp.unit", "size", f"was {least}")
        draft.was("fsdp.min_params", number, least if number else None)
        draft.fill("fsdp.min_params", 100_000_000, "not in the file: size_based_auto_wrap_policy's default")
    else:
        draft.note(least, f'not used with unit = "{unit}"')
    classes = draft.take(
        "fsdp.unit_classes", "decoder layers are found by themselves (transformers' _no_split_modules)"
    )
    # Of a list for many models most layers are not in this one. What is named beside them becomes a unit too.
    names = as_words(classes) if classes else []
    layers = [name for name in names if _LAYER.search(name)]
    layers = layers or [name for name in names if name.endswith("Layer")] or names[:1]
    extra = [name for name in names if name not in layers]
    if classes is not None and extra and unit == "layer":
        more = f"{', '.join(layers)}: decoder layers are found by themselves; the model must have the others"
        draft.was("fsdp.unit_classes", extra, classes, more)


def set_recomputation(draft: Draft) -> None:
    """``[activation_checkpointing]``; ``every`` is a number of layers, or a switch for the selective mode."""
    mode = "activation_checkpointing.mode"
    asked = draft.take("activation_checkpointing.mode")
    every = draft.take("activation_checkpointing.every", "no layer is checkpointed for that")
    to_host = draft.take("activation_checkpointing.offload")
    number = as_int(every) if every is not None and type(every.value) is int else 0
    if asked is not None:
        word = asked.word
        draft.was(mode, word if word in ("full", "selective") else "full" if as_bool(asked) else "none", asked)
    if every is not None and number:
        draft.was("activation_checkpointing.every", number, every)
        draft.fill(mode, "full", "of every n-th layer")
    elif every is not None and as_bool(every):
        draft.was(mode, "selective", every)
    if to_host is not None:
        more = ""
        if as_bool(to_host) and draft.get(mode) != "full":
            more = 'and so mode = "full": what is kept for backward is each layer\'s input'
            draft.set(mode, "full", "for the offload below")
            draft.warnings.append(f"{to_host}: {more}")
        draft.was("activation_checkpointing.offload", as_bool(to_host), to_host, more)


def fill_reduce_dtype(draft: Draft) -> None:
    """FSDP1 takes the dtype of the computation, after which this comes."""
    if draft.get("fsdp.param_dtype") != "float32":
        why = 'not in the file: FSDP1 then reduces gradients in param_dtype; "float32" is exact, for twice the bytes'
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
    draft.was("fsdp.ignored_modules", modules, ignored)
    inside = [name if name.endswith("*") else f"{name}.*" for name in modules]
    why = f"was {ignored}: nothing reduces their gradients, so they must be frozen"
    frozen, before = draft.get("model.freeze") or [], draft.why("model.freeze")
    draft.set("model.freeze", list(dict.fromkeys([*frozen, *inside])), f"{before}; {why}" if before else why)
    draft.warnings.append(f"{ignored}: these modules are frozen here (model.freeze)")


def set_class_dtypes(draft: Draft) -> None:
    """``fsdp.class_dtypes``, after ``param_dtype``; of FSDP1's default, batch norms, a decoder has none."""
    classes = draft.take("fsdp.class_dtypes")
    if classes is None:
        return
    names = [re.sub(r"^<class|[<>'\"]", "", one).strip().rpartition(".")[2] for one in as_words(classes)]
    known = [one for one in names if one and not re.fullmatch(r"_?(Sync)?BatchNorm(\dd)?", one)]
    if not known:
        draft.note(classes, "FSDP1's default: a decoder has no batch norm")
    elif draft.get("fsdp.param_dtype") == "float32":
        draft.note(classes, "everything computes in float32")
    else:
        draft.was("fsdp.class_dtypes", dict.fromkeys(known, "float32"), classes, "the model must have these classes")


def set_model(draft: Draft) -> None:
    """``model.path``, or ``model.config`` with random weights."""
    path = draft.take("model.path")
    given = draft.given_model
    table = "model_config."
    config = {one.name.removeprefix(table): one for one in draft.fields if one.name.startswith(table)}
    if given is not None:
        draft.set("model.path", given, "--model" + (f"; the file has {path}" if path else ""))
    elif path is not None:
        draft.was("model.path", draft.relative(str(path.value)), path)
    elif "model_type" in config:
        draft.fill("model.weights", "random", "a model from a config")
    else:
        draft.set("model.path", "your-org/your-model", "not in the file: what your script loads")
        draft.needs.append("model.path=MODEL")
    for name, field in config.items():
        if field.value is None:
            draft.note(field, "null: the default")
        else:
            draft.was(f"model.config.{name}", field.value, field)


def set_tokenizer(draft: Draft) -> None:
    """``model.tokenizer``: a directory, not one of its files."""
    tokenizer = draft.take("model.tokenizer", "a Hugging Face directory is needed; the model's own is used")
    if tokenizer is not None and not str(tokenizer.value).endswith((".model", ".json")):
        draft.was("model.tokenizer", draft.relative(str(tokenizer.value)), tokenizer)


def set_frozen(draft: Draft) -> None:
    """``model.freeze``: llama-recipes' ``freeze_layers`` with ``num_freeze_layers``, or a list of names."""
    frozen = draft.take("model.freeze", "every parameter is trained")
    number = draft.take("frozen layers", "nothing is frozen")
    if frozen is not None and isinstance(frozen.value, list):
        draft.was("model.freeze", as_words(frozen), frozen)
    elif frozen is not None and as_bool(frozen):
        layers = [f"*.layers.{index}.*" for index in range(as_int(number) if number else 1)]
        draft.was("model.freeze", layers, frozen, str(number or ""))


def set_checkpoints(draft: Draft) -> None:
    """``checkpoint.every``, in steps."""
    every = draft.take("checkpoint.every", "the run writes one checkpoint, at its end")
    when = draft.take("save strategy", "checkpoint.every says when, in steps; 0: at the end")
    if every is not None and not (when and when.word in ("no", "epoch")) and as_int(every) >= 0:
        draft.was("checkpoint.every", as_int(every), every)


def set_wandb(draft: Draft) -> None:
    """``wandb.mode``; without a word about it, a project alone asks for it."""
    report, use = draft.take("reports"), draft.take("wandb.mode")
    names = {one.word for one in as_parts(report)} if report else set()
    is_wanted = as_bool(use) if use else bool({"wandb", "all"} & names) if report else bool(draft.get("wandb.project"))
    draft.was("wandb.mode", "auto" if is_wanted else "disabled", use or report)
    if not is_wanted:
        draft.fill("wandb.mode", "disabled", "not in the file")


def set_batches(draft: Draft) -> None:
    """``micro_batch_size`` (FSDP1's loops count per device) and ``global_batch_size`` (the whole job's)."""
    batch = draft.take("batch per device")
    whole = draft.take("train.global_batch_size")
    rounds = draft.take("accumulation", "derived: global_batch_size ÷ (ranks × micro_batch_size)")
    smaller = draft.take("train.micro_batch_size")
    default = draft.program.micro_batch_size
    dp = max(1, draft.world_size // (draft.get("mesh.cp") or 1))
    per_step = max(1, as_int(batch)) if batch else default or 1
    accumulation = max(1, as_int(rounds)) if rounds else 1
    micro = max(1, as_int(smaller)) if smaller else per_step
    if smaller is not None and batch is not None:
        accumulation = max(accumulation, per_step // micro)
        draft.note(batch, f"per device and step: {accumulation} micro-batches of {micro}")
    batch = smaller or batch
    if whole is not None:
        asked = as_int(whole)
        if batch is None:
            micro = math.gcd(asked // dp, micro) or 1
        fitting = max(1, asked // (dp * micro)) * dp * micro
        more = f"{dp} data-parallel ranks × {micro} × accumulation"
        if fitting != asked:
            more = f"made {fitting}, a multiple of {more}"
            draft.warnings.append(f"{whole}: {more}")
        draft.was("train.global_batch_size", fitting, whole, more)
    else:
        product = f"per device {micro} × {dp} data-parallel ranks × accumulation {accumulation}"
        guess = "; give --world-size if there are more ranks" if draft.is_guess else ""
        told = f" (was {rounds})" if rounds else ""
        draft.set("train.global_batch_size", micro * dp * accumulation, f"{product}{told}{guess}")
    if batch is not None:
        draft.was("train.micro_batch_size", micro, batch, "per device, as FSDP1's loops count")
    else:
        why = draft.program.default if micro == default else "not in the file"
        draft.set("train.micro_batch_size", micro, why)


def set_length(draft: Draft) -> None:
    """``train.steps`` or ``train.epochs``."""
    steps = draft.take("train.steps")
    epochs = draft.take("train.epochs")
    has_end = draft.get("data.format") != "synthetic"
    if steps is not None and as_int(steps) > 0:
        draft.was("train.steps", as_int(steps), steps)
        draft.note(epochs, "train.steps decides")
    elif has_end and (epochs or draft.program.epochs):
        draft.note(steps, "epochs decide")
        draft.was("train.epochs", max(1, math.ceil(as_float(epochs))) if epochs else None, epochs)
        draft.fill("train.epochs", draft.program.epochs, draft.program.default)
    else:
        draft.note(steps, "not a number of steps")
        draft.note(epochs, "synthetic tokens have no end")
        draft.set("train.steps", 100, "not in the file: yours to set")


def set_clipping(draft: Draft) -> None:
    """``train.max_grad_norm``: of a number, or of a switch with a number beside it."""
    norm = draft.take("train.max_grad_norm")
    clip = draft.take("clipping")
    if clip is not None and clip.word in SWITCH:
        number = (as_float(norm) if norm else 1.0) if as_bool(clip) else 0.0
        draft.was("train.max_grad_norm", number, clip, str(norm or ""))
    elif found := norm or clip:
        draft.was("train.max_grad_norm", as_float(found), found, "the norm of the whole global batch")


def set_betas(draft: Draft) -> None:
    """``optimizer.betas``, of one field or two."""
    betas = draft.take("optimizer.betas")
    first, second = draft.take("first beta"), draft.take("second beta")
    if betas is not None:
        pair = [as_float(one) for one in as_parts(betas)]
        if len(pair) != 2:
            raise betas.mistake("write two numbers")
        draft.was("optimizer.betas", pair, betas)
    else:
        said = " and ".join(str(field) for field in (first, second) if field)
        pair = [as_float(first) if first else 0.9, as_float(second) if second else 0.999]
        draft.set("optimizer.betas", pair, f"was {said}" if said else "not in the file: torch's default")


def fill_weight_decay(draft: Draft) -> None:
    """torch's, for a loop whose learning rate is known."""
    if draft.get("optimizer.lr") is not None:
        draft.fill("optimizer.weight_decay", 0.01, "not in the file: torch.optim.AdamW's default")


def set_floor(draft: Draft) -> None:
    """``lr_schedule.min_lr_ratio``, of schedules that have a floor, and StepLR's ``gamma``."""
    name = draft.get("lr_schedule.name")
    gamma = draft.take("gamma", "StepLR is not offered")
    if gamma is not None and as_float(gamma) != 1:
        draft.warnings.append(f"{gamma}: StepLR is not offered; the rate is {name}")
    least = draft.take("lr_schedule.min_lr_ratio", "this schedule has no floor")
    if least is not None and name in ("cosine", "wsd"):
        draft.was("lr_schedule.min_lr_ratio", as_float(least), least)


def set_warmup(draft: Draft) -> None:
    """``lr_schedule.warmup_steps``; of a ratio where the run's length is known."""
    key, steps = "lr_schedule.warmup_steps", draft.get("train.steps")
    warmup = draft.take("lr_schedule.warmup_steps")
    ratio = draft.take("warm-up ratio")
    if warmup is not None and as_float(warmup) >= 1:
        draft.was(key, as_int(warmup), warmup)
    elif (share := ratio or warmup) is not None:
        number = math.ceil(as_float(share) * steps) if steps else 0
        draft.was(key, number, share, f"of {steps} steps" if steps else "")
        if not steps and as_float(share):
            draft.warnings.append(f"{share}: set lr_schedule.warmup_steps; how many steps an epoch has is not known")
    elif draft.program is AXOLOTL:
        why = "not in the file: axolotl's default is 3 % of the steps, at most 100"
        draft.set(key, min(int(0.03 * steps), 100) if steps else 0, why)
        if not steps:
            draft.warnings.append("axolotl warms up over 3 % of the steps, at most 100: set lr_schedule.warmup_steps")


def set_evaluation(draft: Draft) -> None:
    """``[eval]``, where the file names held-out data."""
    path, split = draft.take("eval.path"), draft.take("eval.split")
    every, batches = draft.take("eval.every"), draft.take("eval.steps")
    names = ("eval_strategy", "evaluation_strategy", "do_eval", "run_validation", "evaluate")
    switches = [draft.take_names(name, "") for name in names]
    is_off = any(field is not None and field.word in ("no", "false") for field in switches)
    for field in switches:
        draft.note(field, "eval.every = 0 does not evaluate" if is_off else "eval.every says when, in steps")
    trained = (draft.get("data.path"), draft.get("data.split") or "train")
    held_out = draft.relative(str(path.value)) if path is not None else trained[0]
    split_name = str(split.value) if split is not None else "train"
    if is_off or held_out is None or (held_out, split_name) == trained:
        why = "the run does not evaluate" if is_off else "held-out data are needed: eval.path, or another eval.split"
        for field in (path, split, every, batches):
            draft.note(field, why)
        return
    if every is not None and as_float(every) >= 1:
        draft.was("eval.every", as_int(every), every)
    else:
        draft.note(every, "a share of the run; eval.every counts steps")
        draft.set("eval.every", 100, "not in the file, in steps: yours to set")
    draft.was("eval.path", held_out, path)
    draft.was("eval.split", split_name, split)
    if batches is not None and as_int(batches) > 0:
        draft.was("eval.steps", as_int(batches), batches, "global batches")
