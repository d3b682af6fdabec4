"""Kernels of the loss on the head: torch's against plain cross-entropy in float64, the choice, and each refusal."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.model.inspect import inspect_model
from fsdp2kit.model.linear_cross_entropy import (
    _CHUNK_BYTES,
    liger_linear_cross_entropy,
    linear_loss,
    torch_linear_cross_entropy,
)
from fsdp2kit.model.loss_head import attach_loss, choose_loss, select_supervised
from fsdp2kit.parity.reference import Curves, Rows, cross_entropy_sum, errors, plain_logits, plain_loop
from tests.parallel.jobs import Case, run_cases
from tests.reference import full, make_batches, make_rows, tiny_model, tiny_model_dir
from tests.workers import WorkerPool

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WIDTH, VOCABULARY, ROWS = 24, 500, 64
HAS_TORCHS = hasattr(F, "linear_cross_entropy")
needs_torchs = pytest.mark.skipif(not HAS_TORCHS, reason="torch has it from 2.13 on")
TINY = {"model_type": "llama", "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head's weight and labels."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=generator).mul_(WIDTH**-0.5).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (rows,), generator=generator)


def exactly(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plain cross-entropy over all logits in float64, and its gradients, those of a quarter of it."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    loss = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    (loss * 0.25).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


@needs_torchs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, ROWS, ROWS + 1, 5 * ROWS])
def test_torchs_kernel_is_plain_cross_entropy(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_CHUNK_BYTES, "cpu", ROWS * 4 * VOCABULARY)
    hidden, weight, labels = inputs(rows, dtype)
    loss = torch_linear_cross_entropy(hidden, weight, labels)
    (loss * 0.25).backward()
    expected, *gradients = exactly(hidden, weight, labels)
    # bfloat16: a rounding of half of 1/128 for every chunk that is summed, and one for every chunk that is added.
    bound = 1e-5 if dtype == torch.float32 else math.ceil(rows / ROWS) / 128
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=bound)
    for tensor, gradient in zip((hidden, weight), gradients, strict=True):
        assert tensor.grad is not None, "it takes part"
        assert tensor.grad.dtype == dtype
        assert (tensor.grad - gradient).norm() / gradient.norm() < (1e-5 if dtype == torch.float32 else 1e-2)


@needs_torchs
def test_torchs_kernel_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_CHUNK_BYTES, "cpu", ROWS * 4 * VOCABULARY)
    hidden, weight, labels = inputs(16 * ROWS, torch.float32)
    with torch.profiler.profile(profile_memory=True) as profile:
        torch_linear_cross_entropy(hidden, weight, labels).backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events() or [])
    assert largest < 8 * ROWS * VOCABULARY * 4


@pytest.mark.parametrize("kernel", [pytest.param("torch", marks=needs_torchs), "liger"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_target_head_and_states_have_gradients_of_zero(kernel: Any, dtype: torch.dtype) -> None:
    """Other ranks wait for this one's part of the head's gradient; Liger's kernel itself is not asked."""
    hidden, weight, labels = inputs(0, dtype)
    loss, sums = linear_loss(kernel, hidden, weight, labels)
    loss.backward()
    assert loss.item() == 0
    assert loss.dtype == torch.float32
    assert sums is None
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, WIDTH)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@needs_torchs
@pytest.mark.parametrize("kind", ["smollm2", full("llama3")])
def test_attached_torchs_kernel_gives_the_models_own_loss(kind: str) -> None:
    rows, plain = make_rows(3), tiny_model(kind)
    model: Any = tiny_model(kind)
    attach_loss(model, kernel="torch")
    loss = model.loss_sum(rows.input_ids, rows.labels, position_ids=rows.position_ids)
    loss.backward()
    expected = cross_entropy_sum(plain_logits(plain, rows), rows.labels)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)


def run_counted(folder: Path, cases: Sequence[Case], batches: Sequence[Rows]) -> tuple[list[Curves], list[int]]:
    """Each case's curves, and how often torch's kernel was called on this rank."""
    curves, calls = [], []
    for case in cases:
        with mock.patch.object(F, "linear_cross_entropy", wraps=F.linear_cross_entropy) as kernel:
            curves += run_cases(folder, [case], batches)
        calls.append(kernel.call_count)
    return curves, calls


