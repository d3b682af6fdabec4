"""Rows that are tokens already: masks of other tools say what labels say, and packed rows are several documents."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
from transformers import DataCollatorWithFlattening

from fsdp2kit.config.schema import ChatDataConfig, ColumnsConfig, DataConfig
from fsdp2kit.data.documents import Documents, build_documents
from fsdp2kit.data.rows import Row
from fsdp2kit.data.tokens import encode_documents, encode_rows
from fsdp2kit.errors import UserError
from tests.data.helpers import templates
from tests.data.helpers.families import MULTI
from tests.data.helpers.files import write_rows
from tests.data.helpers.templates import encode_chat, make_tokenizer

TOKENS = DataConfig(format="tokens")
IDS = [5, 6, 7, 8, 9, 10]
THREE = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [9, 10, 11, 12]}]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(templates.MARKED_WIDE)


def read(row: dict, tokenizer, how: DataConfig = TOKENS) -> list[tuple[list[int], list[bool]]]:
    [documents] = encode_documents([Row(row, "x.jsonl:1")], how, tokenizer)
    return documents


def refused(row: dict, tokenizer, how: DataConfig = TOKENS) -> str:
    with pytest.raises(UserError) as caught:
        read(row, tokenizer, how)
    assert caught.value.where == "x.jsonl:1"
    return f"{caught.value.what}; {caught.value.todo}"


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask", "response_mask", "loss_scale"])
def test_a_mask_says_what_labels_say(name: str, tokenizer) -> None:
    labels = read({"input_ids": IDS, "labels": [-100, -100, 7, 8, -100, 10]}, tokenizer)
    for mask in ([0, 0, 1, 1, 0, 1], [False, False, True, True, False, True], [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]):
        assert read({"input_ids": IDS, name: mask}, tokenizer) == labels
    assert f"{name} has 5 entries for 6 input_ids" in refused({"input_ids": IDS, name: [1] * 5}, tokenizer)
    for wrong in (0.5, 2, "1", None, [1]):
        assert f"{name}[1] is {wrong!r}" in refused({"input_ids": IDS, name: [1, wrong, 1, 1, 1, 1]}, tokenizer)


@pytest.mark.parametrize(
    ("name", "kept", "left_out"),
    [
        ("labels", [-100, 6, 7, 8, 9, 10], [5, 6, -100, 8, 9, 10]),
        ("completion_mask", [0] + [1] * 5, [1, 1, 0, 1, 1, 1]),
    ],
)
def test_every_token_is_learnt_only_of_rows_that_leave_none_out(name: str, kept, left_out, tokenizer) -> None:
    everything = DataConfig(format="tokens", train_on="all")
    assert read({"input_ids": IDS, name: kept}, tokenizer, everything) == [(IDS, [True] * 6)]
    said = refused({"input_ids": IDS, name: left_out}, tokenizer, everything)
    assert said.startswith(f'{name} leaves tokens out, and data.train_on = "all" learns every token; ')
    ignored = DataConfig(format="tokens", train_on="all", columns=ColumnsConfig(ignore=[name]))
    assert read({"input_ids": IDS, name: left_out}, tokenizer, ignored) == [(IDS, [True] * 6)]


@pytest.mark.parametrize("labels", [[-100, 6], [-100, 7, 8, 9, 10, 5], ["a"] * 6, "[", 3])
def test_labels_that_cannot_be_read_may_be_ignored_where_every_token_is_learnt(labels, tokenizer) -> None:
    row, advice = {"input_ids": IDS, "labels": labels}, ', or set data.columns.ignore = ["labels"]'
    everything = DataConfig(format="tokens", train_on="all")
    assert refused(row, tokenizer, everything) == refused(row, tokenizer) + advice
    ignored = DataConfig(format="tokens", train_on="all", columns=ColumnsConfig(ignore=["labels"]))
    assert read(row, tokenizer, ignored) == [(IDS, [True] * 6)]


def test_transformers_own_mask_gives_the_tokens_of_the_conversation(tokenizer) -> None:
    """Its ``assistant_masks`` of a template with markers, beside ours of the same messages."""
    theirs = tokenizer.apply_chat_template(MULTI, return_dict=True, return_assistant_tokens_mask=True)
    row = {name: theirs[name] for name in ("input_ids", "assistant_masks", "attention_mask")}
    [(ids, learnt)] = read(row, tokenizer)
    expected_ids, expected = encode_chat(MULTI, tokenizer)
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    trimmed = [one and ids[at : at + 1] != newline for at, one in enumerate(learnt)]  # they learn the line break, too
    assert (ids, trimmed) == (expected_ids, [one and ids[at : at + 1] != newline for at, one in enumerate(expected)])
    assert sum(learnt) > 0


def test_masks_that_contradict_each_other_are_refused_and_one_may_be_named(tokenizer) -> None:
    row = {"input_ids": IDS, "labels": [-100, -100, 7, 8, 9, 10], "loss_mask": [1, 0, 1, 1, 1, 1]}
    assert read(row, tokenizer) == [(IDS, [False, False, True, True, True, True])], "the first token is no target"
    other = {**row, "completion_mask": [0, 0, 0, 1, 1, 1]}
    assert "labels says that token 2 is learnt, and completion_mask that it is not" in refused(other, tokenizer)
    named = DataConfig(format="tokens", columns=ColumnsConfig(loss_mask="completion_mask"))
    assert read(other, tokenizer, named) == [(IDS, [False, False, False, True, True, True])]
    labels = DataConfig(format="tokens", columns=ColumnsConfig(labels="labels"))
    assert read(other, tokenizer, labels)[0][1][2:] == [True] * 4
    both = DataConfig(format="tokens", columns=ColumnsConfig(labels="labels", loss_mask="completion_mask"))
    assert "labels says that token 2" in refused(other, tokenizer, both)
    ignored = DataConfig(format="tokens", columns=ColumnsConfig(ignore=["completion_mask"]))
    assert read(other, tokenizer, ignored) == read(row, tokenizer)
    mine = DataConfig(format="tokens", columns=ColumnsConfig(loss_mask="mine"))
    assert read({"input_ids": IDS, "mine": [0, 0, 0, 0, 1, 1]}, tokenizer, mine)[0][1] == [False] * 4 + [True] * 2
    assert "no 'mine'" in refused({"input_ids": IDS}, tokenizer, mine)


def test_a_null_is_a_column_that_the_row_lacks(tokenizer) -> None:
    """Arrow fills in null for missing keys. A column that is named is required."""
    row = {"input_ids": IDS, "labels": None, "loss_mask": None, "position_ids": None}
    assert read(row, tokenizer) == [(IDS, [True] * 6)]
    assert read({**row, "labels": [-100] * 5 + [10]}, tokenizer) == [(IDS, [False] * 5 + [True])]
    for name in ("labels", "loss_mask"):
        named = DataConfig(format="tokens", columns=ColumnsConfig(**{name: name}))  # pyright: ignore[reportArgumentType]
        assert f"the row has no '{name}' (it has: input_ids); say" in refused({"input_ids": IDS}, tokenizer, named)
        assert f"'{name}' is null; fill it in, or drop the row" in refused(row, tokenizer, named)


def packed() -> dict:
    """A row as transformers packs it, with everything that says where its documents begin."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="np")
    batch = collate([{**one, "labels": one.get("labels", one["input_ids"])} for one in THREE])
    return {name: np.asarray(value).flatten().tolist() for name, value in batch.items() if "max_length" not in name}


