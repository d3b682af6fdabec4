"""The formulae agree with a trace of the real modules, with real tensors of real runs, and with others' accounting."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2kit.config.checks import check_config
from fsdp2kit.config.schema import PreferenceDataConfig, TrainingConfig
from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import local_part
from fsdp2kit.model import head_chunks
from fsdp2kit.model.build import build_model
from fsdp2kit.model.head_chunks import Kernels, over_chunks, rows_at_once
from fsdp2kit.optim.build import build_optimizer, state_sizes
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.parity.engine import RankBatches, Sharded
from fsdp2kit.planner import activations
from fsdp2kit.planner.allocations import by_category
from fsdp2kit.planner.devices import GIB, find_device
from fsdp2kit.planner.estimate import plan_memory
from fsdp2kit.planner.memory import Moment
from fsdp2kit.planner.rollouts import kv_cache_bytes
from fsdp2kit.torch_compat import FakeTensorMode
from fsdp2kit.train.step import accumulate_gradients, cross_entropy, next_batch
from tests.planner.helpers.models import (
    LLAMA2_7B,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    QWEN3_8B,
    QWEN3_30B,
    REAL,
    config_of,
    planned,
    rl_config,
    small,
)
from tests.planner.helpers.trace import StepAllocations, log_likelihood, trace_step
from tests.support.cases import Case
from tests.support.models import (
    ADAMW_8BIT,
    MIXTURES,
    RECURRENT,
    full,
    make_batches,
    needs_integers,
    slow,
    tiny_model,
    tiny_model_dir,
)
from tests.support.workers import WorkerPool

INVISIBLE = "attention and exchange"
"""Memory inside operators, which a trace on fake tensors does not see."""


def visible(moment: Moment) -> dict[str, int]:
    return {name: size for name, size in moment.bytes.items() if name != INVISIBLE}


def assert_agree(formula: dict[str, int], found: dict[str, int], *, within: float = 0.03) -> None:
    """Every category above 1 % of the sum, and the sum."""
    total = sum(found.values())
    assert sum(formula.values()) == pytest.approx(total, rel=within)
    for name in formula.keys() | found.keys():
        if max(formula.get(name, 0), found.get(name, 0)) > 0.01 * total:
            assert formula.get(name, 0) == pytest.approx(found.get(name, 0), rel=within), name


def compare_with_trace(
    config: TrainingConfig, *, ranks: int, objective: Any = cross_entropy, beside: Sequence[str] = ()
) -> None:
    plan = planned(config, ranks=ranks, device_type="cpu")
    sizes = check_config(config, world_size=ranks, local_world_size=min(8, ranks))
    traced = trace_step(config, sizes, accumulate=partial(accumulate_gradients, objective=objective))
    assert set(traced) == {"forward", "backward", "optimizer"}
    for phase, found in traced.items():
        moments = [moment for moment in plan.moments if moment.phase == phase]
        formula = max(map(visible, moments), key=lambda sizes: sum(sizes.values()))
        formula = {name: size for name, size in formula.items() if name not in beside}
        if plan.activations_from != "formula":
            # Two moments are all but equal: before and after autograd takes a weight's gradient over.
            formula, found = (_together(sizes, "activations", "unsharded gradients") for sizes in (formula, found))
        assert_agree(formula, found)


def _together(sizes: dict[str, int], *names: str) -> dict[str, int]:
    return {**sizes, **dict.fromkeys(names, 0), names[0]: sum(sizes.get(name, 0) for name in names)}


def lora(**options: Any) -> dict[str, Any]:
    return {"lora": {"rank": 8, **options}, "checkpoint": {"export_hf": "never"}}


def checkpointing(mode: str, every: int = 1) -> dict[str, Any]:
    return {"activation_checkpointing": {"mode": mode, "every": every}}


LONG = {"data": {"seq_len": 4096}}
SHORT = {"data": {"seq_len": 256}}
EXPERTS = {"data": {"seq_len": 1024}}
ZERO_2 = {"strategy": "shard_grad_op", "reduce_dtype": "bfloat16"}
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "llama, full_shard, none": (small(LLAMA_8B), 8, {**SHORT, **checkpointing("none")}),
    "llama, long, full": (small(LLAMA_8B), 8, {**LONG, **checkpointing("full"), "rows": 16}),
    "llama, selective, every 2": (small(LLAMA_8B, layers=3), 8, {**LONG, **checkpointing("selective", 2)}),
    "tied, float32, shard_grad_op": (
        small(REAL["llama1b"]),
        4,
        {**SHORT, "rows": 8, "fsdp": {"strategy": "shard_grad_op", "param_dtype": "float32"}},
    ),
    "hybrid_shard, accumulated": (
        small(LLAMA_8B),
        8,
        {**SHORT, "rows": 16, "mesh": {"dp_replicate": 2}, "fsdp": {"strategy": "hybrid_shard"}},
    ),
    "hybrid_shard, tied, accumulated, reduced in bfloat16": (
        small(REAL["llama1b"], layers=4),
        8,
        {
            **SHORT,
            **checkpointing("full"),
            "rows": 16,
            "mesh": {"dp_replicate": 2},
            "fsdp": {"strategy": "hybrid_shard", "reduce_dtype": "bfloat16"},
        },
    ),
    "accumulated": (small(LLAMA_8B, layers=4), 8, {**SHORT, **checkpointing("full"), "rows": 16}),
    "tied, accumulated": (small(REAL["llama1b"], layers=4), 8, {**SHORT, **checkpointing("full"), "rows": 16}),
    "held back": (
        small(LLAMA_8B, layers=4),
        8,
        {**SHORT, **checkpointing("full"), "rows": 16, "fsdp": {"reduce_every_micro_batch": False}},
    ),
    "tied, held back": (
        small(REAL["llama1b"], layers=4),
        8,
        {**SHORT, **checkpointing("full"), "rows": 16, "fsdp": {"reduce_every_micro_batch": False}},
    ),
    "no_shard": (small(LLAMA_8B), 2, {**SHORT, "rows": 4, "fsdp": {"strategy": "no_shard"}}),
    "one rank, tied": (small(REAL["llama1b"], layers=4), 1, {**SHORT, **checkpointing("full")}),
    "one rank, three micro-batches": (small(LLAMA_8B, layers=4), 1, {**SHORT, **checkpointing("full"), "rows": 3}),
    "one rank, two micro-batches, cast": (
        small(LLAMA_8B),
        1,
        {**SHORT, "rows": 2, "fsdp": {"reduce_dtype": "bfloat16"}},
    ),
    "no_shard, reduced every micro-batch": (
        small(LLAMA_8B),
        2,
        {**SHORT, "rows": 4, "fsdp": {"strategy": "no_shard", "reduce_every_micro_batch": True}},
    ),
    "qwen3, allgather over 8": (small(QWEN3_8B), 8, {**LONG, **checkpointing("selective"), "mesh": {"cp": 8}}),
    "llama, ulysses over 2": (
        small(LLAMA_8B),
        8,
        {**LONG, "mesh": {"cp": 2}, "context_parallel": {"method": "ulysses"}},
    ),
    "units by size, prefetch": (
        small(LLAMA_8B, layers=3),
        8,
        {**SHORT, "fsdp": {"unit": "size", "min_params": 100_000, "forward_prefetch": 2, "backward_prefetch": 3}},
    ),
    "one unit, muon": (small(LLAMA_8B), 8, {**SHORT, "fsdp": {"unit": "root"}, "optimizer": {"name": "muon"}}),
    "eager, counted": (small(LLAMA_8B), 8, {"model": {"attention": "eager"}, "data": {"seq_len": 512, "pack": False}}),
    "lora": (small(LLAMA_8B, layers=8), 8, {"data": {"seq_len": 1024}, **lora()}),
    "nf4": (small(LLAMA_8B, layers=4, by=8), 8, {"data": {"seq_len": 1024}, **lora(quantize="nf4")}),
    "nf4, full, accumulated": (
        small(LLAMA_8B, layers=4, by=8),
        8,
        {"data": {"seq_len": 1024}, **lora(quantize="nf4"), **checkpointing("full"), "rows": 16},
    ),
    "nf4, experts": (
        small(QWEN3_30B, layers=3, by=4),
        8,
        {**EXPERTS, **lora(quantize="nf4"), **checkpointing("none")},
    ),
    "lora, tied, full, accumulated": (
        small(REAL["llama1b"], layers=4),
        4,
        {**SHORT, **lora(target_modules=["q_proj", "down_proj"]), **checkpointing("full"), "rows": 8},
    ),
    "lora and the head, selective, float32": (
        small(LLAMA_8B, layers=4),
        2,
        {
            **SHORT,
            **lora(modules_to_save=["lm_head"]),
            **checkpointing("selective"),
            "fsdp": {"param_dtype": "float32"},
        },
    ),
    # Logits that are more than a matmul: a factor, in one chunk and in two; a soft cap, which keeps its tanh.
    "granite, its own head": ({**small(LLAMA_8B), "model_type": "granite", "logits_scaling": 8.0}, 8, SHORT),
    "granite, its own head, in chunks": (
        {**small(LLAMA_8B, by=8), "model_type": "granite", "logits_scaling": 8.0},
        8,
        {**LONG, **checkpointing("full")},
    ),
    "gemma2, soft-capped, float32, in chunks": (
        {**small(QWEN3_8B, by=8), "model_type": "gemma2", "attn_logit_softcapping": None},
        8,
        {**LONG, "fsdp": {"param_dtype": "float32"}},
    ),
    "mixtral, counted, full": (small(MIXTRAL), 8, {**LONG, **checkpointing("full")}),
    # Half of the ranks have no expert's rows: shards and buffers are padded, gradients are not.
    "mixtral, more ranks than experts": (small(MIXTRAL, layers=3), 16, {**SHORT, **checkpointing("full")}),
    "mixtral, ulysses over 8": (small(MIXTRAL, layers=3), 16, {**LONG, "mesh": {"cp": 8}}),
    "experts partitioned over 2, full": (small(QWEN3_30B, layers=3), 8, {**EXPERTS, **checkpointing("full"), "ep": 2}),
    "experts partitioned over 4": (small(QWEN3_30B, layers=3), 8, {**EXPERTS, **checkpointing("none"), "ep": 4}),
    "experts partitioned over 8, of one rank each": (
        small(QWEN3_30B, layers=3),
        8,
        {**EXPERTS, **checkpointing("selective"), "ep": 8},
    ),
    "uneven experts, accumulated": (
        {**small(QWEN3_30B, layers=3), "num_experts": 30},
        8,
        {**EXPERTS, **checkpointing("full"), "rows": 16, "ep": 4},
    ),
    "experts, ZeRO-2, reduced in bfloat16": (
        small(QWEN3_30B, layers=3),
        8,
        {**EXPERTS, **checkpointing("full"), "ep": 2, "fsdp": ZERO_2},
    ),
    "experts, hybrid, accumulated": (
        small(QWEN3_30B, layers=3),
        8,
        {**EXPERTS, "rows": 16, "mesh": {"dp_replicate": 2}, "fsdp": {"strategy": "hybrid_shard"}, "ep": 2},
    ),
    "short rows beside wide layers": (
        small(LLAMA_70B, layers=4, by=8),
        8,
        {"data": {"seq_len": 64}, **checkpointing("full")},
    ),
}


DEFAULT = (
    "llama, full_shard, none",
    "llama, ulysses over 2",
    "experts partitioned over 2, full",
    "one rank, tied",
)
# Others of `CASES` hold what is particular to these.
REPEATED = (
    "llama, long, full",
    "hybrid_shard, accumulated",
    "accumulated",
    "tied, accumulated",
    "tied, held back",
    "lora",
    "nf4",
    "nf4, full, accumulated",
    "granite, its own head",
    "experts partitioned over 4",
    "experts, hybrid, accumulated",
)
OTHERS = [
    pytest.param(
        name,
        marks=[
            pytest.mark.slow if name in REPEATED else pytest.mark.full,
            *([needs_integers] if "nf4" in name else []),
        ],
    )
    for name in CASES
    if name not in DEFAULT
]


@pytest.mark.parametrize("name", [*DEFAULT, *OTHERS])
def test_formulae_agree_with_the_trace(name: str) -> None:
    model, ranks, sections = CASES[name]
    sections = {**sections, "mesh": {**sections.get("mesh", {}), "ep": sections.get("ep", 1)}}
    sections.pop("ep", None)
    compare_with_trace(config_of(model, ranks=ranks, **sections), ranks=ranks)


def _fake_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What a compiled cross-entropy allocates."""
    return logits.new_empty(len(logits), 1, dtype=torch.float32), torch.empty_like(logits)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [700, 1200, 8192])  # Llama's 128,256 words: 1,046 rows to a chunk, compiled 1,569
