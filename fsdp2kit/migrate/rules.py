"""Rules for keys that depend on several fields; rows of fields.toml name them in `rule`. Those for data: data.py."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.values import (
    STRATEGIES,
    Told,
    as_bool,
    as_float,
    as_int,
    as_parts,
    as_text,
    as_word,
    as_words,
)

_GROUPS = ("mesh.dp_replicate", "mesh.dp_shard")


def launch(draft: Draft) -> None:
    """Processes as the file says, else from its group sizes, else one."""
    slots = ("processes", "processes of a node", "nodes", "host", "port")
    processes, per_node, machines, host, port = map(draft.take, slots)
    groups = [as_int(field) for field in map(draft.take, _GROUPS) if field]
    nodes = max(1, as_int(machines) or 1)
    size = (as_int(processes) or 0) if processes else (as_int(per_node) or 0) * nodes
    if size < 1 and len(groups) == 2:
        size = (groups[0] or 0) * (groups[1] or 0)
    if size < 1:
        size = 1
        draft.is_guess = True
        draft.warnings.append("the file does not say how many processes there are: one is assumed; give --world-size")
    if size % nodes:
        draft.warnings.append(f"{machines}: {size} processes do not spread over them; one node was taken")
        nodes = 1
    draft.world_size = size
    draft.nodes = nodes
    draft.endpoint = f"{host.value if host else 'HOST'}:{port.value if port else 29500}"


def model(draft: Draft) -> None:
    """``model.path``, or ``model.config`` with random weights; ``model.tokenizer``, a directory."""
    path = draft.take("model.path")
    tokenizer = draft.take("model.tokenizer")
    config = [field for field in draft.fields if field.name.startswith("model_config.")]
    if path is not None:
        draft.was("model.path", draft.relative(str(path.value)), path)
    elif any(field.name == "model_config.model_type" for field in config):
        draft.fill("model.weights", "random", "a model from a config")
    else:
        draft.fill("model.path", "your-org/your-model", "what your script loads")
        draft.needs.append("model.path=MODEL")
    for field in config:
        draft.note(field, "the default")
        draft.was(f"model.config.{field.name.removeprefix('model_config.')}", field.value, field)
    if tokenizer is not None and not str(tokenizer.value).endswith((".model", ".json")):
        draft.was("model.tokenizer", draft.relative(str(tokenizer.value)), tokenizer)


def frozen(draft: Draft) -> None:
    """``model.freeze``: llama-recipes' ``freeze_layers`` with ``num_freeze_layers``, or a list of names."""
    names = draft.take("model.freeze")
    number = draft.take("frozen layers")
    if names is not None and isinstance(names.value, list):
        draft.was("model.freeze", as_words(names), names)
    elif as_bool(names):
        count = 1 if number is None else as_int(number) or 0
        draft.was("model.freeze", [f"*.layers.{index}.*" for index in range(count)], names, number)


def adapters(draft: Draft) -> None:
    """``lora.rank``, if a switch or the method turns adapters on, or if the file has a rank and neither of them."""
    slots = ("adapter switch", "adapter method", "lora.rank", "lora.quantize")
    switch, method, rank, four_bits = map(draft.take, slots)
    kind = method.word if method else "lora"
    number = as_int(rank)
    is_quantised = as_bool(four_bits)
    if not (as_bool(switch) if switch else kind not in ("full", "freeze", "none") if method else rank):
        if is_quantised:
            draft.warnings.append(f"{four_bits}: not offered without adapters; weights would be stored unquantised")
    elif kind not in ("lora", "qlora"):
        draft.warnings.append(f"{method}: not offered; the whole model would be trained")
    else:
        draft.was("lora.rank", 8 if number is None else number, rank or switch or method)
        draft.note(switch if rank else None, "lora.rank")
        draft.note(method, "lora.rank")


def resharding(draft: Draft) -> None:
    """``fsdp.reshard_after_forward``, or the strategy if no other field names it (accelerate, fsdp_version 1)."""
    field = draft.take("fsdp.reshard_after_forward")
    if field is None:
        return
    strategy = STRATEGIES.get(field.word) if isinstance(field.value, str) else None
    if field.is_switch:
        strategy = "full_shard" if as_bool(field) else "shard_grad_op"
    if strategy is not None and draft.get("fsdp.strategy") is None:
        draft.was("fsdp.strategy", strategy, field)
    else:
        draft.was("fsdp.reshard_after_forward", as_bool(field) if field.is_switch else as_int(field), field)


def mesh(draft: Draft) -> None:
    """``[mesh]``; more than one replica changes the strategy, which has its line already."""
    is_hybrid = draft.get("fsdp.strategy").startswith("hybrid")
    for key in _GROUPS:
        field = draft.take(key)
        size = as_int(field) or 0
        if size < 1 or (key == "mesh.dp_replicate" and size == 1 and not is_hybrid):
            continue
        if draft.is_guess and size > 1:
            draft.note(field, f"{key} = {size} once --world-size is known")
        else:
            draft.was(key, size, field)
    if draft.get("mesh.dp_replicate") and not is_hybrid:
        hybrid = "hybrid_shard_zero2" if draft.get("fsdp.strategy") == "shard_grad_op" else "hybrid_shard"
        draft.set("fsdp.strategy", hybrid, "was a replicate size above 1")