@pytest.mark.parametrize("kept", ["position_ids", "cu_seq_lens_q", "seq_idx", "all"])
def test_a_row_that_transformers_packed_is_its_documents(kept: str, tokenizer) -> None:
    row = packed()
    row = row if kept == "all" else {name: row[name] for name in ("input_ids", "labels", kept)}
    documents = read(row, tokenizer)
    assert [ids for ids, _ in documents] == [one["input_ids"] for one in THREE]
    alone = [read(one, tokenizer)[0][1] for one in THREE]
    assert [learnt[1:] for _, learnt in documents] == [learnt[1:] for learnt in alone], "a first token is no target"


BORDERS = {
    "seq_lengths": [3, 2, 4],  # TRL
    "seq_lens": [3, 2, 4],  # torchtune
    "input_pos": [0, 1, 2, 0, 1, 0, 1, 2, 3],
    "cu_seqlens": [0, 3, 5, 9, 9],
    "segment_ids": [1, 1, 1, 2, 2, 3, 3, 3, 3],
    "document_ids": [7, 7, 7, 3, 3, 4, 4, 4, 4],
    "attention_mask": [1, 1, 1, 2, 2, 3, 3, 3, 3],  # axolotl
}


@pytest.mark.parametrize("name", BORDERS)
def test_borders_of_every_tool(name: str, tokenizer) -> None:
    ids = [token for one in THREE for token in one["input_ids"]]
    assert [one for one, _ in read({"input_ids": ids, name: BORDERS[name]}, tokenizer)] == [
        one["input_ids"] for one in THREE
    ]
    assert len(read({"input_ids": ids}, tokenizer)) == 1
    ignored = DataConfig(format="tokens", columns=ColumnsConfig(ignore=[name]))
    assert len(read({"input_ids": ids, name: BORDERS[name]}, tokenizer, ignored)) == 1


