"""AdamW that rounds what it stores: a device draws the host's noise, and so stores its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp2kit.config.schema import AdamWConfig
from fsdp2kit.optim.build import build_optimizer

pytestmark = pytest.mark.gpu


def stepped(device: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """A parameter and its state after a first step, of which the sums on both devices are the same but for float32's
    rounding."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(512, 300, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.randn(300, 512, generator=generator))
    model.to(device)
    section = AdamWConfig(name="adamw_bf16", lr=0.01, weight_decay=0.1)
    optimizer = build_optimizer(section, model)
    model.weight.grad = torch.randn(300, 512, generator=generator).to(device, dtype)
    optimizer.step()
    state = {key: value.cpu() for key, value in optimizer.state[model.weight].items()}
    return model.weight.detach().cpu(), state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_stores_what_the_host_stores(dtype: torch.dtype) -> None:
    ours, state = stepped("cuda", dtype)
    theirs, expected = stepped("cpu", dtype)
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-7)
    for key, value in expected.items():
        # Where a draw falls within float32's rounding of the boundary the two may take different neighbours.
        same = (state[key] == value) if value.dtype in (torch.bfloat16,) else state[key].isclose(value)
        assert same.float().mean() > 0.999, key
