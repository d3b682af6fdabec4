"""Every format's columns become the tokens that are meant, and what is malformed names its row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fsdp2kit.config.schema import ChatDataConfig, ColumnsConfig, DataConfig
from fsdp2kit.data import tables
from fsdp2kit.data.columns import RowColumns, read_columns, row_key
from fsdp2kit.data.documents import build_documents
from fsdp2kit.data.formats.table import looks_unwrapped
from fsdp2kit.data.held_out import key_border
from fsdp2kit.data.json_texts import load_json
from fsdp2kit.data.rows import Row, first_rows
from fsdp2kit.data.tokens import encode_prompts, encode_rows
from fsdp2kit.errors import UserError
from tests.data.helpers import templates
from tests.data.helpers.families import ANSWER, MULTI, SECOND, SINGLE, TOOL, talk_for, tokenizer_of
from tests.data.helpers.templates import learnt_text, make_tokenizer

TALK = talk_for("qwen25")
CHAT, COMPLETION = DataConfig(format="chat"), DataConfig(format="prompt_completion")


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("qwen25")


def learnt(row: dict, tokenizer, how: DataConfig) -> tuple[str, str]:
    """The whole row and what is learnt of it, as text."""
    [(ids, mask)] = encode_rows([Row(row, "x.jsonl:1")], how, tokenizer)
    return tokenizer.decode(ids), learnt_text(tokenizer, ids, mask)


def read(row: dict, how: DataConfig) -> RowColumns:
    [columns] = read_columns([Row(row, "x")], how)
    return columns


def refused(row: dict, tokenizer, how: DataConfig) -> str:
    with pytest.raises(UserError) as caught:
        encode_rows([Row(row, "x.jsonl:1")], how, tokenizer)
    assert caught.value.where == "x.jsonl:1"
    return caught.value.what


def test_sharegpt_conversations(tokenizer) -> None:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    rows = [{"role": "system", "content": "Be brief."}, *MULTI]
    sharegpt = [{"from": names[message["role"]], "value": message["content"]} for message in rows]
    expected = learnt({"messages": rows}, tokenizer, CHAT)
    assert learnt({"conversations": sharegpt}, tokenizer, CHAT) == expected
    mapped = DataConfig(format="chat", columns=ColumnsConfig(messages="dialog"))
    assert learnt({"dialog": sharegpt}, tokenizer, mapped) == expected
    assert expected[1] == f"{ANSWER}<|im_end|>{SECOND}<|im_end|>"


def test_tools_as_a_list_or_as_json(tokenizer) -> None:
    whole, mine = learnt({"messages": TALK, "tools": [TOOL]}, tokenizer, CHAT)
    assert "<tools>" in whole
    assert mine.startswith("<tool_call>")
    as_text = {"messages": TALK, "functions": json.dumps([TOOL])}
    assert learnt(as_text, tokenizer, DataConfig(format="chat", columns=ColumnsConfig(tools="functions"))) == (
        whole,
        mine,
    )
    assert "not valid JSON" in refused({"messages": SINGLE, "tools": "{"}, tokenizer, CHAT)


def test_variables_for_the_template() -> None:
    template = "{% if shout %}LOUD{% endif %}" + templates.CHATML
    row = {"messages": SINGLE, "chat_template_kwargs": {"shout": True}}
    assert learnt(row, make_tokenizer(template), CHAT)[0].startswith("LOUD")
    assert "no object" in refused({**row, "chat_template_kwargs": "x"}, make_tokenizer(template), CHAT)


def test_a_prompt_and_its_completion_as_text(tokenizer) -> None:
    row = {"prompt": "Is water wet?", "completion": " Yes."}
    whole, mine = learnt(row, tokenizer, COMPLETION)
    assert (whole, mine) == ("<|begin|>Is water wet? Yes.<|im_end|>", " Yes.<|im_end|>")
    assert learnt(row, tokenizer, DataConfig(format="prompt_completion", train_on="all"))[1] == whole
    mapped = DataConfig(format="prompt_completion", columns=ColumnsConfig(prompt="q", completion="a"))
    assert learnt({"q": "Is water wet?", "a": " Yes."}, tokenizer, mapped) == (whole, mine)
    assert "no 'completion'" in refused({"prompt": "x"}, tokenizer, COMPLETION)


@pytest.mark.parametrize("cell", ['""', '" "'])
def test_an_empty_completion_is_refused(cell: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f'prompt,completion\n"Is it\nwet?",{cell}\n')
    with pytest.raises(UserError, match=r"a\.csv:2: the completion is empty, .*; drop the row"):
        documents_of(str(tmp_path / "a.csv"), format="prompt_completion")


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_a_prompt_of_messages_is_not_learnt_even_the_assistants(marked: bool) -> None:
    tokenizer = tokenizer_of("hermes", marked=marked)
    row = {"prompt": MULTI[:3], "completion": MULTI[3:]}
    whole, mine = learnt(row, tokenizer, COMPLETION)
    assert whole == tokenizer.apply_chat_template(MULTI, tokenize=False)
    assert mine == f"{SECOND}<|im_end|>"
    mixed = {"prompt": "x", "completion": MULTI[3:]}
    assert "a text and a list" in refused(mixed, tokenizer, COMPLETION)


def test_a_prompt_that_is_rendered_otherwise_alone_is_no_reason_to_learn_nothing() -> None:
    """Where a template ends every text with a token, or drops the reasoning of all but the last answer."""
    ending = make_tokenizer(templates.ENDED, eos="</s>")
    row = {"prompt": SINGLE[:1], "completion": [{"role": "assistant", "content": "b c"}]}
    assert learnt(row, ending, COMPLETION)[1] == " b c</s>"
    qwen = tokenizer_of("qwen3", marked=True)
    thought = {"role": "assistant", "content": "a", "reasoning_content": "think " * 30}
    row = {"prompt": [SINGLE[0], thought, MULTI[2]], "completion": MULTI[3:]}
    assert learnt(row, qwen, COMPLETION)[1] == f"<think>\n\n</think>\n\n{SECOND}<|im_end|>"
    sides = {name: [SINGLE[0], thought, MULTI[2], {**NO, "content": name}] for name in ("chosen", "rejected")}
    assert [mine for _, mine in pair_of(sides, qwen)] == [f"<think>\n\n</think>\n\n{name}<|im_end|>" for name in sides]


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_plain_prompts_are_wrapped_in_the_chat_template(marked: bool) -> None:
    tokenizer = tokenizer_of("hermes", marked=marked)
    row, how = {"prompt": "Is water wet?", "completion": "Yes."}, DataConfig(format="prompt_completion", wrap="chat")
    messages = [{"role": "user", "content": "Is water wet?"}, {"role": "assistant", "content": "Yes."}]
    whole, mine = learnt(row, tokenizer, how)
    assert (whole, mine) == (tokenizer.apply_chat_template(messages, tokenize=False), "Yes.<|im_end|>")
    assert learnt({"prompt": messages[:1], "completion": "Yes."}, tokenizer, how) == (whole, mine)
    everything = DataConfig(format="prompt_completion", train_on="all", wrap="chat")
    assert learnt(row, tokenizer, everything) == (whole, whole)
    better, _ = encode_rows(
        [Row({"prompt": "Is water wet?", "chosen": "Yes.", "rejected": "No."}, "x")],
        DataConfig(format="preference", wrap="chat"),
        tokenizer,
    )
    assert tokenizer.decode(better[0]) == whole
    with pytest.raises(UserError, match="has no chat template"):
        encode_rows([Row(row, "x")], how, make_tokenizer(None))


def test_a_text_that_only_looks_like_messages_is_no_mistake_where_it_comes_first() -> None:
    """Behind a text, messages in JSON are an answer like any other text, whatever they hold."""
    answer = '[{"role": "user", "role": "assistant", "content": "x"}]'
    row = {"prompt": "Write JSON", "completion": answer}
    section = DataConfig(format="prompt_completion")
    assert not looks_unwrapped(read(row, section), make_tokenizer(templates.CHATML))


def test_what_looks_unwrapped() -> None:
    tokenizer, plain = make_tokenizer(templates.CHATML), COMPLETION
    row = {"prompt": "Is water wet?", "completion": "Yes."}
    assert looks_unwrapped(read(row, plain), tokenizer)
    assert not looks_unwrapped(read(row, plain), make_tokenizer(None))
    assert not looks_unwrapped(read(row, DataConfig(format="prompt_completion", wrap="chat")), tokenizer)
    rendered = tokenizer.apply_chat_template(SINGLE[:1], tokenize=False, add_generation_prompt=True)
    assert not looks_unwrapped(read({"prompt": rendered, "completion": "Yes."}, plain), tokenizer)
    assert not looks_unwrapped(read({"prompt": SINGLE[:1], "completion": SINGLE[1:]}, plain), tokenizer)
    pairs = DataConfig(format="preference")
    assert looks_unwrapped(read({"chosen": "Wet? Yes", "rejected": "Wet? No"}, pairs), tokenizer)
    assert not looks_unwrapped(read({"prompt": "Wet?", "chosen": SINGLE, "rejected": SINGLE}, pairs), tokenizer)


def test_alpaca_rows_are_conversations(tokenizer) -> None:
    how = DataConfig(format="alpaca")
    row = {"instruction": "Answer.", "input": "Is water wet?", "output": "Yes."}
    user = {"role": "user", "content": "Answer.\n\nIs water wet?"}
    answer = {"role": "assistant", "content": "Yes."}
    expected = learnt({"messages": [user, answer]}, tokenizer, CHAT)
    assert learnt(row, tokenizer, how) == expected
    named = DataConfig(format="alpaca", columns=ColumnsConfig(instruction="task", input="context", output="response"))
    assert learnt({"task": "Answer.", "context": "Is water wet?", "response": "Yes."}, tokenizer, named) == expected
    short = learnt({"messages": [{"role": "user", "content": "Answer."}, answer]}, tokenizer, CHAT)
    for without in ({}, {"input": ""}, {"input": None}):
        assert learnt({"instruction": "Answer.", "output": "Yes.", **without}, tokenizer, how) == short
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    whole = [system, first, {"role": "assistant", "content": "Hi"}, user, answer]
    extended = {**row, "system": "Be brief.", "history": [["Hello", "Hi"]]}
    assert learnt(extended, tokenizer, how) == learnt({"messages": whole}, tokenizer, CHAT)
    assert "no 'output'" in refused({"instruction": "Answer."}, tokenizer, how)
    assert "history" in refused({**row, "history": ["Hello"]}, tokenizer, how)


def test_a_system_prompt_in_a_column_of_its_own(tokenizer) -> None:
    """As in published ShareGPT and preference data, whatever the format."""
    said, system = "Be brief.", {"role": "system", "content": "Be brief."}
    expected = learnt({"messages": [system, *MULTI]}, tokenizer, CHAT)
    assert learnt({"messages": MULTI, "system": said}, tokenizer, CHAT) == expected
    assert learnt({"messages": [system, *MULTI], "system": said}, tokenizer, CHAT) == expected
    for nothing in (None, ""):
        row = {"messages": [system, *MULTI], "system": nothing}
        assert learnt(row, tokenizer, CHAT) == expected
    pair = {"prompt": MULTI[:-1], "completion": MULTI[-1:]}
    last = learnt({**pair, "prompt": [system, *pair["prompt"]]}, tokenizer, COMPLETION)
    assert learnt({**pair, "system": said}, tokenizer, COMPLETION) == last
    preference = DataConfig(format="preference")
    answers = {"chosen": MULTI[-1:], "rejected": [{"role": "assistant", "content": "No."}]}
    found, other = (
        encode_rows([Row({**row, **answers}, "x")], preference, tokenizer)
        for row in ({"prompt": MULTI[:-1], "system": said}, {"prompt": [system, *MULTI[:-1]]})
    )
    assert found == other
    assert said in tokenizer.decode(found[1][0])
    asked = DataConfig(format="prompts")
    for row in ({"prompt": "Wet?"}, {"messages": SINGLE}):
        prompts = [encode_prompts([Row({**row, "system": one}, "x")], asked, tokenizer)[0] for one in (said, None)]
        assert said in tokenizer.decode(prompts[0].ids)
        assert said not in tokenizer.decode(prompts[1].ids)

    different = {"messages": [{**system, "content": "Be long."}, *MULTI], "system": said}
    assert "is not the system prompt that its messages begin with" in refused(different, tokenizer, CHAT)
    assert "system is of type list" in refused({"messages": MULTI, "system": [said]}, tokenizer, CHAT)
    plain = {"prompt": "Wet?", "completion": " Yes.", "system": said}
    assert "its prompt is a plain text" in refused(plain, tokenizer, COMPLETION)
    assert row_key({"messages": MULTI, "system": said}, CHAT) != row_key({"messages": MULTI}, CHAT)


def test_the_key_of_a_row_is_that_of_its_content() -> None:
    how = CHAT
    row = {"messages": SINGLE, "id": 1}
    assert row_key(row, how) == row_key({"id": 2, "tools": None, "messages": SINGLE}, how)
    assert row_key(row, how) == row_key(
        {"dialog": SINGLE}, DataConfig(format="chat", columns=ColumnsConfig(messages="dialog"))
    )
    assert row_key(row, how) != row_key({"messages": MULTI}, how)
    assert row_key(row, how) != row_key({"messages": SINGLE, "tools": [TOOL]}, how)
    keys = [row_key({"text": str(number)}, DataConfig(format="text")) for number in range(2000)]
    for share in (0.02, 0.5):
        assert sum(key < key_border(share) for key in keys) == pytest.approx(2000 * share, rel=0.5)


def test_tokens_as_they_are(tokenizer) -> None:
    how = DataConfig(format="tokens")
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]}
    assert encode_rows([Row(row, "x")], how, tokenizer) == [([5, 6, 7, 8], [False, True, False, True])]
    assert encode_rows([Row({"input_ids": [5, 6]}, "x")], how, tokenizer) == [([5, 6], [True, True])]
    assert "labels[1] is 7" in refused({"input_ids": [5, 6], "labels": [5, 7]}, tokenizer, how)
    assert "1 labels for 2" in refused({"input_ids": [5, 6], "labels": [5]}, tokenizer, how)
    assert "holds '6'" in refused({"input_ids": [5, "6"]}, tokenizer, how)
    assert "holds -1" in refused({"input_ids": [5, -1]}, tokenizer, how)
    assert "of type str" in refused({"input_ids": "5 6"}, tokenizer, how)
    assert "padded" in refused({"input_ids": [5, 6], "attention_mask": [1, 0]}, tokenizer, how)
    for wrong in (None, "", 0.0, False):
        assert f"holds {wrong!r}" in refused({"input_ids": [5, wrong, 6]}, tokenizer, how)
    for wrong in (1, "11"):
        assert "attention_mask is of type" in refused({"input_ids": [5], "attention_mask": wrong}, tokenizer, how)


def test_labels_that_are_named_are_read(tokenizer) -> None:
    how = DataConfig(format="tokens", columns=ColumnsConfig(labels="loss_lables"))
    assert "no 'loss_lables'" in refused({"input_ids": [5, 6], "loss_labels": [-100, 6]}, tokenizer, how)


NO, SYSTEM = {"role": "assistant", "content": "No."}, {"role": "system", "content": "Be brief."}


def pair_of(row: dict, tokenizer, **options) -> list[tuple[str, str]]:
    """Of the better and the worse answer, the whole text and what is learnt of it."""
    sides = encode_rows([Row(row, "x.jsonl:1")], DataConfig(format="preference", **options), tokenizer)
    return [(tokenizer.decode(ids), learnt_text(tokenizer, ids, mask)) for ids, mask in sides]


def test_answers_keep_what_they_only_begin_with(tokenizer) -> None:
    """A prompt that is a message is no part of an answer, and a prompt inside of a word is none either."""
    greeting = {"prompt": "Hello", "chosen": "Hello! How can I help?", "rejected": "Hello."}
    said = [learnt for _, learnt in pair_of(greeting, tokenizer, wrap="chat")]
    assert said == ["Hello! How can I help?<|im_end|>", "Hello.<|im_end|>"]
    inside = [text for text, _ in pair_of({"prompt": "I", "chosen": "It is", "rejected": "If so"}, tokenizer)]
    assert inside == ["<|begin|>IIt is<|im_end|>", "<|begin|>IIf so<|im_end|>"]
    sharegpt = [{"from": "human", "value": SINGLE[0]["content"]}]
    for prompt in (SINGLE[:1], sharegpt):
        pair = {"prompt": prompt, "chosen": SINGLE, "rejected": [NO]}
        assert pair_of(pair, tokenizer) == pair_of(PAIR, tokenizer)


QUESTION = SINGLE[0]["content"]
PAIR = {"prompt": SINGLE[:1], "chosen": SINGLE[1:], "rejected": [NO]}
REPEATED = {"chosen": SINGLE, "rejected": [SINGLE[0], NO]}
BRIEF = {**PAIR, "prompt": [SYSTEM, SINGLE[0]]}
LONGER = {name: [SYSTEM, *value] for name, value in REPEATED.items()}
TEXTS = {"prompt": "Wet?", "chosen": " Yes", "rejected": " No"}
START = "\n\nHuman: Is water wet?\n\nAssistant:"
SAME_PAIRS = {
    "no prompt": (REPEATED, PAIR),
    "a prompt that the answers repeat": ({**REPEATED, "prompt": SINGLE[:1]}, PAIR),
    "a prompt as text, that the answers repeat": ({"prompt": QUESTION, **REPEATED}, PAIR),  # ultrafeedback_binarized
    "a prompt as text": ({**PAIR, "prompt": QUESTION}, PAIR),
    "columns as JSON": ({name: json.dumps(value) for name, value in PAIR.items()}, PAIR),
    "a text and JSON": ({**PAIR, "prompt": QUESTION, "chosen": json.dumps(SINGLE[1:])}, PAIR),
    "the last message is repeated": ({**BRIEF, **REPEATED}, BRIEF),
    "the answers have a system message more": ({"prompt": SINGLE[:1], **LONGER}, BRIEF),
    "the same, with a prompt as text": ({"prompt": QUESTION, **LONGER}, BRIEF),
    "texts that repeat the prompt": ({"prompt": "Wet?", "chosen": "Wet? Yes", "rejected": "Wet? No"}, TEXTS),
    "texts cut at a word's border": (
        {"chosen": f"{START} Yes, it is.", "rejected": f"{START} Yesterday.", "prompt_id": 7},
        {"prompt": START, "chosen": " Yes, it is.", "rejected": " Yesterday."},
    ),
    "texts cut at a line break": (
        {"chosen": "Wet?\nYes", "rejected": "Wet?\nNo"},
        {"prompt": "Wet?\n", "chosen": "Yes", "rejected": "No"},
    ),
}


@pytest.mark.parametrize("name", SAME_PAIRS)
def test_ways_to_write_a_pair(name: str, tokenizer) -> None:
    row, explicit = SAME_PAIRS[name]
    assert pair_of(row, tokenizer) == pair_of(explicit, tokenizer)


def test_what_is_learnt_of_a_pair(tokenizer) -> None:
    assert [learnt for _, learnt in pair_of(PAIR, tokenizer)] == [f"{ANSWER}<|im_end|>", "No.<|im_end|>"]
    begin = "<|begin|>Wet?"
    expected = [(f"{begin} {answer}<|im_end|>", f" {answer}<|im_end|>") for answer in ("Yes", "No")]
    assert pair_of(TEXTS, tokenizer) == expected
    quoted = {"prompt": "Wet?", "chosen": "Wet? Yes", "rejected": "No"}
    assert pair_of(quoted, tokenizer)[0][1] == "Wet? Yes<|im_end|>", "one answer alone quotes it"
    texts = {"messages": [SYSTEM, SINGLE[0]], "chosen": "It is wet", "rejected": "It is dry"}
    named = pair_of(texts, tokenizer, wrap="chat", columns=ColumnsConfig(prompt="messages"))
    assert "Be brief." in named[0][0]
    assert named[0][1] == "It is wet<|im_end|>"


def test_pairs_that_cannot_be_read_say_what_to_do(tokenizer) -> None:
    mistakes = {
        "no 'chosen' (it has: prompt, better, rejected); did you mean 'better'? set data.columns.chosen = \"better\"":
            {"prompt": "a", "better": "b", "rejected": "c"},
        "did you mean 'response_rejected'?": {"prompt": "a", "chosen": "b", "response_rejected": "c"},
        "no 'prompt' (it has: question, chosen, rejected); did you mean 'question'?":
            {"question": "Is water wet?", "chosen": "It is", "rejected": "It never"},
        "no 'prompt' (it has: messages, chosen, rejected); did you mean 'messages'? set data.columns.prompt = ":
            {"messages": [SYSTEM, SINGLE[0]], "chosen": "It is wet", "rejected": "It is dry"},
        "share no prompt": {"chosen": "Yes", "rejected": "No"},
        "share no prompt; give rows": {"chosen": SINGLE, "rejected": MULTI[2:]},
        "a text and a list of messages; give two of a kind": {"prompt": "a", "chosen": "b", "rejected": [NO]},
        "chosen is of type int": {"prompt": "a", "chosen": 3, "rejected": [NO]},
        "prompt is none of its messages": {"prompt": "Be brief.", "chosen": SINGLE, "rejected": [SINGLE[0], NO]},
    }  # fmt: skip
    for says, row in mistakes.items():
        with pytest.raises(UserError) as caught:
            pair_of(row, tokenizer)
        assert str(caught.value).startswith("x.jsonl:1: ")
        assert says in str(caught.value)
    named = {"q": "Is water wet?", "chosen": "It is", "rejected": "It never"}
    assert pair_of(named, tokenizer, columns=ColumnsConfig(prompt="q"))[0][1] == "It is<|im_end|>"
    with pytest.raises(UserError, match="no 'question'"):
        pair_of(named, tokenizer, columns=ColumnsConfig(prompt="question"))


def documents_of(path: str, **options):
    tokenizer = make_tokenizer(templates.MARKED_WIDE)
    extra = {name: options.pop(name) for name in ("key",) if name in options}
    return build_documents(ChatDataConfig(path=path, **options), tokenizer=tokenizer, **extra)


@pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning")  # datasets 4.0 leaves parquet open
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")
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


@pytest.mark.parametrize("cell", ["NA", "null", "None", "nan", "1"])
def test_cells_of_a_csv_are_text(cell: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f'prompt,completion\n"Is it\nwet?",{cell}\n')
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


HALF = json.dumps([SINGLE[0], {"role": "assistant", "content": "\ud83c x"}])
CALLS = [SINGLE[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 10**5}]}]


@pytest.mark.parametrize(
    ("row", "format", "what"),
    [
        ({"messages": HALF}, "chat", "messages holds \\ud83c, half of a surrogate pair"),
        ({"prompt": HALF, "completion": HALF}, "prompt_completion", "holds \\ud83c, half of a surrogate pair"),
        ({"messages": SINGLE, "tools": '["\\ud83c"]'}, "chat", "tools holds \\ud83c, half"),
        ({"messages": "[" * 10**5}, "chat", "messages is nested too deep"),
        ({"messages": CALLS}, "chat", "nested too deep"),
        ({"messages": "[" + "1" * 5000 + "]"}, "chat", "messages holds an integer of more than 4300 digits"),
        ({"instruction": "a", "output": "b", "history": 5}, "alpaca", "history is of type int"),
    ],
)
def test_json_that_no_row_may_have_is_refused_in_a_text_too(row: dict, format: Any, what: str, tokenizer) -> None:
    assert what in refused(row, tokenizer, DataConfig(format=format))


ROLES = '[{"role": "user", "role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]'
ARGUMENTS = [SINGLE[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": 1, "x": 2}'}]}]


@pytest.mark.parametrize(
    ("row", "format", "what"),
    [
        ({"messages": ROLES}, "chat", "messages holds an object with two values of the key 'role'"),
        ({"prompt": ROLES, "completion": ROLES}, "prompt_completion", "two values of the key 'role'"),
        ({"messages": SINGLE, "tools": '[{"name": "f", "name": "g"}]'}, "chat", "tools holds an object with two"),
        ({"messages": SINGLE, "chat_template_kwargs": '{"a": 1, "a": 2}'}, "chat", "chat_template_kwargs holds an"),
        ({"messages": ARGUMENTS}, "chat", "arguments holds an object with two values of the key 'x'"),
    ],
)
def test_two_values_of_a_key_are_refused_in_a_text_too(row: dict, format: Any, what: str, tokenizer) -> None:
    assert what in refused(row, tokenizer, DataConfig(format=format))


def test_the_same_value_twice_is_read() -> None:
    text = '{"a": {"x": 1, "y": [2]}, "a": {"y": [2], "x": 1}}'
    assert load_json(text, "x") == json.loads(text)


def test_a_text_that_is_no_messages_may_be_any_json(tokenizer) -> None:
    text = {"prompt": '[{"x": 1, "x": 2}] is', "completion": '[{"x": 1, "x": 2}]'}
    assert learnt(text, tokenizer, COMPLETION)[1] == f"{text['completion']}<|im_end|>"
    deep = {**text, "prompt": '[{"x": 1, "x": 2}, ' + "[" * 10**5}
    assert "nested too deep" in refused(deep, tokenizer, COMPLETION)
    assert asked({"prompt": text["completion"]}, tokenizer) == rendered(ask(text["completion"]), tokenizer)


def test_rows_of_parquet_are_named_by_their_file(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    for number, rows in enumerate(([{"text": "a"}] * 3, [{"text": "b"}, {"text": None}])):
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / f"{number}.parquet"))
    with pytest.raises(UserError, match=r"1\.parquet: row 1: the row has no 'text'"):
        documents_of(str(tmp_path / "*.parquet"), format="text")


def say_of(rows: list[dict], tokenizer, how: DataConfig, **options) -> str:
    with pytest.raises(UserError) as caught:
        encode_rows([Row(row, f"x.jsonl:{at}") for at, row in enumerate(rows, 1)], how, tokenizer, **options)
    return str(caught.value)


def test_advice_fits_the_rows_beside_it(tokenizer) -> None:
    good, wrong = {"messages": SINGLE, "id": 1}, {"mesages": SINGLE, "id": 2}
    rename = (
        "x.jsonl:3: the row has no 'messages' (it has: mesages, id), and other rows have one; rename 'mesages', or"
    )
    assert say_of([good, good, wrong], tokenizer, CHAT).startswith(rename)
    assert "; rename 'mesages', or drop" in say_of([wrong, good], tokenizer, CHAT)
    assert "; rename 'mesages', or drop" in say_of([{"conversations": SINGLE}, wrong], tokenizer, CHAT)
    assert "; rename 'mesages', or drop" in say_of([wrong], tokenizer, CHAT, follows=True)
    assert 'set data.columns.messages = "mesages"' in say_of([wrong, wrong], tokenizer, CHAT)
    assert 'data.columns.messages = "…"' in say_of([wrong, {"dialog": SINGLE}], tokenizer, CHAT)
    null = say_of([good, {"messages": None, "message_id": 4}], tokenizer, CHAT)
    assert null.startswith("x.jsonl:2: 'messages' is null; fill it in, or drop")
    shared = [{**good, "message_id": 1}, {"message_id": 2, "mesages": SINGLE}, {"message_id": 3}]
    assert "rename 'mesages'" in say_of(shared, tokenizer, CHAT), "not 'message_id', which the others have as well"
    pairs = [{"prompt": "Wet?", "completion": "Yes"}, {"prompt": "Wet?", "answer": "Yes"}]
    assert "rename 'answer', or drop the row" in say_of(pairs, tokenizer, COMPLETION)


def test_advice_names_only_keys_that_exist(tokenizer) -> None:
    """A format of one's own may read a column that `[data.columns]` does not know."""
    [row] = read_columns([Row({"contexts": "a"}, "x.jsonl: line 1")], ChatDataConfig())
    with pytest.raises(UserError, match=r"no 'context' \(it has: contexts\); did you mean 'contexts'\? Rename it, or"):
        assert row["context"]
    with pytest.raises(UserError, match=r"no 'picture' .*; add the column, or set data\.format"):
        row.given("picture") or row["picture"]


