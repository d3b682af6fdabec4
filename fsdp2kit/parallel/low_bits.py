"""Linear layers in fewer bits: matmuls in float8, by torchao (arXiv:2209.05433), and frozen weights in NF4 (QLoRA).

A float8 layer's parameters stay what they are, under their names, and so do gradients, optimizer and checkpoints. Its
input, its weight and the gradient of its output are cast to 8 bits as they are used, with scales taken from their own
values: one a tensor (tensorwise), or one a row (rowwise). How weights are stored in 4 bits is in `model.nf4`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp2kit.config.schema import FSDPConfig, TrainingConfig
from fsdp2kit.errors import UserError, importing, nearest
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.grouped_experts import NF4Experts
from fsdp2kit.model.inspect import Traits
from fsdp2kit.model.nf4 import BLOCK, BLOCK_BYTES, NF4Layout, NF4Linear
from fsdp2kit.parallel.fsdp import layers_by_dtype
from fsdp2kit.torch_compat import SHARDS_INTEGERS
from fsdp2kit.weights.adapters import base_name
from fsdp2kit.weights.experts import are_experts, expert_weights, unlike_experts
from fsdp2kit.weights.record import find_ties

_MULTIPLE = 16
"""Float8 kernels want inner and outer dimensions divisible by this."""


@dataclass(frozen=True)
class LayerChoice:
    """Which linear layers of the decoder layers are in fewer bits."""

    names: tuple[str, ...]
    """Names of these layers."""
    share: float
    """Their weights' share of all parameters of the model."""
    left_out: dict[str, tuple[str, ...]]
    """Names of the other layers, by reason."""

    def describe_left_out(self) -> str:
        """How many layers were left out by reason, with an example of each."""
        words = (f"{len(names)} {reason} ({names[0]}, …)" for reason, names in self.left_out.items())
        return ", ".join(words) or "none"


@dataclass(frozen=True)
class Float8Plan(LayerChoice):
    """Layers that compute in float8, and how."""

    recipe: str
    """torchao's name of the recipe."""
    emulated: bool
    """Whether values are rounded to float8 and multiplied in float32."""
    compiled: bool
    """Whether torch.compile fuses the casts into neighbouring operations."""

    def describe(self) -> list[str]:
        """Lines for the start: how many layers, which are left out and why, and what to expect on this device."""
        lines = [
            f"float8: {self.recipe}, {len(self.names)} linear layers of the decoder layers "
            f"({self.share:.0%} of all parameters); left out: {self.describe_left_out()}"
        ]
        if self.recipe != "rowwise_with_gw_hp":
            lines.append(
                "float8: scales are taken from a rank's micro-batch, so results depend, within float8's rounding, on "
                'mesh and micro_batch_size ("rowwise_with_gw_hp" is free of that)'
            )
        if self.emulated:
            lines.append("float8: emulated, slower than bfloat16: for checking numerics")
        elif not self.compiled:
            lines.append("WARNING: float8 without compile.enabled = true is slower than bfloat16: casts take the time")
        return lines


@dataclass(frozen=True)
class NF4Plan(LayerChoice):
    """Layers whose frozen weights are stored in 4 bits."""

    dtype: str
    """The dtype in which they compute."""
    experts: tuple[str, ...]
    """Names of the modules of experts that are stored so, too."""

    def layouts(self, model: nn.Module) -> dict[nn.Parameter, NF4Layout]:
        """How each weight of a model that is not quantised yet will be stored."""
        weights = [model.get_submodule(name).get_parameter("weight") for name in self.names]
        for experts in map(model.get_submodule, self.experts):
            weights += map(experts.get_parameter, expert_weights(experts))
        return {weight: NF4Layout.of(weight) for weight in weights}

    def __str__(self) -> str:
        what = f"nf4: {len(self.names)} linear layers of the decoder layers"
        what += f" and the experts of {len(self.experts)} of these" if self.experts else ""
        what += f" ({self.share:.0%} of all parameters)"
        bits = 8 * BLOCK_BYTES / BLOCK
        return f"{what} are stored in {bits} bits a parameter; left out: {self.describe_left_out()}"


