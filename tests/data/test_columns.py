"""Columns that other tools read: each is read, refused by its name, or passed over and named at the start."""

from __future__ import annotations

import json

import pytest

from fsdp2kit.config.data_formats import COLUMNS
from fsdp2kit.config.schema import ColumnsConfig, DataConfig
from fsdp2kit.data.columns import read_columns, row_key
from fsdp2kit.data.formats.chat import read_chat
from fsdp2kit.data.names import REFUSED
from fsdp2kit.data.rows import Row
from fsdp2kit.data.tokens import encode_prompts, encode_rows
from fsdp2kit.data.unread import check_unread
from fsdp2kit.errors import UserError
from tests.data.helpers import templates
from tests.data.helpers.families import MULTI, SINGLE, TOOL, talk_for, tokenizer_of
from tests.data.helpers.templates import make_tokenizer

TALK = talk_for("qwen25")
NO = {"role": "assistant", "content": "No."}
ROWS = {
    "chat": {"messages": SINGLE},
    "prompt_completion": {"prompt": "Is water wet?", "completion": " Yes."},
    "alpaca": {"instruction": "Is water wet?", "output": "Yes."},
    "text": {"text": "Water is wet."},
    "tokens": {"input_ids": [5, 6, 7]},
    "preference": {"prompt": SINGLE[:1], "chosen": SINGLE[1:], "rejected": [NO]},
}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("qwen25")


def encode(kind: str, columns: dict, tokenizer, **named) -> list:
    how = DataConfig(format=kind, columns=ColumnsConfig(**named))  # pyright: ignore[reportArgumentType]
    row = Row({**ROWS.get(kind, {"prompt": SINGLE[:1]}), **columns}, "x.jsonl:1")
    return encode_prompts([row], how, tokenizer) if kind == "prompts" else encode_rows([row], how, tokenizer)


def refused(kind: str, columns: dict, tokenizer) -> str:
    with pytest.raises(UserError) as caught:
        encode(kind, columns, tokenizer)
    assert caught.value.where == "x.jsonl:1"
    return f"{caught.value.what}; {caught.value.todo}"


MEANT = [
    ("chat", {"weight": 0}, "'weight' is a weight in the loss"),
    ("text", {"sample_weight": 0.5}, "'sample_weight' is a weight in the loss"),
    ("prompt_completion", {"weight": "2.0"}, "'weight' is a weight in the loss"),
    ("tokens", {"loss_scale": 3.0}, "'loss_scale' is a weight in the loss"),
    ("prompt_completion", {"completion_mask": [0, 1]}, "only the formats tokens and chat read it"),
    ("text", {"loss_mask": [0, 1]}, "only the formats tokens and chat read it"),
    ("prompt_completion", {"label": False}, "says that the answer is bad"),
    ("prompt_completion", {"label": 0}, "the completion is bad"),
    ("chat", {"label": False}, "says that the answer is bad"),
    ("alpaca", {"kto_tag": "false"}, "says that the answer is bad"),
    ("chat", {"train": False}, "says that the row is not learnt"),
    ("preference", {"margin": 0.3}, "is a margin between the two answers"),
    ("tokens", {"prompt_mask": [1, 0, 0]}, "tools read in opposite ways; write loss_mask"),
    ("tokens", {"prompt_length": 2}, "says where the prompt ends"),
    ("tokens", {"completion_ids": [7]}, "all tokens of input_ids would be"),
    ("tokens", {"token_type_ids": [0, 0, 1]}, "holds other types than 0"),
    ("tokens", {"pixel_values": [[0.5]]}, "only text is trained"),
    ("tokens", {"images": ["a.png"]}, "only text is trained"),
    ("chat", {"image_path": "a.png"}, "only text is trained"),
    ("chat", {"available_tools": [TOOL]}, 'set data.columns.tools = "available_tools"'),
    ("chat", {"system_prompt": "Be brief."}, "which the conversation would lack; rename it to system"),
    ("prompts", {"system_prompt": "Be brief."}, "which the conversation would lack"),
    ("preference", {"history": [["a", "b"]]}, "holds turns before the prompt"),
    ("prompt_completion", {"history": [["a", "b"]]}, "holds turns before the prompt"),
    ("prompt_completion", {"context": "It rains."}, "is a part of the question that the prompt lacks"),
    ("alpaca", {"context": "It rains."}, 'set data.columns.input = "context"'),
    ("chat", {"chat_template": "{{ messages }}"}, "one template renders all rows"),
    # Near misses of what is read.
    ("tokens", {"completion_masks": [0, 0, 1]}, "'completion_masks' is not read; did you mean 'completion_mask'?"),
    ("tokens", {"Labels": [-100, 6, 7]}, "did you mean 'labels'?"),
    ("tokens", {"positions_ids": [0, 1, 0]}, "did you mean 'position_ids'?"),
    ("chat", {"loss_maks": [0, 1]}, "did you mean 'loss_mask'?"),
    ("chat", {"Tools": [TOOL]}, "did you mean 'tools'?"),
    ("chat", {"chat_template_kwarg": {"enable_thinking": False}}, "did you mean 'chat_template_kwargs'?"),
    ("alpaca", {"Input": "It rains."}, "did you mean 'input'?"),
    ("chat", {"System": "Be brief."}, "did you mean 'system'?"),
]


