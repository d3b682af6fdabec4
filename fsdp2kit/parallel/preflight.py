"""Combinations that would train something else than the user believes: refused before the first step.

Each refusal says what would go wrong and what to do. Those whose effect some users want anyway have a name that
``preflight.allow`` takes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp2kit.config.schema import ActivationCheckpointingConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model, decoder_layers, load_hf_config
from fsdp2kit.model.choose_loss import choose_loss
from fsdp2kit.model.liger import check_liger_model
from fsdp2kit.model.limits import check_attention, check_positions, check_rope
from fsdp2kit.model.probe import probe
from fsdp2kit.model.twin import build_twin
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.context_parallel.choose import choose_path
from fsdp2kit.parallel.context_parallel.masks import unknown_kinds
from fsdp2kit.parallel.context_parallel.path import VARLEN, AttentionPath
from fsdp2kit.parallel.context_parallel.trial import find_difference
from fsdp2kit.parallel.float8 import check_float8
from fsdp2kit.parallel.units import plan_units


def check_model(
    model: PreTrainedModel, config: TrainingConfig, *, path: AttentionPath, device: torch.device | None = None
) -> None:
    """Refuse what would silently change the mathematics of ``model`` under ``config``.

    Args:
        model: on meta, before it is made parallel.
        path: the way its attention goes (`choose_path`).
        device: where it will train; None: not known here.

    Raises:
        UserError: naming the refusal, and how to waive it where that is possible.
    """
    hf_config = model.config.get_text_config()
    plan_units(config.fsdp, model)
    check_float8(config, model, device=device)
    _check_dropout(model, hf_config, config.preflight.allow)
    _check_router(hf_config, config.preflight.allow)
    check_rope(model.config, seq_len=config.data.seq_len)
    check_positions(model, seq_len=config.data.seq_len)
    if config.activation_checkpointing.mode == "selective":
        _check_selective(model, config.activation_checkpointing)
    if device is not None:
        check_attention(config.model.attention, device=device)
        check_liger_model(config.model, model, device=device)
    found = probe(model)
    if found is not None and not found["causal"]:
        raise UserError(
            f"model {type(model).__name__}",
            "its tokens see later tokens, so next-token prediction would learn to copy",
            "use a causal language model",
        )
    if config.data.pack:
        _check_packing(model, hf_config, found)
    if path.method or path.kernel == VARLEN:
        _check_attention(model, hf_config, path, cp=config.mesh.cp, pack=config.data.pack)


def check_offline(config: TrainingConfig) -> list[str]:
    """All that can be said of a config's model on this machine, without a network.

    Returns:
        What could not be checked because it is not on this machine: "model".

    Raises:
        UserError: as `build_model`, `choose_loss` and `check_model` do.
    """
    unchecked = []
    try:
        hf_config = load_hf_config(config.model, local_files_only=True)
    except UserError:
        if config.model.path is None or Path(config.model.path).is_absolute():
            raise
        unchecked.append("model")
    else:
        model = build_model(config.model, hf_config=hf_config)
        choose_loss(config, model, device=None)
        check_model(model, config, path=choose_path(config, model, cp=config.mesh.cp, device_type="cpu"))
    return unchecked


def _check_selective(model: PreTrainedModel, section: ActivationCheckpointingConfig) -> None:
    """Refuse to keep results that the model changes in place afterwards; tried on a tiny twin, where there is one."""
    twin = build_twin(model)
    if twin is None:
        return
    apply_activation_checkpointing(section, decoder_layers(twin), device_type="cpu")
    try:
        twin(input_ids=torch.arange(2, 14)[None], use_cache=False).logits.sum().backward()
    except RuntimeError as error:
        if "mutated" in str(error):
            what = f"{type(model).__name__} changes results in place that would be kept for backward"
            todo = 'set activation_checkpointing.mode = "full"'
            raise UserError("activation_checkpointing.mode 'selective'", what, todo) from None


def _check_dropout(model: PreTrainedModel, config: PretrainedConfig, allow: Collection[str]) -> None:
    if "dropout" in allow or not any(_drops(module) for module in model.modules()):
        return
    # Configs also name dropouts of heads that this model does not have, so the modules decide and the config advises.
    keys = [
        key for key, value in config.to_dict().items() if _is_noise(key) and isinstance(value, float) and value > 0
    ]
    raise UserError(
        "model.config",
        f"has dropout ({', '.join(keys)}), which draws other masks on another mesh, so results would depend on it",
        f'set {" and ".join(f"model.config.{key} = 0.0" for key in keys)}, or preflight.allow = ["dropout"]',
    )


def _is_noise(name: str) -> bool:
    return "drop" in name or "jitter" in name


def _drops(module: nn.Module) -> bool:
    """Whether a module drops values in training: a dropout layer, or a rate that its forward hands to a function."""
    if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)):
        return module.p > 0
    return any(_is_noise(name) and isinstance(value, float) and value > 0 for name, value in vars(module).items())


def _check_router(config: PretrainedConfig, allow: Collection[str]) -> None:
    if "router_aux_loss" in allow or not getattr(config, "output_router_logits", False):
        return
    raise UserError(
        "model.config.output_router_logits",
        "is true: the router's auxiliary loss depends on the mesh, and is not part of the loss here",
        'set model.config.output_router_logits = false, or preflight.allow = ["router_aux_loss"] to train without it',
    )


def _check_kinds(config: PretrainedConfig, where: str, harm: str, todo: str) -> None:
    """Refuse layers that are not plain attention: they carry state along the sequence, or see it in chunks."""
    if unknown := unknown_kinds(config):
        raise UserError(where, f"{harm} layers of kind {', '.join(sorted(unknown))}", todo)


def _check_packing(model: PreTrainedModel, config: PretrainedConfig, found: dict[str, bool] | None) -> None:
    name, todo = type(model).__name__, "set data.pack = false"
    if found is None:
        what = f"no small copy of {name} could be tried, so packed documents might see each other"
        raise UserError("data.pack", what, todo)
    if not found["separates_packed"]:
        raise UserError(
            "data.pack", f"packed documents would see each other in {name} (tried on a small copy of it)", todo
        )
    # Asked of the kinds as well: a convolution's small weights might hide what it carries over.
    _check_kinds(config, "data.pack", "packed documents would see each other through", todo)


def _check_attention(
    model: PreTrainedModel, config: PretrainedConfig, path: AttentionPath, *, cp: int, pack: bool
) -> None:
    """Refuse attention of ours for a model that needs its own."""
    if path.method:
        where, todo = f"context_parallel.method {path.method!r}", "set mesh.cp = 1"
        _check_kinds(config, where, "the sequence would be cut for", todo)
    else:
        where, todo = "model.attention", 'set model.attention = "eager"'
    if any(isinstance(getattr(module, "sinks", None), nn.Parameter) for module in model.modules()):
        raise UserError(where, "attention sinks belong to all heads and all keys at once", todo)
    if path.kernel == VARLEN and getattr(config, "attention_dropout", 0.0):
        raise UserError(where, "it has no attention dropout", "set model.config.attention_dropout = 0.0")
    twin = build_twin(model)
    if twin is None:
        what = f"no small copy of {type(model).__name__} could be tried"
    else:
        what = find_difference(twin, path, cp=cp, pack=pack)
    if what:
        raise UserError(where, f"{type(model).__name__}: {what}", _what_works(model, path, cp=cp, pack=pack) or todo)


def _what_works(model: PreTrainedModel, path: AttentionPath, *, cp: int, pack: bool) -> str | None:
    """Another method that this model can do."""
    if path.method is None:
        return None
    others = [AttentionPath("allgather", VARLEN)]
    if cp <= model.config.get_text_config().num_attention_heads:
        own = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        others.insert(0, AttentionPath("ulysses", own))
    for other in others:
        twin = build_twin(model)
        if other.method != path.method and twin and find_difference(twin, other, cp=cp, pack=pack) is None:
            kernel = ' with model.attention = "eager"' if other.kernel == "eager" else ""
            return f"set context_parallel.method = {other.method!r}{kernel}"
    return None
