"""What is refused before anything is built: each function refuses one thing, and says what to do instead.

A refusal is a `UserError` about a model and a config that would silently train something else than the config says, or
that was not tried together. `refuse_model` calls those that need no plan, in the order in which they are reported.
Those that a user may waive are in `WAIVERS` of `fsdp2kit.config.sections.preflight`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp2kit.config.facts import EngineNeeds, MeshSizes
from fsdp2kit.config.schema import ActivationCheckpointingConfig, TrainingConfig
from fsdp2kit.config.sections.preflight import key_to_allow
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.inspect import Traits, check_attention, check_positions, check_rope, check_temperature, value_of
from fsdp2kit.model.liger import check_liger
from fsdp2kit.model.tokenizer import check_same_tokens
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.context_parallel.batch import unknown_kinds
from fsdp2kit.parallel.context_parallel.choose import AttentionPath
from fsdp2kit.parallel.context_parallel.layout import VARLEN
from fsdp2kit.parallel.context_parallel.recurrent import find_recurrent
from fsdp2kit.parallel.context_parallel.recurrent_checks import try_recurrent
from fsdp2kit.parallel.expert_parallel.routing import check_balance
from fsdp2kit.parallel.tensor_parallel import check_tensor_parallel
from fsdp2kit.weights.adapters import Adapter
from fsdp2kit.weights.record import weights_of
from fsdp2kit.weights.whole import Whole


def refuse_model(
    model: PreTrainedModel, config: TrainingConfig, *, traits: Traits, device: torch.device | None
) -> None:
    """Every refusal that needs no plan; the first raises.

    Args:
        model: on meta; it is not changed.
        traits: of the model.
        device: None: not known; what a device must offer is not checked.
    """
    adapter = weights_of(model).adapter
    engine = config.engine_needs
    whole = weights_of(model).names.whole
    seq_len = config.data.seq_len
    if adapter is None:
        refuse_adapters_that_were_not_built(config)
    else:
        refuse_compiled_adapters(adapter, config)
        refuse_expert_adapters_of_engine(adapter, config)
        refuse_adapters_that_nothing_calls(adapter, traits)
    if engine is not None:
        check_tensor_parallel(model, engine.tp)
    refuse_other_tokenizer(config)
    refuse_dropout(model, config)
    refuse_router_loss(model, config)
    check_balance(config.moe, model, traits)
    check_rope(model.config, seq_len=seq_len)
    check_temperature(model.config, seq_len=seq_len, cut=config.data.pack or config.mesh.cp > 1)
    check_positions(model, traits, seq_len=seq_len)
    if whole is not None:
        refuse_text_part_with_other_logits(whole, traits)
        refuse_text_part_on_server(whole, engine)
    if config.activation_checkpointing.mode == "selective":
        refuse_selective_that_is_overwritten(model, traits, config.activation_checkpointing)
    if device is not None:
        check_attention(config.model.attention, device=device)
    check_liger(config.model, model, device=device)
    refuse_no_causal_model(model, traits)


def refuse_adapters_that_were_not_built(config: TrainingConfig) -> None:
    """Adapters that the config asks for, in a model without any."""
    if not config.trains_adapter:
        return
    where = "lora.rank" if config.model.adapter is None else "model.adapter"
    what = f"is given, but recipe {config.recipe!r} built the model without adapters"
    raise UserError(where, what, "leave it out, or write build_model(config.model, lora=config.lora) in the recipe")


def refuse_compiled_adapters(adapter: Adapter, config: TrainingConfig) -> None:
    """torch.compile with adapters that it cannot trace: DoRA, and those on experts in one tensor."""
    if not config.compile.enabled:
        return
    if adapter.config.use_dora:
        what = "true with DoRA: torch.compile cannot trace peft's layers for it, and would leave everything uncompiled"
        raise UserError("compile.enabled", what, "set it to false, or train without lora.dora")
    if adapter.experts:
        what = "true with adapters on experts in one tensor: torch.compile cannot trace these"
        raise UserError("compile.enabled", what, "set it to false")


def refuse_expert_adapters_of_engine(adapter: Adapter, config: TrainingConfig) -> None:
    """Adapters on experts in one tensor, where an engine is sent the weights."""
    if adapter.experts and config.engine_needs is not None:
        what = "with adapters on experts in one tensor, which no engine is sent"
        raise UserError(f"recipe {config.recipe!r}", what, "leave the experts out")


def refuse_adapters_that_nothing_calls(adapter: Adapter, traits: Traits) -> None:
    """Adapters on modules whose weights are read, and which are never called."""
    if idle := sorted(traits.uncalled_modules & set(adapter.layers)):
        what = f"{idle[0]} is never called (the module around it reads its weight), so its adapter would do nothing"
        raise UserError("lora.target_modules", what, "name other layers")


def refuse_other_tokenizer(config: TrainingConfig) -> None:
    """A tokenizer that gives tokens other ids than the model's own; it can be waived."""
    if not config.preflight.allows("other_tokenizer"):
        check_same_tokens(config.model)


