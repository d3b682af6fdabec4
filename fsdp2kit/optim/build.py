"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fsdp2kit.config.schema import CosineScheduleConfig
from fsdp2kit.config.sections.lr_schedule import LRScheduleConfig, WSDScheduleConfig
from fsdp2kit.config.sections.optimizer import MuonConfig, OptimizerConfig
from fsdp2kit.errors import importing
from fsdp2kit.job.distributed import by_mesh, local_part, sharded_like
from fsdp2kit.optim.host_state import keep_state_on_host
from fsdp2kit.optim.muon import MuonAdamW, hidden_matrices
from fsdp2kit.optim.rounded_adamw import ELEMENTS_AT_ONCE, RoundedAdamW


def build_optimizer(section: OptimizerConfig, model: nn.Module, *, state_on_host: bool = False) -> Optimizer:
    """The optimizer of ``section.name`` over the trainable parameters.

    Norms and biases are not decayed. Build it after the model is sharded and its
    parameters are where they stay.

    Args:
        state_on_host: keep the moments in pinned host memory, where parameters are not.

    Raises:
        UserError: the optimizer is torchao's, and that is not installed.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    trainable = [parameter for _, parameter in named]
    # The biases of experts in one tensor are [E, out].
    exempt = {id(parameter) for name, parameter in named if parameter.ndim < 2 or name.endswith("bias")}
    groups = partial(_groups, exempt=exempt, decay=section.weight_decay)
    values: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    optimizer: Optimizer
    if isinstance(section, MuonConfig):
        matrices = hidden_matrices(model)
        inside = {id(matrix) for matrix in matrices}
        others = [parameter for parameter in trainable if id(parameter) not in inside]
        optimizer = MuonAdamW(groups(matrices), groups(others), momentum=section.muon_momentum, **values)
    elif section.name == "adamw":  # fused: one kernel over all shards, on CPU and CUDA alike
        optimizer = torch.optim.AdamW(groups(trainable), fused=True, **values)
    elif section.name == "adamw_bf16":
        optimizer = RoundedAdamW(groups(trainable), **values)
    elif section.name == "adamw_8bit":
        return _build_adamw_8bit(groups(trainable), values)
    else:
        raise ValueError(f"no optimizer is built for optimizer.name = {section.name!r}")
    if state_on_host and any(parameter.device.type != "cpu" for parameter in trainable):
        keep_state_on_host(optimizer)
    return optimizer


def _groups(parameters: Sequence[nn.Parameter], *, exempt: Collection[int], decay: float) -> list[dict[str, Any]]:
    """Parameter groups, the decayed and then the others, without empty ones.

    Args:
        exempt: ids of parameters that are not decayed.
    """
    decayed = [parameter for parameter in parameters if id(parameter) not in exempt]
    others = [parameter for parameter in parameters if id(parameter) in exempt]
    groups = [(decayed, decay), (others, 0.0)]
    return [{"params": same, "weight_decay": rate} for group, rate in groups for same in by_mesh(group)]


def _build_adamw_8bit(groups: list[dict[str, Any]], values: dict[str, Any]) -> Optimizer:
    """torchao's ``AdamW8bit`` (arXiv:2110.02861) with all its state made: codes into a table, and scales of blocks.

    torchao's blocks depend on the mesh. Here no block crosses a row of the whole tensor, so checkpoints fit any mesh.
    """
    with importing("torchao", where="optimizer.name"):
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
        from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]
    optimizer = AdamW8bit(groups, **values)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        state = optimizer.state[parameter] = {"step": torch.tensor(0.0)}
        shard = local_part(parameter)
        block = block_size(parameter)
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if block is None:
                state[name] = torch.zeros_like(parameter, requires_grad=False)
            else:
                zeros = OptimState8bit.zeros(shard.shape, signed, block, shard.device, dtype=shard.dtype)
                state[name] = sharded_like(parameter, zeros)
    if all(parameter.device.type == "cpu" for parameter in optimizer.state):
        compiled_step = optimizer.step  # compiling on a CPU needs a C++ compiler and many seconds a shape

        def step(_optimizer: Optimizer, closure: None = None) -> None:
            with torch.compiler.set_stance("force_eager"):
                compiled_step()

        optimizer.step = MethodType(step, optimizer)
    return optimizer


def block_size(parameter: torch.Tensor) -> int | None:
    """Elements that share a scale: the largest power of two that divides the rows; None: the moments stay float32.

    Vectors and small tensors are not quantised, nor are tensors with fewer rows than ranks, which torchao cannot keep.
    """
    shards = 1
    if isinstance(parameter, DTensor):
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        shards = math.prod(size for placement, size in sizes if isinstance(placement, Shard))
    return _block_size(parameter.shape, shards=shards)


def _block_size(shape: Sequence[int], *, shards: int) -> int | None:
    """`block_size` of a parameter whose rows are spread over ``shards`` ranks."""
    block = math.gcd(shape[-1], 256) if len(shape) >= 2 else 1
    if shards > 1 and -(-shape[0] // shards) * (shards - 1) >= shape[0]:
        return None
    return block if block >= 32 and math.prod(shape) >= 4096 else None


def state_sizes(
    section: OptimizerConfig,
    model: nn.Module,
    *,
    shards: int,
    item_bytes: int,
    held: Mapping[nn.Parameter, int] | None = None,
) -> list[int]:
    """Bytes of each tensor of optimizer state on the rank with the largest shards, after its first step.

    Args:
        model: before it is sharded, on meta or real.
        shards: ranks over which every parameter's rows are spread.
        item_bytes: bytes of an element of a shard.
        held: elements of a rank's shard of the parameters that are sharded in another way.
    """
    held = held or {}
    matrices = {id(matrix) for matrix in hidden_matrices(model)} if section.name == "muon" else set()
    sizes = []
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        by_rows = parameter.numel() // max(1, len(parameter)) * -(-len(parameter) // shards)
        elements = held.get(parameter, by_rows)
        block = _block_size(parameter.shape, shards=shards) if section.name == "adamw_8bit" else None
        if id(parameter) in matrices:
            sizes.append(elements * item_bytes)  # momentum
        elif block is not None:
            # Codes, float32 scales and the table of 256 values, for each of two moments.
            sizes += 2 * [elements, 4 * -(-elements // block), 4 * 256]
        else:
            sizes += 2 * [elements * (2 if section.name == "adamw_bf16" else item_bytes)]
    return sizes


def update_bytes(section: OptimizerConfig, model: nn.Module, *, shards: int) -> int:
    """Bytes that an update takes beside parameters, gradients and state, approximately at most.

    "muon": what is sent and received, and the whole matrix (or this rank's experts of a layer) at work, in bfloat16.
    "adamw_bf16": float32 copies of the elements being updated, where plain operations do it; the compiled kernel of
    CUDA makes none. The others update in place.
    """
    if section.name == "muon":
        # Four matrices of the whole one's shape, and two of its shorter side's square.
        sizes = [0]
        for matrix in hidden_matrices(model):
            at_once = 1 if matrix.ndim == 2 else -(-len(matrix) // shards)
            out, inner = matrix.shape[-2:]
            sizes.append(at_once * (8 * out * inner + 4 * min(out, inner) ** 2))
        return max(sizes)
    if section.name == "adamw_bf16":
        elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return 36 * min(ELEMENTS_AT_ONCE, elements // shards)
    return 0


def build_lr_schedule(section: LRScheduleConfig, optimizer: Optimizer, *, total_steps: int, step: int = 0) -> LambdaLR:
    """A schedule of transformers, positioned at ``step``: the next optimizer step uses the rate of that step.

    The position is a number, not saved state, so a resumed run may change the schedule or the peak rate.

    Args:
        total_steps: length of the whole run in optimizer steps.
        step: optimizer steps already taken.

    Raises:
        UserError: the warm-up does not fit into ``total_steps``.
    """
    from transformers import get_scheduler  # only then: it imports peft, which a plan does not need

    warmup = section.warmup(total_steps)
    options = {}
    if isinstance(section, WSDScheduleConfig):
        decay_steps = section.decay_steps or max(1, min(total_steps // 10, total_steps - warmup))
        name = "warmup_stable_decay"
        options = {"num_decay_steps": decay_steps, "min_lr_ratio": section.min_lr_ratio}
    elif isinstance(section, CosineScheduleConfig):
        name = "cosine_with_min_lr"
        options = {"min_lr_rate": section.min_lr_ratio}
    else:
        name = {"constant": "constant_with_warmup", "linear": "linear"}[section.name]
    schedule: Any = get_scheduler(name, optimizer, warmup, total_steps, scheduler_specific_kwargs=options)
    schedule.last_epoch = step
    for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(step)
    return schedule
