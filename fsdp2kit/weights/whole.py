"""What a model's files are files of: the model itself, or a model of several parts (text, images, …) around it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from fsdp2kit.errors import UserError

_ADVICE = "give a decoder-only text model (one for AutoModelForCausalLM); `fsdp2kit docs not_supported` says more"
_PATTERNS = ("rank_pattern", "alpha_pattern")  # fields of peft's config that map names of modules to values

_Value = TypeVar("_Value")


class FileNames:
    """How the model of the files names what a model has; here they are the same. `Whole` is the other case."""

    @property
    def whole(self) -> Whole | None:
        """What the model is the text part of; None for a model of its own."""
        return None

    def stored_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model whose files these are."""
        return model

    def outer(self, name: str) -> str | None:
        """A tensor's or a module's name in the model of the files; None where it has none."""
        return name

    def inner(self, name: str) -> str | None:
        """The inverse of `outer`; None for another part's tensor."""
        return name

    def outer_config(self, values: dict[str, Any], layers: Iterable[str]) -> dict[str, Any]:
        """The values of peft's config of a model's adapters, with the files' names of modules.

        Args:
            layers: that have adapters, without experts, by their names in the model.
        """
        return values

    def read_config(self, config: Any) -> None:
        """Turn the files' names of modules in peft's config into the model's, in place."""

    def inner_keys(self, stored: dict[str, _Value], *, source: Path, others_from: Path) -> dict[str, _Value]:
        """A state dict's values by keys that name the model's tensors, where they name those of the files.

        Args:
            source: where the state dict comes from.
            others_from: where an export takes the other parts' tensors from.
        """
        return stored


OWN_NAMES = FileNames()
"""Of a model of its own."""