def refuse_dropout(model: PreTrainedModel, config: TrainingConfig) -> None:
    """Dropout and noise in routing, whose masks depend on the mesh; it can be waived."""
    if config.preflight.allows("dropout") or not any(_drops(module) for module in model.modules()):
        return
    # Configs also name dropouts of heads that this model lacks: modules decide, and the config provides the names.
    keys = [
        f"model.config.{key}"
        for key, value in model.config.get_text_config().to_dict().items()
        if _is_noise(key) and isinstance(value, float) and value > 0
    ]
    adapter = weights_of(model).adapter
    if adapter is not None and adapter.config.lora_dropout:
        keys.append("lora.dropout")
    where = "lora.dropout" if keys == ["lora.dropout"] else "model.config"
    what = f"has dropout ({', '.join(keys)}), which draws other masks on another mesh, so results would depend on it"
    todo = f"set {key_to_allow('dropout')}"
    if not any("jitter" in key for key in keys):  # PhiMoE routes by it in evaluation, too
        zeros = " and ".join(f"{key} = 0.0" for key in keys)
        todo = f"set {zeros}, or {key_to_allow('dropout')}"
    raise UserError(where, what, todo)


def refuse_router_loss(model: PreTrainedModel, config: TrainingConfig) -> None:
    """transformers' auxiliary loss of a micro-batch, which depends on the mesh; it can be waived."""
    is_returned = value_of(model.config.get_text_config(), "output_router_logits")
    if not is_returned or config.preflight.allows("router_aux_loss"):
        return
    key = "model.config.output_router_logits"
    what = "is true: the router's auxiliary loss of a micro-batch depends on the mesh, and is not part of the loss"
    todo = f'set {key} = false, and moe.balance = "aux" for that loss of each row; '
    todo += f"or {key_to_allow('router_aux_loss')} to train without it"
    raise UserError(key, what, todo)


def refuse_text_part_with_other_logits(whole: Whole, traits: Traits) -> None:
    """The text part of a model of several parts, unless a small copy has the logits that the whole model has."""
    if traits.no_small_copy:
        what = f"the text part of {type(whole.model).__name__} cannot be tried: {traits.no_small_copy}"
        raise UserError("model.path", what, "use a text model")
    traits.once("whole", whole.check_same_logits)


def refuse_text_part_on_server(whole: Whole, engine: EngineNeeds | None) -> None:
    """A server of a model of several parts, which would be sent one of them."""
    if engine is not None and not engine.embedded:
        what = f"a server would be sent the text part of {type(whole.model).__name__} alone"
        raise UserError("rollout.engine", what, 'use "transformers", or a text model')


def refuse_selective_that_is_overwritten(
    model: PreTrainedModel, traits: Traits, section: ActivationCheckpointingConfig
) -> None:
    """Results that are kept for backward, and that the model changes in place; tried on a small copy."""
    small = traits.small_copy()
    if small is None:
        return
    apply_activation_checkpointing(section, decoder_layers(small), device_type="cpu")
    try:
        small(input_ids=torch.arange(2, 14)[None], use_cache=False).logits.sum().backward()
    except RuntimeError as error:
        if "mutated" in str(error):
            what = f"{type(model).__name__} changes results in place that would be kept for backward"
            todo = 'set activation_checkpointing.mode = "full"'
            raise UserError("activation_checkpointing.mode 'selective'", what, todo) from None


