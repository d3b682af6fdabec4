"""Every format's columns become the tokens that are meant, and what is malformed names its row."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from fsdp2kit.config.schema import ChatDataConfig, ColumnsConfig
from fsdp2kit.data.documents import build_documents
from fsdp2kit.data.formats import RowFormat, encode_preferences, encode_rows
from fsdp2kit.data.rows import Row
from fsdp2kit.errors import UserError
from tests.data import families, templates
from tests.data.families import ANSWER, MULTI, SECOND, SINGLE, TOOLS, WITH_TOOLS
from tests.data.templates import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(families.TOOL_CALLING.source(marked=False))


def learnt(row: dict, tokenizer, how: RowFormat) -> tuple[str, str]:
    """The whole row and what is learnt of it, as text."""
    [(ids, mask)] = encode_rows([Row(row, "x.jsonl:1")], how, tokenizer)
    return tokenizer.decode(ids), tokenizer.decode([token for token, learn in zip(ids, mask, strict=True) if learn])


def refused(row: dict, tokenizer, how: RowFormat) -> str:
    with pytest.raises(UserError) as caught:
        encode_rows([Row(row, "x.jsonl:1")], how, tokenizer)
    assert caught.value.where == "x.jsonl:1"
    return caught.value.what


def test_sharegpt_conversations(tokenizer) -> None:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    rows = [{"role": "system", "content": "Be brief."}, *MULTI]
    sharegpt = [{"from": names[message["role"]], "value": message["content"]} for message in rows]
    expected = learnt({"messages": rows}, tokenizer, RowFormat("chat"))
    assert learnt({"conversations": sharegpt}, tokenizer, RowFormat("chat")) == expected
    mapped = RowFormat("chat", ColumnsConfig(messages="dialog"))
    assert learnt({"dialog": sharegpt}, tokenizer, mapped) == expected
    assert expected[1] == f"{ANSWER}<|im_end|>{SECOND}<|im_end|>"


def test_tools_as_a_list_or_as_json(tokenizer) -> None:
    whole, mine = learnt({"messages": WITH_TOOLS, "tools": TOOLS}, tokenizer, RowFormat("chat"))
    assert "<tools>" in whole
    assert mine.startswith("<tool_call>")
    as_text = {"messages": WITH_TOOLS, "functions": json.dumps(TOOLS)}
    assert learnt(as_text, tokenizer, RowFormat("chat", ColumnsConfig(tools="functions"))) == (whole, mine)
    assert "not valid JSON" in refused({"messages": SINGLE, "tools": "{"}, tokenizer, RowFormat("chat"))


def test_variables_for_the_template() -> None:
    template = "{% if shout %}LOUD{% endif %}" + templates.CHATML
    row = {"messages": SINGLE, "chat_template_kwargs": {"shout": True}}
    assert learnt(row, make_tokenizer(template), RowFormat("chat"))[0].startswith("LOUD")
    assert "no object" in refused({**row, "chat_template_kwargs": "x"}, make_tokenizer(template), RowFormat("chat"))


def test_a_prompt_and_its_completion_as_text(tokenizer) -> None:
    row = {"prompt": "Is water wet?", "completion": " Yes."}
    whole, mine = learnt(row, tokenizer, RowFormat("prompt_completion"))
    assert (whole, mine) == ("<|begin|>Is water wet? Yes.<|im_end|>", " Yes.<|im_end|>")
    assert learnt(row, tokenizer, RowFormat("prompt_completion", train_on="all"))[1] == whole
    mapped = RowFormat("prompt_completion", ColumnsConfig(prompt="q", completion="a"))
    assert learnt({"q": "Is water wet?", "a": " Yes."}, tokenizer, mapped) == (whole, mine)
    assert "no 'completion'" in refused({"prompt": "x"}, tokenizer, RowFormat("prompt_completion"))


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_a_prompt_of_messages_is_not_learnt_even_the_assistants(marked: bool) -> None:
    tokenizer = make_tokenizer(families.CHATML.source(marked=marked))
    row = {"prompt": MULTI[:3], "completion": MULTI[3:]}
    whole, mine = learnt(row, tokenizer, RowFormat("prompt_completion"))
    assert whole == tokenizer.apply_chat_template(MULTI, tokenize=False)
    assert mine == f"{SECOND}<|im_end|>"
    mixed = {"prompt": "x", "completion": MULTI[3:]}
    assert "a text and a list" in refused(mixed, tokenizer, RowFormat("prompt_completion"))


def test_tokens_as_they_are(tokenizer) -> None:
    how = RowFormat("tokens")
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]}
    assert encode_rows([Row(row, "x")], how, tokenizer) == [([5, 6, 7, 8], [False, True, False, True])]
    assert encode_rows([Row({"input_ids": [5, 6]}, "x")], how, tokenizer) == [([5, 6], [True, True])]
    assert "labels[1] is 7" in refused({"input_ids": [5, 6], "labels": [5, 7]}, tokenizer, how)
    assert "1 labels for 2" in refused({"input_ids": [5, 6], "labels": [5]}, tokenizer, how)
    assert "holds '6'" in refused({"input_ids": [5, "6"]}, tokenizer, how)
    assert "holds -1" in refused({"input_ids": [5, -1]}, tokenizer, how)
    assert "of type str" in refused({"input_ids": "5 6"}, tokenizer, how)
    assert "padded" in refused({"input_ids": [5, 6], "attention_mask": [1, 0]}, tokenizer, how)


def test_preferences(tokenizer) -> None:
    how = RowFormat("preference")
    implicit = {"chosen": MULTI, "rejected": [*MULTI[:3], {"role": "assistant", "content": "No."}]}
    explicit = {"prompt": MULTI[:3], "chosen": MULTI[3:], "rejected": [{"role": "assistant", "content": "No."}]}
    pairs = encode_preferences([Row(implicit, "a"), Row(explicit, "b")], how, tokenizer)
    assert pairs[0] == pairs[1]
    for side, answer in ((pairs[0].chosen, SECOND), (pairs[0].rejected, "No.")):
        ids, mask = side
        text = tokenizer.decode([token for token, learn in zip(ids, mask, strict=True) if learn])
        assert text == f"{answer}<|im_end|>"
    texts = {"prompt": "Wet?", "chosen": " Yes", "rejected": " No"}
    [text] = encode_preferences([Row(texts, "c")], how, tokenizer)
    assert tokenizer.decode(text.rejected[0]) == "<|begin|>Wet? No<|im_end|>"
    with pytest.raises(UserError, match="share no prompt"):
        encode_preferences([Row({"chosen": SINGLE, "rejected": MULTI[2:]}, "d")], how, tokenizer)


def documents_of(path: str, **options):
    tokenizer = make_tokenizer(templates.MARKED_WIDE)
    extra = {name: options.pop(name) for name in ("key",) if name in options}
    return build_documents(ChatDataConfig(path=path, **options), tokenizer=tokenizer, **extra)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_files_behind_a_url(suffix: str, tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    local = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        datasets.Dataset.from_list([{"messages": SINGLE}, {"messages": MULTI}]).to_parquet(str(local))
    else:
        with fsspec.open(str(local), "wb", compression="infer") as file:
            file.write("".join(json.dumps({"messages": one}) + "\n" for one in (SINGLE, MULTI)).encode())
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/bucket/data/train-0.{suffix}", local.read_bytes())
    expected = documents_of(str(local)).fingerprint
    for url in (f"memory://bucket/data/train-0.{suffix}", "memory://bucket/data", f"memory://bucket/*/*.{suffix}"):
        assert documents_of(url).fingerprint == expected, url
    memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("memory://bucket/missing.jsonl", "data.path: memory://bucket/missing.jsonl: no such file or folder"),
        ("memory://bucket/*.jsonl", "matches no file"),
        ("nosuch://bucket/a.jsonl", "cannot be opened"),
    ],
)
def test_urls_that_lead_nowhere(url: str, what: str) -> None:
    with pytest.raises(UserError, match=what.replace("*", r"\*")):
        documents_of(url)


def test_the_key_that_named_the_data_is_named() -> None:
    with pytest.raises(UserError, match=r"^eval\.path: /missing\.jsonl: no such file"):
        documents_of("/missing.jsonl", key="eval.path")


@pytest.mark.parametrize("cell", ["NA", "null", "", "None", "nan", "1"])
def test_cells_of_a_csv_are_text(cell: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f'prompt,completion\n"Is it\nwet?",{cell or chr(34) * 2}\n')
    documents = documents_of(str(tmp_path / "a.csv"), format="prompt_completion")
    ids, mask = documents[0]
    assert make_tokenizer(None).decode(ids[mask]) == f"{cell}<|im_end|>"


def test_rows_of_a_csv_are_named_by_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,completion\n"Is it\nwet?",yes\na,b,c\n')
    with pytest.raises(UserError, match=r"a\.csv:4: 3 cells, but the header names 2 columns"):
        documents_of(str(tmp_path / "a.csv"), format="prompt_completion")


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    good = json.dumps({"messages": [SINGLE[0], {"role": "assistant", "content": "🌊"}]})
    (tmp_path / "a.jsonl").write_text(good + "\n" + good.replace("\\ud83c\\udf0a", "\\ud83c") + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl:2: holds \\ud83c, half of a surrogate pair"):
        documents_of(str(tmp_path / "a.jsonl"))


def test_rows_of_parquet_are_named_by_their_file(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    for number, rows in enumerate(([{"text": "a"}] * 3, [{"text": "b"}, {"text": None}])):
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / f"{number}.parquet"))
    with pytest.raises(UserError, match=r"1\.parquet: row 1: the row has no 'text'"):
        documents_of(str(tmp_path / "*.parquet"), format="text")
