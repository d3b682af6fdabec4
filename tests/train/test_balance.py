"""Balancing experts: transformers' own loss of each row, and biases moved by counts, the same on every mesh."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.config.schema import ModelConfig, TrainingConfig
from fsdp2kit.config.sections.moe import AnyMoE, RouterBiasConfig
from fsdp2kit.data.loader import Batch, Pack, Share
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.job import distributed
from fsdp2kit.model.build import build_model
from fsdp2kit.model.inspect import build_small_copy
from fsdp2kit.model.loss_head import IGNORE
from fsdp2kit.parallel.expert_parallel.routing import RoutingHooks, balance_losses
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.parity.engine import RankBatches, Sharded, whole
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
from fsdp2kit.train.balance import Balance, build_balance, load_figures
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.micro_batch import items_of, items_of_rows, lengths_of_rows, packs_of
from fsdp2kit.train.step import accumulate_gradients, cross_entropy, next_batch
from fsdp2kit.train.throughput import Throughput
from fsdp2kit.weights.modules import cast_model
from tests.recipes.helpers import PAIRS
from tests.support.cases import Case
from tests.support.models import (
    DEMO,
    DEMO_VOCABULARY,
    VOCABULARY,
    beyond,
    demo_model_dir,
    full,
    make_batches,
    plain_batches,
    slow,
    tiny_model,
    tiny_model_dir,
)
from tests.support.runs import resume, runner, write_run
from tests.support.workers import WorkerPool

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


class Padded(RankBatches):
    """Rows whose padding is known."""

    def batch(self, index: int) -> list[Batch]:
        return [replace(batch, lengths=lengths_of(batch.labels)) for batch in super().batch(index)]


@dataclass(frozen=True)
class Balanced:
    """A run's numbers, the figures of its records, and its biases at the end."""

    curves: Curves
    records: list[dict[str, Any]]
    biases: dict[str, np.ndarray]


def run_balanced(
    folder: Path, case: Case, moe: dict[str, Any], batches: Sequence[Rows], on_nonfinite: str = "stop"
) -> Balanced:
    """First-step gradients with the loss of the load, then the whole run through `train`."""
    config = case.config(folder, steps=len(batches), rows=len(batches[0].input_ids))
    section = config.train.model_copy(update={"on_nonfinite": on_nonfinite})
    config = config.model_copy(update={"moe": TypeAdapter(AnyMoE).validate_python(moe), "train": section})
    sharded = Sharded(config, world=distributed.start())
    mesh, model = sharded.mesh, sharded.model
    loader = Padded(batches, case.micro, dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp)
    metrics = Metrics(Throughput(sharded.plan.flops, device=mesh.device, world_size=mesh.sizes.world_size))
    with (balance := build_balance(config.moe, model, plan=sharded.plan, mesh=mesh, metrics=metrics)):
        accumulate_gradients(
            model,
            next_batch(loader, 0, mesh=mesh),
            objective=cross_entropy,
            shard=sharded.inputs,
            balance=balance,
            fsdp=config.fsdp,
        )
        balance.end_step(moves=False)
    gradients = {name: whole(gradient_of(p)).float().numpy() for name, p in model.named_parameters()}
    model.zero_grad()
    sharded.start(len(batches))
    sharded.train(loader)
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


