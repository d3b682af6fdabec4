"""Checks across sections; they need the world size, but no devices and no weights."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fsdp2kit.config.data_schema import COLUMNS
from fsdp2kit.config.paths import check_paths
from fsdp2kit.config.schema import (
    CheckpointConfig,
    DataConfig,
    DataFormat,
    DistillConfig,
    DPOConfig,
    EvalConfig,
    FSDPConfig,
    LRScheduleConfig,
    MeshConfig,
    OptimizerConfig,
    PreferenceDataConfig,
    TrainConfig,
    TrainingConfig,
)
from fsdp2kit.config.section import may_be_hub_id
from fsdp2kit.config.wandb_login import check_wandb
from fsdp2kit.errors import UserError

HYBRID = ("hybrid_shard", "hybrid_shard_zero2")


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the device mesh; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    cp: int

    @property
    def dp(self) -> int:
        """Data-parallel ranks; each reads different sequences."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return f"mesh: dp_replicate {self.dp_replicate} × dp_shard {self.dp_shard} × cp {self.cp}"

    @property
    def world_size(self) -> int:
        return self.dp * self.cp


def resolve_mesh(mesh: MeshConfig, fsdp: FSDPConfig, *, world_size: int, local_world_size: int) -> MeshSizes:
    """Fill in the "auto" sizes of ``[mesh]`` and check them against the world and the strategy.

    Raises:
        UserError: the sizes do not multiply to the world size, or the strategy forbids them.
    """
    if world_size % mesh.cp:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        todo = f"use one of {divisors}, or start another number of processes"
        raise UserError("mesh.cp", f"{mesh.cp} does not divide the world size {world_size}", todo)
    dp = world_size // mesh.cp
    replicate, shard = mesh.dp_replicate, mesh.dp_shard
    if fsdp.strategy == "no_shard":
        if shard not in ("auto", 1):
            what = f"{shard} with fsdp.strategy = 'no_shard', which shards nothing"
            raise UserError("mesh.dp_shard", what, "leave it out, or choose fsdp.strategy = 'full_shard'")
        shard = 1
    elif fsdp.strategy in HYBRID:
        if replicate == "auto" and shard == "auto":
            if local_world_size % mesh.cp:
                what = f"{mesh.cp} does not divide the {local_world_size} ranks of a node"
                todo = "set mesh.dp_shard yourself; hybrid sharding defaults to dp_shard × cp = LOCAL_WORLD_SIZE"
                raise UserError("mesh.cp", what, todo)
            shard = local_world_size // mesh.cp
    elif replicate not in ("auto", 1):
        what = f"{replicate} with fsdp.strategy = {fsdp.strategy!r}"
        raise UserError(
            "mesh.dp_replicate", what, "choose fsdp.strategy = 'hybrid_shard' to replicate a sharded model"
        )
    else:
        replicate = 1
    if replicate == "auto":
        replicate = dp // int(shard) if dp % int(shard) == 0 else 1
    if shard == "auto":
        shard = dp // int(replicate) if dp % int(replicate) == 0 else 1
    sizes = MeshSizes(int(replicate), int(shard), mesh.cp)
    if sizes.world_size != world_size:
        product = f"dp_replicate {replicate} × dp_shard {shard} × cp {mesh.cp} = {sizes.world_size}"
        todo = "change one of them, leave it to 'auto', or start another number of processes"
        raise UserError("mesh", f"{product}, but the world size is {world_size}", todo)
    return sizes


def shard_ranks(fsdp: FSDPConfig, sizes: MeshSizes) -> int:
    """Ranks that one copy of the parameters is sharded over."""
    return 1 if fsdp.strategy == "no_shard" else sizes.dp_shard * sizes.cp


