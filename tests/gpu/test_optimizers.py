"""AdamW that rounds what it stores: a device draws the host's noise, and so stores its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp2kit.config.schema import AdamWConfig
from fsdp2kit.job.distributed import World
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.optim.rounded_adamw import RoundedAdamW
from fsdp2kit.torch_compat import compiled_graphs

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


SHAPES = [(512, 300), (1000, 37), (2048,), (7, 5)]


def rounded(parameters: list[nn.Parameter], *, compiles: bool) -> RoundedAdamW:
    return RoundedAdamW(parameters, lr=0.01, betas=(0.9, 0.98), eps=1e-7, weight_decay=0.1, compiles=compiles)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Equal but for float32's last bits; in bfloat16 one element, or 1 % of them, may take the other neighbour."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    else:
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
        assert (found != expected).sum() <= max(1, found.numel() // 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_update_is_that_of_plain_operations(
    dtype: torch.dtype, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    graphs = compiled_graphs()
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(world.device, dtype)

    theirs = [nn.Parameter(drawn(shape)) for shape in SHAPES]
    ours = [nn.Parameter(parameter.detach().clone()) for parameter in theirs]
    plain = rounded(theirs, compiles=False)
    compiled = rounded(ours, compiles=True)
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = drawn(tuple(other.shape))
            mine.grad = other.grad.clone()
        plain.step()
        compiled.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert_near(mine.detach(), other.detach())
            for name in ("exp_avg", "exp_avg_sq"):
                assert_near(compiled.state[mine][name], plain.state[other][name])
                compiled.state[mine][name].copy_(plain.state[other][name])
            mine.data.copy_(other)  # the next step begins from the same numbers
    assert compiled_graphs() - graphs == 1, "for every size and step"
    assert not [record for record in caplog.records if record.name.startswith("fsdp2kit")], (
        "plain operations did not take over"
    )
