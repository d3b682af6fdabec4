"""What a checkpoint holds: the model's tensors, the optimizer's, and the `Progress` of the run.

On disk the tensors' keys are ``model.<name>`` and ``optimizer.state.<name>.<field>``, with Hugging Face names, so that
plain `torch.distributed.checkpoint` can read them. Everything that is not a tensor is JSON, in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2kit.parallel.float8 import plain_shard


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by Hugging Face name, a tied parameter once, under its first name.

    The tensors are detached and share the model's storage: loading into them loads the model. Sharded parameters are
    DTensors of the global shape, plain ones also where they are gathered in float8.
    """
    # A forward under no_grad may leave units unsharded, and their parameters would then be plain tensors.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = {name: plain_shard(parameter.detach()) for name, parameter in model.named_parameters()}
    tensors.update((name, buffer.detach()) for name, buffer in _persistent_buffers(model).items())
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by key ``state.<parameter name>.<field>``, e.g. ``state.lm_head.weight.exp_avg``.

    A quantised moment is two tensors, e.g. ``….exp_avg.codes`` and ``….exp_avg.scale``.
    State that does not exist yet is made first (`initialise_state`). The tensors share the optimizer's storage.
    Hyper-parameters are left out: on resume they come from the config.
    """
    initialise_state(optimizer)
    if not optimizer.state:  # every parameter is frozen
        return {}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    state = {key: value for key, value in flat.items() if key.startswith("state.") and isinstance(value, Tensor)}
    return {name: part for key, value in state.items() for name, part in _plain_parts(key, value)}


def _plain_parts(key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that ``value`` is made of, by key; they share its storage.

    torchao's 8-bit moments hold codes and a scale a block. Blocks stay within rows (`fsdp2kit.train.adamw_8bit`), so
    both have the rows of the moment, are sharded as it is, and can be read back onto another mesh. A third tensor in
    them, what the codes stand for, is a constant.
    """
    local = value.to_local() if isinstance(value, DTensor) else value
    if not hasattr(local, "codes"):
        yield key, value
        return
    for name in ("codes", "scale"):
        part = getattr(local, name).view(*local.shape[:-1], -1)
        if isinstance(value, DTensor):
            shape = (*value.shape[:-1], part.shape[-1])
            stride = torch.empty(shape, device="meta").stride()
            part = DTensor.from_local(
                part, value.device_mesh, value.placements, run_check=False, shape=torch.Size(shape), stride=stride
            )
        yield f"{key}.{name}", part


def initialise_state(optimizer: Optimizer) -> None:
    """Give every trainable parameter without optimizer state the state of an optimizer that has not stepped.

    The optimizer makes it itself, in a step with zero gradients and learning rate 0, whose count is then taken back.
    Parameters, gradients, learning rates and existing state stay as they are. (torch's own initialisation leaves the
    step counts at 1, drops the gradients and does nothing when only some parameters have state.)
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fresh = {p for p in parameters if p.requires_grad and p not in optimizer.state}
    if not fresh:
        return
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter in fresh else None
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for parameter in fresh:
        if "step" in optimizer.state[parameter]:  # not every optimizer counts
            optimizer.state[parameter]["step"].zero_()


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the persistent buffers, by name."""
    return {name: buffer.detach().clone() for name, buffer in _persistent_buffers(model).items()}


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the model's state, by name."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}
