"""Rows come back as they were written, from every kind of file; mistakes name file and line."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fsdp2kit.config.schema import DataConfig, TrainingConfig
from fsdp2kit.data.rows import RowReader, hub_content
from fsdp2kit.data.sources import Location, held_out_sets, locate
from fsdp2kit.errors import UserError
from tests.data.helpers.files import write_rows

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


# Configurations

CONFIGS = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# A set
"""


def write_configurations(folder: Path, readme: str = "", names: tuple[str, ...] = ("main", "socratic")) -> Path:
    for name in names:
        for split in ("train", "test"):
            write_rows(folder / name / f"{split}-00000.jsonl", [{"n": f"{name} {split}"}])
    if readme:
        (folder / "README.md").write_text(readme)
    return folder


def read_named(path: Path, name: str | None, split: str = "train") -> list[dict]:
    return [row.parse() for row in RowReader(locate(DataConfig(path=str(path), name=name, split=split)))]


@pytest.mark.parametrize("readme", ["", CONFIGS, CONFIGS.replace("\n", "\r\n")])
def test_a_folder_with_several_configurations(readme: str, tmp_path: Path) -> None:
    folder = write_configurations(tmp_path, readme)
    with pytest.raises(UserError, match=r'has several configurations \(main, socratic\).*data\.name = "main"'):
        read_named(folder, None)
    for name in ("main", "socratic"):
        assert read_named(folder, name) == [{"n": f"{name} train"}]
    assert read_named(folder, "main", "test") == [{"n": "main test"}]
    with pytest.raises(UserError, match=r"data\.name: .* 'mian'; did you mean \"main\"\?"):
        read_named(folder, "mian")
    with pytest.raises(UserError, match=r"eval\.sets\.x\.name = "):
        locate(DataConfig(path=str(folder)), "eval.sets.x.path")
    with pytest.raises(UserError, match=r"data\.sources\.1\.config_name = "):
        locate(DataConfig(path=str(folder)), "data.sources.1.path")


@pytest.mark.parametrize(
    "readme",
    [
        CONFIGS.replace("- config_name: socratic\n", "- config_name: socratic\n  default: true\n"),
        CONFIGS.replace("socratic\n  data", "default\n  data"),
        "---\nconfigs:\n- config_name: only\n  data_files: main/test-*\n---\n",
        "---\nconfigs:\n- {config_name: a, data_dir: main, default: true}\n- {config_name: b, data_dir: main}\n---\n",
        "---\nconfigs:\n- config_name: a\n  data_files: [{split: train, path: [main/test*, socratic/train*]}]\n---\n",
    ],
)
def test_a_readme_says_which_files_are_a_split(readme: str, tmp_path: Path) -> None:
    folder = write_configurations(tmp_path / "set", readme)
    expected = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert read_named(folder, None) == expected.to_list()


@pytest.mark.parametrize(
    ("readme", "what"),
    [
        (CONFIGS.replace("socratic/train", "absent/train"), "split 'train' of 'socratic' match no file"),
        (CONFIGS.replace("- config_name: main", "- config_name: main\n  sep: ';'"), "have 'sep', which is not read"),
        (CONFIGS.replace("configs:", "configs: [{"), "cannot be read"),
    ],
)
def test_a_readme_that_cannot_be_followed(readme: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        read_named(write_configurations(tmp_path, readme), "socratic")


def test_a_split_that_a_configuration_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no split 'test' in 'socratic'; its README.md has: train"):
        read_named(write_configurations(tmp_path, CONFIGS), "socratic", "test")


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["data/train-0.jsonl", "data/train-1.jsonl"], None),
        (["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"], None),
        (["part-0/a.jsonl", "part-1/a.jsonl"], None),
        (["part-0/train.jsonl", "part-1/train.jsonl"], None),
        (["2023-01/train.jsonl", "2023-02/train.jsonl"], None),
        (["wiki/a.jsonl", "books/a.jsonl"], None),
        (["train/wiki/a.jsonl", "train/books/a.jsonl"], None),
        (["a/train.jsonl", "readme.txt"], None),
        (["en/train/0.jsonl", "de/train/0.jsonl"], "de, en"),
        (["data/en/train.jsonl", "data/de/train.jsonl", "data/de/test.jsonl"], "de, en"),
        (["a/training-0.jsonl", "b/train.jsonl"], "a, b"),
    ],
)
def test_which_folders_are_configurations(files: list[str], names: str | None, tmp_path: Path) -> None:
    for file in files:
        write_rows(tmp_path / file, [{"n": file}])
    wanted = [file for file in files if file.endswith(".jsonl") and "test" not in file]
    if names is None:
        assert [row["n"] for row in read(tmp_path)] == sorted(wanted)
        return
    with pytest.raises(UserError, match=rf"several configurations \({names}\)"):
        read(tmp_path)
    assert [
        row["n"] for row in read(f"{tmp_path}/**/*train*" if "/train/" not in files[0] else f"{tmp_path}/*/train/*")
    ]


