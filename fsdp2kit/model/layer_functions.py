"""The functions that a layer's ``forward`` looks up in its file, and how one layer is given others.

transformers calls the kernels of flash-linear-attention, mamba-ssm and causal-conv1d by such functions wherever these
packages are installed, whatever the device. They are written for CUDA: what runs here on a CPU or on meta (small
copies, plans) needs transformers' own functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

Function = Callable[..., Any]


def functions_of(module: nn.Module) -> dict[str, Function]:
    """The functions that a module's ``forward`` calls by a name of its file, by name."""
    forward = _forward_of(module)
    code = getattr(forward, "__code__", None)
    if code is None:
        return {}
    scope = forward.__globals__
    return {name: scope[name] for name in code.co_names if callable(scope.get(name))}


def transformers_own(function: Function) -> Function:
    """The function without a kernel in its place."""
    return inspect.unwrap(function)


def use_functions(module: nn.Module, functions: Mapping[str, Function]) -> None:
    """Let ``module`` call ``functions`` in place of those of its file with these names.

    It gets a copy of its ``forward`` with names of its own: other models of the same class keep theirs. What it was
    given before stays.
    """
    forward = _forward_of(module)
    scope = {**forward.__globals__, **functions}
    # torch.compile takes the names of a scope without __name__ from the scope itself, not from the module.
    scope.pop("__name__", None)
    own = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    vars(module)["forward"] = MethodType(own, module)


def use_no_kernels(model: PreTrainedModel) -> None:
    """Let every layer of ``model`` call transformers' own functions, also where packages of kernels are installed."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            continue  # its forward is wrapped in more than kernels
        file = type(module).__module__  # what other files wrap (context managers, say) is no kernel
        replaced = {
            name: transformers_own(each)
            for name, each in functions_of(module).items()
            if hasattr(each, "__wrapped__") and each.__module__ == file
        }
        if replaced:
            use_functions(module, replaced)


def _forward_of(module: nn.Module) -> Any:
    """The class's ``forward`` without what wraps it, or the copy that `use_functions` made of it."""
    forward: Any = inspect.unwrap(type(module).forward)
    given = vars(module).get("forward")
    is_copy = given is not None and getattr(given, "__code__", None) is forward.__code__
    return given if is_copy else forward
