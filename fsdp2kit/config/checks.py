"""Checks across sections; they need the world size, but no devices and no weights."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

from fsdp2kit.config.data_checks import check_data
from fsdp2kit.config.paths import check_paths
from fsdp2kit.config.rl_schema import RLConfig, check_rollouts
from fsdp2kit.config.schema import (
    CheckpointConfig,
    DistillConfig,
    DPOConfig,
    FSDPConfig,
    LRScheduleConfig,
    MeshConfig,
    OptimizerConfig,
    TrainingConfig,
)
from fsdp2kit.config.section import Section, may_be_hub_id
from fsdp2kit.config.wandb_login import check_wandb
from fsdp2kit.errors import UserError, tool_command

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


def smallest_world(config: TrainingConfig) -> int:
    """The fewest ranks that the sizes in ``[mesh]`` fit; where they do not fit its batches, no larger world does."""
    mesh, strategy = config.mesh, config.fsdp.strategy
    sizes = [mesh.dp_shard] if strategy != "no_shard" else []
    sizes += [mesh.dp_replicate] if strategy in ("no_shard", *HYBRID) else []  # of others there is one replica
    ranks = mesh.cp * math.prod(size for size in sizes if isinstance(size, int))
    if isinstance(config, RLConfig) and "auto" in sizes:
        ranks = math.lcm(ranks, config.rollout.tp)
    return ranks


def shard_ranks(fsdp: FSDPConfig, sizes: MeshSizes) -> int:
    """Ranks that one copy of the parameters is sharded over."""
    return 1 if fsdp.strategy == "no_shard" else sizes.dp_shard * sizes.cp


def resolve_accumulation(global_batch_size: int, micro_batch_size: int, *, dp: int, group: int = 1) -> int:
    """Micro-batches that one data-parallel rank runs in one step: global ÷ (dp × micro).

    Args:
        group: rows that belong together; a global batch holds whole groups.

    Raises:
        UserError: the global batch does not consist of whole micro-batches and groups; the message says which sizes
            would fit.
    """
    per_round = dp * micro_batch_size
    near = _multiples_near(global_batch_size, math.lcm(per_round, group))
    if global_batch_size % per_round:
        what = f"{global_batch_size} is not a multiple of dp {dp} × micro_batch_size {micro_batch_size}"
        raise UserError("train.global_batch_size", what, f"use {near}, or another micro_batch_size")
    if global_batch_size % group:
        what = f"{global_batch_size} responses are not whole groups of rollout.n = {group}"
        raise UserError("train.global_batch_size", what, f"use {near}, or another rollout.n")
    return global_batch_size // per_round


def _multiples_near(number: int, divisor: int, *, above: int = 0) -> str:
    """The multiples of ``divisor`` around a number, in words; those that are larger than ``above``."""
    below = max(number, above) // divisor * divisor
    return " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple > above)


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
    group, longest_response = 1, 0
    if isinstance(config, RLConfig):
        group, longest_response = config.rollout.n, config.rollout.max_new_tokens
    resolve_accumulation(train.global_batch_size, train.micro_batch_size, dp=sizes.dp, group=group)
    if (train.steps is None) == (train.epochs is None):
        what = "neither steps nor epochs is given" if train.steps is None else "both steps and epochs are given"
        raise UserError("train", what, "give exactly one of train.steps and train.epochs")
    if "max_nonfinite" in _changed(train) and train.on_nonfinite == "stop":
        what = f"{train.max_nonfinite} with train.on_nonfinite = 'stop', which stops at the first"
        raise UserError("train.max_nonfinite", what, "leave it out, or set train.on_nonfinite = 'skip'")
    resolve_warmup(config.lr_schedule, train.steps or 0)  # of epochs, the data tell the steps
    check_paths(config)
    if isinstance(config, RLConfig):
        check_rollouts(config, world_size=world_size)
    check_data(config)
    _check_upload(config.checkpoint)
    if config.data.seq_len % sizes.cp:
        what = f"{config.data.seq_len} is not divisible by mesh.cp {sizes.cp}"
        near = _multiples_near(config.data.seq_len, sizes.cp, above=longest_response)
        raise UserError("data.seq_len", what, f"use {near}")
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


def _changed(section: Section) -> list[str]:
    """Fields that have another value than their default."""
    return [name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default]


def _check_fsdp(section: FSDPConfig, sizes: MeshSizes) -> None:
    if section.unit != "size" and "min_params" in _changed(section):
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
    if name != "muon" and "muon_momentum" in _changed(optimizer):
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
        for name in _changed(section):
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
        for name in _changed(section):
            raise UserError(f"lora.{name}", "is set, but lora.rank is not", "set lora.rank, or leave it out")
        return
    if importlib.util.find_spec("peft") is None:
        key = "lora.rank" if model.adapter is None else "model.adapter"
        raise UserError(key, "needs peft, which is not installed", "install it: pip install 'fsdp2kit[lora]'")
    if model.adapter is not None and (given := sorted(section.model_fields_set - {"dropout", "quantize"})):
        what = "is given beside model.adapter, whose adapter_config.json says it"
        raise UserError(f"lora.{given[0]}", what, "leave one of the two out")
    if model.freeze:
        raise UserError("model.freeze", "is set with adapters, which freeze the whole model", "leave it out")
    if model.weights not in ("pretrained", "random"):
        what = "is a checkpoint: an adapter is kept by itself, and peft could not load the model that it belongs to"
        todo = f"convert it ({tool_command('dcp_to_hf')}) and give the directory as model.path"
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


def _check_distillation(config: TrainingConfig) -> None:
    section = getattr(config, "distill", None)
    if not isinstance(section, DistillConfig):
        return
    if section.teacher is None:
        what = "is not given, and there is nothing to learn from"
        raise UserError("distill.teacher", what, "give a Hugging Face model directory or hub id")


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
