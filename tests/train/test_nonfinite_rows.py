"""A loss or gradient that is not finite names packs, and the preview shows them; it ends a run in one line."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp2kit.console import row_numbers, rows_text
from fsdp2kit.errors import NonFiniteFailure
from fsdp2kit.run import load
from fsdp2kit.train.step import nonfinite_packs
from tests.support.short_run import TOML
from tests.support.workers import WorkerPool, run_command
from tools import preview


def fail_in_a_step(toml: str, overrides: list[str], fails: str) -> tuple[str, list[str]]:
    """The failure of a run with one loss or gradient that is not finite; and the tokens of that micro-batch."""
    recipe, config = load(toml, overrides)
    original, calls, seen = vars(recipe)["cross_entropy"], 0, []

    def poisoned(model: Any, inputs: dict[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        loss, parts = original(model, inputs)
        if calls == 4 and recipe_rank() == 1:
            seen.extend(inputs["input_ids"].tolist())
            # The root of 0 has a slope that is not finite.
            loss = loss * float("nan") if fails == "loss" else loss + (loss - loss.detach()).abs().sqrt()
        return loss, parts

    vars(recipe)["cross_entropy"] = poisoned
    with pytest.raises(NonFiniteFailure) as failure:
        recipe.main(config)
    return str(failure.value), seen


def recipe_rank() -> int:
    from fsdp2kit.job.distributed import rank

    return rank()


OPTIONS = ["train.global_batch_size=8", "train.micro_batch_size=2", "checkpoint.every=0"]


def test_the_packs_of_a_loss_that_is_not_finite_are_named_and_shown(
    pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml, run_dir = tmp_path / "run.toml", tmp_path / "run"
    toml.write_text(TOML)
    (said, _), (_, seen) = pool.run(2, fail_in_a_step, str(toml), [f"run.dir={run_dir}", *OPTIONS], "loss")
    named = re.match(
        r"step 2: the loss is not finite on rank 1, in packs ([\d,-]+) of training \((.*) shows them\); ", said
    )
    assert named, said
    # The second batch has packs 9 to 16. Rank 1 reads the last four, two at a time.
    assert named.group(1) == "15-16"
    arguments = named.group(2).split(" preview ")[-1].split("preview.py ")[-1].split()
    assert preview.main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["pack_numbers"] == [15, 16]
    texts = ["".join(piece["text"] for document in pack for piece in document) for pack in shown["packs"]]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(load(str(toml), [])[1].model.tokenizer)
    assert [tokenizer.decode(ids)[: len(text)] for ids, text in zip(seen, texts, strict=True)] == texts


def test_a_gradient_that_is_not_finite_names_all_packs_of_its_batch(pool: WorkerPool, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(TOML)
    [(said, _), _] = pool.run(2, fail_in_a_step, str(toml), [f"run.dir={tmp_path / 'run'}", *OPTIONS], "gradient")
    what = r"step 2: the gradient norm is nan although every rank's loss is finite, in packs 9-16 of training \("
    assert re.match(what, said), said


def test_packs_beyond_the_most_that_are_named_are_counted() -> None:
    micro_batches = [SimpleNamespace(rows=range(first, first + 20)) for first in range(1, 101, 20)]
    batch: Any = SimpleNamespace(micro_batches=micro_batches, losses=[torch.ones(1)] * 5)
    config: Any = SimpleNamespace(data=SimpleNamespace(pack=True, streaming=True))
    assert nonfinite_packs(batch, config) == ", in packs 1-32 and 68 more of training"
    batch.losses = [torch.tensor([float("nan") if number == 1 else 1.0]) for number in range(5)]
    assert nonfinite_packs(batch, config) == ", in packs 21-40 of training"


@pytest.mark.full
def test_it_ends_a_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    options = ("run.dir=run", "optimizer.lr=1e38", "train.global_batch_size=2")
    ended = run_command("fsdp2kit.run", "run.toml", *options, cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: step \d+: the (loss|gradient norm) is ", line)
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "NonFiniteFailure" in (tmp_path / "run" / "errors" / "rank-0.txt").read_text()


@pytest.mark.parametrize(
    ("text", "numbers"), [("17-17", [17]), ("17,44", [17, 44]), ("3-5,9,11-12", [3, 4, 5, 9, 11, 12])]
)
def test_numbers_of_rows(text: str, numbers: list[int]) -> None:
    assert rows_text(numbers) == text
    assert row_numbers(text) == numbers
    assert row_numbers("3") == 3
    for none in ("5-1", "0-2", "a", "1-", "2,x"):
        with pytest.raises(argparse.ArgumentTypeError):
            row_numbers(none)
