"""What a run says of its memory: the plan before anything is loaded, and at the end beside what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import DEMO, demo_model_dir, full
from tests.support.runs import run_recipe
from tests.support.workers import WorkerPool

DATA = {
    "sft": f'{{ path = "{DEMO / "chat.jsonl"}", seq_len = 64 }}',
    "pretrain": '{ format = "synthetic", seq_len = 64 }',
    "fsdp1_baseline": "{ seq_len = 64 }",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model_dir(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("recipe", ["sft", *(full(recipe) for recipe in DATA if recipe != "sft")])
def test_a_run_says_what_memory_was_planned_and_measured(
    recipe: str, model_dir: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        f"""
        recipe = "{recipe}"
        run.dir = "{tmp_path / "run"}"
        model.path = "{model_dir}"
        data = {DATA[recipe]}
        train = {{ steps = 1, global_batch_size = 2 }}
        checkpoint = {{ every = 0, export_hf = "never" }}
        wandb.mode = "disabled"
        """
    )
    said, other = pool.run(2, run_recipe, str(toml), [])
    assert not said.startswith("error"), said
    lines = [line for line in said.splitlines() if line.startswith(("memory", "first step done"))]
    assert [line.split()[0] for line in lines] == ["memory:", "first", "memory,"]
    assert "planned / measured" in lines[2]
    assert "forward" in lines[2]
    assert "memory" not in other, "rank 0 alone says it"
