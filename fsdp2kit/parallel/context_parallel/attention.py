"""Attention over segments as one operator, Ulysses' attention, and their registration with transformers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, PreTrainedModel

from fsdp2kit.parallel.context_parallel.exchange import (
    HeadShare,
    build_exchange,
    heads_to_sequence,
    sequence_to_heads,
    share_heads,
)
from fsdp2kit.parallel.context_parallel.kernels import RunningAttention, attend_backward, sinks_gradient
from fsdp2kit.parallel.context_parallel.layout import VARLEN, AttentionPath, tokens_first
from fsdp2kit.parallel.context_parallel.recurrent import Exchange, apply_recurrent
from fsdp2kit.parallel.context_parallel.segments import SegmentTables, read_segments
from fsdp2kit.torch_compat import BackwardInputs

_serial = itertools.count()

# Options of the attention interface that change the scores in ways which segments do not express.
_INEXPRESSIBLE = ("softcap", "position_bias")


# An operator with its own backward hides blocks and exchanges from torch.compile and selective checkpointing.
# Operators take tensors, numbers and strings only: the exchange and its group are given by name.
@torch.library.custom_op("fsdp2kit::blockwise_attention", mutates_args=())
def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    scale: float,
    exchange: str,
    group: str,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys that ``segments`` name.

    Args:
        query: ``[B, H, s, D]``; key, value: ``[B, G, s, D]``, H a multiple of G.
        segments: from `fsdp2kit.parallel.context_parallel.segments.plan_segments`, on the host.
        exchange: "ring" or "allgather"; "none": all keys are here.
        group: name of the process group to exchange with.
        sinks: ``[H]``, one more logit of each query of a head, which has no value; None: there is none.

    Returns:
        ``[B, H, s, D]`` in the query's dtype, tokens first in memory, and the log-sum-exp ``[B, H, s]``, float32,
        which counts the sinks.
    """
    table = read_segments(segments)
    result = RunningAttention(query, scale=scale)

    def attend(step: int, key: Tensor, value: Tensor) -> None:
        result.attend(key, value, [segment for segment in table if segment.step == step])

    build_exchange(exchange, group).visit_blocks((key, value), attend)
    if sinks is not None:
        result.add_sinks(sinks)
    return result.out.to(query.dtype), result.lse


@blockwise_attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = query.shape
    out = query.new_empty((batch, length, heads, width)).transpose(1, 2)
    return out, query.new_empty((batch, length, heads), dtype=torch.float32).transpose(1, 2)