# A model's layer: LlamaDecoderLayer, GPT2Block; not the block of experts inside one.
_LAYER = re.compile(r"DecoderLayer$|(?<!Moe)(?<!MoE)(?<!MOE)Block$")


def units(draft: Draft) -> None:
    """``fsdp.unit`` with ``min_params`` and ``unit_classes``: what FSDP1's wrap policy said."""
    policy = draft.take("fsdp.unit")
    least = draft.take("fsdp.min_params")
    number = max(0, as_int(least) or 0)
    # transformers' older field: a number alone means by size.
    unit = "size" if number else "layer"
    if policy is not None and policy.word != "true":
        unit = as_word(policy, "units").value
    draft.was("fsdp.unit", unit, policy or (least if unit == "size" else None))
    draft.note(least, f'not used with unit = "{unit}"')
    draft.was("fsdp.min_params", number if unit == "size" and number else None, least)
    # The list may be for many models, whose layers are not all in this one. Other classes in it become units, too.
    classes = draft.take("fsdp.unit_classes")
    names = as_words(classes)
    layers = [name for name in names if _LAYER.search(name)]
    layers = layers or [name for name in names if name.endswith("Layer")] or names[:1]
    if classes and unit == "layer" and (extra := [name for name in names if name not in layers]):
        note = f"{draft.fates[classes.path]}; the model must have these"
        draft.was("fsdp.unit_classes", extra, classes, note=note)


def param_dtype(draft: Draft) -> None:
    """``fsdp.param_dtype``: the first field that names one or is on; a field that is off leaves it to the next."""
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
        value = as_word(replace(field, value=dtype) if is_on else field, "compute_dtypes")
        draft.was("fsdp.param_dtype", value, field, note=note)
    if draft.get("fsdp.param_dtype") is None:
        draft.was("fsdp.param_dtype", "float32", off)


def ignored_modules(draft: Draft) -> None:
    """``fsdp.ignored_modules``, and ``model.freeze`` for the same modules, since nothing reduces their gradients.

    FSDP1 has a list of names, accelerate a regular expression whose alternatives are names.
    """
    ignored = draft.take("fsdp.ignored_modules")
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
    all_frozen = list(dict.fromkeys([*(draft.get("model.freeze") or []), *inside]))
    here = Told(all_frozen, "nothing reduces ignored gradients", "these modules are frozen here (model.freeze)")
    draft.was("model.freeze", here, ignored, draft.take("model.freeze"))
    draft.was("fsdp.ignored_modules", modules, ignored)


def offloaded_activations(draft: Draft) -> None:
    """``activation_checkpointing.offload``, which moves the inputs of checkpointed layers to the host."""
    mode = "activation_checkpointing.mode"
    to_host = draft.take("activation_checkpointing.offload")
    if as_bool(to_host) and draft.get(mode) != "full":
        more = 'and so mode = "full": what is kept for backward is each layer\'s input'
        draft.was(mode, Told("full", more, more), to_host)
    draft.was("activation_checkpointing.offload", as_bool(to_host), to_host)