def test_borders_of_one_document_change_nothing(tokenizer) -> None:
    row = {"input_ids": IDS, "position_ids": [*range(6)], "seq_lengths": [6], "cu_seqlens": [0, 6], "seq_idx": [0] * 6}
    row |= {"attention_mask": [1] * 6, "document_ids": 5, "token_type_ids": [0] * 6}
    assert read(row, tokenizer) == [(IDS, [True] * 6)]


WRONG = {
    "begins later": ({"position_ids": [3, 4, 5, 6, 7, 8]}, "position_ids begins at 3"),
    "gap": ({"position_ids": [0, 1, 2, 4, 5, 6]}, "position_ids goes from 2 to 4 at token 3"),
    "restarts at 1": ({"position_ids": [0, 1, 2, 1, 2, 3]}, "position_ids goes from 2 to 1 at token 3"),
    "of images": ({"position_ids": [[0, 1, 2, 3, 4, 5]] * 3}, "position_ids is a list of lists"),
    "short": ({"position_ids": [0, 1]}, "position_ids has 2 entries for 6 input_ids"),
    "sum": ({"seq_lengths": [3, 2]}, "seq_lengths holds lengths of 5 tokens in all, and input_ids has 6"),
    "negative": ({"seq_lengths": [7, -1]}, "seq_lengths holds lengths"),
    "no zero": ({"cu_seqlens": [3, 6]}, "cu_seqlens does not ascend from 0"),
    "falls": ({"cu_seqlens": [0, 4, 2, 6]}, "cu_seqlens does not ascend from 0"),
    "again": ({"sequence_ids": [0, 0, 1, 1, 0, 0]}, "sequence_ids comes back to document 0"),
    "padded": ({"segment_ids": [1, 1, 2, 2, 0, 0]}, "segment_ids ends in 0 after documents of higher numbers"),
    "names": ({"document_ids": ["a", "a", "b", "b", "c", "c"]}, "document_ids holds 'a'"),
    "two": ({"position_ids": [*range(6)], "seq_lengths": [3, 3]}, "position_ids and seq_lengths differ: by seq_le"),
    "mask": ({"attention_mask": [1, 1]}, "attention_mask has 2 entries for 6 input_ids"),
}


@pytest.mark.parametrize("name", WRONG)
def test_borders_that_cannot_be_read_are_refused(name: str, tokenizer) -> None:
    columns, expected = WRONG[name]
    assert expected in refused({"input_ids": IDS, **columns}, tokenizer)


