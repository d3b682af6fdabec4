"""Linear maps whose products are computed in float8, by torchao (arXiv:2209.05433): which, and how.

A map's parameters stay what they are, under their names, and so do gradients, optimizer and checkpoints. Its input,
its weight and the gradient of its output are cast to 8 bits as they are used, with scales taken from their own values:
one a tensor (tensorwise), or one a row (rowwise).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from fsdp2kit.config.schema import Float8Config, FSDPConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import decoder_layers, tied_names
from fsdp2kit.model.probe import uncalled_modules
from fsdp2kit.parallel.units import ignored_modules

_MULTIPLE = 16
"""Float8 kernels want inner and outer dimensions divisible by this."""


@dataclass(frozen=True)
class Float8Plan:
    """What becomes of the linear maps in the decoder layers."""

    maps: dict[str, nn.Linear]
    """Those in float8, by name."""
    left_out: dict[str, list[str]]
    """Names of the others, by the reason."""


def plan_float8(section: Float8Config, model: PreTrainedModel, *, fsdp: FSDPConfig) -> Float8Plan:
    """Choose the maps: those inside decoder layers (so never embeddings or the output head), but for routers of a
    mixture of experts and what float8 kernels, or the config, leave no choice about.

    Args:
        model: before it is sharded; it may be on meta.

    Raises:
        UserError: a pattern of ``exclude`` without a match, or no map is left.
    """
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    linear: Mapping[str, nn.Linear] = {
        name: m for name, m in modules.items() if isinstance(m, nn.Linear) and id(m) in inside
    }
    _check_patterns(section.exclude, linear)
    uncalled = uncalled_modules(model)
    tied = {name.removesuffix(".weight") for pair in tied_names(model).items() for name in pair}
    routed = _expert_counts(model.config.get_text_config())
    maps: dict[str, nn.Linear] = {}
    left_out: dict[str, list[str]] = {}
    for name, module in linear.items():
        reasons = {
            "by float8.exclude": any(fnmatchcase(name, pattern) for pattern in section.exclude),
            "routers": _is_router(name, module, routed),
            "routed experts, whose tokens vary in number": "experts" in name.split("."),
            "of a class of their own": type(module) is not nn.Linear,
            f"with a side not divisible by {_MULTIPLE}": any(side % _MULTIPLE for side in module.weight.shape),
            "in another dtype by fsdp.class_dtypes": _has_own_dtype(name, modules, fsdp),
            "whose parameters are used elsewhere": name in uncalled or name in tied,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is None:
            maps[name] = module
        else:
            left_out.setdefault(reason, []).append(name)
    fused = [name for name, module in modules.items() if id(module) in inside and _has_fused_weights(module)]
    if fused:
        left_out["that are experts in one tensor"] = fused
    if not maps:
        what = f"no linear map of {type(model).__name__}'s layers can be in float8 ({_listed(left_out) or 'none'})"
        raise UserError("float8.recipe", what, 'set it to "none"')
    return Float8Plan(maps, left_out)


def check_float8(config: TrainingConfig, model: PreTrainedModel, *, device: torch.device | None) -> None:
    """Refuse what torchao or the device cannot do.

    Args:
        device: where it will train; None: not known here.

    Raises:
        UserError: naming the key.
    """
    section = config.float8
    if section.recipe == "none":
        return
    plan_float8(section, model, fsdp=config.fsdp)
    if device is None or is_emulated(section, device):
        return
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        what = f"{torch.cuda.get_device_name(device)} has no float8 products (they begin with compute capability 8.9)"
        raise UserError("float8.recipe", what, "set it to 'none', or float8.emulate = true to check numerics, slowly")
    if config.fsdp.param_dtype != "bfloat16":
        what = f"{config.fsdp.param_dtype!r} with float8 products, whose results are bfloat16"
        raise UserError("fsdp.param_dtype", what, "set it to 'bfloat16', or float8.emulate = true")
    tokens = config.train.micro_batch_size * config.data.seq_len // config.mesh.cp
    if section.recipe != "rowwise_with_gw_hp" and tokens % _MULTIPLE:
        what = f"{tokens} tokens of a micro-batch on a rank are not divisible by {_MULTIPLE}, as float8 products need"
        raise UserError("data.seq_len", what, f"use a multiple of {_MULTIPLE} × mesh.cp")


def describe_float8(config: TrainingConfig, model: PreTrainedModel, *, device: torch.device) -> list[str]:
    """What a user should see at the start: how many maps, which not and why, and what it means on this device.

    Args:
        model: before it is sharded.
    """
    section = config.float8
    if section.recipe == "none":
        return []
    plan = plan_float8(section, model, fsdp=config.fsdp)
    inside = sum(module.weight.numel() for module in plan.maps.values())
    total = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        f"float8: {section.recipe}, {len(plan.maps)} linear maps of the decoder layers "
        f"({inside / total:.0%} of all parameters); left out: {_listed(plan.left_out) or 'none'}"
    ]
    if section.recipe != "rowwise_with_gw_hp":
        lines.append(
            "float8: scales are taken from a rank's micro-batch, so results depend, within float8's rounding, on mesh "
            'and micro_batch_size ("rowwise_with_gw_hp" is free of that)'
        )
    if is_emulated(section, device):
        lines.append("float8: emulated, slower than bfloat16: for checking numerics")
    elif not config.compile.enabled:
        lines.append("WARNING: float8 without compile.enabled = true is slower than bfloat16: casts take the time")
    return lines


def is_emulated(section: Float8Config, device: torch.device) -> bool:
    """Whether values are rounded to float8 and multiplied in float32."""
    return section.emulate or device.type == "cpu"


def apply_float8(
    section: Float8Config, model: PreTrainedModel, *, fsdp: FSDPConfig, shards: int, device: torch.device
) -> None:
    """Replace the maps of `plan_float8` by torchao's, in place, with the same parameters under the same names.

    With ``all_gather``, weights whose rows divide evenly over the shards become tensors that FSDP gathers in float8;
    torchao cannot gather uneven ones (pytorch/ao#3982).

    Args:
        model: before it is sharded.
        shards: ranks that share a parameter.

    Raises:
        UserError: torchao is not installed, or as `plan_float8`.
    """
    if section.recipe == "none":
        return
    torchao = _torchao()
    maps = plan_float8(section, model, fsdp=fsdp).maps
    config = torchao.Float8LinearConfig.from_recipe_name(section.recipe)
    config = replace(config, emulate=is_emulated(section, device))
    gathered: set[str] = set()
    if section.all_gather:
        whole = {name for name, _ in ignored_modules(fsdp, model)}
        gathered = {name for name, module in maps.items() if module.out_features % shards == 0} - whole

    def convert(names: Collection[str], config: Any) -> None:
        torchao.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)

    convert(maps.keys() - gathered, config)
    if gathered:
        convert(gathered, replace(config, enable_fsdp_float8_all_gather=True))


def keep_scales(model: nn.Module, optimizer: Optimizer) -> None:
    """Compute the scales of weights that are gathered in float8 after every step of ``optimizer``.

    Without this FSDP computes each weight's in an all-reduce of its own whenever it gathers it; the values are the
    same. Does nothing where no weight is gathered in float8.
    """
    if _gathers_float8(model):
        optimizer.register_step_post_hook(lambda *_: refresh_scales(model))


def refresh_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in float8, in one all-reduce: for whoever writes values into
    the shards. Does nothing where no weight is gathered in float8. Collective.
    """
    if _gathers_float8(model):
        _torchao().precompute_float8_dynamic_scale_for_fsdp(model)


@torch.no_grad()
def plain_shard(tensor: Tensor) -> Tensor:
    """``tensor``, or where it is to be gathered in float8, its values as a plain DTensor that shares their storage.

    What is saved must not be torchao's class: a checkpoint belongs to runs without float8 as well.
    """
    if not isinstance(tensor, DTensor) or not hasattr(tensor.to_local(), "_precomputed_scale"):
        return tensor
    return DTensor.from_local(
        tensor.to_local()._tensor.detach(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _gathers_float8(model: nn.Module) -> bool:
    return any(plain_shard(parameter) is not parameter for parameter in model.parameters())


def _torchao() -> Any:
    """torchao's float8 training."""
    try:
        from torchao import float8  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        todo = "install it: pip install 'fsdp2kit[lowbit]'"
        raise UserError("float8.recipe", f"torchao cannot be imported ({error})", todo) from None
    return float8


def _check_patterns(patterns: list[str], linear: Mapping[str, nn.Linear]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in linear):
            near = difflib.get_close_matches(pattern, linear, n=1) or list(linear)[:1]
            todo = f"their names are like {near[0]}" if near else "leave it out"
            raise UserError("float8.exclude", f"{pattern!r} matches no linear map of a decoder layer", todo)


def _expert_counts(config: PretrainedConfig) -> set[int]:
    """Every number of experts that the config has, under whatever name; empty without experts."""
    counts = {key: value for key, value in config.to_dict().items() if "expert" in key}
    return {value for value in counts.values() if type(value) is int}


def _is_router(name: str, module: nn.Linear, expert_counts: set[int]) -> bool:
    parts = name.split(".")
    named_so = "gate" in parts or any("router" in part for part in parts)
    return bool(expert_counts) and (named_so or module.out_features in expert_counts)


def _has_own_dtype(name: str, modules: Mapping[str, nn.Module], fsdp: FSDPConfig) -> bool:
    """Whether the innermost module of ``class_dtypes`` around it computes in another dtype than the rest."""
    parts = name.split(".")
    around = (type(modules[".".join(parts[:size])]).__name__ for size in range(len(parts), -1, -1))
    dtype = next((fsdp.class_dtypes[kind] for kind in around if kind in fsdp.class_dtypes), fsdp.param_dtype)
    return dtype != fsdp.param_dtype


def _has_fused_weights(module: nn.Module) -> bool:
    is_convolution = isinstance(module, (nn.Conv1d, nn.Conv2d))
    return not is_convolution and any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def _listed(left_out: dict[str, list[str]]) -> str:
    return ", ".join(f"{len(names)} {reason} ({names[0]}, …)" for reason, names in left_out.items())
