"""The policy loss against plain torch and TRL's own, and on meshes."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp2kit.config.sections.grpo import GRPOConfig
from fsdp2kit.config.sections.rollout import RolloutConfig
from fsdp2kit.model.loss_head import attach_loss
from fsdp2kit.objectives.policy import PolicyLoss, group_advantages, has_signal
from fsdp2kit.objectives.reference import build_reference
from fsdp2kit.parallel.context_parallel.batch import slice_batch
from fsdp2kit.parallel.context_parallel.layout import AttentionPath
from fsdp2kit.parity.engine import whole
from fsdp2kit.parity.reference import gradient_of, load_plain
from fsdp2kit.rl.packing import Rollout, pack, token_values
from fsdp2kit.train.step import MetricNames, accumulate_gradients, next_batch
from tests.rl.helpers.made_up import MAX_NEW, REWARDS, TEMPERATURE, make_rollouts, plain_loss
from tests.support.cases import Case, build
from tests.support.models import full, tiny_model, tiny_model_dir
from tests.support.workers import WorkerPool

SECTIONS = [
    GRPOConfig(),
    GRPOConfig(loss="dr_grpo", importance_cap=0.0, truncated="mask"),
    GRPOConfig(loss="dapo", clip_low=0.1, clip_high=0.28, truncated="mask", kl=0.3),
    GRPOConfig(kl=0.1, importance_cap=1.1),
]
SHIFT = 1.02  # of all weights, from the reference to the policy


def batches_of(section: GRPOConfig, prompts: Any, rollouts: list[Rollout], **sizes: Any) -> list[Any]:
    texts = [(prompts[one.prompt], one.response.ids, one.response.sampled) for one in rollouts]
    values = token_values(section, rollouts, REWARDS, MAX_NEW)
    options = {"seq_len": 64, "micro_batch_size": 1, "dp": 1, "dp_rank": 0, "cp": 1, "pad_id": 0}
    return pack(texts, values, **{**options, **sizes})


def shifted(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SHIFT)
    return model


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_advantages_are_those_of_the_formula(loss: Any) -> None:
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    expected = rewards - rewards.mean(1, keepdim=True)
    if loss != "dr_grpo":
        expected = expected / (rewards.std(1, keepdim=True) + 1e-4)
    found = group_advantages(GRPOConfig(loss=loss), REWARDS)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-12)
    assert has_signal(REWARDS).tolist() == [True, True, True, False]
    assert found[3].tolist() == [0.0, 0.0, 0.0], "0.1 three times has a mean that is not 0.1"


@pytest.mark.parametrize(("updates", "turns"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: f"{section.loss}-{section.kl}")
def test_loss_gradient_and_metrics_in_one_process(section: GRPOConfig, updates: int, turns: bool) -> None:
    reference, plain, ours = tiny_model("smollm2"), shifted(tiny_model("smollm2")), shifted(tiny_model("smollm2"))
    prompts, rollouts = make_rollouts(plain, turns=turns)
    expected, metrics = plain_loss(section, plain, reference, prompts, rollouts, updates=updates)
    expected.backward()
    for model in (reference, ours):
        attach_loss(model)
    frozen: Any = torch.no_grad()(reference.token_log_probs)
    kl_to: Any = SimpleNamespace(token_log_probs=frozen) if section.kl else None
    objective = PolicyLoss(section, RolloutConfig(temperature=TEMPERATURE, updates=updates), reference=kl_to)
    path = AttentionPath(None, "sdpa", "")
    [batch] = batches_of(section, prompts, rollouts, seq_len=256)
    inputs = slice_batch(batch, config=ours.config, path=path, cp_rank=0, cp=1, device=torch.device("cpu"))
    loss, parts, found = objective(ours, inputs)
    (loss / batch.supervised_tokens).backward()
    assert parts is None
    # Terms of both signs, each about 1, add up to some: float32 is some 1e-7 of these terms off, on any processor.
    assert loss.item() / batch.supervised_tokens == pytest.approx(expected.item(), rel=1e-5, abs=5e-7)
    assert {name: float(value) / batch.supervised_tokens for name, value in found.items()} == pytest.approx(
        metrics, rel=1e-4, abs=5e-7
    )
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert distance(mine.grad, other.grad) < 1e-5


def _on_mesh(
    folder: Path, case: Case, section: GRPOConfig, prompts: Any, rollouts: list[Rollout], updates: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Loss and metrics over all ranks, and gradients, of one step on rollouts."""
    sharded = build(case.config(folder, steps=1, rows=4))
    mesh, config = sharded.mesh, sharded.config
    reference = build_reference(config, sharded.model, plan=sharded.plan, mesh=mesh) if section.kl else None
    shifted(sharded.model)
    policy = PolicyLoss(section, RolloutConfig(temperature=TEMPERATURE, updates=updates), reference=reference)
    sizes = {"dp": mesh.sizes.dp, "dp_rank": mesh.dp_rank, "cp": mesh.sizes.cp, "micro_batch_size": case.micro}
    micro = batches_of(section, prompts, rollouts, seq_len=case.seq_len, **sizes)
    source: Any = SimpleNamespace(batch=lambda index: micro, source_names=())
    sums = accumulate_gradients(
        sharded.model,
        next_batch(source, 0, mesh=mesh),
        objective=policy,
        names=MetricNames(),
        shard=sharded.inputs,
        fsdp=config.fsdp,
    )
    figures = [*mesh.sum_loss(sums.double()).tolist(), policy.figures({"log_prob_gap": 0.0})["log_prob_gap_max"]]
    return figures, {name: whole(gradient_of(p)) for name, p in sharded.model.named_parameters()}


