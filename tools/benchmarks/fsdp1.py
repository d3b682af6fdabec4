"""FSDP1's side of a comparison: `FullyShardedDataParallel` with the arguments that match a config.

It is what users of FSDP1 ran: the whole model on every rank, wrapped; transformers' own forward; cross-entropy on all
logits in float32; FSDP1's `no_sync` and `clip_grad_norm_`. Values, batches, optimizer, schedule and the formula of the
loss are those of our side: the losses must agree.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from enum import Enum
from functools import partial
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
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.state import fill_weights
from fsdp2kit.config.checks import HYBRID, MeshSizes
from fsdp2kit.config.schema import FSDPConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import World
from fsdp2kit.job.mesh import Mesh, build_mesh
from fsdp2kit.model.build import build_model, decoder_layers, materialize
from fsdp2kit.model.liger import apply_liger
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.fsdp import ignored_modules, reshards_after_forward
from fsdp2kit.weights.record import find_ties
from tools.benchmarks.handwritten import PlainLoop


def check_fsdp1(config: TrainingConfig, *, sizes: MeshSizes) -> None:
    """Refuse what FSDP1 cannot do, and what cannot be read or started twice."""
    fsdp = config.fsdp
    reshard = config.fsdp.reshard_after_forward
    mixes_policies = fsdp.unit == "size" and bool(fsdp.unit_classes)
    refusals: list[tuple[str, Any, bool, str]] = [
        ("mesh.cp", config.mesh.cp, config.mesh.cp > 1, "set it to 1"),
        ("lora.rank", config.lora.rank, config.trains_adapter, "leave the adapters out"),
        ("fsdp.unit_classes", fsdp.unit_classes, mixes_policies, 'use fsdp.unit = "layer" or "root"'),
        ("fsdp.class_dtypes", fsdp.class_dtypes, bool(fsdp.class_dtypes), "leave it out"),
        ("float8.recipe", config.float8.recipe, config.float8.recipe != "none", 'use "none"'),
        ("fsdp.output_dtype", fsdp.output_dtype, fsdp.output_dtype is not None, "leave it out"),
        ("optimizer.name", config.optimizer.name, config.optimizer.name != "adamw", 'use "adamw"'),
        ("fsdp.offload", fsdp.offload, fsdp.offload == "optimizer", 'use "none" or "params"'),
        ("fsdp.forward_prefetch", fsdp.forward_prefetch, fsdp.forward_prefetch > 1, "use 0 or 1"),
        ("fsdp.backward_prefetch", fsdp.backward_prefetch, fsdp.backward_prefetch > 1, "use 0 or 1"),
        ("fsdp.reshard_after_forward", reshard, type(reshard) is int, "use true or false"),
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


def fsdp1_arguments(section: FSDPConfig, model: PreTrainedModel, *, mesh: Mesh) -> dict[str, Any]:
    """The arguments of `FullyShardedDataParallel` that match ``[fsdp]``, after `check_fsdp1`."""
    strategy = sharding_strategy(section, sizes=mesh.sizes)
    return {
        "sharding_strategy": strategy,
        "device_mesh": mesh.shard if "HYBRID" in strategy.name else None,
        "auto_wrap_policy": _wrap_policy(section, model),
        "mixed_precision": MixedPrecision(
            param_dtype=getattr(torch, section.param_dtype), reduce_dtype=getattr(torch, section.reduce_dtype)
        ),
        # On a CPU shards are on the host already, and FSDP1 would fail to pin them.
        "cpu_offload": CPUOffload(offload_params=section.offload == "params" and mesh.device.type != "cpu"),
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE if section.backward_prefetch else None,
        "forward_prefetch": section.forward_prefetch == 1,
        "limit_all_gathers": True,
        "use_orig_params": True,
        "ignored_modules": [model.get_submodule(name) for name in ignored_modules(section, model)] or None,
        "device_id": mesh.device,
    }


def sharding_strategy(section: FSDPConfig, *, sizes: MeshSizes) -> ShardingStrategy:
    """FSDP1's strategy for ``[fsdp]`` and the mesh; a hybrid strategy without replicas is a plain one."""
    if section.strategy == "no_shard":
        return ShardingStrategy.NO_SHARD
    frees = reshards_after_forward(section)
    if sizes.dp_replicate > 1:
        return ShardingStrategy.HYBRID_SHARD if frees else ShardingStrategy._HYBRID_SHARD_ZERO2
    return ShardingStrategy.FULL_SHARD if frees else ShardingStrategy.SHARD_GRAD_OP