def test_the_loss_on_cuda_takes_what_is_planned(tokens: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"data": {"seq_len": tokens}, "compile": {"enabled": compiled}}
    plan = planned(config_of({**LLAMA_8B, "num_hidden_layers": 1}, **sections), device_type="cuda")
    (formula,) = [
        moment.bytes["loss"] for moment in plan.moments if (moment.phase, moment.where) == ("forward", "loss")
    ]

    vocabulary, width = LLAMA_8B["vocab_size"], LLAMA_8B["hidden_size"]
    monkeypatch.setattr(head_chunks, "float32_product", lambda left, right: torch.empty(len(left), right.shape[1]))
    monkeypatch.setattr(head_chunks, "add_float32_product", lambda total, left, right: total)
    rows = rows_at_once(torch.device("cuda"), vocabulary=vocabulary, narrow=compiled)
    kernels = Kernels(_fake_loss if compiled else None, lambda slope, chunk: True)
    with FakeTensorMode() as fake:
        hidden, weight = (
            torch.empty(size, width, dtype=torch.bfloat16, requires_grad=True) for size in (tokens, vocabulary)
        )
        labels = torch.zeros(tokens, dtype=torch.int64)
        with StepAllocations(fake, vocabulary=vocabulary) as allocations:
            allocations.mark([hidden, weight, labels], "inputs")
            allocations.start()
            over_chunks(head_chunks.cross_entropy, hidden, labels, [weight], rows=rows, kernels=kernels)
            found = by_category(allocations.peak())["loss"]

    assert formula == pytest.approx(found, rel=1e-3)


