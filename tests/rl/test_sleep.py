"""Training state sleeps on the host: nothing of it is left on the device, and it wakes up as it was, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp2kit.config.schema import FSDPConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.rl.sleep import check_sleep, sleep, wake_up
from tests.rl.helpers.jobs import asleep, naps
from tests.support.cases import Case
from tests.support.lagging_copies import LaggingCopies
from tests.support.models import full, needs_torchao, tiny_model_dir, write_adapter
from tests.support.workers import WorkerPool

CASES = [
    (Case("smollm2", 3, 1, fsdp=(("param_dtype", "bfloat16"),)), "adamw"),  # uneven shards
]
OTHERS = [
    (Case("qwen3", 2, 1, adapter="lora"), "adamw"),
    (Case("llama3", 1, 1), "adamw"),
    (Case("llama3", 1, 2), "muon"),
    (Case("smollm2", 2, 1, fsdp=(("offload", "optimizer"),)), "adamw_bf16"),
    (Case("llama3", 2, 2, fsdp=(("strategy", "hybrid_shard"),), dp_replicate=2), "adamw"),
    (Case("mixtral", 2, 1, fsdp=(("strategy", "shard_grad_op"),), checkpointing=True), "adamw_8bit"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in {case.kind for case, _ in CASES + OTHERS}:
        tiny_model_dir(kind, folder)
    write_adapter(folder, "qwen3", "lora")
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        *CASES,
        *(full(*other) for other in OTHERS[:-1]),
        full(*OTHERS[-1], marks=[needs_torchao]),
    ],
    ids=str,
)
def test_steps_after_sleep_are_those_without(case: Case, optimizer: str, models: Path, pool: WorkerPool) -> None:
    section = TrainingConfig.model_validate({"recipe": "naps", "optimizer": {"name": optimizer, "lr": 1e-3}}).optimizer
    for (losses, state), (plain_losses, plain_state) in zip(
        pool.run(case.world, naps, models, case, section, True),
        pool.run(case.world, naps, models, case, section, False),
        strict=True,
    ):
        assert losses == plain_losses
        assert state.keys() == plain_state.keys()
        assert not [name for name in state if not np.array_equal(state[name], plain_state[name])]


def test_what_is_asleep_is_refused_and_not_garbage(models: Path, pool: WorkerPool) -> None:
    weights = 'the weights are asleep on the host; wake_up(model, ["weights"]) brings them back'
    for rank in pool.run(2, asleep, models, Case("llama3", 2, 1)):
        assert rank == {
            "forward": weights,
            "loss_sum": weights,
            "a layer": weights,
            "sync": weights,
            "step": weights,
            "step with weights": weights.replace("weights", "optimizer"),
        }


def test_offloaded_parameters_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"^fsdp.offload: .params. keeps parameters.*on the host already; set it to .none"
    ):
        check_sleep(FSDPConfig(offload="params"))
    check_sleep(FSDPConfig(offload="optimizer"))


def test_copies_may_lag_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device orders them: the host waits for none, and empties each storage at once."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    before = [tensor.detach().clone() for tensor in tensors]
    with monkeypatch.context() as patch:
        copies = LaggingCopies(patch)
        for _ in range(2):
            sleep(model, optimizer)
            assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
            wake_up(model)
        copies.wait()
    assert all(torch.equal(tensor, known) for tensor, known in zip(tensors, before, strict=True))
