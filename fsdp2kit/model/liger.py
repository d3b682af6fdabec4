"""Liger's Triton kernels for norms, RoPE and gated MLPs: https://github.com/linkedin/Liger-Kernel."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError, check_installed, importing

_KEY = "model.liger"
_replaced: list[tuple[dict[str, Any], str, Any]] = []  # functions of transformers' modules: where, name, as they were


def check_liger(section: ModelConfig, model: PreTrainedModel, *, device: torch.device | None) -> None:
    """Refuse ``model.liger`` on a device or for an architecture that Liger does not support, or without the package.

    Args:
        device: None: not known; then only that the package is installed is checked.
    """
    if not section.liger:
        return
    if device is None:
        check_installed("liger_kernel", where=_KEY)
        return
    if device.type != "cuda":
        raise UserError(_KEY, f"Liger's kernels do not run on a {device.type.upper()}", "leave it out, or use a GPU")
    with importing("liger_kernel", where=_KEY):
        from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
            MODEL_TYPE_TO_APPLY_LIGER_FN,
        )
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        what = f"Liger has no kernels for the architecture {model.config.model_type!r}"
        raise UserError(_KEY, what, "leave it out")


def apply_liger(section: ModelConfig, model: PreTrainedModel, *, device: torch.device) -> None:
    """With ``model.liger``, give the modules of ``model`` Liger's forward, in place; parameters stay.

    Cross-entropy is left out: the loss is ours (`attach_loss`). RoPE is a function in the architecture's module, so in
    this process every model of that architecture on a GPU gets Liger's, until `give_back`; one on the CPU keeps
    transformers'.
    """
    if not section.liger:
        return
    check_liger(section, model, device=device)
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        _apply_liger_kernel_to_instance,  # what transformers' own `use_liger_kernel` calls
    )

    with _kept_for_others(model):
        try:
            _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
        except Exception as error:  # Liger's patches do not fit this version of transformers
            what = f"Liger cannot change {type(model).__name__} ({error})"
            raise UserError(_KEY, what, "leave it out, or use another version of liger-kernel") from None


@contextmanager
def _kept_for_others(model: PreTrainedModel) -> Iterator[None]:
    """Undo what Liger changes for the whole process, beside the model's own modules.

    Models that are built later (small copies, on the CPU) look up classes and functions in transformers' modules, in
    `torch.nn` and in the table of activations. Classes are put back: this model's modules have theirs. A function
    (RoPE) is looked up at every call, so it is replaced by one that looks at the device.
    """
    names = {type(module).__module__ for module in model.modules()}
    namespaces: list[dict[str, Any]] = [vars(sys.modules[name]) for name in names]
    namespaces += [vars(torch.nn), ACT2FN]
    # By dict's own methods: the table of activations returns instances.
    before = [dict(dict.items(namespace)) for namespace in namespaces]
    yield
    for namespace, kept in zip(namespaces, before, strict=True):
        for name, plain in kept.items():
            kernel = dict.get(namespace, name)
            if kernel is plain:
                continue
            if callable(plain) and not isinstance(plain, type):
                _replaced.append((namespace, name, plain))
                plain = _by_device(plain, kernel)
            dict.__setitem__(namespace, name, plain)


def give_back() -> None:
    """Undo what `apply_liger` did for the whole process: its models' own modules keep Liger's forward.

    Selective recomputation needs it: Liger's RoPE writes over its arguments, which are results that are kept.
    """
    while _replaced:
        namespace, name, plain = _replaced.pop()
        dict.__setitem__(namespace, name, plain)


def _by_device(plain: Callable[..., Any], kernel: Any) -> Callable[..., Any]:
    """A function whose first argument is query states: ``plain`` on the CPU, elsewhere ``kernel``."""

    @functools.wraps(plain)
    def function(states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (plain if states.device.type == "cpu" else kernel)(states, *args, **kwargs)

    return function
