"""Rows come back as they were written, from every kind of file; mistakes name file and line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.rows import RowReader
from fsdp2kit.data.sources import locate
from fsdp2kit.errors import UserError
from tests.data.files import write_rows

ROWS = [{"text": "first"}, {"text": "second\u2028line"}]


def read(path: Path | str, split: str = "train") -> list[dict]:
    return [row.parse() for row in RowReader(locate(DataConfig(path=str(path), split=split)), download=True)]


def save(kind: str, folder: Path) -> Path:
    rows, path = datasets.Dataset.from_list(ROWS), folder / f"data.{kind}"
    if kind == "saved":
        rows.save_to_disk(str(path))
    elif kind == "arrow":
        rows.save_to_disk(str(folder / "saved"))
        (folder / "saved" / "data-00000-of-00001.arrow").rename(path)
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "jsonl":
        write_rows(path, ROWS)
    elif kind == "tsv":
        rows.to_csv(str(path), sep="\t")
    else:
        getattr(rows, f"to_{kind}")(str(path))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv", "tsv", "arrow", "saved"])
def test_every_kind_of_file(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    datasets.disable_progress_bars()
    path = save(kind, tmp_path)
    datasets.enable_progress_bars()
    capfd.readouterr()
    assert read(path) == ROWS
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert not datasets.are_progress_bars_disabled()


def test_a_line_of_a_text_file_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert read(tmp_path / "a.txt") == [{"text": "one"}, {"text": "two"}]


def test_json_rows_keep_their_own_keys_types_and_nulls(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "x", "name": None}], "tools": [{"p": {"a": 1}}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}], "tools": [{"p": {"b": [None]}}], "id": 1},
        {"messages": "not a list", "id": "one"},
    ]
    assert read(write_rows(tmp_path / "a.jsonl", rows)) == rows


def test_arrow_fills_in_none_and_reading_takes_it_out(tmp_path: Path) -> None:
    rows = [{"m": [{"a": 1}, {"b": "x"}], "n": 1}, {"m": [{"a": 2}]}]
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    assert read(tmp_path / "a.parquet") == rows


def test_an_edited_file_is_read_anew(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "one"}])
    assert read(path) == [{"text": "one"}]
    assert read(write_rows(path, [{"text": "two"}])) == [{"text": "two"}]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv", "saved"])
@pytest.mark.parametrize("part", ["[:25%]", "[25%:]", "[2:5]", "[-3:]", "[:100]"])
def test_a_slice_of_a_split_is_that_of_datasets(kind: str, part: str, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"text": f"row {number}"} for number in range(10)])
    path = tmp_path / f"a.{kind}"
    if kind == "saved":
        rows.save_to_disk(str(path))
    elif kind == "json":
        path.write_text(json.dumps(rows.to_list()))
    elif kind == "jsonl":
        write_rows(path, rows.to_list())
    else:
        getattr(rows, f"to_{kind}")(str(path))
    write_rows(tmp_path / "reference.jsonl", rows.to_list())
    expected = datasets.load_dataset("json", data_files=str(tmp_path / "reference.jsonl"), split=f"train{part}")
    assert read(path, f"train{part}") == expected.to_list()


def test_slices_go_over_the_files_of_a_split(tmp_path: Path) -> None:
    for number in range(3):
        write_rows(tmp_path / f"train-{number}.jsonl", [{"n": 4 * number + at} for at in range(4)])
    write_rows(tmp_path / "test.jsonl", [{"n": -1}])
    assert [row["n"] for row in read(tmp_path, "train[3:9]")] == [3, 4, 5, 6, 7, 8]
    source = locate(DataConfig(path=str(tmp_path), split="train[3:9]", limit=2))
    assert [row.parse()["n"] for row in RowReader(source)] == [3, 4]
    assert (
        len(
            {
                locate(DataConfig(path=str(tmp_path), split=split)).digest()
                for split in ("train", "train[:1]", "train[1:]")
            }
        )
        == 3
    )
    with pytest.raises(UserError, match="there are no rows"):
        read(tmp_path, "train[50:]")
    for split in ("train[1]", "train[a:]", "train[:1]+train[2:]", "train[:150%]"):
        with pytest.raises(UserError, match="is no split"):
            read(tmp_path, split)


def test_folders_globs_and_splits(tmp_path: Path) -> None:
    write_rows(tmp_path / "data" / "train-0.jsonl", [{"n": 0}])
    write_rows(tmp_path / "data" / "train-1.jsonl", [{"n": 1}])
    write_rows(tmp_path / "data" / "dev.jsonl", [{"n": 2}])
    assert read(tmp_path) == [{"n": 0}, {"n": 1}]
    assert read(tmp_path, "validation") == [{"n": 2}]
    assert read(f"{tmp_path}/data/*.jsonl") == [{"n": 2}, {"n": 0}, {"n": 1}]
    with pytest.raises(UserError, match=r"no split 'test'; the folder has: train, validation"):
        read(tmp_path, "test")
    write_rows(tmp_path / "plain" / "x.jsonl", [{"n": 3}])
    assert read(tmp_path / "plain") == [{"n": 3}]


def test_a_saved_dataset_dict_has_splits(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "d"))
    assert read(tmp_path / "d", "test") == ROWS
    with pytest.raises(UserError, match="no split 'train'; it has test"):
        read(str(tmp_path / "d"), "train")


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": \n', r"a\.jsonl:3: not valid JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', r"a\.jsonl:2: a row is a JSON list"),
        ("a.jsonl", "\n \n", "there are no rows"),
        ("a.json", "", "there are no rows"),
        ("a.json", "[]", "there are no rows"),
        ("a.json", '[\n{"a": 1},\n{"a" 2}\n]', r"a\.json:3: not valid JSON"),
        ("a.json", "[1]", r"a\.json: row 0: a row is a JSON int"),
        ("a.csv", "", "there are no rows"),
        ("a.parquet", "no parquet", "cannot be read as parquet"),
        ("a.xlsx", "x", r"unknown suffix '.xlsx'; known: .jsonl"),
    ],
)
def test_malformed_files(name: str, content: str, what: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=what):
        read(tmp_path / name)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_a_damaged_compressed_file(suffix: str, tmp_path: Path) -> None:
    whole = {"gz": gzip, "bz2": bz2, "xz": lzma}[suffix].compress(b'{"a": 1}\n' * 10_000)
    path, middle = tmp_path / f"a.jsonl.{suffix}", len(whole) // 2
    for content in (whole[:middle] + bytes(8) + whole[middle + 8 :], whole[:middle], b"no such thing"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{path}: cannot be read"):
            read(path)


def test_hidden_files_are_not_read(tmp_path: Path) -> None:
    """Jupyter's copies would double the data."""
    for folder in ("", ".ipynb_checkpoints/", "a/.cache/", ".ipynb_checkpoints/.cache/"):
        write_rows(tmp_path / f"{folder}x.jsonl", ROWS)
    for path in (str(tmp_path), f"{tmp_path}/**/*.jsonl", f"file://{tmp_path}"):
        assert read(path) == ROWS
    for path in (".ipynb_checkpoints", ".ipynb_checkpoints/*", ".ipynb_checkpoints/**/*.jsonl", ".ipynb*/*.jsonl"):
        assert read(f"{tmp_path}/{path}") == ROWS


