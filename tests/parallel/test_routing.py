"""Recomputation sends tokens to the experts that the forward chose, though its router scores differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2kit.config.schema import ActivationCheckpointingConfig
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.experts import find_experts
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from tests.reference import full, make_rows, tiny_model

ROWS = make_rows(0)
OTHERS = ["mixtral", "glm4_moe", "granitemoe", "olmoe"]


class Routers:
    """Records where each call of a model's experts sends tokens; adds noise to routers' scores in recomputation."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch, *, noise: float) -> None:
        self.forwards: list[Tensor] = []
        self.recomputations: list[Tensor] = []
        self.moved = 0
        """How many choices noise would have changed in recomputation."""
        self._in_backward = False
        for module in find_experts(model).values():
            module.register_forward_pre_hook(self._record, with_kwargs=True)
        topk = torch.Tensor.topk

        def noisy(scores: Tensor, *args: Any, **options: Any) -> Any:
            # The same operators both times: selective checkpointing counts them.
            other = scores + (noise if self._in_backward else 0.0) * torch.randn_like(scores)
            self.moved += int((other.argmax(-1) != scores.argmax(-1)).sum())
            return topk(other, *args, **options)

        patch.setattr(torch, "topk", noisy)
        patch.setattr(torch.Tensor, "topk", noisy)

    def _record(self, module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        index = [value for value in (*args, *options.values()) if not value.is_floating_point()]
        (self.recomputations if self._in_backward else self.forwards).append(index[0].clone())

    def gradients(self, model: Any) -> list[Tensor]:
        """Of the sum of a batch's logits' squares."""
        out = model(ROWS.input_ids, position_ids=ROWS.position_ids, use_cache=False).logits.square().mean()
        self._in_backward = True
        out.backward()
        self._in_backward = False
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", *map(full, OTHERS)])
def test_recomputation_routes_as_the_forward(kind: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(noise: float, *, checkpointed: bool = True) -> tuple[Routers, list[Tensor]]:
        model = tiny_model(kind).train()
        if checkpointed:
            section = ActivationCheckpointingConfig(mode=mode)
            apply_activation_checkpointing(section, decoder_layers(model), device_type="cpu")
        with monkeypatch.context() as patch:
            routers = Routers(model, patch, noise=noise)
            return routers, routers.gradients(model)

    torch.manual_seed(0)
    _, plain = run(0.0, checkpointed=False)
    exact, same = run(0.0)
    assert all(torch.equal(one, other) for one, other in zip(plain, same, strict=True))
    noisy, _ = run(0.5)
    assert noisy.moved > 10
    for routers in (exact, noisy):  # layers are recomputed last to first
        assert len(routers.forwards) == len(routers.recomputations) > 0
        for one, other in zip(routers.forwards, reversed(routers.recomputations), strict=True):
            assert torch.equal(one, other)
