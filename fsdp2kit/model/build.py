"""Build a Hugging Face model on the meta device, its computed buffers real."""

from __future__ import annotations

import copy
import fnmatch
import json
import logging
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from fsdp2kit.config.schema import LoraConfig, ModelConfig
from fsdp2kit.errors import UserError, nearest
from fsdp2kit.files.local import read_json_object
from fsdp2kit.job.distributed import agreement
from fsdp2kit.model.adapters import apply_lora
from fsdp2kit.model.assets import find_hf_dir
from fsdp2kit.model.hf_config import load_hf_config, load_hf_configs
from fsdp2kit.model.text_part import attach_whole, text_config_of
from fsdp2kit.model.tokenizer import added_beyond, build_tokenizer, new_tokens
from fsdp2kit.weights.record import ModelSource, find_ties, weights_of
from fsdp2kit.weights.stored import check_indexes

logger = logging.getLogger(__name__)


def build_model(
    section: ModelConfig, *, lora: LoraConfig | None = None, local_files_only: bool = False
) -> PreTrainedModel:
    """The model on the meta device, in float32, in training mode, its non-persistent buffers real and computed.

    Only those buffers are allocated (``inv_freq`` and the like, which no checkpoint holds). A hub model is fetched
    with its weights. The embedding has a row for every token that the chat template adds, or that the user added to
    the tokenizer. Collective.

    Args:
        section: the ``[model]`` section.
        lora: the ``[lora]`` section; with ``lora.rank`` or ``model.adapter`` the model has adapters and is frozen.
        local_files_only: look in the hub's cache, but never ask the hub; weights are not looked for.

    Raises:
        UserError: the config cannot be read; transformers has no causal language model for it, or not with this
            attention; a pattern to freeze that names no parameter; layers to adapt that the model does not have.
    """
    directory = None
    if section.path is not None and not local_files_only:
        directory = find_hf_dir(section.path, key="model.path", with_weights=section.weights == "pretrained")
    with agreement():
        hf_config, whole = load_hf_configs(section, local_files_only=local_files_only)
        stored_vocab = _stored_vocab(section, hf_config, local_files_only=local_files_only)
    markers = _new_markers(section, local_files_only=local_files_only)
    added = added_beyond(section, stored_vocab) if section.path is not None else ()
    start = Path(section.adapter) if section.adapter else None
    if section.adapter and not local_files_only:
        start = find_hf_dir(section.adapter, key="model.adapter", with_weights=True)
    with agreement():
        text_config = hf_config.get_text_config()
        # A vocabulary that model.config.vocab_size rounds up has rows without a token, which begin as the mean, too.
        text_config.vocab_size = max([text_config.vocab_size, *(token + 1 for token in (*markers, *added))])
        new = tuple(sorted({*markers, *range(stored_vocab, text_config.vocab_size)}))
        model = _on_meta(section, hf_config)
        if whole is not None:
            attach_whole(model, whole)
        compute_buffers(model)
        freeze(model, section.freeze)
        if markers and not _trains_vocabulary(model):
            what = f"freezes the embedding, to which model.chat_template adds {len(markers)} tokens"
            raise UserError("model.freeze", what, "train the embedding, or use a template without new tokens")
        apply_lora(model, lora or LoraConfig(), directory=start, base=section.path)
        if markers and not _trains_vocabulary(model):
            what = f"adds {len(markers)} tokens, for which the model that is frozen beside adapters has no rows"
            todo = "use a template without new tokens, or give a model and tokenizer that have them"
            if not find_ties(model):
                todo = f"train the embedding and the head (lora.modules_to_save = {_ends(model)}), or {todo}"
            raise UserError("model.chat_template", what, todo)
    if whole is not None and directory is not None and section.weights != "pretrained":
        # Weights of a checkpoint are the text part's alone; those of the others are carried over to exports.
        directory = find_hf_dir(str(section.path), key="model.path", with_weights=True)
    weights_of(model).source = ModelSource(
        section.path,
        directory,
        hf_config,
        new_tokens=new,
        stored_vocab=stored_vocab if new else 0,
        trains_new=_trains_vocabulary(model),
        has_adapter=weights_of(model).adapter is not None,
        whole=whole,
    )
    return model.train()


def _stored_vocab(section: ModelConfig, hf_config: PretrainedConfig, *, local_files_only: bool) -> int:
    """Rows of the source's embedding; for random weights, those that the config asks for."""
    rows = hf_config.get_text_config().vocab_size
    if section.path is None or section.weights == "random" or "vocab_size" not in json.dumps(section.config):
        return rows
    plain = load_hf_config(section.model_copy(update={"config": {}}), local_files_only=local_files_only)
    return min(rows, plain.get_text_config().vocab_size)


def _new_markers(section: ModelConfig, *, local_files_only: bool) -> tuple[int, ...]:
    """Ids of the tokens that ``model.chat_template`` adds."""
    if section.chat_template is None or not (section.tokenizer or section.path):
        return ()
    try:
        return new_tokens(build_tokenizer(section, local_files_only=local_files_only))
    except UserError:
        if not local_files_only:
            raise
        return ()  # not on this machine, or broken: reading the data reports that


def _trains_vocabulary(model: PreTrainedModel) -> bool:
    """Whether the embedding and the head are trained, or copies of them beside adapters."""
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    is_trained = [[parameter.requires_grad for parameter in module.parameters()] for module in ends]
    return (
        all(any(one) for one in is_trained) if weights_of(model).adapter is not None else all(map(all, is_trained[:1]))
    )