def test_a_folder_inside_is_a_configuration_that_may_be_named(tmp_path: Path) -> None:
    for name in ("wiki", "books"):
        write_rows(tmp_path / name / "a.jsonl", [{"n": name}])
    assert read_named(tmp_path, "books") == [{"n": "books"}]
    with pytest.raises(UserError, match=r"data\.name: 'books', and .* has no configurations; leave it out"):
        read_named(tmp_path / "wiki" / "a.jsonl", "books")
    with pytest.raises(UserError, match=r"data\.name: 'books', and .* has no configurations"):
        read_named(tmp_path / "wiki", "books")


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({"path": "other"}, ("other", None)),
        ({"path": "other", "name": "books"}, ("other", "books")),
        ({"sets": {"x": {"path": "other"}}}, ("other", None)),
        ({"split": "test"}, ("some/set", "wiki")),
        ({"name": "books"}, ("some/set", "books")),
    ],
    ids=str,
)
def test_a_held_out_set_has_the_training_datas_configuration_where_it_has_its_path(
    evaluation: dict, expected: tuple[str, str | None]
) -> None:
    values = {"recipe": "x", "model": {"path": "m"}, "train": {"steps": 1}, "eval": {"every": 1, **evaluation}}
    config = TrainingConfig.model_validate({**values, "data": {"path": "some/set", "name": "wiki"}})
    [found] = held_out_sets(config)
    assert (found.section.path, found.section.name) == expected


def test_configurations_behind_a_url_are_refused(tmp_path: Path) -> None:
    folder = write_configurations(tmp_path, CONFIGS)
    with pytest.raises(UserError, match=r"several configurations \(main, socratic\) behind a URL; give a pattern"):
        read(f"file://{folder}")


