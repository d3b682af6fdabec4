"""Evaluation in whole runs: named sets, early stopping, the best checkpoint, answers; streams and mixes resumed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp2kit.checkpoint import run_export
from fsdp2kit.config.schema import EvalConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.job.distributed import rank
from fsdp2kit.job.progress import Progress
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.parity.reference import Rows, cross_entropy_sum, load_plain, plain_logits
from fsdp2kit.run import load
from fsdp2kit.train.evaluating import Evaluations
from tests.checkpoint.helpers import exported_step
from tests.support.models import demo_model_dir
from tests.support.runs import run_recipe, runner, write_run
from tests.support.workers import WorkerPool

DEMO = Path(__file__).parents[2] / "toml" / "demo"
CP2 = ("mesh.cp=2", "train.micro_batch_size=2")


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = demo_model_dir(tmp_path_factory.mktemp("tied"))
    return write_run(folder, lr=1e-3, checkpoint='every = 3, keep = 1, export_dtype = "float32"')


def run(pool: WorkerPool, toml: Path, directory: Path, size: int, *overrides: str) -> list[dict[str, Any]]:
    return runner(pool, toml)(directory, size, *overrides)


@pytest.mark.full
def test_named_sets_are_weighted_by_their_tokens(pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    lines = (DEMO / "heldout.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:5]))
    (tmp_path / "b.jsonl").write_text("".join(lines[5:]))
    sets = f'eval.sets={{a={{path="{tmp_path}/a.jsonl"}}, b={{path="{tmp_path}/b.jsonl"}}}}'
    [split] = run(pool, toml, tmp_path / "split", 2, "train.steps=0", sets, *CP2)
    [whole] = run(pool, toml, tmp_path / "whole", 1, "train.steps=0", f"eval.path='{DEMO / 'heldout.jsonl'}'")
    assert split["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)
    assert split["eval_perplexity"] == pytest.approx(math.exp(split["eval_loss"]))
    assert "loss" not in split
    assert not (tmp_path / "split" / "hf").exists()
    assert list((tmp_path / "split" / "checkpoints").iterdir()) == []
    assert min(split["eval_loss/a"], split["eval_loss/b"]) < split["eval_loss"]
    assert max(split["eval_loss/a"], split["eval_loss/b"]) > split["eval_loss"]


def test_the_best_evaluation_is_remembered_and_patience_ends() -> None:
    progress = Progress()
    for step, (loss, best, stale) in enumerate([(3.0, 1, 0), (2.95, 1, 1), (2.8, 3, 0), (2.9, 3, 1)], 1):
        progress = replace(progress, step=step).after_evaluation(loss, min_delta=0.1, by={})
        assert (progress.best_step, progress.stale_evaluations) == (best, stale)
        assert not progress.is_over(9, patience=2)
    assert progress.after_evaluation(5.0, min_delta=0.1, by={}).is_over(9, patience=2)
    assert Progress().after_evaluation(math.nan, min_delta=0.0, by={}).best_step is None, "it would never be beaten"
    assert progress.is_over(4, patience=None)


def test_losses_by_other_rows_are_not_compared() -> None:
    progress = replace(Progress(), step=3).after_evaluation(2.0, min_delta=0.0, by={"held-out rows": "a"})
    progress = replace(progress, step=4).after_evaluation(3.0, min_delta=0.0, by={"held-out rows": "a"})
    assert progress.compared_by({"held-out rows": "a"}) == (progress, [])
    anew, differing = progress.compared_by({"held-out rows": "b", "held-out rows code": "c"})
    assert differing == ["held-out rows", "held-out rows code"]
    assert progress.compared_by({})[1] == ["held-out rows"]
    assert (anew.best_step, anew.best_eval_loss, anew.stale_evaluations, anew.step) == (None, None, 0, 4)
    assert anew.after_evaluation(2.5, min_delta=0.0, by={}).best_eval_loss == 2.5


def _best_step(best_by: str) -> int | None:
    """After ranks that read different copies of the rows have compared."""
    evaluate: Any = SimpleNamespace(measured_by={"held-out rows": f"copy of rank {rank()}"})
    metrics: Any = SimpleNamespace(message=lambda _: None, events=None)
    progress = Progress(step=4, best_step=3, best_eval_loss=2.0, best_by={"held-out rows": best_by})
    evaluations = Evaluations(evaluate, EvalConfig(), metrics=metrics, last_step=5)
    return evaluations.begin(progress).best_step


def test_ranks_agree_on_what_is_compared(pool: WorkerPool) -> None:
    assert pool.run(2, _best_step, "copy of rank 0") == [3, 3]
    assert pool.run(2, _best_step, "copy of rank 1") == [None, None]


@pytest.mark.full
def test_a_resume_says_which_rows_changed(pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    """Held-out ones are listed, and their losses begin anew; training rows are refused: which file, how many rows."""
    lines = (DEMO / "heldout.jsonl").read_text().splitlines(keepends=True)
    folder = tmp_path / "train"
    folder.mkdir()
    for name, rows in (("train/a.jsonl", lines[:6]), ("train/b.jsonl", lines[6:]), ("code.jsonl", lines[:3])):
        (tmp_path / name).write_text("".join(rows))
    (tmp_path / "text.jsonl").write_text("".join(lines[3:6]))
    options = ["eval.every=1", "eval.keep_best=true", "lr_schedule.name=constant"]
    options += [f"data.path='{folder}'", "optimizer.lr=1e-9", "checkpoint.every=1", "checkpoint.export_hf=every"]
    sets = [
        f'eval.sets={{{", ".join(f"""{name}={{path="{tmp_path}/{name}.jsonl"}}""" for name in ("code", "text"))}}}'
    ]

    def start(steps: int, *overrides: str) -> str:
        changes = (*options, *(overrides or sets), f"train.steps={steps}")
        return run(pool, toml, tmp_path / "run", 1, *changes)[-1]["said"]

    start(1)
    (tmp_path / "code.jsonl").write_text("".join(lines[:5]))
    said = start(2)
    assert "changed since: train.steps 1 → 2, eval.sets.code.path (code.jsonl changed, 3 → 5 rows)\n" in said
    assert (
        "\nevaluations are compared anew from step 1 on: held-out rows code changed since step 1 was the best" in said
    )
    assert exported_step(tmp_path / "run" / "hf") == 2
    assert "on: eval.steps changed since step " in start(3, *sets, "eval.steps=1")
    (folder / "b.jsonl").write_text("".join(lines[6:8]))
    with pytest.raises(
        AssertionError, match=r"other data: data\.path \(b\.jsonl changed, \d+ → 8 rows\) .*; undo that"
    ):
        start(4)


def test_it_stops_early_keeps_the_best_and_exports(pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    held_out = f"eval.path='{DEMO / 'heldout.jsonl'}'"
    # Nothing gets lower by so much, so the first evaluation stays the best.
    options = [held_out, "eval.every=1", "eval.patience=3", "eval.min_delta=5.0"]
    options += ["checkpoint.every=0"]
    lines = run(pool, toml, tmp_path / "run", 2, *options)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000004"]
    assert exported_step(tmp_path / "run" / "hf") == 1
    again = run(pool, toml, tmp_path / "run", 2, *options)
    assert "nothing left to train: the run stopped early, after step 4 of " in again[0]["said"]
    assert len(again) == 4


def _killed_before_the_export(toml: str, overrides: Sequence[str]) -> None:
    """A run whose last checkpoint is written and whose export is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_export, "export_checkpoint", partial(_fail, "killed"))
        with pytest.raises(RuntimeError, match="killed"):
            run_recipe(toml, overrides)


def _fail(what: str, *_: object, **__: object) -> None:
    raise RuntimeError(what)


def _plain_eval_loss(toml: Path, model_dir: Path, overrides: Sequence[str]) -> float:
    """Mean loss over the supervised tokens of the held-out rows, by plain transformers."""
    _, config = load(str(toml), overrides)
    held_out = build_data(config, tokenizer=build_tokenizer(config.model), vocab_size=1024).held_out[""]
    model, loss, tokens = load_plain(model_dir).eval(), 0.0, 0
    for index in range(held_out.steps_per_epoch):
        for batch in held_out.batch(index):
            rows = Rows(batch.input_ids, batch.labels, batch.position_ids)
            with torch.no_grad():
                loss += cross_entropy_sum(plain_logits(model, rows).double(), rows.labels).item()
            tokens += rows.targets
    return loss / tokens


@pytest.mark.full
@pytest.mark.parametrize("is_async", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_the_best_step_is_exported(is_async: str, pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    """Also of a run that was killed before its export, taken up on another mesh, where nothing is left to train."""
    options = [f"eval.path='{DEMO / 'heldout.jsonl'}'", "eval.every=1", "eval.keep_best=true", "checkpoint.every=0"]
    # At this rate the model becomes worse and worse after a while.
    options += ["optimizer.lr=0.2", "lr_schedule.name=constant", f"checkpoint.async_save={is_async}"]
    directory = tmp_path / "run"
    pool.run(2, _killed_before_the_export, str(toml), [f"run.dir='{directory}'", *options, *CP2])
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval_loss"] for line in lines}
    best = min(losses, key=losses.__getitem__)
    assert best < 6, losses
    assert exported_step(directory / "hf") is None
    said = run(pool, toml, directory, 1, *options)[-1]["said"]
    assert exported_step(directory / "hf") == best
    assert f"hf, of step-{best:06d}, the best (eval_loss {losses[best]:.6g})" in said
    assert _plain_eval_loss(toml, directory / "hf", options) == pytest.approx(losses[best], abs=1e-5)
    # The last one, where that is asked for, and the best again, which is not damaged meanwhile.
    run(pool, toml, directory, 1, *options, "checkpoint.export=last")
    assert exported_step(directory / "hf") == 6
    assert _plain_eval_loss(toml, directory / "hf", options) == pytest.approx(losses[6], abs=1e-5)
    kept = directory / "checkpoints" / f"step-{best:06d}"
    shutil.move(kept, tmp_path / "away")
    said = run(pool, toml, directory, 1, *options)[-1]["said"]
    assert f"hf, of step-000006, the last; no checkpoint was kept of step-{best:06d}, the best" in said
    shutil.copytree(tmp_path / "away", kept)
    shard = next(kept.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100] + bytes(100))
    with pytest.raises(AssertionError, match=f"step-{best:06d}.*{shard.name}"):
        run(pool, toml, directory, 1, *options)
    assert exported_step(directory / "hf") == 6, "what was there is not replaced by a damaged one"


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh",
    [(*CP2, "context_parallel.method=ring"), *(pytest.param(each, marks=pytest.mark.slow) for each in ((), CP2))],
)
def test_answers_are_those_of_plain_transformers(mesh, pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    prompts = ["What is the opposite of wet?", "Tell me the month after June."]
    held_out = (f"eval.path='{DEMO / 'heldout.jsonl'}'", "eval.every=3", "eval.max_new_tokens=6")
    directory = tmp_path / "run"
    run(pool, toml, directory, 2 if mesh else 1, f"eval.prompts={json.dumps(prompts)}", *held_out, *mesh)
    found = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in found] == [(step, one) for step in (3, 6) for one in prompts]
    model, tokenizer = (kind.from_pretrained(directory / "hf") for kind in (AutoModelForCausalLM, AutoTokenizer))
    for prompt, line in zip(prompts, found[2:], strict=True):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert line["answer"] == expected.strip()


