"""Reductions over one rank in one buffer; FSDP2 copies gradients into a second one, although it sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2kit.torch_compat import reduce_scatter_single


class _Input(NamedTuple):
    """A buffer that gradients are copied into."""

    tensor: Tensor
    stream: Any
    """The stream on which it was asked for."""


class SharedBuffer:
    """For `FSDPModule.set_custom_reduce_scatter` of units that are sharded over one rank.

    A reduction asks for two buffers: for its input, on the stream of the backward, and for its output, on a stream of
    its own. Over one rank it then copies the first into the second. Here both are the same tensor, and a copy of a
    tensor into itself does nothing.

    The tensor belongs to the reductions' stream, as an output does without this: there it is cast or added to other
    gradients, so memory that is freed there is not used again too early. The backward writes to it, after waiting for
    the reductions before. The first tensor of all belongs to the backward's stream, since the other is not known yet;
    the allocator is told that both use it.

    All units of a model may have the same object, since their reductions come one after the other.
    """

    def __init__(self) -> None:
        self._input: _Input | None = None
        self._reductions: Any = None
        """The stream of the reductions, once one has asked for an output."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input of a reduction, or its output if its input was asked for last."""
        streams = torch.get_device_module(device)
        stream = streams.current_stream(device)
        given = self._input
        self._input = None
        is_output = given is not None and given.stream != stream and _is_like(given.tensor, size, dtype, device)
        if given is not None and is_output and self._reductions in (None, stream):
            if self._reductions is None and device.type != "cpu":
                given.tensor.record_stream(stream)
            self._reductions = stream
            return given.tensor
        if self._reductions in (None, stream):
            tensor = torch.empty(*size, dtype=dtype, device=device)
        else:
            with streams.stream(self._reductions):
                tensor = torch.empty(*size, dtype=dtype, device=device)
            # Reductions before this one may still read memory that they have freed.
            stream.wait_stream(self._reductions)
        self._input = _Input(tensor, stream)
        return tensor

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """The collective, which FSDP2 does not call over one rank."""
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _is_like(tensor: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    return tensor.shape == torch.Size(size) and tensor.dtype == dtype and tensor.device == device
