"""The path that attention takes, and which tokens of a sequence a context-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp2kit.torch_compat import all_gather_single, reduce_scatter_single

Method = Literal["ulysses", "ring", "allgather"]

VARLEN = "varlen"
"""The kernel that is ours: attention over segments, in place of a transformers implementation."""


class HeadShape(NamedTuple):
    """The heads of one attention call."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Heads of keys and values."""
    width: int
    """Of keys or of values, whichever is wider: the kernels take one width for both."""


@dataclass(frozen=True)
class FlashChoice:
    """The FlashAttention that computes "varlen" on CUDA, and what a model asks of it."""

    title: str
    """Its name for the user: "FlashAttention-3"."""
    impl: str | None
    """Its name in torch's registry; None: torch's own, FlashAttention-2."""
    reason: str = field(compare=False)
    shapes: tuple[HeadShape, ...] = ()
    windows: tuple[int | None, ...] = ()
    """How many tokens queries see at most; None: all before them."""
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.title} ({self.reason})"


@dataclass(frozen=True)
class AttentionPath:
    """What computes attention. Chosen once (`choose_path`); the model's attention and its batches are made for it."""

    method: Method | None
    """None without context parallelism."""
    kernel: str
    """A transformers attention implementation, or "varlen"."""
    reason: str = ""
    """Why this method."""
    kernel_reason: str = ""
    masks_every_row: bool = False
    """Whether every row gets our mask, also one of a single document, and also without context parallelism: where
    the model's own masks let packed documents see each other (gpt-oss), and where layers are compiled, which is done
    once for inputs with a mask and once more for inputs without."""
    recurrent_layers: int = 0
    """Layers that carry a state along the sequence, whose documents are kept apart and whose sequence is exchanged;
    0: there are none, or they run as they are."""
    flash: FlashChoice | None = None
    """What computes "varlen" on CUDA; None: another kernel, or not on CUDA."""

    def __str__(self) -> str:
        words = [] if self.method is None else [f"context parallelism: {self.method} ({self.reason})"]
        why = f" ({self.kernel_reason})" if self.kernel_reason else ""
        flash = f", computed by {self.flash}" if self.flash else ""
        words.append(f"attention: {self.kernel}{why}{flash}")
        if self.recurrent_layers:
            exchanged = "" if self.method is None else ", and each rank scans whole sequences with some of the heads"
            words.append(f"recurrent layers: {self.recurrent_layers}, each document alone{exchanged}")
        return ", ".join(words)


def chunks_of(rank: int, *, cp: int, length: int, method: Method | None) -> list[range]:
    """The stretches of a sequence of ``length`` tokens that ``rank`` holds, in the order in which it holds them.

    Ulysses gives each rank one stretch. Ring and allgather slice zigzag (head and tail): 2·cp chunks, of which
    rank r has number r and number 2·cp − 1 − r. A causal query at index t looks at t + 1 keys, so one early and one
    late chunk together are the same work for every rank. Without a method there is one chunk, the whole sequence.
    """
    if method is None:
        return [range(length)]
    if method == "ulysses":
        size = length // cp
        return [range(rank * size, (rank + 1) * size)]
    size = length // (2 * cp)
    return [range(number * size, (number + 1) * size) for number in (rank, 2 * cp - 1 - rank)]


def indices_of(rank: int, *, cp: int, length: int, method: Method | None) -> list[int]:
    """The indices in the sequence of the tokens that ``rank`` holds, in the order in which it holds them."""
    return [index for chunk in chunks_of(rank, cp=cp, length=length, method=method) for index in chunk]


def take_chunks(tensor: Tensor, chunks: list[range], *, dim: int = 1) -> Tensor:
    """Those chunks of ``tensor`` along ``dim``, one after the other."""
    parts = [tensor.narrow(dim, chunk.start, len(chunk)) for chunk in chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def gather_sequence(tensor: Tensor, *, group: ProcessGroup, method: Method, dim: int = 1) -> Tensor:
    """Gather logits or hidden states: the whole sequence in order, from the chunks that each rank of ``group`` holds.

    Differentiable: a rank's gradient is the sum over all ranks of the gradients of its own chunks.

    Args:
        tensor: ``[B, s, …]`` with ``dim = 1``, cut as `chunks_of` says for ``method``.

    Returns:
        ``[B, cp·s, …]``.
    """
    gathered = gather_chunks(tensor.movedim(dim, 0), group)
    return in_order(gathered, cp=group.size(), method=method).movedim(0, dim)


def gather_chunks(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """``[cp·s, …]`` of every rank's ``[s, …]``, rank after rank. Differentiable, as `gather_sequence`."""
    gathered: Tensor = _AllGather.apply(tensor, group)
    return gathered


def in_order(gathered: Tensor, *, cp: int, method: Method) -> Tensor:
    """Reorder ``[S, …]`` from rank after rank to the order of the sequence."""
    if method == "ulysses":
        return gathered
    parts = gathered.chunk(2 * cp)
    return torch.cat([*parts[0::2], *reversed(parts[1::2])])


def tokens_first(tensor: Tensor) -> Tensor:
    """``[B, H, s, …]`` with tokens before heads in memory, as kernels and layers have it; mostly no copy."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's ``[s, …]`` of the sum over ranks of ``[cp·s, …]``."""
    result = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    reduce_scatter_single(result, tensor.contiguous(), group=group)
    return result


class _AllGather(torch.autograd.Function):
    """All-gather along the first dimension; its transpose is `reduce_scatter`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        result = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
        all_gather_single(result, tensor.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.group), None