def resolve_accumulation(global_batch_size: int, micro_batch_size: int, *, dp: int) -> int:
    """Micro-batches that one data-parallel rank runs in one step: global ÷ (dp × micro).

    Raises:
        UserError: it is not a whole number; the message says which global batch sizes would fit.
    """
    per_round = dp * micro_batch_size
    accumulation, rest = divmod(global_batch_size, per_round)
    if rest:
        near = sorted({max(1, accumulation) * per_round, (accumulation + 1) * per_round})
        what = f"{global_batch_size} is not a multiple of dp {dp} × micro_batch_size {micro_batch_size}"
        todo = f"use {' or '.join(map(str, near))}, or another micro_batch_size"
        raise UserError("train.global_batch_size", what, todo)
    return accumulation


def resolve_warmup(section: LRScheduleConfig, total_steps: int) -> int:
    """Steps of the warm-up of a run of ``total_steps``, of which the schedule has at least one left.

    Raises:
        UserError: it does not fit, or is given twice; the message names both lengths.
    """
    steps, ratio = section.warmup_steps, section.warmup_ratio
    if steps and ratio:
        what = f"{steps} beside lr_schedule.warmup_ratio = {ratio}"
        raise UserError("lr_schedule.warmup_steps", what, "leave one of them out")
    if ratio:
        return min(math.ceil(ratio * total_steps), max(0, total_steps - 1))
    if steps >= total_steps > 0:
        what = f"{steps}, but the whole run has {total_steps} steps, so the rate would never be lr"
        todo = "use fewer, or a share of the run: lr_schedule.warmup_ratio = 0.03"
        raise UserError("lr_schedule.warmup_steps", what, todo)
    if section.name == "wsd" and total_steps and steps + (section.decay_steps or 0) > total_steps:
        what = f"{section.decay_steps} after {steps} steps of warm-up, but the whole run has {total_steps} steps"
        raise UserError("lr_schedule.decay_steps", what, "make one of them shorter")
    return steps


def check_config(config: TrainingConfig, *, world_size: int, local_world_size: int) -> MeshSizes:
    """All cross-field checks of a training config.

    Raises:
        UserError: at the first that fails.
    """
    sizes = resolve_mesh(config.mesh, config.fsdp, world_size=world_size, local_world_size=local_world_size)
    train = config.train
    resolve_accumulation(train.global_batch_size, train.micro_batch_size, dp=sizes.dp)
    if (train.steps is None) == (train.epochs is None):
        what = "neither steps nor epochs is given" if train.steps is None else "both steps and epochs are given"
        raise UserError("train", what, "give exactly one of train.steps and train.epochs")
    if train.max_nonfinite != TrainConfig().max_nonfinite and train.on_nonfinite == "stop":
        what = f"{train.max_nonfinite} with train.on_nonfinite = 'stop', which stops at the first"
        raise UserError("train.max_nonfinite", what, "leave it out, or set train.on_nonfinite = 'skip'")
    resolve_warmup(config.lr_schedule, train.steps or 0)  # of epochs, the data tell the steps
    check_paths(config)
    check_data(config)
    _check_upload(config.checkpoint)
    if config.data.seq_len % sizes.cp:
        below = config.data.seq_len // sizes.cp * sizes.cp
        what = f"{config.data.seq_len} is not divisible by mesh.cp {sizes.cp}"
        raise UserError("data.seq_len", what, f"use {below} or {below + sizes.cp}")
    _check_model(config)
    _check_lora(config)
    _check_fsdp(config.fsdp, sizes)
    checkpointing = config.activation_checkpointing
    if checkpointing.offload and checkpointing.mode != "full":
        what = f"with mode = {checkpointing.mode!r}, which keeps more than the layers' inputs"
        raise UserError("activation_checkpointing.offload", what, 'set activation_checkpointing.mode = "full"')
    if checkpointing.every != 1 and checkpointing.mode == "none":
        what = f"{checkpointing.every} with mode = 'none', which checkpoints no layer"
        todo = 'leave it out, or set activation_checkpointing.mode = "full" or "selective"'
        raise UserError("activation_checkpointing.every", what, todo)
    _check_optimizer(config.optimizer, config.fsdp)
    check_wandb(config.wandb)
    _check_float8(config)
    _check_preferences(config)
    _check_distillation(config)
    if config.lr_schedule.min_lr_ratio and config.lr_schedule.name in ("constant", "linear"):
        what = f"{config.lr_schedule.min_lr_ratio} with name = {config.lr_schedule.name!r}"
        todo = "use name = 'cosine' or 'wsd', which have a floor, or leave it out"
        raise UserError("lr_schedule.min_lr_ratio", what, todo)
    if config.lr_schedule.decay_steps is not None and config.lr_schedule.name != "wsd":
        what = f"{config.lr_schedule.decay_steps} with name = {config.lr_schedule.name!r}, which has no such phase"
        raise UserError("lr_schedule.decay_steps", what, "leave it out, or set lr_schedule.name = 'wsd'")
    return sizes