def plan_float8(
    config: TrainingConfig, model: PreTrainedModel, *, traits: Traits, device: torch.device | None
) -> Float8Plan | None:
    """Choose the layers: those inside decoder layers (so never embeddings or the output head), except routers of a
    mixture of experts and those that float8 kernels or the config rule out. None: float8 is off.

    Args:
        device: where it will train; None: not known here.
    """
    section = config.float8
    if section.recipe == "none":
        return None
    inside = _inside_layers(model)
    linear = _linear(inside)
    _check_patterns(section.exclude, linear)

    def reasons(name: str, layer: nn.Linear) -> dict[str, bool]:
        return {
            "by float8.exclude": any(fnmatchcase(name, pattern) for pattern in section.exclude),
            "routed experts, whose tokens vary in number": "experts" in name.split("."),
            f"with a side not divisible by {_MULTIPLE}": any(side % _MULTIPLE for side in layer.weight.shape),
        }

    choice = _choose_layers(linear, config.fsdp, model, traits=traits, reasons=reasons)
    if fused := _fused_experts(inside):
        choice.left_out["that are experts in one tensor"] = fused
    if not choice.names:
        what = f"no linear layer of {type(model).__name__} can be in float8 ({choice.describe_left_out()})"
        raise UserError("float8.recipe", what, 'set it to "none"')
    emulated = section.emulate or (device is not None and device.type == "cpu")
    if device is not None and not emulated:
        _check_device(config, device)
    return Float8Plan(**vars(choice), recipe=section.recipe, emulated=emulated, compiled=config.compile.enabled)


def plan_nf4(config: TrainingConfig, model: PreTrainedModel, *, traits: Traits) -> NF4Plan | None:
    """Choose the layers: the frozen linear ones inside decoder layers. None: ``lora.quantize`` asks for none."""
    if config.lora.quantize != "nf4":
        return None
    kind = type(model).__name__
    key = "lora.quantize"
    todo = "leave it out"
    if not SHARDS_INTEGERS:
        what = f"'nf4', but FSDP2 of torch {torch.__version__} shards no integers"
        raise UserError(key, what, "install torch 2.12 or newer, or leave it out")
    inside = _inside_layers(model)
    experts = _frozen_experts(inside)
    if fused := sorted(set(_fused_experts(inside)) - experts.keys()):
        what = (
            f"'nf4', but {kind} has several matrices in one tensor ({fused[0]}, …), and computes them in its own way"
        )
        raise UserError(key, what, todo)
    if experts and config.compile.enabled:
        raise UserError(
            "compile.enabled", "true with experts in 4 bits, which torch.compile cannot trace", "set it to false"
        )
    linear = {name: layer for name, layer in _linear(inside).items() if not layer.weight.requires_grad}

    def reasons(name: str, layer: nn.Linear) -> dict[str, bool]:
        return {"of which a copy is trained": ".original_module" in f".{name}"}

    choice = _choose_layers(linear, config.fsdp, model, traits=traits, reasons=reasons)
    if not choice.names:
        what = f"'nf4', but no linear layer of {kind} can be in 4 bits ({choice.describe_left_out()})"
        raise UserError(key, what, todo)
    weights = sum(module.get_parameter(name).numel() for module in experts.values() for name in expert_weights(module))
    share = choice.share + weights / sum(p.numel() for p in model.parameters())
    return NF4Plan(choice.names, share, choice.left_out, dtype=config.fsdp.param_dtype, experts=tuple(experts))


def _frozen_experts(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Experts that have two weights and their biases alone, all frozen, and no copy that is trained."""
    return {
        name: module
        for name, module in modules.items()
        if are_experts(module)
        and ".original_module" not in f".{name}"
        and not unlike_experts(module)
        and not any(parameter.requires_grad for parameter in module.parameters())
    }


def apply_float8(plan: Float8Plan, model: PreTrainedModel) -> None:
    """Replace the planned layers by torchao's in the model, with the same parameters under the same names."""
    with importing("torchao", where="float8.recipe"):
        from torchao import float8  # pyright: ignore[reportMissingImports]
    recipe = replace(float8.Float8LinearConfig.from_recipe_name(plan.recipe), emulate=plan.emulated)
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in plan.names, config=recipe)


