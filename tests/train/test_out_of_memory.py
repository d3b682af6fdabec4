"""Out of memory: what was alive is counted, and the advice is what is not in use yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.errors import RunFailure
from fsdp2kit.train import out_of_memory
from fsdp2kit.train.out_of_memory import Alive, diagnosis, explain_out_of_memory
from fsdp2kit.train.step import next_batch
from tests.planner.helpers.models import LLAMA_8B, config_of

GIB = 2**30


def _alive(*, parameters: int = 1, moments: int = 2, allocated: int = 70, reserved: int = 71) -> Alive:
    activations, unused = allocated - parameters - 1 - moments, reserved - allocated
    return Alive(*(part * GIB for part in (parameters, 1, moments, activations, unused, 80)))


def _config(**sections: dict[str, Any]) -> TrainingConfig:
    return config_of(LLAMA_8B, **sections)


FULL = {"mode": "full"}
SIZES = MeshSizes(dp_replicate=1, dp_shard=8, cp=1)


@pytest.mark.parametrize(
    ("alive", "sections", "advice"),
    [
        (_alive(), {"train": {"micro_batch_size": 4}}, ["micro_batch_size = 1", '"selective"']),
        (_alive(), {"activation_checkpointing": {"mode": "selective"}}, ['mode = "full"', "backward_prefetch = 0"]),
        (
            _alive(),
            {
                "activation_checkpointing": {"mode": "selective"},
                "fsdp": {"reduce_every_micro_batch": False},
            },
            ['mode = "full"', "reduce_every_micro_batch = true"],
        ),
        (
            _alive(),
            {
                "activation_checkpointing": FULL,
                "fsdp": {"backward_prefetch": 0},
            },
            ["checkpointing.offload = true", "mesh.cp"],
        ),
        (_alive(parameters=20, moments=40), {"fsdp": {"strategy": "no_shard"}}, ['"hybrid_shard"', '"optimizer"']),
        (_alive(parameters=20, moments=40), {}, ['offload = "optimizer"', 'optimizer.name = "adamw_bf16"']),
        (_alive(parameters=20, moments=40), {"fsdp": {"offload": "optimizer"}}, ['offload = "params"', "more ranks"]),
        # What the start would refuse is not advised.
        (_alive(), {"model": {"liger": True}}, ['mode = "full"', "backward_prefetch = 0"]),
        (_alive(parameters=20, moments=40), {"optimizer": {"name": "adamw_8bit"}}, ["more ranks"]),
        (
            _alive(parameters=20, moments=40),
            {"optimizer": {"name": "muon"}, "fsdp": {"offload": "optimizer"}},
            ["more ranks"],
        ),
    ],
)
def test_the_advice_is_the_cheapest_that_is_not_in_use(alive: Alive, sections: dict, advice: list[str]) -> None:
    text = diagnosis(alive, _config(**sections), SIZES)
    given = text.partition("Next: ")[2].split("; ")
    assert len(given) == len(advice)
    assert all(want in got for want, got in zip(advice, given, strict=True)), text


def test_the_parts_add_up_to_what_was_allocated() -> None:
    text = diagnosis(_alive(), _config(), SIZES)
    assert (
        "of 80 GiB: parameters 1.0 GiB, gradients 1.0 GiB, moments 2.0 GiB, activations and gathered units 66.0"
        in text
    )
    assert "expandable_segments" not in text


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_fragments_are_counted_and_growing_segments_advised_where_they_are_not_in_use(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv(name, "expandable_segments:False")
    without = diagnosis(_alive(reserved=79), _config(), SIZES)
    monkeypatch.setenv(name, "max_split_size_mb:256, expandable_segments: True")
    with_it = diagnosis(_alive(reserved=79), _config(), SIZES)

    assert "9.0 GiB more were reserved in pieces too small: start with PYTORCH_ALLOC_CONF=" in without
    assert "9.0 GiB more were reserved in pieces too small. Next" in with_it


def test_an_out_of_memory_error_becomes_a_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "what_is_alive", lambda model, optimizer: _alive())
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with (
        pytest.raises(RunFailure, match=r"rank 3: CUDA out of memory\. Alive of 80 GiB.*Next: .*oom-00003\.pickle"),
        explain_out_of_memory(_config(run={"dir": str(tmp_path)}), model, optimizer, SIZES, rank=3),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
    assert (tmp_path / "trace" / "oom-00003.pickle").read_bytes() == b"snapshot"


class _Full:
    """Batches that are made on the device, as rollouts are."""

    source_names = ()

    def batch(self, index: int, /) -> Any:
        raise torch.OutOfMemoryError(f"batch {index}")


def test_of_a_batch_it_is_raised_before_any_collective() -> None:
    """In which the other ranks, still at work on theirs, would not meet it."""
    no_mesh: Any = None
    with pytest.raises(torch.OutOfMemoryError, match="batch 3"):
        next_batch(_Full(), 3, mesh=no_mesh)
