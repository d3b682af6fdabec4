"""Recomputation sends tokens to the experts that the forward chose.

Recomputed router scores may differ in their last bits where kernels are not deterministic. A token on the border
between two experts would then visit another one in backward, and its gradient would belong to no forward. So the
indices of each ``topk`` in a checkpointed layer are kept (8 bytes for each token and expert it visits), and
recomputation takes the recomputed scores at these. A router that chooses without ``topk`` chooses again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp2kit.torch_compat import TorchDispatchMode

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


def routing_contexts(inner: Callable[[], Contexts] | None = None) -> Contexts:
    """Contexts of a layer's forward and recomputation, for `torch.utils.checkpoint.checkpoint`'s ``context_fn``.

    Args:
        inner: another ``context_fn``, such as that of selective checkpointing.
    """
    chosen: list[Tensor] = []
    forward, recomputation = inner() if inner else (contextlib.nullcontext(), contextlib.nullcontext())
    # Selective checkpointing counts operators, and must see the same ones both times: the modes here come under its.
    return _Nested(_Keep(chosen), forward), _Nested(_Replay(chosen), recomputation)


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


class _Keep(TorchDispatchMode):
    """Keeps the indices of each ``topk``."""

    def __init__(self, chosen: list[Tensor]) -> None:
        super().__init__()
        self._chosen = chosen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self._chosen.append(out[1].clone())
        return out


class _Replay(TorchDispatchMode):
    """Takes the values of each ``topk`` at the indices kept."""

    def __init__(self, chosen: list[Tensor]) -> None:
        super().__init__()
        self._chosen = chosen
        self._next: Iterator[Tensor] = iter(())

    def __enter__(self) -> Any:
        self._next = iter(self._chosen)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
        # Below autograd: it still records a `topk`, whose backward reads these indices.
        index = next(self._next).clone()
        return args[0].gather(dim, index), index
