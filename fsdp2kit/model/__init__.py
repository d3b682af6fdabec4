"""A Hugging Face model: built on meta, filled from safetensors or a seed, with a loss on its own head."""
