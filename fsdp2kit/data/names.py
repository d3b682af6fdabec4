"""Names that other tools give to columns, to fields and roles of messages, and to parts of a content: one table.

Tools: transformers, TRL, axolotl, LLaMA-Factory, ms-swift, torchtune, open-instruct, Megatron, verl, OpenRLHF, xtuner,
OpenAI, Anthropic, LangChain, ShareGPT. `fsdp2kit.config.data_formats.COLUMNS` has the columns that each format reads
under our names. A column that no table names is metadata (id, source, url, score, …): it is passed over, and the start
names it.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from fsdp2kit.config.data_formats import DataFormat

# Columns.

# Other names of a column in published data.
ALSO = {
    "prompt": ("question", "instruction", "query", "input", "problem", "messages", "conversations", "history"),
    "completion": ("response", "answer", "output"),
    "chosen": ("better", "winner", "accepted", "preferred"),
    "rejected": ("worse", "loser", "dispreferred"),
}
CONVERSATIONS = ("messages", "conversations")  # read in this order unless `[data.columns]` names one
# 1 for each token (format "tokens") or each message ("chat") to learn, 0 for the others.
MASKS = (
    "loss_mask",  # Megatron, NeMo, verl, torchtitan
    "loss_masks",
    "completion_mask",  # TRL
    "assistant_masks",  # transformers, TRL
    "assistant_mask",
    "assistant_tokens_mask",
    "response_mask",  # verl
    "response_masks",
    "answer_mask",
    "output_mask",
    "action_mask",  # OpenRLHF
    "target_mask",  # axolotl
    "train_mask",
    "trainable_mask",
    "supervised_mask",
    "label_mask",
    "labels_mask",
)
# Weights of tokens or messages: read like a mask where they are lists, since 0 and 1 are one.
WEIGHTS = ("loss_weights", "token_weights", "loss_scale")  # ms-swift's is the last
# Where the documents of a packed row of tokens begin.
POSITIONS = ("position_ids", "input_pos", "inputs_position")  # transformers, TRL; torchtune; MaxText. From 0
LENGTHS = (
    "seq_lengths",  # TRL
    "seq_lens",  # torchtune
    "seqlens",
    "seq_len",
    "sequence_lengths",
    "sample_lengths",
    "document_lengths",
    "doc_lengths",
    "doc_lens",
    "lengths",
)
CUMULATIVE = (
    "cu_seqlens",  # flash-attn, Megatron
    "cu_seq_lens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cu_seq_lens_q",  # transformers
    "cu_seq_lens_k",
    "cu_doc_lens",
)
NUMBERS = (
    "sequence_ids",
    "seq_ids",
    "segment_ids",  # T5X, MaxText
    "document_ids",
    "doc_ids",
    "sample_ids",
    "example_ids",
    "seq_idx",  # transformers, for Mamba
    "inputs_segmentation",  # MaxText
    "segments",
)
# The former name of `tools`: schemas without {"type": "function", "function": …} around them.
FUNCTIONS = "functions"

# What no row may hold: as a part's type (OpenAI's "image_url" and "input_audio", …), as a key, or as a column.
MEDIA = ("image", "video", "audio")
MEDIA_KEYS = tuple(name for kind in MEDIA for name in (kind, f"{kind}s"))  # of messages and rows

# Fields and roles of messages.

STANDARD_ROLES = ("system", "developer", "user", "assistant", "tool")
"""The names of roles that messages have after `fsdp2kit.data.fitting.fit`."""

# Other tools' names of the roles; ShareGPT's in the key "from".
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
PLAIN = {"role", "content"}  # the fields of most messages
CALL_ROLES = ("function_call", "tool_call")  # turns whose whole text is a call in JSON
REASONING = ("reasoning_content", "reasoning", "thinking")

# A 1 or true lets the assistant's turn be learnt, a 0 or false takes it out of the loss. OpenAI and mistral-finetune
# call this weight, axolotl train or training, ms-swift and xtuner loss or loss_scale, LLaMA-Factory loss_weight,
# Megatron and verl loss_mask. The field "masked" of torchtune says the opposite.
FLAGS = (
    "weight",
    "train",
    "training",
    "trainable",
    "train_on_turn",
    "loss",
    "loss_mask",
    "loss_weight",
    "loss_scale",
    "learn",
    "supervised",
)
OPPOSITE = "masked"
FLAG_VALUES = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
# A field of another name that a tool may take for such a flag.
LIKE_A_FLAG = re.compile(
    r"mask|loss|train|learn|supervis|weight|ignore|skip|exclude|context_only|is_context|is_target", re.IGNORECASE
)

# Parts of a content: the type, and the key that holds the text.
TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
THOUGHTS = ("thinking", "reasoning")
THOUGHT_KEYS = ("thinking", "reasoning", "text", "content", "summary")
CALLS = ("tool_use", "tool_call", "function_call")
RESULTS = ("tool_result", "tool_response", "function_call_output", "function_response")
CALL_IDS = ("tool_use_id", "tool_call_id", "call_id", "toolCallId", "id")
CALL_NAMES = ("name", "toolName", "tool_name")
ARGUMENTS = ("input", "arguments", "args")
RESULT_KEYS = ("content", "output", "result")

# Fields that hold no text to learn, whatever their value is: what a row is called, when and by what it was made, what
# was counted or rated, and notes of a tool on a text that stands elsewhere.
HARMLESS = {
    *("id", "uuid", "message_id", "msg_id", "parent", "parent_id", "conversation_id", "turn_id"),
    *("user_id", "call_id", "tool_call_id", "index", "idx", "turn", "timestamp", "time", "date"),
    *("datetime", "created", "created_at", "create_time", "updated_at", "update_time", "tokens"),
    *("token_count", "num_tokens", "length", "usage", "logprobs", "model", "model_name", "score"),
    *("scores", "rating", "ratings", "quality", "rank", "reward", "lang", "language", "locale", "source"),
    *("url", "hash", "object", "type", "content_type", "status", "state", "finish_reason", "stop_reason"),
    *("stop_sequence", "metadata", "meta", "annotations", "citations", "signature", "cache_control"),
    *("tags", "labels", "category", "toxicity", "detoxify", "moderation", "openai_moderation"),
}
# Short values of these are text all the same: they stand in the prompts of the tools that know them.
SPOKEN = {
    *("recipient", "channel", "text", "thought", "thoughts", "think", "analysis", "rationale", "cot", "plan"),
    *("scratchpad", "response", "answer", "output", "prompt", "instruction", "question", "query", "completion"),
    *("message", "body", "translation", "tool_calls", "refusal", "value", *REASONING),
}
# What is sent along with a message, whatever it is.
ENCLOSED = ("file", "files", "attachment", "attachments", "document", "documents")
USUAL = {"channel": ("final",), "recipient": ("all", "assistant", "user")}

# Columns that are refused.

When = Literal["given", "list", "not one", "false", "bad", "true", "not zero", "not asked", "beside", "no system"]


class Refused(NamedTuple):
    """A column that says what is learnt, and that is not read here."""

    names: tuple[str, ...]
    formats: tuple[DataFormat, ...]
    when: When
    """The values that are refused; see `fsdp2kit.data.unread`. Nulls and what is empty never are."""
    what: str
    """What the column says."""
    todo: str
    """What to do, with ``{name}`` for the column's name."""
    unless: tuple[str, ...] = ()
    """The column is passed over where the row has one of these, which are read instead."""


