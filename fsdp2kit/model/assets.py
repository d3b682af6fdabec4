"""A model's Hugging Face directory: find or fetch it, digest it, and write what it holds beside weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from fsdp2kit.errors import UserError
from fsdp2kit.files.local import load_json, todo_of_cache
from fsdp2kit.job.distributed import one_per_machine_first
from fsdp2kit.model.code_files import code_files
from fsdp2kit.model.config_file import changed_fields, config_text, with_old_rope
from fsdp2kit.model.inspect import value_of
from fsdp2kit.model.tokenizer_files import save_tokenizer, tokenizer_files
from fsdp2kit.weights.adapters import CONFIG_NAME, Adapter

ASSET_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}

# Keys of a config that say nothing about which model it is.
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


def find_hf_dir(path: str | Path, *, key: str, with_weights: bool) -> Path:
    """The local directory of a path or hub id; a hub id's small files and safetensors are fetched into the cache.

    In a job every rank calls this: one rank of each machine fetches first.

    Args:
        key: of the TOML, for the message.
    """

    def find() -> Path:
        if Path(path).is_dir():
            return Path(path)
        if Path(path).is_absolute():
            raise UserError(key, f"{path} is not a directory", "check the path")
        return _fetch(str(path), key=key, with_weights=with_weights)

    # All ranks take part: whether it is a directory may differ by machine.
    return one_per_machine_first(find)


@functools.cache
def _fetch(path: str, *, key: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    # Code is fetched and copied to exports; it only runs under `trust_remote_code`.
    patterns = [*(f"*{suffix}" for suffix in sorted(ASSET_SUFFIXES)), *(["*.safetensors"] if with_weights else [])]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:  # the hub client raises errors of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        todo = todo_of_cache(error) or "check the path, or the hub id and your access"
        raise UserError(key, f"{path}: {reason}", todo) from None


def save_assets(
    directory: str | Path,
    *,
    config: PretrainedConfig,
    architecture: str,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Path | None,
    stops: Collection[int] = (),
    adapter: Adapter | None = None,
    whole: PretrainedConfig | None = None,
) -> list[str]:
    """Write everything but weights into ``directory``, each file as its source has it but for what was changed.

    Args:
        config: of the model, with the user's overrides. Under ``source``, only what it changes is written.
        architecture: the model's class in transformers, by name (`fully_shard` puts one of its own in front).
        tokenizer: its files are those it was loaded from.
        source: the model directory that training started from; None: config.json is in transformers' own form.
        stops: tokens that end what is trained; generation stops at them, too.
        adapter: the adapters that are trained, if any are; their config is written beside the model's.
        whole: the config of ``source``, if its text part is trained; all small files there are copied.

    Returns:
        A line for each thing that another reader may miss.
    """
    directory = Path(directory)
    notes = []
    if whole is not None and source is not None:
        copy_assets(source, directory)
    if source is not None and (source / "config.json").is_file():
        if not _write_changed_config(directory, config, architecture, source, whole):
            what = "no change of the source's keys gives this model, so it is in transformers' own form"
            notes.append(f"warning: export: config.json: {what}, which older versions may read as another model")
        notes += _copy_code(source, directory)
    else:
        _write_own_config(directory, config, architecture)
    _write_generation_config(directory, config, tokenizer, source, stops)
    if adapter is not None:
        adapter.save(directory)
    if tokenizer is not None:
        coded = config if value_of(config, "auto_map") else None
        save_tokenizer(tokenizer, directory, config=coded, has_processor=whole is not None)
    return notes


def _write_changed_config(
    directory: Path, config: PretrainedConfig, architecture: str, source: Path, whole: PretrainedConfig | None
) -> bool:
    """Write the source's config.json with what changed; False: it is in transformers' own form instead."""
    content = (source / "config.json").read_bytes()
    fields = load_json(content)
    changed, is_exact = changed_fields(fields, config, whole)
    if whole is None and not is_exact:
        _write_own_config(directory, config, architecture)
        return False
    changed.pop("configuration_files", None)  # configs for other versions, which are not copied
    if whole is None and architecture not in (changed.get("architectures") or []):
        changed["architectures"] = [architecture]  # of a base model, say, without the head that was trained
    if changed != fields:
        content = config_text(changed).encode()
    (directory / "config.json").write_bytes(content)
    return True


def _write_own_config(directory: Path, config: PretrainedConfig, architecture: str) -> None:
    """Write a config in the form of this transformers, with RoPE's numbers also where transformers 4 reads them."""
    config = copy.deepcopy(config)
    config.architectures = [architecture]
    config.save_pretrained(directory)
    path = directory / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(config_text(with_old_rope(fields, config)), encoding="utf-8")


