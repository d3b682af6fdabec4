"""Large rows: read in blocks of bounded size, and refused in a line where their tokens would not fit into memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data import memory, rows, tokens
from fsdp2kit.data.conversation import WholeText
from fsdp2kit.data.memory import available_bytes, check_room
from fsdp2kit.data.rows import Row, RowReader, blocks_of
from fsdp2kit.data.sources import locate
from fsdp2kit.data.tokens import encode_rows
from fsdp2kit.errors import UserError
from tests.data.helpers import templates
from tests.data.helpers.files import write_rows
from tests.data.helpers.templates import make_tokenizer


def test_a_block_is_closed_by_its_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_BLOCK_BYTES", 1000)
    sizes = [10, 10, 2000, 10, 10, 10, 10, 600, 600, 10]
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x" * size} for size in sizes])
    blocks, places = [], []
    reader = RowReader(locate(DataConfig(path=str(path), format="text")))
    for block in blocks_of(reader, 4):
        blocks.append([len(row.parse()["text"]) for row in block])
        places.append(reader.position["line"])
    assert blocks == [[10, 10, 2000], [10, 10, 10, 10], [600, 600], [10]]
    assert places == [3, 7, 9, 10], "the position is the one after the block"
    nested = [Row({"messages": [{"role": "user", "content": "x" * 600}] * 2}, "x")] * 3
    assert [len(block) for block in blocks_of(nested, 4)] == [1, 1, 1]
    assert [len(block) for block in blocks_of([Row({"input_ids": [1] * 60}, "x")] * 3, 4)] == [3]


def test_calls_of_the_tokenizer_are_bounded_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(templates.CHATML)
    texts = [Row({"text": "Water is wet. " * (at % 5)}, "x") for at in range(20)]
    pairs = [Row({"prompt": "Wet? " * (1 + at % 5), "completion": "Yes."}, "x") for at in range(20)]
    found = {}
    for limit in (10**9, 40):
        monkeypatch.setattr(tokens, "_CHARACTERS", limit)
        found[limit] = [
            encode_rows(some, DataConfig(format=kind), tokenizer)  # pyright: ignore[reportArgumentType]
            for some, kind in ((texts, "text"), (pairs, "prompt_completion"))
        ]
    assert found[40] == found[10**9]
    learnt = [WholeText("x" * size, "x") for size in (30, 5, 5, 50, 1)]
    assert [*tokens._calls(learnt)] == [learnt[:3], learnt[3:4], learnt[4:]]
    assert [*tokens._calls([])] == []


@pytest.mark.parametrize("kind", ["text", "prompt_completion", "chat"])
def test_a_row_whose_tokens_do_not_fit_is_refused_in_a_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(templates.CHATML)
    book = "Water is wet. " * 100
    messages = [{"role": "user", "content": "Tell."}, {"role": "assistant", "content": book}]
    row = {"text": book, "prompt": "Tell.", "completion": book, "messages": messages}
    how = DataConfig(format=kind)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(memory, "_LONG", 1000)
    plain = encode_rows([Row(row, "a.jsonl:7")], how, tokenizer)
    count = len(tokenizer(book)["input_ids"])
    monkeypatch.setattr(memory, "available_bytes", lambda: 250 * count)
    with pytest.raises(UserError) as caught:
        encode_rows([Row(row, "a.jsonl:7")], how, tokenizer)
    assert caught.value.where == "a.jsonl:7"
    assert "GiB to tokenise, and 0.0 GiB of memory are free" in caught.value.what
    monkeypatch.setattr(memory, "available_bytes", lambda: 600 * count)
    assert encode_rows([Row(row, "a.jsonl:7")], how, tokenizer) == plain
    monkeypatch.setattr(memory, "_LONG", 10**6)
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    assert encode_rows([Row(row, "a.jsonl:7")], how, tokenizer) == plain, "a document of usual length is not measured"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine, and under a limit of the process on its address space."""
    whole = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert 0 < (available_bytes() or 0) < int(whole.split()[1]) * 1024
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + (1 << 26), used + (1 << 26)))
    assert (available_bytes() or 0) <= 1 << 27


def test_a_control_group_limits_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_GROUPS", ((tmp_path, ("memory.max", "memory.current", "inactive_file")),))
    for limit, expected in (("max", None), ("1000", 1000 - 700 + 200), ("100", 0)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("700\n")
        (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
        assert memory._of_group() == expected
    check_room("x" * 10, "x", make_tokenizer(None), with_offsets=True)
