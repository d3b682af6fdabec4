"""What CUDA's variable-length attention computes, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsdp2kit.torch_compat import BackwardInputs, VarlenBounds

MaskOf = Callable[[int, int, int, int], Tensor]


def bottom_right(n: int, m: int, left: int, right: int) -> Tensor:
    """``[n, m]`` bool: which key each query sees, counted from the corner where queries and keys end."""
    past = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
    shown = torch.ones(n, m, dtype=torch.bool)
    if left >= 0:
        shown &= past >= -left
    if right >= 0:
        shown &= past <= right
    return shown


def _each(q_borders: Tensor, k_borders: Tensor) -> list[tuple[slice, slice]]:
    q, k = q_borders.tolist(), k_borders.tolist()
    return [(slice(a, b), slice(c, d)) for a, b, c, d in zip(q, q[1:], k, k[1:], strict=False)]


def emulated_forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: VarlenBounds, *, scale: float, mask_of: MaskOf = bottom_right
) -> tuple[Tensor, Tensor]:
    """What the CUDA kernel computes, a sequence at a time and by definition, in float32."""
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    query, key, value = query.float(), key.float(), value.float()
    groups = query.shape[1] // key.shape[1]
    for q, k in _each(bounds.q_borders, bounds.k_borders):
        keys = key[k].repeat_interleave(groups, 1)
        scores = torch.einsum("nhd,mhd->hnm", query[q], keys) * scale
        shown = mask_of(*scores.shape[1:], bounds.left, bounds.right)
        assert shown.any(1).all(), "a query without any key would be NaN in a kernel"
        assert max(q.stop - q.start, 0) <= bounds.q_longest
        assert max(k.stop - k.start, 0) <= bounds.k_longest
        scores = scores.masked_fill(~shown, float("-inf"))
        lse[q] = scores.logsumexp(-1).T
        out[q] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value[k].repeat_interleave(groups, 1))
    return out, lse


def emulated_backward(
    inputs: BackwardInputs, bounds: VarlenBounds, *, scale: float, mask_of: MaskOf = bottom_right
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    grads = tuple(torch.zeros_like(tensor) for tensor in (inputs.query, inputs.key, inputs.value))
    grad, query, key, value, out, lse = (tensor.float() for tensor in inputs)
    groups = query.shape[1] // key.shape[1]
    for q, k in _each(bounds.q_borders, bounds.k_borders):
        keys, values = key[k].repeat_interleave(groups, 1), value[k].repeat_interleave(groups, 1)
        scores = torch.einsum("nhd,mhd->hnm", query[q], keys) * scale
        shown = mask_of(*scores.shape[1:], bounds.left, bounds.right)
        weights = (scores - lse[q].T[..., None]).exp().masked_fill(~shown, 0)
        delta = (grad[q] * out[q]).sum(-1).T[..., None]
        of_scores = weights * (torch.einsum("nhd,mhd->hnm", grad[q], values) - delta) * scale
        grads[0][q] = torch.einsum("hnm,mhd->nhd", of_scores, keys)
        of_keys = torch.einsum("hnm,nhd->mhd", of_scores, query[q])
        of_values = torch.einsum("hnm,nhd->mhd", weights, grad[q])
        grads[1][k] = of_keys.unflatten(1, (-1, groups)).sum(2)
        grads[2][k] = of_values.unflatten(1, (-1, groups)).sum(2)
    return grads
