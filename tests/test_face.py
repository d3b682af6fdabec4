"""`import fsdp2kit as fk`: names, their table, runs from Python, and the example that ``help(fsdp2kit)`` shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fsdp2kit as fk
from fsdp2kit.errors import UserError
from tests.docs.helpers import DOCSTRING, EXAMPLES, lines_of
from tests.support.models import demo_model_dir
from tests.support.workers import WorkerPool, run_command
from tools.api import PAGE, page

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "toml" / "demo"
# What does not depend on how long things take.
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_total", "eval_loss")
SETTINGS: dict[str, Any] = {
    "recipe": "sft",
    "model": {
        "weights": "random",
        "tokenizer": str(DEMO / "tokenizer"),
        "config": {
            "model_type": "llama",
            "vocab_size": 1024,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    },
    "fsdp": {"param_dtype": "float32"},
    "data": {"path": str(DEMO / "chat.jsonl"), "seq_len": 64},
    "train": {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2},
    "optimizer": {"lr": 1e-3},
    "eval": {"every": 2, "path": str(DEMO / "heldout.jsonl"), "steps": 1},
    "checkpoint": {"export_hf": "never"},
    "wandb": {"mode": "disabled"},
}


def numbers(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(record.get(key) for key in NUMBERS) for record in records]


def test_importing_it_imports_nothing_heavy() -> None:
    program = """
import sys, time
start = time.process_time()
import fsdp2kit
seconds = time.process_time() - start
print(seconds, *(name for name in ("torch", "transformers", "pydantic", "numpy") if name in sys.modules))
assert "build_model" in dir(fsdp2kit) and "torch" not in sys.modules
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    seconds, *imported = said.split()
    assert not imported
    assert float(seconds) < 0.3


def test_every_name_is_there_documented_and_in_the_table() -> None:
    table = DOCSTRING.partition("``help(")[0]
    assert set(re.findall(r"\b\w+\b", table)) >= set(fk.__all__)
    stub = re.findall(r"import (\w+) as", (ROOT / "fsdp2kit" / "__init__.pyi").read_text(encoding="utf-8"))
    assert stub == re.findall(rf"\b(?:{'|'.join(fk.__all__)})\b", in_first_columns(table))
    for name in fk.__all__:
        assert name in dir(fk)
        assert (getattr(fk, name).__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="No fsdp2kit attribute trian"):
        fk.trian  # noqa: B018 (it raises)


def in_first_columns(table: str) -> str:
    """The names of a table whose second column describes them."""
    return "\n".join(line.strip().partition("  ")[0] for line in table.splitlines() if line.startswith("    "))


@pytest.mark.full
def test_runs_twice_in_one_process_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And computes what the command line does, to the last digit."""
    first = fk.run(fk.load_config(SETTINGS, f"run.dir='{tmp_path / 'first'}'", "train.steps=2"))
    assert first.directory == tmp_path / "first"
    assert first.records == lines_of(first.directory)
    assert not torch.distributed.is_initialized()
    second = fk.run(fk.load_config(SETTINGS, f"run.dir='{tmp_path / 'second'}'"))
    resumed = fk.run(fk.load_config(SETTINGS, f"run.dir='{tmp_path / 'first'}'", "lr_schedule.name=constant"))
    assert [record["step"] for record in resumed.records] == [1, 2, 3, 4]
    assert resumed.records[:2] == first.records
    assert "resumed from step 2" in capsys.readouterr().out

    # The resolved config is a TOML that both take.
    toml = tmp_path / "second" / "config.toml"
    done = run_command("fsdp2kit.run", str(toml), f"run.dir='{tmp_path / 'third'}'", WORLD_SIZE="1")
    assert done.returncode == 0, done.stderr
    assert numbers(lines_of(tmp_path / "third")) == numbers(second.records)
    again = fk.load_config(toml, "train.steps=9")
    assert (again.train.steps, again.model.config) == (9, SETTINGS["model"]["config"])


def test_a_mistake_is_an_exception(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config: train\.stepz: .*train\.steps"):
        fk.load_config({**SETTINGS, "train": {"stepz": 4}})
    for wrong, says in (("data.seq_len=8", "seq_len"), ("mesh.cp=2", "mesh")):
        with pytest.raises(UserError, match=says):
            fk.run(fk.load_config(SETTINGS, wrong, f"run.dir='{tmp_path}'"))
        assert not torch.distributed.is_initialized()


def test_a_recipe_defined_where_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a notebook: the module of the config's class has its ``main``."""
    seen: list[Any] = []
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "Config", type("Config", (fk.TrainingConfig,), {"__module__": __name__}), raising=False)
    monkeypatch.setattr(here, "main", seen.append, raising=False)
    config = here.Config(recipe="mine", run=fk.RunConfig(dir=str(tmp_path)))
    assert fk.run(config) == fk.Finished(tmp_path, [])
    assert seen == [config]


