"""Let a Hugging Face directory answer, with nothing but transformers: python tools/generate.py DIR "question" ..."""

from __future__ import annotations

import argparse
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, logging


def main() -> int:
    """Print each question with the model's greedy answer. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Let a Hugging Face directory answer.")
    parser.add_argument("directory", help="a Hugging Face model directory, e.g. runs/x/hf")
    parser.add_argument("questions", nargs="+", help="user messages, each a conversation of its own")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens to generate at most")
    options = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.directory)
    model = AutoModelForCausalLM.from_pretrained(options.directory)
    for question in options.questions:
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"> {question}\n{answer.strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
