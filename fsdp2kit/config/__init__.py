"""What the user says: strict TOML in, frozen pydantic models out. Nothing here imports torch."""

from fsdp2kit.config.load import dump_toml, load_config
from fsdp2kit.config.schema import TrainingConfig

__all__ = ["TrainingConfig", "dump_toml", "load_config"]