def test_a_recipe_with_another_ones_config(tmp_path: Path) -> None:
    """A copy of a recipe may take its ``Config`` as it is; two files may have one name."""
    configs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        lines = ["from pathlib import Path", "from recipes.sft import Config", "def main(config):"]
        lines.append(f"    Path({str(tmp_path / 'ran')!r}).write_text({name!r})")
        (tmp_path / name / "own.py").write_text("\n".join(lines), encoding="utf-8")
        configs.append(fk.load_config({**SETTINGS, "recipe": str(tmp_path / name / "own.py")}))
    for name, config in zip(("other", "one"), reversed(configs), strict=True):
        fk.run(config)
        assert (tmp_path / "ran").read_text() == name


def test_a_config_of_the_base_class_is_made_the_recipes(tmp_path: Path) -> None:
    """It is checked as the recipe checks it: prompts are wanted."""
    config = fk.TrainingConfig(recipe="grpo", run=fk.RunConfig(dir=str(tmp_path)))
    with pytest.raises(UserError, match="prompts"):
        fk.run(config)


def test_what_is_no_config_is_refused() -> None:
    for call in (lambda: fk.run({"recipe": "sft"}), lambda: fk.run("x.toml"), lambda: fk.load_config(SETTINGS, {})):
        with pytest.raises(UserError, match="load_config"):
            call()


def run_here(directory: str) -> Any:
    return fk.run(fk.load_config(SETTINGS, f"run.dir='{directory}'", "train.micro_batch_size=1"))


def refuse_here(directory: str) -> str:
    missing = ("data.path=not-there.jsonl",) if os.environ["RANK"] == "1" else ()
    try:
        fk.run(fk.load_config(SETTINGS, f"run.dir='{directory}'", *missing))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_every_rank_gets_the_same(pool: WorkerPool, tmp_path: Path) -> None:
    one, other = pool.run(2, run_here, str(tmp_path / "run"))
    assert one == other
    assert [record["step"] for record in one.records] == [1, 2, 3, 4]
    said = pool.run(2, refuse_here, str(tmp_path / "refused"))
    assert said[0] == said[1] != ""


def notebook_cells() -> tuple[Any, list[Any]]:
    """The notebook, which is kept without outputs, and its cells of code."""
    import nbformat

    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    return notebook, cells


# How many steps the notebook's runs take, and fewer.
STEPS = {
    '"train.steps=40"': '"train.steps=4"',
    '"train.steps=100"': '"train.steps=6"',
    '"eval.every=20"': '"eval.every=2"',
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
def test_the_notebooks_cells_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer steps, and without Jupyter."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    said, names = [], {}
    sources = [cell.source for cell in notebook_cells()[1]]
    for steps, fewer in STEPS.items():
        assert any(steps in source for source in sources)
        sources = [source.replace(steps, fewer) for source in sources]
    for source in sources:
        exec(compile(source, "cell", "exec", dont_inherit=True), names)
        said.append(capsys.readouterr().out)
    assert "resumed from step 4" in said[2]
    assert "did you mean train.steps?" in said[3]
    assert len(plt.get_fignums()) == 2
    plt.close("all")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the model answers in the last cell was in the data."""
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook, cells = notebook_cells()
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    assert "resumed from step 40" in said[2]
    assert "did you mean train.steps?" in said[3]
    assert "July" in said[4]
    for cell in cells[1:3]:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs)


def test_the_reference_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make schema`"


def test_the_example_trains_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both scripts of the docstring, one after the other, with a tiny model in place of the one that they name."""
    assert len(EXAMPLES) == 2
    script = "\n".join(EXAMPLES)
    assert len([line for line in script.splitlines() if line.strip()]) < 40
    model = demo_model_dir(tmp_path / "tiny", dtype=torch.float32)
    shutil.copy(DEMO / "heldout.jsonl", tmp_path / "chats.jsonl")
    for there, here in (("HuggingFaceTB/SmolLM2-135M-Instruct", str(model)), ('"seq_len": 1024', '"seq_len": 64')):
        assert there in script
        script = script.replace(there, here)
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "example", "exec"), {})
    runs = [lines_of(tmp_path / "runs" / name) for name in ("first", "parts")]
    assert numbers(runs[0]) == numbers(runs[1])
    assert len(runs[0]) > 1
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("runs/first/hf", "my_model"))
    for (name, value), same in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, same), name