REWARDS = {"reward": [{"function": "a:b"}], "data": {"path": "x", "seq_len": 512}}
ROLLOUTS = {"rollout": {"n": 4, "max_new_tokens": 64}, "grpo": {"kl": 0.1}, **REWARDS}


@pytest.mark.parametrize(
    ("model", "dtype", "mode"),
    [
        full("llama8b", "float32", "full"),
        full("llama1b", "bfloat16", "selective"),
        slow("llama8b", "bfloat16", "none"),
    ],
)
def test_objectives_of_log_probabilities_agree_with_the_trace(model: str, dtype: str, mode: str) -> None:
    """Preferences and rewards: their heads compute the logits again. Reference and engine lie beside the step."""
    sections = {"fsdp": {"param_dtype": dtype}, "train": {"global_batch_size": 16}, **checkpointing(mode)}
    rewards = rl_config(small(REAL[model]), **sections, **ROLLOUTS)
    preferences = config_of(small(REAL[model]), **sections, data={"seq_len": 512}).model_copy(
        update={"data": PreferenceDataConfig(path="x", seq_len=512)}
    )
    for config in (rewards, preferences):
        compare_with_trace(config, ranks=8, objective=log_likelihood, beside=("reference", "engine"))


@pytest.mark.full
def test_what_stands_beside_a_model_that_learns_from_rewards() -> None:
    """Llama 3 8B on 8 ranks: the reference is sharded in bfloat16, the engine's copy whole or split by two."""
    size = 8_030_261_248
    plan = planned(rl_config(LLAMA_8B, **ROLLOUTS))
    assert plan.peak.bytes["reference"] == pytest.approx(2 * size / 8, rel=1e-4)
    assert plan.peak.bytes["engine"] == 2 * size
    generate = plan.peaks["generate"].bytes
    rows = min(64, plan.config.train.global_batch_size // 8)  # that a rank generates at once
    assert generate["KV cache"] == 2 * 32 * 8 * 128 * 2 * 512 * rows
    assert generate["optimizer"] == plan.peak.bytes["optimizer"]
    sync = plan.peaks["sync"].bytes
    assert sync["weight buckets"] == 2 * 256 * 2**20 + 2 * 128256 * 4096
    turns = planned(rl_config(LLAMA_8B, **{**ROLLOUTS, "rollout": {**ROLLOUTS["rollout"], "sleep": True, "tp": 2}}))
    assert "engine" not in turns.peaks["backward"].bytes
    assert turns.peaks["generate"].bytes.keys() == {"engine", "KV cache", "activations"}
    assert turns.peaks["generate"].bytes["engine"] == size
    adapters = planned(rl_config(LLAMA_8B, **{**ROLLOUTS, **lora()}))
    assert "reference" not in adapters.peak.bytes  # the model without them


def test_the_reference_sleeps_on_the_host_beside_the_model() -> None:
    rollout = {**ROLLOUTS["rollout"], "sleep": True}
    learner, alone = (
        planned(rl_config(small(REAL["llama1b"]), rollout=rollout, grpo={"kl": kl}, **REWARDS)) for kl in (0.1, 0.0)
    )
    reference = learner.peaks["backward"].bytes["reference"]
    assert "reference" not in alone.peaks["backward"].bytes
    assert learner.host["asleep"] - alone.host["asleep"] == reference > 0


def test_the_cache_is_as_large_as_transformers_own() -> None:
    model: Any = tiny_model("llama3")
    prompt = torch.zeros(3, 10, dtype=torch.int64)
    found = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, return_dict_in_generate=True, pad_token_id=0)
    cached = sum(bytes_of([layer.keys, layer.values]) for layer in found.past_key_values.layers)
    assert cached == kv_cache_bytes(model, rows=3, length=15, dtype="float32")  # the last token is not cached


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2, 8])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"])
@pytest.mark.parametrize("model", REAL)
def test_formulae_agree_with_the_trace_of_real_shapes(model: str, strategy: str, mode: str, cp: int) -> None:
    sections = {"fsdp": {"strategy": strategy}, "mesh": {"cp": cp}, "data": {"seq_len": 8192}, **checkpointing(mode)}
    compare_with_trace(config_of(REAL[model], ranks=16, **sections), ranks=16)


