"""The `fsdp2kit` command, `python -m fsdp2kit.tools.NAME`, and schemas of recipes of one's own."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from fsdp2kit import __main__ as command
from fsdp2kit.checkpoint.conversion import parse_conversion
from fsdp2kit.run import main as run_main
from tests.support.models import full
from tools import schema

ROOT = Path(__file__).resolve().parents[1]
TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The modules that were started, each with its arguments."""
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(sys, "argv", ["fsdp2kit"])
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: calls.append((name, sys.argv[1:])))
    return calls


def listed(text: str) -> dict[str, dict[str, str]]:
    """The commands' lines by task."""
    tasks: dict[str, dict[str, str]] = {}
    for line in text.partition("\n\n")[0].splitlines():
        if line.startswith("  "):
            name, words = line.split(maxsplit=1)
            tasks[[*tasks][-1]][name] = words
        else:
            tasks[line.removesuffix(":")] = {}
    return tasks


def test_it_lists_commands_by_task_and_all_of_them_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for arguments in ([], ["--help"], ["help"], ["-h"]):
        assert command.main(arguments) == 0
        shown.append(capsys.readouterr().out)
    assert len(set(shown)) == 1
    tasks = listed(shown[0])
    assert [*tasks] == ["begin", "train", "look at runs", "use what was trained", "look up"]
    assert {"new", "check", "plan", "preview"} <= tasks["begin"].keys()
    assert {"run", "launch"} == tasks["train"].keys()
    assert not {"bench", "api", "make-demo"} & {name for names in tasks.values() for name in names}
    assert command.main(["--help-all"]) == 0
    every = listed(capsys.readouterr().out)
    assert {"bench", "api", "make-demo"} <= every["maintain fsdp2kit"].keys()
    lines = {name: line for names in every.values() for name, line in names.items()}
    assert sorted(name.replace("-", "_") for name in lines) == sorted([*TOOLS, "run", "check", "convert", "verify"])
    assert all(lines.values())