def apply_nf4(plan: NF4Plan, model: PreTrainedModel) -> None:
    """Replace the planned layers and experts of a meta model, in place; names that it lacks are passed over."""
    there: dict[str, Any] = dict(model.named_modules())
    dtype = getattr(torch, plan.dtype)
    made = {name: NF4Linear(there[name], dtype) for name in plan.names if name in there}
    made |= {name: NF4Experts(there[name]) for name in plan.experts if name in there}
    for name, module in made.items():
        owner, _, attribute = name.rpartition(".")
        setattr(there[owner], attribute, module)


def _inside_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules inside decoder layers by name, so never embeddings or the output head."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {name: module for name, module in model.named_modules() if id(module) in inside}


def _linear(modules: Mapping[str, nn.Module]) -> dict[str, nn.Linear]:
    return {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}


def _fused_experts(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Names of the modules that hold several matrices in one tensor."""
    others = {name: module for name, module in modules.items() if not isinstance(module, (nn.Conv1d, nn.Conv2d))}
    return tuple(name for name, one in others.items() if any(p.ndim == 3 for p in one.parameters(recurse=False)))


def _choose_layers(
    linear: Mapping[str, nn.Linear],
    fsdp: FSDPConfig,
    model: PreTrainedModel,
    *,
    traits: Traits,
    reasons: Callable[[str, nn.Linear], Mapping[str, bool]],
) -> LayerChoice:
    """The layers whose matmuls or weights may be in fewer bits.

    Left out are routers of a mixture of experts, layers that are more than a matmul, layers whose weight another
    module reads, and those for which one of ``reasons`` holds.
    """
    tied = {name.removesuffix(".weight") for pair in find_ties(model).items() for name in pair}
    hf_config = model.config.get_text_config().to_dict()
    # The numbers of experts, under any name; none without experts.
    expert_counts = {value for key, value in hf_config.items() if "expert" in key and type(value) is int}
    by_class, by_model = layers_by_dtype(fsdp, model)
    chosen: list[str] = []
    left_out: dict[str, tuple[str, ...]] = {}
    for name, layer in linear.items():
        own_name = (base_name(f"{name}.weight") or "").removesuffix(".weight")
        held = {
            "routers": _is_router(own_name, layer, expert_counts),
            "of a class of their own": type(layer) is not nn.Linear,
            "in another dtype by fsdp.class_dtypes": name in by_class,
            "kept in float32 by the model": name in by_model,
            "whose parameters are used elsewhere": own_name in traits.uncalled_modules or name in tied,
            **reasons(name, layer),
        }
        reason = next((reason for reason, holds in held.items() if holds), None)
        if reason is None:
            chosen.append(name)
        else:
            left_out[reason] = (*left_out.get(reason, ()), name)
    weights = sum(linear[name].weight.numel() for name in chosen)
    return LayerChoice(tuple(chosen), weights / sum(p.numel() for p in model.parameters()), left_out)


def _check_device(config: TrainingConfig, device: Any) -> None:
    """Refuse what the device's kernels do not support."""
    if torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 9):
        what = f"{torch.cuda.get_device_name(device)} has no float8 matmuls (they begin with compute capability 8.9)"
        raise UserError("float8.recipe", what, "set it to 'none', or float8.emulate = true to check numerics, slowly")
    if config.fsdp.param_dtype != "bfloat16":
        what = f"{config.fsdp.param_dtype!r} with float8 matmuls, whose results are bfloat16"
        raise UserError("fsdp.param_dtype", what, "set it to 'bfloat16', or float8.emulate = true")
    tokens = config.train.micro_batch_size * config.data.seq_len // config.mesh.cp
    if config.float8.recipe != "rowwise_with_gw_hp" and tokens % _MULTIPLE:
        what = f"{tokens} tokens of a micro-batch on a rank are not divisible by {_MULTIPLE}, as float8 matmuls need"
        raise UserError("data.seq_len", what, f"use a multiple of {_MULTIPLE} × mesh.cp")


def _check_patterns(patterns: list[str], linear: Mapping[str, nn.Linear]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in linear):
            near = nearest(pattern, linear) or next(iter(linear), None)
            todo = f"their names are like {near}" if near else "leave it out"
            raise UserError("float8.exclude", f"{pattern!r} matches no linear layer of a decoder layer", todo)


def _is_router(name: str, module: nn.Linear, expert_counts: set[int]) -> bool:
    parts = name.split(".")
    named_so = "gate" in parts or any("router" in part for part in parts)
    return bool(expert_counts) and (named_so or module.out_features in expert_counts)
