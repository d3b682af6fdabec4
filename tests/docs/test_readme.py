"""README and docs are true: snippets run, TOMLs load, links, anchors and paths lead somewhere.

In the README, docs/start.md and docs/runs.md `python` and `bash` fences run, in order, in one folder; `sh` ones
install things or need a GPU. A tiny model and the demo's conversations stand in for the README's model and data.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from torch.testing import assert_close

from fsdp2kit.config.checks import check_config
from fsdp2kit.run import load
from tests.model.helpers import UNUSUAL
from tests.parallel.test_sinks_and_chunks import KINDS
from tests.support.models import EVEN, MIXTURES, RECURRENT, TINY, demo_model_dir, tiny_model
from tests.support.workers import FORKS, ending, run_command, start_ranks

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
START, RUNS, MODELS, ARCHITECTURE = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("start.md", "runs.md", "models.md", "dev/architecture.md")
)
[README_TOML] = [code for language, code in FENCE.findall(README) if language == "toml"]
SNIPPETS = [
    (language, code) for language, code in FENCE.findall(README + START + RUNS) if language in ("python", "bash")
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What is beside the README, and what its TOML names."""
    for name in ("toml", "tools", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "first.toml").write_text(README_TOML, encoding="utf-8")
    shutil.copy(ROOT / "toml" / "demo" / "heldout.jsonl", tmp_path / "chats.jsonl")
    demo_model_dir(tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct", dtype=torch.float32)
    return tmp_path


def _be_snippet(code: str, folder: Path, log: Path) -> None:
    os.chdir(folder)
    sys.argv = ["loop.py"]
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    exec(compile(code, "README", "exec", dont_inherit=True), {"__name__": "__main__"})


def _run_line(line: str, folder: Path) -> None:
    """A command of the README: its module in forks of a process that has imported everything."""
    words = shlex.split(line, comments=True)
    if words[0] == "fsdp2kit":  # as the command starts its ranks
        size = int(words[words.index("--nproc") + 1]) if "--nproc" in words else 1
        words = [word for at, word in enumerate(words) if "--nproc" not in words[max(at - 1, 0) : at + 1]]
        start = ["torchrun", "--nproc-per-node", str(size)] if size > 1 else ["python"]
        words = [*start, "-m", "fsdp2kit.__main__", *words[1:]]
    assert words[0] in ("python", "torchrun"), line
    size = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
    rest = words[words.index("-m") + 1 :] if "-m" in words[:5] else [words[1].replace("/", "."), *words[2:]]
    rest[0] = rest[0].removesuffix(".py")
    if size == 1:
        done = run_command(*rest, cwd=folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return
    ranks, logs = start_ranks(size, folder, *rest, cwd=folder)
    with ending(ranks):
        for rank in ranks:
            rank.join(240)
        assert [rank.exitcode for rank in ranks] == [0] * size, f"{line}\n{logs[0].read_text()}"


@pytest.mark.full
def test_the_readmes_lines_run(folder: Path) -> None:
    assert len(SNIPPETS) >= 4
    for language, code in SNIPPETS:
        if language == "bash":
            for line in code.splitlines():
                _run_line(line, folder)
            continue
        process = FORKS.Process(target=_be_snippet, args=(code, folder, folder / "log"))
        process.start()
        process.join(240)
        assert process.exitcode == 0, f"{code}\n{(folder / 'log').read_text()}"


@pytest.mark.slow
def test_the_readme_runs(folder: Path) -> None:
    """As a reader runs it: every command in a shell, with an interpreter of its own."""
    # Commands find the interpreter that runs the tests; the source tree is importable, installed or not.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for language, code in SNIPPETS:
        # Plain torch says so each time it reads a checkpoint in one process.
        strict = ["-W", "error", "-W", "ignore:torch.distributed is disabled"]
        command = [sys.executable, *strict, "-c", code] if language == "python" else ["bash", "-euc", code]
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{code}\n{result.stdout}\n{result.stderr}"


def test_the_readmes_toml_loads(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(README_TOML, encoding="utf-8")
    _, config = load(str(tmp_path / "x.toml"), ["mesh.cp=2"])
    check_config(config, world_size=8, local_world_size=8)


def test_the_start_page_lists_the_tomls() -> None:
    listed = re.findall(r"^\| `.*?(?= \| )", START.split("| TOML |")[1], re.MULTILINE)
    tomls = {name for cell in listed for name in re.findall(r"`(\w+)`", cell)}
    assert tomls == {path.stem for path in (ROOT / "toml").glob("*.toml")}


def test_architecture_names_what_is_there() -> None:
    named = re.findall(r"\b(\w+(?:/\w+)+\.(?:py|toml))\b", ARCHITECTURE)
    assert len(named) > 100
    files = {name: folder / name for name in named for folder in (ROOT, ROOT / "fsdp2kit") if (folder / name).exists()}
    assert sorted(set(named) - files.keys()) == []
    # "`Checkpoints.save` in `checkpoint/checkpoints.py`": a function, a class, a method or a constant.
    placed = re.findall(r"`([\w.]+)`(?: and `([\w.]+)`)? in `([\w/]+\.py)`", ARCHITECTURE)
    assert len(placed) > 40
    for *names, file in placed:
        for name in filter(None, names):
            defined = re.compile(rf"^\s*(?:(?:def|class) )?{name.rpartition('.')[2]}\b(?:[(:]| =|\[)", re.MULTILINE)
            assert defined.search(files[file].read_text(encoding="utf-8")), f"{name} in {file}"


def test_the_models_page_lists_the_architectures_of_the_tests() -> None:
    text = MODELS.split("## Compared with plain transformers")[1].split("\n## ")[0]
    held = text.split("Heads and random")[0]
    kinds = {**TINY, **RECURRENT, **{kind: {**EVEN, **MIXTURES}[kind] for kind in KINDS}}
    assert set(re.findall(r"`([\w-]+)`", held)) == {model_type for model_type, _ in kinds.values()}
    assert set(UNUSUAL) <= {*re.findall(r"`([\w-]+)`", text), "diffllama", "minimax", "olmo_hybrid"}


def test_the_objectives_of_the_recipes_page_compute_what_it_says() -> None:
    names: dict[str, Any] = {}
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    code = "\n".join(code for language, code in FENCE.findall(text) if language == "python")
    exec(compile(code, "recipes.md", "exec", dont_inherit=True), names)

    model, ids = tiny_model("qwen3"), torch.arange(12).reshape(1, 12) % 5
    labels = torch.where(torch.arange(12) % 3 == 0, -100, ids.roll(-1))
    inputs = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(12)[None]}
    log_probs = model(input_ids=ids).logits[0].float().log_softmax(-1)
    supervised = (labels[0] >= 0).nonzero()[:, 0]
    of_targets = log_probs[supervised, labels[0, supervised]]
    smoothed, _ = names["smoothed_cross_entropy"](model, {**inputs, "index": supervised})
    assert_close(smoothed, -(0.9 * of_targets + 0.1 * log_probs[supervised].mean(-1)).sum())
    loss, _, metrics = names["with_accuracy"](model, {**inputs, "index": supervised})
    assert_close(loss, -of_targets.sum())
    assert metrics["accuracy"] == (log_probs[supervised].argmax(-1) == labels[0, supervised]).sum()

    class Model:
        def token_log_probs(self) -> tuple[torch.Tensor, None]:
            return torch.tensor([-1.0, -2.0, -4.0, -0.5]), None

    # Two pairs: log p is −3 against −4, then 0 (no targets) against −0.5.
    loss, _ = names["prefer"](Model(), {"documents": torch.tensor([0, 0, 1, 3]), "num_documents": 4})
    assert_close(loss, -logsigmoid(torch.tensor([1.0, 0.5])).sum())


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for name, test in re.findall(r"`((?:tests|tools|toml|fsdp2kit)/[\w/]+\.(?:py|toml))(?:::(\w+))?`", text):
        assert (ROOT / name).is_file(), name
        assert not test or f"def {test}(" in (ROOT / name).read_text(encoding="utf-8"), f"{name}::{test}"
