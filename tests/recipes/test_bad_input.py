"""A user's mistake is one line on rank 0 and exit code 2 from every rank, whatever the mistake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import agreement
from fsdp2kit.job.run_directory import lock_run_dir
from fsdp2kit.run import load_recipe
from fsdp2kit.run import main as run_main
from tests.recipes.helpers import DEMO, ROOT, attempt, toml_for
from tests.support.models import full
from tests.support.workers import WorkerPool, start_ranks

UNKNOWN_MODEL = f'model={{config={{model_type="lama"}}, weights="random", tokenizer="{DEMO}/tokenizer"}}'
TINY = {"num_hidden_layers": 1, "hidden_size": 40, "intermediate_size": 40, "num_attention_heads": 5}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny whole model directory with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=1024, **TINY, num_key_value_heads=5, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO / "tokenizer").save_pretrained(folder)
    return folder


def refused(pool: WorkerPool, arguments: list[str], folder: Path, *, says: list[str]) -> str:
    """Check the form of a refusal and return its line."""
    results = pool.run(2, attempt, arguments, str(folder))
    assert [code for code, _, _ in results] == [2, 2], results
    lines = [line for _, _, err in results for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, results
    assert lines[0] in results[0][2].splitlines(), "rank 0 speaks"
    assert "Traceback" not in results[0][2] + results[1][2]
    for text in says:
        assert text in lines[0]
    assert lines[0].count(";") >= 1, "where: what; what to do"
    return lines[0]


# One or two of each place that refuses; tests/config has the config's own mistakes.
OVERRIDES = {
    "unknown section": (["trian.steps=1"], ["trian", "did you mean train"]),
    "section of another recipe": (["dpo.beta=1"], ["'dpo'", 'that is of recipe = "dpo"; leave it out']),
    "text for a number": (["train.steps=many"], ["train.steps", "'many'"]),
    "not an override": (["train.steps"], ["section.key=value"]),
    "unknown recipe": (["recipe=sftt"], ["sftt", "sft"]),
    "missing recipe file": (["recipe=my.py"], ["my.py"]),
    "cp does not divide the world": (["mesh.cp=3"], ["mesh.cp", "world size 2"]),
    "batch not divisible": (["train.global_batch_size=3", "train.micro_batch_size=2"], ["use 2 or 4"]),
    "more cp than heads": (["mesh.cp=2", "context_parallel.method=ulysses", "model.config.num_attention_heads=1",
                            "model.config.head_dim=8", "model.config.num_key_value_heads=1", "model.weights=random"],
                           ["attention heads"]),
    "no such model": (["model.path=/nowhere/model"], ["model.path", "/nowhere/model"]),
    "unknown model type": ([UNKNOWN_MODEL], ["lama"]),
    "unknown model config key": (["model.config.num_layers=2"], ["num_layers"]),
    "unknown attention": (["model.attention=flash"], ["model.attention"]),
    "wrong shape": (["model.config.intermediate_size=48"], ["shape", "mlp"]),
    "deeper than its weights": (["model.config.num_hidden_layers=2"], ["model.layers.1."]),
    "no such tokenizer": (["model.tokenizer=/nowhere/tokenizer"], ["/nowhere/tokenizer"]),
    "no such template": (["model.chat_template=/nowhere/x.jinja"], ["/nowhere/x.jinja"]),
    "no such data": (["data.path=/nowhere/x.jsonl"], ["/nowhere/x.jsonl"]),
    "no such weights": (["model.weights=/nowhere/step-000001"], ["/nowhere/step-000001"]),
    "no such checkpoint": (["run.resume=/nowhere/step-000001"], ["/nowhere/step-000001"]),
    "too long a row": (["data.seq_len=16", "data.overlong=error"], ["heldout.jsonl", "16"]),
    "an attention without a backward here": (
        ["model.attention=flex_attention", "mesh.cp=1"], ["model.attention", "no backward on a CPU"]
    ),
    "dropout": (["model.config.attention_dropout=0.1"], ["attention_dropout", "preflight.allow"]),
    "run directory under a file": ([f"run.dir={DEMO}/chat.jsonl/run"], ["run.dir"]),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERRIDES)
def test_a_mistake_in_the_config_is_refused(case: str, pool: WorkerPool, model_dir: Path, tmp_path: Path) -> None:
    overrides, says = OVERRIDES[case]
    refused(pool, [str(toml_for(model_dir, tmp_path)), *overrides], tmp_path, says=says)


def test_without_a_mistake_it_runs(pool: WorkerPool, model_dir: Path, tmp_path: Path) -> None:
    """The control: what the cases above start from is itself accepted."""
    results = pool.run(2, attempt, [str(toml_for(model_dir, tmp_path))], str(tmp_path))
    assert [code for code, _, _ in results] == [0, 0]
    assert (tmp_path / "run/hf/model.safetensors").is_file()


def test_a_missing_toml_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    refused(pool, ["nowhere.toml"], tmp_path, says=["nowhere.toml", "demo_cp2"])


@pytest.mark.parametrize(
    ("text", "says"),
    [("[train\n", "line 1"), ("steps = 1\n", "recipe"), ('recipe = "sft"\n[data]\npath = 3\n', "data.path")],
)
def test_a_broken_toml_is_refused(text: str, says: str, pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    refused(pool, ["x.toml"], tmp_path, says=["x.toml", says])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os\ndef main(config:\n    pass\n", ["mine.py:2", "is not Python"]),
        ("import os\nimport no_such_package.inside\n", ["mine.py:2", "no_such_package", "install no_such_package"]),
        ("from fsdp2kit.errors import NoSuchName\n", ["mine.py:1", "NoSuchName", "mend that line"]),
        ("\nclass Config(TrainingConfg): pass\n", ["mine.py:2", "NameError: name 'TrainingConfg'", "mend that line"]),
        ("import fsdp2kit.gone\n", ["mine.py:1", "fsdp2kit.gone", "mend that line", "fsdp2kit new recipe"]),
        ("raise ValueError('no')\n", ["mine.py:1", "ValueError: no", "mend that line"]),
        ("class Config: pass\n", ["mine.py", "defines no main"]),
    ],
    ids=["syntax", "package", "name", "execution", "moved", "value", "no main"],
)
def test_a_recipe_that_cannot_be_loaded_is_refused(
    text: str, says: list[str], pool: WorkerPool, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "x.toml").write_text('recipe = "mine.py"\n')
    refused(pool, ["x.toml"], tmp_path, says=says)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE: 'x' is not a number of processes; set e.g. WORLD_SIZE=8"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: '' is not a number of processes"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: '0' is not a number of processes"),
        ({"LOCAL_WORLD_SIZE": "-8"}, "LOCAL_WORLD_SIZE: '-8' is not a number of processes"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE: 2 without a MASTER_ADDR"),
        ({"RANK": "one"}, "RANK: 'one' is not one of the 1 ranks"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost"}, "RANK: '2' is not one of the 2 ranks"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK: '-1' is not one of the 1 ranks"),
    ],
    ids=str,
)
def test_a_world_that_cannot_be_is_refused(
    values: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a run, and by a check of it where that reads the number."""
    monkeypatch.chdir(tmp_path)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for option in [[], ["--check"]] if "number of processes" in says else [[]]:
        code, _, err = attempt([str(ROOT / "toml" / "demo_cp2.toml"), *option], str(tmp_path))
        assert code == 2
        assert err.startswith(f"error: environment variable {says}")
        assert err.count("\n") == 1


