"""What a row says and its template leaves out: found in each row, wherever in a text it stands."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fsdp2kit.config.section import TEMPLATES
from fsdp2kit.data.messages import TrainOn
from fsdp2kit.errors import UserError
from tests.data.helpers.families import tokenizer_of
from tests.data.helpers.templates import encode_chat, make_tokenizer, spoken

made = cache(make_tokenizer)
START = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
END = "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
END += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CUT = START + "{{ m.content.split('</think>')[-1] }}" + END
OPENED = CUT.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
FIELD = START + "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
FIELD += "{{ m.content.split('</think>')[-1] }}" + END
# Qwen3's: a thought in the content or beside it, of the last turn alone.
LAST = START + "{% set parts = m.content.split('</think>') %}{% set thought = m.reasoning_content or '' %}"
LAST += "{% if parts | length > 1 %}{% set thought = parts[0].split('<think>')[-1] %}{% endif %}"
LAST += (
    "{% if loop.last %}{{ '<think>\n' + thought.strip() + '\n</think>\n\n' }}{% endif %}{{ parts[-1].strip() }}" + END
)
THOUGHT = "<think>\nAdd two and two.\n</think>\n\nIt is 4."


def talk(*answers: str | dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for answer in answers:
        said = {"content": answer} if isinstance(answer, str) else answer
        found += [{"role": "user", "content": "How many?"}, {"role": "assistant", **said}]
    return found


def text_of(template: str, *answers: str | dict[str, Any], train_on: TrainOn = "assistant") -> str:
    tokenizer = made(template)
    return spoken(tokenizer, *encode_chat(talk(*answers), tokenizer, where="x.jsonl:7", train_on=train_on))


@pytest.mark.parametrize("template", [CUT, OPENED], ids=["cut", "opened by the prompt"])
@pytest.mark.parametrize(
    "answer",
    [THOUGHT, "<think>It is 4.</think>It is 4.", "Add.\n</think>\n\nIt is 4.", "<think>\n\n</think>\n\nIt is 4."],
)
def test_a_thought_that_is_cut_out_of_the_content_is_refused(template: str, answer: str) -> None:
    with pytest.raises(
        UserError, match=r'^x.jsonl:7: .*leaves out the thought in messages\[1\].content; .*"chatml"'
    ) as e:
        text_of(template, answer)
    assert "single-turn" not in str(e.value)
    assert "train_on" not in str(e.value)


def test_a_single_turn_under_a_prompt_that_opens_a_thought_is_not_sent_to_single_turns() -> None:
    with pytest.raises(UserError, match=r"messages\[1\] differently") as error:
        text_of(OPENED, "It is 4.")
    assert "single-turn" not in str(error.value)


@pytest.mark.parametrize("tag", ["thought", "reasoning", "scratchpad"])
def test_thoughts_in_other_tags(tag: str) -> None:
    answer = f"<{tag}>Add two and two.</{tag}>It is 4."
    assert f"«{answer}<|im_end|>»" in text_of(CUT, answer)
    with pytest.raises(UserError, match="leaves out the thought"):
        text_of(CUT.replace("think", tag), answer)


@pytest.mark.parametrize("cut", ["split('<answer>')[-1]", "split('\\n')[0]", "truncate(20)", "[:-3]", "[4:]"])
def test_other_pieces_of_a_content_that_are_left_out(cut: str) -> None:
    answer = "Let me see what that is.\nOne moment please. <answer>It is 4.</answer> And so on."
    change = f" | {cut}" if cut.startswith("truncate") else cut if cut.startswith("[") else f".{cut}"
    with pytest.raises(UserError, match=r"leaves out messages\[1\].content"):
        text_of(START + "{{ (m.content)" + change + " }}" + END, answer)


@pytest.mark.parametrize(
    "change",
    ["| upper", "| trim", "| indent(4)", "| tojson", "| e", "| replace('see', 'look')", "| title", "| urlize"],
)
def test_a_content_that_is_written_otherwise_is_shown(change: str) -> None:
    answer = "Let me see <what>\n'that' & \"this\" is: über.\n\n  Yes. "
    assert "»" in text_of(START + "{{ m.content " + change + " }}" + END, answer)


def test_a_question_that_is_left_out_of_one_row_alone() -> None:
    template = CUT.replace("{{ m.content }}{% endif", "{{ m.content if m.content | length < 30 else '…' }}{% endif")
    assert "How many?" in text_of(template, "It is 4.")
    long = [{"role": "user", "content": "How many are two and two in all, please?"}, talk("4")[1]]
    with pytest.raises(UserError, match=r"leaves out messages\[0\].content"):
        encode_chat(long, made(template))


def test_a_thought_that_the_template_renders_as_a_field_is_learnt() -> None:
    expected = "«<think>Add two and two.</think>It is 4.<|im_end|>»"
    assert expected in text_of(FIELD, THOUGHT)
    assert expected in text_of(FIELD, {"content": "It is 4.", "reasoning_content": "Add two and two."})
    assert text_of(FIELD, THOUGHT, THOUGHT).count(expected) == 2


@pytest.mark.parametrize("opening", ["<think>", "<reasoning>", "<analysis>", "In this format "])
def test_a_text_that_is_shown_whole_stays_as_it_is(opening: str) -> None:
    closing = opening.replace("<", "</") if opening.startswith("<") else "</think>"
    answer = f"{opening}two and two{closing}\n<answer>4</answer>"
    for tokenizer in (tokenizer_of("gpt_oss"), made((TEMPLATES / "chatml.jinja").read_text())):
        assert answer in spoken(tokenizer, *encode_chat(talk(answer), tokenizer))


def test_a_thought_goes_where_the_model_thinks() -> None:
    tokenizer = tokenizer_of("qwen3")
    text = spoken(tokenizer, *encode_chat(talk(THOUGHT), tokenizer))
    assert text.endswith(f"«{THOUGHT}<|im_end|>»\n")


SPELLINGS = {"inline": THOUGHT, "field": {"content": "It is 4.", "reasoning_content": "Add two and two."}}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_thoughts_of_earlier_turns_in_both_spellings(spelling: str) -> None:
    answer = SPELLINGS[spelling]
    history = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n"
    last = f"<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n«{THOUGHT}<|im_end|>»\n"
    assert text_of(LAST, answer, answer, train_on="last") == history + last
    with pytest.raises(UserError, match=r'the thought in messages\[1\].*; set data.train_on = "last" .*"chatml"'):
        text_of(LAST, answer, answer)
    marked = LAST.replace("{% set parts", "{% generation %}{% set parts")
    marked = marked.replace("{{ parts[-1].strip() }}", "{{ parts[-1].strip() }}{% endgeneration %}")
    assert text_of(marked, answer, answer, train_on="last") == history + last
    with pytest.raises(UserError, match=r'the thought in messages\[1\].*; set data.train_on = "last"'):
        text_of(marked, answer, answer)


def test_history_may_lose_its_thoughts_where_the_last_turn_has_none() -> None:
    assert text_of(CUT, THOUGHT, "4.", train_on="last").endswith("It is 4.<|im_end|>\n" + text_of(CUT, "4."))


def test_an_argument_that_is_left_out_of_one_row() -> None:
    call = "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() if k != 'note' %}"
    template = START + call + "{{ k + '=' + v }}{% endfor %}{% endfor %}{{ m.content or '' }}" + END

    def calling(**arguments: str) -> list[dict[str, Any]]:
        function = {"name": "f", "arguments": arguments}
        return talk({"content": "", "tool_calls": [{"type": "function", "function": function}]})

    tokenizer = made(template)
    assert "«city=Rome<|im_end|>»" in spoken(tokenizer, *encode_chat(calling(city="Rome"), tokenizer))
    with pytest.raises(UserError, match=r"messages\[1\].tool_calls\[0\].function.arguments.note: \"Ask twice\""):
        encode_chat(calling(city="Rome", note="Ask twice"), tokenizer)
