"""The dtype ledger: in which dtype each thing lives, said at start and checked on the real tensors of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2kit.config.schema import FSDPConfig
from fsdp2kit.errors import RunFailure


@dataclass(frozen=True)
class DtypeLedger:
    """Names of dtypes, by what lives in them."""

    storage: str
    """Parameter shards."""
    compute: str
    """Unsharded parameters, and so matrix products and activations."""
    accumulation: str
    """Gradients between micro-batches."""
    reduction: str
    """Gradients on their way through the reduce-scatter."""
    optimizer: str
    """Moments."""
    output: str
    """What the units return."""
    export: str
    """The Hugging Face directory."""

    def __str__(self) -> str:
        return "dtypes: " + ", ".join(f"{name} {dtype}" for name, dtype in asdict(self).items())


def dtype_ledger(section: FSDPConfig, *, export: str) -> DtypeLedger:
    """The ledger that ``[fsdp]`` asks for."""
    return DtypeLedger(
        storage="float32",
        compute=section.param_dtype,
        accumulation=section.reduce_dtype,
        reduction=section.reduce_dtype,
        optimizer="float32",
        output=section.output_dtype or section.param_dtype,
        export=export,
    )


@contextlib.contextmanager
def checked(ledger: DtypeLedger, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Watch one optimizer step and compare what it used with the ledger.

    Raises:
        RunFailure: a shard, an unsharded parameter or a moment has another dtype than the ledger says.
    """
    seen: dict[str, set[torch.dtype]] = {"storage": set(), "compute": set(), "optimizer": set()}
    seen["storage"] = {parameter.dtype for parameter in model.parameters()}
    hooks = [
        module.register_forward_pre_hook(_Recorder(seen["compute"]))
        for module in model.modules()
        if isinstance(module, FSDPModule)  # around units, not inside: what is inside may be compiled
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    seen["optimizer"] = {
        value.dtype
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step"
    }
    for name, dtypes in seen.items():
        wrong = dtypes - {getattr(torch, getattr(ledger, name))}
        if wrong:
            found = ", ".join(sorted(map(str, wrong)))
            raise RunFailure(f"dtype ledger: {name} should be {getattr(ledger, name)}, but {found} was found")


class _Recorder:
    """A forward pre-hook that notes the dtypes of a unit's parameters: FSDP has gathered them by then."""

    def __init__(self, seen: set[torch.dtype]) -> None:
        self._seen = seen

    def __call__(self, module: Any, _inputs: Any) -> None:
        # Those of units inside this one are still sharded.
        self._seen.update(p.dtype for p in module.parameters() if not isinstance(p, DTensor))
