"""fsdp2kit beside FSDP1 on one TOML: `FullyShardedDataParallel` with the arguments that match, on the same batches.

The other side is what users of FSDP1 ran: the whole model on every rank, wrapped; transformers' own forward;
cross-entropy on all logits in float32; FSDP1's `no_sync` and `clip_grad_norm_`. Values, batches, optimizer and
schedule are those of our side, and so is the formula of the loss, hence the losses must agree.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.optim import AdamW
from transformers import PreTrainedModel

from fsdp2kit import distributed, run
from fsdp2kit.bench.handwritten import PlainLoop
from fsdp2kit.bench.harness import Command, option, provenance
from fsdp2kit.bench.ours import read_data
from fsdp2kit.bench.sides import PAIR_BARS, LoopSide, OurSide, pair_row, run_sides, worst_difference
from fsdp2kit.config.checks import HYBRID, MeshSizes, check_config
from fsdp2kit.config.schema import FSDPConfig, OptimizerConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.assets import find_model_dir
from fsdp2kit.model.build import build_model, decoder_layers, materialize, tied_names
from fsdp2kit.model.liger import apply_liger
from fsdp2kit.model.weights import initialize, load_pretrained
from fsdp2kit.optim.build import build_lr_schedule
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.fsdp import ignored_modules, reshards_after_forward
from fsdp2kit.parallel.mesh import Mesh, build_mesh

# Largest relative difference of the two losses at any step. In 16 bits the heads round differently.
_LOSS_TOLERANCE = 1e-5
_LOSS_TOLERANCE_16_BITS = 2e-2
# FSDP1 says so at every unit: that NO_SHARD is deprecated, and that a world of one is NO_SHARD.
_EXPECTED_WARNINGS = ("The `NO_SHARD` sharding strategy is deprecated", "FSDP is switching to use `NO_SHARD`")


@dataclass(frozen=True)
class Options:
    """What is trained on both sides, and how long."""

    toml: str = option(..., "of any recipe", positional=True)
    overrides: tuple[str, ...] = option((), "as for a run", positional=True, nargs="*", metavar="section.key=value")
    rounds: int = option(60, "rounds that count, a step of each side")
    warmup: int = option(3, "steps of each side before those")


def bench_fsdp1(options: Options) -> dict[str, Any]:
    """Train ``warmup`` steps on each side alone, then ``rounds`` in turns; nothing is evaluated, saved or exported.

    Raises:
        UserError: what `check_fsdp1` refuses, or a mistake in the TOML, the model or the data.
    """
    world = distributed.start()
    source = provenance(world)
    steps = {"steps": options.warmup + options.rounds, "epochs": None, "log_every": 1}
    with distributed.agreement():
        _, config = run.load(options.toml, options.overrides)
        config = config.model_copy(update={"train": config.train.model_copy(update=steps)})
        sizes = check_config(config, world_size=world.size, local_world_size=world.local_size)
        check_fsdp1(config, sizes=sizes)
    world = distributed.start(deterministic=config.run.deterministic)
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    model_dir = find_model_dir(config.model)
    loader, _ = read_data(config, dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp)
    build = partial(FSDP1Loop, config, mesh=mesh, source=model_dir, device=world.device, total_steps=steps["steps"])
    sides = {"fsdp2kit": OurSide(config, world=world, batches=loader), "fsdp1": LoopSide(build, loader)}
    found = run_sides(sides, rounds=options.rounds, warmup=options.warmup, world=world)
    is_exact = {config.fsdp.param_dtype, config.fsdp.storage_dtype, config.fsdp.reduce_dtype} == {"float32"}
    ours, theirs = found.values()
    row = pair_row("fsdp1", ours, theirs, tolerance=_LOSS_TOLERANCE if is_exact else _LOSS_TOLERANCE_16_BITS)
    row["grad_norms_differ_by"] = worst_difference(ours["grad_norms"], theirs["grad_norms"])
    return {
        "benchmark": "fsdp1",
        "options": asdict(options),
        "config": config.model_dump(mode="json"),
        "rows": [row],
        "sides": found,
        "notes": [f"{name} ran {side['ran']}" for name, side in found.items()],
        "checks": {"losses_agree": row["losses_agree"]},
        "bars": PAIR_BARS,
        "provenance": source,
    }


def check_fsdp1(config: TrainingConfig, *, sizes: MeshSizes) -> None:
    """Refuse what FSDP1 cannot do, and what cannot be read or started twice.

    Raises:
        UserError: naming the key.
    """
    fsdp = config.fsdp
    mixes_policies = fsdp.unit == "size" and fsdp.unit_classes
    refusals: list[tuple[str, Any, bool, str]] = [
        ("mesh.cp", config.mesh.cp, config.mesh.cp > 1, "set it to 1"),
        ("fsdp.unit_classes", fsdp.unit_classes, bool(mixes_policies), 'use fsdp.unit = "layer" or "root"'),
        ("fsdp.class_dtypes", fsdp.class_dtypes, bool(fsdp.class_dtypes), "leave it out"),
        ("float8.recipe", config.float8.recipe, config.float8.recipe != "none", 'use "none"'),
        ("fsdp.output_dtype", fsdp.output_dtype, fsdp.output_dtype is not None, "leave it out"),
        ("optimizer.name", config.optimizer.name, config.optimizer.name != "adamw", 'use "adamw"'),
        ("fsdp.offload", fsdp.offload, fsdp.offload == "optimizer", 'use "none" or "params"'),
        ("fsdp.forward_prefetch", fsdp.forward_prefetch, fsdp.forward_prefetch > 1, "use 0 or 1"),
        ("fsdp.backward_prefetch", fsdp.backward_prefetch, fsdp.backward_prefetch > 1, "use 0 or 1"),
        (
            "fsdp.reshard_after_forward",
            fsdp.reshard_after_forward,
            type(fsdp.reshard_after_forward) is int,
            "use true or false",
        ),
    ]
    for key, value, refused, todo in refusals:
        if refused:
            raise UserError(key, f"{value!r} has no equal in FSDP1", f"{todo}, or compare with nothing")
    if fsdp.strategy in HYBRID and sizes.dp_shard == 1 and sizes.dp_replicate > 1:
        what = "1 under a hybrid strategy, which FSDP1 runs without reducing gradients between the replicas"
        raise UserError("mesh.dp_shard", what, 'use fsdp.strategy = "no_shard"')
    if config.data.streaming:
        raise UserError("data.streaming", "cannot be read by two loops in turns", "set it to false")
    if config.model.weights not in ("pretrained", "random"):
        raise UserError("model.weights", "is a checkpoint, which FSDP1 does not read", "export it, and use model.path")


def fsdp1_arguments(
    section: FSDPConfig, model: PreTrainedModel, *, mesh: Mesh, device: torch.device
) -> dict[str, Any]:
    """The arguments of `FullyShardedDataParallel` that match ``[fsdp]``; of a config that `check_fsdp1` let pass."""
    strategy = sharding_strategy(section, sizes=mesh.sizes)
    is_hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    return {
        "sharding_strategy": strategy,
        "device_mesh": mesh.shard if is_hybrid else None,
        "auto_wrap_policy": _wrap_policy(section, model),
        "mixed_precision": MixedPrecision(
            param_dtype=getattr(torch, section.param_dtype), reduce_dtype=getattr(torch, section.reduce_dtype)
        ),
        # On a CPU run shards are on the host already, and FSDP1 would fail to pin them.
        "cpu_offload": CPUOffload(offload_params=section.offload == "params" and device.type != "cpu"),
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE if section.backward_prefetch else None,
        "forward_prefetch": section.forward_prefetch == 1,
        "limit_all_gathers": True,
        "use_orig_params": True,
        "ignored_modules": [model.get_submodule(name) for name in ignored_modules(section, model)] or None,
        "device_id": device,
    }


def sharding_strategy(section: FSDPConfig, *, sizes: MeshSizes) -> ShardingStrategy:
    """FSDP1's name of what ``[fsdp]`` and the mesh ask for; a hybrid strategy without replicas is a plain one."""
    if section.strategy == "no_shard":
        return ShardingStrategy.NO_SHARD
    frees = reshards_after_forward(section)
    if sizes.dp_replicate > 1:
        return ShardingStrategy.HYBRID_SHARD if frees else ShardingStrategy._HYBRID_SHARD_ZERO2
    return ShardingStrategy.FULL_SHARD if frees else ShardingStrategy.SHARD_GRAD_OP


