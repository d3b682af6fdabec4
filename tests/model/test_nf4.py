"""Weights in 4 bits are QLoRA's NF4, and their layers compute as plain layers with the dequantised weight."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit.model.grouped_experts import NF4Experts
from fsdp2kit.model.nf4 import BLOCK_BYTES, NF4Linear, dequantize, level_pairs, quantize
from fsdp2kit.planner.allocations import Allocations, by_category
from fsdp2kit.weights.experts import expert_weights, find_experts
from tests.support.models import needs_torchao, nf4_rounded, tiny_model


def weight_like(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Magnitudes that differ from block to block; some zeros."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=random) * torch.logspace(-4, 2, shape[0])[:, None]
    weight[shape[0] // 2] = 0
    return weight.to(dtype)


def filled(weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32) -> NF4Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.bias = None if bias is None else torch.nn.Parameter(bias)  # pyright: ignore[reportAttributeAccessIssue]
    layer = NF4Linear(linear, dtype)
    layer.fill(weight)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 128), (30, 72), (7, 80), (5, 33), (3, 1), (1, 64)], ids=str)
def test_a_dequantised_weight_is_nf4(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = weight_like(*shape, dtype=dtype)
    layer = filled(weight)
    want = nf4_rounded(weight)
    assert torch.allclose(layer.weight, want, rtol=1e-6, atol=0)
    assert filled(weight, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    blocks = -(-weight.numel() // 64)
    per_row = layer.layout.together * shape[1] // 64
    assert layer.nf4.nbytes == -(-blocks // per_row) * per_row * BLOCK_BYTES, "36 bytes a block, in whole rows"


@needs_torchao
def test_codes_and_scales_are_those_of_torchao() -> None:
    """torchao rounds its levels to four digits: a value in the middle between two may get the other one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import NF4Tensor

    weight = weight_like(64, 256)
    weight[32] = 1e-3
    ours, theirs = quantize(weight), NF4Tensor.from_tensor(weight, 64, 256)
    codes = [
        torch.stack([packed >> 4, packed & 15]).int() for packed in (ours[:, :128].flatten(), theirs.quantized_data)
    ]
    apart = (codes[0] - codes[1]).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3
    largest = weight.view(64, 4, 64).abs().amax(-1)
    assert torch.equal(ours[:, 128:].contiguous().view(torch.float32), largest)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_as_a_plain_layer_with_that_weight(dtype: torch.dtype, compiled: bool) -> None:
    weight, bias = weight_like(40, 72) / 10, torch.randn(40, dtype=dtype)
    plain = nf4_rounded(weight).to(dtype)
    layer: Any = filled(weight, bias)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = torch.randn(3, 5, 72, dtype=dtype, requires_grad=True)
    y: Any = x.detach().clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*autograd.function.Function.*", category=DeprecationWarning
        )  # torch's
        ours, theirs = run(x), F.linear(y, plain, bias)
    gradient = torch.randn_like(ours)
    ours.backward(gradient)
    theirs.backward(gradient)
    for one, other in ((ours, theirs), (x.grad, y.grad)):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    assert layer.nf4.grad is None


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_experts_compute_as_plain_ones_with_those_weights(kind: str) -> None:
    """Each expert's matrix is rounded alone, also where its rows do not fill the last block."""
    torch.manual_seed(0)
    plain: Any = next(iter(find_experts(tiny_model(kind)).values()))
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    stored = NF4Experts(copy.deepcopy(plain))
    for name in expert_weights(plain):
        weight = plain.get_parameter(name)
        stored.fill(name, weight.detach())
        weight.data = torch.stack([nf4_rounded(matrix) for matrix in weight])
    hidden_size = plain.down_proj.shape[2 if plain.is_transposed else 1]
    states, weights = torch.randn(40, hidden_size), torch.rand(40, 2)
    index = torch.rand(40, plain.num_experts - 1).topk(2).indices  # the last expert is idle
    inputs = [[x.clone().requires_grad_() for x in (states, weights)] for _ in range(2)]

    ours, theirs = (
        module(hidden, index, of_pairs) for module, (hidden, of_pairs) in zip((stored, plain), inputs, strict=True)
    )

    slope = torch.randn_like(ours)
    found, expected = torch.autograd.grad(ours, inputs[0], slope), torch.autograd.grad(theirs, inputs[1], slope)
    for one, other in zip((ours, *found), (theirs, *expected), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    packed = [parameter.nbytes for parameter in stored.parameters() if parameter.dtype == torch.uint8]
    assert sum(packed) < 0.2 * sum(plain.get_parameter(name).nbytes for name in expert_weights(plain))


def test_no_weight_is_kept_for_backward() -> None:
    layer = filled(weight_like(256, 512))
    x = torch.randn(1, 512, requires_grad=True)
    with Allocations() as alive:
        alive.mark([x, *layer.parameters(), *layer.buffers()], "before")
        layer(x)
        assert not by_category(alive.snapshot()).get("activations")
        kept = layer(x)
        assert by_category(alive.snapshot())["activations"] == kept.nbytes


def test_a_weight_is_quantised_some_rows_at_a_time() -> None:
    """It needs only slices, and never makes a second copy of full precision."""

    class Slices:
        largest = 0

        def __getitem__(self, rows: slice) -> Tensor:
            self.largest = max(self.largest, rows.stop - rows.start)
            return weight[rows]

    weight, slices = weight_like(4096, 2048, dtype=torch.bfloat16), Slices()
    layer = NF4Linear(torch.nn.Linear(2048, 4096, bias=False, device="meta").to_empty(device="cpu"), torch.float32)
    layer.fill(slices)
    assert slices.largest == 2048
    want = dequantize(quantize(weight), level_pairs(), 2048, torch.float32)
    assert torch.equal(layer.weight, want)