ROWS = 32  # enough that generator states, of which checkpointing keeps one a layer, do not matter


def bytes_of(tensors: Any) -> int:
    """Of this rank's parts; numbers (step counts) are left out."""
    return sum(local_part(t).nbytes for t in tensors if isinstance(t, torch.Tensor) and t.ndim)


def one_real_step(folder: Path, case: Case) -> dict[str, dict[str, int]]:
    """Bytes of real tensors on this rank: between forward and backward, and when the optimizer has stepped."""
    config = case.config(folder, steps=1, rows=ROWS)
    sharded = Sharded(config, world=distributed.start())
    optimizer = build_optimizer(config.optimizer, sharded.model)
    loader = RankBatches(
        make_batches(1, rows=ROWS), case.micro, dp_rank=sharded.mesh.dp_rank, dp_size=sharded.mesh.sizes.dp
    )
    batch = next_batch(loader, 0, mesh=sharded.mesh)
    # Every token has a target. What is made of a batch, the host's tables of segments among it, is no activation.
    micro_batches = (replace(micro, labels=torch.zeros_like(micro.labels)) for micro in batch.micro_batches)
    prepared = iter([sharded.inputs(micro) for micro in micro_batches])
    between: dict[str, int] = {}
    with StepAllocations(vocabulary=sharded.model.config.vocab_size) as allocations:

        def shard(_micro: Any) -> dict[str, Any]:
            inputs = next(prepared)
            allocations.mark(list(inputs.values()), "inputs")
            return inputs

        def end_phase(name: str) -> None:
            if name == "forward":
                between.update(by_category(allocations.snapshot()))

        accumulate_gradients(
            sharded.model,
            batch,
            objective=cross_entropy,
            shard=shard,
            fsdp=config.fsdp,
            end_phase=end_phase,
        )
    parameters = list(sharded.model.parameters())
    gradients = bytes_of(parameter.grad for parameter in parameters)
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    rest = {"parameters": bytes_of(parameters), "gradients": gradients, "optimizer": bytes_of(states)}
    return {"between": between, "rest": rest}


