"""AdamW's groups, and schedules that are transformers' own from whichever step they start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.trainer_pt_utils import get_parameter_names

from fsdp2kit.config.schema import AdamWConfig, TrainingConfig
from fsdp2kit.config.sections.lr_schedule import LRScheduleConfig, PlainScheduleConfig
from fsdp2kit.config.sections.optimizer import MuonConfig
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer

TOTAL, PEAK = 20, 0.125
# Our section, and transformers' name and arguments for the same.
SCHEDULES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"name": "constant"}, "constant_with_warmup", {}),
    ({"name": "constant", "warmup_steps": 4}, "constant_with_warmup", {}),
    ({"name": "linear", "warmup_steps": 3}, "linear", {}),
    ({"name": "cosine"}, "cosine", {}),
    ({"name": "cosine", "warmup_steps": 5}, "cosine", {}),
    ({"name": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ({"name": "wsd", "warmup_steps": 2}, "warmup_stable_decay", {"num_decay_steps": 2}),
    (
        {"name": "wsd", "warmup_steps": 2, "decay_steps": 7, "min_lr_ratio": 0.2},
        "warmup_stable_decay",
        {"num_decay_steps": 7, "min_lr_ratio": 0.2},
    ),
]
IDS = ["-".join(map(str, section.values())) for section, _, _ in SCHEDULES]


def schedule_of(section: dict[str, Any]) -> LRScheduleConfig:
    return TrainingConfig.model_validate({"recipe": "x", "lr_schedule": section}).lr_schedule


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)], lr=PEAK)


def _rates(schedule: LambdaLR, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        assert len({group["lr"] for group in optimizer.param_groups}) == 1
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def _expected(section: dict[str, Any], name: str, arguments: dict[str, Any]) -> list[float]:
    optimizer = _optimizer()
    schedule = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=section.get("warmup_steps", 0),
        num_training_steps=TOTAL,
        scheduler_specific_kwargs=arguments,
    )
    return _rates(schedule, optimizer, TOTAL + 3)  # a run may be prolonged past its end


@pytest.mark.parametrize(("section", "name", "arguments"), SCHEDULES, ids=IDS)
@pytest.mark.parametrize("step", [0, 1, 4, 13, TOTAL])
def test_rates_equal_transformers_from_any_step(
    section: dict[str, Any], name: str, arguments: dict[str, Any], step: int
) -> None:
    optimizer = _optimizer()
    schedule = build_lr_schedule(schedule_of(section), optimizer, total_steps=TOTAL, step=step)
    assert _rates(schedule, optimizer, TOTAL + 3 - step) == _expected(section, name, arguments)[step:]


def test_another_peak_rate_is_that_of_the_optimizer() -> None:
    section = PlainScheduleConfig(name="linear", warmup_steps=2)
    optimizer = _optimizer()
    for group in optimizer.param_groups:
        group["lr"] = 2 * PEAK
    schedule = build_lr_schedule(section, optimizer, total_steps=TOTAL, step=6)
    twice = [2 * rate for rate in _expected({"name": "linear", "warmup_steps": 2}, "linear", {})[6:]]
    assert _rates(schedule, optimizer, TOTAL + 3 - 6) == twice


def test_only_matrices_are_decayed() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))
    model[3].weight.requires_grad_(False)
    optimizer = build_optimizer(AdamWConfig(lr=0.5, betas=(0.7, 0.8), eps=1e-6, weight_decay=0.3), model)
    decayed, exempt = optimizer.param_groups
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight), id(model[1].weight)]
    assert [id(p) for p in exempt["params"]] == [id(model[1].bias), id(model[2].weight), id(model[2].bias)]
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.3, 0.0)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.7, 0.8), 1e-6)


@pytest.mark.parametrize("section", [AdamWConfig(weight_decay=0.3), MuonConfig(name="muon", weight_decay=0.3)])
def test_biases_of_experts_are_not_decayed(section: Any) -> None:
    """They are ``[E, out]``."""
    config = AutoConfig.for_model("gpt_oss", vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(section, model).param_groups
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    # Attention sinks are one number a head, which transformers decays.
    theirs = get_parameter_names(model, [GptOssRMSNorm], [r"bias$", r"sinks$"])
    assert decayed == {*theirs}


def test_a_group_without_parameters_is_left_out() -> None:
    optimizer = build_optimizer(AdamWConfig(), nn.Linear(2, 2, bias=False))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_a_step_equals_adamw_by_hand() -> None:
    section = AdamWConfig(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)
    model = nn.Linear(2, 1)
    before = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    optimizer = build_optimizer(section, model)
    first, second = dict.fromkeys(before, 0.0), dict.fromkeys(before, 0.0)
    for step in (1, 2):
        gradients = {name: torch.full_like(p, 0.3 * step) for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
        for name in before:
            gradient = gradients[name].double()
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            decay = 0.2 if name == "weight" else 0.0
            update = (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.95**step)) ** 0.5 + 1e-8)
            before[name] = before[name] * (1 - 0.1 * decay) - 0.1 * update
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), before[name], rtol=1e-6, atol=1e-7)
