"""Packages of CUDA kernels are installed: what runs on a CPU or on meta takes transformers' own functions."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fsdp2kit.model.layer_functions import functions_of, transformers_own, use_no_kernels
from fsdp2kit.parallel.context_parallel.borders import Borders
from fsdp2kit.parallel.context_parallel.recurrent import Exchange, apply_recurrent, find_recurrent
from tests.parallel.jobs import Case
from tests.planner.models import planned
from tests.reference import RECURRENT, full, tiny_model, tiny_model_dir


def install_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a model's layers call kernels that work on CUDA alone, as transformers does; return their names."""
    installed = []
    for module in tiny_model(kind).modules():
        scope = vars(sys.modules[type(module).__module__])
        for name, function in functions_of(module).items():
            if hasattr(function, "__wrapped__") and function.__module__ == scope["__name__"]:

                @functools.wraps(transformers_own(function))
                def kernel(*tensors: Any, **_: Any) -> NoReturn:
                    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

                monkeypatch.setitem(scope, name, kernel)
                installed.append(name)
    return installed


@pytest.mark.parametrize(("kind", "cp"), [("bamba", 2), *(full(kind, 2) for kind in RECURRENT if kind != "bamba")])
def test_a_plan_is_the_same_with_kernels_installed(
    kind: str, cp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model_dir(kind, tmp_path)
    config = Case(kind, 2 // cp, cp, attention="auto").config(tmp_path, steps=1, rows=4)
    without = planned(config, ranks=2)

    assert install_kernels(kind, monkeypatch)

    assert planned(config, ranks=2) == without


@pytest.mark.parametrize("kind", ["bamba", *(full(kind) for kind in RECURRENT if kind != "bamba")])
def test_a_model_on_a_cpu_runs_without_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(kind).eval(), torch.arange(2, 34)[None]
    expected = model(input_ids=ids, use_cache=False).logits

    install_kernels(kind, monkeypatch)
    with pytest.raises(ValueError, match="Triton"):
        model(input_ids=ids, use_cache=False)
    use_no_kernels(model)
    apply_recurrent(model, Exchange())

    for layer in find_recurrent(model).values():  # also what only decoding calls
        assert not [name for name in functions_of(layer) if hasattr(layer.forward.__globals__[name], "__wrapped__")]
    borders = Borders(starts=[[0, 32]], device=ids.device)
    assert torch.equal(model(input_ids=ids, use_cache=False, borders=borders).logits, expected)