def test_cells_of_csv_are_json(tmp_path, tokenizer) -> None:
    rows = [row := {"input_ids": IDS, "loss_mask": [0, 0, 1, 1, 0, 1], "seq_lengths": [3, 3]}, row]
    table = datasets.Dataset.from_list([{name: str(value) for name, value in row.items()} for row in rows])
    datasets.disable_progress_bars()
    table.to_csv(str(tmp_path / "a.csv"))
    found, expected = (
        documents_of(tmp_path / "a.csv", tokenizer),
        documents_of(write_rows(tmp_path / "a.jsonl", rows), tokenizer),
    )
    assert found.fingerprint == expected.fingerprint
    assert len(found) == 4


def documents_of(path, tokenizer, **options) -> Documents:
    return build_documents(ChatDataConfig(path=str(path), format="tokens", **options), tokenizer=tokenizer)


def test_packed_rows_train_as_their_documents_do(tmp_path, tokenizer) -> None:
    """From JSONL and from parquet, cut, counted, and named in errors by their row."""
    ids = [token for one in THREE for token in one["input_ids"]]
    row = {"input_ids": ids, "labels": [-100, 6, 7, *ids[3:]], "position_ids": [0, 1, 2, 0, 1, 0, 1, 2, 3]}
    rows = [row, {"input_ids": [20, 21, 22], "labels": [20, 21, 22], "position_ids": [0, 1, 2]}]
    path = write_rows(tmp_path / "packed.jsonl", rows)
    apart = documents_of(write_rows(tmp_path / "apart.jsonl", [*THREE, {"input_ids": [20, 21, 22]}]), tokenizer)
    together = documents_of(path, tokenizer)
    assert together.fingerprint == apart.fingerprint
    assert (together.report.rows, together.report.documents, together.report.tokens) == (2, 4, 12)
    assert together.report.supervised_tokens == apart.report.supervised_tokens == 8
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "packed.parquet"))
    assert documents_of(tmp_path / "packed.parquet", tokenizer).fingerprint == together.fingerprint
    dropped = documents_of(path, tokenizer, seq_len=3, overlong="drop")
    assert (dropped.report.dropped, dropped.lengths.tolist()) == (1, [3, 2, 3])
    split = documents_of(path, tokenizer, seq_len=3, overlong="split").lengths.tolist()
    assert split == [3, 2, 3, 3], "a piece of one token has no target"
    with pytest.raises(UserError, match=r"packed\.jsonl:1: 4 tokens, more than .* \(1 such rows of 4\)"):
        documents_of(path, tokenizer, seq_len=3, overlong="error")


def test_each_document_of_a_packed_row_gets_its_own_positions(tmp_path, tokenizer) -> None:
    from fsdp2kit.data.loader import Share, build_loader

    ids = [token for one in THREE for token in one["input_ids"]]
    path = write_rows(tmp_path / "a.jsonl", [{"input_ids": ids, "seq_lengths": [3, 2, 4]}])
    documents = documents_of(path, tokenizer, seq_len=9)
    loader = build_loader([documents], share=Share(9, 1, 1, 0, 1, 0), pack=True, seed=0, shuffle=False)
    [batch] = loader.batch(0)
    assert sorted(batch.position_ids[0].tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 3]
    assert (batch.labels[0] != -100).sum() == 6, "no document's first token is a target"


def test_a_row_of_tokens_is_held_out_whole(tokenizer) -> None:
    from fsdp2kit.data.tables import encode_table

    rows = [Row({"input_ids": [at, at + 1, at + 2], "position_ids": [0, 0, 1]}, f"x:{at}") for at in range(50)]
    table = encode_table(rows, TOKENS, tokenizer)
    assert table["is_first"].to_pylist() == [True, False] * 50
    keys = table["key"].to_numpy().reshape(50, 2)
    assert (keys[:, 0] == keys[:, 1]).all()
    assert len(encode_rows(rows, TOKENS, tokenizer)) == 100


@pytest.mark.parametrize("name", ["targets", "target", "label_ids", "sft_mask", "is_target"])
def test_other_names_of_what_is_learnt_are_refused(name: str) -> None:
    row = Row({"input_ids": [5, 6, 7], name: [-100, 6, 7]}, "x.jsonl:1")
    with pytest.raises(UserError, match=f"^x.jsonl:1: '?{name}"):
        encode_rows([row], DataConfig(format="tokens"), make_tokenizer(None))
