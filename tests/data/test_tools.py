"""Tool calls and reasoning under the families of templates: the text, written by hand, or a refusal."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.rows import Row, RowReader
from fsdp2kit.data.sources import locate
from fsdp2kit.data.tokens import encode_rows
from fsdp2kit.errors import UserError
from tests.data.helpers import templates
from tests.data.helpers.families import AGAIN, ANSWER, CALL, FAMILIES, TALK, TOOL, talk_for, tokenizer_of
from tests.data.helpers.files import write_rows
from tests.data.helpers.templates import encode_chat, make_tokenizer, spoken

WITH_CALLS = [name for name, family in FAMILIES.items() if family.talk]


def with_calls(messages: list[dict[str, Any]], change: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    return [{**one, "tool_calls": [change(CALL)]} if "tool_calls" in one else one for one in messages]


def with_text(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's form: arguments are JSON."""
    return {**call, "function": {**call["function"], "arguments": '{"city": "Orléans"}'}}


def flat(call: dict[str, Any]) -> dict[str, Any]:
    return {"id": call["id"], **call["function"]}


def written(rows: list[dict[str, Any]], kind: str, folder: Path) -> list[Row]:
    """Rows as they come out of a file."""
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    else:
        write_rows(folder / "rows.jsonl", rows)
    return list(RowReader(locate(DataConfig(path=str(folder / f"rows.{kind}")))))


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {"object": dict, "text": with_text, "flat": flat}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_calls_results_and_reasoning(marked: bool, name: str, form: str) -> None:
    tokenizer, talk = tokenizer_of(name, marked=marked), with_calls(talk_for(name), FORMS[form])
    ids, supervised = encode_chat(talk, tokenizer, tools=[TOOL])
    assert spoken(tokenizer, ids, supervised) == FAMILIES[name].talk
    # Again, from what is known by now.
    assert encode_chat(talk, tokenizer, tools=[TOOL]) == (ids, supervised)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_the_last_turn_of_several(name: str) -> None:
    tokenizer = tokenizer_of(name)
    text = spoken(tokenizer, *encode_chat([*talk_for(name), *AGAIN], tokenizer, tools=[TOOL], train_on="last"))
    assert text.split("«")[1].split("»")[0] == FAMILIES[name].single.replace(ANSWER, "Still.")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", WITH_CALLS)
def test_openai_rows_from_files(name: str, kind: str, tmp_path: Path) -> None:
    """A second tool with other parameters, and a second call with other arguments, fill a table with None."""
    other = copy.deepcopy(TOOL)
    other["function"]["name"] = "time"
    other["function"]["parameters"]["properties"] = {"zone": {"type": "string"}}
    unlike = copy.deepcopy(CALL)
    unlike["function"] = {"name": "time", "arguments": {"zone": "CET"}}
    talk = talk_for(name)
    rows = [
        {"messages": talk, "tools": [TOOL]},
        {"messages": [{**m, "tool_calls": [unlike]} if "tool_calls" in m else m for m in talk], "tools": [other]},
        {"messages": with_calls(talk, with_text), "tools": [TOOL]},
    ]
    # A table has one type for the arguments.
    read = written(rows[:2], kind, tmp_path)
    (tmp_path / "more").mkdir()
    read += written([{**rows[2], "tools": json.dumps([TOOL])}], kind, tmp_path / "more")
    tokenizer = tokenizer_of(name)
    texts = [spoken(tokenizer, *one) for one in encode_rows(read, DataConfig(format="chat"), tokenizer)]
    swapped = FAMILIES[name].talk.replace("weather", "time").replace("city", "zone").replace("Orléans", "CET")
    assert texts == [FAMILIES[name].talk, swapped, FAMILIES[name].talk]


@pytest.mark.parametrize("name", [name for name in WITH_CALLS if not FAMILIES[name].reasons])
def test_reasoning_that_is_not_rendered_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"x.jsonl:7: .* leaves out messages\[2\].reasoning_content; set model.chat_t"):
        encode_chat(copy.deepcopy(TALK), tokenizer_of(name), tools=[TOOL], where="x.jsonl:7")


PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}{{ '<|im_end|>\n' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
REFUSED = {
    "calls": (PLAIN, talk_for("qwen25"), None, r"leaves out messages\[2\].tool_calls"),
    "calls, and a content that must be text": (
        templates.CHATML,
        talk_for("qwen25"),
        None,
        r"leaves out messages\[2\].tool_calls",
    ),
    "tools": (PLAIN, AGAIN, [TOOL], "leaves out the row's tools"),
    "reasoning": (
        PLAIN,
        [AGAIN[0], {**AGAIN[1], "reasoning_content": "Hm."}],
        None,
        r"leaves out messages\[1\].reasoning_content",
    ),
    "a role that is skipped": (
        PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"),
        [TALK[0], *AGAIN],
        None,
        r'leaves out messages\[0\].content \(role "system"\)',
    ),
    "a misspelt role": (
        PLAIN,
        [AGAIN[0], {**AGAIN[1], "role": "asistant"}],
        None,
        r"messages\[1\] .* mean 'assistant'",
    ),
    "another model's name": (
        PLAIN,
        [AGAIN[0], {**AGAIN[1], "role": "gpt"}],
        None,
        r"messages\[1\] .* mean 'assistant'",
    ),
    "nothing said": (PLAIN, [AGAIN[0], {**AGAIN[1], "content": " "}], None, r"says nothing in messages\[1\]"),
    "a list of parts": (
        PLAIN,
        [{"role": "user", "content": [{"type": "document"}, {"type": "text", "text": "What?"}]}, AGAIN[1]],
        None,
        r"messages\[0\].content\[0\] is of type document",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_template_leaves_out_is_refused(what: str) -> None:
    template, messages, tools, match = REFUSED[what]
    with pytest.raises(UserError, match=f"x.jsonl:7: .*{match}"):
        encode_chat(copy.deepcopy(messages), make_tokenizer(template), tools=tools, where="x.jsonl:7")


def test_text_beside_calls_where_the_template_knows_one_of_them() -> None:
    talk = talk_for("llama31")
    talk[2]["content"] = "Let me see."
    with pytest.raises(UserError, match="beside its tool_calls"):
        encode_chat(talk, tokenizer_of("llama31"), tools=[TOOL])
    ids, _ = encode_chat(talk, tokenizer := tokenizer_of("granite"), tools=[TOOL])
    assert "Let me see.<|tool_call|>" in tokenizer.decode(ids)


def test_markers_that_leave_out_the_calls() -> None:
    template = PLAIN.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    with pytest.raises(UserError, match=r"says nothing in messages\[1\]"):
        encode_chat([TALK[1], {"role": "assistant", "content": "", "tool_calls": [CALL]}], make_tokenizer(template))


def test_a_call_without_arguments() -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.tool_calls[0].name if m.tool_calls else m.content }}")
    talk = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [{"name": "weather"}]}]
    encoded = encode_chat(talk, tokenizer := make_tokenizer(template))
    assert spoken(tokenizer, *encoded).endswith("«weather<|im_end|>»\n")


def test_parts_are_joined_for_a_template_that_prints_them_as_they_are() -> None:
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]
    ids, _ = encode_chat([{"role": "user", "content": parts}, AGAIN[1]], tokenizer := make_tokenizer(PLAIN))
    assert "user\nWhat now?<|im_end|>" in tokenizer.decode(ids)


def test_an_earlier_answer_may_lose_its_reasoning() -> None:
    """Qwen3's template leaves out all but the last: that is its way, not a lack."""
    talk = [AGAIN[0], {**AGAIN[1], "reasoning_content": "Hm."}, *AGAIN]
    ids, supervised = encode_chat(talk, tokenizer := tokenizer_of("qwen3"), train_on="last")
    assert spoken(tokenizer, ids, supervised).endswith("«<think>\n\n</think>\n\nStill.<|im_end|>»\n")


def test_several_calls_in_a_turn_where_one_is_rendered() -> None:
    talk = [TALK[1], {"role": "assistant", "tool_calls": [CALL, CALL]}]
    with pytest.raises(UserError, match=r"leaves out messages\[1\].tool_calls"):
        encode_chat(talk, tokenizer_of("gpt_oss"), tools=[TOOL])
    ids, _ = encode_chat(talk, tokenizer := tokenizer_of("qwen3"), tools=[TOOL])
    assert tokenizer.decode(ids).count('{"city": "Orléans"}') == 2


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_a_row_of_another_form_than_the_first(name: str) -> None:
    """What is known of one form is not taken for another."""
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    for change in (with_text, dict, flat, with_text, flat, dict):
        encoded = encode_chat(with_calls(talk_for(name), change), tokenizer, tools=[TOOL])
        assert spoken(tokenizer, *encoded) == family.talk


def test_an_object_where_the_template_takes_both() -> None:
    """Gemma 4 prints a string as it is, and an object in a notation of its own."""
    template = PLAIN.replace(
        "{{ m.content }}",
        "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
        "{{ a if a is string else a.keys() | first + ':' + a.values() | first }}{% endfor %}{{ m.content }}",
    )
    for change in FORMS.values():
        talk = with_calls([TALK[1], {"role": "assistant", "content": "", "tool_calls": [CALL]}], change)
        encoded = encode_chat(talk, tokenizer := make_tokenizer(template))
        assert spoken(tokenizer, *encoded).endswith("«city:Orléans<|im_end|>»\n")


def test_arguments_that_are_no_json() -> None:
    talk = with_calls(talk_for("qwen25"), lambda call: {**call, "function": {"name": "weather", "arguments": "{city"}})
    with pytest.raises(UserError, match=r"x.jsonl:7: messages\[2\].tool_calls arguments is not valid JSON"):
        encode_chat(talk, tokenizer_of("qwen25"), tools=[TOOL], where="x.jsonl:7")


def test_openais_earlier_function_call() -> None:
    talk = talk_for("qwen25")
    talk[2] = {"role": "assistant", "function_call": with_text(CALL)["function"]}
    encoded = encode_chat(talk, tokenizer := tokenizer_of("qwen25"), tools=[TOOL])
    assert spoken(tokenizer, *encoded) == FAMILIES["qwen25"].talk


def test_a_check_and_a_preview_refuse_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fsdp2kit.run import main as run_main
    from tools import preview

    make_tokenizer(PLAIN).save_pretrained(tmp_path / "words")
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": one} for one in (AGAIN, talk_for("qwen25"))])
    toml = tmp_path / "run.toml"
    toml.write_text(
        'recipe = "sft"\nmodel = { tokenizer = "words", config = { model_type = "llama" }, weights = "random" }\n'
        'data = { path = "rows.jsonl", seq_len = 128 }\ntrain.steps = 1\n'
    )
    for command in (lambda: run_main([str(toml), "--check"]), lambda: preview.main([str(toml)])):
        assert command() == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {rows}:2: the chat template leaves out messages[2].tool_calls; set model.chat")
