"""Combinations that would train something else than the user believes: refused before the first step.

Each refusal says what would go wrong and what to do. Those whose effect some users want anyway have a name that
``preflight.allow`` takes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model, load_hf_config
from fsdp2kit.model.probe import probe
from fsdp2kit.parallel.context_parallel.batch import layer_kinds

_KNOWN_KINDS = {"full_attention", "sliding_attention"}


def check_model(model: PreTrainedModel, config: TrainingConfig, *, pack: bool) -> None:
    """Refuse what would silently change the mathematics of ``model`` under ``config``.

    Args:
        model: on meta, before it is made parallel.
        pack: whether rows hold several documents.

    Raises:
        UserError: naming the refusal, and how to waive it where that is possible.
    """
    hf_config = model.config.get_text_config()
    _check_dropout(model, hf_config, config.preflight.allow)
    _check_router(hf_config, config.preflight.allow)
    found = probe(model)
    if found is not None and not found["causal"]:
        raise UserError(
            f"model {type(model).__name__}",
            "its tokens see later tokens, so next-token prediction would learn to copy",
            "use a causal language model",
        )
    if pack and found is not None and not found["separates_packed"]:
        raise UserError(
            "data.pack",
            f"packed documents would see each other in {type(model).__name__} (tried on a small copy of it)",
            "set data.pack = false",
        )
    if pack:
        # Asked of the kinds as well: a twin's small weights can hide what a convolution carries over.
        _check_kinds(hf_config, "data.pack", "packed documents would see each other through", "set data.pack = false")
    if pack and found is None:
        raise UserError(
            "data.pack",
            f"no small copy of {type(model).__name__} could be tried, so packed documents might see each other",
            "set data.pack = false",
        )
    if config.mesh.cp > 1:
        _check_context_parallel(model, hf_config, cp=config.mesh.cp)


def check_offline(config: TrainingConfig) -> list[str]:
    """All that can be said of a config's model on this machine, without a network.

    Returns:
        What could not be checked because it is not on this machine: "model".

    Raises:
        UserError: as `build_model` and `check_model` do.
    """
    unchecked = []
    try:
        hf_config = load_hf_config(config.model, local_files_only=True)
    except UserError:
        if config.model.path is None or Path(config.model.path).is_absolute():
            raise
        unchecked.append("model")
    else:
        check_model(build_model(config.model, hf_config=hf_config), config, pack=config.data.pack)
    return unchecked


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
    unknown = set(layer_kinds(config)) - _KNOWN_KINDS
    if unknown:
        raise UserError(where, f"{harm} layers of kind {', '.join(sorted(unknown))}", todo)


def _check_context_parallel(model: PreTrainedModel, config: PretrainedConfig, *, cp: int) -> None:
    where = "mesh.cp"
    _check_kinds(config, where, f"{cp} would cut the sequence for", "set mesh.cp = 1")
    if any(isinstance(getattr(module, "sinks", None), nn.Parameter) for module in model.modules()):
        raise UserError(where, f"{cp} with attention sinks, which belong to all heads at once", "set mesh.cp = 1")
    if not getattr(config, "is_causal", True):
        raise UserError(where, f"{cp} with bidirectional attention", "set mesh.cp = 1")
    heads = config.num_attention_heads
    if cp > heads:
        raise UserError(where, f"{cp} is more than the model's {heads} attention heads", f"use at most {heads}")
    if not model._can_set_attn_implementation():
        raise UserError(
            where,
            f"{cp}, but {type(model).__name__} does not go through transformers' attention interface",
            "set mesh.cp = 1",
        )