def _check_fsdp(section: FSDPConfig, sizes: MeshSizes) -> None:
    if section.unit != "size" and section.min_params != FSDPConfig().min_params:
        what = f"{section.min_params} with fsdp.unit = {section.unit!r}, whose units do not go by size"
        raise UserError("fsdp.min_params", what, 'leave it out, or set fsdp.unit = "size"')
    reshard, ranks = section.reshard_after_forward, sizes.dp_shard * sizes.cp
    if type(reshard) is int and reshard == 1:
        raise UserError("fsdp.reshard_after_forward", "1 rank would hold everything", "use false, which says so")
    if type(reshard) is int and ranks % reshard:
        what = f"{reshard} does not divide the shard size {ranks}"
        raise UserError("fsdp.reshard_after_forward", what, "use true, false, or a divisor of dp_shard × cp")


def _check_optimizer(optimizer: OptimizerConfig, fsdp: FSDPConfig) -> None:
    name = optimizer.name
    if name != "muon" and optimizer.muon_momentum != OptimizerConfig().muon_momentum:
        what = f"{optimizer.muon_momentum} with optimizer.name = {name!r}, which has no such momentum"
        raise UserError("optimizer.muon_momentum", what, "leave it out, or set optimizer.betas")
    if name == "adamw_8bit" and fsdp.offload != "none":
        what = f"{fsdp.offload!r} with optimizer.name = {name!r}, whose quantised moments stay on the device"
        raise UserError("fsdp.offload", what, "set it to 'none', or optimizer.name = 'adamw_bf16'")
    if name == "adamw_8bit" and fsdp.storage_dtype != "float32":
        what = f"{fsdp.storage_dtype!r} with optimizer.name = {name!r}, which updates float32 parameters"
        raise UserError("fsdp.storage_dtype", what, "leave it out, or set optimizer.name = 'adamw_bf16'")
    if name == "muon" and fsdp.offload == "params":
        what = "'params' with optimizer.name = 'muon', whose matmuls of whole matrices would run on the host"
        raise UserError("fsdp.offload", what, "use 'optimizer' or 'none', or optimizer.name = 'adamw'")
    if name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        what = f"{name!r} is torchao's, which is not installed"
        raise UserError("optimizer.name", what, "install it: pip install 'fsdp2kit[lowbit]'")


def _check_float8(config: TrainingConfig) -> None:
    section, fsdp = config.float8, config.fsdp
    if section.recipe == "none":
        for name in section.model_fields_set - {"recipe"}:
            if getattr(section, name):
                what = f"is set, but float8.recipe is {section.recipe!r}"
                raise UserError(f"float8.{name}", what, "set float8.recipe, or leave it out")
        return
    if importlib.util.find_spec("torchao") is None:
        what = f"{section.recipe!r} is torchao's, which is not installed"
        raise UserError("float8.recipe", what, "install it: pip install 'fsdp2kit[lowbit]'")
    for key, names in (("class_dtypes", fsdp.class_dtypes), ("unit_classes", fsdp.unit_classes)):
        if "Linear" in names:
            what = "names Linear, whose modules get another class with float8"
            raise UserError(f"fsdp.{key}", what, "name the class of the module around them, or use float8.exclude")