def batches(draft: Draft) -> None:
    """``micro_batch_size`` (FSDP1's loops count per device) and ``global_batch_size`` (the whole job's)."""
    key = "train.global_batch_size"
    default = draft.defaults.get("train.micro_batch_size", 1)
    slots = ("batch per device", key, "train.micro_batch_size", "accumulation")
    batch, whole, smaller, rounds = map(draft.take, slots)
    dp = max(1, draft.world_size // (draft.get("mesh.cp") or 1))
    per_step = max(1, as_int(batch) or 1) if batch else default
    micro = max(1, as_int(smaller) or 1) if smaller else per_step
    accumulation = max(1, as_int(rounds) or 1)
    if smaller is not None and batch is not None:
        accumulation = max(accumulation, per_step // micro)
        draft.note(batch, f"per device and step: {accumulation} micro-batches of {micro}")
    if whole is not None:
        asked = as_int(whole) or 0
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
        draft.fill("train.micro_batch_size", micro)
    else:
        draft.set("train.micro_batch_size", micro, "not in the file: what divides the global batch")


def length(draft: Draft) -> None:
    """``train.steps`` or ``train.epochs``."""
    steps = draft.take("train.steps")
    epochs = draft.take("train.epochs")
    if (number := as_int(steps)) is not None and number > 0:
        draft.was("train.steps", number, steps)
    elif draft.get("data.format") != "synthetic" and (epochs or "train.epochs" in draft.defaults):
        draft.was("train.epochs", max(1, math.ceil(as_float(epochs) or 0)), epochs)
        draft.fill("train.epochs")
    else:
        draft.note(steps, "not a number of steps")
        draft.note(epochs, "synthetic tokens have no end")
        draft.fill("train.steps", 100)


def clipping(draft: Draft) -> None:
    """``train.max_grad_norm``, from a number, or from a switch and a number."""
    norm = draft.take("train.max_grad_norm")
    clip = draft.take("clipping")
    if clip is not None and clip.is_switch:
        number = (as_float(norm) if norm else 1.0) if as_bool(clip) else 0.0
        draft.was("train.max_grad_norm", number, clip, norm)
    else:
        found = norm or clip
        draft.was("train.max_grad_norm", as_float(found), found, note="the norm of the whole global batch")


def betas(draft: Draft) -> None:
    """``optimizer.betas``, from one field or two."""
    both, first, second = map(draft.take, ("optimizer.betas", "first beta", "second beta"))
    if both is None:
        pair = [as_float(first) if first else 0.9, as_float(second) if second else 0.999]
        draft.was("optimizer.betas", pair, first, second)
    elif len(as_words(both)) != 2:
        raise both.mistake("write two numbers")
    else:
        draft.was("optimizer.betas", [as_float(one) for one in as_parts(both)], both)


def weight_decay(draft: Draft) -> None:
    """``optimizer.weight_decay``: the file's, else the program's default, else that of torch's optimizer."""
    key = "optimizer.weight_decay"
    field = draft.take("optimizer.weight_decay")
    draft.was(key, as_float(field), field, note="not of norms and biases")
    named = draft.take("optimizer.name")
    kind = named.word if named is not None else "adamw"
    if "adamw" in kind:
        draft.fill(key, 0.01, "torch's AdamW's")
    elif kind == "muon":
        draft.fill(key, 0.1, "torch's Muon's")
    else:
        draft.fill(key, 0.0, f"the default of {kind}, which is not AdamW")


def warmup(draft: Draft) -> None:
    """``lr_schedule.warmup_steps`` or ``warmup_ratio``."""
    key = "lr_schedule.warmup_steps"
    share_key = "lr_schedule.warmup_ratio"
    steps = draft.get("train.steps")
    number = draft.take(key)
    ratio = draft.take(share_key)
    if (as_float(number) or 0) >= 1:
        draft.was(key, as_int(number), number)
    elif (share := ratio or number) is not None:
        draft.was(share_key, as_float(share), share)
    elif draft.program == "axolotl":
        why = "axolotl takes 3 % of the steps, at most 100"
        draft.fill(*((key, min(int(0.03 * steps), 100), why) if steps else (share_key, 0.03, why)))


def evaluation(draft: Draft) -> None:
    """``[eval]``, if the file names held-out data."""
    slots = ("eval.path", "eval.split", "eval.every", "eval.steps", "evaluates", "held-out share")
    path, split, every, batches, asked, share = map(draft.take, slots)
    has_rows = draft.get("data.format") != "synthetic"
    number = (as_float(share) or 0) if has_rows and path is None else 0
    if number > 0:
        draft.was("eval.split", int(number) if number >= 1 else number, share)
        draft.fill("eval.every", 100, "in steps: yours to set")
        return
    trained = (draft.get("data.path"), draft.get("data.split") or "train")
    held_out = (draft.relative(str(path.value)) if path else trained[0], as_text(split) if split else "train")
    is_off = asked is not None and asked.word in ("no", "false")
    if is_off or held_out[0] is None or held_out == trained:
        return
    if (as_float(every) or 0) >= 1:
        draft.was("eval.every", as_int(every), every)
    else:
        draft.note(every, "a share of the run; eval.every counts steps")
        draft.fill("eval.every", 100, "in steps: yours to set")
    draft.was("eval.path", held_out[0], path)
    draft.was("eval.split", held_out[1], split)
    draft.note(batches, "all of them")
    draft.was("eval.steps", as_int(batches) or None, batches, note="global batches")


def checkpoints(draft: Draft) -> None:
    """``checkpoint.every``, in steps."""
    every = draft.take("checkpoint.every")
    when = draft.take("save strategy")
    if every is not None and not (when and when.word in ("no", "epoch")):
        number = as_int(every)
        draft.was("checkpoint.every", None if number is None or number < 0 else number, every)


def wandb(draft: Draft) -> None:
    """``wandb.mode``; if no field says it, a project turns it on."""
    report = draft.take("reports")
    use = draft.take("wandb.mode")
    names = {one.word for one in as_parts(report)}
    is_wanted = as_bool(use) if use else bool({"wandb", "all"} & names) if report else bool(draft.get("wandb.project"))
    draft.was("wandb.mode", "auto" if is_wanted else "disabled", use or report)
    if not is_wanted:
        draft.fill("wandb.mode", "disabled", "no tracker is named")
