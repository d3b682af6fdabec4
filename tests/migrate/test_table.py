"""docs/fsdp1_to_fsdp2.md leaves nothing of FSDP1 out, and names only keys and calls that exist; lines have tests."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.foreign import NAMES, NOT_OFFERED, WITHOUT_KEY
from fsdp2kit.config.load import known_keys
from fsdp2kit.migrate.fields import TABLE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "fsdp1_to_fsdp2.md").read_text(encoding="utf-8")
TEXT = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)


def _codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _rows(text: str) -> list[list[str]]:
    """The cells of every line of every table, without the headings."""
    tables = re.findall(r"^\|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


ROWS = _rows(TEXT)
TESTS = _rows((ROOT / "docs" / "dev" / "fsdp1_to_fsdp2.md").read_text(encoding="utf-8"))
NAMED = {code for row in ROWS for code in _codes(row[0])}


def test_every_argument_and_method_is_there() -> None:
    arguments = set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - {"self"}
    methods = {name for name in vars(FullyShardedDataParallel) if not name.startswith("_")} - {"module"}
    assert len(arguments) > 10
    assert len(methods) > 10
    assert not arguments - NAMED
    assert not methods - NAMED


def test_every_strategy_prefetch_and_dtype_is_there() -> None:
    names = {member.name for enumeration in (ShardingStrategy, BackwardPrefetch) for member in enumeration}
    assert not names - NAMED
    assert not {field.name for field in dataclasses.fields(MixedPrecision)} - NAMED


def test_nothing_else_is_claimed_to_be_fsdp1s() -> None:
    known = {
        *inspect.signature(FullyShardedDataParallel.__init__).parameters,
        *vars(FullyShardedDataParallel),
        *(field.name for field in dataclasses.fields(MixedPrecision)),
        *(member.name for enumeration in (ShardingStrategy, BackwardPrefetch) for member in enumeration),
        "None",
    }
    assert not NAMED - known


@cache
def _functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_line_has_its_tests() -> None:
    assert [row[0] for row in TESTS] == [row[0] for row in ROWS]


@pytest.mark.parametrize("row", TESTS, ids=lambda row: row[0])
def test_a_line_names_tests_that_exist(row: list[str]) -> None:
    cited = _codes(row[-1])
    assert cited
    for name in cited:
        path, _, function = name.partition("::")
        assert function.startswith("test_"), name
        assert function in _functions(path), name


def _is_key(key: str) -> bool:
    """Whether our TOMLs have the key."""
    return key in known_keys(TrainingConfig)


def test_the_translations_keys_exist_and_a_name_means_one_thing() -> None:
    rows = [row for row in TABLE["rows"] if "rule" not in row]
    written = {row.get("key", row.get("fill")) for row in rows}
    slots = {row["from"] for row in rows if "from" in row} | {
        slot for slots in TABLE["unused"].values() for slot in slots
    }
    assert len(written) > 40
    assert [key for key in {*written, *(slot for slot in NAMES if "." in slot)} if not _is_key(key)] == []
    assert slots <= NAMES.keys()
    warned = [row["names"] for row in TABLE["warned"]]
    names = [
        name
        for one in (*NAMES.values(), *WITHOUT_KEY.values(), *NOT_OFFERED.values(), *warned)
        for name in one.split()
    ]
    assert len(names) > 300
    assert len(names) == len(set(names))


def test_keys_and_calls_exist() -> None:
    keys = {
        code
        for code in _codes(TEXT)
        if re.fullmatch(r"[a-z_]+\.[a-z_0-9]+", code) and code.split(".")[0] in TrainingConfig.model_fields
    }
    assert len(keys) > 15
    for key in keys:
        assert _is_key(key), key
    calls = {match for code in _codes(TEXT) for match in re.findall(r"(?<![\w/.])(?:torch|fsdp2kit)(?:\.\w+)+", code)}
    assert len(calls) > 5
    for call in calls:
        module, _, name = call.rpartition(".")
        try:
            found = hasattr(importlib.import_module(module), name)
        except ModuleNotFoundError:
            found = False
        assert found, call
