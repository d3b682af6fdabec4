"""AdamW with moments of 8 bits, by torchao: arXiv:2110.02861.

A moment is kept as codes into a table of 256 values, and one float32 scale a block of neighbouring elements.
torchao forms blocks of each rank's shard, so that what is quantised, and how, would depend on the mesh; here a block
never leaves a row of the whole tensor. Any mesh then holds the same numbers, and checkpoints fit all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2kit.config.schema import OptimizerConfig
from fsdp2kit.errors import UserError
from fsdp2kit.train.moments import block_size

_LARGEST_BLOCK = 256  # torchao's own


def build_adamw_8bit(section: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """torchao's ``AdamW8bit`` over ``groups``, with all its state in place.

    Raises:
        UserError: torchao is not installed.
    """
    optimizer_class, state_class = _torchao_classes()
    optimizer: Optimizer = optimizer_class(list(groups), lr=section.lr, betas=section.betas, eps=section.eps)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            block = _block_size(parameter)
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": _zeros(state_class, parameter, signed=True, block=block),
                "exp_avg_sq": _zeros(state_class, parameter, signed=False, block=block),
            }
    if all(parameter.device.type == "cpu" for parameter in optimizer.state):
        _step_eagerly(optimizer)
    return optimizer


def _block_size(parameter: Tensor) -> int | None:
    """`block_size`, and none for a tensor of which a rank has no row: torchao cannot keep an empty shard."""
    return None if _has_empty(parameter) else block_size(parameter, largest=_LARGEST_BLOCK)


def _has_empty(parameter: Tensor) -> bool:
    """Whether a rank's shard is empty; the same answer on every rank."""
    if not isinstance(parameter, DTensor):
        return False
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            rows, shards = parameter.shape[placement.dim], parameter.device_mesh.size(dim)
            if -(-rows // shards) * (shards - 1) >= rows:
                return True
    return False


def _zeros(state_class: Any, parameter: Tensor, *, signed: bool, block: int | None) -> Tensor:
    """A moment before the first step, laid out as its parameter is."""
    if block is None:
        return torch.zeros_like(parameter, requires_grad=False)
    shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    zeros = state_class.zeros(shard.shape, signed, block, shard.device, dtype=shard.dtype)
    if not isinstance(parameter, DTensor):
        return zeros
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _step_eagerly(optimizer: Optimizer) -> None:
    """Keep torchao's step from being compiled: on a CPU that takes a C++ compiler and many seconds a shape."""
    compiled_step = optimizer.step

    def step(_optimizer: Optimizer, closure: None = None) -> None:
        with torch.compiler.set_stance("force_eager"):
            compiled_step()

    optimizer.step = MethodType(step, optimizer)


def _torchao_classes() -> tuple[Any, Any]:
    """The optimizer and the tensor that its moments are."""
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
        from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        what = f"'adamw_8bit' is torchao's, which cannot be imported ({error})"
        raise UserError("optimizer.name", what, "install it: pip install 'fsdp2kit[lowbit]'") from None
    return AdamW8bit, OptimState8bit
