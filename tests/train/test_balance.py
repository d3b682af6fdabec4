"""Balancing experts: transformers' own loss of each row, and biases moved by counts, the same on every mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fsdp2kit import distributed
from fsdp2kit.config.optimization import AnyMoE
from fsdp2kit.data.loader import Batch
from fsdp2kit.model.loss_head import IGNORE
from fsdp2kit.parity.engine import DealtOut, Sharded, whole
from fsdp2kit.parity.reference import (
    Curves,
    Rows,
    cross_entropy_sum,
    errors,
    gradient_norm,
    gradient_of,
    load_plain,
    worst_relative,
)
from fsdp2kit.train.balance import build_balance
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.step import accumulate_gradients, cross_entropy, next_batch
from fsdp2kit.train.throughput import Throughput
from tests.parallel.jobs import Case
from tests.reference import beyond, full, make_batches, plain_batches, tiny_model_dir
from tests.workers import WorkerPool

WEIGHT, LR = 0.5, 1e-3  # so heavy that the loss of the load is a large part of the gradients
AUX = {"balance": "aux", "aux_weight": WEIGHT}
RATE = 0.01
EXACT: dict[str, float] = dict.fromkeys(("gradients", "loss", "grad_norm"), 0.0)
BIAS = {"balance": "bias", "bias_update_rate": RATE}


def lengths_of(labels: torch.Tensor) -> torch.Tensor:
    """``[B]``: rows without a target in their second half are padded from there on."""
    length = labels.shape[1]
    is_padded = (labels[:, length // 2 :] == IGNORE).all(1)
    return torch.where(is_padded, length // 2, length)


def is_token(labels: torch.Tensor) -> torch.Tensor:
    """bool ``[B, S]``: false for padding."""
    return torch.arange(labels.shape[1])[None] < lengths_of(labels)[:, None]


class Padded(DealtOut):
    """Rows whose padding is known."""

    def batch(self, index: int) -> list[Batch]:
        return [replace(batch, lengths=lengths_of(batch.labels)) for batch in super().batch(index)]


@dataclass(frozen=True)
class Balanced:
    """A run's numbers, the figures of its records, and its biases at the end."""

    curves: Curves
    records: list[dict[str, Any]]
    biases: dict[str, np.ndarray]