def refuse_no_causal_model(model: PreTrainedModel, traits: Traits) -> None:
    """A model whose tokens see later ones."""
    if traits.causal is False:
        what = "its tokens see later tokens, so next-token prediction would learn to copy"
        raise UserError(f"model {type(model).__name__}", what, "use a causal language model")


def refuse_packs_that_leak(
    model: PreTrainedModel, config: TrainingConfig, *, traits: Traits, attention: AttentionPath | None
) -> None:
    """Packed rows whose documents would see each other.

    Args:
        attention: None: not chosen yet, and only what no attention of ours would change is refused.
    """
    if config.data.pack and (what := _leak(model, traits, attention)):
        raise UserError("data.pack", what, "set data.pack = false")


def _leak(model: PreTrainedModel, traits: Traits, attention: AttentionPath | None) -> str | None:
    """Why packed documents would see each other, or might; None: they do not."""
    name = type(model).__name__
    is_recurrent = bool(find_recurrent(model))
    unknown = unknown_kinds(model.config, recurrent=is_recurrent)
    if is_recurrent and (why := try_recurrent(model, traits)):
        return f"{name}: {why}"
    if traits.separates_packed is None:
        why = traits.no_small_copy or "a small copy of it does not run in packed rows"
        return f"packed documents might see each other in {name}: {why}"
    if unknown:  # a convolution's small weights might hide a leak in the trial
        return f"packed documents would see each other through layers of kind {', '.join(sorted(unknown))}"
    if attention is None or traits.separates_packed or attention.recurrent_layers:
        return None
    # Other paths were tried with packed rows when they were chosen.
    if attention.method is None and attention.kernel != VARLEN and not attention.masks_every_row:
        return f"packed documents would see each other in {name} (tried on a small copy of it)"
    return None


def refuse_untried_expert_parallelism(model: PreTrainedModel, config: TrainingConfig, sizes: MeshSizes) -> None:
    """What was not tried with experts that are partitioned over ranks."""
    if sizes.ep == 1:
        return
    adapter = weights_of(model).adapter
    untried = [
        ("mesh.ep with compile.enabled", config.compile.enabled, "set compile.enabled = false"),
        ("mesh.ep with adapters on experts", adapter is not None and adapter.experts, "leave the experts out"),
        ('mesh.ep with lora.quantize = "nf4"', config.lora.quantize == "nf4", "leave lora.quantize out"),
        (
            "mesh.ep with adapters and rollouts",
            adapter is not None and config.engine_needs is not None,
            "train without adapters",
        ),
    ]
    for where, is_wanted, todo in untried:
        if is_wanted:
            raise UserError(where, "is not supported", f"{todo}, or use mesh.ep = 1")


def refuse_selective_in_pieces(config: TrainingConfig, broken_layers: Sequence[str]) -> None:
    """Selective checkpointing of compiled layers whose graphs are in pieces.

    Args:
        broken_layers: names of the decoder layers that hold FSDP units.
    """
    if config.compile.enabled and config.activation_checkpointing.mode == "selective" and broken_layers:
        what = (
            "decoder layers hold FSDP units (fsdp.unit, unit_classes or class_dtypes), whose hooks break the layers' "
            "graphs; torch.compile cannot choose what to keep across pieces"
        )
        todo = (
            'set activation_checkpointing.mode = "full", fsdp.unit = "layer" without such classes, or '
            "compile.enabled = false"
        )
        raise UserError("activation_checkpointing.mode 'selective' with compile.enabled", what, todo)


def _is_noise(name: str) -> bool:
    return "drop" in name or "jitter" in name


def _drops(module: nn.Module) -> bool:
    """Whether a module drops values in training: a dropout layer, or a rate that its forward hands to a function."""
    if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)):
        return module.p > 0
    return any(_is_noise(name) and isinstance(value, float) and value > 0 for name, value in vars(module).items())
