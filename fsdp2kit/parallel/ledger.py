"""The dtype ledger: the dtype of parameters, gradients, moments and so on, printed at start and checked in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import RunFailure
from fsdp2kit.model.inspect import any_layer
from fsdp2kit.torch_compat import accumulated_gradients, accumulated_partial_sums, accumulated_shards

# What torchao's recipes cast inputs, weights and gradients of outputs to.
_FLOAT8_MATMULS = {
    "none": None,
    "tensorwise": "float8_e4m3fn and float8_e5m2",
    "rowwise": "float8_e4m3fn",
    "rowwise_with_gw_hp": "float8_e4m3fn (weight gradients: compute)",
}
# By optimizer: the dtype of moments that do not have the storage dtype, and how what is stored is rounded.
_MOMENTS = {
    "adamw_bf16": ("bfloat16", "stochastic"),
    "adamw_8bit": ("uint8 or float32", "nearest"),
}


@dataclass(frozen=True)
class DtypeLedger:
    """The dtypes of a run, by what is stored or computed in them."""

    storage: str
    """Parameter shards."""
    compute: str
    """Gathered parameters, and so matmuls and activations."""
    compute_by_class: dict[str, str]
    """Modules that compute in another dtype."""
    accumulation: str
    """Gradients between micro-batches: shards of them, or whole ones that are not reduced yet."""
    reduction: str
    """Gradients while they are reduced."""
    gradients: str
    """Reduced gradients, as the optimizer gets them."""
    optimizer: str
    """Moments. "uint8 or float32": quantised ones are stored as uint8 codes, the others as float32."""
    output: str
    """Outputs of the units."""
    export: str
    """The Hugging Face directory."""
    rounding: str = "nearest"
    """How the optimizer rounds what it stores; "stochastic" keeps small updates on average."""
    frozen: str | None = None
    """Shards of frozen parameters when adapters are trained; "uint8" is NF4. None: they are stored as the others."""
    kept: tuple[str, ...] = ()
    """Names, with ``*`` for numbers, of the tensors that stay in float32 as transformers keeps them, exported too."""
    matmuls: str | None = None
    """Inputs of the decoder layers' linear layers, where that is not ``compute``."""

    def __str__(self) -> str:
        dtypes = {name: dtype for name, dtype in asdict(self).items() if dtype is not None}
        dtypes |= {f"compute of {name}": dtype for name, dtype in dtypes.pop("compute_by_class").items()}
        rounding = dtypes.pop("rounding")
        kept = dtypes.pop("kept")
        line = "dtypes: " + ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        if kept:
            line += f"; float32 throughout, as transformers keeps them: {', '.join(kept)}"
        if rounding != "nearest":
            line += f"; what the optimizer stores in fewer bits than float32 gets {rounding} rounding"
        elif self.storage != "float32":
            line += (
                f"\nWARNING: parameters and moments are stored in {self.storage}: updates below 1/512 of a parameter "
                'are lost. fsdp.storage_dtype = "float32" keeps them'
            )
        return line


def dtype_ledger(config: TrainingConfig, *, export: str, replicas: int = 1, kept: Iterable[str] = ()) -> DtypeLedger:
    """The ledger that ``[fsdp]``, ``[optimizer]`` and ``[float8]`` ask for.

    Args:
        export: dtype of the Hugging Face directory.
        replicas: how many ranks hold the same shard; their gradients are reduced with the last micro-batch.
        kept: names of the tensors that stay in float32.
    """
    section = config.fsdp
    is_reduced = section.accumulates_shards and replicas == 1
    packed = ["uint8"] if config.lora.quantize == "nf4" else []
    moments, rounding = _MOMENTS.get(config.optimizer.name, (section.storage_dtype, "nearest"))
    return DtypeLedger(
        storage=section.storage_dtype,
        compute=section.param_dtype,
        compute_by_class={name: str(dtype) for name, dtype in section.class_dtypes.items()},
        accumulation=section.storage_dtype if is_reduced else section.reduce_dtype,
        reduction=section.reduce_dtype,
        gradients=section.storage_dtype,
        optimizer=moments,
        output=section.output_dtype or section.param_dtype,
        export=export,
        rounding=rounding,
        frozen=" or ".join(sorted({section.param_dtype, *section.class_dtypes.values(), *packed}))
        if config.trains_adapter
        else None,
        kept=tuple(dict.fromkeys(map(any_layer, kept))),
        matmuls=_FLOAT8_MATMULS[config.float8.recipe],
    )


@contextlib.contextmanager
def assert_ledger(ledger: DtypeLedger, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Observe one optimizer step and compare its dtypes with the ledger."""
    seen: dict[str, set[torch.dtype]] = {}
    """The dtypes found, by the ledger's names; of gathered parameters by the class of their module."""

    def note(name: str, values: Iterable[object]) -> None:
        seen.setdefault(name, set()).update(value.dtype for value in values if isinstance(value, Tensor))

    # Otherwise Dynamo traces the hook and FSDP2's weak references to modules, which may be dead by then.
    @torch.compiler.disable
    def watch_unit(unit: nn.Module, _inputs: object) -> None:
        # FSDP has gathered this unit's parameters by now, and still holds the gradients of earlier micro-batches.
        for module in _modules_of_unit(unit):
            for key, parameter in module.named_parameters(recurse=False):
                # Weights in 4 bits are unpacked when they are used.
                if not isinstance(parameter, DTensor) and parameter.is_floating_point():
                    kind = type(module).__name__.removeprefix("FSDP")  # which `fully_shard` puts in front
                    note("kept" if (id(module), key) in kept else f"compute of {kind}", [parameter])
        note("accumulation", [*accumulated_gradients(unit), *accumulated_partial_sums(unit)])
        for shard, gradient in accumulated_shards(unit):
            note("kept" if shard in exact else "accumulation", [gradient])

    def watch_update(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            note("kept" if parameter in exact else "gradients", [parameter.grad])

    kept = {
        (id(module), key)
        for name, module in model.named_modules()
        for key, _ in module.named_parameters(recurse=False)
        if any_layer(f"{name}.{key}") in ledger.kept
    }
    exact = {p for name, p in model.named_parameters() if any_layer(name) in ledger.kept}
    for parameter in (p for p in model.parameters() if isinstance(p, DTensor)):
        is_frozen = ledger.frozen and not parameter.requires_grad
        note("kept" if parameter in exact else "frozen" if is_frozen else "storage", [parameter])
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # The hooks are on units, not inside them, where layers may be compiled.
    hooks = [unit.register_forward_pre_hook(watch_unit) for unit in units]  # pyright: ignore[reportArgumentType]
    hooks.append(optimizer.register_step_pre_hook(watch_update))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for state in (state for parameter, state in optimizer.state.items() if parameter not in exact):
        note("optimizer", (_as_stored(value) for name, value in state.items() if name != "step"))
    by_class = {f"compute of {name}": dtype for name, dtype in ledger.compute_by_class.items()}
    for name, dtypes in seen.items():
        expected: str = by_class.get(name) or getattr(ledger, name.split(" of ")[0]) or ledger.compute
        expected = "float32" if name == "kept" else expected
        if wrong := dtypes - {getattr(torch, dtype) for dtype in expected.split(" or ")}:
            found = ", ".join(sorted(map(str, wrong)))
            raise RunFailure(f"dtype ledger: {name} should be {expected}, but {found} was found")


def _as_stored(value: object) -> object:
    """The tensor that stores a moment; torchao's quantised ones report float32 and store codes."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.codes if hasattr(local, "codes") else value


def _modules_of_unit(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and the modules inside it, without units inside it."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _modules_of_unit(child)
