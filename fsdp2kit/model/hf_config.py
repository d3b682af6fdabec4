"""Read a model's Hugging Face config, with the user's overrides, and refuse what cannot be trained here."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.config.section import OverrideText
from fsdp2kit.errors import UserError, did_you_mean
from fsdp2kit.files.local import todo_of_cache
from fsdp2kit.model.inspect import value_of
from fsdp2kit.model.text_part import has_parts, is_made_here, know_causal_lm, text_config_of

logger = logging.getLogger(__name__)


def load_hf_config(section: ModelConfig, *, local_files_only: bool = False) -> PretrainedConfig:
    """The Hugging Face config of ``section.path`` (or of ``config.model_type``) with the overrides applied.

    ``layer_types`` is cut to an overridden ``num_hidden_layers``. A checkpoint of several parts (text, images, …)
    gives the config of its text part.
    """
    return load_hf_configs(section, local_files_only=local_files_only)[0]


def load_hf_configs(
    section: ModelConfig, *, local_files_only: bool = False
) -> tuple[PretrainedConfig, PretrainedConfig | None]:
    """As `load_hf_config`; and the checkpoint's own config, without overrides, if it has several parts."""
    # A copy, since transformers adds keys to the dicts that it is given.
    overrides = copy.deepcopy(dict(section.config))
    whole = None
    if section.path is None:
        model_type = overrides.pop("model_type")
        fields = {}
        try:
            known: dict[str, Any] = AutoConfig.for_model(model_type).to_dict()
        except (KeyError, ValueError):
            what = f"{model_type!r} is not known to transformers"
            raise UserError("model.config.model_type", what, "check its spelling") from None
        except Exception as error:  # a default config that transformers' own validation refuses
            what = f"{model_type!r} has no default config: {_in_short(error)}"
            raise UserError("model.config.model_type", what, "start from a published config: model.path") from None
    else:
        fields = _read_config_dict(section, local_files_only=local_files_only)
        whole, fields = _text_part(section, fields)
        known = fields
        model_type = overrides.pop("model_type", fields.get("model_type"))
    merged = _merge(fields, overrides, known=known, where="model.config", model_type=model_type)
    depth = _aliases(model_type).get("num_hidden_layers", "num_hidden_layers")
    is_cut = {"num_hidden_layers", depth} & overrides.keys() and "layer_types" not in overrides
    if is_cut and merged.get("layer_types"):
        merged["layer_types"] = merged["layer_types"][: merged[depth]]
    merged.pop("model_type", None)
    where = "model.path" if section.path else "model.config.model_type"
    runs_own_code = "auto_map" in merged and section.trust_remote_code
    if model_type not in CONFIG_MAPPING and not runs_own_code:
        todo = "check the path and the model_type in its config.json, or install a newer transformers"
        raise UserError(where, f"{model_type!r} is not known to transformers {transformers.__version__}", todo)
    try:
        if runs_own_code:
            config = AutoConfig.from_pretrained(str(section.path), trust_remote_code=True)
            config.update(overrides)
            return config, None
        with rope_warnings() as complaints:
            config = AutoConfig.for_model(model_type, **merged)
    except Exception as error:  # transformers validates configs with exceptions of many types
        where = f"model.path {section.path}" if section.path else "model.config"
        what = f"not a usable model config: {_in_short(error)}"
        raise UserError(where, what, "check it and the overrides") from None
    if whole is not None:
        know_causal_lm(config)
    _check_decoder(config, where=where, is_part=whole is not None)
    _check_heads(config, where=where)
    if complaints and _names_rope(overrides):
        raise UserError("model.config.rope_parameters", complaints[0], "check its keys and values")
    for complaint in complaints:
        logger.warning("%s", complaint)
    return config, whole