_ANSWERED: tuple[DataFormat, ...] = ("chat", "prompt_completion", "alpaca", "text", "tokens", "preference")
_WITH_TEMPLATE: tuple[DataFormat, ...] = ("chat", "prompt_completion", "alpaca", "preference", "prompts")
_WITH_PROMPT: tuple[DataFormat, ...] = ("prompt_completion", "preference", "prompts")
_SAID_MASK = ("labels", *MASKS, *WEIGHTS)

REFUSED = (
    # What is learnt, and how much.
    Refused(
        (
            "weight",
            "weights",
            "sample_weight",
            "sample_weights",
            "example_weight",
            "instance_weight",
            "importance_weight",
            "loss_weight",
            *WEIGHTS,
        ),
        _ANSWERED,
        "not one",
        "is a weight in the loss, and all rows count alike",
        "drop the column, or make rows of one weight a source of data.sources",
    ),
    Refused(
        MASKS,
        ("prompt_completion", "alpaca", "text", "preference"),
        "list",
        "says what is learnt, and only the formats tokens and chat read it",
        'set data.format to one of them ("tokens" if it has a number for each token)',
    ),
    Refused(
        ("label", "kto_tag", "desirable", "is_desirable", "thumbs_up"),
        ("chat", "prompt_completion", "alpaca"),
        "false",
        "says that the answer is bad, and it would be learnt",
        "drop such rows, or give pairs of answers to recipe dpo",
    ),
    Refused(
        ("label",),  # TRL's KTO
        ("prompt_completion",),
        "bad",
        "says that the completion is bad, and it would be learnt",
        "drop such rows, or give pairs of answers to recipe dpo",
    ),
    Refused(
        ("train", "trainable", "learn", "learnable", "supervised", "train_on"),
        _ANSWERED,
        "false",
        "says that the row is not learnt, and it would be",
        "drop such rows",
    ),
    Refused(
        ("masked", "is_masked", "no_loss", "skip_loss", "ignore_loss", "exclude_from_loss"),
        _ANSWERED,
        "true",
        "says that the row is not learnt, and it would be",
        "drop such rows",
    ),
    Refused(
        (
            "masked",
            "is_masked",
            "mask",
            "masks",
            "turn_mask",
            "turn_weights",
            "message_weights",
            "train_turns",
            "token_mask",
        ),
        ("chat",),
        "list",
        "may say which messages are learnt, and is not read here",
        "call it loss_mask: 1 for each message to learn, 0 for the others",
    ),
    Refused(
        ("margin",),  # TRL's reward models
        ("preference",),
        "given",
        "is a margin between the two answers, which no loss here reads",
        "drop the column",
    ),
    # Tokens.
    Refused(
        ("prompt_mask", "mask", "masks", "ignore_mask", "padding_mask"),
        ("tokens",),
        "list",
        "is a mask that tools read in opposite ways",
        "write loss_mask, 1 for each token to learn",
        unless=_SAID_MASK,
    ),
    Refused(
        (
            "prompt_length",
            "prompt_len",
            "prompt_lengths",
            "prompt_lens",
            "prompt_ids_len",
            "num_prompt_tokens",
            "source_len",
            "source_length",
            "instruction_length",
            "answer_start",
            "completion_start",
        ),
        ("tokens",),
        "not zero",
        "says where the prompt ends, and all tokens would be learnt",
        "write labels, −100 for each token of the prompt",
        unless=_SAID_MASK,
    ),
    Refused(
        (
            "prompt_ids",
            "prompt_input_ids",
            "prompt_token_ids",
            "query_ids",
            "completion_ids",
            "response_ids",
            "answer_ids",
            "target_ids",
            "targets",
            "target",
            "label_ids",
            "is_target",
            "sft_mask",
            "inputs_mask",
            "decoder_input_ids",
            "shift_labels",
            "shifted_labels",
        ),
        ("tokens",),
        "list",
        "says what is learnt, and all tokens of input_ids would be",
        "write labels, −100 for each token that is not learnt",
        unless=_SAID_MASK,
    ),
    Refused(
        ("token_type_ids", "mm_token_type_ids"),
        ("tokens",),
        "not zero",
        "holds other types than 0, which models of text alone do not read",
        "drop the column",
    ),
    Refused(
        (
            "advantages",
            "returns",
            "old_logprobs",
            "logprobs",
            "teacher_logprobs",
            "teacher_logits",
            "target_logprobs",
            "target_token_ids",
        ),
        ("tokens",),
        "list",
        "is a target that cross-entropy does not read",
        "use the recipe grpo or distill, or drop the column",
    ),
    Refused(
        ("pixel_values", "image_grid_thw", "input_features", "inputs_embeds", "input_embeds", *MEDIA_KEYS),
        ("tokens",),
        "given",
        "is of an image, a video or audio, and only text is trained",
        "drop the row",
    ),
    # What the model sees before its answer.
    Refused(
        (
            "image_path",
            "image_paths",
            "image_url",
            "image_urls",
            "image_file",
            "pixel_values",
            "input_features",
            "video_path",
            "video_url",
            "audio_path",
            "audio_url",
            "media",
        ),
        _WITH_TEMPLATE,
        "given",
        "is of an image, a video or audio, and only text is trained",
        "drop the row, or the column if its text does without",
    ),
    Refused(
        (
            "available_tools",
            "tool_definitions",
            "tool_schemas",
            "tool_list",
            "tools_json",
            "function_schemas",
            "function_definitions",
        ),
        _WITH_TEMPLATE,
        "list",
        "holds tools, which the prompt would lack",
        'set data.columns.tools = "{name}"',
        unless=("tools", FUNCTIONS),
    ),
    Refused(
        ("system_prompt", "system_message", "system_instruction", "system_instructions", "sys_prompt", "preprompt"),
        _WITH_TEMPLATE,
        "no system",
        "is a system prompt, which the conversation would lack",
        "rename it to system",
        unless=("system",),
    ),
    Refused(
        ("chat_template",),
        _WITH_TEMPLATE,
        "given",
        "is a chat template of this row's own, and one template renders all rows",
        "set model.chat_template",
    ),
    Refused(
        ("history", "chat_history", "conversation_history"),  # LLaMA-Factory, ms-swift
        _WITH_PROMPT,
        "list",
        "holds turns before the prompt, which would be left out",
        'make the prompt a list of messages, or use data.format = "alpaca"',
    ),
    Refused(
        ("input", "context"),  # Alpaca, LLaMA-Factory; Dolly
        ("prompt_completion", "preference"),
        "not asked",
        "is a part of the question that the prompt lacks",
        'write both into the prompt, or use data.format = "alpaca" (data.columns.input = "{name}")',
    ),
    Refused(
        ("input",),  # Alpaca's and LLaMA-Factory's; of other prompts it may be what a reward reads
        ("prompts",),
        "beside",
        "is a part of the question that the prompt lacks",
        "write both into the prompt",
    ),
    Refused(
        ("context", "inputs", "passage"),
        ("alpaca",),
        "not asked",
        "is a part of the question that would be left out",
        'set data.columns.input = "{name}"',
        unless=("input",),
    ),
)
