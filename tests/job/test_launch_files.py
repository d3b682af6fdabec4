"""`fsdp2kit launch`: the files it fills in, what it says of the run, and what it refuses."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import launch

KINDS = {"slurm": "bash", "trainjob": "yaml", "pytorchjob": "yaml", "skypilot": "yaml", "ssh": "bash"}
TOML = """
recipe = "pretrain"
[model]
weights = "random"
config = { model_type = "llama", vocab_size = 64, hidden_size = 32, intermediate_size = 32, num_hidden_layers = 1,
           num_attention_heads = 2, num_key_value_heads = 2 }
[data]
format = "synthetic"
seq_len = 64
[train]
steps = 1
global_batch_size = 24
"""
RUN = ["x.toml", "run.dir=runs/a b", 'train.on_nonfinite="skip"']


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(TOML)


def filled(kind: str, *options: str) -> str:
    return launch.fill(launch._parse([kind, *RUN, *options]))


@pytest.mark.parametrize("options", [("--gpus-per-node", "4"), ("--ranks-per-node", "4")], ids=["gpus", "cpus"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_filled_in(kind: str, options: tuple[str, str]) -> None:
    text = filled(kind, "--nodes", "3", *options)
    assert [text.count(f"edit {number} of 2") for number in (1, 2)] == [1, 1]
    on_gpus = options[0] == "--gpus-per-node"
    bash = text
    if KINDS[kind] == "yaml":
        found = yaml.safe_load(text)
        bash = found.get("run", "")
        if kind == "skypilot":
            assert (found["num_nodes"], found["resources"].get("accelerators")) == (3, "H100:4" if on_gpus else None)
        else:
            spec = found["spec"]
            if kind == "trainjob":
                container = spec["trainer"]
                assert (container["numNodes"], container["numProcPerNode"]) == (3, 4)
                limits = container.get("resourcesPerNode")
            else:
                elastic, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
                assert (elastic["minReplicas"], elastic["maxReplicas"], worker["replicas"]) == (3, 3, 3)
                assert spec["nprocPerNode"] == "4"
                container = worker["template"]["spec"]["containers"][0]
                limits = container.get("resources")
            assert container["args"] == RUN
            assert limits == ({"limits": {"nvidia.com/gpu": 4}} if on_gpus else None)
            # bash -c SCRIPT _ ARGUMENTS, as a pod starts it
            script = container["command"][2].replace("cd /shared && exec torchrun", "printf '%s\\n'")
            said = subprocess.run([*container["command"][:2], script, "_", *RUN], capture_output=True, text=True)
            assert said.stdout.splitlines()[-len(RUN) :] == RUN
    elif kind == "slurm":
        assert re.findall(r"^#SBATCH --nodes=(.*)$", text, re.MULTILINE) == ["3"]
        assert re.findall(r"^#SBATCH --gpus-per-node=(.*)$", text, re.MULTILINE) == (["4"] if on_gpus else [])
        before_commands = text.partition("\nset -u")[0]
        assert text.count("\n#SBATCH") == before_commands.count("\n#SBATCH"), "Slurm reads none after a command"
    if bash:
        [words] = re.findall(r"^run=\((.*)\)$", bash, re.MULTILINE)
        assert shlex.split(words) == RUN
        assert "ranks_per_node=4\n" in bash
        subprocess.run(["bash", "-n"], input=bash, text=True, check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("kind", ["slurm", "ssh", "skypilot"])
def test_shellcheck_finds_nothing(kind: str) -> None:
    text = filled(kind, "--nodes", "3", "--gpus-per-node", "4")
    text = "#!/bin/bash\n" + yaml.safe_load(text)["run"] if kind == "skypilot" else text
    found = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def is_kept(given: Any, read: Any) -> bool:
    """Whether a schema's model kept every field of ``given``; unknown ones are dropped."""
    if isinstance(given, dict):
        return all(key in read and is_kept(value, read[key]) for key, value in given.items())
    if isinstance(given, list):
        return len(given) == len(read) and all(map(is_kept, given, read))
    return given == read


@pytest.mark.full
def test_kubeflow_knows_every_field_of_a_train_job() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    given = yaml.safe_load(filled("trainjob", "--nodes", "3", "--gpus-per-node", "4"))
    assert is_kept(given, models.TrainerV1alpha1TrainJob.from_dict(given).to_dict())


@pytest.mark.full
def test_skypilot_reads_its_task() -> None:
    sky = pytest.importorskip("sky", reason="needs skypilot")
    Path("x.yaml").write_text(filled("skypilot", "--nodes", "3", "--gpus-per-node", "4"))
    assert sky.Task.from_yaml("x.yaml").num_nodes == 3


def test_the_file_goes_to_stdout_and_the_plan_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["slurm", *RUN, "--nodes", "3", "--gpus-per-node", "4", "--time", "2-00:00:00", "--device", "h100"]
    assert launch.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == launch.fill(launch._parse(arguments))
    assert "#SBATCH --time=2-00:00:00\n" in captured.out
    assert "ok: x.toml on 12 ranks" in captured.err
    lines = captured.err.splitlines()
    assert len(lines) == len(set(lines)), "nothing is said twice"
    assert "dp_shard 12" in captured.err
    assert "memory: " in captured.err


def test_a_file_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ssh", "x.toml", "--nodes", "2", "--ranks-per-node", "1", "--out", "x.sh"]
    assert launch.main(arguments) == 0
    assert "then: bash x.sh" in capsys.readouterr().err
    assert launch.main([*arguments[:-1], "of mine.sh"]) == 0
    assert "then: bash 'of mine.sh'" in capsys.readouterr().err
    Path("x.sh").write_text("mine")
    assert launch.main(arguments) == 2
    assert capsys.readouterr().err == "error: --out: x.sh exists; name another file, or add --overwrite\n"
    assert Path("x.sh").read_text() == "mine"
    assert launch.main([*arguments, "--overwrite"]) == 0
    assert "hosts=(host1 host2)" in Path("x.sh").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["slrum", "x.toml"], "error: launch: 'slrum' is no kind of launch file; did you mean slurm?"),
        (["slurm", "x.toml", "mesh.cp=5"], "error: mesh.cp: 5 does not divide the world size 12"),
        (["slurm", "x.toml", "train.global_batch_size=8"], "error: train.global_batch_size: 8 is not a multiple of"),
        (["ssh", "x.toml", "--time", "1:00:00"], "error: --time: '1:00:00' is no time limit of a ssh file"),
        (["slurm", "x.toml", "--time", "1h; rm x"], "error: --time: '1h; rm x' is no time limit of a slurm file"),
        (["slurm", "x.toml", "--device", "h10000"], "error: --device"),
        (["slurm", "x.toml", "--out", "none/x.sh"], "error: --out: none/x.sh cannot be written"),
        (["slurm", "x.toml", "run.dir=a\nb"], "error: run.dir: has a line break"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main([*options, "--nodes", "3", "--gpus-per-node", "4"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(said)
    assert captured.err.count("\n") == 1
