"""Blockwise attention on CUDA: against torch's own with the dense mask, and in a model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp2kit.parallel.context_parallel.attention import blockwise_attention, varlen_attention
from fsdp2kit.parallel.context_parallel.segments import SegmentTables, document_starts, plan_segments
from tests.parallel.helpers.segments import positions_of, transformers_mask

pytestmark = pytest.mark.gpu

LENGTHS = (5, 300, 129, 590)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_packed_and_windowed_attention_equals_the_dense_mask(
    has_sinks: bool, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    positions = torch.stack([positions_of(list(LENGTHS)), torch.arange(sum(LENGTHS))])
    length = positions.shape[1]
    shapes = [(2, heads, length, 64) for heads in (8, 2, 2, 8)]
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    table = plan_segments(document_starts(positions), method=None, rank=0, cp=1, window=window)
    mask = transformers_mask(positions, window)[:, None].cuda()

    sinks = [torch.linspace(-2, 4, 8, device="cuda", dtype=dtype)] * has_sinks
    mine = [tensor.clone().requires_grad_() for tensor in (q, k, v, *sinks)]
    out, _ = blockwise_attention(*mine[:3], table, 0.125, "none", "", *mine[3:])
    found = (out.detach(), *torch.autograd.grad(out, mine, grad))
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v, *sinks)]
    whole = F.scaled_dot_product_attention(*exact[:3], attn_mask=mask, scale=0.125, enable_gqa=True)
    if has_sinks:  # one more column of scores, without a value
        keys, values = (each.repeat_interleave(4, 1) for each in exact[1:3])
        scores = (exact[0] @ keys.transpose(-1, -2) * 0.125).masked_fill(~mask, float("-inf"))
        column = exact[3][None, :, None, None].expand(*scores.shape[:3], 1)
        whole = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ values
    expected = (whole.detach(), *torch.autograd.grad(whole, exact, grad.double()))

    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(found, expected, strict=True):
        # A query that sees one key alone has no gradient: what is there then is rounding of the gradient that came in.
        assert (ours.double() - theirs).norm() <= bound * (theirs.norm() or grad.norm())


@pytest.mark.parametrize("widths", [(64, 40), (40, 64)], ids=["narrow values", "wide values"])
def test_values_of_another_width_than_keys(widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    positions = positions_of(list(LENGTHS))[None]
    length, (width, value_width) = positions.shape[1], widths
    shapes = [(1, 8, length, width), (1, 2, length, width), (1, 2, length, value_width)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    grad = torch.randn(1, length, 8, value_width, device="cuda", dtype=torch.bfloat16)
    table = plan_segments(document_starts(positions), method=None, rank=0, cp=1, window=None)

    mine = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out, _ = varlen_attention(nn.Module(), mine[0], mine[1], mine[2], None, segments=SegmentTables({None: table}))
    found = (out.detach(), *torch.autograd.grad(out, mine, grad))

    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    mask = transformers_mask(positions, None)[:, None].cuda()
    whole = F.scaled_dot_product_attention(exact[0], exact[1], exact[2], attn_mask=mask, enable_gqa=True)
    whole = whole.transpose(1, 2)
    expected = (whole.detach(), *torch.autograd.grad(whole, exact, grad.double()))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() <= 1e-2 * theirs.norm()
