"""The house is kept: imports run one way, private names live in one file, every TOML checks, schemas are current."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from fsdp2kit import run
from fsdp2kit.config.checks import check_config
from tests.conftest import LONGEST, TESTS
from tools.schema import is_current, schema_files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fsdp2kit"
FACE = PACKAGE / "__init__.py"  # names everything, and imports it when it is used: tests/test_face.py

# Lower ranks are imported by higher ones; folders of one rank do not import each other.
RANKS = {
    "errors": 0,
    "files": 0,
    "console": 0,
    "torch_compat": 0,
    "config": 1,
    "job": 2,
    "model": 3,
    "parallel": 4,
    "data": 4,
    "optim": 4,
    "checkpoint": 5,
    "planner": 6,
    "train": 7,
    "objectives": 7,
    "rl": 8,
    "parity": 8,
    "overlap": 8,
    "report": 8,
    "migrate": 8,
    "bench": 9,
    "starter": 9,
    "recipes": 10,
    "tools": 10,
    "__main__": 11,
}
LOWEST = {"errors", "files", "console", "torch_compat"}
MODULES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "recipes").glob("*.py"), *(ROOT / "tools").glob("*.py")])


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str | None:
    """The folder or top file a module belongs to; None for the runner."""
    relative = path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT)
    name = relative.parts[0].removesuffix(".py")
    return None if name == "run" else name


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a module imports from, wherever in the file."""
    rooms = set()
    for node in ast.walk(tree_of(path)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "fsdp2kit" and len(parts) > 1 and parts[1] in RANKS:
                rooms.add(parts[1])
            elif parts[0] in ("recipes", "tools"):
                rooms.add(parts[0])
    return rooms


def test_imports_run_one_way() -> None:
    wrong = []
    for path in MODULES:
        if path == FACE:
            continue
        room = room_of(path)
        for other in imported_rooms(path):
            if room is None:  # of what runs a recipe, `planner.check` is imported only when it is asked for
                is_right = path.name == "run.py" and (RANKS[other] <= RANKS["job"] or other == "planner")
            elif room in LOWEST:
                is_right = other in LOWEST
            else:
                is_right = other == room or RANKS[other] < RANKS[room]
            if not is_right:
                wrong.append(f"{name_of(path)} imports {other}, which does not stand below it")
    assert not wrong, "\n".join(wrong)


def test_private_torch_modules_are_named_in_one_file() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)) if path.name != "torch_compat.py" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
                if any(name.startswith("_") for name in names):
                    wrong.append(f"{name_of(path)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_config_does_not_import_torch() -> None:
    for path in (PACKAGE / "config").glob("*.py"):
        assert not re.search(r"^\s*(import|from) (torch|transformers)", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_longest_test_files_exist() -> None:
    """pytest starts with them; a name that is wrong would be passed over."""
    assert not [name for name in LONGEST if not (TESTS / name).is_file()]


def test_no_file_imports_itself_through_others() -> None:
    """Files, not rooms: what a module imports at its top, followed until nothing new comes."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        tree = tree_of(path)
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        froms = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        found[name] = {node.module or "" for node in froms} | {
            f"{node.module}.{alias.name}" for node in froms for alias in node.names
        }
    found = {name: others & found.keys() for name, others in found.items()}
    for name, others in found.items():
        seen: set[str] = set()
        while others:
            seen |= others
            others = set().union(*(found[other] for other in others)) - seen
        assert name not in seen, f"{name} imports itself"


TOMLS = sorted((ROOT / "toml").glob("*.toml"))


def test_every_toml_passes_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refused = []
    for path in TOMLS:
        launch = path.read_text(encoding="utf-8").splitlines()[0]
        nodes = re.search(r"--nnodes (\d+)", launch)
        processes = re.search(r"--nproc(?:-per-node)? (\d+)", launch)
        local = int(processes.group(1)) if processes else 1
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        monkeypatch.setenv("WORLD_SIZE", str(local * (int(nodes.group(1)) if nodes else 1)))
        code, said = run.main([str(path), "--check"]), capsys.readouterr()
        if code or not said.out.startswith("ok: "):
            refused.append(f"{path.name}: {said.err}")
    assert not refused, "\n".join(refused)


def test_every_toml_can_be_tried_for_a_few_steps() -> None:
    small = ("demo_cp2", "demo_moe", "grpo_demo", "smollm2_135m_cp2", "lora_smollm2", "distill_smollm2")
    for path in TOMLS:
        _, config = run.load(str(path), ["train.steps=2", "mesh.cp=1", "mesh.ep=1", "train.global_batch_size=16"])
        check_config(config, world_size=1, local_world_size=1)
        assert config.data.path is None or path.stem in small, f"{path.name}: no real run on toy data"


def test_every_toml_opens_with_its_command_and_its_schema() -> None:
    for path in TOMLS:
        command, schema, purpose = path.read_text(encoding="utf-8").splitlines()[:3]
        launch = r"# (torchrun .*-m fsdp2kit\.run|fsdp2kit run) toml/"
        assert re.match(launch + re.escape(path.name), command), path.name
        named = re.match(r"#:schema \./(schema[.\w]*json)$", schema)
        assert named, path.name
        assert (path.parent / named.group(1)).is_file(), path.name
        assert purpose.startswith("# "), path.name


def test_schemas_are_current() -> None:
    for path, text in schema_files(ROOT / "toml").items():
        assert is_current(path, text), f"{path.name}: run `make schema`"


@pytest.mark.full
def test_schemas_accept_the_tomls_and_refuse_unknown_keys() -> None:
    import json

    import jsonschema
    import tomli

    for path in TOMLS:
        text = path.read_text(encoding="utf-8")
        named = re.search(r"#:schema \./(\S+)", text)
        assert named
        schema = json.loads((path.parent / named.group(1)).read_text(encoding="utf-8"))
        values = tomli.loads(text)
        jsonschema.validate(values, schema)
        values["train"]["stepz"] = 1
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values, schema)
