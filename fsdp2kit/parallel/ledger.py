"""The dtype ledger: in which dtype each thing lives, said at start and checked on the real tensors of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2kit.config.schema import Float8Config, FSDPConfig
from fsdp2kit.errors import RunFailure
from fsdp2kit.torch_compat import accumulated_gradients

# What torchao's recipes cast inputs, weights and gradients of outputs to.
_FLOAT8_PRODUCTS = {
    "none": None,
    "tensorwise": "float8_e4m3fn and float8_e5m2",
    "rowwise": "float8_e4m3fn",
    "rowwise_with_gw_hp": "float8_e4m3fn (weight gradients: compute)",
}
# By optimizer: the dtype of moments that do not have the storage dtype, and how what is stored is rounded.
_MOMENTS = {
    "adamw_bf16": ("bfloat16", "stochastic"),
    "adamw_8bit": ("uint8 or float32", "nearest"),
    "adamw_4bit": ("uint8 or float32", "stochastic"),
}


@dataclass(frozen=True)
class DtypeLedger:
    """Names of dtypes, by what lives in them."""

    storage: str
    """Parameter shards."""
    compute: str
    """Unsharded parameters, and so matrix products and activations."""
    compute_by_class: dict[str, str]
    """Modules that compute in another dtype."""
    accumulation: str
    """Gradients between micro-batches."""
    reduction: str
    """Gradients on their way through the reduce-scatter."""
    gradients: str
    """Reduced gradients, as the optimizer gets them."""
    optimizer: str
    """Moments; quantised ones are codes in uint8 beside those that are not ("uint8 or float32")."""
    output: str
    """What the units return."""
    export: str
    """The Hugging Face directory."""
    rounding: str = "nearest"
    """How the optimizer rounds what it stores; "stochastic" keeps small updates on average."""
    gathered: str | None = None
    """Weights of linear maps on their way through the all-gather, where that is not ``compute``."""
    products: str | None = None
    """What the linear maps of the decoder layers multiply, where that is not ``compute``."""

    def __str__(self) -> str:
        dtypes = {name: dtype for name, dtype in asdict(self).items() if dtype is not None}
        dtypes |= {f"compute of {name}": dtype for name, dtype in dtypes.pop("compute_by_class").items()}
        rounding = dtypes.pop("rounding")
        line = "dtypes: " + ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        if rounding != "nearest":
            line += f"; what the optimizer stores in fewer bits than float32 gets {rounding} rounding"
        elif self.storage != "float32":
            line += (
                f"\nWARNING: parameters and moments are stored in {self.storage}: updates below 1/512 of a parameter "
                'are lost. fsdp.storage_dtype = "float32" keeps them'
            )
        return line


def dtype_ledger(
    section: FSDPConfig, *, export: str, optimizer: str = "adamw", float8: Float8Config | None = None
) -> DtypeLedger:
    """The ledger that ``[fsdp]`` and ``[float8]`` ask for.

    Args:
        export: dtype of the Hugging Face directory.
        optimizer: ``optimizer.name``.
    """
    moments, rounding = _MOMENTS.get(optimizer, (section.storage_dtype, "nearest"))
    return DtypeLedger(
        storage=section.storage_dtype,
        compute=section.param_dtype,
        compute_by_class={name: str(dtype) for name, dtype in section.class_dtypes.items()},
        accumulation=section.reduce_dtype,
        reduction=section.reduce_dtype,
        gradients=section.storage_dtype,
        optimizer=moments,
        output=section.output_dtype or section.param_dtype,
        export=export,
        rounding=rounding,
        gathered="float8_e4m3fn" if float8 and float8.all_gather else None,
        products=_FLOAT8_PRODUCTS[float8.recipe] if float8 else None,
    )


@contextlib.contextmanager
def checked(ledger: DtypeLedger, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Watch one optimizer step and compare what it used with the ledger.

    Raises:
        RunFailure: a shard, an unsharded parameter, an accumulated or reduced gradient, or a moment has another dtype
            than the ledger says.
    """
    seen = _Seen()
    seen.note("storage", (p for p in model.parameters() if isinstance(p, DTensor)))
    hooks = [
        module.register_forward_pre_hook(seen.watch_unit)
        for module in model.modules()
        if isinstance(module, FSDPModule)  # around units, not inside: what is inside may be compiled
    ]
    hooks.append(optimizer.register_step_pre_hook(seen.watch_update))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for state in optimizer.state.values():
        seen.note("optimizer", (_as_stored(value) for name, value in state.items() if name != "step"))
    by_class = {f"compute of {name}": dtype for name, dtype in ledger.compute_by_class.items()}
    for name, dtypes in seen.dtypes.items():
        expected: str = by_class.get(name) or getattr(ledger, name.split(" of ")[0]) or ledger.compute
        if wrong := dtypes - {getattr(torch, dtype) for dtype in expected.split(" or ")}:
            found = ", ".join(sorted(map(str, wrong)))
            raise RunFailure(f"dtype ledger: {name} should be {expected}, but {found} was found")


class _Seen:
    """The dtypes of real tensors, by the ledger's words; unsharded parameters by the class of their module as well."""

    def __init__(self) -> None:
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def note(self, name: str, values: Iterable[object]) -> None:
        self.dtypes.setdefault(name, set()).update(value.dtype for value in values if isinstance(value, Tensor))

    def watch_unit(self, unit: nn.Module, _inputs: object) -> None:
        """A forward pre-hook: FSDP has gathered this unit's parameters by then, and still has the gradients of
        earlier micro-batches."""
        for module in _modules_of_unit(unit):
            parameters = [p for p in module.parameters(recurse=False) if not isinstance(p, DTensor)]
            if parameters:
                self.note(f"compute of {_class_of(module)}", parameters)
            in_float8 = [p._data for p in parameters if hasattr(p, "_data")]  # torchao's, which say the compute dtype
            if in_float8:
                self.note("gathered", in_float8)
        self.note("accumulation", accumulated_gradients(unit))

    def watch_update(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """A step pre-hook."""
        self.note("gradients", (p.grad for group in optimizer.param_groups for p in group["params"]))


def _as_stored(value: object) -> object:
    """What a moment is kept in: torchao's quantised ones call themselves float32."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return getattr(local, "codes", value)


def _class_of(module: nn.Module) -> str:
    """The name of its class, without what `fully_shard` puts before it."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def _modules_of_unit(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and what is inside it, without the units inside."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _modules_of_unit(child)
