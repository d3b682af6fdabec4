"""Attention over segments as one operator, Ulysses' attention, and their registration with transformers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_world_size
from transformers import AttentionInterface, PreTrainedModel

from fsdp2kit.parallel.context_parallel.exchange import (
    HeadShare,
    attend_blocks,
    attend_blocks_backward,
    build_exchange,
    heads_to_sequence,
    sequence_to_heads,
    share_heads,
)
from fsdp2kit.parallel.context_parallel.layout import VARLEN, AttentionPath
from fsdp2kit.parallel.context_parallel.segments import SegmentTables, read_segments
from fsdp2kit.torch_compat import BackwardInputs

_serial = itertools.count()

# Options of the attention interface that change the scores in ways which segments do not express.
_INEXPRESSIBLE = ("softcap", "s_aux", "position_bias")


# An operator with a backward of its own: torch.compile and selective checkpointing see neither blocks nor exchanges.
# Operators take tensors, numbers and strings only, hence the names of the exchange and its group.
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
    way = build_exchange(exchange, group)
    partial = attend_blocks(query, (key, value), read_segments(segments), scale=scale, exchange=way)
    return partial.out.to(query.dtype), partial.lse


@blockwise_attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = query.shape
    out = query.new_empty((batch, length, heads, width)).transpose(1, 2)
    return out, query.new_empty((batch, length, heads), dtype=torch.float32).transpose(1, 2)


@torch.library.custom_op("fsdp2kit::blockwise_attention_backward", mutates_args=())
def blockwise_attention_backward(
    inputs: list[Tensor], segments: Tensor, scale: float, exchange: str, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtypes; ``inputs`` are the fields of `BackwardInputs`."""
    mine, way = BackwardInputs(*inputs), build_exchange(exchange, group)
    grads = attend_blocks_backward(mine, read_segments(segments), scale=scale, exchange=way)
    grad_query, grad_key, grad_value = (grad.to(mine.query.dtype).contiguous() for grad in grads)
    return grad_query, grad_key, grad_value


@blockwise_attention_backward.register_fake
def _(inputs: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    _grad_out, query, key, value, *_rest = inputs
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, segments, ctx.scale, ctx.exchange, ctx.group = inputs
    ctx.save_for_backward(*tensors, *output, segments)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    *tensors, segments = ctx.saved_tensors
    grads = blockwise_attention_backward([grad_out, *tensors], segments, ctx.scale, ctx.exchange, ctx.group)
    return (*grads, None, None, None, None)


blockwise_attention.register_autograd(_backward, setup_context=_save_for_backward)


def apply_attention(model: PreTrainedModel, path: AttentionPath, *, group: ProcessGroup) -> None:
    """Give ``model`` the attention that ``path`` names, over the ranks of ``group``.

    From then on the model takes its rank's part of ``input_ids`` and ``position_ids``, with the masks or segments
    that `fsdp2kit.parallel.context_parallel.batch.shard_batch` makes for the same path.

    Args:
        group: the context-parallel ranks, in sequence order.
    """
    if path.method == "ulysses":
        use_attention(model, UlyssesAttention(group=group, attention=path.kernel))
    elif path.kernel == VARLEN:
        use_attention(model, BlockwiseAttention(exchange=path.method or "none", group=group.group_name))


def use_attention(model: PreTrainedModel, attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Let every attention layer of ``model`` call ``attention``."""
    # transformers' table of attention functions is global to the process: a name of its own for each model
    name = f"fsdp2kit_{next(_serial)}"
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


class BlockwiseAttention:
    """Our own attention, over the segments of `SegmentTables`: alone, or with keys that a ring or allgather brings."""

    def __init__(self, *, exchange: str = "none", group: str = "") -> None:
        self.exchange, self.group = exchange, group

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        segments: SegmentTables | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention of this rank's tokens to what its segments show.

        Args:
            query: ``[B, H, s, D]``; key: ``[B, G, s, D]``; value: ``[B, G, s, Dv]`` with Dv ≤ D.
            attention_mask: ignored: the segments are the mask.
            segments: of this rank's part of the batch.

        Returns:
            ``[B, s, H, Dv]`` and None (attention weights are never formed).

        Raises:
            ValueError: an option that segments do not express, or no segments.
        """
        beyond = [name for name in _INEXPRESSIBLE if options.get(name) is not None]
        if beyond or (dropout and module.training):
            raise ValueError(f"blockwise attention does not know {', '.join(beyond) or 'dropout'}")
        if segments is None:
            raise ValueError("blockwise attention needs `segments`; shard_batch makes them")
        width = value.shape[-1]
        out, _ = blockwise_attention(
            query,
            key,
            F.pad(value, (0, query.shape[-1] - width)),
            segments.of(sliding_window),
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            self.exchange,
            self.group,
        )
        return out.transpose(1, 2)[..., :width], None


class UlyssesAttention:
    """Any attention function, over a share of the heads and the whole sequence."""

    def __init__(self, *, group: ProcessGroup, attention: str) -> None:
        self.group, self.attention = group, attention
        self.cp = get_world_size(group)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Attention of this rank's tokens to the whole sequence.

        Args:
            module: the model's attention layer.
            query: ``[B, H, s, D]``; key, value: ``[B, G, s, D]``: this rank's part of the sequence.
            attention_mask: of the whole sequence, ``[B, 1, S, S]``, or None for plain causal attention.
            options: passed on (``scaling``, ``dropout``, ``sliding_window``, ``softcap``, …).

        Returns:
            ``[B, s, H, D]`` and None (attention weights are never formed).
        """
        shares = share_heads(query.shape[1], key.shape[1], self.cp)
        mine = shares[self.group.rank()]
        query, key, value = sequence_to_heads(query, key, value, shares=shares, group=self.group)
        output = attend_with_share(self.attention, module, query, key, value, attention_mask, share=mine, **options)
        return heads_to_sequence(output, shares=shares, group=self.group), None


def attend_with_share(
    attention: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    share: HeadShare,
    **options: Any,
) -> Tensor:
    """The named attention of one rank's share of heads, over whole sequences: ``[B, S, H_r, D]``.

    Args:
        query: ``[B, H_r, S, D]``; key, value: ``[B, G_r, S, D]``.
    """
    if share.groups is None:
        # A group of query heads is cut by the border between two ranks: give every query head its own key.
        key, value = key[:, list(share.key_of_query)], value[:, list(share.key_of_query)]
    # Positions of the rank's own part would mislead an implementation that finds documents by them.
    options.pop("position_ids", None)
    function = attention_function(attention, module)
    return function(_LocalHeads(module, share), query, key, value, attention_mask, **options)[0]


def attention_function(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The attention function of that name; transformers' "eager" is the one beside the module's own class."""
    if name == VARLEN:
        return BlockwiseAttention()
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return AttentionInterface()[name]


class _LocalHeads:
    """Stands for the attention layer, but with the local number of query heads per key/value head."""

    def __init__(self, module: nn.Module, share: HeadShare) -> None:
        self._module = module
        self.num_key_value_groups = share.groups or 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