def test_a_misspelt_row_of_a_later_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_TABLE_BLOCK", 4)
    names = ["messages"] * 8 + ["mesages"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({name: SINGLE}) + "\n" for name in names))
    for workers in (0, 2):
        with pytest.raises(UserError, match=r"a\.jsonl:9: .*\(it has: mesages\), and other rows have one; rename"):
            documents_of(str(tmp_path / "a.jsonl"), workers=workers)


def asked(row: dict, tokenizer, **columns: str) -> str:
    [prompt] = encode_prompts(
        [Row(row, "x.jsonl:1")], DataConfig(format="prompts", columns=ColumnsConfig(**columns)), tokenizer
    )
    return tokenizer.decode(prompt.ids)


def rendered(messages: list[dict], tokenizer) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_what_is_named_is_asked(tokenizer) -> None:
    """History and system message are there although the row has a prompt as well."""
    whole = [{"role": "system", "content": "Be brief."}, *MULTI]
    row = {"messages": whole, "prompt": MULTI[2]["content"], "target": "4"}
    history, question = rendered(whole[:-1], tokenizer), rendered(MULTI[2:3], tokenizer)
    assert asked(row, tokenizer, messages="messages") == history
    assert asked(row, tokenizer, prompt="prompt") == question
    assert asked({"dialog": whole, "prompt": "x"}, tokenizer, messages="dialog") == history
    assert asked({"messages": whole, "q": MULTI[2]["content"]}, tokenizer, prompt="q") == question
    assert asked({"messages": whole}, tokenizer) == history
    assert asked({"prompt": whole}, tokenizer) == history
    both = {"messages": SINGLE, "prompt": SINGLE[0]["content"]}
    assert (
        asked(both, tokenizer) == asked({**both, "prompt": SINGLE[:1]}, tokenizer) == rendered(SINGLE[:1], tokenizer)
    )
    with pytest.raises(UserError, match=r"'prompt' and 'messages', which differ; say which is meant: data\.columns"):
        asked(row, tokenizer)
    with pytest.raises(UserError, match="no 'dialog'"):
        asked({"prompt": "x", "messages": whole}, tokenizer, messages="dialog")
    plain = make_tokenizer(None)
    assert asked({"prompt": "Wet?"}, plain) == asked({"prompt": "Wet?", "messages": ask("Wet?")}, plain)


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_two_conversations_in_a_row(tokenizer) -> None:
    expected = learnt({"messages": MULTI}, tokenizer, CHAT)
    assert learnt({"messages": MULTI, "conversations": MULTI}, tokenizer, CHAT) == expected
    assert learnt({"messages": None, "conversations": MULTI}, tokenizer, CHAT) == expected
    assert learnt({"messages": MULTI, "prompt": "x"}, tokenizer, CHAT) == expected, "chat reads no prompt"
    differing = {"messages": SINGLE, "conversations": MULTI}
    assert refused(differing, tokenizer, CHAT) == "the row has 'messages' and 'conversations', which differ"
    for name in ("messages", "conversations"):
        how = DataConfig(format="chat", columns=ColumnsConfig(messages=name))
        assert learnt(differing, tokenizer, how) == learnt({"messages": differing[name]}, tokenizer, CHAT)


