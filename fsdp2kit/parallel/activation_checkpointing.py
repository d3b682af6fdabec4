"""Recompute activations in backward instead of keeping them (arXiv:1604.06174)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_activation_checkpointing(layers: Sequence[nn.Module], *, every: int = 1) -> None:
    """Keep only the input of every ``every``-th layer and run its forward again in backward.

    The layer's ``forward`` is wrapped, not the layer: parameter names stay as they are, and FSDP's hooks, which
    sit around ``forward``, gather the parameters before the recomputation.
    """
    for layer in layers[::every]:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # A function of ours around it: torch.compile leaves `checkpoint`, where it is the outermost call, and all below
    # it uncompiled without a word, but traces it inside another function.
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        # The model has no dropout unless the user waived its refusal; RNG state is then needed to recompute it.
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed
