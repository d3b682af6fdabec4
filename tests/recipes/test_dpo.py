"""Runs of recipe "dpo": what they log and keep, resumed on another mesh, with adapters; and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from fsdp2kit.checkpoint.reader import SafeReader
from fsdp2kit.parity.reference import load_plain, worst_relative
from fsdp2kit.planner.estimate import estimate, plan_for
from fsdp2kit.run import load
from tests.recipes.helpers import PAIRS
from tests.support.models import demo_model_dir, full
from tests.support.runs import Run, assert_refused, resume, runner
from tests.support.workers import WorkerPool

METRICS = {"accuracy", "kl", "margin", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"}


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = demo_model_dir(tmp_path_factory.mktemp("model"))
    for name, rows in (("pairs", PAIRS[:18]), ("held", PAIRS[18:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "run.toml"
    path.write_text(
        f"""
        recipe = "dpo"
        model.path = "{folder}"
        fsdp.param_dtype = "float32"
        data = {{ path = "{folder}/pairs.jsonl", seq_len = 96 }}
        train = {{ steps = 4, global_batch_size = 4 }}
        optimizer.lr = 1e-3
        lr_schedule.name = "constant"
        eval = {{ every = 2, path = "{folder}/held.jsonl" }}
        checkpoint = {{ every = 2, keep = 9 }}
        wandb.mode = "disabled"
        """
    )
    return path


@pytest.fixture(scope="module")
def run(pool: WorkerPool, toml: Path) -> Run:
    return runner(pool, toml)


def plain_margins(model_dir: Path, reference_dir: Path, rows: list[dict]) -> list[float]:
    """log π ÷ π_ref of the better answer less that of the worse one, by plain transformers, one answer at a time."""
    models = [load_plain(path).eval() for path in (model_dir, reference_dir)]
    tokenizer = AutoTokenizer.from_pretrained(reference_dir)
    margins = []
    for row in rows:
        ratios = []
        for side in ("chosen", "rejected"):
            before = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            text = tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
            skip = len(tokenizer(before, add_special_tokens=False)["input_ids"])
            ids = torch.tensor(tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"])
            with torch.no_grad():
                logs = [model(ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1) for model in models]
            policy, reference = (log.gather(1, ids[1:, None])[skip - 1 :].sum().item() for log in logs)
            ratios.append(policy - reference)
        margins.append(ratios[0] - ratios[1])
    return margins


def test_a_run_learns_to_prefer(run: Run, toml: Path, tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", 2)
    assert "preferences: dpo, beta 0.1; reference: a frozen copy of the model as the run began" in straight[0]["said"]
    assert straight[0]["said"].count("\nmemory: ") == 1, "the plan, before anything is loaded"
    assert "memory, GiB planned / measured" in straight[0]["said"]
    assert straight[0]["loss"] == pytest.approx(math.log(2), rel=1e-6), "the reference is the model as it begins"
    assert straight[0]["kl"] == straight[0]["margin"] == straight[0]["accuracy"] == 0
    assert straight[-1]["loss"] < 0.6
    for line in straight:
        assert line.keys() >= METRICS
    # Held-out pairs, against plain transformers on the export and the model it began as.
    last = straight[-1]
    assert last.keys() >= {"eval_loss", *(f"eval_{name}" for name in METRICS)}
    assert "eval_perplexity" not in last
    margins = [0.1 * value for value in plain_margins(tmp_path / "straight" / "hf", toml.parent, PAIRS[18:])]
    assert last["eval_margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
    assert last["eval_loss"] == pytest.approx(
        sum(math.log1p(math.exp(-one)) for one in margins) / len(margins), rel=1e-5
    )
    assert last["eval_accuracy"] == sum(one > 0 for one in margins) / len(margins)
    assert f"eval_accuracy {last['eval_accuracy']:.4g}" in last["said"]


@pytest.mark.full
def test_a_run_is_resumed_on_another_mesh(run: Run, toml: Path, tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", 2)
    # Nothing of the reference is kept, and a resumed run still compares with the model as the run began.
    checkpoint = tmp_path / "straight" / "checkpoints" / "step-000002"
    names = {key for key in SafeReader(checkpoint).stored_tensors() if key.startswith("model.")}
    assert len(names) == len(dict(load_plain(toml.parent).named_parameters()))
    for size, mesh in ((1, ()), (4, ("mesh.cp=2", "train.micro_batch_size=2"))):
        resumed = resume(run, checkpoint, tmp_path / f"{size}", size, *mesh)
        for key in ("loss", "grad_norm", "kl"):
            assert worst_relative([line[key] for line in resumed], [line[key] for line in straight[2:]]) < 1e-4, key
    # Another run that begins with these weights has them in its reference.
    again = run(tmp_path / "again", 2, f"model.weights='{checkpoint}'", "train.steps=1")
    assert again[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    random = run(tmp_path / "random", 2, "model.weights=random", "run.seed=3", "train.steps=1")
    assert random[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert random[0]["kl"] == 0


@pytest.mark.full
@pytest.mark.parametrize("loss", ["dpo", pytest.param("orpo", marks=pytest.mark.slow)])
def test_adapters_need_no_copy(loss: str, run: Run, toml: Path, tmp_path: Path) -> None:
    options = ("lora.rank=4", "optimizer.lr=1e-2", f"dpo.loss={loss}")
    lines = run(tmp_path / "run", 2, *options)
    reference = {"dpo": "the model with its adapters switched off", "orpo": "none"}[loss]
    assert f"; reference: {reference}\n" in lines[0]["said"]
    assert ("kl" in lines[0]) == (loss == "dpo")
    assert lines[-1]["loss"] < lines[0]["loss"]
    if loss == "dpo":
        assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
        checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
        resumed = resume(run, checkpoint, tmp_path / "resumed", 2, *options, "mesh.cp=2")
        assert worst_relative([line["loss"] for line in resumed], [line["loss"] for line in lines[2:]]) < 1e-4
        # An adapter that is trained further is compared with what it was.
        further = run(tmp_path / "further", 2, f"model.adapter='{tmp_path / 'run' / 'hf'}'", "train.steps=2")
        assert "a frozen copy of the model" in further[0]["said"]
        assert further[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
        assert further[1]["loss"] < further[0]["loss"]


def test_mistakes_are_one_line(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": "a", "winner": "b", "rejected": "c"}) + "\n")
    mistakes = {
        ("dpo.loss=dop",): "dpo.loss",
        ("dpo.beta=0",): "dpo.beta",
        ("dpo.gamma=1.0",): "dpo.gamma: not a key of dpo.loss = 'dpo'; leave it out, or set dpo.loss = 'simpo'",
        ("dpo.loss=ipo", "dpo.label_smoothing=0.1"): "dpo.label_smoothing: not a key of dpo.loss = 'ipo'",
        ("dpo.bata=1",): "did you mean dpo.beta?",
        ("data.format=chat",): "data.format",
        ("data.train_on=all",): "data.train_on",
        (
            f"data.path='{bad}'",
        ): "bad.jsonl:1: the row has no 'chosen' (it has: prompt, winner, rejected); did you mean 'winner'?",
    }
    assert_refused(pool, toml, mistakes, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "has_one"), [full([], True), (["dpo.loss=simpo"], False), (["lora.rank=2"], False)]
)
def test_its_reference_is_planned(overrides: list[str], has_one: bool, toml: Path) -> None:
    _, config = load(str(toml), overrides)
    found = estimate(config, *plan_for(config, world_size=2, local_world_size=2))
    rest = found.peaks["save"].bytes
    if has_one:  # in the dtype that it computes in, which is that of storage here
        assert rest["reference"] == rest["parameters"]
    assert ("reference" in rest) is has_one