@pytest.mark.parametrize(
    ("says", "name", "what"),
    [
        (
            "Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']\nExample …",
            None,
            r'data\.path: a/b: has several configurations \(main, socratic\); name one: data\.name = "main"',
        ),
        (
            "BuilderConfig 'mian' not found. Available: ['main', 'x']",
            "mian",
            r"data\.name: .* did you mean \"main\"\?",
        ),
        ("There are multiple 'b' configurations in the cache: main, x\nPlease", None, r"several .*\(main, x\)"),
        (
            "Couldn't find cache for b for config 'y'\nAvailable configs in the cache: ['main']",
            "y",
            r"no configuration 'y'; its configurations: main",
        ),
    ],
)
def test_configurations_of_a_hub_dataset(
    says: str, name: str | None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(path: str, config: str | None = None, **_: object) -> None:
        asked.append((path, config))
        raise ValueError(says)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    location = locate(DataConfig(path="a/b", name=name))
    with pytest.raises(UserError, match=what):
        list(RowReader(location, download=True))
    with pytest.raises(UserError, match=what):
        hub_content(location)
    assert asked == [("a/b", name)] * 2


def test_the_messages_of_datasets_are_those_that_are_read(tmp_path: Path) -> None:
    """What it raises for a folder is what it raises for a set on the hub."""
    folder = write_configurations(tmp_path, CONFIGS)
    found = Location(str(folder), "train", "hub")
    for name, what in ((None, r"several configurations \(main, socratic\)"), ("mian", 'did you mean "main"')):
        with pytest.raises(UserError, match=what):
            list(RowReader(replace(found, name=name), download=True))


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


# As `zstd` writes it: {"n": 1} and {"n": 2}, each a line and a frame, then a frame to be skipped, then {"n": 3}.
ZSTD = bytes.fromhex(
    "28b52ffd04584900007b226e223a20317d0ad821b83128b52ffd04584900007b226e223a20327d0a8fa0609c502a4d18"
    "040000006162636428b52ffd04584900007b226e223a20337d0ae3420ae8"
)


@pytest.mark.parametrize("path", ["{}", "file://{}"])
def test_all_frames_of_a_zstd_file_are_read(path: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(ZSTD)
    assert read(path.format(tmp_path / "a.jsonl.zst")) == [{"n": 1}, {"n": 2}, {"n": 3}]
    rows = [{"text": f"row {number} ü"} for number in range(3000)]
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    frames = [
        pa.compress(b"".join(part), codec="zstd", asbytes=True) for part in (lines[:7], lines[7:2000], lines[2000:])
    ]
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(frames))
    assert read(path.format(tmp_path / "b.jsonl.zst")) == rows
    (tmp_path / "c.json.zst").write_bytes(pa.compress(json.dumps(rows).encode(), codec="zstd", asbytes=True))
    assert read(path.format(tmp_path / "c.json.zst")) == rows
    (tmp_path / "d.csv.zst").write_bytes(pa.compress(b"a,b\n1,2\n", codec="zstd", asbytes=True))
    assert read(path.format(tmp_path / "d.csv.zst")) == [{"a": "1", "b": "2"}]


def _zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": _zstd}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_two_compressed_streams_are_read_from_any_position(suffix: str, tmp_path: Path) -> None:
    rows = [{"n": number} for number in range(5000)]
    parts = ["".join(json.dumps(row) + "\n" for row in part).encode() for part in (rows[:4000], rows[4000:])]
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], parts)))
    location = locate(DataConfig(path=str(path)))
    for count in (1, 3999, 4000, 4999):
        reader = RowReader(location)
        list(itertools.islice(reader, count))
        assert [row.parse() for row in RowReader(location, reader.position)] == rows[count:]


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_zeros_behind_a_compressed_stream_are_padding(suffix: str, tmp_path: Path) -> None:
    one, two = (COMPRESS[suffix](json.dumps(row).encode() + b"\n") for row in ROWS[:2])
    for zeros in (4, 1 << 17):
        (tmp_path / f"a.jsonl.{suffix}").write_bytes(one + bytes(zeros) + two + bytes(zeros))
        assert read(tmp_path / f"a.jsonl.{suffix}") == ROWS[:2]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_damaged_compressed_file(suffix: str, tmp_path: Path) -> None:
    whole = COMPRESS[suffix](b'{"a": 1}\n' * 10_000)
    path, middle = tmp_path / f"a.jsonl.{suffix}", len(whole) // 2
    damaged = [whole[:middle] + bytes(8) + whole[middle + 8 :]] if suffix != "zst" else [whole + whole[:-3]]
    damaged += [whole[:middle], b"no such thing", whole + b"no such thing", whole + whole[:middle]]
    for content in damaged:
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


# Splits and shards


def test_a_digit_ends_a_splits_name_as_in_datasets(tmp_path: Path) -> None:
    for name in ("train.jsonl", "train2.jsonl"):
        (tmp_path / name).write_text(f'{{"text": "{name}"}}\n')
    found = sorted(row.parse()["text"] for row in RowReader(locate(DataConfig(path=str(tmp_path)))))
    assert found == sorted(datasets.load_dataset(str(tmp_path), split="train")["text"])
    assert len(found) == 2


