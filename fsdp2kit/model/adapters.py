"""LoRA adapters (arXiv:2106.09685), by peft, built into a model.

peft decides what an adapter is and computes: layers, scaling, rslora, DoRA, modules that are trained whole. It builds
adapters into the meta model before anything is planned, and the model keeps its class, so sharding, recomputation and
compiling work on adapters, too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdp2kit.config.schema import LoraConfig
from fsdp2kit.errors import UserError, did_you_mean, importing
from fsdp2kit.files.local import read_json_object
from fsdp2kit.model.expert_adapters import ALL_EXPERTS, matched_parameters, replace_forward, target_parameters
from fsdp2kit.weights.adapter_files import stored_leaves
from fsdp2kit.weights.adapters import ADAPTER, CONFIG_NAME, Adapter, base_name
from fsdp2kit.weights.experts import find_experts
from fsdp2kit.weights.modules import base_module
from fsdp2kit.weights.record import find_ties, weights_of

# Keys of an adapter_config.json whose values may differ from peft's defaults. Others (trained biases or tokens, …) are
# refused: they would be trained, exported or merged as something else.
_KNOWN = {
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "modules_to_save",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
}
_INCIDENTAL = {"task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"}


def apply_lora(
    model: PreTrainedModel, section: LoraConfig, *, directory: Path | None = None, base: str | None = None
) -> None:
    """Freeze a meta model and build adapters into it, in place; without ``lora.rank`` or ``directory`` do nothing.

    Args:
        directory: of the adapter that is trained further; its config takes precedence over ``section``.
        base: what the adapter's config names as its model: a directory or hub id.
    """
    if section.rank is None and directory is None:
        return
    if directory:
        config = read_adapter_config(directory, "model.adapter")
    else:
        config = _peft().LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            target_modules=section.target_modules,
            modules_to_save=section.modules_to_save or None,
            use_rslora=section.rslora,
            use_dora=section.dora,
            task_type="CAUSAL_LM",
        )
    config.lora_dropout = section.dropout
    config.base_model_name_or_path = base
    config.inference_mode = False  # true would freeze the adapter
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        config.target_modules = _all_linear(model, config)
    try:
        inject(model, config, directory, quantize=section.quantize)
    except UserError as error:
        if directory is None:
            raise
        what = f"{directory} does not fit the model: {error.what}"
        raise UserError("model.adapter", what, "give an adapter that was trained on this very model") from None
    if directory is None and not isinstance(section.target_modules, str):
        _check_named_once(model, section.target_modules)


def _all_linear(model: PreTrainedModel, config: Any) -> list[str]:
    """Names of the linear layers, without the output head, `_is_read_past`, and names that peft takes for experts'."""
    head = model.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head]
    names = [name for name in names if not _is_read_past(model, name)]
    converted = copy.copy(config)
    converted.target_modules = set(names)
    converted = _as_converted(converted, model)
    return [name for name in names if name in converted.target_modules]


def _as_converted(config: Any, model: PreTrainedModel) -> Any:
    """The config as peft reads it: where transformers fused experts into one tensor, peft takes the names that their
    layers once had (and that other layers still have) for that tensor, as ``target_parameters``."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = copy.deepcopy(config)
    convert_peft_config_for_transformers(converted, model, None)
    return converted


def _is_read_past(model: nn.Module, name: str) -> bool:
    """Whether a layer is Mamba's projection of the output, or of time steps: an adapter would be skipped, since fast
    kernels take the former's weight, and the layer itself the latter's."""
    around, _, leaf = name.rpartition(".")
    return leaf in ("out_proj", "dt_proj") and {"A_log", "D"} <= model.get_submodule(around)._parameters.keys()


def read_adapter_config(directory: str | Path, where: str) -> Any:
    """peft's ``LoraConfig`` of an adapter's directory; ``where`` is the TOML's key, for messages."""
    path = Path(directory) / CONFIG_NAME
    todo = "give the directory of a LoRA adapter, with adapter_config.json and adapter_model.safetensors"
    try:
        values = read_json_object(path)
        kind = values["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(where, f"{path} is not an adapter's config ({error!r})", todo) from None
    if kind != "LORA":
        raise UserError(where, f"{directory} is an adapter of type {kind}", todo)
    peft = _peft()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about keys that a newer peft wrote
        config = peft.LoraConfig.from_pretrained(str(directory))
    plain = asdict(peft.LoraConfig())
    for name, value in asdict(config).items():
        # How adapters were initialised does not matter any more, unless the model's weights were changed, too.
        harmless = name == "init_lora_weights" and value in (True, False, "gaussian")
        if value != plain[name] and (value or plain[name]) and name not in _KNOWN | _INCIDENTAL and not harmless:
            what = f"{path} has {name} = {value!r}, which is not supported here"
            raise UserError(where, what, "use plain LoRA or DoRA")
    config.init_lora_weights = True
    return config


def inject(model: PreTrainedModel, config: Any, directory: Path | None = None, *, quantize: str = "none") -> Adapter:
    """Build the adapters of a peft config into a meta model, and freeze everything else."""
    weights = weights_of(model)
    leaves = _resolve_names(model, config)
    experts = list(find_experts(model)) if config.target_parameters else []
    tied = {name for pair in find_ties(model).items() for name in pair}
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ties and Conv1D, which `_check_layers` looks at
            _peft().inject_adapter_in_model(config, model, ADAPTER)
    except (ValueError, TypeError) as error:  # peft's refusals
        reason = str(error).split(". ")[0]
        raise UserError("lora", reason, "choose other lora.target_modules or lora.modules_to_save") from None
    _share_configs(model)
    config = model.peft_config[ADAPTER]
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)  # a set, in another order on every rank
    config.target_parameters = sorted(config.target_parameters or ()) or None
    replace_forward(model, experts)
    layers = [name for name, module in model.named_modules() if "lora_A" in module._modules]
    _check_layers(model, config, layers, tied)
    weights.adapter = Adapter(config, tuple(layers), directory, quantize, tuple(experts), leaves, weights.names)
    return weights.adapter


