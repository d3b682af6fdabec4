"""Eight families of chat templates, written down from their public syntax, with and without generation markers.

``«`` and ``»`` in a template stand where the markers would be: around the assistant's text and its end of turn.
"""

from __future__ import annotations

from dataclasses import dataclass

USER, ANSWER, AGAIN, SECOND = "Is water wet?", "Yes, wet.\nüber-wet 🌊!", "Sure?", "Yes."
SINGLE = [{"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}]
MULTI = [*SINGLE, {"role": "user", "content": AGAIN}, {"role": "assistant", "content": SECOND}]
CALL = {"type": "function", "function": {"name": "touch", "arguments": {"what": "water"}}}
WITH_TOOLS = [
    {"role": "user", "content": USER},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "cold"},
    {"role": "tool", "content": "wet"},
    {"role": "assistant", "content": SECOND},
]
TOOLS = [{"type": "function", "function": {"name": "touch", "parameters": {"type": "object", "properties": {}}}}]


@dataclass(frozen=True)
class Family:
    """A template with what it makes of the conversations above."""

    template: str
    eos: str
    """The tokenizer's ``eos_token``, which is not always what ends a turn."""
    single: str
    """What is learnt of `SINGLE`: the assistant's text and its end of turn."""
    multi: str
    """What is learnt of `MULTI`."""
    special: tuple[str, ...] = ()
    """Special tokens of its vocabulary."""
    rewrites_history: bool = False
    """Whether earlier answers are rendered otherwise than they were generated."""

    def source(self, *, marked: bool) -> str:
        """The Jinja source, with or without ``{% generation %}`` markers."""
        opening, closing = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
        return self.template.replace("«", opening).replace("»", closing)


CHATML = Family(
    template=(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}«{{ m.content + '<|im_end|>' }}»{{ '\n' }}"
        "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    eos="<|im_end|>",
    single=f"{ANSWER}<|im_end|>",
    multi=f"{ANSWER}<|im_end|>{SECOND}<|im_end|>",
    special=("<|im_start|>", "<|im_end|>"),
)
LLAMA3 = Family(
    template=(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' + system"
        " + '<|eot_id|>' }}"
        "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'assistant' %}«{{ m.content | trim + '<|eot_id|>' }}»"
        "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    eos="<|eot_id|>",
    single=f"{ANSWER}<|eot_id|>",
    multi=f"{ANSWER}<|eot_id|>{SECOND}<|eot_id|>",
    special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
MISTRAL = Family(
    template=(
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
        "{% set loop_messages = messages[1:] %}{% else %}{% set system = '' %}{% set loop_messages = messages %}"
        "{% endif %}{{ bos_token }}{% for m in loop_messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
        "{% else %}«{{ ' ' + m.content + eos_token }}»{% endif %}{% endfor %}"
    ),
    eos="</s>",
    single=f" {ANSWER}</s>",
    multi=f" {ANSWER}</s> {SECOND}</s>",
    special=("[INST]", "[/INST]", "</s>"),
)
GEMMA = Family(
    template=(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}«{{ m.content | trim + '<end_of_turn>\n' }}»"
        "{% else %}{{ m.content | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    eos="<eos>",
    single=f"{ANSWER}<end_of_turn>",
    multi=f"{ANSWER}<end_of_turn>{SECOND}<end_of_turn>",
    special=("<start_of_turn>", "<end_of_turn>", "<eos>"),
)
# Reasoning is kept only after the last question, and the last answer has a (possibly empty) block of it.
QWEN3 = Family(
    template=(
        "{%- set ns = namespace(asked=messages | length - 1, found=false) %}{%- for m in messages[::-1] %}"
        "{%- if not ns.found and m.role == 'user' and not (m.content.startswith('<tool_response>') and"
        " m.content.endswith('</tool_response>')) %}{%- set ns.found = true %}"
        "{%- set ns.asked = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- if m.role != 'assistant' %}"
        "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{%- else %}"
        "{%- set content, reasoning = m.content, '' %}{%- if m.reasoning_content is string %}"
        "{%- set reasoning = m.reasoning_content %}{%- elif '</think>' in m.content %}"
        "{%- set reasoning = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{%- set content = m.content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\n' }}«{%- if loop.index0 > ns.asked and (loop.last or reasoning) %}"
        "{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
        "{%- else %}{{- content }}{%- endif %}{{- '<|im_end|>' }}»{{- '\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    eos="<|im_end|>",
    single=f"<think>\n\n</think>\n\n{ANSWER}<|im_end|>",
    multi=f"{ANSWER}<|im_end|><think>\n\n</think>\n\n{SECOND}<|im_end|>",
    special=("<|im_start|>", "<|im_end|>"),
    rewrites_history=True,
)
# Where no generation prompt follows, the text (not the turn) is closed by the eos_token.
PHI3 = Family(
    template=(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}"
        "{% if m.role == 'assistant' %}«{{ m.content + '<|end|>\n' }}»"
        "{% else %}{{ m.content + '<|end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    eos="<|endoftext|>",
    single=f"{ANSWER}<|end|>",
    multi=f"{ANSWER}<|end|>{SECOND}<|end|>",
    special=("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
)
DEEPSEEK = Family(
    template=(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' }}«{{ m.content + '<｜end▁of▁sentence｜>' }}»{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
    ),
    eos="<｜end▁of▁sentence｜>",
    single=f"{ANSWER}<｜end▁of▁sentence｜>",
    multi=f"{ANSWER}<｜end▁of▁sentence｜>{SECOND}<｜end▁of▁sentence｜>",
    special=("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
)
# Qwen2.5 and Hermes: signatures in the system message, calls as JSON, results of one round in one user turn.
TOOL_CALLING = Family(
    template=(
        "{{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else 'Be helpful.') }}"
        "{%- if tools %}{{- '\n\n# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}"
        "{{- '\n</tools>' }}{%- endif %}{{- '<|im_end|>\n' }}"
        "{%- for m in messages %}{%- if m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
        "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}«"
        "{%- if m.content %}{{- m.content }}{%- endif %}{%- for call in m.tool_calls or [] %}"
        "{%- if m.content or not loop.first %}{{- '\n' }}{%- endif %}"
        '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \''
        " + call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>' }}»{{- '\n' }}"
        "{%- elif m.role == 'tool' %}{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}"
        "{%- endif %}{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    eos="<|im_end|>",
    single=f"{ANSWER}<|im_end|>",
    multi=f"{ANSWER}<|im_end|>{SECOND}<|im_end|>",
    special=("<|im_start|>", "<|im_end|>"),
)
FAMILIES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "deepseek": DEEPSEEK,
    "tools": TOOL_CALLING,
}
# DeepSeek-R1 and its kin open the reasoning in the prompt, and cut it out of every answer that they render.
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
