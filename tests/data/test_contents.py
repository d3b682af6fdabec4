"""What a resume says about rows and code that changed since an earlier start."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.checkpoint.identity import check_same_run
from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data import contents
from fsdp2kit.data.contents import Content, changes, content_of, stream_content
from fsdp2kit.data.sources import Location
from fsdp2kit.errors import UserError


def recorded(**contents: Content) -> dict[str, Any]:
    """As a manifest has them."""
    return json.loads(json.dumps({name.replace("_", "."): asdict(one) for name, one in contents.items()}))


def test_files_and_rows_that_changed_are_named(tmp_path: Path) -> None:
    section = DataConfig(path=str(tmp_path))
    (tmp_path / "more").mkdir()

    def content(rows: int, digest: str, **files: str) -> dict[str, Any]:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('_', '/')}.jsonl"
            path.unlink(missing_ok=True)
            if text:
                path.write_text(text)
        return recorded(data_path=content_of(section, "data.path", rows=rows, digest=digest))

    before = content(3, "a", one="{}\n", more_two="{}\n")
    assert changes(before, content(3, "a")) == []
    assert changes({}, before) == changes(before, {}) == []
    assert changes(before, content(3, "b", one="[]\n")) == ["data.path (3 rows as before, with other tokens)"]
    now = content(4, "c", more_two="{}\n{}\n", three="{}\n")
    assert changes(before, now) == ["data.path (more/two.jsonl changed, three.jsonl is new, 3 → 4 rows)"]
    now = content(9, "d", one="", more_two="", **{f"n{at}": "{}\n" for at in range(4)})
    assert changes(before, now) == [
        "data.path (more/two.jsonl is gone, one.jsonl is gone, n0.jsonl is new, and 4 more files, 3 → 9 rows)"
    ]


def test_a_url_is_not_listed_again_and_a_file_may_go_meanwhile(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("listed")

    path = tmp_path / "gone.jsonl"
    gone = Location(str(path), "train", "json", (str(path),))
    monkeypatch.setattr(contents, "locate", lambda *_: gone)
    assert content_of(DataConfig(path=str(path)), "data.path", rows=3, digest="a") == Content("a", 3)
    monkeypatch.setattr(contents, "locate", fail)
    section = DataConfig(path="s3://bucket/*.jsonl")
    assert content_of(section, "data.path", rows=3, digest="a") == Content("a", 3)


def test_code_and_streams_have_no_rows() -> None:
    def code(digest: str, **files: str) -> dict[str, Any]:
        return recorded(reward_f=Content(digest, files=files, otherwise="another function"))

    assert changes(code("a", mine="1"), code("b", mine="2")) == ["reward.f (mine changed)"]
    assert changes(code("a", mine="1"), code("b", mine="1")) == ["reward.f (another function)"]
    one, other = (recorded(data_path=stream_content(DataConfig(path=path))) for path in ("/a.jsonl", "/b.jsonl"))
    assert changes(one, other) == ["data.path (/a.jsonl is gone, /b.jsonl is new)"]


def test_a_refusal_is_of_training_rows(tmp_path: Path) -> None:
    def refusal(**contents: Any) -> str:
        with pytest.raises(UserError) as error:
            check_same_run(tmp_path, saved={"data": "d1"}, current={"data": "d2"}, **contents)
        return error.value.what

    before, now = (
        recorded(data_path=Content(one, rows), eval_path=Content(one, rows)) for one, rows in (("a", 3), ("b", 4))
    )
    assert refusal(contents_saved=before, contents=now) == "was made with other data: data.path (3 → 4 rows)"
    assert refusal(contents_saved=before, contents=before).startswith(
        "was made with other data: its files are the same"
    )
    # A checkpoint of an earlier version has the digest alone.
    assert refusal(contents_saved=None, contents=now) == "was made with data = 'd1', and this run has data = 'd2'"


def test_a_stream_is_identified_by_each_part_of_where_its_rows_are() -> None:
    places = [{}, {"path": "/b"}, {"split": "test"}, {"limit": 3}, {"name": "en"}, {"limit": 3, "name": "en"}]
    found = {stream_content(DataConfig(**{"path": "/a", **place})).digest for place in places}
    assert len(found) == len(places)


def test_up_to_three_changed_files_are_named() -> None:
    one, other = (recorded(x=Content("", 2, dict.fromkeys("abc", size))) for size in ("1", "2"))
    assert changes(one, other) == ["x (a changed, b changed, c changed, 2 rows as before, with other tokens)"]
