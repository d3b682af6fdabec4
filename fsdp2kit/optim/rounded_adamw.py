"""AdamW whose moments, and parameters stored in bfloat16, are rounded stochastically.

Rounding to nearest loses changes of less than half a step of the format: a second moment in bfloat16 under beta2 =
0.999 never falls, and small updates of a bfloat16 parameter are lost (arXiv:2010.06192). Stochastic rounding keeps
both on average. Everything is computed in float32.

The noise of an element is a hash of its index in the whole tensor and of a key, not a draw from a generator. So no
generator state is saved, replicas round alike, and any mesh, device, or order of work gives the same numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp2kit.job.distributed import local_part
from fsdp2kit.optim.host_state import in_batches
from fsdp2kit.torch_compat import copy_each, local_slices

# Elements that are updated at a time: many small parameters, or a part of a large one. On a CPU they fit its cache. On
# a device they keep launches few, and their float32 copies take 0.3 GB.
_AT_ONCE_CPU = 2**18
ELEMENTS_AT_ONCE = 2**23
_TINY = torch.finfo(torch.bfloat16).tiny  # 2^-126, the smallest number of full precision, here as in float32


class _Piece(NamedTuple):
    """Neighbouring elements of this rank's shard of a parameter: views of what an update reads and writes."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    key: int
    start: int
    """Index of the first element in the whole parameter, flattened."""


class RoundedAdamW(Optimizer):
    """`torch.optim.AdamW` with ``exp_avg`` and ``exp_avg_sq`` in bfloat16.

    Parameters of bfloat16 are rounded stochastically as well; others are computed in float32 and keep their dtype.
    The noise is a function of (seed, number of the parameter, its step count, element): the same on any mesh.

    Args:
        params: parameters or groups, whole or sharded.
        seed: of the noise.
        elements_at_once: elements that are updated at a time; does not change results. Default: by the device.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        seed: int = 0,
        elements_at_once: int | None = None,
    ) -> None:
        self._seed, self._elements_at_once = seed, elements_at_once
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        numbers = itertools.count()
        for group in self.param_groups:
            alike: dict[tuple[int, torch.dtype, torch.device], list[_Piece]] = {}
            for parameter, number in zip(group["params"], numbers, strict=False):
                if parameter.grad is not None:
                    step = self._count(parameter)
                    pieces = self._pieces(parameter, key=noise_key(self._seed, number, step))
                    alike.setdefault((step, parameter.dtype, parameter.device), []).extend(pieces)
            for (step, _, device), pieces in alike.items():
                for batch in in_batches(pieces, lambda piece: piece.parameter.numel(), largest=self._at_once(device)):
                    _update(batch, group, step=step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the moments, which torch casts to the parameter's dtype, are bfloat16 again."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: state[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")})

    def _count(self, parameter: Tensor) -> int:
        """The number of this update of ``parameter``, from 1; makes its state first if there is none."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)
        state["step"] += 1
        return int(state["step"])

    def _pieces(self, parameter: Tensor, *, key: int) -> Iterator[_Piece]:
        state, size = self.state[parameter], self._at_once(parameter.device)
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        starts, length = _runs(parameter)
        flat = [local_part(tensor).reshape(-1) for tensor in tensors]
        for number, start in enumerate(starts):
            run = [tensor[number * length : (number + 1) * length].split(size) for tensor in flat]
            for views in zip(*run, strict=True):
                yield _Piece(*views, key=key, start=start)
                start += views[0].numel()

    def _at_once(self, device: torch.device) -> int:
        return self._elements_at_once or (_AT_ONCE_CPU if device.type == "cpu" else ELEMENTS_AT_ONCE)


