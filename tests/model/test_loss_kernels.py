"""The faster ways of the chunked loss, emulated on a CPU, against cross-entropy and autograd in float64."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.utils import run_and_get_code

from fsdp2kit.model import head_chunks, loss_kernels
from fsdp2kit.model.head_chunks import Kernels, cross_entropy, over_chunks, rows_at_once
from fsdp2kit.model.loss_head import attach_loss
from fsdp2kit.model.loss_kernels import LossKernels, loss_and_slope
from fsdp2kit.torch_compat import add_float32_product, float32_product, has_float32_products
from tests.support.cases import Case, build
from tests.support.models import tiny_model, tiny_model_dir

WIDTH, VOCABULARY, ROWS = 24, 50, 7
HALF = [torch.bfloat16, torch.float16]

Sample = tuple[Tensor, Tensor, Tensor]


def sample(rows: int, dtype: torch.dtype = torch.bfloat16) -> Sample:
    """Hidden states, a head's weight, and labels."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (rows,), generator=generator)


def exact(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The summed cross-entropy of logits that are rounded as a matmul rounds them, and its gradients, in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = wide[0] @ wide[1].T
    logits = logits + (F.linear(hidden, weight).detach().double() - logits.detach())
    loss = F.cross_entropy(logits, labels, reduction="sum")
    of_hidden, of_weight = torch.autograd.grad(loss, wide)
    return loss.detach(), of_hidden, of_weight


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same by `over_chunks`, seven rows at a time."""
    loss = over_chunks(cross_entropy, hidden, labels, [weight], rows=ROWS, **options)[0]
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), of_hidden, of_weight


def distance(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm()) if expected.numel() and expected.norm() else float(difference)


def by_float32(left: Tensor, right: Tensor) -> Tensor:
    """What CUDA's operator computes."""
    return left.float() @ right.float()


def add_by_float32(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return total.add_(by_float32(left, right))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's CPU is taken for a CUDA device; what torch.compile returns runs as it was written."""
    monkeypatch.setattr(loss_kernels, "is_16_bits_on_cuda", lambda tensor: tensor.dtype in HALF)
    monkeypatch.setattr(loss_kernels, "has_float32_products", lambda tensor: tensor.dtype in HALF)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for module in (head_chunks, loss_kernels):
        monkeypatch.setattr(module, "float32_product", by_float32)
        monkeypatch.setattr(module, "add_float32_product", add_by_float32)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda logits: logits,
    "ties": torch.zeros_like,
    "large": lambda logits: logits * 1000,
    "masked words": lambda logits: logits.index_fill(1, torch.arange(5, 9), -torch.inf),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_slope_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    logits = CASES[name](torch.randn(20, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(dtype))
    labels = torch.arange(20) + 20
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none")
    expected.sum().backward()
    losses, slope = loss_and_slope(logits, labels)
    assert (losses.shape, losses.dtype, slope.dtype) == ((20, 1), torch.float32, dtype)
    torch.testing.assert_close(losses[:, 0], expected.detach().float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(slope.float(), wide.grad.float(), rtol=2**-8, atol=1e-6)


def test_what_is_not_finite_is_so_in_both_ways() -> None:
    logits = torch.randn(4, VOCABULARY).bfloat16()
    logits[0] = -torch.inf
    logits[1, 3], logits[2, 3] = torch.inf, torch.nan
    logits[3, 0] = -torch.inf  # whose label it is
    labels = torch.zeros(4, dtype=torch.int64)
    losses, slope = loss_and_slope(logits, labels)
    plain_losses, plain_slope = cross_entropy(logits.float(), labels, slice(0, 4), wants_slope=True)
    torch.testing.assert_close(losses, plain_losses, equal_nan=True)
    assert plain_slope is not None
    torch.testing.assert_close(slope, plain_slope.bfloat16(), equal_nan=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 20])
def test_chunks_agree_with_float64(rows: int, dtype: torch.dtype, device: None) -> None:
    """No row, one, a last chunk of one, and several chunks."""
    tensors, kernels = sample(rows, dtype), LossKernels(compiles=True)
    found = chunked(*tensors, kernels=Kernels(kernels.compiled_loss(*tensors), kernels.adds_products))
    for ours, expected, bound in zip(found, exact(*tensors), (1e-6, 4e-3, 4e-3), strict=True):
        assert distance(ours, expected) <= bound
    assert [tensor.dtype for tensor in found] == [torch.float32, dtype, dtype]


def test_one_graph_serves_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = partial(torch.compile, backend=backend)
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph, options: compiled(function, fullgraph=fullgraph))
    kernels, labels = LossKernels(compiles=True), torch.arange(600) % VOCABULARY
    for start, rows in [(0, 37), (37, 36), (300, 300), (73, 2)]:
        logits, part = torch.randn(rows, VOCABULARY).bfloat16(), labels[start : start + rows]
        losses, _ = kernels._run(logits, part)
        torch.testing.assert_close(losses, loss_and_slope(logits, part)[0])
    assert len(graphs) == 1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor's imports
def test_what_is_compiled_agrees_and_keeps_no_wide_logits() -> None:
    logits, labels = torch.randn(37, 501).bfloat16(), torch.randint(501, (37,))
    kernels = LossKernels(compiles=True)
    (losses, slope), (code,) = run_and_get_code(kernels._run, logits, labels)
    expected_losses, expected_slope = loss_and_slope(logits, labels)
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(slope, expected_slope)
    buffers = [line for line in code.splitlines() if "empty_strided_cpu(" in line and "501" in line]
    assert len(buffers) == 1, "the gradient alone is as large as the logits"
    assert "torch.bfloat16" in buffers[0]
    assert code.count("async_compile.cpp_pybinding(") <= 2, "one kernel for the loss, one for the gradient"


def test_values_with_factors_keep_the_plain_way(device: None) -> None:
    hidden, weight, labels = sample(20)
    loss = LossKernels(compiles=True).compiled_loss(hidden, weight, labels)
    assert loss is not None
    values = over_chunks(cross_entropy, hidden, labels, [weight], rows=ROWS, summed=False)[0]
    ours = over_chunks(cross_entropy, hidden, labels, [weight], rows=ROWS, summed=False, kernels=Kernels(loss))[0]
    factors = torch.randn(20)
    expected = torch.autograd.grad((values * factors).sum(), (hidden, weight))
    found = torch.autograd.grad((ours * factors).sum(), (hidden, weight))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("rows", [3, 7, 8, 40])
def test_products_add_up_the_gradient_without_rounding_each(rows: int, device: None) -> None:
    tensors = sample(rows)
    plain, found = (chunked(*tensors, kernels=Kernels(None, adds)) for adds in (None, LossKernels().adds_products))
    if rows <= ROWS:  # one chunk alone: its product is the gradient
        assert all(map(torch.equal, found, plain))
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])
    expected = exact(*tensors)[2]
    assert distance(found[2], expected) <= max(2e-3, distance(plain[2], expected))