def test_messages_as_json_text(tokenizer, tmp_path: Path) -> None:
    sharegpt = [{"from": "human", "value": SINGLE[0]["content"]}, {"from": "gpt", "value": SINGLE[1]["content"]}]
    expected = learnt({"messages": SINGLE}, tokenizer, CHAT)
    for name, value in (("messages", SINGLE), ("conversations", sharegpt)):
        assert learnt({name: json.dumps(value, indent=1)}, tokenizer, CHAT) == expected
    assert learnt({"d": json.dumps(SINGLE)}, tokenizer, DataConfig(columns=ColumnsConfig(messages="d"))) == expected
    broken = "messages is not valid JSON (Expecting property name enclosed in double quotes, column 3)"
    assert refused({"messages": str(SINGLE)}, tokenizer, CHAT) == broken
    assert refused({"messages": "Hello"}, tokenizer, CHAT) == "messages is of type str, not a list"
    assert refused({"messages": ""}, tokenizer, CHAT) == "messages is empty"
    assert "not a list" in refused({"messages": '{"role": "user"}'}, tokenizer, CHAT)
    for suffix, kind in (("csv", ","), ("tsv", "\t")):
        with (tmp_path / f"a.{suffix}").open("w", newline="") as file:
            writer = csv.writer(file, delimiter=kind)
            writer.writerows([["messages", "tools"], [json.dumps(TALK), json.dumps([TOOL])]])
            writer.writerow([json.dumps(SINGLE), ""])
        [first, second] = first_rows(ChatDataConfig(path=str(tmp_path / f"a.{suffix}")), "data.path", 2)
        assert learnt(first.parse(), tokenizer, CHAT) == learnt({"messages": TALK, "tools": [TOOL]}, tokenizer, CHAT)
        assert learnt(second.parse(), tokenizer, CHAT) == expected


