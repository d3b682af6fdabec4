"""What every TOML section is, and the types of fields that hold paths."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from fsdp2kit.config.facts import MeshSizes, Needs
from fsdp2kit.files.remote import is_url

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_FILE_SUFFIX = re.compile(r"\.(jsonl?|ndjson|parquet|csv|tsv|txt|arrow|jinja2?|gz|bz2|xz|zst)$")


class OverrideText(str):
    """A text from the command line. Paths in it are relative to the working directory, not to the TOML."""


def may_be_hub_id(text: str) -> bool:
    """Whether a text looks like a hub id, "name" or "owner/name", and not like a data file."""
    return bool(_HUB_ID.fullmatch(text)) and not _FILE_SUFFIX.search(text)


def expand_home(value: Any) -> Any:
    """Replace a leading ``~`` or ``~user`` of a text by that home directory; any other value stays."""
    if isinstance(value, str) and value.startswith("~"):
        with contextlib.suppress(RuntimeError):  # no such user
            return type(value)(Path(value).expanduser())
    return value


def absolute_path(value: object, info: ValidationInfo) -> object:
    """Make a TOML's path absolute. URLs stay; so do relative paths of configs made in Python, without a context."""
    value = expand_home(value)
    if not isinstance(value, str) or not value or not info.context or is_url(value):
        return value
    base = Path.cwd() if isinstance(value, OverrideText) else info.context["base"]
    candidate = base / value
    # A path that does not exist is not resolved: a glob or a missing file must stay readable in the message.
    return str(candidate.resolve() if candidate.exists() else candidate)


def _absolute_or_hub_id(value: object, info: ValidationInfo) -> object:
    path = absolute_path(value, info)
    if isinstance(value, str) and may_be_hub_id(value) and not Path(str(path)).exists():
        return str(value)
    return path


def _absolute_or_ready(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str) or not ready_template(value):
        return absolute_path(value, info)
    file = str(absolute_path(value, info))
    if info.context and Path(file).exists():
        raise ValueError(f"{value!r} is both a ready template and a file; write './{value}' for the file")
    return str(value)


def _absolute_function(value: object, info: ValidationInfo) -> object:
    """Make the path of ``path.py:function`` absolute; ``module:function`` stays."""
    path, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not path.endswith(".py"):
        return value
    file = str(absolute_path(OverrideText(path) if isinstance(value, OverrideText) else path, info))
    if info.context and not Path(file).is_file():
        raise ValueError(f"{file}: no such file")
    return f"{file}{colon}{name}"


def ready_template(name: str) -> Path | None:
    """The file of a chat template that comes with the package; None if it has none of that name."""
    file = TEMPLATES / f"{name}.jinja"
    return file if re.fullmatch(r"[\w-]+", name) and file.is_file() else None


InputPath = Annotated[str, Field(min_length=1), BeforeValidator(_absolute_or_hub_id)]
"""A path relative to the TOML that it is written in, or a hub id."""
LocalPath = Annotated[str, Field(min_length=1), BeforeValidator(absolute_path)]
"""A path relative to the TOML that it is written in."""
TemplatePath = Annotated[str, Field(min_length=1), BeforeValidator(_absolute_or_ready)]
"""The name of a ready chat template, or a path relative to the TOML that it is written in."""
FunctionPath = Annotated[str, Field(pattern=r"^[^:].*:\w+$"), BeforeValidator(_absolute_function)]
"""``module:function`` or ``path.py:function``, the path relative to the TOML that it is written in."""
OutputPath = Annotated[str, Field(min_length=1), BeforeValidator(expand_home)]
"""A path that is written to, relative to the working directory, or an fsspec URL."""


def _refuse_float16(value: object) -> object:
    if value == "float16":
        what = "its gradients need a loss scaler, and there is none: use 'bfloat16', or 'float32'"
        raise PydanticCustomError("float16", what)
    return value


TrainingDType = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_refuse_float16)]
"""A dtype to compute, reduce or store parameters in."""
Duration = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?[smh]$")]
"""A time in seconds, minutes or hours: "90s", "30m", "1.5h"."""


def seconds_of(duration: str) -> float:
    """Seconds of a `Duration`."""
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def untagged(key: str, tag: str) -> BeforeValidator:
    """For a union of sections that ``key`` tells apart: a table without that key is the member ``tag``."""
    return BeforeValidator(lambda value: {key: tag, **value} if isinstance(value, dict) else value)


_METHODS = ("check", "models", "identity", "needs_log_probs", "needs_reference", "needs", "offline", "changed")
_METHODS += ("engine_needs", "savings")


class Section(BaseModel):
    """A TOML section: unknown keys are errors, values are not coerced across types, instances do not change.

    The core asks a recipe's sections by the methods below. Each asks the sections inside this one, so that a recipe's
    ``Config`` answers for all of its own.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """
        Raises:
            TypeError: a key has the name of one of the methods.
        """
        for name in _METHODS:
            if name in cls.model_fields:
                raise TypeError(f"{cls.__name__}.{name}: is a method of Section; give the key another name")

    def check(self, config: Any, sizes: MeshSizes) -> None:
        """Refuse what does not go together, before anything is built.

        Args:
            config: the whole config, of the recipe's class.
            sizes: of the mesh.

        Raises:
            UserError: at the first contradiction.
        """
        for section in self._inside():
            section.check(config, sizes)

    def models(self) -> dict[str, str]:
        """Models that the run reads beside ``model.path``, Hugging Face directories or hub ids, by TOML key.

        They are part of what a resumed run must have unchanged.
        """
        return {key: path for section in self._inside() for key, path in section.models().items()}

    def identity(self) -> dict[str, str]:
        """What a resumed run must have unchanged, as texts by TOML key."""
        return {key: text for section in self._inside() for key, text in section.identity().items()}

    @property
    def needs_log_probs(self) -> bool:
        """Whether the loss is made of tokens' log-probabilities."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a frozen copy of the model."""
        return False

    def needs(self, config: Any) -> Needs:
        """What the section adds to the run's memory; ``config`` as in `check`."""
        found = Needs(log_probs=self.needs_log_probs, reference=self.needs_reference)
        for section in self._inside():
            found |= section.needs(config)
        return found

    def offline(self, config: Any, *, model: Any, plan: Any, missing: Collection[str]) -> dict[str, str | None]:
        """Try what ``--check`` can try without network and weights.

        Args:
            config: as in `check`.
            model, plan: as the run would build them; None: the model is not on this machine.
            missing: TOML keys of data that are not on this machine.

        Returns:
            A line for the user by TOML key, or None for what is not on this machine.

        Raises:
            UserError: the start would refuse it.
        """
        found: dict[str, str | None] = {}
        for section in self._inside():
            found |= section.offline(config, model=model, plan=plan, missing=missing)
        return found

    def changed(self) -> list[str]:
        """Keys that have another value than their default."""
        return [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]

    def _inside(self) -> Iterator[Section]:
        """The sections that are values of this one's keys, or entries of their lists."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, Section))