@pytest.mark.parametrize(
    ("cp", "method", "mode"),
    [
        *itertools.product([1], ["auto"], ["none", "selective"]),
        *itertools.product([2], ["ulysses"], ["none", "selective"]),
        full(1, "auto", "full"),
        full(2, "allgather", "selective"),
        slow(2, "ulysses", "full"),
        slow(2, "allgather", "none"),
        slow(2, "allgather", "full"),
    ],
)
def test_the_plan_is_what_real_tensors_take(cp: int, method: str, mode: str, pool: WorkerPool, tmp_path: Path) -> None:
    """A scaled-down copy of SmolLM2 (9 heads, 3 of keys, tied) on two ranks."""
    case = Case("smollm2", 2 // cp, cp, micro=ROWS // (2 // cp), checkpointing=mode, attention="varlen", method=method)
    _compare_with_real_tensors(case, pool, tmp_path, within=0.03)


# Gemma 3n keeps more beside its layers: four streams, and embeddings of each layer.
FAMILIES = (*RECURRENT, *MIXTURES, "llama4", "glm4")
# Others of `FAMILIES` have their layers.
SIMILAR = ("qwen3_next", "qwen3_5_moe", "olmo_hybrid", "bamba", "lfm2_moe")


@pytest.mark.parametrize("kind", [slow(kind) if kind in SIMILAR else full(kind) for kind in FAMILIES])
def test_the_plan_is_what_real_tensors_take_in_each_family(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    """Rows of one document: shorter ones in packs would be filled up to a scan's chunk."""
    for mode in ("none", "full"):
        case = Case(kind, 2, micro=ROWS // 2, checkpointing=mode, attention="auto", pack=False)
        _compare_with_real_tensors(case, pool, tmp_path, within=0.05)


def _compare_with_real_tensors(case: Case, pool: WorkerPool, tmp_path: Path, *, within: float) -> None:
    tiny_model_dir(case.kind, tmp_path)
    plan = planned(case.config(tmp_path, steps=1, rows=ROWS), ranks=2, device_type="cpu")
    between = next(moment for moment in plan.moments if moment.where == "end").bytes
    step = plan.peaks["optimizer"].bytes
    for rank, found in enumerate(pool.run(2, one_real_step, tmp_path, case)):
        for name in ("parameters", "gradients", "optimizer"):
            if rank == 0:  # the other may have fewer rows of what does not divide
                assert step[name] == pytest.approx(found["rest"][name], rel=0.03), name
        # Where heads do not divide, the first rank has most of them.
        if rank == 0 or case.method != "ulysses":
            assert between["activations"] == pytest.approx(found["between"]["activations"], rel=within)


def test_zero_paper_figure_1_and_table_1() -> None:
    """arXiv:1910.02054, whose third stage shards 2 + 2 bytes and the moments of each parameter; ours take 4 bytes."""
    ranks = 64
    bf16 = {"fsdp": {"storage_dtype": "bfloat16", "reduce_dtype": "bfloat16"}}
    plan = planned(config_of(LLAMA2_7B, ranks=ranks, rows=64, **bf16), ranks=ranks)
    found = plan.peaks["optimizer"].bytes
    parameters = plan_parameters(LLAMA2_7B)
    assert found["parameters"] == found["gradients"] == pytest.approx(2 * parameters / ranks, rel=1e-3)
    assert found["optimizer"] == pytest.approx(4 * parameters / ranks, rel=1e-3)
    # The paper's second stage has 2Ψ instead of the shards; FSDP2 has both.
    zero2 = {"fsdp": {"strategy": "shard_grad_op", **bf16["fsdp"]}}
    kept = planned(config_of(LLAMA2_7B, ranks=ranks, rows=128, **zero2), ranks=ranks).peaks["backward"].bytes
    assert kept["unsharded parameters"] == pytest.approx(2 * parameters, rel=1e-3)


def plan_parameters(model: dict[str, Any]) -> int:
    h, i, v = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    keys = h * model["num_key_value_heads"] // model["num_attention_heads"]
    return model["num_hidden_layers"] * (2 * h * h + 2 * h * keys + 3 * h * i + 2 * h) + 2 * v * h + h


@pytest.mark.parametrize(("model", "ranks"), [(LLAMA2_7B, 4), (LLAMA_8B, 4), (LLAMA_8B, 8)])
def test_worked_examples_at_rest(model: dict[str, Any], ranks: int) -> None:
    """16 bytes a parameter over the ranks."""
    plan = planned(config_of(model, ranks=ranks), ranks=ranks)
    found = plan.peaks["optimizer"].total
    assert found == pytest.approx(16 * plan_parameters(model) / ranks, rel=1e-4)
    assert plan.peaks["save"].bytes["parameters"] * 3 == pytest.approx(found * 3 / 4, rel=1e-4)


@pytest.mark.full
@needs_integers
def test_a_base_in_4_bits_by_hand() -> None:
    """36 bytes for 64 weights of linear layers, bfloat16 for the rest, float32 for adapters and their two moments."""
    found = planned(config_of(LLAMA_8B, data={"seq_len": 1024}, **lora(quantize="nf4"))).peaks["save"].bytes
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    base = linear * 36 / 64 + 2 * (plan_parameters(LLAMA_8B) - linear)
    assert 8 * found["parameters"] == pytest.approx(base + 8 * found["optimizer"] / 2, rel=1e-4)


def test_what_does_not_fit_is_said_with_the_category_to_blame() -> None:
    device = find_device("h100")
    plan = planned(config_of(LLAMA_8B, ranks=1, data={"seq_len": 2048}), ranks=1, device=device)
    assert plan.fits is False
    assert plan.blame == "optimizer"
    assert "the largest part optimizer (59.8 GiB)" in str(plan.warning())
    tiny = planned(config_of(small(LLAMA_8B), data={"seq_len": 2048}), device=find_device(None, memory_gib=1))
    assert "the largest part allowance (3.0 GiB)" in str(tiny.warning())
    fits = planned(config_of(LLAMA_8B, data={"seq_len": 2048}, **checkpointing("full")), device=device)
    assert fits.fits is True
    assert fits.warning() is None
    assert fits.needed - fits.peak.total == 3 * GIB


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", "adamw_bf16", ADAMW_8BIT, "muon"])
def test_optimizer_state_is_what_a_real_one_keeps(name: str) -> None:
    config = config_of(small(LLAMA_8B), ranks=1, optimizer={"name": name})
    model: Any = build_model(config.model)
    model.to_empty(device="cpu")
    optimizer = build_optimizer(config.optimizer, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if name != "adamw_8bit":  # whose state is made at once
        optimizer.step()
    kept = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    parts = [part for value in kept for part in (getattr(value, k, None) for k in ("codes", "scale", "qmap"))]
    found = bytes_of(parts if any(part is not None for part in parts) else [])
    found += bytes_of(value for value in kept if not hasattr(value, "codes"))
    assert sum(state_sizes(config.optimizer, model, shards=1, item_bytes=4)) == found


def test_the_runner_says_the_plan_and_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(small(LLAMA_8B), ranks=1)
    model = build_model(config.model)
    plan = plan_parallel(model, config, check_config(config, world_size=1, local_world_size=1), "cpu")
    world = distributed.World(0, 1, 0, 1, torch.device("cpu"))
    memory = plan_memory(config, model, plan, world=world)
    assert memory.describe()[0].startswith("memory: ")
    assert not caplog.messages
    (line,) = memory.compare({"forward": 2 * GIB}, device_type="cuda")
    assert line.startswith("memory, GiB planned / measured: forward ")
    assert line.endswith(" / 2.00")
    assert memory.compare({}, device_type="cpu") == []

    monkeypatch.setattr("fsdp2kit.planner.estimate.this_device", lambda _: find_device(None, memory_gib=1))
    plan_memory(config, model, plan, world=world)
    assert "will probably not fit" in caplog.messages[0]
    assert plan_memory(config, model, plan, world=replace(world, rank=1)).describe() == []


def test_a_new_method_of_context_parallelism_is_not_taken_to_need_nothing() -> None:
    assert activations._exchange(None, 1, 1, 1, cp=1) == (0, 0)
    with pytest.raises(ValueError, match="'tree' is not known"):
        activations._exchange("tree", 1, 1, 1, cp=2)