def _check_model(config: TrainingConfig) -> None:
    model = config.model
    if model.path is None and "model_type" not in model.config:
        todo = "give a Hugging Face directory or hub id, or a config with its model_type"
        raise UserError("model", "neither model.path nor model.config.model_type is given", todo)
    if model.path is None and model.weights == "pretrained":
        what = "'pretrained' without a model.path to load from"
        raise UserError("model.weights", what, "give model.path, or set model.weights = 'random'")
    if model.liger and config.activation_checkpointing.mode == "selective":
        # torch does not see what Triton's kernels write, so its own checks would not notice.
        what = "true with mode = 'selective': Liger's RoPE changes in place the results that are kept for backward"
        raise UserError("model.liger", what, 'set activation_checkpointing.mode = "full"')


def _check_lora(config: TrainingConfig) -> None:
    section, model = config.lora, config.model
    if not config.trains_adapter:
        for name in section.model_fields_set - {"rank"}:
            raise UserError(f"lora.{name}", "is set, but lora.rank is not", "set lora.rank, or leave it out")
        return
    if importlib.util.find_spec("peft") is None:
        key = "lora.rank" if model.adapter is None else "model.adapter"
        raise UserError(key, "needs peft, which is not installed", "install it: pip install 'fsdp2kit[lora]'")
    if model.adapter is not None and (given := sorted(section.model_fields_set - {"dropout", "base"})):
        what = "is given beside model.adapter, whose adapter_config.json says it"
        raise UserError(f"lora.{given[0]}", what, "leave one of the two out")
    if model.freeze:
        raise UserError("model.freeze", "is set with adapters, which freeze the whole model", "leave it out")
    if model.weights not in ("pretrained", "random"):
        what = "is a checkpoint: an adapter is kept by itself, and peft could not load the model that it belongs to"
        todo = "convert it (tools/dcp_to_hf.py) and give the directory as model.path"
        raise UserError("model.weights", what, todo)
    if model.weights == "random" and config.checkpoint.export_hf != "never":
        what = "'random' with adapters, whose export would be of no use without those random weights"
        raise UserError("model.weights", what, "use 'pretrained', or set checkpoint.export_hf = 'never'")
    if config.float8.recipe != "none":
        what = f"{config.float8.recipe!r} with adapters is not supported"
        raise UserError("float8.recipe", what, "set it to 'none'")


def _check_preferences(config: TrainingConfig) -> None:
    section = getattr(config, "dpo", None)
    if not isinstance(section, DPOConfig):
        return
    if section.gamma is not None and section.loss != "simpo":
        what = f"{section.gamma} with dpo.loss = {section.loss!r}, which has no such margin"
        raise UserError("dpo.gamma", what, 'leave it out, or set dpo.loss = "simpo"')
    if section.label_smoothing and section.loss != "dpo":
        what = f"{section.label_smoothing} with dpo.loss = {section.loss!r}, which takes pairs as they are"
        raise UserError("dpo.label_smoothing", what, 'leave it out, or set dpo.loss = "dpo"')
    if config.model.loss_kernel in ("torch", "liger"):
        what = f"{config.model.loss_kernel!r} gives no log-probabilities of tokens, of which preferences are made"
        raise UserError("model.loss_kernel", what, "leave it out")


def _check_distillation(config: TrainingConfig) -> None:
    section = getattr(config, "distill", None)
    if not isinstance(section, DistillConfig):
        return
    if section.teacher is None:
        what = "is not given, and there is nothing to learn from"
        raise UserError("distill.teacher", what, "give a Hugging Face model directory or hub id")
    if config.model.loss_kernel in ("torch", "liger"):
        what = f"{config.model.loss_kernel!r} computes a cross-entropy alone, and not the distance from a teacher"
        raise UserError("model.loss_kernel", what, "leave it out")


