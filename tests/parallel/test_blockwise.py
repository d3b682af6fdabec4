"""Blockwise attention equals torch's own with the dense mask, forward and backward, whatever brings the keys."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit.parallel.context_parallel import kernels
from fsdp2kit.parallel.context_parallel.attention import (
    blockwise_attention,
    blockwise_attention_backward,
    varlen_attention,
)
from fsdp2kit.parallel.context_parallel.layout import chunks_of, gather_sequence, indices_of, take_chunks
from fsdp2kit.parallel.context_parallel.segments import SegmentTables, document_starts, plan_segments, read_segments
from fsdp2kit.torch_compat import (
    BackwardInputs,
    FakeTensorMode,
    VarlenBounds,
    cuda_flash_attention,
    cuda_flash_attention_backward,
)
from tests.parallel.helpers.emulated import emulated_backward, emulated_forward
from tests.parallel.helpers.segments import positions_of, transformers_mask
from tests.support.models import full, slow
from tests.support.workers import WorkerPool

LENGTH = 48
PACKINGS = {
    "plain": [[LENGTH], [LENGTH]],
    "packed": [[5, 22, 9, 7, 5], [1, 1, 30, 16]],
}
CASES = [(name, window) for name in PACKINGS for window in (None, 1, 7, 40)]


def inputs(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> tuple[Tensor, ...]:
    """Query, key, value and the output's gradient: ``[2, 6 or 2, S, 16]``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 6, LENGTH, 16), (2, 2, LENGTH, 16), (2, 2, LENGTH, 16), (2, 6, LENGTH, 16)]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def expected(name: str, window: int | None, tensors: tuple[Tensor, ...] | None = None) -> list[Tensor]:
    """Output and gradients by torch's own attention in float64, of `inputs` by default."""
    q, k, v, grad = (tensor.double() for tensor in tensors or inputs())
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    mask = transformers_mask(positions(name), window)[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


SINKS = torch.tensor([-2.0, -0.5, 0.0, 0.7, 1.5, 4.0])


def expected_with_sinks(name: str, window: int | None) -> list[Tensor]:
    """Output and gradients, the last of them the sinks', by a softmax in float64 over one more column."""
    q, k, v, grad = (tensor.double() for tensor in inputs())
    sinks = SINKS.double().requires_grad_()
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    scores = q @ k.repeat_interleave(3, 1).transpose(-1, -2) * 0.3
    scores = scores.masked_fill(~transformers_mask(positions(name), window)[:, None], float("-inf"))
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    out = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v.repeat_interleave(3, 1)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad, sinks.grad]


def positions(name: str) -> Tensor:
    return torch.stack([positions_of(lengths) for lengths in PACKINGS[name]])


def local(
    name: str, window: int | None, dtype: torch.dtype = torch.float32, sinks: Tensor | None = None
) -> list[Tensor]:
    """The same by our operator, all keys at hand."""
    q, k, v, grad = inputs(dtype)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, *([] if sinks is None else [sinks]))]
    table = plan_segments(document_starts(positions(name)), method=None, rank=0, cp=1, window=window)
    out, _ = blockwise_attention(q, k, v, table, 0.3, "none", "", sinks)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_close(found: list[Tensor], target: list[Tensor], *, bound: float) -> None:
    for mine, theirs in zip(found, target, strict=True):
        # With a window of one token, the queries' gradient is zero.
        assert (mine.double() - theirs).norm() <= bound * max(theirs.norm(), 100.0)


