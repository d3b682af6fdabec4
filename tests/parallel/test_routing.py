"""Recomputation sends tokens to the experts that the forward chose, though its router scores differ."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2kit.config.schema import ActivationCheckpointingConfig
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.weights.experts import find_experts
from tests.support.models import full, make_rows, slow, tiny_model

ROWS = make_rows(0)
MODES = ("full", "selective")
OTHERS = ["mixtral", "glm4_moe", "granitemoe", "olmoe"]


class Routers:
    """Records where each call of a model's experts sends tokens; adds noise to routers' scores in recomputation."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch, *, noise: float) -> None:
        self.forwards: list[Tensor] = []
        self.recomputations: list[Tensor] = []
        self._in_backward = False
        linear, experts = torch.nn.functional.linear, set()
        for module in find_experts(model).values():
            module.register_forward_pre_hook(self._record, with_kwargs=True)
            experts.add(module.num_experts)

        def noisy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            out = linear(x, weight, bias)
            # The same operators both times: selective checkpointing counts them.
            scale = noise if self._in_backward else 0.0
            return out + scale * torch.randn_like(out) if len(weight) in experts else out

        patch.setattr(torch.nn.functional, "linear", noisy)

    @property
    def moved(self) -> int:
        """How many choices differ between the forward and the recomputation, whose layers come last to first."""
        pairs = zip(self.forwards, reversed(self.recomputations), strict=True)
        return sum(int((one != other).sum()) for one, other in pairs)

    def _record(self, module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        index = [value for value in (*args, *options.values()) if not value.is_floating_point()]
        (self.recomputations if self._in_backward else self.forwards).append(index[0].clone())

    def gradients(self, model: Any) -> list[Tensor]:
        """Each parameter's gradient of the mean of squared logits."""
        out = model(ROWS.input_ids, position_ids=ROWS.position_ids, use_cache=False).logits.square().mean()
        self._in_backward = True
        out.backward()
        self._in_backward = False
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *itertools.product(("qwen3_moe", "deepseek_v3"), MODES),
        *(full(kind, MODES[number % 2]) for number, kind in enumerate(OTHERS)),
        *(slow(kind, MODES[1 - number % 2]) for number, kind in enumerate(OTHERS)),
    ],
)
def test_recomputation_routes_as_the_forward(kind: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(noise: float, *, checkpointed: bool = True, again: bool = False) -> tuple[Routers, list[Tensor]]:
        """With ``again``, recomputation chooses again, as in compiled layers."""
        model = tiny_model(kind).train()
        if checkpointed:
            section = ActivationCheckpointingConfig(mode=mode)
            apply_activation_checkpointing(section, decoder_layers(model), device_type="cpu", is_compiled=again)
        with monkeypatch.context() as patch:
            routers = Routers(model, patch, noise=noise)
            return routers, routers.gradients(model)

    torch.manual_seed(0)
    _, plain = run(0.0, checkpointed=False)
    exact, same = run(0.0)
    assert all(torch.equal(one, other) for one, other in zip(plain, same, strict=True))
    assert len(exact.forwards) == len(exact.recomputations) > 0
    assert run(0.5, again=True)[0].moved > 10
    assert run(0.5)[0].moved == exact.moved == 0
