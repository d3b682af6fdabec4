"""Layers that carry a state, with the kernels of flash-linear-attention and mamba-ssm: documents of a pack stay apart.

The reference is each document alone, by transformers' own functions in float32 on the CPU.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2kit.job.distributed import World
from fsdp2kit.model.layer_functions import functions_of, use_no_kernels
from fsdp2kit.parallel.context_parallel import recurrent
from fsdp2kit.parallel.context_parallel.borders import Borders
from fsdp2kit.parallel.context_parallel.recurrent import SCANS, Exchange, apply_recurrent, find_recurrent
from tests.support.models import tiny_model

pytestmark = pytest.mark.gpu

STARTS = [[0, 1, 3, 70, 200], [0, 137, 200]]  # shorter and longer than a kernel's chunk
KINDS = {
    "qwen3_5": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 32, "hidden_size": 128},
}


def gradients(out: Tensor, hidden: Tensor, layer: nn.Module, slope: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, [hidden, *layer.parameters()], slope.to(out))


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all()
    assert (found.cpu().float() - expected).norm() <= 3e-2 * expected.norm()


def alone(layer: Any, hidden: Tensor) -> Tensor:
    rows = [
        torch.cat([layer(part) for part in row.split(torch.tensor(starts).diff().tolist(), dim=1)], dim=1)
        for row, starts in zip(hidden.split(1), STARTS, strict=True)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_pack_are_each_alone(kind: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model(kind, **KINDS[kind])
    plain = copy.deepcopy(model)
    use_no_kernels(plain)
    (layer,), (reference,) = find_recurrent(model).values(), find_recurrent(plain).values()
    scan = next(SCANS[name] for name in functions_of(layer) if name in SCANS)
    if not scan.kernel_takes_borders:
        pytest.skip(f"{scan.package} is not installed")
    calls = []
    by_kernel = recurrent._by_kernel
    monkeypatch.setattr(recurrent, "_by_kernel", lambda *given: calls.append(1) or by_kernel(*given))
    torch.manual_seed(0)
    width = model.config.hidden_size
    hidden, slope = torch.randn(2, 200, width), torch.randn(2, 200, width)

    on_host = hidden.clone().requires_grad_()
    expected = alone(reference, on_host)
    model.to(world.device, torch.bfloat16)
    apply_recurrent(model, Exchange())
    borders = Borders(starts=STARTS, device=world.device)
    packed = hidden.to(world.device, torch.bfloat16).requires_grad_()
    out = layer(packed, borders=borders)

    assert calls
    assert_near(out.detach(), expected.detach())
    with torch.no_grad():
        changed = packed.detach().clone()
        changed[0, 3:70] += 1
        moved = (layer(changed, borders=borders) != out).any(dim=2)
    assert moved[0, 3:70].all()
    assert not moved[0, :3].any()
    assert not moved[0, 70:].any()
    assert not moved[1].any()

    try:
        found = gradients(out, packed, layer, slope)
    except RuntimeError as refusal:
        if "upgrade Triton" not in str(refusal):
            raise
        pytest.skip(f"no backward: {refusal}")
    for one, other in zip(found, gradients(expected, on_host, reference, slope), strict=True):
        assert_near(one, other)
