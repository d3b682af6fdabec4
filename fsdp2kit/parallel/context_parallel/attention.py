"""Context-parallel attention, registered with transformers' attention interface."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_world_size
from transformers import AttentionInterface, PreTrainedModel

from fsdp2kit.parallel.context_parallel.ulysses import (
    HeadShare,
    heads_to_sequence,
    sequence_to_heads,
    share_heads,
)

_serial = itertools.count()


def apply_context_parallel(model: PreTrainedModel, *, group: ProcessGroup, attention: str = "sdpa") -> None:
    """Make every attention layer of ``model`` see the whole sequence of which each rank of ``group`` holds a part.

    From then on the model takes its rank's part of ``input_ids`` and ``position_ids``, and the full-length mask
    that `fsdp2kit.parallel.context_parallel.batch.shard_batch` makes.

    Args:
        group: the context-parallel ranks, in sequence order. With one rank nothing is changed.
        attention: the transformers implementation to run on the whole sequence.
    """
    if get_world_size(group) == 1:
        return
    # transformers' table of attention functions is global to the process: a name of its own for each model
    name = f"fsdp2kit_ulysses_{next(_serial)}"
    AttentionInterface.register(name, UlyssesAttention(group=group, attention=attention))
    model.set_attn_implementation(name)


class UlyssesAttention:
    """An attention function with the signature that transformers' attention interface expects."""

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
        if mine.groups is None:
            # A group of query heads is cut by the border between two ranks: give every query head its own key.
            key, value = key[:, list(mine.key_of_query)], value[:, list(mine.key_of_query)]
        # Positions of the rank's own part would mislead an implementation that finds documents by them.
        options.pop("position_ids", None)
        function = attention_function(self.attention, module)
        output, _ = function(_LocalHeads(module, mine), query, key, value, attention_mask, **options)
        return heads_to_sequence(output, shares=shares, group=self.group), None


def attention_function(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The transformers attention function of that name; "eager" is the one beside the module's own class."""
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