def trained_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config that is trained of a checkpoint's: that of its text part, if it has other parts beside it.

    `AutoModelForCausalLM` knows a class for it, if there is one.
    """
    text = text_config_of(config)
    if text is not None:
        return text
    know_causal_lm(config)
    return config


def read_fields(
    fields: Mapping[str, Any], config: PretrainedConfig, whole: PretrainedConfig | None
) -> PretrainedConfig | None:
    """What transformers makes of a config.json's fields, as the config that is trained; None if it refuses them.

    Args:
        config: one of the class that is trained.
        whole: the config of a checkpoint of several parts, if the fields are such a one's.
    """
    try:
        with rope_warnings():
            read = type(config if whole is None else whole).from_dict(copy.deepcopy(dict(fields)))
        return read if whole is None else text_config_of(read)
    except Exception:  # transformers validates configs with exceptions of many types
        return None


def _text_part(section: ModelConfig, fields: dict[str, Any]) -> tuple[PretrainedConfig | None, dict[str, Any]]:
    """The config of a checkpoint of several parts, with the fields of its text part's; else None and ``fields``."""
    if "auto_map" in fields or fields["model_type"] not in CONFIG_MAPPING or not has_parts(fields):
        return None, fields
    try:
        config = AutoConfig.for_model(**fields)
    except Exception:  # reported where the config of any model is made
        return None, fields
    text = text_config_of(config)
    if text is None:
        return None, fields
    if section.weights == "random":
        what = f"'random', but {section.path} has other parts beside the text part, whose weights an export carries"
        raise UserError("model.weights", what, "train the pretrained text part, or give a text model's config")
    return config, text.to_dict()


def _in_short(error: Exception) -> str:
    return textwrap.shorten(str(error).replace(OverrideText.__name__, "str"), 200, placeholder=" …")


def _check_decoder(config: PretrainedConfig, *, where: str, is_part: bool) -> None:
    """Refuse a model that is not a decoder-only text model; transformers would build a part of some.

    Args:
        is_part: it is the text part of a checkpoint.
    """
    architecture = next(iter(config.architectures or ()), None) or ""
    kind = None
    if value_of(config, "is_encoder_decoder"):
        kind = "an encoder-decoder model"
    elif any(hasattr(config, name) for name in ("vision_config", "audio_config", "speech_config")):
        kind = "a model of text and images, audio or video"
    elif re.search(r"Classification|QuestionAnswering|MultipleChoice|Reward|Regression", architecture):
        kind = "a model with a classification head"
    elif re.search(r"MaskedLM|ForPreTraining|ForCTC", architecture):
        kind = "an encoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or (is_made_here(config) and not is_part):
        kind = "no language model that predicts the next token"
    if kind is not None:
        todo = "give a decoder-only text model (one for AutoModelForCausalLM); `fsdp2kit docs not_supported` says more"
        raise UserError(where, f"{architecture or config.model_type} is {kind}", todo)


def _check_heads(config: PretrainedConfig, *, where: str) -> None:
    """Refuse key and value heads that the query heads cannot share evenly; some attention kernels do not."""
    text = config.get_text_config()
    for each in text.per_layer_config if value_of(text, "is_heterogeneous") else [text]:
        heads = value_of(each, "num_attention_heads")
        kv_heads = value_of(each, "num_key_value_heads")
        if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
            what = f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
            raise UserError(where, what, "set model.config.num_key_value_heads to a divisor")


def _read_config_dict(section: ModelConfig, *, local_files_only: bool) -> dict[str, Any]:
    path = str(section.path)
    if Path(path).is_absolute() and not (Path(path) / "config.json").is_file():
        raise UserError("model.path", f"{path} is not a model directory (no config.json)", "check the path")
    try:
        fields, _ = PretrainedConfig.get_config_dict(path, local_files_only=local_files_only)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        todo = todo_of_cache(error) or "check the path, or the hub id and your access"
        raise UserError("model.path", f"{path}: {reason}", todo) from None
    except RecursionError:
        raise UserError(
            "model.path", f"{path}/config.json is nested too deep", "is it a transformers model?"
        ) from None
    except TypeError:  # of a config that is null, or a number
        fields = None
    if not isinstance(fields, dict):
        raise UserError("model.path", f"{path}/config.json is no JSON object", "is it a transformers model?")
    if not fields.get("model_type"):
        raise UserError("model.path", f"{path}/config.json names no model_type", "is it a transformers model?")
    if fields.get("quantization_config"):
        todo = 'start from the unquantised model; lora.quantize = "nf4" quantises it as it is read'
        raise UserError("model.path", f"{path} holds quantised weights", todo)
    return fields