def test_the_sum_is_made_of_the_first_product_and_stays_in_place(
    monkeypatch: pytest.MonkeyPatch, device: None
) -> None:
    totals: list[int] = []
    monkeypatch.setattr(
        head_chunks, "float32_product", lambda *args: totals.append((made := by_float32(*args)).data_ptr()) or made
    )
    monkeypatch.setattr(
        head_chunks,
        "add_float32_product",
        lambda total, *args: totals.append(total.data_ptr()) or add_by_float32(total, *args),
    )
    chunked(*sample(40), kernels=Kernels(None, LossKernels().adds_products))
    assert len(totals) == 6
    assert len(set(totals)) == 1


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="addmm of torch 2.11 takes no out_dtype on meta")
def test_cudas_operators_take_what_they_are_given() -> None:
    """Run on meta: a torch whose operators take other arguments, or return others, is found here."""
    slope, chunk = (torch.empty(8, size, dtype=torch.bfloat16, device="meta") for size in (VOCABULARY, WIDTH))
    made = float32_product(slope.t(), chunk)
    assert (made.shape, made.dtype, made.stride()) == ((VOCABULARY, WIDTH), torch.float32, (WIDTH, 1))
    assert add_float32_product(made, slope.t(), chunk) is made
    schema = str(torch.ops.aten.addmm.dtype_out._schema)
    assert schema.startswith("aten::addmm.dtype_out(Tensor self, Tensor mat1, Tensor mat2, ScalarType out_dtype, *,")


