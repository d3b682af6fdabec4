"""The reward function of toml/grpo_demo.toml; docs/grpo.md says what such functions are given."""


def larger(completions, digit, **columns):
    """The share of each answer's characters that are digits above the one that its prompt names."""
    texts = [messages[0]["content"] for messages in completions]
    wanted = ["0123456789"[named + 1 :] for named in digit]
    return [sum(one in above for one in text) / max(1, len(text)) for text, above in zip(texts, wanted, strict=True)]
