"""The `fsdp2kit` command, `python -m fsdp2kit.tools.NAME`, and schemas of recipes of one's own."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from fsdp2kit import __main__ as command
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


def test_alone_it_lists_every_command_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines)[:4] == ["run", "check", "convert", "verify"]
    assert sorted(list(lines)[4:]) == TOOLS
    assert all(lines.values())


def test_an_unknown_command_is_one_line_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: fsdp2kit trian: no such command")
    assert "run " in captured.out


@pytest.mark.parametrize(
    ("arguments", "module", "passed_on"),
    [
        (["run", "x.toml", "train.steps=1"], "fsdp2kit.run", ["x.toml", "train.steps=1"]),
        (["check", "x.toml"], "fsdp2kit.run", ["x.toml", "--check"]),
        (["verify", "DIR"], "fsdp2kit.checkpoint", ["verify", "DIR"]),
        (["preview", "x.toml"], "fsdp2kit.tools.preview", ["x.toml"]),
        (["hf-to-dcp", "a", "b"], "fsdp2kit.tools.hf_to_dcp", ["a", "b"]),
        (["convert", "model", "out"], "fsdp2kit.tools.hf_to_dcp", ["model", "out"]),
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


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_is_a_module_of_the_package_in_a_checkout(name: str) -> None:
    spec = importlib.util.find_spec(f"fsdp2kit.tools.{name}")
    assert spec is not None
    assert spec.origin == str(ROOT / "tools" / f"{name}.py")


def test_the_installed_command_is_this_one() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["fsdp2kit"].split(":")
    assert getattr(importlib.import_module(module), function) is command.main


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
