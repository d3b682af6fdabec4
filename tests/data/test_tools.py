"""Tool calls and reasoning under eight families of templates: the text, written by hand, or a refusal.

``«`` and ``»`` stand around what is learnt.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.rows import Row, RowReader
from fsdp2kit.data.sources import locate
from fsdp2kit.data.tokens import encode_rows
from fsdp2kit.errors import UserError
from tests.data import templates
from tests.data.templates import encode_chat, make_tokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SIGNATURE = json.dumps(TOOL)
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Orléans"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "Look it up."},
    {"role": "tool", "content": "18", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "18 °C.", "reasoning_content": "Mild."},
]
AGAIN = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Still."}]


@dataclass(frozen=True)
class Family:
    """What a template makes of `TALK`, or of it without the reasoning."""

    eos: str
    special: tuple[str, ...]
    text: str
    last: str
    """What is learnt of the last turn of `TALK` and `AGAIN`."""
    reasons: bool = False


CHATML = ("<|im_start|>", "<|im_end|>")
FAMILIES = {
    "qwen3": Family(
        "<|im_end|>",
        CHATML,
        f"<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n{SIGNATURE}\n</tools><|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n«<think>\nLook it up.\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Orléans"}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n18\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«<think>\nMild.\n</think>\n\n18 °C.<|im_end|>»\n",
        "<think>\n\n</think>\n\nStill.<|im_end|>",
        reasons=True,
    ),
    "qwen25": Family(
        "<|im_end|>",
        CHATML,
        f"<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n{SIGNATURE}\n</tools><|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
        '«<tool_call>\n{"name": "weather", "arguments": {"city": "Orléans"}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n18\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«18 °C.<|im_end|>»\n",
        "Still.<|im_end|>",
    ),
    "hermes": Family(
        "<|im_end|>",
        CHATML,
        f"<|im_start|>system\nTools: <tools>{SIGNATURE}</tools><|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
        '«<tool_call>\n{"name": "weather", "arguments": {"city": "Orléans"}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>tool\n<tool_response>\n18\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«18 °C.<|im_end|>»\n",
        "Still.<|im_end|>",
    ),
    "llama31": Family(
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnswer with a call of one of:\n\n"
        f"{json.dumps(TOOL, indent=4)}\n\nWeather?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '«{"name": "weather", "parameters": {"city": "Orléans"}}<|eot_id|>»'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"18"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n«18 °C.<|eot_id|>»",
        "Still.<|eot_id|>",
    ),
    "mistral": Family(
        "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        f"<|begin|>[AVAILABLE_TOOLS] [{SIGNATURE}][/AVAILABLE_TOOLS][INST] Be brief.\n\nWeather?[/INST]"
        '«[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Orléans"}, "id": "call00001"}]</s>»'
        '[TOOL_RESULTS] {"content": 18, "call_id": "call00001"}[/TOOL_RESULTS]« 18 °C.</s>»',
        " Still.</s>",
    ),
    "deepseek": Family(
        "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<｜end▁of▁sentence｜>"),
        f"<|begin|>Be brief.\n\nTools:\n{SIGNATURE}<｜User｜>Weather?<｜Assistant｜>"
        "«<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Orléans"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>»'
        "<｜tool▁output▁begin｜>18<｜tool▁output▁end｜>«18 °C.<｜end▁of▁sentence｜>»",
        "Still.<｜end▁of▁sentence｜>",
    ),
    "gpt_oss": Family(
        "<|return|>",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\nnamespace functions {\n"
        f"type weather = (_: {json.dumps(PARAMETERS)}) => any;\n}}<|end|><|start|>user<|message|>Weather?<|end|>"
        "<|start|>assistant«<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Orléans"}<|call|>»'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"18"<|end|>'
        "<|start|>assistant«<|channel|>analysis<|message|>Mild.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>18 °C.<|return|>»",
        "<|channel|>final<|message|>Still.<|return|>",
        reasons=True,
    ),
    "granite": Family(
        "<|end_of_text|>",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        f"<|start_of_role|>available_tools<|end_of_role|>[{SIGNATURE}]<|end_of_text|>\n"
        "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Weather?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
        '«<|tool_call|>[{"name": "weather", "arguments": {"city": "Orléans"}}]<|end_of_text|>»\n'
        "<|start_of_role|>tool_response<|end_of_role|>18<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>«18 °C.<|end_of_text|>»\n",
        "Still.<|end_of_text|>",
    ),
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    source = (Path(__file__).parent / "jinja" / f"{name}.jinja").read_text(encoding="utf-8")
    return make_tokenizer(source, eos=FAMILIES[name].eos, special=FAMILIES[name].special)


def talk_for(name: str) -> list[dict[str, Any]]:
    talk = copy.deepcopy(TALK)
    for message in talk:
        if not FAMILIES[name].reasons:
            message.pop("reasoning_content", None)
    return talk


def with_calls(messages: list[dict[str, Any]], change: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    return [{**one, "tool_calls": [change(CALL)]} if "tool_calls" in one else one for one in messages]


def with_text(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's form: arguments are JSON."""
    return {**call, "function": {**call["function"], "arguments": '{"city": "Orléans"}'}}


