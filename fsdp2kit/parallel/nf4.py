"""Which layers of a frozen model are stored in 4 bits beside adapters (QLoRA); how is in `fsdp2kit.model.nf4`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.inspect import Traits
from fsdp2kit.model.nf4 import BLOCK, BLOCK_BYTES, NF4Linear
from fsdp2kit.parallel.float8 import choose_layers, decoder_linears, fused_experts, listed
from fsdp2kit.torch_compat import SHARDS_INTEGERS


@dataclass(frozen=True)
class NF4Plan:
    """Which linear layers of the decoder layers have their weights in 4 bits."""

    names: tuple[str, ...]
    """Names of the layers."""
    share: float
    """Their weights' share of all parameters of the model."""
    left_out: Mapping[str, tuple[str, ...]]
    """Names of the other frozen layers, by reason."""
    dtype: str
    """In which they compute."""

    def __str__(self) -> str:
        what = f"nf4: {len(self.names)} linear layers of the decoder layers ({self.share:.0%} of all parameters)"
        bits = 8 * BLOCK_BYTES / BLOCK
        return f"{what} are stored in {bits} bits a parameter; left out: {listed(self.left_out) or 'none'}"


def plan_nf4(config: TrainingConfig, model: PreTrainedModel, *, traits: Traits) -> NF4Plan | None:
    """Choose the layers: the frozen linear ones inside decoder layers. None: ``lora.quantize`` asks for none.

    Args:
        model: with its adapters, before it is sharded; it may be on meta.

    Raises:
        UserError: torch is too old, the model keeps its experts in one tensor, or no layer is left.
    """
    if config.lora.quantize != "nf4":
        return None
    kind, key, todo = type(model).__name__, "lora.quantize", "leave it out"
    if not SHARDS_INTEGERS:
        what = f"'nf4', but FSDP2 of torch {torch.__version__} shards no integers"
        raise UserError(key, what, "install torch 2.12 or newer, or leave it out")
    if fused := fused_experts(model):
        what = f"'nf4', but {kind} has experts in one tensor ({fused[0]}, …), which cannot be in 4 bits"
        raise UserError(key, what, todo)
    linear = {name: layer for name, layer in decoder_linears(model).items() if not layer.weight.requires_grad}

    def reasons(name: str, layer: nn.Linear) -> dict[str, bool]:
        return {"of which a copy is trained": ".original_module" in f".{name}"}

    chosen, left_out = choose_layers(linear, config.fsdp, model, traits=traits, reasons=reasons)
    if not chosen:
        what = f"'nf4', but no linear layer of {kind} can be in 4 bits ({listed(left_out) or 'none'})"
        raise UserError(key, what, todo)
    weights = sum(linear[name].weight.numel() for name in chosen)
    share = weights / sum(parameter.numel() for parameter in model.parameters())
    return NF4Plan(names=chosen, share=share, left_out=left_out, dtype=config.fsdp.param_dtype)


def apply_nf4(plan: NF4Plan, model: PreTrainedModel) -> None:
    """Replace the planned layers, in place.

    Args:
        model: on meta, before it is sharded.
    """
    for name in plan.names:
        owner, _, attribute = name.rpartition(".")
        layer = NF4Linear(model.get_submodule(name), getattr(torch, plan.dtype))  # pyright: ignore[reportArgumentType]
        setattr(model.get_submodule(owner), attribute, layer)