@pytest.mark.parametrize(
    ("case", "section", "updates", "turns"),
    [
        (Case("smollm2", 1, 1), SECTIONS[0], 2, False),
        full(Case("smollm2", 2, 1), SECTIONS[0], 1, False),
        (Case("smollm2", 2, 1, micro=2), SECTIONS[2], 2, True),
        (Case("llama3", 1, 2, seq_len=64), SECTIONS[1], 1, True),
        full(Case("smollm2", 1, 2, attention="varlen", seq_len=96), SECTIONS[3], 1, False),
        full(Case("smollm2", 1, 2, attention="varlen", seq_len=96), SECTIONS[3], 1, True),
        full(Case("llama3", 2, 2), SECTIONS[3], 2, True),
    ],
    ids=lambda value: value.loss if isinstance(value, GRPOConfig) else str(value),
)
def test_no_mesh_packing_or_micro_batch_changes_it(
    case: Case, section: GRPOConfig, updates: int, turns: bool, pool: WorkerPool, tmp_path: Path
) -> None:
    path = tiny_model_dir(case.kind, tmp_path)
    reference, plain = load_plain(path), shifted(load_plain(path))
    prompts, rollouts = make_rollouts(plain, turns=turns)
    expected, metrics = plain_loss(section, plain, reference, prompts, rollouts, updates=updates)
    expected.backward()
    for figures, gradients in pool.run(case.world, _on_mesh, tmp_path, case, section, prompts, rollouts, updates):
        loss, *means, largest = figures
        assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
        assert dict(zip(sorted(metrics), means, strict=True)) == pytest.approx(metrics, rel=1e-4, abs=1e-7)
        assert largest > metrics["log_prob_gap"]
        for name, parameter in plain.named_parameters():
            assert distance(gradients[name], parameter.grad) < 1e-5, name


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_the_loss_is_trls(loss: Any, updates: int) -> None:
    trl = pytest.importorskip("trl")
    from trl.trainer.grpo_trainer import add_fused_lm_head

    section = GRPOConfig(loss=loss, clip_low=0.15, clip_high=0.25, kl=0.2, importance_cap=1.3)
    model, reference = shifted(tiny_model("smollm2")), tiny_model("smollm2")
    prompts, rollouts = make_rollouts(model)
    prompts = [prompt[:3] for prompt in prompts]  # of one length: TRL would count positions from the padding on
    expected, _ = plain_loss(section, model, reference, prompts, rollouts, updates=updates)
    expected.backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    def rows(values: list[Any], width: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(torch.tensor(one), (0, width - len(one))) for one in values])

    ids = rows([rollout.response.ids for rollout in rollouts], MAX_NEW)
    mask = rows([[1] * len(rollout.response.ids) for rollout in rollouts], MAX_NEW)
    engine = rows([rollout.response.log_probs for rollout in rollouts], MAX_NEW)
    asked = torch.tensor([prompts[rollout.prompt] for rollout in rollouts])
    for one in (model, reference):
        add_fused_lm_head(one, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    trainer: Any = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    same = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, is_main_process=True)
    same.autocast = nullcontext
    vars(trainer).update(
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        accelerator=same,
        model=model,
        model_kwarg_keys=set(),
        temperature=TEMPERATURE,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=section.kl,
        loss_type=loss,
        epsilon_low=section.clip_low,
        epsilon_high=section.clip_high,
        use_vllm=updates == 1,
        vllm_importance_sampling_correction=True,
        max_completion_length=MAX_NEW,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )

    def log_probs(model: Any) -> Tensor:
        with torch.no_grad():
            found = trainer._get_per_token_logps_and_entropies(
                model, torch.cat([asked, ids], 1), torch.cat([torch.ones_like(asked), mask], 1), MAX_NEW
            )
        return found[0]

    inputs = {
        "prompt_ids": asked,
        "prompt_mask": torch.ones_like(asked),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(group_advantages(section, REWARDS).flatten(), dtype=torch.float32),
        "ref_per_token_logps": log_probs(reference),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": torch.exp(log_probs(model) - engine).clamp(max=section.importance_cap),
        **({"old_per_token_logps": engine} if updates > 1 else {}),
    }
    found = trainer._compute_loss(model.train(), inputs)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    for mine, other in zip(ours, model.parameters(), strict=True):
        assert distance(mine, other.grad) < 1e-5