@torch.library.custom_op("fsdp2kit::blockwise_attention_backward", mutates_args=())
def blockwise_attention_backward(
    inputs: list[Tensor], segments: Tensor, scale: float, exchange: str, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtypes and tokens first in memory, as what comes before attention
    wants them; ``inputs`` are the fields of `BackwardInputs`. With sinks they are the same formulae, of the output and
    the log-sum-exp that count them."""
    mine = BackwardInputs(*inputs)
    table = read_segments(segments)
    way = build_exchange(exchange, group)
    total: Any = None  # of the query, added up in float32

    def attend(step: int, key: Tensor, value: Tensor) -> None:
        nonlocal total
        of_step = [segment for segment in table if segment.step == step]
        of_block = mine._replace(key=key, value=value)
        total, *of_keys = attend_backward((total, None, None), of_block, of_step, scale=scale)
        way.return_gradients((of_keys[0], of_keys[1]))

    way.visit_blocks((mine.key, mine.value), attend)
    grads = (total, *way.own_gradients())
    grad_query, grad_key, grad_value = (tokens_first(grad.to(mine.query.dtype)) for grad in grads)
    return grad_query, grad_key, grad_value


@blockwise_attention_backward.register_fake
def _(inputs: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2) for tensor in inputs[1:4])
    return query, key, value


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, segments, ctx.scale, ctx.exchange, ctx.group, sinks = inputs
    ctx.save_for_backward(*tensors, *output, segments, sinks)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse, segments, sinks = ctx.saved_tensors
    grads = blockwise_attention_backward([grad_out, *tensors, out, lse], segments, ctx.scale, ctx.exchange, ctx.group)
    # Of this rank's queries alone: FSDP sums over context-parallel ranks as it does for every parameter.
    of_sinks = None if sinks is None else sinks_gradient(grad_out, out, lse, sinks)
    return (*grads, None, None, None, None, of_sinks)


blockwise_attention.register_autograd(_backward, setup_context=_save_for_backward)


def apply_attention(model: PreTrainedModel, path: AttentionPath, *, group: ProcessGroup) -> None:
    """Give ``model`` the attention that ``path`` names, over the ranks of ``group``; recurrent layers as well.

    From then on the model takes its rank's slice of ``input_ids`` and ``position_ids``, with the masks or segments
    that `fsdp2kit.parallel.context_parallel.batch.slice_batch` makes for the same path.

    Args:
        group: the context-parallel ranks, in sequence order.
    """
    if path.recurrent_layers:
        apply_recurrent(model, Exchange(group if path.method else None))
    if path.method == "ulysses":
        use_attention(model, partial(ulysses_attention, kernel=path.kernel, group=group))
    elif path.kernel == VARLEN:
        use_attention(model, partial(varlen_attention, exchange=path.method or "none", group=group.group_name))


def use_attention(model: PreTrainedModel, attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Let every attention layer of ``model`` call ``attention``."""
    # transformers' table of attention functions is global to the process: a name of its own for each model
    name = f"fsdp2kit_{next(_serial)}"
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    exchange: str = "none",
    group: str = "",
    segments: SegmentTables | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Our own attention, of this rank's tokens to the keys that ``segments`` name, here or brought by an exchange.

    Args:
        query: ``[B, H, s, D]``; key: ``[B, G, s, D]``; value: ``[B, G, s, Dv]``.
        attention_mask: ignored: the segments are the mask.
        exchange, group: as `blockwise_attention` takes them.
        segments: of this rank's slice of the batch.
        s_aux: transformers' name for attention sinks, ``[H]``.

    Returns:
        ``[B, s, H, Dv]`` and None (attention weights are never formed).
    """
    beyond = [name for name in _INEXPRESSIBLE if options.get(name) is not None]
    if beyond or (dropout and module.training):
        raise ValueError(f"blockwise attention does not know {', '.join(beyond) or 'dropout'}")
    if segments is None:
        raise ValueError("its layer hands no keyword arguments on to it, so it does not know where documents begin")
    head_width = query.shape[-1]
    width = value.shape[-1]
    widest = max(head_width, width)
    query, key, value = (_widened(tensor, widest) for tensor in (query, key, value))
    scale = head_width**-0.5 if scaling is None else scaling
    table = segments.of(sliding_window, layer=getattr(module, "layer_idx", None))
    out, _ = blockwise_attention(query, key, value, table, scale, exchange, group, s_aux)
    return out.transpose(1, 2)[..., :width], None


def _widened(tensor: Tensor, width: int) -> Tensor:
    """The tensor with zeros up to ``width`` in its last dimension: the kernels take one width for all."""
    missing = width - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor  # no padding would be a copy


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    kernel: str,
    group: ProcessGroup,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of this rank's tokens to the whole sequence, by any implementation over a share of the heads.

    Args:
        module: the model's attention layer.
        query: ``[B, H, s, D]``; key, value: ``[B, G, s, D]``: this rank's slice of the sequence.
        attention_mask: of the whole sequence, ``[B, 1, S, S]``, or None for plain causal attention.
        options: passed on (``scaling``, ``dropout``, ``sliding_window``, ``softcap``, …).

    Returns:
        ``[B, s, H, D]`` and None (attention weights are never formed).
    """
    shares = share_heads(query.shape[1], key.shape[1], group.size())
    mine = sequence_to_heads(query, key, value, shares=shares, group=group)
    output = attend_with_share(kernel, module, mine, attention_mask, share=shares[group.rank()], **options)
    return heads_to_sequence(output, shares=shares, group=group), None


def attend_with_share(
    kernel: str, module: nn.Module, mine: Sequence[Tensor], attention_mask: Any, *, share: HeadShare, **options: Any
) -> Tensor:
    """The named attention of one rank's share of heads, over whole sequences: ``[B, S, H_r, D]``.

    Args:
        mine: query ``[B, H_r, S, D]``, key and value ``[B, G_r, S, D]``.
    """
    query, key, value = mine
    if share.groups is None:
        # A group of query heads is cut by the border between two ranks: give every query head its own key.
        key = key[:, list(share.key_of_query)]
        value = value[:, list(share.key_of_query)]
    # The positions of the rank's slice would mislead an implementation that finds documents by them.
    options.pop("position_ids", None)
    stand_in: Any = _LocalHeads(module, share)
    if options.get("s_aux") is not None:
        # Eager attention reads the sinks off the layer, under this name.
        options["s_aux"] = stand_in.sinks = options["s_aux"][share.query.start : share.query.stop]
    if kernel == VARLEN:
        attend = varlen_attention
    elif kernel == "eager":  # transformers has it beside the class of the module
        attend = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attend = AttentionInterface()[kernel]
    return attend(stand_in, query, key, value, attention_mask, **options)[0]


class _LocalHeads:
    """Stands for the attention layer, but with the local number of query heads per key/value head."""

    def __init__(self, module: nn.Module, share: HeadShare) -> None:
        self._module = module
        self.num_key_value_groups = share.groups or 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