@dataclass(frozen=True, eq=False)
class Whole(FileNames):
    """The model of several parts that a model is the text part of; see `FileNames.whole`."""

    model: PreTrainedModel
    """On meta, without adapters; its text part has the config that is trained."""
    pairs: tuple[tuple[str, str], ...]
    """The decoder and the head: names in the text part's model, and in the whole."""
    config: PretrainedConfig
    """As the checkpoint has it."""

    @property
    def whole(self) -> Whole:
        """Itself."""
        return self

    def stored_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """The whole."""
        return self.model

    def outer(self, name: str) -> str | None:
        """A tensor's or a module's name in the whole, by its name in the text part; None where it has none."""
        return next((there + name[len(own) :] for own, there in self.pairs if f"{name}.".startswith(f"{own}.")), None)

    def inner(self, name: str) -> str | None:
        """The inverse of `outer`; None for another part's tensor."""
        return next(
            (own + name[len(there) :] for own, there in self.pairs if f"{name}.".startswith(f"{there}.")), None
        )

    def outer_config(self, values: dict[str, Any], layers: Iterable[str]) -> dict[str, Any]:
        """As in `FileNames`: each layer by its whole name, since a short name or an expression might match another
        part's layers."""
        ends = tuple(values["modules_to_save"] or ())  # of the text part's names, as peft compares them
        saved = [name for name, _ in self.model.named_modules() if (self.inner(name) or "").endswith(ends)]
        patterns = {field: {self.outer(key) or key: one for key, one in values[field].items()} for field in _PATTERNS}
        chosen = {"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None}
        return {
            **values,
            **chosen,
            **patterns,
            "target_modules": [self.outer(name) for name in layers],
            "modules_to_save": saved or None,
        }

    def read_config(self, config: Any) -> None:
        """As in `FileNames`. peft matches a regular expression with the whole's names. Other parts get no adapters.

        Raises:
            UserError: the expression matches another part's layer.
        """
        target = config.target_modules
        if isinstance(target, str):
            with contextlib.suppress(re.error):  # reported where the text part's names are matched
                found = [name for name, _ in self.model.named_modules() if re.fullmatch(target, name)]
                if outside := [name for name in found if self.inner(name) is None]:
                    what = f"{target!r} matches {outside[0]}, which is no part of the text part"
                    todo = "begin it with the text part's name, as in model.language_model."
                    raise UserError("lora.target_modules", what, todo)
                if found and target.lower() != "all-linear":
                    config.target_modules = {self.inner(name) for name in found}
        elif target:
            config.target_modules = {self.inner(name) or name for name in target}
        if config.modules_to_save:
            config.modules_to_save = [self.inner(name) or name for name in config.modules_to_save]
        for field in _PATTERNS:
            setattr(config, field, self._by_module(getattr(config, field) or {}))

    def inner_keys(self, stored: dict[str, _Value], *, source: Path, others_from: Path) -> dict[str, _Value]:
        """As in `FileNames`, under any prefix.

        Raises:
            UserError: another part's tensor is among them.
        """
        # Files from before transformers 4.52 name them without "model.".
        others = {name.removeprefix("model.") for name in self.model.state_dict() if self.inner(name) is None}
        for key in stored:
            parts = key.split(".")
            if any(".".join(parts[start:]) in others for start in range(len(parts))):
                what = (
                    f"holds {key}, which is no part of the text part; exports would take it from {others_from} instead"
                )
                raise UserError(str(source), what, "if it was not trained, leave such tensors out of the state dict")
        renamed = stored
        for own, there in self.pairs:
            pattern = re.compile(rf"(?<![^.]){re.escape(there)}(?=\.)")
            renamed = {pattern.sub(own, key, count=1): one for key, one in renamed.items()}
        return renamed

    def _by_module(self, pattern: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a ``rank_pattern`` or ``alpha_pattern`` by the text part's names of the modules that get them.

        peft takes the first key that matches the end of a name, as an expression.
        """
        found = {}
        for name, _ in self.model.named_modules() if pattern else ():
            key = next((one for one in pattern if re.match(rf"(.*\.)?({one})$", name)), None)
            if key is not None and (inner := self.inner(name)) is not None:
                found[inner] = pattern[key]
        return found

    @torch.no_grad()
    def check_same_logits(self, small: PreTrainedModel) -> None:
        """Refuse a whole that computes other logits of text than its text part, tried on a small copy of that part.

        Args:
            small: its decoder and head are put into a small whole, whose other parts stay on meta.
        """
        config = copy.deepcopy(small.config)
        config.pad_token_id = 0  # some replace images' tokens by it, before they are looked up
        around = build_whole(self.config, config).eval()
        for (own, there), module in zip(self.pairs, (small.get_decoder(), small.get_output_embeddings()), strict=True):
            assert small.get_submodule(own) is module
            owner, _, leaf = there.rpartition(".")
            setattr(around.get_submodule(owner), leaf, module)
        ids = torch.arange(2, 14)[None]
        try:
            theirs = around(input_ids=ids, use_cache=False).logits
        except Exception as error:  # whatever an architecture raises, one that computes something on meta above all
            reason = str(error).partition("\n")[0]
            raise refused(type(self.model), f"it does not run on text alone ({reason})") from None
        ours = small(input_ids=ids, use_cache=False).logits
        if theirs.is_meta or not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5):
            raise refused(type(self.model), "its logits of text are others than those of its text part alone")


def build_whole(config: PretrainedConfig, text: PretrainedConfig) -> PreTrainedModel:
    """The model of all parts on meta, its text part of config ``text``.

    Raises:
        UserError: transformers has no class for it, or cannot build it.
    """
    name = next(iter(config.architectures or ()), None) or ""
    kind: Any = getattr(transformers, name, None)
    if kind is None or not inspect.isclass(kind) or not isinstance(config, getattr(kind, "config_class", None) or ()):
        what = f"its config names the class {name or 'none'}, which is none of transformers' for {config.model_type!r}"
        raise UserError("model.path", what, _ADVICE)
    config = copy.deepcopy(config)
    setattr(config, "text_config", copy.deepcopy(text))  # noqa: B010 (not every config has one)
    try:
        with torch.device("meta"):
            return kind._from_config(config, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:  # whatever a constructor raises, for a package that it lacks, say
        reason = " ".join(str(error).split()) or type(error).__name__
        raise refused(kind, f"transformers cannot build the whole ({textwrap.shorten(reason, 200)})") from None


def refused(whole: type[Any], what: str) -> UserError:
    """The error of a whole whose text part cannot be trained."""
    return UserError("model.path", f"the text part of {whole.__name__} cannot be trained: {what}", _ADVICE)
