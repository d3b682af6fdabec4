"""The families of chat templates in ``jinja/``, and what each makes of the conversations below.

``«`` and ``»`` stand around what is learnt: in a text, and in a template where generation markers would be.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from fsdp2kit.model.tokenizer import set_stop_tokens
from tests.data.helpers.templates import make_tokenizer

ANSWER, SECOND = "Yes, wet.\nüber-wet 🌊!", "Yes."
SINGLE = [{"role": "user", "content": "Is water wet?"}, {"role": "assistant", "content": ANSWER}]
MULTI = [*SINGLE, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": SECOND}]
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
    """What a template makes of the conversations."""

    eos: str
    """The tokenizer's ``eos_token``, which is not always what ends a turn."""
    special: tuple[str, ...]
    """Special tokens of its vocabulary."""
    talk: str
    """The text of `TALK`, without the reasoning where the template renders none; "" if it renders no calls."""
    single: str
    """What is learnt of `SINGLE`."""
    multi: str = ""
    """What is learnt of `MULTI`, where earlier answers are rendered otherwise than they were generated."""
    reasons: bool = False
    """Whether it renders reasoning."""


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
        f"<think>\n\n</think>\n\n{ANSWER}<|im_end|>",
        multi=f"{ANSWER}<|im_end|><think>\n\n</think>\n\n{SECOND}<|im_end|>",
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
        f"{ANSWER}<|im_end|>",
    ),
    "hermes": Family(
        "<|im_end|>",
        CHATML,
        f"<|im_start|>system\nTools: <tools>{SIGNATURE}</tools><|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
        '«<tool_call>\n{"name": "weather", "arguments": {"city": "Orléans"}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>tool\n<tool_response>\n18\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«18 °C.<|im_end|>»\n",
        f"{ANSWER}<|im_end|>",
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
        f"{ANSWER}<|eot_id|>",
    ),
    "mistral": Family(
        "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        f"<|begin|>[AVAILABLE_TOOLS] [{SIGNATURE}][/AVAILABLE_TOOLS][INST] Be brief.\n\nWeather?[/INST]"
        '«[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Orléans"}, "id": "call00001"}]</s>»'
        '[TOOL_RESULTS] {"content": 18, "call_id": "call00001"}[/TOOL_RESULTS]« 18 °C.</s>»',
        f" {ANSWER}</s>",
    ),
    "deepseek": Family(
        "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<｜end▁of▁sentence｜>"),
        f"<|begin|>Be brief.\n\nTools:\n{SIGNATURE}<｜User｜>Weather?<｜Assistant｜>"
        "«<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Orléans"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>»'
        "<｜tool▁output▁begin｜>18<｜tool▁output▁end｜>«18 °C.<｜end▁of▁sentence｜>»",
        f"{ANSWER}<｜end▁of▁sentence｜>",
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
        f"<|channel|>final<|message|>{ANSWER}<|return|>",
        multi=f"<|channel|>final<|message|>{ANSWER}<|end|><|channel|>final<|message|>{SECOND}<|return|>",
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
        f"{ANSWER}<|end_of_text|>",
    ),
    "gemma": Family("<eos>", ("<start_of_turn>", "<end_of_turn>", "<eos>"), "", f"{ANSWER}<end_of_turn>"),
    "phi3": Family(
        "<|endoftext|>",
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
        "",
        f"{ANSWER}<|end|>",
    ),
}


GLM4 = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")


def template_of(name: str, *, marked: bool = False) -> str:
    """The template of a file, with or without ``{% generation %}`` markers."""
    source = (Path(__file__).parent / "jinja" / f"{name}.jinja").read_text(encoding="utf-8")
    for sign, tag in (("«", "{%- generation -%}"), ("»", "{%- endgeneration -%}")):
        source = source.replace(sign, tag if marked else "")
    return source


def glm4(*stops: str, marked: bool = False) -> Any:
    """A tokenizer whose template ends no answer itself; generation stops at these and at ``<|endoftext|>``."""
    tokenizer: Any = make_tokenizer(template_of("glm4", marked=marked), eos="<|endoftext|>", special=GLM4)
    set_stop_tokens(tokenizer, [tokenizer.convert_tokens_to_ids(stop) for stop in stops])
    return tokenizer


def tokenizer_of(name: str, *, marked: bool = False, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with the family's template, with or without ``{% generation %}`` markers."""
    source, family = template_of(name, marked=marked), FAMILIES[name]
    return make_tokenizer(source, eos=family.eos, special=family.special, trim_offsets=trim_offsets)


def talk_for(name: str) -> list[dict[str, Any]]:
    talk = copy.deepcopy(TALK)
    for message in talk:
        if not FAMILIES[name].reasons:
            message.pop("reasoning_content", None)
    return talk