@pytest.mark.parametrize(("kind", "columns", "expected"), MEANT)
def test_what_would_change_what_is_learnt_is_refused_by_name(kind: str, columns: dict, expected: str, tokenizer):
    said = refused(kind, columns, tokenizer)
    assert expected in said
    [name] = columns
    assert f'data.columns.ignore = ["{name}"]' in said
    ignored = encode(kind, columns, tokenizer, ignore=[name])
    plain = encode(kind, {}, tokenizer)
    if kind == "prompts":  # rewards get the column
        assert [one.ids for one in ignored] == [one.ids for one in plain]
    else:
        assert ignored == plain


METADATA = {"id": "x-1", "source": "web", "score": 0.3, "url": "https://a", "lang": "en", "split": "train"}
METADATA |= {"timestamp": 3, "label": 7, "length": 3, "reward": 0.0, "is_correct": False, "meta": {"a": 1}, "row": 0}
METADATA |= {"tool": "search", "score_chosen": 9.0, "num_tokens": 3, "document_id": 5, "lengths": None, "weight": 1}
METADATA |= {"sample_weight": None, "history": [], "tools": [], "images": [], "chat_template_kwargs": {}, "seq_len": 3}


@pytest.mark.parametrize("kind", ROWS)
def test_metadata_stops_no_run_and_is_named(kind: str, tokenizer) -> None:
    assert encode(kind, METADATA, tokenizer) == encode(kind, {}, tokenizer)
    how = DataConfig(format=kind)  # pyright: ignore[reportArgumentType]
    [row] = read_columns([Row({**ROWS[kind], **METADATA}, "x")], how)
    unread = check_unread(row, frozenset())
    assert {"id", "source", "label", "weight"} <= {*unread}
    assert not {"lengths", "sample_weight", "tools", "images", *ROWS[kind]} & {*unread}, "what is empty is not named"


def test_what_is_settled_otherwise_is_no_contradiction(tokenizer) -> None:
    """A named column, one that the row has as well, a text that the prompt holds already."""
    plain = encode("chat", {}, tokenizer)
    with_tools = encode("chat", {"messages": TALK, "tools": [TOOL]}, tokenizer)
    assert encode("chat", {"messages": TALK, "tools": [TOOL], "available_tools": [TOOL]}, tokenizer) == with_tools
    system = [{"role": "system", "content": "Be brief."}, *SINGLE]
    begun = encode("chat", {"messages": system}, tokenizer)
    assert encode("chat", {"messages": system, "system_prompt": "Be brief."}, tokenizer) == begun
    assert encode("chat", {"label": True, "weight": 1.0, "train": True}, tokenizer) == plain
    asked = {"prompt": "It rains. Wet?", "completion": " Yes."}
    expected = encode("prompt_completion", asked, tokenizer)
    assert encode("prompt_completion", {**asked, "context": "It rains.", "input": "Wet?"}, tokenizer) == expected
    tokens = {"labels": [-100, -100, 7]}
    expected = encode("tokens", tokens, tokenizer)
    assert encode("tokens", {**tokens, "prompt_length": 2, "prompt_mask": [1, 1, 0]}, tokenizer) == expected