def test_a_folders_split_is_that_of_its_files_as_in_datasets(tmp_path: Path) -> None:
    for name in ("dev/train.jsonl", "train/a.jsonl", "train/dev.jsonl"):
        write_rows(tmp_path / name, [{"n": name}])
    for split in ("train", "validation"):
        assert read(tmp_path, split) == [*datasets.load_dataset(str(tmp_path), split=split)]


@pytest.mark.parametrize("other", ["more.jsonl", "more.ndjson", "v2/a.jsonl", "v2/a.jsonl.gz"])
def test_a_file_that_is_named_for_no_split_beside_one_that_is(other: str, tmp_path: Path) -> None:
    for name in ("v1/train.jsonl", "v1/dev.jsonl", "dataset_infos.json", "config.json", "notes.txt", other):
        write_rows(tmp_path / name, [{"n": name}])
    with pytest.raises(
        UserError, match=rf"{other} is named for no split, and v1/train.jsonl is, so .* left out; name"
    ):
        read(tmp_path)
    assert read(tmp_path, "validation") == [{"n": "v1/dev.jsonl"}]
    assert read(f"{tmp_path}/v1/train*") == [{"n": "v1/train.jsonl"}]


def test_folders_of_versions_are_shards(tmp_path: Path) -> None:
    for name in ("v1/train.jsonl", "v1/dev.jsonl", "v2/train.jsonl"):
        write_rows(tmp_path / name, [{"n": name}])
    assert read(tmp_path) == [{"n": "v1/train.jsonl"}, {"n": "v2/train.jsonl"}]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    for number in (0, 2):
        (tmp_path / f"train-0000{number}-of-00003.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match="train has 2 of 3 files; number 1 is missing"):
        locate(DataConfig(path=str(tmp_path)))


def test_a_column_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(UserError, match=r"a\.csv:1: the header names 'text' twice"):
        list(RowReader(locate(DataConfig(path=str(tmp_path / "a.csv")))))


TWICE = {
    "a column": ('{"text": "a", "text": "b"}', '\'text\': "a" and "b"'),
    "within": ('{"text": "a", "meta": [{"k": {"x": 1, "x": 1, "x": 2}}]}', "'x': 1 and 2"),
    "null": ('{"text": "a", "text": null}', "'text': \"a\" and null"),
    "a number and a truth": ('{"text": "a", "k": 1, "k": true}', "'k': 1 and true"),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_key_with_two_values_is_refused(name: str, tmp_path: Path) -> None:
    """Python keeps the last one."""
    line, said = TWICE[name]
    (tmp_path / "a.jsonl").write_text('{"text": "b"}\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        read(tmp_path / "a.jsonl")
    assert f"a.jsonl:2: holds an object with two values of the key {said}; keep one of them" in str(caught.value)
    before = '{"text": "[,"},\n {"text": "]", "k": {"x": 1, "x": 1}} '
    (tmp_path / "b.json").write_text(f"[{before},\n{line}, {line}]")
    with pytest.raises(UserError, match=r"b\.json: row 2: holds an object with two values of the key"):
        read(tmp_path / "b.json")


def test_a_key_twice_with_one_value_is_that_value(tmp_path: Path) -> None:
    line = '{"text": "a", "k": [{"x": 1.5, "y": "ü"}], "text": "a", "k": [{"x": 1.5, "y": "\\u00fc"}]}'
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    assert read(tmp_path / "a.jsonl") == [json.loads(line)]


def test_arrow_refuses_a_key_twice_in_lines_of_json(tmp_path: Path) -> None:
    """`datasets` reads the files of a hub dataset; the error is what `RowReader` makes one line of."""
    (tmp_path / "a.jsonl").write_text('{"text": "a", "text": "b"}\n')
    with pytest.raises(pa.ArrowInvalid, match="twice"):
        list(datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"), split="train", streaming=True))
