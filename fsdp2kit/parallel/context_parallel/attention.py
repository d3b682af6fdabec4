"""Our attention, registered with transformers' attention interface."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_world_size
from transformers import AttentionInterface, PreTrainedModel

from fsdp2kit.parallel.context_parallel.blockwise import blockwise_attention
from fsdp2kit.parallel.context_parallel.path import VARLEN, AttentionPath
from fsdp2kit.parallel.context_parallel.segments import SegmentTables
from fsdp2kit.parallel.context_parallel.ulysses import (
    HeadShare,
    heads_to_sequence,
    sequence_to_heads,
    share_heads,
)

_serial = itertools.count()

# Options of the attention interface that change the scores in ways which segments do not express.
_INEXPRESSIBLE = ("softcap", "s_aux", "position_bias")


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
        exchange = path.method or "none"
        use_attention(model, BlockwiseAttention(exchange=exchange, group=group.group_name))


def use_attention(model: PreTrainedModel, attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Let every attention layer of ``model`` call ``attention``."""
    # transformers' table of attention functions is global to the process: a name of its own for each model
    name = f"fsdp2kit_{next(_serial)}"
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


class BlockwiseAttention:
    """Attention over the segments of `SegmentTables`, whatever exchange brings the keys."""

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
            attention_mask: not looked at: the segments say it all.
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
    """The attention layer as its local heads see it: another number of query heads per key/value head."""

    def __init__(self, module: nn.Module, share: HeadShare) -> None:
        self._module = module
        self.num_key_value_groups = share.groups or 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