def test_a_part_without_rows_is_passed_over(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2]})
    for name, rows in (("0", 0), ("1", 2), ("2", 0)):
        pq.write_table(table.slice(0, rows), tmp_path / f"{name}.parquet")
    assert read(tmp_path) == [{"a": 1}, {"a": 2}]


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: not UTF-8"):
        read(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("path", ["no/such/file.jsonl", "./missing", "/missing", "a/b/c", "missing.parquet"])
def test_a_missing_path_is_not_looked_for_on_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="no such file"):
        read(path)


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data file"):
        read(str(tmp_path))
    with pytest.raises(UserError, match="matches no file"):
        read(f"{tmp_path}/*.jsonl")
    with pytest.raises(UserError, match="a file has no split 'test'"):
        read(str(write_rows(tmp_path / "a.jsonl", ROWS)), "test")
    write_rows(tmp_path / "b.jsonl", ROWS)
    (tmp_path / "b.csv").write_text("x\n1\n")
    with pytest.raises(UserError, match="several kinds"):
        read(f"{tmp_path}/b.*")


def test_a_hub_dataset_that_cannot_be_reached() -> None:
    with pytest.raises(UserError, match="cannot be read as hub"):
        read("fsdp2kit/there-is-no-such-dataset")


def test_a_pattern_looks_into_linked_directories_and_past_dangling_links(tmp_path: Path) -> None:
    write_rows(tmp_path / "elsewhere" / "x.jsonl", ROWS)
    write_rows(tmp_path / "data" / "a" / "x.jsonl", ROWS)
    (tmp_path / "data" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "a" / ".#x.jsonl").symlink_to("user@host.1234")  # an editor's lock
    assert read(f"{tmp_path}/data/*/x.jsonl") == 2 * ROWS
    assert read(f"{tmp_path}/data/a/*.jsonl") == read(tmp_path / "data" / "a") == ROWS
    locate(DataConfig(path=f"{tmp_path}/data/a")).digest()
