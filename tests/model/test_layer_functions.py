"""Packages of CUDA kernels are installed: what runs on a CPU or on meta takes transformers' own functions."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fsdp2kit.model.layer_functions import functions_of, use_no_kernels
from fsdp2kit.parallel.context_parallel.borders import Borders
from fsdp2kit.parallel.context_parallel.recurrent import Exchange, apply_recurrent, find_recurrent
from fsdp2kit.parity.reference import Curves
from tests.planner.helpers.models import planned
from tests.support.cases import Case, run_case
from tests.support.models import PACKED_RECURRENT, full, make_batches, slow, tiny_model, tiny_model_dir
from tests.support.workers import WorkerPool

KINDS = ["bamba", *(full(kind) for kind in PACKED_RECURRENT if kind != "bamba")]
PLANNED = ("qwen3_5", "nemotron_h", "bamba", "lfm2")  # each kind of layer
# Of transformers' files: what they call a kernel for where its package is installed.
KERNELS = (
    *("causal_conv1d_fn", "causal_conv1d_update"),
    *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    *("mamba2_chunk_scan", "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined"),
)


def install_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model's layers call kernels that work on CUDA alone, as transformers does."""
    for file in {type(module).__module__ for module in tiny_model(kind).modules()}:
        scope = vars(sys.modules[file])
        for name in KERNELS:
            if name in scope:

                @functools.wraps(inspect.unwrap(scope[name]))
                def kernel(*_: Any, **__: Any) -> NoReturn:
                    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

                monkeypatch.setitem(scope, name, kernel)


@pytest.mark.parametrize("kind", [full(kind) if kind in PLANNED else slow(kind) for kind in PACKED_RECURRENT])
def test_a_plan_is_the_same_with_kernels_installed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model_dir(kind, tmp_path)
    config = Case(kind, cp=2, attention="auto").config(tmp_path, steps=1, rows=4)
    without = planned(config, ranks=2)

    install_kernels(kind, monkeypatch)
    with pytest.raises(ValueError, match="Triton"):
        tiny_model(kind)(input_ids=torch.arange(2, 34)[None], use_cache=False)

    assert planned(config, ranks=2) == without


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_on_a_cpu_runs_without_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(kind).eval(), torch.arange(2, 34)[None]
    expected = model(input_ids=ids, use_cache=False).logits

    install_kernels(kind, monkeypatch)
    with pytest.raises(ValueError, match="Triton"):
        model(input_ids=ids, use_cache=False)
    use_no_kernels(model)
    apply_recurrent(model, Exchange())

    for layer in find_recurrent(model).values():  # also what only decoding calls
        assert not [
            name for name, each in functions_of(layer).items() if name in KERNELS and hasattr(each, "__wrapped__")
        ]
    borders = Borders(starts=[[0, 32]], device=ids.device)
    assert torch.equal(model(input_ids=ids, use_cache=False, borders=borders).logits, expected)


def train(folder: Path, case: Case, *, has_kernels: bool) -> Curves:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if has_kernels:
            install_kernels(case.kind, monkeypatch)
        return run_case(folder, case, make_batches(1))


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_a_cpu_is_the_same_with_kernels_installed(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    tiny_model_dir(kind, tmp_path)
    case = Case(kind, micro=4, attention="auto")
    (without,), (found,) = (pool.run(1, train, tmp_path, case, has_kernels=each) for each in (False, True))
    assert found.loss == without.loss
    assert found.grad_norm == without.grad_norm
