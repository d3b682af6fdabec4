"""Recomputation sends tokens to the experts that the forward chose.

Recomputed router scores may differ in their last bits where kernels are not deterministic. A token on the border
between two experts would then visit another one in backward, and its gradient would belong to no forward. So the
indices of a router's ``topk`` are kept (8 bytes for each token and expert it visits), and recomputation takes the
recomputed scores at these. A router that chooses without ``topk`` chooses again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
_TOPK = (torch.topk, Tensor.topk)


def routing_contexts(most: int, inner: Callable[[], Contexts] | None = None) -> Contexts:
    """Contexts of a layer's forward and recomputation, for `torch.utils.checkpoint.checkpoint`'s ``context_fn``.

    Args:
        most: how many experts the layer has. A ``topk`` among more is no router's.
        inner: another ``context_fn``, such as that of selective checkpointing.
    """
    chosen: list[Tensor] = []
    forward, recomputation = inner() if inner else (contextlib.nullcontext(), contextlib.nullcontext())
    return _Nested(_Keep(chosen, most), forward), _Nested(_Replay(chosen, most), recomputation)


class _Nested(contextlib.AbstractContextManager[Any]):
    """Two contexts as one, which can be entered again, as a second backward does."""

    def __init__(self, *contexts: contextlib.AbstractContextManager[Any]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        self._entered = contextlib.ExitStack()
        for context in self._contexts:
            self._entered.enter_context(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


class _Routers(TorchFunctionMode):
    """Is asked for the indices of each ``topk`` among ``most`` or fewer, and takes the values there.

    Forward and recomputation do the same operations on what needs gradients, as checkpointing wants.
    """

    def __init__(self, chosen: list[Tensor], most: int) -> None:
        super().__init__()
        self._chosen = chosen
        self._most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if (
            func not in _TOPK
            or args[0].shape[dim := args[2] if len(args) > 2 else options.get("dim", -1)] > self._most
        ):
            return func(*args, **options)
        index = self._index(func, *args, **options)
        return torch.return_types.topk((args[0].gather(dim, index), index))

    def _index(self, func: Any, scores: Tensor, *args: Any, **options: Any) -> Tensor:
        raise NotImplementedError


class _Keep(_Routers):
    """Chooses, and keeps what it chose."""

    def _index(self, func: Any, scores: Tensor, *args: Any, **options: Any) -> Tensor:
        index = func(scores.detach(), *args, **options)[1]
        self._chosen.append(index.clone())
        return index


class _Replay(_Routers):
    """Takes what was kept."""

    def __enter__(self) -> Any:
        self._kept = iter(self._chosen)
        return super().__enter__()

    def _index(self, func: Any, scores: Tensor, *args: Any, **options: Any) -> Tensor:
        return next(self._kept).clone()