def glm_dir(folder: Path, *, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny GLM-4.5, whose first layer is dense and whose routers have biases, to ``folder / glm4_moe``."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    tokens = {"vocab_size": vocabulary, "pad_token_id": None, "eos_token_id": None, "max_position_embeddings": 128}
    config = AutoConfig.for_model("glm4_moe", **sizes, **heads, **experts, **tokens, initializer_range=0.1)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, bias in model.named_buffers():
        if name.endswith("correction_bias"):
            bias.copy_(torch.linspace(-0.02, 0.02, len(bias)))
    cast_model(model, dtype)
    model.save_pretrained(folder / "glm4_moe")
    return folder / "glm4_moe"


HYBRID = (("strategy", "hybrid_shard"),)
ONCE = (("reduce_every_micro_batch", False),)
FULL = [
    Case("qwen3_moe", 1, 2, 2, ep=2, checkpointing="full"),
    Case("mixtral", 4, 1, 1, HYBRID, dp_replicate=2, ep=2, checkpointing="full", pack=False),
    Case("mixtral", 2, 1, 1, ONCE, pack=False),
]
SLOW = [
    Case("qwen3_moe"),
    Case("qwen3_moe", micro=4, checkpointing="selective"),
    Case("qwen3_moe", 2, 1, 2, ep=2),
    Case("qwen3_moe", 1, 2, 4),
    Case("qwen3_moe", 2, 2, 1, ep=2, checkpointing="full"),
    Case("qwen3_moe", 2, 1, 1, (("strategy", "shard_grad_op"),), checkpointing="full"),
]
# Rows are counted over cp alone: the counts of other rows, on ranks along dp, are none of theirs.
DEFAULT = Case("qwen3_moe", 2, 2, 2, ep=4, checkpointing="selective", pack=False)


@pytest.mark.parametrize("case", [DEFAULT, *map(full, FULL), *map(slow, SLOW)], ids=str)
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
        Case("glm4_moe", 1, 2, 2, ep=2, checkpointing="full"),
        full(Case("glm4_moe", 2, 2, 1, ep=2, checkpointing="selective", pack=False)),
        slow(Case("glm4_moe", 4, 1, 1, HYBRID, dp_replicate=2)),
        slow(Case("glm4_moe", 2, 1, 1, ep=2, checkpointing="full")),
        slow(Case("glm4_moe", micro=4)),
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


def test_a_step_that_is_skipped_moves_no_biases(pool: WorkerPool, tmp_path: Path) -> None:
    path, poison = glm_dir(tmp_path), VOCABULARY - 1
    model = load_plain(path)
    model.get_input_embeddings().weight.data[poison] = float("inf")
    model.save_pretrained(path)
    batches = make_batches(2)
    for batch in batches:
        batch.input_ids.remainder_(poison)
        batch.labels[batch.labels == poison] = 0
    batches[1].input_ids[0, 0] = poison
    _, moved = plain_bias_loop(path, batches[:1])

    (found,) = pool.run(1, run_balanced, tmp_path, Case("glm4_moe", micro=4), BIAS, batches, "skip")

    assert np.isfinite(found.curves.loss).tolist() == [True, False]
    np.testing.assert_array_equal(np.stack(list(found.biases.values())), moved[-1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "size", "overrides"),
    [
        ("dpo", 4, ("mesh.ep=2",)),
        ("distill", 2, ("mesh.ep=2", "distill.cross_entropy_weight=0.5")),
        ("sft", 2, ("mesh.ep=2", "lora.rank=4", 'lora.target_modules=["q_proj", "o_proj"]')),
        ("sft", 2, ("lora.rank=4", 'lora.target_modules=["q_proj", "experts"]')),
    ],
)
def test_the_mesh_changes_no_objective(
    recipe: str, size: int, overrides: Sequence[str], pool: WorkerPool, tmp_path: Path
) -> None:
    """Rows of pairs, a second model, adapters: the same on one rank and on several with cp and ep."""
    model = demo_model_dir(tmp_path / "model", kind="qwen3_moe")
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    more = [f'moe = {{ balance = "aux", aux_weight = {WEIGHT} }}']
    if recipe == "distill":
        more.append(f'distill.teacher = "{model}"')
    toml = write_run(
        tmp_path,
        model=model,
        data=data if recipe == "dpo" else DEMO / "chat.jsonl",
        recipe=recipe,
        seq_len=96,
        steps=2,
        lr=1e-3,
        checkpoint='export_hf = "never"',
        more="\n".join(more),
    )
    run = runner(pool, toml)
    alone = (*overrides, "mesh.ep=1")
    one = run(tmp_path / "one", 1, "train.micro_batch_size=2", *alone)
    several = run(tmp_path / "several", size, "mesh.cp=2", "activation_checkpointing.mode=full", *overrides)
    without = run(tmp_path / "without", 1, "moe.balance=none", "train.steps=1", *alone)
    for key in ("loss", "grad_norm", "moe/aux_loss", "moe/load_mean", "moe/entropy"):
        assert worst_relative([line[key] for line in several], [line[key] for line in one]) < 1e-5, key
    assert one[0]["loss"] == pytest.approx(without[0]["loss"], rel=1e-6)
    assert abs(one[0]["grad_norm"] / without[0]["grad_norm"] - 1) > 1e-3
    assert not [key for key in without[0] if key.startswith("moe/")]


def exported_biases(run: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(run / "hf" / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.endswith("correction_bias")}


@pytest.mark.full
def test_biases_are_kept_and_stay_in_float32(pool: WorkerPool, tmp_path: Path) -> None:
    """In checkpoints, on any mesh, and in exports in bfloat16; evaluations and answers to prompts do not move them."""
    path = glm_dir(tmp_path, vocabulary=DEMO_VOCABULARY, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    shutil.copytree(DEMO / "tokenizer", path, dirs_exist_ok=True)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(
        "".join((DEMO / "chat.jsonl").read_text(encoding="utf-8").splitlines(True)[:4]), encoding="utf-8"
    )
    balance = f'moe = {{ balance = "bias", bias_update_rate = {RATE} }}'
    saves = "every = 2, keep = 9"
    run = runner(pool, write_run(tmp_path, model=path, lr=2e-5, steps=4, checkpoint=saves, more=balance))
    straight = run(tmp_path / "straight", 2, "mesh.ep=2")
    expected = exported_biases(tmp_path / "straight")
    assert {tensor.dtype for tensor in expected.values()} == {torch.float32}
    assert all((tensor - before[name]).abs().max() > 2 * RATE for name, tensor in expected.items())
    evaluating = ("eval.every=1", f"eval.path='{held_out}'", 'eval.prompts=["Hello"]', "eval.max_new_tokens=2")
    for size, overrides in ((1, evaluating), (4, ("mesh.cp=2", "mesh.ep=2"))):
        checkpoint = tmp_path / "straight" / "checkpoints" / "step-000002"
        resumed = resume(run, checkpoint, tmp_path / f"{size}", size, *overrides)
        for key in ("loss", "moe/load_max", "moe/load_mean", "moe/entropy"):
            found = [record[key] for record in resumed]
            assert worst_relative(found, [record[key] for record in straight[2:]]) < 1e-5, key
        for name, tensor in exported_biases(tmp_path / f"{size}").items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gpt_oss", *map(full, ("granitemoe", "olmoe", "qwen2_moe", "phimoe", "qwen3_next"))])
def test_other_routers_have_the_same_loss(kind: str) -> None:
    """Value and gradients of a row's loss, against the model's own."""
    sizes = {"model_type": kind, "vocab_size": 128, "num_hidden_layers": 2}
    small = build_small_copy(build_model(ModelConfig(config=sizes, weights="random", attention="eager")))
    assert small is not None
    tokens = torch.arange(2, 42)[None]
    loss = small(input_ids=tokens, use_cache=False, output_router_logits=True).aux_loss
    if not isinstance(loss, torch.Tensor):
        pytest.skip("this version of transformers records no router logits of it")
    loss.backward()
    expected = {name: gradient_of(parameter).clone() for name, parameter in small.named_parameters()}
    small.zero_grad()
    with RoutingHooks(small, probabilities=True) as hooks, hooks.recording(tokens >= 0) as routed:
        small(input_ids=tokens, use_cache=False)
    balance_losses(*routed.over_layers(), torch.tensor([2 * tokens.numel()])).sum().backward()
    assert sum(bool(gradient.any()) for gradient in expected.values()) > 2
    for name, parameter in small.named_parameters():
        torch.testing.assert_close(gradient_of(parameter), expected[name], rtol=1e-5, atol=1e-7)


def test_one_forward_with_gradients_is_recorded() -> None:
    model, tokens = tiny_model("qwen3_moe"), torch.arange(8)[None]
    with RoutingHooks(model, probabilities=False) as hooks:
        with pytest.raises(RunFailure, match="did not run all layers"), hooks.recording(tokens >= 0), torch.no_grad():
            model(tokens)
        with pytest.raises(RunFailure, match="ran twice"), hooks.recording(tokens >= 0):
            model(model(tokens).logits.argmax(-1))
        with hooks.recording(tokens >= 2) as routed:
            model(tokens)
        model(tokens)
    assert [counts.sum().item() for counts in routed.counts.values()] == [12, 12]
    assert not model.model.layers[0].mlp.experts._forward_pre_hooks


def test_figures_of_the_load() -> None:
    layers = [[3, 1, 0, 4], [2, 2, 2, 2]]
    found = load_figures(layers)
    shares = np.array(layers) / 8
    entropies = [-(each[each > 0] * np.log(each[each > 0])).sum() / np.log(4) for each in shares]
    assert found == {"moe/load_max": 2.0, "moe/load_mean": 1.5, "moe/entropy": pytest.approx(np.mean(entropies))}


def test_rows_of_preferences_weigh_by_their_pairs() -> None:
    ids, mask = np.arange(3), np.array([False, True, True])
    packs = [Pack([(ids, mask)] * count, together=2) for count in (4, 0, 2)]
    (batch,) = Share(16, 3, 3).batches(packs, sources=1)
    assert items_of_rows(batch).tolist() == [2, 0, 1]
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [12, 0, 6]
    (single,) = Share(16, 1, 1).batches([Pack([(ids, mask)])], sources=1)
    assert items_of_rows(single).tolist() == [2]


def refused(config: TrainingConfig) -> None:
    """Asks the config, then the plan."""
    sizes = MeshSizes(1, 1, 1)
    config.check(config, sizes)
    plan_parallel(build_model(config.model, lora=config.lora), config, sizes)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("llama", {"moe": AUX}, r"'aux', but LlamaForCausalLM has no experts"),
        ("glm4_moe", {"moe": AUX}, r"'aux', but transformers has no load-balancing loss for Glm4MoeForCausalLM"),
        ("qwen3_moe", {"moe": BIAS}, r"'bias', but not every layer .* of Qwen3MoeForCausalLM has .*use 'aux'"),
        ("qwen3_moe", {"moe": AUX, "compile": {"enabled": True}}, r"moe\.balance: 'aux' with compile\.enabled"),
        ("glm4_moe", {"moe": BIAS, "lora": {"rank": 4}}, r"'bias' with adapters"),
        ("qwen3_moe", {"model": {"output_router_logits": True}}, r'set .* = false, and moe\.balance = "aux"'),
    ],
)
def test_what_would_not_balance_is_refused(kind: str, values: dict[str, Any], message: str) -> None:
    sizes = {"model_type": kind, "vocab_size": 128, "num_hidden_layers": 2, **values.pop("model", {})}
    model = {"config": sizes, "weights": "random", "attention": "eager"}
    whole = {"recipe": "x", "model": model, "checkpoint": {"export_hf": "never"}, "train": {"steps": 1}}
    config = TrainingConfig.model_validate({**whole, **values})
    with pytest.raises(UserError, match=message):
        refused(config)


def test_the_loss_of_a_rollouts_pack_is_refused() -> None:
    reward = {"reward": [{"name": "length", "function": "x.py:f"}]}
    values = {"recipe": "grpo", "model": {"path": "gpt2"}, "train": {"steps": 1}, "moe": AUX, **reward}
    config = RLConfig.model_validate(values)
    with pytest.raises(UserError, match=r"'aux' with rollouts.*'bias'"):
        config.moe.check(config, MeshSizes(1, 1, 1))


def test_what_a_recipes_own_micro_batch_does_not_say() -> None:
    labels = torch.tensor([[3, 4, IGNORE], [IGNORE, IGNORE, 5]])
    micro: Any = SimpleNamespace(labels=labels, supervised_tokens=3, per_target={})
    assert (items_of(micro), packs_of(micro)) == (3, [])
    assert lengths_of_rows(micro).tolist() == [3, 3]
    assert items_of_rows(micro).tolist() == [2, 1]
    micro.num_items, micro.rows, micro.lengths = 1, (4, 2), torch.tensor([2, 3])
    assert (items_of(micro), packs_of(micro), lengths_of_rows(micro).tolist()) == (1, [4, 2], [2, 3])


@pytest.mark.parametrize("moves", [True, False])
def test_biases_move_towards_the_mean_load_of_their_own_layer(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of two layers with two and three experts, of two micro-batches; the mean of the second is no integer."""
    biases = {"a": torch.zeros(2), "b": torch.ones(3)}
    experts = {"a": SimpleNamespace(num_experts=2), "b": SimpleNamespace(num_experts=3)}
    monkeypatch.setattr("fsdp2kit.train.balance.RoutingHooks", lambda *_, **__: SimpleNamespace(experts=experts))
    monkeypatch.setattr("fsdp2kit.train.balance.routing_biases", lambda _: biases)
    section: Any = RouterBiasConfig(balance="bias", bias_update_rate=0.25)
    nothing: Any = None
    mesh: Any = SimpleNamespace(sum_loss=lambda counts: None)
    balance: Any = Balance(section, nothing, plan=nothing, mesh=mesh, metrics=nothing)
    for counts in ({"a": [[1, 0], [1, 2]], "b": [[0, 1, 3]]}, {"a": [[0, 0]], "b": [[1, 0, 2]]}):
        rows: Any = SimpleNamespace(routed=SimpleNamespace(counts={at: torch.tensor(n) for at, n in counts.items()}))
        assert balance.add_loss(torch.tensor(1.0), {}, rows) == (torch.tensor(1.0), {})
    balance.end_step(moves=moves)
    assert biases["a"].tolist() == [0, 0]
    assert biases["b"].tolist() == ([1.25, 1.25, 0.75] if moves else [1, 1, 1])
    assert balance.figures({})["moe/load_max"] == pytest.approx(5 / (7 / 3))
    assert balance.figures({}) == {}, "an evaluation alone"
