"""FlashAttention-2, 3 and 4 on one CUDA device compute what plain operations do; 3 and 4 pass their trial."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import attention as torch_attention

from fsdp2kit.parallel.context_parallel.flash import BOUND, Trial, apply_flash
from fsdp2kit.parallel.context_parallel.layout import FlashChoice, HeadShape

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SHAPES = [HeadShape(8, 8, 64), HeadShape(32, 8, 128), HeadShape(16, 1, 64), HeadShape(4, 2, 256), HeadShape(4, 4, 192)]
MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Later tests run on torch's own."""
    yield
    if torch_attention.current_flash_attention_impl() is not None:
        torch_attention.restore_flash_attention_impl()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torchs_own_is_far_below_the_bound_of_a_trial(shape: HeadShape) -> None:
    assert torch_attention.current_flash_attention_impl() is None
    differences = Trial(shape, dtype=torch.bfloat16, device=DEVICE).differences((None, 37))
    assert max(differences.values()) < BOUND / 2


@pytest.mark.parametrize("impl", MODULES)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_a_package_passes_its_trial(shape: HeadShape, impl: str) -> None:
    """Of widths that both have on Hopper; how they refuse others is in tests/parallel/test_flash.py."""
    pytest.importorskip(MODULES[impl])
    apply_flash(FlashChoice(impl, impl, "as asked for", (shape,), (None, 37)), device=DEVICE)
    assert torch_attention.current_flash_attention_impl() == impl
    differences = Trial(shape, dtype=torch.bfloat16, device=DEVICE).differences((None, 37))
    assert max(differences.values()) < BOUND


@pytest.mark.parametrize("impl", MODULES)
def test_a_package_repeats_its_bits_in_deterministic_runs(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(MODULES[impl])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    apply_flash(FlashChoice(impl, impl, "as asked for", (SHAPES[1],), (None,)), device=DEVICE)
    assert Trial(SHAPES[1], dtype=torch.bfloat16, device=DEVICE).repeats()
