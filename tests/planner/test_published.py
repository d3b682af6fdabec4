"""Published peaks, from the configurations that belong to them (docs/dev/memory.md, "Beside published figures").

Settings the published runs used differently are inputs of the comparison: what their layers keep, and what their loss
holds. Nothing is fitted: each is read from the code that was measured, and named.
"""

from __future__ import annotations

from typing import Any

import pytest

from fsdp2kit.config.checks import check_config
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.planner.activations import BackwardMemory, LayerMemory
from fsdp2kit.planner.devices import GIB
from fsdp2kit.planner.memory import Moment, reserved, step_moments
from fsdp2kit.planner.sizes import StepMemory, step_memory
from tests.planner.helpers.models import LLAMA_1B, LLAMA_8B, config_of

BF16 = {"storage_dtype": "bfloat16", "reduce_dtype": "bfloat16"}


def step_of(
    model: dict[str, Any], *, ranks: int, rows: int, length: int, layer: LayerMemory, **fsdp: Any
) -> StepMemory:
    """A step of a config whose layers all take what ``layer`` says."""
    train = {"micro_batch_size": rows}
    config = config_of(model, ranks=ranks, data={"seq_len": length}, train=train, fsdp=fsdp)
    built = build_model(config.model)
    sizes = check_config(config, world_size=ranks, local_world_size=min(8, ranks))
    plan = plan_parallel(built, config, sizes, "cuda")
    return step_memory(config, built, plan, [layer] * model["num_hidden_layers"])


def widths(model: dict[str, Any]) -> tuple[int, int, int, int]:
    """Hidden size, MLP, all heads of keys, number of heads; all heads of queries are as wide as the hidden size."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    return hidden, model["intermediate_size"], hidden // heads * model["num_key_value_heads"], heads


def at_the_loss(step: StepMemory, *, logits: int) -> Moment:
    """The moment at which the gradient of whole logits is computed.

    Args:
        logits: bytes held for each element of the logits.
    """
    now = next(moment for moment in step_moments(step) if moment.where == "end").bytes
    held = {name: now.get(name, 0) for name in ("parameters", "optimizer", "unsharded parameters")}
    # The final norm's input, and its result, which goes into the head; the last layer is gathered ahead.
    head = 2 * step.tokens * step.hidden * step.compute
    held["all-gather buffers"] = step.by_name[step.layers[-1][0]].whole if step.shards > 1 else 0
    held["activations"] = sum(layer.kept for _, layer in step.layers) + head
    return Moment("backward", "loss", {**held, "loss": logits * step.tokens * step.vocabulary})


TOKENS = 8 * 2048


def nemo_layer(*, checkpointed: bool) -> LayerMemory:
    """NeMo Automodel, autumn 2025: Liger's norms and MLP, flash attention; each part of a layer checkpointed alone."""
    h, i, k, n = widths(LLAMA_1B)
    inputs = 4 * 2 * h  # of two norms and of what follows them
    mlp = 3 * 2 * i  # gate, up, product; Liger computes the activation again
    attention = 2 * (2 * h + 2 * k) + 4 * n
    if not checkpointed:
        return LayerMemory(kept=(inputs + attention + mlp) * TOKENS)
    # Gradients of gate and up overwrite them.
    in_mlp = BackwardMemory("MLP", (inputs + mlp + 2 * (h + i)) * TOKENS, 2 * h * i)
    return LayerMemory(kept=inputs * TOKENS, recomputed=mlp * TOKENS, backward=(in_mlp,))


@pytest.mark.parametrize(
    ("published", "ranks", "checkpointed"), [(53.03, 1, False), (47.59, 8, False), (33.06, 8, True)]
)
def test_nemo_automodel_with_plain_cross_entropy(published: float, ranks: int, checkpointed: bool) -> None:
    """docs/guides/gradient-checkpointing.md: Llama 3.2 1B, 8 rows of 2,048, `max_memory_allocated`.

    The logits are held in bfloat16 by the model's output, and in float32 as log-softmax, its gradient, and theirs.
    """
    step = step_of(LLAMA_1B, ranks=ranks, rows=8, length=2048, layer=nemo_layer(checkpointed=checkpointed), **BF16)
    found = at_the_loss(step, logits=14).total / GIB
    if ranks == 1:  # where nothing is sharded, and nothing gathered
        found -= sum(unit.whole for unit in step.units if unit.name == "") / GIB
    assert found == pytest.approx(published, rel=0.03)


def test_nemo_automodel_with_linear_cross_entropy() -> None:
    """The same table's last row: no logits."""
    step = step_of(LLAMA_1B, ranks=8, rows=8, length=2048, layer=nemo_layer(checkpointed=True), **BF16)
    moments = [moment for moment in step_moments(step) if moment.where.endswith("(MLP)")]
    found = max(moment.total for moment in moments) / GIB
    assert found == pytest.approx(7.30, rel=0.03)


@pytest.mark.parametrize(
    ("published", "ranks", "rows", "length", "mode"),
    [(82.4, 8, 2, 8192, "selective"), (67.0, 128, 2, 8192, "selective"), (83.9, 8, 1, 32768, "full")],
)
def test_torchtitan(published: float, ranks: int, rows: int, length: int, mode: str) -> None:
    """benchmarks/llama3_h100_202412_torchtitan.md, tables 1, 3 and 2: what the allocator reserved.

    12 bytes for each logit are allocated at once: log-softmax, its gradient, and theirs, in float32. The bfloat16
    logits were freed before, but their block is too small for a float32 tensor.
    """
    h, i, k, _ = widths(LLAMA_8B)
    # Every second matmul's result (queries, values, up, down), attention's result, and the layer's input.
    kept = 2 * h if mode == "full" else 2 * (h + h + h + k + i + h) + 4 * 32
    layer = LayerMemory(kept=kept * rows * length)
    step = step_of(LLAMA_8B, ranks=ranks, rows=rows, length=length, layer=layer)
    assert at_the_loss(step, logits=12).total / GIB < 0.9 * published, "allocated alone is too little"
    found = reserved([*step_moments(step), at_the_loss(step, logits=14)]) / GIB
    assert found == pytest.approx(published, rel=0.08)


def test_each_stream_keeps_what_it_freed() -> None:
    moments = [
        Moment("forward", "a", {"activations": 5, "all-gather buffers": 4}),
        Moment("backward", "b", {"activations": 7, "gradients": 1, "all-gather buffers": 2}),
        Moment("optimizer", "step", {"gradients": 3, "optimizer": 2}),
    ]
    assert reserved(moments) == 7 + 4 + 3