def _ends(model: PreTrainedModel) -> str:
    """The embedding and the head by the last parts of their names, as a TOML's list."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if any(module is end for end in ends)]
    return json.dumps(names)


def model_on_meta(config_dir: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel | None:
    """The model of ``config_dir/config.json`` on meta; None where transformers does not know the class itself.

    A model of several parts (text, images, …) gives its text part.

    Args:
        trust_remote_code: run the Python code that the config names; without it such a model gives None.
    """
    path = Path(config_dir) / "config.json"
    todo = "give a directory with the model's config.json as --config"
    try:
        raw = read_json_object(path)
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read ({error})", todo) from error
    architecture = next(iter(raw.get("architectures") or ()), None)
    own_classes = raw.get("auto_map") or {}
    runs_own_code = trust_remote_code and AutoModelForCausalLM.__name__ in own_classes
    if own_classes and not runs_own_code and not hasattr(transformers, architecture or ""):
        return None
    try:
        config = AutoConfig.from_pretrained(config_dir, local_files_only=True, trust_remote_code=runs_own_code)
        if runs_own_code:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        build: Callable[..., PreTrainedModel] = getattr(
            transformers, architecture or "", AutoModelForCausalLM.from_config
        )
        text = text_config_of(config)
        with torch.device("meta"):
            model = build(config) if text is None else AutoModelForCausalLM.from_config(text)
        if text is not None:
            attach_whole(model, config)
        return model
    except UserError:
        raise
    except Exception as error:  # transformers raises nearly anything on a config it does not like
        what = f"transformers cannot build the model ({type(error).__name__}: {error})"
        raise UserError(str(path), what, todo) from error


def load_whole(
    directory: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    local_files_only: bool = True,
    trust_remote_code: bool = False,
) -> Any:
    """The model of a Hugging Face directory, or hub id, by transformers alone and of the class that its config names.

    Args:
        local_files_only: never ask the hub.
        trust_remote_code: run the Python code that the config names.
    """
    check_indexes(directory)
    options: Any = {"local_files_only": local_files_only, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(directory, **options)
    # A text part's class in `AutoModelForCausalLM` would leave the other parts out.
    name = next(iter(config.architectures or ()), "")
    kind = AutoModelForCausalLM if text_config_of(config) is None else getattr(transformers, name)
    return kind.from_pretrained(directory, dtype=dtype, **options)


def load_plain_text(directory: str | Path, config: PretrainedConfig) -> Any:
    """The text of `load_whole` in float32, or the model itself where it has no other parts.

    Args:
        config: of the model that is trained; where there are no other parts, it may have overrides.
    """
    check_indexes(directory)
    if text_config_of(AutoConfig.from_pretrained(directory, local_files_only=True)) is None:
        return AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    whole = load_whole(directory, dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.get_decoder().load_state_dict(whole.get_decoder().state_dict())
    model.get_output_embeddings().load_state_dict(whole.get_output_embeddings().state_dict())
    return model


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
        # What follows is transformers' advice for its own users.
        reason = textwrap.shorten(str(error).split(". ")[0], 160, placeholder=" …")
        try:
            build("eager")
        except Exception:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if Path(frame.filename).name.startswith("modeling_")] or frames
            said = f"{type(error).__name__}: {reason}, at `{own[-1].line}`"
            what = f"transformers cannot build {hf_config.model_type!r} from this config ({said})"
            todo = "correct it ([model.config] sets its keys), or choose another model"
            raise UserError("model.path" if section.path else "model.config", what, todo) from None
        todo = 'choose another model.attention ("eager" works), or another model'
        raise UserError("model", f"cannot be built: {reason}", todo) from None


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Mark the parameters whose name matches one of ``patterns`` (``*``, ``?``, ``[0-7]``) as not trained.

    A tied parameter is frozen by either of its names.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = nearest(pattern, names) or next(iter(names))
            raise UserError("model.freeze", f"{pattern!r} matches no parameter", f"their names are like {near}")
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
        # transformers skips modules with this mark. The others have such buffers, or are around modules that do: their
        # initialisation may reach into them. Drawing weights on meta would only be slow.
        setattr(module, "_is_hf_initialized", path not in unfinished)  # noqa: B010 (attributes are typed as tensors)
    model.initialize_weights()


def materialize(model: nn.Module, *, device: torch.device, whole_device: torch.device | None = None) -> None:
    """Move a (sharded) meta model to ``device`` without values, keeping its buffers' values and its ties.

    Args:
        whole_device: for parameters and buffers that are not sharded; by default ``device``.
    """
    ties = find_ties(model)
    # `to_empty` would leave garbage in the buffers that no checkpoint holds (inv_freq), and forget ties.
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    others = whole_device or device
    model._apply(lambda tensor: torch.empty_like(tensor, device=device if isinstance(tensor, DTensor) else others))
    for name, value in buffers.items():
        model.get_buffer(name).copy_(value)
    for alias, name in ties.items():
        owner, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(name))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers, in order: the modules that transformers says must not be split."""
    classes = set(getattr(model, "_no_split_modules", None) or [])
    found: list[nn.Module] = []
    newest = "."  # a prefix of no name; what is inside a module comes right after it
    for name, module in model.named_modules():
        if type(module).__name__ in classes and not name.startswith(newest):
            found.append(module)
            newest = f"{name}."
    if not found:
        what = f"has no module of a class that transformers names as a layer ({', '.join(sorted(classes)) or 'none'})"
        raise UserError(f"model {type(model).__name__}", what, "use a model whose class sets _no_split_modules")
    return found
