"""AdamW whose moments, and parameters stored in bfloat16, are rounded stochastically.

Rounding to nearest loses changes of less than half a step of the format: a second moment in bfloat16 under beta2 =
0.999 never falls, and small updates of a bfloat16 parameter are lost (arXiv:2010.06192). Stochastic rounding keeps
both on average. Everything is computed in float32.

The noise of an element is a hash of its index in the whole tensor and of a key, not a draw from a generator. So no
generator state is saved, replicas round alike, and any mesh, device, or order of work has the same noise. On one kind
of device numbers do not depend on the mesh. Another kind may compute another last bit of float32 (a CPU's square
root does), and then one element of some 8,000 is rounded to the other of its two neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp2kit.job.distributed import local_part, to_device
from fsdp2kit.optim.host_state import in_batches
from fsdp2kit.optim.rounded_update import counter, noise_key, rounded_update, update_factors
from fsdp2kit.optim.update_kernel import Shard, UpdateKernel, pieces
from fsdp2kit.torch_compat import copy_each, local_slices

# Elements that plain operations update at a time: many small parameters, or a part of a large one. On a CPU they fit
# its cache. On a device they keep launches few, and their float32 copies take 0.3 GB.
_AT_ONCE_CPU = 2**18
ELEMENTS_AT_ONCE = 2**23


class RoundedAdamW(Optimizer):
    """`torch.optim.AdamW` with ``exp_avg`` and ``exp_avg_sq`` in bfloat16.

    Parameters of bfloat16 are rounded stochastically as well; others are computed in float32 and keep their dtype.
    The noise is a function of (seed, number of the parameter, its step count, element): the same on any mesh.

    Args:
        params: parameters or groups, whole or sharded.
        seed: of the noise.
        elements_at_once: elements that plain operations update at a time; does not change results. Default: by the
            device.
        compiles: whether one compiled kernel updates a shard. Default: on CUDA, where a few seconds of compiling save
            some 35 kernels and their memory; a CPU's plain operations need no compiler.
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
        compiles: bool | None = None,
    ) -> None:
        self._seed = seed
        self._elements_at_once = elements_at_once
        self._compiles = compiles
        self._kernel: UpdateKernel | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        by_device: dict[torch.device, list[Shard]] = {}
        numbers = itertools.count()
        for group in self.param_groups:
            for parameter, number in zip(group["params"], numbers, strict=False):
                if parameter.grad is not None:
                    by_device.setdefault(parameter.device, []).extend(self._shards(parameter, group, number=number))
        for device, shards in by_device.items():
            left = self._update_by_kernel(shards) if self._uses_kernel(device) else shards
            self._update_by_plain_operations(left, device)

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

    def _shards(self, parameter: Tensor, group: dict[str, Any], *, number: int) -> list[Shard]:
        """This rank's shard of a parameter for its next update: in one, or in one for each run of neighbours."""
        step = self._count(parameter)
        values = {name: group[name] for name in ("betas", "eps", "weight_decay")}
        factors = update_factors(lr=float(group["lr"]), step=step, **values)
        key = noise_key(self._seed, number, step)
        state = self.state[parameter]
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        local = [local_part(tensor).detach() for tensor in tensors]
        starts, length = _runs(parameter)
        if not starts or not length:
            return []
        runs = [tensor.reshape(-1, length) for tensor in local]
        strides = {later - earlier for earlier, later in itertools.pairwise(starts)}
        if len(strides) <= 1:
            return [Shard(*runs, counter=key + starts[0], stride=sum(strides), factors=factors)]
        return [
            Shard(*(tensor[run : run + 1] for tensor in runs), counter=key + start, stride=0, factors=factors)
            for run, start in enumerate(starts)
        ]

    def _uses_kernel(self, device: torch.device) -> bool:
        return device.type == "cuda" if self._compiles is None else self._compiles

    def _update_by_kernel(self, shards: list[Shard]) -> list[Shard]:
        """Update the shards that the compiled kernel takes, and return the others."""
        if self._kernel is None:
            self._kernel = UpdateKernel()
        return self._kernel.update(shards)

    def _update_by_plain_operations(self, shards: list[Shard], device: torch.device) -> None:
        largest = self._elements_at_once or (_AT_ONCE_CPU if device.type == "cpu" else ELEMENTS_AT_ONCE)
        alike: dict[tuple[torch.dtype, tuple[float, ...]], list[Shard]] = {}
        for shard in shards:
            key = shard.parameter.dtype, tuple(shard.factors)
            alike.setdefault(key, []).extend(pieces(shard, largest=largest))
        for parts in alike.values():
            for batch in in_batches(parts, lambda part: part.parameter.numel(), largest=largest):
                _update(batch)


def _update(parts: list[Shard]) -> None:
    """Update all elements of ``parts``, which have one dtype and the same factors.

    On a device, kernels for each part would cost more than the work.
    """
    device = parts[0].parameter.device
    parameters, gradients, exp_avgs, exp_avg_sqs = zip(*(part.tensors for part in parts), strict=True)
    inputs = [torch.cat(tensors, dim=1)[0] for tensors in (parameters, gradients, exp_avgs, exp_avg_sqs)]
    counters = [counter(part.counter, start=0, length=part.parameter.numel(), device=device) for part in parts]
    factors = to_device(torch.tensor(parts[0].factors, dtype=torch.float32), device)
    updated, new_avg, new_avg_sq = rounded_update(*inputs, counters=torch.cat(counters), factors=factors)
    _write(parameters, updated)
    _write(exp_avgs, new_avg)
    _write(exp_avg_sqs, new_avg_sq)


def _write(targets: Sequence[Tensor], values: Tensor) -> None:
    parts = values[None].split([target.numel() for target in targets], dim=1)
    copy_each(list(targets), parts)


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