def check_data(config: TrainingConfig) -> None:
    """Check ``[data]`` and ``[eval]`` against each other and ``[train]``.

    Raises:
        UserError: at the first contradiction.
    """
    data = config.data
    if data.format == "preference" and not isinstance(data, PreferenceDataConfig):
        raise UserError(
            "data.format",
            f'"preference" has two answers a row, and recipe = {config.recipe!r} learns one',
            'to learn from both set recipe = "dpo"; to learn the better answers set data.format = "chat" and '
            'data.columns.messages = "chosen" (or "prompt_completion" and data.columns.completion = "chosen")',
        )
    parts = (*data.sources, *config.eval.sets.values())
    formats = {data.format, *(part.format for part in parts)}
    if data.wrap == "chat" and not formats & {"prompt_completion", "preference"}:
        what = f'"chat" with data.format = {data.format!r}, whose rows are no plain prompts and completions'
        raise UserError("data.wrap", what, 'leave it out, or set data.format = "prompt_completion"')
    _check_columns(config)
    if data.format == "preference" and any(part.format for part in data.sources):
        raise UserError("data.sources", "have formats of their own beside pairs of answers", "give pairs alone")
    _check_sources(data)
    if data.streaming:
        _check_streaming(config)
    _check_evaluation(config)


def _check_columns(config: TrainingConfig) -> None:
    """A column that is named is one that some format of these rows reads."""
    data, parts = config.data, (*config.data.sources, *config.eval.sets.values())
    shared: dict[DataFormat, None] = dict.fromkeys(
        [data.format, *(part.format or data.format for part in parts if part.columns is None)]
    )
    own = [(part.columns, {part.format or data.format: None}) for part in parts if part.columns is not None]
    for columns, formats in [(data.columns, shared), *own]:
        read = {name for one in formats for name in COLUMNS[one]}
        for name, called in columns.model_dump(exclude_none=True).items():
            if name not in read:
                what = f"{called!r} with data.format = {next(iter(formats))!r}, which reads no {name}"
                fitting = next(one for one, names in COLUMNS.items() if name in names)
                raise UserError(f"data.columns.{name}", what, f'leave it out, or set data.format = "{fitting}"')


def _check_sources(data: DataConfig) -> None:
    parts = data.sources
    if not parts:
        return
    if data.path is not None:
        raise UserError("data.sources", "given beside data.path", "make data.path one of the sources")
    if data.format == "synthetic":
        raise UserError("data.sources", 'given with data.format = "synthetic"', "leave one of them out")
    with_weight, with_epochs = (
        sum(getattr(part, name) is not None for part in parts) for name in ("weight", "epochs")
    )
    if with_epochs and (with_weight or with_epochs < len(parts)):
        what = f"{with_epochs} of {len(parts)} have epochs and {with_weight} a weight"
        raise UserError("data.sources", what, "give all of them epochs, or none")
    if 0 < with_weight < len(parts):
        what = f"{with_weight} of {len(parts)} have a weight"
        raise UserError("data.sources", what, "give all of them one, or none")
    names = Counter(part.name for part in parts if part.name is not None)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError("data.sources", f"two are named {twice[0]!r}", "give each a name of its own")


