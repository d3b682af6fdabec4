"""Activation checkpointing: what each mode keeps, and what it does twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2kit.config.schema import ActivationCheckpointingConfig
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.loss_head import attach_loss
from fsdp2kit.parallel import activation_checkpointing
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.planner.allocations import Allocations, by_category
from tests.support.models import make_batches, tiny_model

LAYERS, TOKENS = 4, 256
# hidden, intermediate = 3.5 × hidden, and a quarter as many keys as queries, as in Llama 3 8B.
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
VARIANTS = {
    "none": ActivationCheckpointingConfig(),
    "selective": ActivationCheckpointingConfig(mode="selective"),
    "full, every 2": ActivationCheckpointingConfig(mode="full", every=2),
    "full": ActivationCheckpointingConfig(mode="full"),
}


def count(model: Any, tokens: Tensor) -> tuple[int, int]:
    """Bytes alive between forward and backward that were not before, and operations of both passes.

    Attention's operations are among them on CUDA only: torch does not count those of its CPU kernel.
    """
    with FlopCounterMode(display=False) as operations:
        with Allocations() as allocations:
            allocations.mark([tokens, *model.parameters(), *model.buffers()], "before")
            loss = model.loss_sum(tokens, tokens)
        kept = by_category(allocations.snapshot())["activations"]
        loss.backward()
    model.zero_grad()
    return kept, operations.get_total_flops()


def build(section: ActivationCheckpointingConfig) -> Any:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=LAYERS, **SHAPE))
    attach_loss(model, own_head=False)
    apply_activation_checkpointing(section, decoder_layers(model), device_type="cpu")
    return model


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[int, int]]:
    tokens = (torch.arange(TOKENS) % 97)[None]
    return {name: count(build(section), tokens) for name, section in VARIANTS.items()}


@pytest.mark.full
def test_full_keeps_the_layers_inputs(counted: dict[str, tuple[int, int]]) -> None:
    hidden = TOKENS * SHAPE["hidden_size"] * 4
    rest = 5 * hidden  # what embedding, final norm and head keep, whatever the layers do
    assert LAYERS * hidden <= counted["full"][0] < LAYERS * hidden + rest
    # of two layers one is as if there were no checkpointing
    between = (counted["full"][0] + counted["none"][0]) / 2
    assert counted["full, every 2"][0] == pytest.approx(between, rel=0.02)


def test_full_runs_the_layers_forward_twice(counted: dict[str, tuple[int, int]]) -> None:
    hidden, wide = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    keys = hidden * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    products = 2 * hidden + 2 * keys + 2 * wide  # q, o, k, v, gate, up; down is not needed again
    # torch's counter does not know the CPU's attention kernel, which runs twice as well.
    assert counted["full"][1] - counted["none"][1] == LAYERS * 2 * TOKENS * hidden * products


def test_selective_keeps_about_half_and_repeats_no_product(counted: dict[str, tuple[int, int]]) -> None:
    (kept, operations), (all_kept, all_operations) = counted["selective"], counted["none"]
    assert operations == all_operations
    assert kept < 0.62 * all_kept


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_selective_keeps_no_scores(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention's S² scores are what one would not want to keep."""
    kept: list[str] = []
    original = activation_checkpointing._keep_or_recompute

    def noting(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        policy = original(context, operator, *args, **kwargs)
        if policy == CheckpointPolicy.MUST_SAVE:
            kept.append(str(operator))
        return policy

    monkeypatch.setattr(activation_checkpointing, "_keep_or_recompute", noting)
    model: Any = tiny_model("smollm2")
    model.set_attn_implementation(attention)
    section = ActivationCheckpointingConfig(mode="selective")
    apply_activation_checkpointing(section, list(model.model.layers), device_type="cpu")
    rows = make_batches(1)[0]
    model(input_ids=rows.input_ids, use_cache=False).logits.sum().backward()
    words = {word.partition(".")[2] for word in set(kept)}
    assert any("mm" in word for word in words)
    assert any("attention" in word for word in words) == (attention == "sdpa")
    assert not any("bmm" in word for word in words)


def test_offloaded_inputs_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the layers' inputs go to the host and come back; here they only take that way."""
    moved: list[torch.Size] = []

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.shape)
        return tensor

    class SaveOnCPU(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            assert pin_memory
            super().__init__(noting, lambda tensor: tensor)

    monkeypatch.setattr(activation_checkpointing, "save_on_cpu", SaveOnCPU)
    plain, model = (tiny_model("smollm2") for _ in range(2))
    model.load_state_dict(plain.state_dict())
    section = ActivationCheckpointingConfig(mode="full", offload=True)
    apply_activation_checkpointing(section, list(model.model.layers), device_type="cuda")
    rows = make_batches(1)[0]
    for each in (plain, model):
        each(input_ids=rows.input_ids, use_cache=False).logits.square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    shape = (*rows.input_ids.shape, model.config.hidden_size)
    assert [size for size in moved if len(size) == 3 and size[-1] == shape[-1]].count(torch.Size(shape)) == 2
    parameters = {parameter.shape for parameter in model.parameters()}
    assert not parameters & set(moved), "parameters are FSDP's to move"
