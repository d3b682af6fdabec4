"""Refuses, before the first step, combinations that would train something else than the config says.

Each refusal says what would go wrong and what to do. Those that a user may accept have a name for ``preflight.allow``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp2kit.config.schema import ActivationCheckpointingConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.inspect import Traits, check_attention, check_positions, check_rope
from fsdp2kit.model.liger import check_liger_model
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.context_parallel.batch import unknown_kinds
from fsdp2kit.parallel.context_parallel.choose import try_path
from fsdp2kit.parallel.context_parallel.layout import VARLEN, AttentionPath


def check_model(
    model: PreTrainedModel,
    config: TrainingConfig,
    *,
    traits: Traits,
    attention: AttentionPath,
    cp: int,
    device: torch.device | None,
) -> None:
    """Refuse what would silently change the mathematics of ``model`` under ``config``.

    Args:
        model: on meta, before it is made parallel.
        traits: `inspect_model`'s.
        attention: the path that its attention takes.
        device: where it will train; None: not known.

    Raises:
        UserError: naming the refusal, and how to waive it if that is possible.
    """
    hf_config = model.config.get_text_config()
    _check_dropout(model, hf_config, config.preflight.allow)
    _check_router(hf_config, config.preflight.allow)
    check_rope(model.config, seq_len=config.data.seq_len)
    check_positions(model, traits, seq_len=config.data.seq_len)
    if config.activation_checkpointing.mode == "selective":
        _check_selective(traits.twin(), config.activation_checkpointing, name=type(model).__name__)
    if device is not None:
        check_attention(config.model.attention, device=device)
        check_liger_model(config.model, model, device=device)
    if traits.causal is False:
        raise UserError(
            f"model {type(model).__name__}",
            "its tokens see later tokens, so next-token prediction would learn to copy",
            "use a causal language model",
        )
    if config.data.pack:
        _check_packing(hf_config, traits, name=type(model).__name__)
    if attention.method or attention.kernel == VARLEN:
        _check_attention(model, hf_config, traits, attention, cp=cp, pack=config.data.pack)


def _check_selective(twin: Any, section: ActivationCheckpointingConfig, *, name: str) -> None:
    """Refuse to keep results that the model later changes in place; tried on a tiny copy, if one can be made."""
    if twin is None:
        return
    apply_activation_checkpointing(section, decoder_layers(twin), device_type="cpu")
    try:
        twin(input_ids=torch.arange(2, 14)[None], use_cache=False).logits.sum().backward()
    except RuntimeError as error:
        if "mutated" in str(error):
            what = f"{name} changes results in place that would be kept for backward"
            todo = 'set activation_checkpointing.mode = "full"'
            raise UserError("activation_checkpointing.mode 'selective'", what, todo) from None


def _check_dropout(model: PreTrainedModel, config: PretrainedConfig, allow: Collection[str]) -> None:
    if "dropout" in allow or not any(_drops(module) for module in model.modules()):
        return
    # Configs also name dropouts of heads that this model lacks: the modules decide, the config gives the names.
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
    """Refuse layers other than plain attention, which carry state along the sequence or see it in chunks."""
    if unknown := unknown_kinds(config):
        raise UserError(where, f"{harm} layers of kind {', '.join(sorted(unknown))}", todo)


def _check_packing(config: PretrainedConfig, traits: Traits, *, name: str) -> None:
    todo = "set data.pack = false"
    if traits.separates_packed is None:
        what = f"no small copy of {name} could be tried, so packed documents might see each other"
        raise UserError("data.pack", what, todo)
    if not traits.separates_packed:
        what = f"packed documents would see each other in {name} (tried on a small copy of it)"
        raise UserError("data.pack", what, todo)
    # The kinds are checked too: in the trial a convolution's small weights might hide what it carries over.
    _check_kinds(config, "data.pack", "packed documents would see each other through", todo)


def _check_attention(
    model: PreTrainedModel, config: PretrainedConfig, traits: Traits, path: AttentionPath, *, cp: int, pack: bool
) -> None:
    """Refuse our attention for a model that needs its own."""
    if path.method:
        where, todo = f"context_parallel.method {path.method!r}", "set mesh.cp = 1"
        _check_kinds(config, where, "the sequence would be cut for", todo)
    else:
        where, todo = "model.attention", 'set model.attention = "eager"'
    if any(isinstance(getattr(module, "sinks", None), nn.Parameter) for module in model.modules()):
        raise UserError(where, "attention sinks belong to all heads and all keys at once", todo)
    if path.kernel == VARLEN and getattr(config, "attention_dropout", 0.0):
        raise UserError(where, "it has no attention dropout", "set model.config.attention_dropout = 0.0")
    if what := try_path(traits, path, cp=cp, pack=pack):
        raise UserError(where, f"{type(model).__name__}: {what}", _what_works(model, traits, path, cp, pack) or todo)


def _what_works(model: PreTrainedModel, traits: Traits, path: AttentionPath, cp: int, pack: bool) -> str | None:
    """Another method that works for this model."""
    if path.method is None:
        return None
    others = [AttentionPath("allgather", VARLEN)]
    if cp <= model.config.get_text_config().num_attention_heads:
        own = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        others.insert(0, AttentionPath("ulysses", own))
    for other in others:
        if other.method != path.method and try_path(traits, other, cp=cp, pack=pack) is None:
            kernel = ' with model.attention = "eager"' if other.kernel == "eager" else ""
            return f"set context_parallel.method = {other.method!r}{kernel}"
    return None