def flat(call: dict[str, Any]) -> dict[str, Any]:
    return {"id": call["id"], **call["function"]}


def spoken(tokenizer: Any, ids: list[int], supervised: list[bool]) -> str:
    """The text with « and » around each run of supervised tokens."""
    text = ""
    for at, (_, learn) in enumerate(zip(ids, supervised, strict=True)):
        begins = learn and not (at and supervised[at - 1])
        ends = learn and not (at + 1 < len(ids) and supervised[at + 1])
        text += ("\x01" if begins else "") + f"{ids[at]} " + ("\x02" if ends else "")
    pieces = [text] if "\x01" not in text else text.replace("\x02", "\x01").split("\x01")
    decoded = [tokenizer.decode([int(one) for one in piece.split()]) for piece in pieces]
    return "".join(f"«{piece}»" if at % 2 else piece for at, piece in enumerate(decoded))


def written(rows: list[dict[str, Any]], kind: str, folder: Path) -> list[Row]:
    """Rows as they come out of a file."""
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    else:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(RowReader(locate(DataConfig(path=str(folder / f"rows.{kind}")))))


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {"object": dict, "text": with_text, "flat": flat}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_results_and_reasoning(name: str, form: str) -> None:
    tokenizer, talk = tokenizer_of(name), with_calls(talk_for(name), FORMS[form])
    ids, supervised = encode_chat(talk, tokenizer, tools=[TOOL])
    assert spoken(tokenizer, ids, supervised) == FAMILIES[name].text
    # Again, from what is known by now.
    assert encode_chat(talk, tokenizer, tools=[TOOL]) == (ids, supervised)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_turn_of_several(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ids, supervised = encode_chat([*talk_for(name), *AGAIN], tokenizer, tools=[TOOL], train_on="last")
    learnt = tokenizer.decode([token for token, learn in zip(ids, supervised, strict=True) if learn])
    assert learnt == FAMILIES[name].last


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", FAMILIES)
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
    swapped = FAMILIES[name].text.replace("weather", "time").replace("city", "zone").replace("Orléans", "CET")
    assert texts == [FAMILIES[name].text, swapped, FAMILIES[name].text]


@pytest.mark.parametrize("name", [name for name in FAMILIES if not FAMILIES[name].reasons])
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
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}, AGAIN[1]],
        None,
        r'leaves out messages\[0\].content \(role "user"\)',
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
        assert spoken(tokenizer, *encoded) == family.text


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
    assert spoken(tokenizer, *encoded) == FAMILIES["qwen25"].text


def test_a_check_and_a_preview_refuse_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fsdp2kit import run
    from tools import preview

    make_tokenizer(PLAIN).save_pretrained(tmp_path / "words")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": one}) + "\n" for one in (AGAIN, talk_for("qwen25"))))
    toml = tmp_path / "run.toml"
    toml.write_text(
        'recipe = "sft"\nmodel = { tokenizer = "words", config = { model_type = "llama" }, weights = "random" }\n'
        'data = { path = "rows.jsonl", seq_len = 128 }\ntrain.steps = 1\n'
    )
    for command in (lambda: run.main([str(toml), "--check"]), lambda: preview.main([str(toml)])):
        assert command() == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {rows}:2: the chat template leaves out messages[2].tool_calls; set model.chat")