@contextlib.contextmanager
def rope_warnings() -> Iterator[list[str]]:
    """Collects transformers' warnings about ``rope_parameters``, and does not show them."""
    complaints: list[str] = []
    rope_logger = logging.getLogger("transformers.modeling_rope_utils")
    level = rope_logger.level

    def keep(record: logging.LogRecord) -> bool:
        complaints.append(record.getMessage())
        return False

    rope_logger.addFilter(keep)
    rope_logger.setLevel(logging.WARNING)
    try:
        yield complaints
    finally:
        rope_logger.removeFilter(keep)
        rope_logger.setLevel(level)


def _names_rope(overrides: Mapping[str, Any]) -> bool:
    return "rope_parameters" in overrides or any(
        _names_rope(value) for value in overrides.values() if isinstance(value, Mapping)
    )


def _merge(
    fields: Mapping[str, Any], overrides: Mapping[str, Any], *, known: Mapping[str, Any], where: str, model_type: Any
) -> dict[str, Any]:
    """The fields of a config with overrides, which may be given by transformers' other names for them.

    Args:
        known: fields that the config may have.
        model_type: its config class has the other names, in ``attribute_map``.
    """
    merged = dict(fields)
    aliases = _aliases(model_type)
    seen = {}
    for key, value in overrides.items():
        own = aliases.get(key, key)
        if own in seen:
            todo = "give one of them"
            raise UserError(f"{where}.{key}", f"is another name of {seen[own]}, which is given as well", todo)
        seen[own] = key
        names = [own, *(alias for alias, name in aliases.items() if name == own)]
        found = next((name for name in names if name in known), key)
        if found not in known and found not in _read_by_model(model_type):
            _check_known(found, known, where=where, also=aliases)
        for name in names:
            merged.pop(name, None)
        merged[own] = value
        nested = known.get(found)
        if own == "rope_parameters":
            merged.pop("rope_scaling", None)  # transformers 4's name for them, which would go before
        if not (isinstance(value, Mapping) and isinstance(nested, Mapping)):
            continue
        # Sub-configs merge. Dicts like `rope_parameters` are replaced whole: their keys depend on one another.
        if "model_type" in nested:
            inner = fields.get(found, {})
            within = f"{where}.{key}"
            merged[own] = _merge(inner, value, known=nested, where=within, model_type=nested["model_type"])
        else:
            for inner in (name for name, item in value.items() if isinstance(item, Mapping)):
                _check_known(inner, nested, where=f"{where}.{key}")  # one for each kind of layer, say
    return merged


def _aliases(model_type: Any) -> Mapping[str, str]:
    """The config's own name of a field by each other name; empty if transformers does not know the class."""
    return CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}


def _read_by_model(model_type: Any) -> set[str]:
    """The keys that a model's code reads from its config; some are not declared there (Qwen3-MoE's ``head_dim``)."""
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return set()
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return set(re.findall(r'\bconfig(?:\.|, ")(\w+)', inspect.getsource(sys.modules[kind.__module__])))


# Keys' names in older versions of transformers.
_RENAMED = {"rope_scaling": "rope_parameters", "rope_theta": "rope_parameters", "torch_dtype": "dtype"}


def _check_known(key: str, known: Mapping[str, Any], *, where: str, also: Collection[str] = ()) -> None:
    if key not in known:
        otherwise = "see the model's config.json for its keys"
        todo = did_you_mean(_RENAMED.get(key, key), [*known, *also], otherwise=otherwise)
        raise UserError(f"{where}.{key}", "not a key of this model's config", todo)