def _wrap_policy(section: FSDPConfig, model: PreTrainedModel) -> Any:
    if section.unit != "size":
        classes = {type(module) for module in model.modules() if type(module).__name__ in section.unit_classes}
        if section.unit == "layer":
            classes |= {type(layer) for layer in decoder_layers(model)}
        return partial(transformer_auto_wrap_policy, transformer_layer_cls=classes) if classes else None
    # FSDP1 would wrap a module with one of two tied parameters, and then fail: such a module is not wrapped here.
    shared = {name for pair in find_ties(model).items() for name in pair}
    whole = set()
    for name, module in model.named_modules():
        own = {key for key, _ in module.named_parameters(prefix=name, remove_duplicate=False)}
        if shared & own and not shared <= own:
            whole.add(id(module))

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        is_large = size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=section.min_params)
        return is_large and (recurse or id(module) not in whole)

    return policy


class FSDP1Loop(PlainLoop):
    """A model under FSDP1 with its optimizer and schedule, after `check_fsdp1`. Collective."""

    def __init__(self, config: TrainingConfig, *, world: World) -> None:
        device = world.device
        model = build_model(config.model)
        materialize(model, device=torch.device("cpu"))
        fill_weights(config.model, model, seed=config.run.seed)
        apply_liger(config.model, model, device=device)
        layers = decoder_layers(model)
        # Inside FSDP's hooks, where FSDP1's users had `checkpoint_wrapper`, which calls the same function.
        apply_activation_checkpointing(config.activation_checkpointing, layers, device_type=device.type)
        if config.compile.enabled:
            for layer in layers:
                layer.compile()
        mesh = build_mesh(config.mesh, config.fsdp, world=world)
        arguments = fsdp1_arguments(config.fsdp, model, mesh=mesh)
        ignored = arguments["ignored_modules"] or []
        # Shards keep the dtype of the wrapped parameters; nothing casts an ignored parameter later.
        whole = {parameter for module in ignored for parameter in module.parameters()}
        for parameter in model.parameters():
            dtype = config.fsdp.param_dtype if parameter in whole else config.fsdp.storage_dtype
            parameter.data = parameter.data.to(getattr(torch, dtype))
        # Built before wrapping: a parameter's dimensions tell whether it decays, and FSDP1's shards have only one.
        # FSDP1 keeps the parameter objects as views of its flat ones.
        optimizer = build_optimizer(config.optimizer, model)
        with warnings.catch_warnings():
            # FSDP1 warns at every unit that it is deprecated, and that a world of one is NO_SHARD.
            warnings.filterwarnings("ignore", message=".*`NO_SHARD`")
            wrapped: Any = FullyShardedDataParallel(model, **arguments)
        for module in ignored:
            module.to(device)
        # Without clipping the norm is still compared.
        super().__init__(wrapped, optimizer, max_grad_norm=config.train.max_grad_norm or float("inf"), device=device)
        self.reduce_every = config.fsdp.accumulates_shards
        self.schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=config.train.total_steps(0))

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
        """One step of the optimizer and of the schedule."""
        done = super().step(micro_batches)
        self.schedule.step()
        return done

    def reduction(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if is_last or self.reduce_every else self.model.no_sync()

    def clip(self) -> Tensor:
        return self.model.clip_grad_norm_(self.max_grad_norm)

    def describe(self) -> str:
        """What it runs, argument by argument."""
        units = [module for module in self.model.modules() if isinstance(module, FullyShardedDataParallel)]
        classes = ", ".join(sorted({type(unit.module).__name__ for unit in units}))
        # Read from the wrapped model: in a world of one FSDP1 makes it NO_SHARD.
        made = ("sharding_strategy", "mixed_precision", "cpu_offload", "backward_prefetch", "forward_prefetch")
        ran = {name: getattr(self.model, name) for name in (*made, "limit_all_gathers")}
        said = ", ".join(f"{name} {value.name if isinstance(value, Enum) else value}" for name, value in ran.items())
        attention = self.model.module.config._attn_implementation
        return f"FullyShardedDataParallel: units {len(units)} ({classes}), {said}, attention {attention}, whole logits"