def test_variables_of_the_template_are_refused_as_columns() -> None:
    template = "{% if enable_thinking is defined and not enable_thinking %}QUICK{% endif %}" + templates.CHATML
    tokenizer = make_tokenizer(template)
    what = "'enable_thinking' is also a variable of the chat template, which is not given it"
    assert what in refused("chat", {"enable_thinking": False}, tokenizer)
    given = encode("chat", {"chat_template_kwargs": {"enable_thinking": False}}, tokenizer)
    both = {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": False}
    assert encode("chat", both, tokenizer) == given != encode("chat", {}, tokenizer)
    other = {"documents": [{"title": "a"}], "enable_thinking": None}
    assert encode("chat", other, tokenizer) == encode("chat", {}, tokenizer), "this template takes no documents"
    # Templates set variables of their own, and a plain text is not rendered.
    row = {"message": "x", "content": "y", "role": "z", "namespace": 1}
    assert encode("chat", row, tokenizer) == encode("chat", {}, tokenizer)
    assert encode("prompt_completion", {"enable_thinking": True}, tokenizer)


def test_functions_are_the_tools(tokenizer) -> None:
    """OpenAI's former name, with schemas or their JSON, in every format that reads tools."""
    legacy = TOOL["function"]
    forms = ([legacy], json.dumps([legacy]), [json.dumps(legacy)], [TOOL], legacy, json.dumps(legacy))
    for kind, row in (
        ("chat", {"messages": TALK}),
        ("preference", {}),
        ("prompts", {}),
        ("alpaca", {}),
        ("prompt_completion", {"prompt": SINGLE[:1], "completion": SINGLE[1:]}),
    ):
        tools = encode(kind, {**row, "tools": [TOOL]}, tokenizer)
        ids = [one.ids if kind == "prompts" else one[0] for one in tools]
        assert "<tools>" in tokenizer.decode(ids[0])
        for form in forms:
            found = encode(kind, {**row, "functions": form}, tokenizer)
            assert [one.ids if kind == "prompts" else one[0] for one in found] == ids
        assert [one.ids if kind == "prompts" else one[0] for one in encode(kind, {**row, "functions": []}, tokenizer)]
    assert encode("prompt_completion", {"functions": "[]", "tools": []}, tokenizer)
    for name, tools in (("functions", [legacy]), ("tools", json.dumps([TOOL]))):
        said = refused("prompt_completion", {name: tools}, tokenizer)
        assert "the row has tools, and its prompt is a plain text" in said
    both = {"messages": TALK, "tools": [TOOL], "functions": [legacy]}
    assert encode("chat", both, tokenizer) == encode("chat", {"messages": TALK, "tools": [TOOL]}, tokenizer)
    differ = {**both, "functions": [{**legacy, "name": "other"}]}
    assert "'tools' and 'functions', which differ" in refused("chat", differ, tokenizer)
    named = encode("chat", differ, tokenizer, tools="tools")
    assert named == encode("chat", both, tokenizer)
    for wrong, said in (
        ("call them", "functions is not valid JSON"),
        ([{"description": "x"}], "functions[0] is no schema with a name"),
        (["x"], "functions[0] is not valid JSON"),
        (5, "functions is of type int"),
    ):
        assert said in refused("chat", {"messages": TALK, "functions": wrong}, tokenizer)


def test_a_list_beside_the_messages_is_one_flag_for_each(tokenizer) -> None:
    """What a message's ``loss_mask`` does is tested with the messages' fields."""

    def flags(row: dict, **named) -> list:
        how = DataConfig(format="chat", columns=ColumnsConfig(**named))
        [columns] = read_columns([Row({"messages": MULTI, **row}, "x.jsonl:1")], how)
        [said] = read_chat(columns)
        return [message.get("loss_mask") for message in said.messages]

    assert flags({"loss_mask": [0, 1, 0, 0]}) == [0, 1, 0, 0]
    assert flags({"loss_mask": "[0, 1, 0, 0]"}) == [0, 1, 0, 0]
    assert flags({"assistant_masks": [False, True, False, True]}) == [0, 1, 0, 1]
    assert flags({"mine": [0, 1, 0, 0], "loss_mask": [1] * 4}, loss_mask="mine") == [0, 1, 0, 0]
    assert flags({"loss_mask": [0, 1]}, ignore=["loss_mask"]) == [None] * 4
    said = refused("chat", {"messages": MULTI, "loss_mask": [0, 1], "input_ids": [5, 6]}, tokenizer)
    assert "loss_mask has 2 entries for 4 messages" in said
    assert 'data.format = "tokens"' in said
    assert "loss_mask[1] is 0.5" in refused("chat", {"messages": MULTI, "loss_mask": [0, 0.5, 0, 1]}, tokenizer)
    assert "loss_mask is of type int" in refused("chat", {"messages": MULTI, "loss_mask": 0}, tokenizer)
    differ = [{**message, "loss_mask": 1} for message in MULTI]
    said = refused("chat", {"messages": differ, "loss_mask": [1, 0, 1, 1]}, tokenizer)
    assert "loss_mask[1] is 0, and messages[1] has loss_mask = 1" in said
    both = {"messages": MULTI, "loss_mask": [1, 0, 1, 1], "train_mask": [1, 1, 1, 1]}
    assert "train_mask[1] is 1, and messages[1] has loss_mask = 0" in refused("chat", both, tokenizer)


def test_what_is_ignored_is_not_read_even_if_the_format_would(tokenizer) -> None:
    row = {"system": "Be brief.", "images": ["a.png"], "functions": "call them", "tools": [TOOL], "loss_mask": 3}
    assert encode("chat", row, tokenizer, ignore=[*row]) == encode("chat", {}, tokenizer)
    with pytest.raises(UserError, match="no 'messages'"):
        encode("chat", {}, tokenizer, ignore=["messages"])
    how = DataConfig(format="prompts", columns=ColumnsConfig(ignore=["system_prompt"]))
    [prompt] = encode_prompts([Row({"prompt": "Wet?", "system_prompt": "Be brief."}, "x")], how, tokenizer)
    assert prompt.row["system_prompt"] == "Be brief.", "rewards get it"


def test_masks_do_not_change_on_which_side_a_row_is_held_out() -> None:
    for kind in ("chat", "tokens"):
        how = DataConfig(format=kind)
        row = {"messages": SINGLE, "input_ids": [5, 6]}
        assert row_key({**row, "loss_mask": [0, 1], "functions": []}, how) == row_key(row, how)


def test_the_table_names_formats_that_exist_and_no_column_that_is_read() -> None:
    for one in REFUSED:
        assert {*one.formats} <= {*COLUMNS}
        for kind in one.formats:
            assert not {*one.names} & {*COLUMNS[kind]}, one.names
