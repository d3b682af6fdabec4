"""`rounded_update` compiled: one kernel updates a whole shard where it lies.

By plain operations an update is some 35 kernels on float32 copies. The compiled one reads parameter, gradient and
moments once, writes parameter and moments once, and keeps everything between in registers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp2kit.job.distributed import to_device
from fsdp2kit.model.trials import INSTEAD, reason_of, succeeds
from fsdp2kit.optim.rounded_update import as_int32, counter, rounded_update, update_factors
from fsdp2kit.torch_compat import eager_rounding

logger = logging.getLogger(__name__)

_NAME = "the compiled update of optimizer.name = 'adamw_bf16'"

# Elements of a kernel at most: indices then fit into 32 bits. Beyond 2^31 torch.compile would make another kernel.
_MOST = 2**30

# The trial's shape. Both sides are odd, so that runs begin at every alignment.
_RUNS, _LENGTH = 3, 4001

# Unused rows at the start of a table. A row has 4 or 8 numbers, so the first used row begins at element 12 or 24.
_UNUSED = 3

Kernel = Callable[..., None]


class Shard(NamedTuple):
    """A rank's shard of a parameter, or a part of it: runs of elements that are neighbours in the whole parameter.

    Tensors are ``[runs, length]``, views of what an update reads and writes.
    """

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    counter: int
    """The first element's index in the whole parameter, flattened, plus the key of the noise."""
    stride: int
    """From the first element of a run to that of the next, in the whole parameter."""
    factors: list[float]
    """From `update_factors`."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.parameter, self.gradient, self.exp_avg, self.exp_avg_sq


def pieces(shard: Shard, *, largest: int) -> Iterator[Shard]:
    """The shard in parts of one run ``[1, n]``, of ``largest`` elements at most."""
    for run in range(len(shard.parameter)):
        start = shard.counter + run * shard.stride
        for views in zip(*(tensor[run : run + 1].split(largest, dim=1) for tensor in shard.tensors), strict=True):
            yield Shard(*views, counter=start, stride=0, factors=shard.factors)
            start += views[0].numel()


class UpdateKernel:
    """The compiled update of one optimizer.

    It is tried on made-up numbers before its first use. If it raises an error, then or later, or computes other
    numbers than the plain operations, one warning says so and the optimizer keeps the plain operations. Ranks may
    decide differently: no collective depends on it.

    What is compiled depends neither on the sizes nor on the step, so a run compiles a few times: for each dtype of
    parameters, for one run and for several, and for gradients that begin elsewhere in their memory.
    """

    def __init__(self) -> None:
        # Elementwise operations are to round as they do one by one: no fused multiply-add, and exact quotients.
        options: dict[str, Any] = {"fullgraph": True, "dynamic": True, "options": eager_rounding()}
        self._update_run: Kernel = torch.compile(_update_run, **options)
        self._update_runs: Kernel = torch.compile(_update_runs, **options)
        self._tried: set[tuple[torch.device, torch.dtype, bool]] = set()
        self._failed = False

    def update(self, shards: Sequence[Shard]) -> list[Shard]:
        """Update shards, all on one device, in place.

        Returns:
            The shards that were not updated: the plain operations are to do it.
        """
        left = []
        todo = []
        for shard in shards:
            if not shard.parameter.numel():
                continue
            if not self._can_update(shard):
                left.append(shard)
            elif shard.parameter.numel() > _MOST:
                todo += pieces(shard, largest=_MOST)
            else:
                todo.append(shard)
        for shard, place, factors in zip(todo, *_tables(todo), strict=True):
            try:
                if self._failed:
                    left.append(shard)
                else:
                    self._launch(shard, place, factors)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of the compiler: it comes before anything was written
                self._failed = True
                left.append(shard)
                logger.warning("%s cannot be used here (%s); %s", _NAME, reason_of(error), INSTEAD)
        return left

    def _can_update(self, shard: Shard) -> bool:
        if self._failed:
            return False
        several = len(shard.parameter) > 1
        key = shard.parameter.device, shard.parameter.dtype, several
        if key not in self._tried:
            self._tried.add(key)
            self._failed = not succeeds(_NAME, lambda: self._agrees(*key))
        return not self._failed

    def _launch(self, shard: Shard, place: Tensor, factors: Tensor) -> None:
        # torch.compile compiles again for views of tensors with another number of dimensions. `.data` is not a view.
        if len(shard.parameter) == 1:
            self._update_run(*(tensor[0].data for tensor in shard.tensors), place.data, factors.data)
        else:
            self._update_runs(*(tensor.data for tensor in shard.tensors), place.data, factors.data)

    def _agrees(self, device: torch.device, dtype: torch.dtype, several: bool) -> bool:
        """Whether the kernel computes what the plain operations do, but for float32's last bits.

        A device's compiler may round quotients and roots in its own way. That moves a float32 by a few of its last
        bits, of which a step of bfloat16 has 2^16: then one element of 8,000 takes its other neighbour. Without the
        same noise half of them would.
        """
        shard = _made_up_shard(_RUNS if several else 1, device, dtype)
        inputs = [tensor.flatten() for tensor in shard.tensors]
        counters = [
            counter(shard.counter, start=run * shard.stride, length=_LENGTH, device=device)
            for run in range(len(shard.parameter))
        ]
        ((place,), (factors,)) = _tables([shard])
        expected = rounded_update(*inputs, counters=torch.cat(counters), factors=factors)
        self._launch(shard, place, factors)
        found = (shard.parameter, shard.exp_avg, shard.exp_avg_sq)
        return all(_is_near(mine.flatten(), other) for mine, other in zip(found, expected, strict=True))


def _update_run(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, place: Tensor, factors: Tensor
) -> None:
    """Update ``[n]`` elements in place. It is written to be compiled.

    Args:
        place: int32 ``[4]``: the counter of the first element; what the others are is not read.
    """
    counters = place[0] + _numbers(len(parameter), place)
    _write(parameter, gradient, exp_avg, exp_avg_sq, counters, factors)


def _update_runs(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, place: Tensor, factors: Tensor
) -> None:
    """Update ``[runs, n]`` elements in place. It is written to be compiled.

    Args:
        place: int32 ``[4]``: the counter of the first element, and what a run's is above that of the run before.
    """
    runs, length = parameter.shape
    counters = place[0] + place[1] * _numbers(runs, place)[:, None] + _numbers(length, place)
    _write(parameter, gradient, exp_avg, exp_avg_sq, counters, factors)


def _numbers(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)


def _write(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, counters: Tensor, factors: Tensor
) -> None:
    updated, new_avg, new_avg_sq = rounded_update(parameter, gradient, exp_avg, exp_avg_sq, counters, factors)
    parameter.copy_(updated)
    exp_avg.copy_(new_avg)
    exp_avg_sq.copy_(new_avg_sq)


def _tables(shards: Sequence[Shard]) -> tuple[list[Tensor], list[Tensor]]:
    """What changes from step to step, on the device: for each shard its ``place`` and its ``factors``."""
    if not shards:
        return [], []
    device = shards[0].parameter.device
    places = [[as_int32(shard.counter), as_int32(shard.stride), 0, 0] for shard in shards]
    return (
        _rows(places, torch.int32, device),
        _rows([shard.factors for shard in shards], torch.float32, device),
    )


def _rows(rows: list[Any], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Each row as a tensor on the device, by one copy for all.

    torch.compile compiles again for a tensor that begins at the start of its memory, or at another alignment. If two
    sizes are equal in the first call, such as a length and an offset, it assumes that they always are. So the first
    three rows of a table are unused, and a row has a multiple of 16 bytes.
    """
    table = to_device(torch.tensor([*_UNUSED * [rows[0]], *rows], dtype=dtype), device)
    return list(table[_UNUSED:].unbind())