def test_prompts_and_answers_as_json_text(tokenizer) -> None:
    how = COMPLETION
    pair = {"prompt": MULTI[:3], "completion": MULTI[3:]}
    assert learnt({k: json.dumps(v) for k, v in pair.items()}, tokenizer, how) == learnt(pair, tokenizer, how)
    text = {"prompt": "Write a chat as JSON: ", "completion": json.dumps(SINGLE)}
    assert learnt(text, tokenizer, how)[1] == f"{text['completion']}<|im_end|>", "an answer may be JSON"
    assert asked({"prompt": json.dumps(MULTI[:3])}, tokenizer) == asked({"prompt": MULTI[:3]}, tokenizer)
    assert not looks_unwrapped(read({k: json.dumps(v) for k, v in pair.items()}, how), tokenizer)


def test_prompts_that_cannot_be_read_say_what_to_do(tokenizer) -> None:
    how = DataConfig(format="prompts")
    rows = [Row({"prompt": "Wet?"}, "x:1"), Row({"promt": "Wet?"}, "x:2")]
    with pytest.raises(UserError, match=r"^x:2: the row has no 'prompt' \(it has: promt\), .*; rename 'promt', or"):
        encode_prompts(rows, how, tokenizer)
    with pytest.raises(UserError, match="no prompt before the answer"):
        asked({"messages": SINGLE[1:]}, tokenizer)