def _wrap_policy(section: FSDPConfig, model: PreTrainedModel) -> Any:
    if section.unit == "size":
        # FSDP1 would wrap what holds one of two tied parameters, and then fail; here that stays with the other one.
        shared = {name for pair in tied_names(model).items() for name in pair}
        whole = set()
        for name, module in model.named_modules():
            own = {key for key, _ in module.named_parameters(prefix=name, remove_duplicate=False)}
            if shared & own and not shared <= own:
                whole.add(id(module))

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            is_large = size_based_auto_wrap_policy(
                module, recurse, nonwrapped_numel, min_num_params=section.min_params
            )
            return is_large and (recurse or id(module) not in whole)

        return policy
    classes = {type(module) for module in model.modules() if type(module).__name__ in section.unit_classes}
    if section.unit == "layer":
        classes |= {type(layer) for layer in decoder_layers(model)}
    return partial(transformer_auto_wrap_policy, transformer_layer_cls=classes) if classes else None


class FSDP1Loop(PlainLoop):
    """A model under FSDP1 with its optimizer and schedule. Collective.

    Args:
        config: as `check_fsdp1` let it pass; ``model.weights`` is "pretrained" or "random".
        source: the model's directory, for pretrained weights.
        total_steps: of the schedule.
    """

    def __init__(
        self, config: TrainingConfig, *, mesh: Mesh, source: Path | None, device: torch.device, total_steps: int
    ) -> None:
        model = build_model(config.model)
        materialize(model, device=torch.device("cpu"))
        if config.model.weights == "pretrained":
            assert source is not None, "a model with pretrained weights has a directory"
            load_pretrained(model, source)
        else:
            initialize(model, seed=config.run.seed)
        apply_liger(config.model, model, device=device)
        layers = decoder_layers(model)
        # Inside FSDP's hooks, as FSDP1's users had `checkpoint_wrapper`, which calls the same function.
        apply_activation_checkpointing(config.activation_checkpointing, layers, device_type=device.type)
        if config.compile.enabled:
            for layer in layers:
                layer.compile()
        arguments = fsdp1_arguments(config.fsdp, model, mesh=mesh, device=device)
        _cast(model, config.fsdp, ignored=arguments["ignored_modules"] or [])
        # FSDP1's shards have one dimension, so which parameters decay is asked before.
        groups = _parameter_groups(config.optimizer, model)
        with warnings.catch_warnings():
            for message in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            wrapped: Any = FullyShardedDataParallel(model, **arguments)
        for module in arguments["ignored_modules"] or []:
            module.to(device)
        section = config.optimizer
        optimizer = AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
        # Without clipping there is still a norm to compare, as on our side.
        super().__init__(wrapped, optimizer, max_grad_norm=config.train.max_grad_norm or float("inf"), device=device)
        self.reduce_every = config.fsdp.reduce_every_micro_batch
        self.schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=total_steps)

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
        """One optimizer step, and one of the schedule."""
        done = super().step(micro_batches)
        self.schedule.step()
        return done

    def reduction(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if is_last or self.reduce_every else self.model.no_sync()

    def clip(self) -> Tensor:
        return self.model.clip_grad_norm_(self.max_grad_norm)

    def describe(self) -> str:
        """What it runs, by argument."""
        units = [module for module in self.model.modules() if isinstance(module, FullyShardedDataParallel)]
        classes = sorted({type(unit.module).__name__ for unit in units})
        precision, prefetch = self.model.mixed_precision, self.model.backward_prefetch
        ran = {
            # What FSDP1 made of it: in a world of one it is NO_SHARD whatever was asked for.
            "sharding_strategy": self.model.sharding_strategy.name,
            "units": f"{len(units)} ({', '.join(classes)})",
            "mixed_precision": f"(param {precision.param_dtype}, reduce {precision.reduce_dtype})".replace(
                "torch.", ""
            ),
            "cpu_offload": self.model.cpu_offload.offload_params,
            "backward_prefetch": prefetch.name if prefetch else None,
            "forward_prefetch": self.model.forward_prefetch,
            "limit_all_gathers": self.model.limit_all_gathers,
            "use_orig_params": True,
            "attention": self.model.module.config._attn_implementation,
            "loss": "cross_entropy on all logits in float32",
        }
        return "FullyShardedDataParallel: " + ", ".join(f"{name} {value}" for name, value in ran.items())


def _cast(model: nn.Module, section: FSDPConfig, *, ignored: Sequence[nn.Module]) -> None:
    """Shards keep the dtype of what is wrapped; nothing would cast an ignored parameter later."""
    whole = {parameter for module in ignored for parameter in module.parameters()}
    for parameter in model.parameters():
        dtype = section.param_dtype if parameter in whole else section.storage_dtype
        parameter.data = parameter.data.to(getattr(torch, dtype))


def _parameter_groups(section: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    """The groups of `build_optimizer`. FSDP1 keeps these very objects as the views of its flat ones."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


COMMANDS = {"fsdp1": Command(Options, bench_fsdp1)}
