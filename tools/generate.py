"""Answer questions with a Hugging Face model, or an adapter and its model, by plain transformers (and peft).

One without a chat template continues texts.

fsdp2kit generate DIR "question" ...
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, logging

from fsdp2kit.console import TRUST_CODE, add_trust_remote_code, in_one_line, positive, show, user_path
from fsdp2kit.data.tokens import plain_prompt_ids
from fsdp2kit.errors import UserError, check_installed
from fsdp2kit.model.build import load_whole
from fsdp2kit.weights.adapters import CONFIG_NAME


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Print each question with the model's greedy answer. Returns the exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(description="Answer questions with a Hugging Face model.")
    parser.add_argument(
        "directory", type=user_path, help="a Hugging Face model directory, or an adapter's, e.g. runs/x/hf"
    )
    parser.add_argument("questions", nargs="+", help="user messages, or beginnings of texts, each by itself")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="tokens to generate at most")
    add_trust_remote_code(parser)
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    tokenizer, model = load(options.directory, trust_remote_code=options.trust_remote_code)
    for question in options.questions:
        if tokenizer.chat_template is None:
            ids = torch.tensor([plain_prompt_ids(tokenizer, question)])
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        else:
            messages = [{"role": "user", "content": question}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        output = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        show(f"> {question}\n{answer.strip()}", is_data=True)
    return 0


def load(directory: Path, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Tokenizer and model of a directory.

    Args:
        trust_remote_code: run the Python code that its files name.
    """
    todo = "give the export of a run, e.g. runs/x/hf"
    is_adapter = (directory / CONFIG_NAME).is_file()
    if is_adapter:
        check_installed("peft", where=str(directory))
    if not is_adapter and not (directory / "config.json").is_file():
        raise UserError(str(directory), "is not a model directory (no config.json)", todo)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        load_model = load_adapted if is_adapter else load_whole
        model = load_model(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises errors of many kinds for files that are missing or damaged
        if "trust_remote_code" in str(error):
            todo = TRUST_CODE
        raise UserError(str(directory), f"cannot be loaded ({str(error).partition(chr(10))[0]})", todo) from error
    return tokenizer, model


def load_adapted(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """An adapter and its model, loaded by peft: transformers' own loading leaves DoRA's magnitudes out."""
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(str(directory)).base_model_name_or_path
    if base is None:
        raise ValueError("its adapter_config.json names no model")
    whole = load_whole(base, local_files_only=False, trust_remote_code=trust_remote_code)
    model: Any = PeftModel.from_pretrained(whole, str(directory))
    if (directory / "generation_config.json").is_file():  # it stops at what ended the turns that were trained
        setattr(model, "generation_config", GenerationConfig.from_pretrained(directory))  # noqa: B010 (typed as tensors)
    return model


if __name__ == "__main__":
    sys.exit(main())
