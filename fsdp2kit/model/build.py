"""Build a Hugging Face model on the meta device, with its real (computed) buffers and its ties known."""

from __future__ import annotations

import contextlib
import copy
import difflib
import fnmatch
import json
import logging
import re
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from fsdp2kit.config.schema import LoraConfig, ModelConfig
from fsdp2kit.config.section import OverrideText
from fsdp2kit.distributed import agreement
from fsdp2kit.errors import UserError
from fsdp2kit.files import todo_of_cache
from fsdp2kit.model.adapters import adapter_of, apply_lora
from fsdp2kit.model.assets import find_hf_dir
from fsdp2kit.model.names import tied_names
from fsdp2kit.model.tokenizer import build_tokenizer, new_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from; see `source_of`."""

    path: str | None
    """``model.path``; None for a model from a config alone."""
    directory: Path | None
    """The Hugging Face directory on this machine; None for a model from a config alone, or not looked for."""
    config: PretrainedConfig
    """With the user's overrides, before transformers wrote the dtype and attention of training into its copy."""
    new_tokens: tuple[int, ...] = ()
    """Ids of tokens that the chat template brought: their rows begin as the mean of the others."""
    stored_vocab: int = 0
    """Rows of the embedding without them; 0 where there are none."""
    has_adapter: bool = False
    """Whether adapters are trained, and exported, in place of the model."""

    @property
    def dtype(self) -> str:
        """The dtype an export takes by default: the source model's; float32 for adapters (they are small), and for a
        model from a config alone."""
        if self.has_adapter:
            return "float32"
        dtype = getattr(self.config, "dtype", None)
        return str(dtype).removeprefix("torch.") if self.path is not None and dtype is not None else "float32"


def source_of(model: PreTrainedModel) -> ModelSource:
    """The source of a model that `build_model` made."""
    return vars(model)["_fsdp2kit_source"]


def load_hf_config(section: ModelConfig, *, local_files_only: bool = False) -> PretrainedConfig:
    """The Hugging Face config of ``section.path`` (or of ``config.model_type``) with the overrides applied.

    Derived lists that follow the depth (``layer_types``) are cut to an overridden ``num_hidden_layers``.

    Raises:
        UserError: no such model, an override that the config does not know, or one that it rejects.
    """
    overrides = dict(section.config)
    if section.path is None:
        model_type, fields = overrides.pop("model_type"), {}
        try:
            known: dict[str, Any] = AutoConfig.for_model(model_type).to_dict()
        except (KeyError, ValueError):
            what = f"{model_type!r} is not known to transformers"
            raise UserError("model.config.model_type", what, "check its spelling") from None
    else:
        fields = known = _read_config_dict(section, local_files_only=local_files_only)
        model_type = overrides.pop("model_type", fields.get("model_type"))
    merged = _merge(fields, overrides, known=known, where="model.config", model_type=model_type)
    depth = _aliases(model_type).get("num_hidden_layers", "num_hidden_layers")
    if (
        {"num_hidden_layers", depth} & overrides.keys()
        and "layer_types" not in overrides
        and merged.get("layer_types")
    ):
        merged["layer_types"] = merged["layer_types"][: merged[depth]]
    merged.pop("model_type", None)
    where = "model.path" if section.path else "model.config.model_type"
    runs_own_code = "auto_map" in merged and section.trust_remote_code
    if model_type not in CONFIG_MAPPING and not runs_own_code:
        todo = "check the path and the model_type in its config.json, or install a newer transformers"
        raise UserError(where, f"{model_type!r} is not known to transformers {transformers.__version__}", todo)
    try:
        if "auto_map" in merged and section.trust_remote_code and section.path:
            config = AutoConfig.from_pretrained(section.path, trust_remote_code=True)
            config.update(overrides)
            return config
        with _rope_warnings() as complaints:
            config = AutoConfig.for_model(model_type, **merged)
    except Exception as error:  # transformers validates configs with exceptions of many types
        where = f"model.path {section.path}" if section.path else "model.config"
        reason = str(error).replace(OverrideText.__name__, "str")
        what = f"not a usable model config: {textwrap.shorten(reason, 200, placeholder=' …')}"
        raise UserError(where, what, "check it and the overrides") from None
    if not runs_own_code:
        _check_decoder(config, where=where)
    _check_heads(config, where=where)
    if complaints and _names_rope(overrides):
        raise UserError("model.config.rope_parameters", complaints[0], "check its keys and values")
    for complaint in complaints:
        logger.warning("%s", complaint)
    return config


