"""What the user says: strict TOML in, frozen pydantic models out. Nothing here imports torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp2kit.config.load import dump_toml, load_config
    from fsdp2kit.config.schema import TrainingConfig

__all__ = ["TrainingConfig", "dump_toml", "load_config"]


def __getattr__(name: str) -> Any:
    """Import on first use: `fsdp2kit keys` needs none of the models, which take most of its time to define."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp2kit.config import load, schema

    return getattr(schema if name == "TrainingConfig" else load, name)
