"""What other tools write into messages (parts, calls, marks of what is learnt, fields) is read or refused by name."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.fields import is_text, media_in, same_at_start, thought_in, without_thoughts
from fsdp2kit.data.messages import TrainOn, check_messages
from fsdp2kit.data.rows import Row
from fsdp2kit.data.tokens import encode_prompts, encode_rows
from fsdp2kit.errors import UserError
from tests.data.helpers import templates
from tests.data.helpers.families import TOOL, talk_for, tokenizer_of
from tests.data.helpers.templates import encode_chat, learnt_text, make_tokenizer
from tests.support.models import IS_5_17

made = cache(make_tokenizer)
OURS = (Path(__file__).parents[2] / "fsdp2kit/templates/chatml.jinja").read_text(encoding="utf-8")
USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
# As OpenAI writes it.
EXPECTED = [
    USER,
    {"role": "assistant", "content": "Calling.", "tool_calls": [CALL], "reasoning_content": "Look it up."},
    {"role": "tool", "content": "18", "tool_call_id": "t1", "name": "weather"},
    {"role": "user", "content": "Go on."},
    {"role": "assistant", "content": "18 °C.", "reasoning_content": "It said 18."},
]


def text(value: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": value}


def assistant(*parts: Any, **fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": list(parts), **fields}]


GIVES_THINKING = pytest.mark.skipif(IS_5_17, reason="transformers 5.17 gives templates no `thinking`: it is refused")

ANTHROPIC = [
    {"role": "user", "content": [text("Weather?")]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Look it up.", "signature": "EqQB"},
            text("Calling."),
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "18"}, text("Go on.")]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "It said 18."}, text("18 °C.")]},
]
MIXED = [
    {"role": "user", "content": [text("Weather?", "input_text")]},
    {
        "role": "assistant",
        "content": [
            {"type": "reasoning", "summary": [text("Look it up.", "summary_text")], "id": "rs_1"},
            text("Calling.", "output_text"),
            {"type": "tool-call", "toolCallId": "t1", "toolName": "weather", "args": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [text("18")], "is_error": False},
            "Go on.",
        ],
    },
    {"role": "assistant", "content": [{"type": "thinking", "thinking": [text("It said 18.")]}, text("18 °C.")]},
]


@pytest.mark.parametrize("messages", [ANTHROPIC, MIXED], ids=["anthropic", "others"])
@pytest.mark.parametrize("name", ["ours", pytest.param("gpt_oss", marks=GIVES_THINKING), "granite"])
def test_parts_are_what_openai_writes_as_fields(name: str, messages: list[dict[str, Any]]) -> None:
    tokenizer = made(OURS) if name == "ours" else tokenizer_of(name)
    talks = [copy.deepcopy(messages), copy.deepcopy(EXPECTED)]
    if name == "granite":  # it renders no thoughts
        talks[0] = [
            {**one, "content": [part for part in one["content"] if "thinking" not in part and "summary" not in part]}
            for one in talks[0]
        ]
        for message in talks[1]:
            message.pop("reasoning_content", None)
    if name == "gpt_oss":  # it renders no text beside calls
        talks[0][1]["content"].pop(1)
        talks[1][1].pop("content")
    one, other = (encode_chat(talk, tokenizer, tools=[TOOL], train_on="last") for talk in talks)
    assert one == other


def test_a_call_in_a_part_and_in_a_field() -> None:
    part = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    plain = {"name": "weather", "args": {"city": "Rome"}, "id": "t1", "type": "tool_call"}  # LangChain's
    tokenizer = made(OURS)
    both = encode_chat(assistant(part, tool_calls=[plain]), tokenizer, tools=[TOOL])
    assert both == encode_chat(assistant(part), tokenizer, tools=[TOOL])
    with pytest.raises(UserError, match=r"messages\[1\] has calls in its content and others in tool_calls"):
        encode_chat(assistant(part, tool_calls=[{**plain, "args": {}}]), tokenizer, tools=[TOOL])


REFUSED_PARTS = {
    "redacted": ({"type": "redacted_thinking", "data": "EmwK"}, r"\[0\] is of type redacted_thinking"),
    "file": ({"type": "file", "file": {"filename": "a.pdf", "file_data": "JVBE"}}, r"\[0\] is of type file"),
    "document": ({"type": "document", "source": {"data": "a b"}}, r"\[0\] is of type document"),
    "search": ({"type": "search_result", "content": [text("a b")]}, r"\[0\] is of type search_result"),
    "without a type": ({"body": "a b"}, r"\[0\] is of type unknown"),
    "image": ({"type": "input_image", "image_url": "data:"}, r"\[0\] is of type image"),
    "audio": ({"type": "input_audio", "input_audio": {}}, r"\[0\] is of type audio"),
    "number": (3, r"\[0\] is of type int"),
    "a text beside the text": ({**text("a"), "translation": "b c"}, r'\[0\].translation is "b c"'),
    "a result": (
        {"type": "tool_result", "content": "a"},
        r'\[0\] is of type tool_result and stands in .* "assistant"',
    ),
    "a call without a name": ({"type": "tool_use", "input": {}}, r"\[0\] is a call without a name"),
    "no text": ({"type": "text", "text": 3}, r"\[0\].text is of type int"),
    "an empty thought": ({"type": "thinking", "signature": "x"}, r"\[0\] is a thought without text"),
}


@pytest.mark.parametrize("name", REFUSED_PARTS)
def test_parts_that_are_not_read_are_refused_by_name(name: str) -> None:
    part, match = REFUSED_PARTS[name]
    with pytest.raises(UserError, match=rf"^x.jsonl:7: messages\[1\]\.content{match}"):
        encode_chat(assistant(part, text("18.")), made(OURS), where="x.jsonl:7")


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        (
            [{"type": "tool_use", "name": "weather", "input": {}}, text("Then.")],
            r"\[1\] is of type text and follows a",
        ),
        ([text("First."), {"type": "thinking", "thinking": "Hm."}], r"\[1\] is of type thinking and follows a text"),
    ],
)
def test_parts_in_an_order_that_messages_cannot_have(parts: list[Any], match: str) -> None:
    with pytest.raises(UserError, match=rf"messages\[1\]\.content{match}"):
        encode_chat(assistant(*parts), made(OURS), tools=[TOOL])


def test_a_part_that_the_template_names_is_the_templates() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    template += "{% for p in m.content %}{% if p.type == 'note' %}[{{ p.body }}]{% else %}{{ p.text }}{% endif %}"
    template += "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    talk = assistant({"type": "note", "body": "Mind the gap."}, text("18."))
    assert learnt(made(template), talk) == "[Mind the gap.]18.<|im_end|>"
    with pytest.raises(UserError, match=r"messages\[1\].content\[0\].body"):
        encode_chat(talk, made(template.replace("p.body", "p.title")))


def learnt(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return learnt_text(tokenizer, *encode_chat(messages, tokenizer, where="x.jsonl:7", **options))


def marked_talk(*marks: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, mark in enumerate(marks):
        found += [USER, {"role": "assistant", "content": f"Answer {number}.", **mark}]
    return found


FLAGS = ["weight", "train", "training", "loss", "trainable", "loss_mask", "loss_weight", "learn"]


@pytest.mark.parametrize("value", [0, False, 0.0, "0"])
@pytest.mark.parametrize("name", FLAGS)
def test_a_turn_that_is_marked_is_context(name: str, value: Any) -> None:
    tokenizer = made(templates.CHATML)
    talk = marked_talk({}, {name: value}, {name: type(value)(1)})
    assert learnt(tokenizer, talk) == "Answer 0.<|im_end|>Answer 2.<|im_end|>"
    plain = [{"role": one["role"], "content": one["content"]} for one in talk]
    assert encode_chat(talk, tokenizer)[0] == encode_chat(plain, tokenizer)[0]


def test_a_mark_that_says_the_opposite() -> None:
    talk = marked_talk({"masked": True}, {"masked": False})
    assert learnt(made(templates.CHATML), talk) == "Answer 1.<|im_end|>"


MARKED = {
    "marked": templates.MARKED,
    "marked_wide": templates.MARKED_WIDE,
    "pieces": templates.IN_PIECES,
    "ours": OURS,
}


@pytest.mark.parametrize("masked", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("name", [*MARKED, "qwen3", "gpt_oss", "mistral", "phi3"])
def test_marked_turns_under_generation_markers(name: str, masked: tuple[int, ...]) -> None:
    tokenizer = made(MARKED[name]) if name in MARKED else tokenizer_of(name, marked=True)
    talk = marked_talk(*({"loss_mask": 0} if at in masked else {} for at in range(3)))
    everything = learnt(tokenizer, marked_talk({}, {}, {}))
    begins = [everything.find(f"Answer {at}.") for at in range(3)]
    found = learnt(tokenizer, talk)
    for at, begin in enumerate(begins):
        assert begin >= 0
        assert (f"Answer {at}." in found) == (at not in masked)
    ends = ("<|im_end|>", "</s>", "<|end|>", "<|return|>")
    assert sum(map(found.count, ends)) == 3 - len(masked)


@pytest.mark.parametrize("name", ["ours", "gpt_oss", "mistral", "granite", "hermes"])
def test_a_call_that_is_marked(name: str) -> None:
    tokenizer = made(OURS) if name == "ours" else tokenizer_of(name, marked=True)
    talk = talk_for("qwen25")
    everything = learnt(tokenizer, copy.deepcopy(talk), tools=[TOOL])
    answer = learnt(tokenizer, copy.deepcopy(talk), tools=[TOOL], train_on="last")
    talk[2]["weight"] = 0
    assert learnt(tokenizer, copy.deepcopy(talk), tools=[TOOL]) == answer
    talk[2]["weight"] = 1
    talk[4]["weight"] = 0
    assert learnt(tokenizer, talk, tools=[TOOL]) == everything.removesuffix(answer)


def test_a_list_of_marks_for_a_row() -> None:
    tokenizer = made(templates.CHATML)

    def learnt_of(talk: list[dict[str, Any]], mask: list[Any]) -> str:
        rows = [Row({"messages": talk, "loss_mask": mask}, "x.jsonl:7")]
        return learnt_text(tokenizer, *encode_rows(rows, DataConfig(format="chat"), tokenizer)[0])

    assert learnt_of(marked_talk({}, {}), [0, 0, 0, 1]) == "Answer 1.<|im_end|>"
    for name in ("train", "trainable", "train_on_turn", "learn", "supervised", "loss"):
        row = Row({"messages": marked_talk({}, {}), name: [0, 0, 0, 1]}, "x.jsonl:7")
        ids, mask = encode_rows([row], DataConfig(format="chat"), tokenizer)[0]
        assert learnt_text(tokenizer, ids, mask) == "Answer 1.<|im_end|>", name
    for name in ("mask", "masked", "turn_weights"):
        with pytest.raises(UserError, match=f"{name}.* may say which messages are learnt"):
            encode_rows(
                [Row({"messages": marked_talk({}, {}), name: [0, 1, 0, 1]}, "x")], DataConfig(format="chat"), tokenizer
            )
    assert learnt_of(marked_talk({}, {}), [0, True, 0, False]) == "Answer 0.<|im_end|>"
    with pytest.raises(UserError, match="loss_mask has 3 entries for 4 messages"):
        learnt_of(marked_talk({}, {}), [0, 0, 1])
    with pytest.raises(UserError, match=r"messages\[1\] has weight = 1 and loss_mask = 0, which contradict"):
        learnt_of(marked_talk({"weight": 1}), [0, 0])
    with pytest.raises(UserError, match=r"loss_mask\[1\] is 0, and messages\[1\] has loss_mask = 1"):
        learnt_of(marked_talk({"loss_mask": 1}), [0, 0])


@pytest.mark.parametrize(
    ("talk", "train_on", "match"),
    [
        (marked_talk({"weight": 0, "train": True}), "assistant", r"has weight = 0 and train = true, which contradict"),
        (marked_talk({"loss_scale": 0.3}), "assistant", r"loss_scale is 0.3, and a turn is learnt wholly or not"),
        (marked_talk({"loss": "no"}), "assistant", r'loss is "no", and a turn is learnt wholly or not'),
        (marked_talk({"mask": 1}), "assistant", r"mask is 1, which may say what is learnt"),
        (marked_talk({"train_detail": [{}]}), "assistant", r"train_detail is \[{}\], which may say what is learnt"),
        (marked_talk({"do_train": False}), "assistant", r"do_train is false, which may say what is learnt"),
        (marked_talk({"weight": 0}), "assistant", "every turn of the assistant is marked as not learnt"),
        (marked_talk({}, {"weight": 0}), "last", "the last turn of the assistant is marked as not learnt"),
        (marked_talk({}, {"weight": 0}), "all", r'messages\[3\] .*not learnt, and data.train_on = "all"'),
        (
            [{**USER, "loss_mask": 1}, *marked_talk({})[1:]],
            "assistant",
            r'messages\[0\] \(role "user"\) is marked as le',
        ),
    ],
)
def test_marks_that_cannot_be_followed(talk: list[dict[str, Any]], train_on: TrainOn, match: str) -> None:
    with pytest.raises(UserError, match=f"^x.jsonl:7: .*{match}"):
        encode_chat(talk, made(templates.CHATML), where="x.jsonl:7", train_on=train_on)


def test_marks_beside_train_on() -> None:
    tokenizer = made(templates.CHATML)
    assert learnt(tokenizer, marked_talk({"weight": 0}, {}), train_on="last") == "Answer 1.<|im_end|>"
    asked = [{**USER, "loss_mask": 0}, *marked_talk({"weight": 1})[1:]]
    assert learnt(tokenizer, asked) == "Answer 0.<|im_end|>"
    everything = [{**USER, "loss_mask": 1}, *marked_talk({"weight": 1})[1:]]
    assert learnt(tokenizer, everything, train_on="all") == learnt(tokenizer, marked_talk({}), train_on="all")
    # Nothing of a prompt is learnt, so its marks say nothing.
    rows = [Row({"prompt": [*marked_talk({"weight": 0}), USER]}, "x.jsonl:7")]
    assert encode_prompts(rows, DataConfig(format="prompts"), tokenizer)[0].messages[1].keys() == {"role", "content"}


def test_nothing_of_the_marks_reaches_the_template() -> None:
    template = templates.CHATML.replace("message['content']", "message | tojson")
    ids, _ = encode_chat(marked_talk({"weight": 0}, {"weight": 1}), tokenizer := made(template))
    assert '{"role": "assistant", "content": "Answer 1."}' in tokenizer.decode(ids)
    reading = templates.CHATML.replace("message['content']", "(message.weight | string) + message['content']")
    assert learnt(made(reading), marked_talk({"weight": 1})) == "1Answer 0.<|im_end|>"


def test_a_turn_that_says_two_things_is_refused() -> None:
    both = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "x", "content": "a longer answer"}]
    with pytest.raises(UserError, match=r"messages\[1\] has value and content, which differ"):
        check_messages(both, "x.jsonl:7")


def sharegpt(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"from": role, "value": value} for role, value in turns]


SHAREGPT = {
    "json": [("function_call", '{"name": "weather", "arguments": {"city": "Rome"}}')],
    "arguments as a text": [("function_call", '{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}')],
    "an object": [("function_call", {"name": "weather", "arguments": {"city": "Rome"}})],
    "a list": [("function_call", '[{"name": "weather", "arguments": {"city": "Rome"}}]')],
}


@pytest.mark.parametrize("result", ["observation", "tool_response", "function_response", "function", "tool"])
@pytest.mark.parametrize("name", SHAREGPT)
def test_a_turn_that_is_a_call(name: str, result: str) -> None:
    tokenizer = made(OURS)
    talk = sharegpt(("human", "Weather?"), *SHAREGPT[name], (result, "18"), ("gpt", "18 °C."))
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    expected = [
        USER,
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "18 °C."},
    ]
    assert encode_chat(talk, tokenizer, tools=[TOOL]) == encode_chat(expected, tokenizer, tools=[TOOL])
    swift = [{"role": "tool_call" if "call" in one["from"] else ROLES[at], "content": one["value"]}
             for at, one in enumerate(talk)]  # fmt: skip
    assert encode_chat(swift, tokenizer, tools=[TOOL]) == encode_chat(expected, tokenizer, tools=[TOOL])


ROLES = ("user", "assistant", "tool", "assistant")


def test_calls_behind_each_other_are_one_turn() -> None:
    tokenizer = made(OURS)
    one, other = (f'{{"name": "weather", "arguments": {{"city": "{city}"}}}}' for city in ("Rome", "Oslo"))
    rendered = [f"<tool_call>\n{call}\n</tool_call>" for call in (one, other)]
    asked, said = ("human", "Weather?"), ("gpt", "Let me see.")
    talk = sharegpt(asked, ("function_call", f"<think>Rome.</think>\n{one}"))
    assert learnt(tokenizer, talk) == f"<think>\nRome.\n</think>\n\n{rendered[0]}<|im_end|>"
    talk = sharegpt(asked, said, ("function_call", one))
    assert learnt(tokenizer, talk) == f"Let me see.\n{rendered[0]}<|im_end|>"
    talk += sharegpt(("function_call", other))
    assert learnt(tokenizer, talk) == f"Let me see.\n{rendered[0]}\n{rendered[1]}<|im_end|>"
    with pytest.raises(UserError, match=r"messages\[2\] and the turn before it are one turn .* learnt otherwise"):
        learnt(tokenizer, [*talk[:2], {**talk[2], "weight": 0}])


@pytest.mark.parametrize(
    "value", ["weather(Rome)", "{'name': 'weather', 'arguments': {}}", '{"name": "weather"}', "[]", "3"]
)
def test_a_turn_that_should_be_a_call_and_is_none(value: str) -> None:
    talk = sharegpt(("human", "Weather?"), ("function_call", value))
    with pytest.raises(
        UserError, match=r'^x.jsonl:7: messages\[1\] is a call \(role "function_call"\), and its text is'
    ):
        encode_chat(talk, made(OURS), where="x.jsonl:7")


HARMLESS = {
    "id": "msg 1 of 2",
    "timestamp": "2024-01-01T10:00:00 UTC",
    "sent": "2024-01-01 10:00",
    "tokens": 17,
    "model": "some model of theirs",
    "score": 0.25,
    "is_good": True,
    "mood": "calm",
    "usage": {"tokens": 3},
    "loss_info": {"mean": 2.5},
    "annotations": [{"title": "a title of a page", "url": "https://x"}],
    "refusal": None,
    "prefix": False,
    "images": [],
    "channel": "final",
    "recipient": "all",
    "name": "assistant",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_fields_that_hold_no_text_end_no_run(name: str) -> None:
    talk = [USER, {"role": "assistant", "content": "18.", name: HARMLESS[name]}]
    assert learnt(made(templates.CHATML), talk) == "18.<|im_end|>"


TEXTS = {
    "thought": "Hm",
    "note": "a longer text",
    "name": "Alice",
    "recipient": "functions.weather",
    "channel": "analysis",
    "reasoning_details": [{"type": "reasoning.text", "text": "Hm"}],
    "extra": {"why": "a longer text"},
    "files": ["a.pdf"],
    "response": "Yes",
}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", TEXTS)
def test_fields_with_a_text_are_refused_unless_the_template_reads_them(name: str, at: int) -> None:
    talk = [dict(USER), {"role": "assistant", "content": "18."}]
    talk[at][name] = TEXTS[name]
    with pytest.raises(UserError, match=rf"^x.jsonl:7: .*leaves out messages\[{at}\].{name}, which is "):
        encode_chat(talk, made(templates.CHATML), where="x.jsonl:7")
    reading = templates.CHATML.replace(
        "message['content']", f"(message['{name}'] or '') | string + message['content']"
    )
    ids, _ = encode_chat(talk, tokenizer := made(reading))
    assert str(TEXTS[name]) in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"images": ["x"]}, r"messages\[1\].images is of type image"),
        ({"audio": {"id": "a"}}, r"messages\[1\].audio is of type audio"),
        ({"prefix": True}, r"messages\[1\].prefix is true"),
        ({"refusal": "No, never."}, r"messages\[1\] has a content and a refusal"),
        ({"reasoning": "One.", "thinking": "Two."}, r"messages\[1\] has reasoning and thinking, which differ"),
        ({"reasoning": ["One."]}, r"messages\[1\].reasoning is of type list"),
        ({"function_call": {"name": "f"}, "tool_calls": [CALL]}, r"messages\[1\] has function_call and tool_calls"),
    ],
)
def test_fields_that_are_refused_by_name(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=f"^x.jsonl:7: {match}"):
        encode_chat([USER, {"role": "assistant", "content": "18.", **fields}], made(OURS), where="x.jsonl:7")


def test_a_refusal_is_what_the_assistant_says() -> None:
    talk = [USER, {"role": "assistant", "content": None, "refusal": "No, never."}]
    assert learnt(made(OURS), talk) == "No, never.<|im_end|>"
    assert learnt(made(OURS), assistant({"type": "refusal", "refusal": "No."})) == "No.<|im_end|>"


@pytest.mark.parametrize(
    ("field", "value", "role", "expected"),
    [
        ("name", "Ann", "user", True),
        ("name", "User", "user", False),
        ("name", "", "user", False),
        ("name", "weather", "tool", False),
        ("note", "a" * 64, "", False),
        ("note", "a" * 65, "", True),
        ("note", "two words", "", True),
        ("note", "12 34", "", False),
        ("note", {"more": ["word", {"deep": "two words"}]}, "", True),
        ("note", ["word", 3, None], "", False),
    ],
)
def test_which_fields_hold_a_text(field: str, value: Any, role: str, expected: bool) -> None:
    assert is_text(field, value, role) is expected


@pytest.mark.parametrize(("value", "key"), [(None, None), ([], None), ([None], None), ([None, "x.png"], "images")])
def test_a_list_of_nulls_holds_no_media(value: Any, key: str | None) -> None:
    assert media_in({"images": value}) == key


def test_a_thought_stands_at_the_start_of_a_text() -> None:
    assert thought_in(" <think>\na </think>\n b ") == ("a", "b ")
    assert thought_in("a <think>b</think>") is thought_in("<think>b") is None


def test_thoughts_are_cut_out_in_both_ways_of_templates() -> None:
    assert without_thoughts("<think>a</think>b<think>c</think>d") == ["d", "bd"]


@pytest.mark.parametrize(("other", "count"), [("abd", 2), ("ab", 2), ("abcd", 3), ("x", 0), ("", 0)])
def test_equal_letters_are_counted_up_to_the_first_other_one(other: str, count: int) -> None:
    assert same_at_start("abc", other) == count
