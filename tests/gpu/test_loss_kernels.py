"""The loss in chunks on one CUDA device, against plain cross-entropy in float64 and plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit.job.distributed import World
from fsdp2kit.model.head_chunks import Kernels, cross_entropy, over_chunks, rows_at_once
from fsdp2kit.model.loss_kernels import LossKernels
from fsdp2kit.parity.reference import errors, plain_loop
from tests.support.cases import Case, run_case
from tests.support.models import make_batches, tiny_model_dir

pytestmark = pytest.mark.gpu

WIDTH, VOCABULARY = 64, 5_000


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    rows = rows_at_once(hidden.device, vocabulary=VOCABULARY)
    return over_chunks(cross_entropy, hidden, labels, [weight], rows=rows)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_value_and_gradients(rows: int, dtype: torch.dtype, world: World) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=generator).mul_(WIDTH**-0.5).to(world.device, dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(world.device, dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (rows,), generator=generator).to(world.device)

    loss = loss_of(hidden, weight, labels)
    (loss * 0.25).backward()

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")
    (expected * 0.25).backward()
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=bound)
    for mine, other in zip((hidden, weight), exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert mine.grad.dtype == dtype
        assert (mine.grad - other.grad).norm() <= bound * other.grad.norm()


def test_a_head_alone_is_trained(world: World) -> None:
    """As where all below it is frozen."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, WIDTH, generator=generator).to(world.device)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(world.device).requires_grad_()
    labels = torch.randint(VOCABULARY, (20,), generator=generator).to(world.device)
    loss = loss_of(hidden, weight, labels)
    (found,) = torch.autograd.grad(loss, weight)
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ways", ["products", "compiled", "both"])
def test_faster_ways_agree_with_float64(
    ways: str, dtype: torch.dtype, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """In chunks of 200 rows, 101 rows, and one row. A CPU has neither way and keeps the plain one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(world.device, dtype).requires_grad_()
    kernels = LossKernels(compiles=True)
    for rows in (501, 401):
        hidden = torch.randn(rows, WIDTH, generator=generator).mul_(WIDTH**-0.5).to(world.device, dtype)
        hidden.requires_grad_()
        labels = torch.randint(VOCABULARY, (rows,), generator=generator).to(world.device)
        loss = kernels.compiled_loss(hidden, weight, labels) if ways != "products" else None
        assert (loss is not None) == (world.device.type == "cuda" and ways != "products")
        chosen = Kernels(loss, kernels.adds_products if ways != "compiled" else None)
        found = over_chunks(cross_entropy, hidden, labels, [weight], rows=200, kernels=chosen)[0]
        gradients = torch.autograd.grad(found, (hidden, weight))

        exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
        expected = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")
        assert found.item() == pytest.approx(expected.item(), rel=1e-3)
        for mine, other in zip(gradients, torch.autograd.grad(expected, exact), strict=True):
            assert (mine - other).norm() <= 1e-2 * other.norm()
    assert not [record for record in caplog.records if record.name.startswith("fsdp2kit")], (
        "each way passed its own comparison"
    )


@pytest.mark.parametrize("kind", ["smollm2", "llama3"])
def test_steps_are_those_of_plain_transformers(kind: str, tmp_path: Path, world: World) -> None:
    path, batches = tiny_model_dir(kind, tmp_path), make_batches()
    batches[1].labels[:2] = -100  # a micro-batch without a target
    found = run_case(tmp_path, Case(kind, micro=2), batches)
    expected = plain_loop(path, batches, micro_batch_size=2, lr=1e-3, device=str(world.device))
    assert max(errors(found, expected).values()) < 1e-5