def _made_up_shard(runs: int, device: torch.device, dtype: torch.dtype) -> Shard:
    """Numbers as in training, with zeros among them, and counters that wrap round."""
    generator = torch.Generator().manual_seed(0)
    parameter, gradient, exp_avg, exp_avg_sq = torch.randn(4, runs, _LENGTH, generator=generator)
    exp_avg_sq.square_()
    for tensor in (gradient, exp_avg, exp_avg_sq):
        tensor[:, :10] = 0
    factors = update_factors(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3)
    # Copies, which begin where their memory does, as on a device.
    return Shard(
        parameter.to(device, dtype, copy=True),
        gradient.to(device, dtype, copy=True),
        exp_avg.to(device, torch.bfloat16),
        exp_avg_sq.to(device, torch.bfloat16),
        counter=2**31 - 1000,
        stride=2**30 + 12_345,
        factors=factors,
    )


def _is_near(found: Tensor, expected: Tensor) -> bool:
    """Whether elements are equal but for float32's last bits, and of bfloat16 at most 1 % took the other neighbour."""
    if found.dtype != torch.bfloat16:
        return torch.allclose(found, expected, rtol=1e-6 if found.dtype == torch.float32 else 1e-3, atol=1e-7)
    differs = (found != expected).float().mean().item()
    return differs < 0.01 and torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=0)