GPT2 = (
    'model={config={model_type="gpt2", n_layer=1, n_head=2, n_embd=8, n_positions=32, vocab_size=1024, '
    f'resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0}}, weights="random", tokenizer="{DEMO}/tokenizer"}}'
)


def test_rows_beyond_the_models_positions_are_refused_by_run_and_check(
    pool: WorkerPool, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    toml = str(toml_for(model_dir, tmp_path))
    line = refused(pool, [toml, GPT2, "mesh.cp=1"], tmp_path, says=["data.seq_len", "64", "use at most 32"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_main([toml, GPT2, "mesh.cp=1", "--check"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert run_main([toml, GPT2, "mesh.cp=1", "data.seq_len=32", "--check"]) == 0


def truncated(folder: Path, *, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def index_without_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "truncated": (partial(truncated, size=-1000), "model.safetensors"),
    "truncated header": (partial(truncated, size=100), "model.safetensors"),
    "empty weights": (partial(truncated, size=0), "model.safetensors"),
    "index without files": (index_without_files, "model-00001-of-00002.safetensors"),
    "missing tensor": (missing_tensor, "model.norm.weight"),
    "no tokenizer": (without_tokenizer, "tokenizer"),
    "broken template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% for m in messages %}"),
        "template",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_directory_is_refused(name: str, pool: WorkerPool, model_dir: Path, tmp_path: Path) -> None:
    damage, says = DAMAGES[name]
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    damage(model)
    refused(pool, [str(toml_for(model, tmp_path))], tmp_path, says=[says])


GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("", "d.jsonl"),
        (GOOD + '{"messages": [\n' + GOOD, "d.jsonl:2"),
        (GOOD + '{"text": "no messages"}\n', "messages"),
        ('{"messages": [{"role": "user", "content": "nobody answers"}]}\n', "d.jsonl"),
        (GOOD + '{"messages": [{"role": "user"}]}\n', "content"),
        (GOOD + '{"messages": "hello"}\n', "d.jsonl"),
    ],
    ids=["empty", "malformed", "no messages", "nothing supervised", "no content", "messages is text"],
)
def test_bad_data_is_refused(rows: str, says: str, pool: WorkerPool, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(rows)
    arguments = [str(toml_for(model_dir, tmp_path)), f"data.path={tmp_path}/d.jsonl"]
    refused(pool, arguments, tmp_path, says=[says])


def test_a_token_beyond_the_vocabulary_is_refused(pool: WorkerPool, model_dir: Path, tmp_path: Path) -> None:
    small = ["model.config.vocab_size=64", "model.weights=random"]
    refused(pool, [str(toml_for(model_dir, tmp_path)), *small], tmp_path, says=["64"])


def test_wandb_online_without_a_login_is_refused_and_never_asks(
    pool: WorkerPool, model_dir: Path, tmp_path: Path
) -> None:
    arguments = [str(toml_for(model_dir, tmp_path)), "wandb.mode=online"]
    refused(pool, arguments, tmp_path, says=["wandb.mode", "login"])


def test_files_of_the_users_own_in_the_export_directory_are_refused_before_training(
    pool: WorkerPool, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "run" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "hf" / "README.md").write_text("mine")
    refused(pool, [str(toml_for(model_dir, tmp_path))], tmp_path, says=["run/hf", "README.md", "move that away"])
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_run_directory_in_use_is_refused(pool: WorkerPool, model_dir: Path, tmp_path: Path) -> None:
    with lock_run_dir(tmp_path / "run"):
        says = ["run.dir", str(tmp_path / "run"), f"in use by process {os.getpid()}"]
        refused(pool, [str(toml_for(model_dir, tmp_path))], tmp_path, says=says)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"], "nothing of the other's was touched"


@pytest.fixture
def finished(pool: WorkerPool, model_dir: Path, tmp_path: Path) -> Path:
    """The TOML of a run that has come to its end."""
    toml = toml_for(model_dir, tmp_path)
    assert [code for code, _, _ in pool.run(2, attempt, [str(toml)], str(tmp_path))] == [0, 0]
    return toml


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.seed=7", "run.seed"),
        (f"data.path={DEMO}/chat.jsonl", "data"),
        full("data.seq_len=32", "data.seq_len"),
        full("model.config.rms_norm_eps=1e-3", "model"),
        full("train.global_batch_size=4", "train.global_batch_size"),
    ],
)
def test_the_run_directory_of_another_run_is_refused(
    override: str, says: str, pool: WorkerPool, finished: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in (tmp_path / "run/checkpoints").rglob("*") if path.is_file()}
    refused(pool, [str(finished), "train.steps=3", override], tmp_path, says=[says, "run.dir"])
    assert before == {path: path.read_bytes() for path in (tmp_path / "run/checkpoints").rglob("*") if path.is_file()}


def test_a_damaged_checkpoint_is_refused_by_name(pool: WorkerPool, finished: Path, tmp_path: Path) -> None:
    shard = next((tmp_path / "run/checkpoints/step-000002").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-10])
    arguments = [str(finished), "train.steps=3", f"run.resume={shard.parent}"]
    refused(pool, arguments, tmp_path, says=[shard.name])


def test_an_incomplete_checkpoint_is_refused(pool: WorkerPool, finished: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/checkpoints/step-000002"
    (checkpoint / "manifest.json").unlink()
    refused(pool, [str(finished), f"run.resume={checkpoint}"], tmp_path, says=["manifest.json"])


def fail_on_one_rank(failing: int) -> str:
    rank = int(os.environ["RANK"])
    try:
        with agreement():
            if rank == failing:
                raise UserError("a row", "cannot be read on this rank", "mend it")
    except UserError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_leave_together_when_one_fails(failing: int, pool: WorkerPool) -> None:
    assert pool.run(2, fail_on_one_rank, failing) == ["a row: cannot be read on this rank; mend it"] * 2


def test_every_process_ends_with_exit_code_2(model_dir: Path, tmp_path: Path) -> None:
    command = ["fsdp2kit.run", str(toml_for(model_dir, tmp_path)), "data.path=/nowhere/x.jsonl"]
    ranks, logs = start_ranks(2, tmp_path, *command)
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [2, 2]
    said = [log.read_text() for log in logs]
    assert len([line for line in said[0].splitlines() if line.startswith("error: ")]) == 1
    assert "error: " not in said[1]
    assert not any("Traceback" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("override", ["train.stepz=1", "data.path=/nowhere/x.jsonl"])
def test_torchrun_sees_exit_code_2_from_every_rank(override: str, model_dir: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["--log-dir", str(logs), "--redirects", "3", "-m", "fsdp2kit.run"]
    command += [str(toml_for(model_dir, tmp_path)), override]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert result.returncode == 1
    assert result.stderr.count("exitcode  : 2") == 2, result.stderr
    said = {path.parent.name: path.read_text() for path in logs.rglob("stderr.log")}
    assert len([line for line in said["0"].splitlines() if line.startswith("error: ")]) == 1
    assert "error: " not in said["1"]
    assert not any("Traceback" in text for text in said.values())


def test_a_config_with_a_type_that_is_not_defined_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from __future__ import annotations\nfrom fsdp2kit.config.schema import TrainingConfig\n\n\n"
        "class Config(TrainingConfig):\n    distill: DistillConfig\n\n\ndef main(config):\n    pass\n"
    )
    with pytest.raises(UserError, match=rf"{recipe}: Config has a field of the type DistillConfig, which is not def"):
        load_recipe(recipe)
    recipe.write_text(f"{recipe.read_text()}\n\nfrom fsdp2kit.config.schema import RunConfig as DistillConfig\n")
    assert load_recipe(recipe).Config.model_fields["distill"].is_required()
