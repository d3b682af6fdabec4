"""Attention over segments as one operator: what torch.compile and selective checkpointing see of a ring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp2kit.parallel.context_parallel.allgather import allgather_backward, allgather_forward
from fsdp2kit.parallel.context_parallel.kernels import Partial, attend_backward, zeros_for
from fsdp2kit.parallel.context_parallel.ring import ring_backward, ring_forward
from fsdp2kit.parallel.context_parallel.segments import read_segments
from fsdp2kit.torch_compat import group_named

_FORWARD = {"ring": ring_forward, "allgather": allgather_forward}
_BACKWARD = {"ring": ring_backward, "allgather": allgather_backward}


@torch.library.custom_op("fsdp2kit::blockwise_attention", mutates_args=())
def blockwise_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float, exchange: str, group: str
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys that ``segments`` name.

    Args:
        query: ``[B, H, s, D]``; key, value: ``[B, G, s, D]``, H a multiple of G.
        segments: from `fsdp2kit.parallel.context_parallel.segments.plan_segments`, on the host.
        exchange: "ring" or "allgather"; "none": all keys are here.
        group: name of the process group to exchange with.

    Returns:
        ``[B, H, s, D]`` in the query's dtype, tokens first in memory, and the log-sum-exp ``[B, H, s]``, float32.
    """
    if exchange == "none":
        partial = Partial(query)
        partial.attend(query, key, value, read_segments(segments), scale=scale)
    else:
        forward = _FORWARD[exchange]
        partial = forward(query, key, value, read_segments(segments), scale=scale, group=group_named(group))
    return partial.out.to(query.dtype), partial.lse


@blockwise_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float, exchange: str, group: str
) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = query.shape
    out = query.new_empty((batch, length, heads, width)).transpose(1, 2)
    return out, query.new_empty((batch, length, heads), dtype=torch.float32).transpose(1, 2)


@torch.library.custom_op("fsdp2kit::blockwise_attention_backward", mutates_args=())
def blockwise_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    scale: float,
    exchange: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtypes."""
    planned = read_segments(segments)
    if exchange == "none":
        grads = (zeros_for(query), zeros_for(key), zeros_for(value))
        attend_backward(grads, grad_out, query, key, value, out, lse, planned, scale=scale)
    else:
        backward = _BACKWARD[exchange]
        grads = backward(grad_out, query, key, value, out, lse, planned, scale=scale, group=group_named(group))
    grad_query, grad_key, grad_value = (grad.to(query.dtype).contiguous() for grad in grads)
    return grad_query, grad_key, grad_value


@blockwise_attention_backward.register_fake
def _(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    scale: float,
    exchange: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return grad_query, grad_key, grad_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, segments, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, segments)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, segments = ctx.saved_tensors
    grads = blockwise_attention_backward(grad_out, query, key, value, out, lse, segments, *ctx.rest)
    return (*grads, None, None, None, None)


blockwise_attention.register_autograd(_backward, setup_context=_keep)
