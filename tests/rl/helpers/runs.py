"""Runs of the recipe on a tiny model, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.rl.prompts import Prompts, build_prompts
from fsdp2kit.run import load
from tests.support.models import demo_model_dir
from tests.support.workers import WorkerPool

REWARDS = '''
def spread(completion_ids, level, **_):
    """Depends on the tokens and on the row's own column."""
    return [len({token % 7 for token in ids}) / 7 + ids[0] % 3 * int(one) for ids, one in zip(completion_ids, level)]

def same(completions, **_):
    return [0.1] * len(completions)

def level(level, **_):
    return [float(one) for one in level]

def needs(no_such_column, **_):
    return no_such_column
'''


def write_toml(folder: Path, *, kind: str = "smollm2_even") -> Path:
    """A run of the recipe in a folder: a tiny model, ten prompts, four reward functions."""
    folder = demo_model_dir(folder, kind=kind)
    (folder / "mine.py").write_text(REWARDS)
    rows = [{"prompt": f"Say {'it, ' * (at % 4)}{at}.", "level": str(at % 2)} for at in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(f"""
        recipe = "grpo"
        run.seed = 1
        model.path = "{folder}"
        fsdp.param_dtype = "float32"
        data = {{ path = "prompts.jsonl", seq_len = 64 }}
        rollout = {{ n = 4, max_new_tokens = 8, batch_size = 5, samples_every = 2 }}
        reward = [{{ function = "mine.py:spread" }}, {{ function = "mine.py:same", weight = 2.0 }}]
        grpo = {{ kl = 0.05 }}
        train = {{ steps = 4, global_batch_size = 16 }}
        optimizer.lr = 3e-3
        checkpoint = {{ every = 0, keep = 9, export_hf = "never" }}
        wandb.mode = "disabled"
    """)
    return folder / "run.toml"


def run_recipe(toml: str, overrides: Sequence[str]) -> str:
    try:
        recipe, config = load(toml, overrides)
        recipe.main(config)
    except UserError as error:
        return str(error)
    return ""


def run(pool: WorkerPool, toml: Path, directory: Path, size: int, *overrides: str) -> list[dict[str, Any]]:
    """The records of a run of the recipe."""
    assert set(pool.run(size, run_recipe, str(toml), [f"run.dir='{directory}'", *overrides])) == {""}
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def numbers(records: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What a run comes to: everything but speeds, memory and what depends on rounding alone."""
    timed = (
        "seconds",
        "per_second",
        "memory",
        "tflops",
        "mfu",
        "time",
        "packing",
        "gap",
        "epoch",
        "start",
        "slowest",
        "straggler",
    )
    return [{key: value for key, value in one.items() if not any(word in key for word in timed)} for one in records]


def prompts_of(toml: Path, *overrides: str, tokenizer: Any = None) -> Prompts:
    """The prompts of a run."""
    _, config = load(str(toml), list(overrides))
    return build_prompts(config, tokenizer=tokenizer or build_tokenizer(config.model))