MIX = 'sources=[{path="CHAT", weight=1}, {path="HELD", weight=2}]'
DATA = {
    "stream": 'data={seq_len=64, path="CHAT", streaming=true}',
    "stream of a mix": f"data={{seq_len=64, streaming=true, {MIX}}}",
    "mix": f"data={{seq_len=64, {MIX}}}",
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "stream of a mix" else pytest.mark.slow) for name in DATA]
)
def test_resumed_on_another_mesh_the_numbers_agree(name: str, pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    files = {"CHAT": str(DEMO / "chat.jsonl"), "HELD": str(DEMO / "heldout.jsonl")}
    data = [DATA[name].replace("CHAT", files["CHAT"]).replace("HELD", files["HELD"])]
    straight = run(pool, toml, tmp_path / "straight", 2, *data)
    half = run(pool, toml, tmp_path / "half", 1, *data, "train.steps=3", "lr_schedule.name=constant")
    resumed = run(pool, toml, tmp_path / "half", 2, *data, *CP2, "lr_schedule.name=constant")
    for one, other, what in (("weight=2", "weight=3", "its files are the same"), ("HELD", "CHAT", r"\S+ is gone")):
        if one in DATA[name]:
            changed = DATA[name].replace(one, other).replace("CHAT", files["CHAT"]).replace("HELD", files["HELD"])
            with pytest.raises(AssertionError, match=f"was made with other data: .*{what}"):
                run(pool, toml, tmp_path / "half", 1, changed, "train.steps=9")
    steady = run(pool, toml, tmp_path / "steady", 2, *data, "lr_schedule.name=constant")
    assert len(half) == 3
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in resumed] == pytest.approx([line[key] for line in steady], rel=2e-5)
    names = [key for key in straight[0] if key.startswith("tokens/")]
    assert names == ([] if name == "stream" else ["tokens/chat", "tokens/heldout"])
    for key in ("tokens", "input_tokens", "packing_efficiency", *names):
        assert [line[key] for line in resumed] == [line[key] for line in straight]
    for line in straight:
        assert not names or sum(line[key] for key in names) == line["tokens"]