@pytest.mark.parametrize(("name", "window"), CASES)
@pytest.mark.parametrize("tile", [4, 512])
def test_cpu_kernel(name: str, window: int | None, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE", tile)
    assert_close(local(name, window), expected(name, window), bound=1e-6)
    assert_close(local(name, window, torch.bfloat16), expected(name, window, inputs(torch.bfloat16)), bound=1e-2)


@pytest.mark.parametrize(("name", "window"), CASES)
def test_plain_operations(name: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They form scores, so they are given a few queries at a time: all of a long row's would fill a device."""
    scores, largest = kernels._scores, []

    def seen(query: Tensor, key: Tensor, **options: Any) -> Tensor:
        largest.append(query.shape[2])
        return scores(query, key, **options)

    monkeypatch.setattr(kernels, "_scores", seen)
    monkeypatch.setattr(kernels, "TILE", 10)
    monkeypatch.setattr(kernels, "cpu_flash_attention", kernels.plain_attention)
    monkeypatch.setattr(kernels, "cpu_flash_attention_backward", kernels.plain_attention_backward)
    assert_close(local(name, window), expected(name, window), bound=1e-6)
    assert max(largest) <= 10


@pytest.fixture
def emulated_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "varlen_is_usable", lambda query: True)
    monkeypatch.setattr(kernels, "cuda_flash_attention", emulated_forward)
    monkeypatch.setattr(kernels, "cuda_flash_attention_backward", emulated_backward)


@pytest.fixture(params=["cpu", "cuda"])
def kernel(request: pytest.FixtureRequest) -> None:
    """Each kernel in turn."""
    if request.param == "cuda":
        request.getfixturevalue("emulated_cuda")


@pytest.mark.parametrize(("name", "window"), CASES)
def test_calls_of_the_cuda_kernel(name: str, window: int | None, emulated_cuda: None) -> None:
    assert_close(local(name, window), expected(name, window), bound=1e-6)


@pytest.mark.parametrize(("name", "window"), CASES)
@pytest.mark.usefixtures("kernel")
def test_sinks(name: str, window: int | None) -> None:
    assert_close(local(name, window, sinks=SINKS.clone()), expected_with_sinks(name, window), bound=1e-6)
    found = local(name, window, torch.bfloat16, SINKS.bfloat16())
    assert_close(found, expected_with_sinks(name, window), bound=2e-2)


def test_what_one_call_gives_is_taken_as_it_is(emulated_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole documents side by side: no float32 copies that are as large as the queries, and no zeros to add to."""
    made: list[str] = []
    for name in ("zeros_for", "merge"):
        original = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *t, name=name, original=original: (made.append(name), original(*t))[1]
        )
    for name in PACKINGS:  # with and without documents of a single token
        assert_close(local(name, None, torch.bfloat16), expected(name, None, inputs(torch.bfloat16)), bound=2e-2)
        assert not made
    q, k, v, _ = inputs(torch.bfloat16)
    whole = [s._replace(left=-1, right=-1) for s in _squares()]
    attended = kernels.RunningAttention(q, scale=0.3)
    attended.attend(k, v, whole)
    once, lse = attended.out.clone(), attended.lse.clone()
    assert once.dtype == torch.bfloat16
    attended.attend(k, v, whole)
    assert made == ["merge"]
    assert attended.out.dtype == torch.float32
    torch.testing.assert_close(attended.out, once.float(), rtol=1e-6, atol=1e-6)  # twice the same keys
    torch.testing.assert_close(attended.lse, lse + math.log(2))


def _squares() -> list[Any]:
    """A segment for each row of `inputs`, all queries by all keys."""
    return read_segments(plan_segments([[0, LENGTH]] * 2, method=None, rank=0, cp=1, window=None))


@pytest.mark.usefixtures("kernel")
def test_results_lie_in_memory_as_the_operators_promise() -> None:
    """torch.compile plans with the strides of the operators' fake results."""
    for dtype in (torch.float32, torch.bfloat16):
        heads_first = inputs(dtype)
        tokens_first = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in heads_first]
        for q, k, v, grad in (heads_first, tokens_first):
            for name, window, sinks in (("plain", None, None), ("packed", 7, None), ("plain", None, SINKS)):
                table = plan_segments(document_starts(positions(name)), method=None, rank=0, cp=1, window=window)
                out, lse = blockwise_attention(q, k, v, table, 0.3, "none", "", sinks)
                found = (out, lse, *blockwise_attention_backward([grad, q, k, v, out, lse], table, 0.3, "none", ""))
                with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    fake = [mode.from_tensor(t) for t in (q, k, v, grad)]
                    outs = blockwise_attention(*fake[:3], table, 0.3, "none", "")
                    of = [fake[3], *fake[:3], *outs]
                    promised = (*outs, *blockwise_attention_backward(of, table, 0.3, "none", ""))
                for real, one in zip(found, promised, strict=True):
                    assert (real.shape, real.stride(), real.dtype) == (one.shape, one.stride(), one.dtype)


def test_cudas_operators_take_what_they_are_given() -> None:
    """Run on meta: a torch whose operators take other arguments, or return others, is found here."""
    shapes = [(10, 6, 16), (12, 2, 16), (12, 2, 16), (10, 6, 16)]
    q, k, v, grad = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    borders = torch.empty(3, dtype=torch.int32, device="meta")
    for left, right in ((-1, 0), (7, 0), (-1, -1)):
        bounds = VarlenBounds(borders, borders, 6, 7, left, right)
        out, lse = cuda_flash_attention(q, k, v, bounds, scale=0.3)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:2], torch.float32)
        grads = cuda_flash_attention_backward(BackwardInputs(grad, q, k, v, out, lse), bounds, scale=0.3)
        assert [(one.shape, one.dtype) for one in grads] == [(one.shape, one.dtype) for one in (q, k, v)]