def _check_streaming(config: TrainingConfig) -> None:
    data = config.data
    if config.train.steps is None:
        raise UserError("data.streaming", "with train.epochs: a stream's length is not known", "give train.steps")
    if data.format == "synthetic":
        raise UserError("data.streaming", 'with data.format = "synthetic", which is not read', "leave it out")
    if data.path is None and not data.sources:
        raise UserError("data.path", "is required by data.streaming", "name a file, folder, URL or hub id")
    if data.format == "preference":
        raise UserError("data.streaming", "does not keep the two answers of a preference together", "leave it out")
    for key, part in [("data", data), *((f"data.sources.{at}", part) for at, part in enumerate(data.sources))]:
        if "[" in part.split:
            what = f"{part.split!r} with data.streaming, which does not know how long a split is"
            raise UserError(f"{key}.split", what, f"set {key}.limit to read the first rows, or data.streaming = false")
    if any(part.epochs is not None for part in data.sources):
        raise UserError("data.sources", "epochs with data.streaming: lengths are not known", "give weights")
    evaluation = config.eval
    evaluates, split = evaluation.every or not config.train.steps, evaluation.split
    if isinstance(split, int):
        raise UserError("eval.split", f"{split} rows of a stream, which is not counted", "give a share, like 0.01")
    if isinstance(split, float) and evaluates and evaluation.steps is None:
        what = f"{split} of a stream, which has no end to look for held-out rows until"
        raise UserError("eval.split", what, "set eval.steps: the first rows found that fill as many batches are used")
    if isinstance(split, str) and evaluates and not evaluation.sets and evaluation.path is None:
        todo = "give eval.path or eval.sets, or hold a share out: eval.split = 0.01"
        raise UserError("eval", "would be a split of a stream, read whole", todo)


def _check_evaluation(config: TrainingConfig) -> None:
    evaluation, data = config.eval, config.data
    evaluates = evaluation.every > 0 or config.train.steps == 0
    if not isinstance(evaluation.split, str):
        _check_hold_out(evaluation, data)
    held_out: list[tuple[str, Any]] = [(part.path, part.split) for part in evaluation.sets.values()]
    if evaluation.path is not None or evaluation.split != data.split:
        held_out.append((evaluation.path or data.path or "", evaluation.split))
    trained_on = [(part.path, part.split) for part in data.sources] or [(data.path, data.split)]
    trained_on = [] if config.train.steps == 0 else trained_on
    if evaluates and (not held_out or any(_overlap(one, other) for one in held_out for other in trained_on)):
        todo = "give eval.path or eval.sets, or an eval.split other than data.split: 0.02 holds out that share of it"
        raise UserError("eval", "evaluation would run on the training data itself", todo)
    is_split = isinstance(evaluation.split, str) and evaluation.path is None and not evaluation.sets
    if data.sources and evaluates and is_split:
        todo = "give eval.path or eval.sets, or hold a share of each out: eval.split = 0.02"
        raise UserError("eval.split", "of which of data.sources?", todo)
    for name in ("patience", "keep_best", "prompts"):
        if getattr(evaluation, name) and not evaluation.every:
            raise UserError(f"eval.{name}", "without evaluations", "set eval.every")
    if config.checkpoint.export == "best" and not evaluation.keeps_best:
        raise UserError("checkpoint.export", "'best', but no best checkpoint is kept", "set eval.keep_best = true")


def _check_upload(section: CheckpointConfig) -> None:
    repository, key = section.push_to_hub, "checkpoint.push_to_hub"
    if repository is None:
        return
    if not may_be_hub_id(repository):
        raise UserError(key, f"{repository!r} is no name of a repository", "write user/model, or model")
    if section.export_hf == "never":
        raise UserError(key, "nothing is exported", 'set checkpoint.export_hf = "final"')
    if section.export_dir and "://" in section.export_dir:
        raise UserError(key, f"{section.export_dir} is on no disk", "leave one of them out")


def _overlap(one: tuple[str | None, Any], other: tuple[str | None, Any]) -> bool:
    """Whether two (path, split) are the same rows, or one is a slice of the other; two slices may be apart."""
    if one[0] != other[0] or not isinstance(one[1], str):
        return False
    names = {split.partition("[")[0] for split in (one[1], other[1])}
    return one[1] == other[1] or (len(names) == 1 and names & {one[1], other[1]} != set())


def _check_hold_out(evaluation: EvalConfig, data: DataConfig) -> None:
    """`eval.split` is a number: rows are held out of the training data."""
    what = f"{evaluation.split} of the training data is held out"
    if evaluation.path is not None:
        raise UserError("eval.path", f"is given, and eval.split = {what}", "leave one of them out, or use eval.sets")
    if data.format == "synthetic":
        raise UserError("eval.split", f"{what}, which is made up", 'name a split: eval.split = "validation"')
