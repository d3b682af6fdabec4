"""What the package imports is declared in pyproject.toml, and messages name packages and pages that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

from fsdp2kit.errors import REQUIREMENTS, pip_install
from fsdp2kit.rl import common_rewards
from tests.imports import imports_of, tree_of
from tools import docs

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FILES = [path for folder in ("fsdp2kit", "recipes", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
OUR_OWN = {"fsdp2kit", "recipes", "tools"}
DISTRIBUTIONS = {"yaml": "pyyaml", "upath": "universal-pathlib", "mlflow": "mlflow-skinny"}
"""Distributions that are not called as their modules."""


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=; ]", one)[0].lower() for one in requirements}


def packages_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Other distributions that a file imports, and whether it does so within a function, when they are used."""
    for one in imports_of(path):
        module = one.module.partition(".")[0]
        if module not in sys.stdlib_module_names | OUR_OWN:
            yield DISTRIBUTIONS.get(module, module.replace("_", "-")), one.is_late


def test_what_is_imported_is_declared() -> None:
    needed = names_of(PROJECT["dependencies"])
    optional = names_of([one for name, extra in EXTRAS.items() if name != "all" for one in extra])
    found = {(path.relative_to(ROOT).as_posix(), *one) for path in FILES for one in packages_of(path)}
    found.discard(("fsdp2kit/rl/vllm_plugin.py", "vllm", False))  # which vLLM imports, in its environment
    assert ("fsdp2kit/rl/engines/server.py", "httpx", False) in found
    undeclared = {one for one in found if one[1] not in (needed | optional if one[2] else needed)}
    assert not undeclared


def test_messages_name_packages_as_the_extras_do() -> None:
    extras = [requirement for name, extra in EXTRAS.items() if name != "all" for requirement in extra]
    for requirements in (*REQUIREMENTS.values(), common_rewards.REQUIREMENTS.values()):
        assert set(requirements) <= {*extras}
    assert pip_install("mlflow") == "pip install 'mlflow-skinny>=3.17' 'sqlalchemy>=2' alembic"
    assert {*REQUIREMENTS["mlflow"]} == {*EXTRAS["mlflow"]}
    checked = re.compile(r"(?:check_installed|importing|pip_install)\(\"(\w+)\"")
    asked = {name for path in FILES for name in checked.findall(path.read_text(encoding="utf-8"))}
    assert {"peft", "torchao", "liger_kernel", "matplotlib"} <= asked <= {*REQUIREMENTS}


def texts() -> Iterator[tuple[str, str]]:
    """The texts in the code that are no documentation, each with its place."""
    for path in FILES:
        tree = tree_of(path)
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                yield f"{path}:{node.lineno}", node.value


def test_messages_name_no_extra_and_no_file_that_a_wheel_lacks() -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    named: set[str] = set()
    for where, text in texts():
        assert "fsdp2kit[" not in text, where
        if not where.startswith((str(ROOT / "tools" / "docs.py"), str(ROOT / "tools" / "models.py"))):
            assert not re.search(r"docs/\w+\.md", text), where
        named |= {*re.findall(r"fsdp2kit docs (\w+)", text)}
    named |= {*re.findall(r"fsdp2kit docs (\w+)", (ROOT / "fsdp2kit/migrate/fields.toml").read_text(encoding="utf-8"))}
    assert {"grpo", "data", "optimizers"} <= named - {"NAME"} <= pages | {"lists"}


def test_documentation_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main([]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(shown) == {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert shown["memory"] == "Memory and time, before the run"
    for name in ("grpo", "docs/grpo.md"):
        assert docs.main([name]) == 0
        assert capsys.readouterr().out == (ROOT / "docs" / "grpo.md").read_text(encoding="utf-8")
    assert docs.main(["grp"]) == 2
    assert capsys.readouterr().err == "error: docs grp: there is no such page; did you mean grpo?\n"


def test_a_servers_environment_needs_no_dependency_of_ours() -> None:
    """vLLM's environment has the package without its dependencies, for the plugin (docs/grpo.md)."""
    done = subprocess.run([sys.executable, "-S", "-c", "import fsdp2kit"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