@pytest.mark.parametrize(
    ("typed", "todo"),
    [
        ("trian", "did you mean run?"),
        ("xyz", "`fsdp2kit --help` lists them"),
        ("chekc", "did you mean check?"),
        ("exprot", "did you mean export?"),
        ("overlap-reprt", "did you mean overlap-report?"),
        ("evla", "did you mean run (with train.steps=0 it only evaluates)?"),
        ("--helb", "`fsdp2kit --help` lists them"),
    ],
)
def test_an_unknown_command_is_one_line(typed: str, todo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([typed]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: fsdp2kit {typed}: no such command; {todo}")
    assert captured.err.count("\n") == 1


def test_help_of_one_command(started: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["help", "hf-to-dcp"]) == 0
    assert started == [("fsdp2kit.tools.hf_to_dcp", ["--help"])]
    for arguments, says in ((["--help"], "usage: fsdp2kit run "), (["--check", "--help"], "usage: fsdp2kit check ")):
        with pytest.raises(SystemExit):
            run_main(arguments)
        assert capsys.readouterr().out.startswith(says)


@pytest.mark.parametrize(
    ("arguments", "module", "passed_on"),
    [
        (["run", "x.toml", "train.steps=1"], "fsdp2kit.run", ["x.toml", "train.steps=1"]),
        (["check", "x.toml"], "fsdp2kit.run", ["x.toml", "--check"]),
        (["verify", "DIR"], "fsdp2kit.checkpoint", ["verify", "DIR"]),
        (["preview", "x.toml"], "fsdp2kit.tools.preview", ["x.toml"]),
        (["hf-to-dcp", "a", "b"], "fsdp2kit.tools.hf_to_dcp", ["a", "b"]),
        (["convert", "model", "out"], "fsdp2kit.tools.hf_to_dcp", ["model", "out"]),
        (["export", "step-000003", "out"], "fsdp2kit.tools.dcp_to_hf", ["step-000003", "out"]),
        (["convert", "step-000003", "out"], "fsdp2kit.tools.dcp_to_hf", ["step-000003", "out"]),
        (
            ["convert", "s3://bucket/step-000003", "out"],
            "fsdp2kit.tools.dcp_to_hf",
            ["s3://bucket/step-000003", "out"],
        ),
    ],
)
def test_each_command_starts_its_module(
    arguments: list[str], module: str, passed_on: list[str], started: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / ".metadata").write_bytes(b"")
    assert command.main(arguments) == 0
    assert started == [(module, passed_on)]


@pytest.mark.parametrize("to_hf", [None, True])
@pytest.mark.parametrize(
    ("arguments", "merge"),
    [
        ("step-000003 out --merge", True),
        ("step-000003 --merge out", True),
        ("--merge step-000003 out", True),
        ("step-000003 out --merge base", "base"),
        ("--merge base step-000003 --dtype bfloat16 out", "base"),
        ("--merge=base step-000003 out", "base"),
        ("step-000003 out", None),
    ],
)
def test_paths_and_flags_come_in_any_order(
    arguments: str, merge: str | bool | None, to_hf: bool | None, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / ".metadata").write_bytes(b"")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    found = parse_conversion(arguments.split(), prog="convert", to_hf=to_hf)
    assert (found.source, found.out, found.merge, found.to_hf) == ("step-000003", "out", merge, True)
    with pytest.raises(SystemExit):  # a model is never what is written
        parse_conversion(["step-000003", "--merge", "base"], prog="convert", to_hf=to_hf)


def test_a_tool_has_the_flags_of_its_direction(capsys: pytest.CaptureFixture[str]) -> None:
    for to_hf in (True, False):
        with pytest.raises(SystemExit):
            parse_conversion(["--help"], prog="convert", to_hf=to_hf)
        assert ("--merge" in capsys.readouterr().out) == to_hf


def test_convert_says_what_it_does_in_both_directions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command.main(["convert", "--help"])
    shown = capsys.readouterr().out
    for word in ("SOURCE OUT", "--merge", "--dtype", "--config", "--verify", "state dict"):
        assert word in shown
    for arguments, complaint in (
        (["only-one"], "give SOURCE and OUT"),
        ([str(tmp_path), "out", "--dtype", "float16"], "--dtype is for checkpoints"),
    ):
        with pytest.raises(SystemExit) as left:
            command.main(["convert", *arguments])
        assert left.value.code == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ([], {}, "on 2 ranks (the fewest ranks that [mesh] allows; --world-size N checks another number), checked in"),
        (["--world-size", "8"], {}, "on 8 ranks, checked in"),
        full(["--world-size", "4"], {"WORLD_SIZE": "2"}, "on 4 ranks, checked in"),
        ([], {"WORLD_SIZE": "4"}, "on 4 ranks (WORLD_SIZE), checked in"),
        full(["mesh.dp_shard=2"], {}, "on 4 ranks (the fewest"),
        (["--world-size", "16"], {}, "on 16 ranks; nodes of 8 ranks (LOCAL_WORLD_SIZE says otherwise), checked in"),
        full(["--world-size", "16"], {"LOCAL_WORLD_SIZE": "4"}, "on 16 ranks, checked in"),
        full(["mesh.cp=1"], {}, "on 1 rank (the fewest"),
    ],
)
def test_a_check_needs_no_ranks(
    arguments: list[str], environment: dict[str, str], said: str, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    for name in ("demo_cp2", "demo_cp2.toml"):  # as it is called elsewhere than in a checkout
        assert run_main([name, "--check", "train.micro_batch_size=1", *arguments]) == 0
        assert said in capsys.readouterr().out


def test_a_check_draws_the_nodes_and_says_what_crosses_them(monkeypatch: Any, capsys: Any) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert run_main(["demo_cp2", "--check", "train.global_batch_size=12", "train.micro_batch_size=1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "  node 1: 3:1/1  4:2/0  5:2/1" in said
    assert "cp crosses nodes in 2 of 6 groups; no smaller mesh.cp stays within a node" in said
    assert "shards cross nodes" in said


def test_a_check_of_a_world_that_does_not_fit_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(["demo_cp2", "--check", "--world-size", "3"]) == 2
    assert "mesh.cp: 2 does not divide the world size 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_main(["demo_cp2", "--world-size", "3"])
    assert "--world-size is for --check" in capsys.readouterr().err


@pytest.mark.full
def test_no_message_names_a_tool_in_another_way() -> None:
    for path in (ROOT / "fsdp2kit").rglob("*.py"):
        if path.name == "errors.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                assert not re.search(r"tools/\w+\.py|python -m fsdp2kit\.tools", node.value), f"{path}:{node.lineno}"


def test_every_tool_is_a_module_of_the_package_in_a_checkout() -> None:
    specs = {name: importlib.util.find_spec(f"fsdp2kit.tools.{name}") for name in TOOLS}
    origins = {name: spec and spec.origin for name, spec in specs.items()}
    assert origins == {name: str(ROOT / "tools" / f"{name}.py") for name in TOOLS}


def test_the_installed_command_is_this_one() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["fsdp2kit"].split(":")
    assert getattr(importlib.import_module(module), function) is command.main


def test_the_extra_for_all_names_every_extra_that_a_run_can_use() -> None:
    extras = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"[\w-]+", re.findall(r"fsdp2kit\[(.*?)\]", extras["all"][0])[0]))
    assert named | {"liger"} == extras.keys() - {"all", "dev", "peers"}
    # Spelt out: of "fsdp2kit[liger]; sys_platform == 'linux'", hatchling leaves the marker out of the wheel.
    assert extras["all"][1] == f"{extras['liger'][0]}; sys_platform == 'linux'"


RECIPE = '''
from fsdp2kit.config.schema import PositiveInt, Section, TrainingConfig


class DistillConfig(Section):
    """Distillation."""

    temperature: PositiveInt = 2
    """Softens both distributions."""


class Config(TrainingConfig):
    distill: DistillConfig = DistillConfig()


def main(config): ...
'''


def test_a_recipe_of_ones_own_gets_its_schema_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import jsonschema

    recipe = tmp_path / "mine.py"
    recipe.write_text(RECIPE)
    assert schema.main([str(recipe), "--check"]) == 1
    assert not (tmp_path / "mine.schema.json").exists()
    assert schema.main([str(recipe)]) == 0
    assert "#:schema ./mine.schema.json" in capsys.readouterr().out
    found = json.loads((tmp_path / "mine.schema.json").read_text())
    jsonschema.validate({"recipe": "mine.py", "distill": {"temperature": 3}}, found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"recipe": "mine.py", "distill": {"temprature": 3}}, found)
    assert "Softens both" in json.dumps(found)
    assert schema.main([str(recipe), "--check"]) == 0


def test_a_recipe_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema.main(["nowhere.py"]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere.py: no such file; ")