def _copy_code(source: Path, directory: Path) -> list[str]:
    """Copy the code that a model directory's files name; returns a line if some is not there."""
    found, missing = code_files(source)
    for module in found:
        _copy(source / module, directory / module)
    if not missing:
        return []
    return [f"warning: export: the files of {source} name {missing[0]}, which is not there, so exports lack it"]


def _write_generation_config(
    directory: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Path | None,
    stops: Collection[int],
) -> None:
    generation, added = generation_config(config, tokenizer=tokenizer, source=source, stops=stops)
    name = "generation_config.json"
    if source is None or not (source / name).is_file():
        generation.save_pretrained(directory)
        return
    content = (source / name).read_bytes()
    if added:
        content = config_text({**load_json(content), "eos_token_id": generation.eos_token_id}).encode()
    (directory / name).write_bytes(content)


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True, parents=True)
    shutil.copyfile(path, target)


def copy_assets(source: Path, target: Path) -> None:
    """Copy a directory's files into another: all but weights, their index, an adapter's config, and hidden files.

    Of folders within, chat templates are copied, and code that the files name.
    """
    for path in [*source.iterdir(), *source.glob("additional_chat_templates/*")]:
        is_asset = path.suffix in ASSET_SUFFIXES and not path.name.endswith(".index.json")
        if path.is_file() and is_asset and path.name != CONFIG_NAME and not path.name.startswith("."):
            _copy(path, target / path.relative_to(source))
    for path in tokenizer_files(source):  # tokenizer.model.v3 has a suffix of its own
        _copy(path, target / path.relative_to(source))
    for module in code_files(source)[0]:
        _copy(source / module, target / module)


def _stored_generation_config(source: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(source)
    except Exception as error:  # what is no such config raises nearly anything
        reason = str(error).strip().partition("\n")[0]
        what = f"is not a generation config ({type(error).__name__}: {reason})"
        raise UserError(str(source / "generation_config.json"), what, "mend it, or remove it") from None


def generation_config(
    config: PretrainedConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Path | None,
    stops: Collection[int] = (),
) -> tuple[GenerationConfig, list[int]]:
    """The generation config of an export, and those of ``stops`` that its source lacked; see `save_assets`."""
    if source is not None and (source / "generation_config.json").is_file():
        generation = _stored_generation_config(source)
    else:
        generation = GenerationConfig.from_model_config(config)
        if tokenizer is not None:
            # A bare config does not know the tokenizer's ids, and generation would never stop.
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(generation, name, getattr(tokenizer, name))
    known = _ids(generation.eos_token_id)
    added = sorted(set(stops) - set(known))
    if added:
        generation.eos_token_id = [*known, *added]
    return generation, added


def eos_ids(path: str | Path, *, local_files_only: bool = False) -> tuple[int, ...]:
    """Ids at which generation of the model at a path or hub id stops: its generation config's, else its config's.

    Empty where neither says any, or neither can be read.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        generation = GenerationConfig.from_pretrained(path, local_files_only=local_files_only)
        return tuple(_ids(generation.eos_token_id))
    with contextlib.suppress(OSError, ValueError, TypeError):
        fields, _ = PretrainedConfig.get_config_dict(path, local_files_only=local_files_only)
        text = fields.get("text_config")
        fields = {**fields, **text} if isinstance(text, dict) else fields
        return tuple(_ids(fields.get("eos_token_id")))
    return ()


def _ids(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]


def config_digest(config: PretrainedConfig) -> str:
    """A digest of what makes two configs the same model: architecture, sizes, positions, but not origin."""
    fields = {key: value for key, value in config.to_dict().items() if key not in _INCIDENTAL}
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{config.model_type} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