def _update(pieces: list[_Piece], group: dict[str, Any], *, step: int) -> None:
    """AdamW (arXiv:1711.05101, algorithm 2) on all elements of ``pieces``; uses the moments before they are rounded.

    Products and sums are separate operations: fused, they would round differently at the end of a vector, and the
    numbers would depend on how elements are cut into pieces.
    """
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    parameters, gradients, exp_avgs, exp_avg_sqs, *_ = zip(*pieces, strict=True)
    parameter, gradient, exp_avg, exp_avg_sq = (
        torch.cat(tensors).float() for tensors in (parameters, gradients, exp_avgs, exp_avg_sqs)
    )

    exp_avg.mul_(beta1).add_(gradient * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_(gradient.square_().mul_(1 - beta2))
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(group["eps"])
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.sub_((exp_avg / denominator).mul_(lr / (1 - beta1**step)))

    # For all pieces at once: on a device, kernels for each piece would cost more than the work.
    counters = [counter(p.key, start=p.start, length=p.parameter.numel(), device=p.parameter.device) for p in pieces]
    noise = scramble(torch.cat(counters))
    # Below 2^-126 rounding is coarser, down to 0, and a next denominator could be eps alone; 0 itself stays.
    exp_avg_sq = torch.where(exp_avg_sq > 0, exp_avg_sq.clamp(min=_TINY), exp_avg_sq)
    _write(exp_avgs, round_stochastically(exp_avg, noise))
    _write(exp_avg_sqs, round_stochastically(exp_avg_sq, noise >> 16))
    if parameters[0].dtype == torch.bfloat16:
        parameter = round_stochastically(parameter, scramble(noise))
    _write(parameters, parameter)


def _write(targets: Sequence[Tensor], values: Tensor) -> None:
    copy_each(list(targets), values.split([target.numel() for target in targets]))


def _runs(parameter: Tensor) -> tuple[list[int], int]:
    """Where each run of neighbouring elements of this rank's shard begins in the whole parameter, and their length.

    A shard of rows is one run; one of another dimension, such as that of experts, is one for each row before it.
    """
    shape = parameter.shape or (1,)
    parts = local_slices(parameter) or (slice(0, 1),)
    cut = max((dim for dim, part in enumerate(parts) if part != slice(0, shape[dim])), default=0)
    inner = math.prod(shape[cut + 1 :])
    starts = [0]
    for part, size in zip(parts[:cut], shape[:cut], strict=True):
        starts = [start * size + row for start in starts for row in range(part.start, part.stop)]
    starts = [(start * shape[cut] + parts[cut].start) * inner for start in starts]
    return starts, (parts[cut].stop - parts[cut].start) * inner


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """``values`` in bfloat16: each becomes one of its two neighbours, the nearer one with the greater probability.

    The mean over the noise is the value itself. Values that bfloat16 has stay what they are, infinities and NaN
    included; above its largest, 3.39e38, the upper neighbour is infinity.

    Args:
        values: float32.
        noise: int32, of the same shape; the lower 16 bits are used.
    """
    # A bfloat16 is the upper half of a float32. Adding a uniform number to the lower half carries into the upper one
    # with probability lower half / 2^16; sign and magnitude are apart, so this holds for negative numbers as well.
    kept = ((noise & 0xFFFF) + values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isnan(), values, kept).bfloat16()


def noise_key(*parts: int) -> int:
    """A 32-bit key that is a function of ``parts``."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")


def counter(key: int, *, start: int, length: int, device: torch.device) -> Tensor:
    """What `scramble` makes noise of: int32 ``[length]``, for the elements from ``start`` on of a tensor."""
    first = (start + key + 2**31) % 2**32 - 2**31  # it wraps round, as int32 does
    return torch.arange(length, dtype=torch.int32, device=device).add_(first)


def scramble(bits: Tensor) -> Tensor:
    """Wellons' "lowbias32" (https://nullprogram.com/blog/2018/07/31/) of each int32, in place: a bijection."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        _fold(bits, shift).mul_(factor)  # modulo 2^32
    return _fold(bits, 16)


def _fold(bits: Tensor, shift: int) -> Tensor:
    """``bits ^= bits >> shift``, with zeros shifted in."""
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))
