"""AdamW that keeps its moments in few bits and rounds them, and parameters stored in bfloat16, stochastically.

Rounded to nearest, what changes by less than half a step of its format does not change at all: a second moment in
bfloat16 under beta2 = 0.999 never falls, and small updates of a bfloat16 parameter are lost. Rounded stochastically
(see `fsdp2kit.train.rounding`), both are kept on average. Everything is computed in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from fsdp2kit.train.moments import Field, MomentFormat
from fsdp2kit.train.rounding import noise_key, noise_of, round_stochastically, scramble

# Elements that are updated at a time, of many small parameters or a part of a large one. On a CPU they stay in its
# cache; elsewhere launches are few, and the float32 copies take 0.3 GB.
_AT_ONCE_CPU = 2**18
_AT_ONCE = 2**23


@dataclass(frozen=True)
class _Piece:
    """Neighbouring elements of this rank's shard of a parameter: views of what an update reads and writes."""

    parameter: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    """The fields that hold both."""
    key: int
    start: int
    """Place of the first in the whole parameter."""


class RoundedAdamW(Optimizer):
    """`torch.optim.AdamW` with ``exp_avg`` and ``exp_avg_sq`` in a format of fewer bits.

    Parameters of bfloat16 are rounded stochastically as well; others are computed in float32 and keep their dtype.
    The noise is a function of (seed, number of the parameter, its step count, element): the same on any mesh.

    Args:
        params: parameters or groups, whole or sharded over their first dimension.
        format_of: how the moments of a parameter are stored.
        seed: of the noise.
        elements_at_once: are updated at a time; changes no number. Default: by the device.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        format_of: Callable[[Tensor], MomentFormat],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        seed: int = 0,
        elements_at_once: int | None = None,
    ) -> None:
        self._format_of = format_of
        self._seed = seed
        self._elements_at_once = elements_at_once
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        numbers = itertools.count()
        for group in self.param_groups:
            alike: dict[tuple[int, torch.dtype, torch.device, MomentFormat], list[_Piece]] = {}
            for parameter, number in zip(group["params"], numbers, strict=False):
                if parameter.grad is not None:
                    kept = self._format_of(parameter)
                    step = self._count(parameter, kept)
                    key = noise_key(self._seed, number, step)
                    pieces = self._pieces(parameter, kept, key=key)
                    alike.setdefault((step, parameter.dtype, parameter.device, kept), []).extend(pieces)
            for (step, _, device, kept), pieces in alike.items():
                for bucket in _buckets(pieces, self._at_once(device)):
                    _update(bucket, kept, group, step=step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts to the dtype of the parameter: here every field keeps its dtype and its values."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if parameter in self.state:
                given = state_dict["state"][number]
                for name in self._format_of(parameter).fields:
                    self.state[parameter][name] = given[name].to(parameter.device, copy=True)

    def _count(self, parameter: Tensor, kept: MomentFormat) -> int:
        """The number of the update that ``parameter`` is about to get; its state is made where there is none."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name, field in kept.fields.items():
                state[name] = _zeros(parameter, field)
        state["step"] += 1
        return int(state["step"])

    def _pieces(self, parameter: Tensor, kept: MomentFormat, *, key: int) -> Iterator[_Piece]:
        whole = max(field.elements for field in kept.fields.values())  # what cannot be cut
        size = max(self._at_once(parameter.device) // whole, 1) * whole
        values = _local(parameter).view(-1).split(size)
        gradients = _local(parameter.grad).reshape(-1).split(size)
        fields = [
            _local(self.state[parameter][name]).view(-1).split(size // field.elements)
            for name, field in kept.fields.items()
        ]
        start = _first_element(parameter)
        for value, gradient, *moments in zip(values, gradients, *fields, strict=True):
            yield _Piece(value, gradient, tuple(moments), key=key, start=start)
            start += value.numel()

    def _at_once(self, device: torch.device) -> int:
        return self._elements_at_once or (_AT_ONCE_CPU if device.type == "cpu" else _AT_ONCE)


def _update(pieces: list[_Piece], kept: MomentFormat, group: dict[str, Any], *, step: int) -> None:
    """AdamW (arXiv:1711.05101, algorithm 2) on all elements of ``pieces``, with moments as they were before rounding.

    Products and sums are separate operations: fused, they would round differently at the end of a vector, and the
    numbers would depend on how elements are cut into pieces.
    """
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    parameter = torch.cat([piece.parameter for piece in pieces]).float()
    gradient = torch.cat([piece.gradient for piece in pieces]).float()
    exp_avg, exp_avg_sq = kept.read([torch.cat(field) for field in _fields(pieces)])

    exp_avg.mul_(beta1).add_(gradient * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_(gradient.square_().mul_(1 - beta2))
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(group["eps"])
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.sub_((exp_avg / denominator).mul_(lr / (1 - beta1**step)))

    bits = torch.cat([_noise(piece) for piece in pieces])
    for targets, values in zip(_fields(pieces), kept.rounded(exp_avg, exp_avg_sq, bits), strict=True):
        _write(targets, values)
    if pieces[0].parameter.dtype == torch.bfloat16:
        parameter = round_stochastically(parameter, scramble(bits))
    _write([piece.parameter for piece in pieces], parameter)


def _fields(pieces: list[_Piece]) -> list[tuple[Tensor, ...]]:
    """For each field, that of every piece."""
    return list(zip(*(piece.moments for piece in pieces), strict=True))


def _zeros(parameter: Tensor, field: Field) -> Tensor:
    """A field of moments of zeros, in the rows of ``parameter``, which are sharded as the parameter's are."""
    if field.elements == 1:
        return torch.zeros_like(parameter, dtype=field.dtype, requires_grad=False)
    shape = (*parameter.shape[:-1], parameter.shape[-1] // field.elements)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=field.dtype, device=parameter.device)
    local = parameter.to_local()
    return DTensor.from_local(
        torch.zeros((*local.shape[:-1], shape[-1]), dtype=field.dtype, device=local.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def _noise(piece: _Piece) -> Tensor:
    return noise_of(piece.key, start=piece.start, length=piece.parameter.numel(), device=piece.parameter.device)


def _write(targets: Sequence[Tensor], values: Tensor) -> None:
    for target, part in zip(targets, values.split([target.numel() for target in targets]), strict=True):
        target.copy_(part)


def _buckets(pieces: Iterable[_Piece], elements: int) -> Iterator[list[_Piece]]:
    """The pieces in lists of at most ``elements`` elements, or of one piece."""
    bucket: list[_Piece] = []
    size = 0
    for piece in pieces:
        if bucket and size + piece.parameter.numel() > elements:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += piece.parameter.numel()
    if bucket:
        yield bucket


def _first_element(parameter: Tensor) -> int:
    """Where this rank's shard begins in the whole parameter, counted in elements."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, coordinates = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    spread = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard()]
    if not spread or coordinates is None:
        return 0
    if len(spread) > 1 or parameter.placements[spread[0]] != Shard(0):
        raise NotImplementedError(f"RoundedAdamW wants parameters sharded by rows, not {parameter.placements}")
    rows = -(-parameter.shape[0] // mesh.size(spread[0]))  # of each rank; the last may have fewer
    return coordinates[spread[0]] * rows * math.prod(parameter.shape[1:])


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
