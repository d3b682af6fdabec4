"""Saved on one mesh and resumed on any other: the same token ids follow, and the same losses."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.parity.reference import worst_relative
from fsdp2kit.run import load
from tests.support.runs import losses, write_run
from tests.support.workers import WorkerPool

DEMO = Path(__file__).parents[2] / "toml" / "demo"
SAVED_AT, STEPS = 4, 12
DP2_CP2 = (4, ("mesh.cp=2",))
MESHES = {"1x1": (1, ()), "4x1": (4, ()), "1x4": (4, ("mesh.cp=4",)), "2x1": (2, ())}


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model none of whose sizes is a multiple of 4: vocabulary 1031, width 30, 3 layers' MLPs of 37."""
    folder = tmp_path_factory.mktemp("elastic")
    config = AutoConfig.for_model(
        "llama",
        vocab_size=1031,
        hidden_size=30,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shutil.copytree(DEMO / "tokenizer", folder, dirs_exist_ok=True)
    saves = f'every = {SAVED_AT}, keep = 9, export_hf = "never"'
    return write_run(folder, steps=STEPS, checkpoint=saves)


Seen = dict[int, tuple[int, list]]


def run_and_record(toml: str, overrides: Sequence[str]) -> Seen:
    """Run the recipe; by global batch, this rank's place among the data-parallel ones and its rows."""
    recipe: Any
    recipe, config = load(toml, overrides)
    train = recipe.train_loop
    seen: Seen = {}

    class Recorded:
        def __init__(self, batches: Any, dp_rank: int) -> None:
            self._batches, self._dp_rank = batches, dp_rank

        def __getattr__(self, name: str) -> Any:
            return getattr(self._batches, name)

        def batch(self, index: int) -> Sequence[Any]:
            micro_batches = self._batches.batch(index)
            rows = [row for micro in micro_batches for row in micro.input_ids.tolist()]
            seen[index] = (self._dp_rank, rows)
            return micro_batches

    def recording(run, model, optimizer, schedule, batches, **others):
        return train(run, model, optimizer, schedule, Recorded(batches, run.mesh.dp_rank), **others)

    recipe.train_loop = recording
    recipe.main(config)
    return seen


def tokens(by_rank: list[Seen], index: int) -> list[list[int]]:
    """The rows of a global batch, of all data-parallel ranks in order; context-parallel ones read the same."""
    parts: dict[int, list] = {}
    for seen in by_rank:
        dp_rank, rows = seen[index]
        assert parts.setdefault(dp_rank, rows) == rows
    return [row for dp_rank in sorted(parts) for row in parts[dp_rank]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("streaming", "meshes"),
    [
        pytest.param(False, ("1x1",), id="read whole"),
        pytest.param(False, ("4x1", "1x4", "2x1"), id="read whole, others", marks=pytest.mark.slow),
        pytest.param(True, tuple(MESHES), id="streaming", marks=pytest.mark.slow),
    ],
)
def test_resumed_on_any_mesh(
    streaming: bool, meshes: Sequence[str], pool: WorkerPool, toml: Path, tmp_path: Path
) -> None:
    size, mesh = DP2_CP2
    common = [f"data.streaming={str(streaming).lower()}"]
    straight = tmp_path / "straight"
    expected = pool.run(size, run_and_record, str(toml), [f"run.dir='{straight}'", *common, *mesh])
    following = range(SAVED_AT, STEPS)
    assert len({str(tokens(expected, index)) for index in following}) == STEPS - SAVED_AT, "batches differ at all"
    for name in meshes:
        size, mesh = MESHES[name]
        run_dir = tmp_path / name
        checkpoint = Path("checkpoints") / f"step-{SAVED_AT:06d}"
        shutil.copytree(straight / checkpoint, run_dir / checkpoint)
        found = pool.run(size, run_and_record, str(toml), [f"run.dir='{run_dir}'", *common, *mesh])
        for index in following:
            assert tokens(found, index) == tokens(expected, index), (name, index)
        assert worst_relative(losses(run_dir), losses(straight)[SAVED_AT:]) < 1e-5, name