def _resolve_names(model: PreTrainedModel, config: Any) -> tuple[str, ...]:
    """Turn a config's names of modules into those of the model, in place. Returns what `_take_experts` does.

    Raises:
        UserError: a name stands for no module, or for some parts of experts alone.
    """
    weights_of(model).names.read_config(config)
    leaves = _take_experts(model, config)
    _check_names(model, config)
    return leaves


def _take_experts(model: PreTrainedModel, config: Any) -> tuple[str, ...]:
    """Turn names in ``target_modules`` that stand for experts into ``target_parameters``, in place.

    Returns:
        The names of an expert's layers in the adapter's file; () if it has no experts, or in one tensor.
    """
    key = "lora.target_modules"
    todo = f'name "{ALL_EXPERTS}" for the adapters of all experts, or leave such names out'
    is_list = not isinstance(config.target_modules, str)
    given = list(config.target_modules or ()) if is_list else []
    per_expert = leaves_in_files(model, config)
    taken = [name for name in given if name == ALL_EXPERTS or name in per_expert]
    if config.target_parameters or taken:
        wanted = target_parameters(model)
        parts = set(taken) - {ALL_EXPERTS}
        if parts and parts != set(per_expert):
            what = f"{', '.join(sorted(parts))}: experts in one tensor have adapters on all of {', '.join(per_expert)}"
            raise UserError(key, what, todo)
        named = config.target_parameters or wanted
        if matched_parameters(model, named) != matched_parameters(model, wanted):
            what = f"has target_parameters {sorted(named)}, and experts have {wanted}"
            raise UserError(key, what, todo)
        _check_expert_options(config)
        config.target_parameters = wanted
        config.target_modules = [name for name in given if name not in taken] if is_list else config.target_modules
    rest = copy.copy(config)
    rest.target_parameters = None
    try:
        left = _as_converted(rest, model).target_parameters
    except ValueError as error:  # some layers of experts without others
        raise UserError(key, str(error).rstrip("."), todo) from None
    if left:
        what = f"{', '.join(sorted(left))}: peft takes a name for parts of experts in one tensor, or for a router"
        raise UserError(key, what, todo)
    return tuple(per_expert) if config.target_parameters else ()


def leaves_in_files(model: PreTrainedModel, config: Any) -> list[str]:
    """The names by which an adapter's file has one expert's layers; none where it has all experts in one tensor.

    Args:
        config: peft's, of the adapter.
    """
    per_expert = stored_leaves(model)
    if not per_expert:
        return []
    trial = copy.copy(config)
    trial.target_modules = set(per_expert)
    trial.target_parameters = None
    # Without these, peft would not find them in a file.
    return per_expert if _as_converted(trial, model).target_parameters else []


def names_experts(model: PreTrainedModel, config_dir: Path) -> bool:
    """Whether an adapter's file would have a factor for each layer of each expert.

    Args:
        model: without adapters.
        config_dir: has the adapter's config.

    Raises:
        UserError: a name in its config stands for no module, or for some parts of experts alone.
    """
    if not find_experts(model):
        return False
    return bool(_resolve_names(model, read_adapter_config(config_dir, str(config_dir))))


def _check_named_once(model: PreTrainedModel, names: Collection[str]) -> None:
    """Refuse names that stood for the layers of each expert where other layers have them, too."""
    adapter = weights_of(model).adapter
    leaves = set(names).intersection(adapter.expert_leaves if adapter is not None else ())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in leaves:
            what = f"{', '.join(sorted(leaves))} name the experts' layers and {name}, which would get no adapter"
            raise UserError("lora.target_modules", what, f'name "{ALL_EXPERTS}" for the experts alone')


