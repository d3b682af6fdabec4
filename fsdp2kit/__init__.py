"""fsdp2kit: FSDP2 `fully_shard` recipes, from a Hugging Face model and a TOML to a Hugging Face directory."""

__version__ = "0.1.0"