def test_a_cpu_keeps_the_plain_way() -> None:
    tensors, kernels = sample(20), LossKernels(compiles=True)
    assert kernels.compiled_loss(*tensors) is None
    assert not kernels.adds_products(tensors[1].t(), tensors[1])
    assert not has_float32_products(tensors[0])
    assert all(map(torch.equal, chunked(*tensors, kernels=Kernels(None, kernels.adds_products)), chunked(*tensors)))


def test_a_run_that_does_not_compile_waits_for_no_compiler(device: None) -> None:
    assert LossKernels(compiles=False).compiled_loss(*sample(20)) is None


def fails(*_: Any) -> Any:
    raise RuntimeError("no compiler\nand more")


def off_by_a_little(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    losses, slope = loss_and_slope(logits, labels)
    return losses, slope * 1.01


def forgets_total(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return total.copy_(by_float32(left, right))


def rounds(left: Tensor, right: Tensor) -> Tensor:
    return (left @ right).float()


@pytest.mark.parametrize(
    ("name", "other", "says"),
    [
        (
            "loss_and_slope",
            fails,
            "the compiled loss cannot be used here (RuntimeError: no compiler); the run goes on",
        ),
        ("loss_and_slope", off_by_a_little, "the compiled loss computes other numbers"),
        ("float32_product", fails, "the product that adds up the head's gradient cannot be used here"),
        ("float32_product", rounds, "adds up the head's gradient computes other numbers"),
        ("add_float32_product", forgets_total, "adds up the head's gradient computes other numbers"),
    ],
)
def test_what_fails_or_differs_is_left_with_one_warning(
    name: str, other: Any, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: None
) -> None:
    monkeypatch.setattr(loss_kernels, name, other)
    tensors, kernels = sample(20), LossKernels(compiles=True)
    for _ in range(2):
        loss = kernels.compiled_loss(*tensors)
        found = chunked(*tensors, kernels=Kernels(loss, kernels.adds_products))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert says in record.getMessage()
    if name == "loss_and_slope":
        assert loss is None
        assert all(map(torch.equal, found[:2], chunked(*tensors)[:2]))
    else:
        assert all(map(torch.equal, found, chunked(*tensors, kernels=Kernels(loss))))


def test_an_end_of_memory_is_no_reason_to_go_on(monkeypatch: pytest.MonkeyPatch, device: None) -> None:
    def ends(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(loss_kernels, "loss_and_slope", ends)
    with pytest.raises(torch.OutOfMemoryError):
        LossKernels(compiles=True).compiled_loss(*sample(20))


def test_narrow_logits_come_in_larger_chunks(monkeypatch: pytest.MonkeyPatch, device: None) -> None:
    monkeypatch.setitem(head_chunks._CHUNK_BYTES, "cpu", 8 * 4 * 128)
    assert rows_at_once(torch.device("cpu"), vocabulary=128) == 8
    model: Any = tiny_model("llama3").bfloat16()
    attach_loss(model, compiles=True)
    ids = torch.arange(30)[None]
    seen, linear = [], F.linear
    model.loss_sum(ids, ids)  # tries both
    monkeypatch.setattr(F, "linear", lambda *args: seen.append(linear(*args)) or seen[-1])
    model.loss_sum(ids, ids).backward()
    logits = [len(each) for each in seen if each.shape[-1] == 128 and each.ndim == 2]
    assert logits == [12, 12, 6]
    with torch.no_grad():
        model.loss_sum(ids, ids)
    assert [len(each) for each in seen if each.shape[-1] == 128 and each.ndim == 2][3:] == [8, 8, 8, 6]


@pytest.mark.parametrize("compiled", [False, True])
def test_compile_enabled_reaches_the_head(compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    tiny_model_dir("llama3", tmp_path)
    model = build(Case("llama3", compiled=compiled).config(tmp_path, steps=1, rows=2)).model
    assert model.get_output_embeddings().kernels.compiles is compiled