def _check_expert_options(config: Any) -> None:
    """Refuse what peft does not compute on experts, or computes in another way once it has read our export."""
    given = {
        "lora.dora": config.use_dora,
        "lora.rslora": config.use_rslora,  # peft doubles the rank of a file's gate and up, and takes its root
        "lora.dropout": config.lora_dropout,
        "rank_pattern or alpha_pattern": config.rank_pattern or config.alpha_pattern,
    }
    for where in (name for name, value in given.items() if value):
        raise UserError(where, "is not supported with adapters on experts", "leave it out, or the experts")


def _share_configs(model: PreTrainedModel) -> None:
    """Give modules that are trained whole the model's own configs. peft copies these, too, and a copy would not have
    what is set in the model's config later, such as its attention."""
    for wrapper in model.modules():
        copies = wrapper._modules.get("modules_to_save")
        if copies is None:
            continue
        original: Any = wrapper.original_module
        for name, module in copies.get_submodule(ADAPTER).named_modules():
            there = vars(original.get_submodule(name))
            shared = {key: value for key, value in there.items() if isinstance(value, PretrainedConfig)}
            vars(module).update(shared)


def _check_names(model: PreTrainedModel, config: Any) -> None:
    """Refuse names that match nothing: peft does so only if none matches, and never for modules to save."""
    names = [name for name, _ in model.named_modules() if name]
    linear = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    target = config.target_modules
    wanted = "lora.target_modules"
    if isinstance(target, str):
        try:
            found = target.lower() == "all-linear" or any(re.fullmatch(target, name) for name in names)
        except re.error as error:
            todo = 'use a regular expression, a list of names, or "all-linear"'
            raise UserError(wanted, f"{target!r} is not a regular expression ({error})", todo) from None
        if not found:
            raise UserError(wanted, f"{target!r} matches no whole name of a module", f"they are like {linear[-1]}")
    else:
        _check_ends(target, names, [*linear, *[ALL_EXPERTS] * bool(find_experts(model))], key=wanted)
    _check_ends(config.modules_to_save or (), names, names, key="lora.modules_to_save")


def _check_ends(ends: Any, names: list[str], suggested: list[str], *, key: str) -> None:
    for end in ends:
        if not any(f".{name}".endswith(f".{end}") for name in names):
            leaves = sorted({name.rpartition(".")[2] for name in suggested if not name.rpartition(".")[2].isdigit()})
            todo = did_you_mean(end, [*leaves, *suggested], otherwise=f"it has {', '.join(leaves[:8])}")
            raise UserError(key, f"{end!r} matches no module of the model", todo)


def _check_layers(model: PreTrainedModel, config: Any, layers: list[str], tied: set[str]) -> None:
    """Refuse what peft allows, but would not be trained, exported or merged."""
    key = "lora.target_modules"
    outside = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    for name in layers:
        module = model.get_submodule(name)
        if hasattr(module, "parameter_name") and (".modules_to_save." in name or ".original_module." in name):
            what = "holds experts that have adapters, and would train a copy of them whole"
            raise UserError("lora.modules_to_save", what, "leave one of the two out")
        if id(module) in outside:
            what = f"{name} is the model's embedding or output head"
            raise UserError(key, what, "leave it out; lora.modules_to_save trains a copy of it whole")
        if _is_read_past(model, name):
            what = f"{name} is a Mamba layer's output projection, whose weight fast kernels read past an adapter"
            raise UserError(key, what, "leave it out")
        if not isinstance(base_module(module), (nn.Linear, Conv1D)) and not hasattr(module, "parameter_name"):
            kind = type(base_module(module)).__name__
            raise UserError(key, f"{name} is a {kind}", "name linear layers alone")
        if config.use_dora and isinstance(base_module(module), Conv1D):
            raise UserError("lora.dora", f"{name} is a Conv1D, whose rows are its inputs", "leave lora.dora out")
    for name, _ in model.named_parameters():
        if f".modules_to_save.{ADAPTER}." in name and base_name(name) in tied:
            what = f"{base_name(name)} is one parameter in two places: a copy that is trained would untie them"
            raise UserError("lora.modules_to_save", what, "leave it out")


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """While it is open, ``model`` computes without its adapters, and without dropout.

    For passes without gradients: peft's own ``disable_adapter`` also changes which parameters are trained, which FSDP
    has recorded by then.
    """
    was_training = model.training
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    model.eval()
    for module in adapted:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in adapted:
            module._disable_adapters = False
        model.train(was_training)


@functools.cache
def _peft() -> Any:
    """peft, imported late: it takes seconds."""
    with importing("peft", where="lora"):
        import peft
    return peft
