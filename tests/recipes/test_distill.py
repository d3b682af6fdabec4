"""Runs of recipe "distill": what they log, resumed on another mesh, with adapters, of a mix; and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp2kit.checkpoint.reader import SafeReader
from fsdp2kit.config.checks import check_config
from fsdp2kit.errors import UserError
from fsdp2kit.parity.reference import load_plain, worst_relative
from fsdp2kit.planner.estimate import plan_for
from fsdp2kit.run import load
from tests.support.models import DEMO, DEMO_VOCABULARY, demo_model_dir, tiny_model
from tests.support.runs import Run, assert_refused, resume, runner
from tests.support.workers import WorkerPool


def teacher_dir(folder: Path, *, rows: int = DEMO_VOCABULARY) -> Path:
    """A tiny untied model of another width, with the demo's tokenizer and ``rows`` rows in its embedding."""
    config = tiny_model("llama3").config
    config.vocab_size, config.hidden_size, config.num_attention_heads, config.num_key_value_heads = rows, 40, 5, 1
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    shutil.copytree(DEMO / "tokenizer", folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = demo_model_dir(tmp_path_factory.mktemp("model"))
    teacher = teacher_dir(folder / "teacher", rows=DEMO_VOCABULARY + 64)
    path = folder / "run.toml"
    path.write_text(
        f"""
        recipe = "distill"
        model.path = "{folder}"
        distill = {{ teacher = "{teacher}", temperature = 2.0, cross_entropy_weight = 0.25 }}
        fsdp.param_dtype = "float32"
        data = {{ path = "{DEMO}/chat.jsonl", seq_len = 64 }}
        train = {{ steps = 4, global_batch_size = 4 }}
        optimizer.lr = 1e-2
        lr_schedule.name = "constant"
        checkpoint = {{ every = 2, keep = 9 }}
        wandb.mode = "disabled"
        """
    )
    return path


@pytest.fixture(scope="module")
def run(pool: WorkerPool, toml: Path) -> Run:
    return runner(pool, toml)


@pytest.mark.full
def test_a_run_learns_and_is_resumed_on_another_mesh(run: Run, toml: Path, tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", 2)
    assert f"teacher: {toml.parent / 'teacher'}, " in straight[0]["said"]
    assert straight[-1]["kl"] < straight[0]["kl"]
    for line in straight:
        assert line["loss"] == pytest.approx(0.75 * 4 * line["kl"] + 0.25 * line["cross_entropy"], rel=1e-5)
    checkpoint = tmp_path / "straight" / "checkpoints" / "step-000002"
    names = {key for key in SafeReader(checkpoint).stored_tensors() if key.startswith("model.")}
    assert len(names) == len(dict(load_plain(toml.parent).named_parameters())), "nothing of the teacher is kept"
    for size, mesh in ((1, ()), (4, ("mesh.cp=2", "train.micro_batch_size=2"))):
        resumed = resume(run, checkpoint, tmp_path / f"{size}", size, *mesh)
        for key in ("loss", "grad_norm", "kl", "cross_entropy"):
            assert worst_relative([line[key] for line in resumed], [line[key] for line in straight[2:]]) < 1e-4, key


def test_adapters_learn_from_a_teacher_and_a_mix_tells_each_sources_loss(run: Run, tmp_path: Path) -> None:
    parts = [f"{{path = '{DEMO}/{name}.jsonl', name = '{name}'}}" for name in ("chat", "heldout")]
    mix = ("lora.rank=4", "data.path=none", f"data.sources=[{', '.join(parts)}]", "fsdp.param_dtype=bfloat16")
    for line in run(tmp_path / "run", 2, *mix):
        sums = [
            line[f"loss/{name}"] * line[f"tokens/{name}"] for name in ("chat", "heldout") if f"loss/{name}" in line
        ]
        assert sum(sums) / line["tokens"] == pytest.approx(line["loss"], rel=1e-5)
    assert "lora: new, rank 4" in line["said"]
    assert "parameters in bfloat16" in line["said"]


@pytest.mark.slow
def test_compiled_layers_learn_the_same(run: Run, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", 1, "train.steps=2")
    compiled = run(tmp_path / "compiled", 1, "train.steps=2", "compile.enabled=true")
    assert worst_relative([line["loss"] for line in compiled], [line["loss"] for line in plain]) < 1e-4


@pytest.mark.full
def test_mistakes_are_one_line(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    other = shutil.copytree(toml.parent / "teacher", tmp_path / "other")
    file = json.loads((other / "tokenizer.json").read_text())
    vocabulary = file["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(file))
    fewer = teacher_dir(tmp_path / "fewer", rows=512)
    chat, ids = f"{{path='{DEMO}/chat.jsonl'}}", "{path='ids.jsonl',format='tokens'}"
    too_few = f"its embedding has 512 rows, the model's {DEMO_VOCABULARY}, and the data are ids"
    bare = shutil.copytree(toml.parent / "teacher", tmp_path / "bare")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    windows = tmp_path / "windows"
    config = tiny_model("mistral").config
    config.vocab_size = DEMO_VOCABULARY
    AutoModelForCausalLM.from_config(config).save_pretrained(windows)
    shutil.copytree(DEMO / "tokenizer", windows, dirs_exist_ok=True)
    mistakes = {
        "distill.teacher=none": "distill.teacher: is not given, and there is nothing to learn from; give",
        f"distill.teacher='{tmp_path}/nowhere'": f"distill.teacher: {tmp_path}/nowhere is not a directory; ",
        f"distill.teacher='{DEMO}/chat.jsonl'": "chat.jsonl is a data file; set data.path to it",
        f"distill.teacher='{other}'": "distill.teacher: 2 of ",
        f"distill.teacher='{fewer}'": "its embedding has 512 rows, fewer than its tokenizer has tokens",
        f"distill.teacher='{bare}'": "the directory holds no tokenizer",
        f"distill.teacher='{windows}'": "distill.teacher: its layers' attention windows are",
        "distill.direction=backward": "distill.direction",
        "distill.cross_entropy_weight=1.0": "distill.cross_entropy_weight",
        "distill.temprature=2": "did you mean distill.temperature?",
        f"distill.teacher='{fewer}' data.format=tokens": too_few,
        f"distill.teacher='{fewer}' data.path=none data.sources=[{chat},{ids}]": too_few,
        f"distill.teacher='{fewer}' eval.every=2 eval.sets={{ids={ids}}}": too_few,
    }
    assert_refused(pool, toml, {tuple(overrides.split()): says for overrides, says in mistakes.items()}, tmp_path)
    assert not list(tmp_path.glob("[0-9]*")), "nothing is made of a run that is refused"


def test_its_memory_is_not_planned(toml: Path) -> None:
    _, config = load(str(toml), [])
    check_config(config, world_size=2, local_world_size=2)
    with pytest.raises(UserError, match=r"the memory of distill\.teacher, .*, is not planned"):
        plan_for(config, world_size=2, local_world_size=2)