def by_blocks(method: Any, name: str, window: int | None, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients of all ranks' blocks in one process, one after the other, without exchanges."""
    cp, (q, k, v, grad) = 3, tensors
    starts = document_starts(positions(name))
    out = torch.empty_like(q)
    grads = tuple(kernels.zeros_for(tensor) for tensor in (q, k, v))
    for rank in range(cp):
        mine = indices_of(rank, cp=cp, length=LENGTH, method=method)
        segments = read_segments(plan_segments(starts, method=method, rank=rank, cp=cp, window=window))
        query = q[:, :, mine]
        attended = kernels.RunningAttention(query, scale=0.3)
        blocks = []
        for step in range(cp if method == "ring" else 1):
            at = indices_of((rank - step) % cp, cp=cp, length=LENGTH, method="ring" if method == "ring" else None)
            blocks.append((at, [s for s in segments if s.step == step]))
            attended.attend(k[:, :, at], v[:, :, at], blocks[-1][1])
        out[:, :, mine] = attended.out
        for at, of_step in blocks:
            key, value = k[:, :, at], v[:, :, at]
            inputs_of_block = BackwardInputs(grad[:, :, mine], query, key, value, attended.out, attended.lse)
            block_grads = kernels.attend_backward((None, None, None), inputs_of_block, of_step, scale=0.3)
            for total, part, indices in zip(grads, block_grads, (mine, at, at), strict=True):
                total[:, :, indices] += part
    return [out, *grads]


@pytest.mark.parametrize(("name", "window"), CASES)
@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.usefixtures("kernel")
def test_the_blocks_of_a_ring_in_one_process(name: str, window: int | None, method: Any) -> None:
    """Where every kernel's segments are tried."""
    assert_close(by_blocks(method, name, window, inputs()), expected(name, window), bound=1e-6)


@pytest.mark.usefixtures("kernel")
def test_scores_beyond_the_range_of_exp_are_merged() -> None:
    """In float32 exp(89) is infinite and exp(−104) is zero; partial results are merged by their log-sum-exps."""
    query, *others = inputs()
    query *= 200 / (0.3 * query @ others[0].repeat_interleave(3, 1).transpose(-1, -2)).abs().amax(-1, keepdim=True)
    tensors = (query, *others)
    for name in PACKINGS:
        assert_close(by_blocks("ring", name, None, tensors), expected(name, None, tensors), bound=1e-4)


def exchanged(method: Any, name: str, window: int | None, *, sinks: bool = False) -> list[Tensor]:
    """One rank's part of everything, gathered in order; and of the sinks' gradient the sum over ranks."""
    cp, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    chunks = chunks_of(rank, cp=cp, length=LENGTH, method=method)
    q, k, v, grad = (take_chunks(tensor, chunks, dim=2) for tensor in inputs())
    q, k, v = (tensor.clone().requires_grad_() for tensor in (q, k, v))
    table = plan_segments(document_starts(positions(name)), method=method, rank=rank, cp=cp, window=window)
    own = SINKS.clone().requires_grad_()
    out, _ = blockwise_attention(q, k, v, table, 0.3, method, group.group_name, own if sinks else None)
    out.backward(grad)
    parts = [out.detach(), q.grad, k.grad, v.grad]
    found = [gather_sequence(part, group=group, method=method, dim=2) for part in parts]
    if sinks:
        dist.all_reduce(own.grad)
        found.append(own.grad)
    return found


@pytest.mark.parametrize("cp", [2, full(3), slow(4)])
@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_exchanges(cp: int, method: str, pool: WorkerPool) -> None:
    for name, window in CASES:
        for found in pool.run(cp, exchanged, method, name, window):
            assert_close(found, expected(name, window), bound=1e-6)
    for name, window in (("plain", None), ("packed", 7)):
        for found in pool.run(cp, partial(exchanged, sinks=True), method, name, window):
            assert_close(found, expected_with_sinks(name, window), bound=1e-6)


def gradient_through_gathering(method: Any) -> tuple[Tensor, Tensor]:
    """What flows back to a rank whose every copy of the gathered sequence is weighted by index and rank."""
    cp, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    whole = torch.arange(12.0)[None, :, None].expand(2, 12, 3).clone()
    part = take_chunks(whole, chunks_of(rank, cp=cp, length=12, method=method)).requires_grad_()
    gathered = gather_sequence(part, group=group, method=method)
    assert torch.equal(gathered, whole)
    (gathered * whole * (rank + 1)).sum().backward()
    return part.detach(), part.grad


@pytest.mark.parametrize("method", ["ulysses", "ring", "allgather"])
def test_gathered_sequences_are_in_order_and_differentiable(method: str, pool: WorkerPool) -> None:
    for part, gradient in pool.run(2, gradient_through_gathering, method):
        assert torch.equal(gradient, part * 3)  # ranks weigh by 1 and 2


@pytest.mark.parametrize("widths", [(16, 8), (8, 16)], ids=["narrow values", "wide values"])
def test_values_may_have_another_width_than_keys(widths: tuple[int, int]) -> None:
    """As in latent attention; transformers pads neither."""
    (width, of_values), lengths = widths, PACKINGS["packed"]
    positions = torch.stack([positions_of(one) for one in lengths])
    q, k, v, grad = inputs()
    tensors = (q[..., :width], k[..., :width], v[..., :of_values], grad[..., :of_values])
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    segments = plan_segments(document_starts(positions), window=None, method=None, rank=0, cp=1)
    out, _ = varlen_attention(torch.nn.Module(), *leaves, None, segments=SegmentTables({None: segments}), scaling=0.3)
    out.transpose(1, 2).backward(tensors[3])
    found = [out.transpose(1, 2).detach(), *(leaf.grad for leaf in leaves)]
    for mine, theirs in zip(found, expected("packed", None, tensors), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
