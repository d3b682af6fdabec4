"""The text part of a checkpoint of several parts (text, images, audio, …) as a causal language model of its own.

The text part is what is trained: a plain decoder with the head. The whole model stays on meta; it says how its files
name the text part's tensors (`fsdp2kit.weights.whole.Whole`), and all others are carried over to exports as they are.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from fsdp2kit.model.inspect import value_of
from fsdp2kit.weights.record import find_ties, weights_of
from fsdp2kit.weights.whole import Whole, build_whole, refused

_PARTS = ("vision_config", "audio_config", "speech_config")


def has_parts(fields: Mapping[str, Any]) -> bool:
    """Whether the fields of a config are those of a model of several parts."""
    return any(name in fields for name in _PARTS)


def text_config_of(config: PretrainedConfig) -> PretrainedConfig | None:
    """The config of the text part as that of a model of its own; None for one of text alone, or without such a part.

    What stands in the whole's config alone, its dtype and whether the head is tied, is set in it.
    """
    if value_of(config, "is_encoder_decoder") or not has_parts(vars(config)):
        return None
    text = copy.deepcopy(value_of(config, "text_config"))
    if not isinstance(text, PretrainedConfig):
        return None
    if config.dtype is not None:
        text.dtype = config.dtype
    text.tie_word_embeddings = bool(value_of(config, "tie_word_embeddings"))
    return text if know_causal_lm(text) else None


def know_causal_lm(config: PretrainedConfig) -> bool:
    """See that `AutoModelForCausalLM` knows a class for the config of a text part; returns whether it does.

    transformers has the decoders of some families (Qwen-VL, GLM-V) without a head. For these a class is registered:
    the decoder, and a linear head without bias.
    """
    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    if kind not in MODEL_MAPPING or kind.base_config_key != "text_config":
        return False
    decoder: Any = MODEL_MAPPING[kind]
    is_one_class = inspect.isclass(decoder) and decoder.config_class is kind
    if not is_one_class:
        return False
    AutoModelForCausalLM.register(kind, _with_head(decoder), exist_ok=True)  # it is no other library's class
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING  # transformers 5.17 registers nothing for configs of its own


def is_made_here(config: PretrainedConfig) -> bool:
    """Whether the class that `AutoModelForCausalLM` knows for a config was registered by `know_causal_lm`."""
    return getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "__module__", None) == __name__


def _with_head(decoder: Any) -> type[PreTrainedModel]:
    family: Any = decoder.__mro__[1]  # `PreTrainedModel` with the family's settings

    class TextForCausalLM(family, GenerationMixin):
        """A decoder of transformers with a linear head."""

        config_class = decoder.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' own form)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(  # `generate` looks for these names
            self,
            input_ids: Tensor | None = None,
            attention_mask: Any = None,
            position_ids: Tensor | None = None,
            logits_to_keep: int | Tensor = 0,
            **inputs: Any,
        ) -> CausalLMOutputWithPast:
            """Logits ``[B, S, V]`` of ids ``[B, S]``, with the decoder's own further inputs."""
            inputs.pop("labels", None)
            found = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **inputs)
            rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(found.last_hidden_state[:, rows])
            return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)

    TextForCausalLM.__name__ = TextForCausalLM.__qualname__ = f"{decoder.__name__.removesuffix('Model')}ForCausalLM"
    return TextForCausalLM


def attach_whole(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Note at a text part which model it is a part of, in place.

    Args:
        model: on meta, without adapters.
        config: the whole's.

    Raises:
        UserError: the whole's text part is another model than ``model``, or has not this head.
    """
    whole = build_whole(config, model.config)
    names, places = ({id(module): name for name, module in one.named_modules()} for one in (model, whole))
    pairs = []
    parts: Any = (
        (model.get_decoder(), whole.get_decoder()),
        (model.get_output_embeddings(), whole.get_output_embeddings()),
    )
    for inner, outer in parts:
        own = names.get(id(inner))
        there = places.get(id(outer))
        if not own or not there or type(inner) is not type(outer) or _shapes(inner) != _shapes(outer):
            raise refused(type(whole), f"its text part is no {type(model).__name__}")
        pairs.append((own, there))
    found = Whole(whole, tuple(pairs), config)
    ties = {found.inner(alias): found.inner(name) for alias, name in find_ties(whole).items()}
    ties = {alias: name for alias, name in ties.items() if alias is not None or name is not None}
    if ties != find_ties(model) or any(found.outer(name) is None for name in model.state_dict()):
        raise refused(type(whole), f"it has, or ties, other tensors than {type(model).__name__}")
    weights_of(model).names = found


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