@pytest.mark.full
@needs_torchs
@pytest.mark.parametrize("kind", ["smollm2", "llama3"])
def test_torchs_kernel_trains_as_plain_transformers_on_two_ranks(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    """Tied and untied, cp and dp; in the second batch one of two ranks has no target."""
    path, batches = tiny_model_dir(kind, tmp_path), make_batches(3)
    half = batches[1].labels.shape[0] // 2
    batches[1].labels[:half] = -100
    cases = [
        Case(kind, 1, 2, loss_kernel="torch"),
        Case(kind, 2, 1, loss_kernel="torch"),
        Case(kind, 2, 1, fsdp=(("param_dtype", "bfloat16"),), loss_kernel="torch"),
    ]
    (*exact, rounded), calls = pool.run(2, run_counted, tmp_path, cases, batches)[0]
    assert calls == [(1 + len(batches)) * rows for rows in (4, 2, 2)], "for the gradients, then for every step"
    expected, narrow = (
        plain_loop(path, batches, micro_batch_size=1, lr=1e-3, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    for found in exact:
        assert max(errors(found, expected).values()) < 1e-5
    # One chunk: a rounding of the loss, and one of the factor that every gradient is scaled by, of 1/256 each.
    found, control = errors(rounded, expected), errors(narrow, expected)
    assert all(found[name] < 3 * control[name] + 1 / 128 for name in found)


def config_of(kernel: str, *, model: dict[str, Any] | None = None, **sections: Any) -> TrainingConfig:
    section = {"config": model or TINY, "weights": "random", "loss_kernel": kernel}
    return TrainingConfig.model_validate({"recipe": "none", "model": section, **sections})


def choose(config: TrainingConfig, device: torch.device | None) -> str:
    model = build_model(config.model)
    return str(choose_loss(config, model, device=device, traits=inspect_model(model)))


GEMMA = {**TINY, "model_type": "gemma2", "final_logit_softcapping": 30.0, "head_dim": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("kernel", "model", "device", "says"),
    [
        ("auto", TINY, CPU, "loss: chunked (auto: none faster was found on a CPU)"),
        (
            "auto",
            TINY,
            CUDA,
            "loss: chunked (auto: the others are not measured on a GPU; model.loss_kernel picks one)",
        ),
        ("chunked", TINY, CPU, "loss: chunked (model.loss_kernel)"),
        ("auto", GEMMA, CPU, "loss: the model's own head, in chunks (its logits are more than hidden @ weightᵀ)"),
        ("chunked", GEMMA, CPU, "loss: the model's own head, in chunks (its logits are more than hidden @ weightᵀ)"),
        pytest.param(
            "torch",
            TINY,
            CUDA,
            "loss: torch (model.loss_kernel; it adds up the loss in bfloat16)",
            marks=needs_torchs,
        ),
        ("liger", TINY, None, "loss: liger (model.loss_kernel)"),  # as `--check` sees it, wherever that runs
    ],
)
def test_the_choice_is_reported(kernel: str, model: dict[str, Any], device: torch.device, says: str) -> None:
    assert choose(config_of(kernel, model=model), device) == says


@pytest.mark.parametrize(
    ("kernel", "device", "options", "says"),
    [
        ("liger", CPU, {}, "Liger's kernels do not run on a CPU"),
        ("liger", CUDA, {}, r"liger_kernel, which cannot be imported.*pip install 'fsdp2kit\[liger\]'"),
        (
            "liger",
            None,
            {"model": GEMMA},
            "Gemma2ForCausalLM, whose logits are more than hidden @ weightᵀ; use 'auto'",
        ),
        ("liger", None, {"data": {"sources": [{"path": "/x"}]}}, "data.sources, each of whose losses it cannot tell"),
        pytest.param("torch", CPU, {"model": GEMMA}, "Gemma2ForCausalLM, whose logits are more", marks=needs_torchs),
        pytest.param("torch", CPU, {"data": {"sources": [{"path": "/x"}]}}, "data.sources", marks=needs_torchs),
    ],
)
def test_a_kernel_that_cannot_be_had_is_refused(
    kernel: str, device: torch.device | None, options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UserError, match=r"^model\.loss_kernel: .*" + says) as refusal:
        choose(config_of(kernel, **options), device)
    assert "\n" not in str(refusal.value)


def test_torch_before_2_13_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(UserError, match=r"^model\.loss_kernel: .*has no linear_cross_entropy; use torch 2\.13 or"):
        choose(config_of("torch"), CPU)


@needs_torchs
def test_losses_by_group_are_not_made_up() -> None:
    rows, model = make_rows(3), tiny_model("llama3")
    attach_loss(model, kernel="torch")
    groups = torch.zeros(len(select_supervised(rows.labels)), dtype=torch.int64)
    with pytest.raises(ValueError, match="'torch' gives no losses by group"):
        model.loss_sum(rows.input_ids, rows.labels, groups=groups, num_groups=1)


@pytest.mark.parametrize("backbone_trains", [True, False])
def test_ligers_kernel_is_asked_for_the_sum_with_gradients_in_float32(
    backbone_trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with the signature of `LigerFusedLinearCrossEntropyLoss` in liger-kernel 0.8.5."""
    asked: dict[str, Any] = {}

    def build(**options: Any) -> Any:
        asked.update(options)

        def loss(lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
            assert bias is None
            asked["hidden trains"] = _input.requires_grad  # without it, Liger's has no gradient for the weight
            return F.cross_entropy(_input @ lin_weight.T, target, reduction="sum")

        return loss

    package, module = types.ModuleType("liger_kernel"), types.ModuleType("liger_kernel.transformers")
    module.LigerFusedLinearCrossEntropyLoss = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    hidden, weight, labels = inputs(9, torch.float32)
    hidden.requires_grad_(backbone_trains)

    loss = liger_linear_cross_entropy(hidden, weight, labels)

    assert asked == {"reduction": "sum", "accum_dtype": torch.float32, "hidden trains": True}
    (loss * 0.25).backward()
    expected, hidden_gradient, weight_gradient = exactly(hidden, weight, labels)
    torch.testing.assert_close(loss.double(), expected)
    torch.testing.assert_close(weight.grad, weight_gradient.float())
    if backbone_trains:
        torch.testing.assert_close(hidden.grad, hidden_gradient.float())