def run_balanced(folder: Path, case: Case, moe: dict[str, Any], batches: Sequence[Rows]) -> Balanced:
    """First-step gradients with the loss of the load, then the whole run through `train`."""
    config = case.config(folder, steps=len(batches), rows=len(batches[0].input_ids))
    config = config.model_copy(update={"moe": TypeAdapter(AnyMoE).validate_python(moe)})
    sharded = Sharded(config, world=distributed.start())
    mesh, model = sharded.mesh, sharded.model
    dealt = Padded(batches, case.micro, dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp)
    metrics = Metrics(Throughput(sharded.plan.flops, device=mesh.device, world_size=mesh.sizes.world_size))
    with (balance := build_balance(config.moe, model, plan=sharded.plan, mesh=mesh, metrics=metrics)):
        accumulate_gradients(
            model,
            next_batch(dealt, 0, mesh=mesh),
            objective=balance.objective(cross_entropy),
            shard=balance.shard(sharded.inputs),
            fsdp=config.fsdp,
            mesh=mesh,
        )
    gradients = {name: whole(gradient_of(p)).float().numpy() for name, p in model.named_parameters()}
    model.zero_grad()
    sharded.start(len(batches))
    sharded.train(dealt)
    found = sharded.records
    curves = Curves(gradients, *([record[key] for record in found] for key in ("loss", "grad_norm", "lr")))
    biases = {name: buffer.numpy() for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    return Balanced(curves, found, biases)


def plain_aux_loop(path: Path, batches: Sequence[Rows]) -> tuple[Curves, list[float]]:
    """One process of transformers, row by row, with its own load-balancing loss; and that loss of each step."""
    model: Any = load_plain(path)
    auxiliary = []

    def backward(batch: Rows) -> float:
        loss = aux = 0.0
        for row in batch.split(1):
            inputs = {"input_ids": row.input_ids, "position_ids": row.position_ids, "use_cache": False}
            out = model(**inputs, output_router_logits=True)
            mask = is_token(row.labels)
            balance = load_balancing_loss_func(out.router_logits, model.num_experts, model.num_experts_per_tok, mask)
            part, share = cross_entropy_sum(out.logits, row.labels) / batch.targets, row.targets / batch.targets
            (part + WEIGHT * share * balance).backward()
            loss, aux = loss + part.item(), aux + share * balance.item()
        auxiliary.append(aux)
        return loss

    return plain_steps(model, batches, backward), auxiliary


def plain_bias_loop(path: Path, batches: Sequence[Rows]) -> tuple[Curves, list[np.ndarray]]:
    """One process of transformers, and the biases of its routers moved by numpy; these after each step."""
    model: Any = load_plain(path)
    gates = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
    chosen: dict[int, list[np.ndarray]] = {}
    for number, gate in enumerate(gates):
        gate.register_forward_hook(lambda *args, number=number: chosen[number].append(args[2][2].numpy()))
    moved = []

    def backward(batch: Rows) -> float:
        chosen.update({number: [] for number in range(len(gates))})
        out = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        loss = cross_entropy_sum(out.logits, batch.labels) / batch.targets
        loss.backward()
        tokens = is_token(batch.labels).flatten().numpy()
        for number, gate in enumerate(gates):
            visits = np.concatenate(chosen[number])[tokens]
            counts = np.bincount(visits.ravel(), minlength=len(gate.e_score_correction_bias))
            step = RATE * np.sign(counts.mean() - counts).astype(np.float32)
            gate.e_score_correction_bias.add_(torch.from_numpy(step))
        moved.append(np.stack([gate.e_score_correction_bias.numpy().copy() for gate in gates]))
        return loss.item()

    return plain_steps(model, batches, backward), moved


def plain_steps(model: Any, batches: Sequence[Rows], backward: Callable[[Rows], float]) -> Curves:
    """The curves of plain AdamW; ``backward`` returns the loss of a batch, and leaves its gradients."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=len(batches))
    curves = Curves({}, [], [], [])
    for batch in batches:
        curves.loss.append(backward(batch))
        if not curves.gradients:
            curves.gradients.update({name: gradient_of(p).numpy().copy() for name, p in named.items()})
        norm = gradient_norm(named.values())
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        curves.grad_norm.append(norm.item())
        curves.lr.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return curves


def glm_dir(folder: Path) -> Path:
    """Write a tiny GLM-4.5, whose first layer is dense and whose routers have biases, to ``folder / glm4_moe``."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    tokens = {"vocab_size": 128, "pad_token_id": None, "eos_token_id": None, "max_position_embeddings": 128}
    config = AutoConfig.for_model("glm4_moe", **sizes, **heads, **experts, **tokens, initializer_range=0.1)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, bias in model.named_buffers():
        if name.endswith("correction_bias"):
            bias.copy_(torch.linspace(-0.02, 0.02, len(bias)))
    model.save_pretrained(folder / "glm4_moe")
    return folder / "glm4_moe"


HYBRID = (("strategy", "hybrid_shard"),)
ONCE = (("reduce_every_micro_batch", False),)
FULL = [
    Case("qwen3_moe"),
    Case("qwen3_moe", micro=4, checkpointing="selective"),
    Case("qwen3_moe", 2, 1, 2, ep=2),
    Case("qwen3_moe", 1, 2, 4, checkpointing="full"),
    Case("qwen3_moe", 2, 2, 2, ep=4, checkpointing="selective", pack=False),
    Case("mixtral", 4, 1, 1, HYBRID, dp_replicate=2, ep=2, checkpointing="full", pack=False),
    Case("mixtral", 2, 1, 1, ONCE, pack=False),
    Case("qwen3_moe", 2, 1, 1, (("strategy", "shard_grad_op"),), checkpointing="full"),
]


@pytest.mark.parametrize("case", [Case("qwen3_moe", 2, 2, 1, ep=2, checkpointing="full"), *map(full, FULL)], ids=str)
def test_the_loss_of_the_load_is_that_of_transformers(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    path = tiny_model_dir(case.kind, tmp_path)
    batches = make_batches() if case.pack else plain_batches()
    expected, auxiliary = plain_aux_loop(path, batches)
    found = pool.run(case.world, run_balanced, tmp_path, case, AUX, batches)[0]
    assert not beyond(errors(found.curves, expected), EXACT)
    assert worst_relative([record["moe/aux_loss"] for record in found.records], auxiliary) < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        Case("glm4_moe", 2, 1, 1, ep=2, checkpointing="full"),
        full(Case("glm4_moe", micro=4)),
        full(Case("glm4_moe", 2, 2, 1, ep=2, checkpointing="selective")),
        full(Case("glm4_moe", 1, 2, 2, pack=False)),
        full(Case("glm4_moe", 4, 1, 1, HYBRID, dp_replicate=2)),
    ],
    ids=str,
)
def test_biases_move_by_the_counts_of_the_global_batch(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    path = glm_dir(tmp_path)
    batches = make_batches() if case.pack else plain_batches()
    expected, moved = plain_bias_loop(path, batches)
    found = pool.run(case.world, run_balanced, tmp_path, case, BIAS, batches)
    assert not beyond(errors(found[0].curves, expected), EXACT)
    assert np.abs(moved[-1]).max() > 2 * RATE  # they have moved
    for rank in found:
        np.testing.assert_array_equal(np.stack(list(rank.biases.values())), moved[-1])