def _check_decoder(config: PretrainedConfig, *, where: str) -> None:
    """Refuse a model that is no decoder-only text model, whatever of it transformers would build.

    Raises:
        UserError: saying what it is.
    """
    architecture = next(iter(config.architectures or ()), None) or ""
    kind = None
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder model"
    elif any(hasattr(config, name) for name in ("vision_config", "audio_config", "speech_config")):
        kind = "a model of text and images, audio or video"
    elif re.search(r"Classification|QuestionAnswering|MultipleChoice|Reward|Regression", architecture):
        kind = "a model with a classification head"
    elif re.search(r"MaskedLM|ForPreTraining|ForCTC", architecture):
        kind = "an encoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "no language model that predicts the next token"
    if kind is not None:
        todo = "give a decoder-only text model (one for AutoModelForCausalLM); docs/not_supported.md says more"
        raise UserError(where, f"{architecture or config.model_type} is {kind}", todo)


def _check_heads(config: PretrainedConfig, *, where: str) -> None:
    """Refuse key and value heads that the query heads cannot share evenly: some attention kernels do not mind.

    Raises:
        UserError: naming both numbers.
    """
    heads, kv_heads = (
        getattr(config.get_text_config(), name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        what = f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        raise UserError(where, what, "set model.config.num_key_value_heads to a divisor")


def build_model(
    section: ModelConfig, *, lora: LoraConfig | None = None, local_files_only: bool = False
) -> PreTrainedModel:
    """The model on the meta device, in float32, in training mode, its non-persistent buffers real and computed.

    Nothing is allocated but those buffers (``inv_freq`` and the like, which no checkpoint holds). A hub model is
    fetched, weights and all. The embedding has a row for every token that the chat template adds. In a job every rank
    calls this, and all ranks leave with the same outcome.

    Args:
        section: the ``[model]`` section.
        lora: the ``[lora]`` section; with it, or with ``model.adapter``, the model has adapters and is itself frozen.
        local_files_only: look in the hub's cache, but never ask the hub; weights are not looked for.

    Raises:
        UserError: as `load_hf_config`; transformers has no causal language model for this config, or not with this
            attention; a pattern to freeze that names no parameter; layers to adapt that the model does not have.
    """
    directory = None
    if section.path is not None and not local_files_only:
        directory = find_hf_dir(section.path, key="model.path", with_weights=section.weights == "pretrained")
    new = _new_tokens(section, local_files_only=local_files_only)
    start = Path(section.adapter) if section.adapter else None
    if section.adapter and not local_files_only:
        start = find_hf_dir(section.adapter, key="model.adapter", with_weights=True)
    with agreement():
        hf_config = load_hf_config(section, local_files_only=local_files_only)
        stored_vocab = 0
        if new:
            text_config = hf_config.get_text_config()
            stored_vocab = text_config.vocab_size
            text_config.vocab_size = max(stored_vocab, new[-1] + 1)
        model = _on_meta(section, hf_config)
        compute_buffers(model)
        freeze(model, section.freeze)
        if new and not all(parameter.requires_grad for parameter in model.get_input_embeddings().parameters()):
            what = f"freezes the embedding, to which model.chat_template adds {len(new)} tokens"
            raise UserError("model.freeze", what, "train the embedding, or use a template without new tokens")
        apply_lora(model, lora or LoraConfig(), directory=start, base=section.path)
        if new and adapter_of(model) is not None:
            what = f"adds {len(new)} tokens, for which the model that is frozen beside adapters has no rows"
            todo = "use a template without new tokens, or give a model and tokenizer that have them"
            raise UserError("model.chat_template", what, todo)
    # By `vars`, since a module types its attributes as tensors.
    source = ModelSource(section.path, directory, hf_config, new, stored_vocab, adapter_of(model) is not None)
    vars(model)["_fsdp2kit_source"] = source
    return model.train()


def _new_tokens(section: ModelConfig, *, local_files_only: bool) -> tuple[int, ...]:
    if section.chat_template is None or not (section.tokenizer or section.path):
        return ()
    try:
        return new_tokens(build_tokenizer(section, local_files_only=local_files_only))
    except UserError:
        if not local_files_only:
            raise
        return ()  # not on this machine, or what whoever reads the data will say


def model_on_meta(config_dir: str | Path) -> PreTrainedModel | None:
    """The model of ``config_dir/config.json`` without storage; None where transformers does not know the class itself.

    Raises:
        UserError: there is no config, or transformers cannot build the model from it.
    """
    path = Path(config_dir) / "config.json"
    todo = "give a directory with the model's config.json as --config"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read ({error})", todo) from error
    architecture = next(iter(raw.get("architectures") or ()), None)
    if "auto_map" in raw and not hasattr(transformers, architecture or ""):
        return None
    try:
        config = AutoConfig.from_pretrained(config_dir, local_files_only=True, trust_remote_code=False)
        build: Callable[..., PreTrainedModel] = getattr(
            transformers, architecture or "", AutoModelForCausalLM.from_config
        )
        with torch.device("meta"):
            return build(config)
    except Exception as error:  # transformers raises nearly anything on a config it does not like
        what = f"transformers cannot build the model ({type(error).__name__}: {error})"
        raise UserError(str(path), what, todo) from error


def _on_meta(section: ModelConfig, hf_config: PretrainedConfig) -> PreTrainedModel:
    def build(attention: str | None) -> PreTrainedModel:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(hf_config),  # transformers writes dtype and attention into it
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=section.trust_remote_code,
            )

    try:
        # None is transformers' own choice. "varlen" is ours, and applied later (`parallel.context_parallel`).
        return build(None if section.attention in ("auto", "varlen") else section.attention)
    except Exception as error:  # whatever a model's constructor raises for a config that does not suit it
        # transformers goes on with advice for its own users.
        reason = textwrap.shorten(str(error).split(". ")[0], 160, placeholder=" …")
        try:
            build("eager")
        except Exception:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if Path(frame.filename).name.startswith("modeling_")] or frames
            said = f"{type(error).__name__}: {reason}, at `{own[-1].line}`"
            what = f"transformers cannot build {hf_config.model_type!r} from this config ({said})"
            todo = "mend it ([model.config] sets its keys), or choose another model"
            raise UserError("model.path" if section.path else "model.config", what, todo) from None
        todo = 'choose another model.attention ("eager" works), or another model'
        raise UserError("model", f"cannot be built: {reason}", todo) from None


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Mark the parameters whose name matches one of ``patterns`` (``*``, ``?``, ``[0-7]``) as not trained.

    A tied parameter is frozen by either of its names.

    Raises:
        UserError: a pattern without a match, or nothing left to train.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, names, n=1) or list(names)[:1]
            raise UserError("model.freeze", f"{pattern!r} matches no parameter", f"their names are like {near[0]}")
        for name in matches:
            names[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model.freeze", "leaves nothing to train", "set train.steps = 0 to only evaluate")


def compute_buffers(model: PreTrainedModel) -> None:
    """Give every non-persistent buffer that is on meta its value, on the CPU, by the model's own initialisation."""
    unfinished: set[str] = set()
    for path, module in model.named_modules():
        names = module._non_persistent_buffers_set
        if not any(name in names and buffer.is_meta for name, buffer in module.named_buffers(recurse=False)):
            continue
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name in names:
                module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
        parts = path.split(".")
        unfinished |= {"", *(".".join(parts[: count + 1]) for count in range(len(parts)))}
    for path, module in model.named_modules():
        # transformers skips modules with this mark: all but those, and the ones around them, whose initialisation may
        # reach into them. Weights are on meta, where drawing them is only slow.
        setattr(module, "_is_hf_initialized", path not in unfinished)  # noqa: B010 (attributes are typed as tensors)
    model.initialize_weights()


def materialize(model: nn.Module, *, device: torch.device, whole_device: torch.device | None = None) -> None:
    """Move a (sharded) meta model to ``device`` without values, keeping its buffers' values and its ties.

    Args:
        whole_device: for parameters and buffers that are not sharded, where that is another one.
    """
    ties = tied_names(model)
    # As `to_empty`, which leaves garbage in the buffers that no checkpoint holds (inv_freq), and forgets ties.
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    others = whole_device or device
    model._apply(lambda tensor: torch.empty_like(tensor, device=device if isinstance(tensor, DTensor) else others))
    for name, value in buffers.items():
        model.get_buffer(name).copy_(value)
    for alias, name in ties.items():
        owner, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(name))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers, in order: the modules that transformers says must not be split.

    Raises:
        UserError: none was found.
    """
    classes = set(getattr(model, "_no_split_modules", None) or [])
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if type(module).__name__ in classes and not inside:
            found.append((name, module))
    if not found:
        what = f"has no module of a class that transformers names as a layer ({', '.join(sorted(classes)) or 'none'})"
        raise UserError(f"model {type(model).__name__}", what, "use a model whose class sets _no_split_modules")
    return [module for _, module in found]


def _read_config_dict(section: ModelConfig, *, local_files_only: bool) -> dict[str, Any]:
    path = str(section.path)
    if Path(path).is_absolute() and not (Path(path) / "config.json").is_file():
        raise UserError("model.path", f"{path} is not a model directory (no config.json)", "check the path")
    try:
        fields, _ = PretrainedConfig.get_config_dict(path, local_files_only=local_files_only)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        todo = todo_of_cache(error) or "check the path, or the hub id and your access"
        raise UserError("model.path", f"{path}: {reason}", todo) from None
    if not fields.get("model_type"):
        raise UserError("model.path", f"{path}/config.json names no model_type", "is it a transformers model?")
    if fields.get("quantization_config"):
        todo = 'start from the unquantised model; lora.quantize = "nf4" quantises it as it is read'
        raise UserError("model.path", f"{path} holds quantised weights", todo)
    return fields


@contextlib.contextmanager
def _rope_warnings() -> Iterator[list[str]]:
    """Collects what transformers has to say against ``rope_parameters``: a warning that would scroll by."""
    complaints: list[str] = []
    rope_logger = logging.getLogger("transformers.modeling_rope_utils")
    level = rope_logger.level

    def keep(record: logging.LogRecord) -> bool:
        complaints.append(record.getMessage())
        return False  # it is not shown as well

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
    """The fields of a config with others in their place, by their own names or by transformers' for them.

    Args:
        known: fields that the config may have.
        model_type: its class has the other names, in its ``attribute_map``.
    """
    merged, aliases, seen = dict(fields), _aliases(model_type), {}
    for key, value in overrides.items():
        own = aliases.get(key, key)
        if own in seen:
            todo = "give one of them"
            raise UserError(f"{where}.{key}", f"is another name of {seen[own]}, which is given as well", todo)
        seen[own] = key
        names = [own, *(alias for alias, name in aliases.items() if name == own)]
        found = next((name for name in names if name in known), key)
        _check_known(found, known, where=where, also=aliases)
        for name in names:
            merged.pop(name, None)
        merged[own], nested = value, known[found]
        if not (isinstance(value, Mapping) and isinstance(nested, Mapping)):
            continue
        # Sub-configs merge. `rope_parameters`-like dicts are replaced whole: their keys depend on one another.
        if "model_type" in nested:
            inner = fields.get(found, {})
            within = f"{where}.{key}"
            merged[own] = _merge(inner, value, known=nested, where=within, model_type=nested["model_type"])
        else:
            for inner in (name for name, item in value.items() if isinstance(item, Mapping)):
                _check_known(inner, nested, where=f"{where}.{key}")  # one for each kind of layer, say
    return merged


def _aliases(model_type: Any) -> Mapping[str, str]:
    """Other names of a config's fields, each with the config's own; none if transformers does not know the class."""
    return CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}


# What older versions of transformers called a key.
_RENAMED = {"rope_scaling": "rope_parameters", "rope_theta": "rope_parameters", "torch_dtype": "dtype"}


def _check_known(key: str, known: Mapping[str, Any], *, where: str, also: Collection[str] = ()) -> None:
    if key not in known:
        near = difflib.get_close_matches(_RENAMED.get(key, key), [*known, *also], n=1)
        todo = f"did you mean {near[0]}?" if near else "see the model's config.json for its keys"
        raise UserError(f"{where}.{key}", "not a key of this model's config", todo)
