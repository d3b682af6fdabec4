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
from typing import Any, BinaryIO

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from fsdp2kit.distributed import one_per_machine_first
from fsdp2kit.errors import UserError
from fsdp2kit.files import todo_of_cache
from fsdp2kit.model.adapters import CONFIG_NAME, Adapter
from fsdp2kit.model.text_part import text_config_of

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

    patterns = ["*.json", "*.jinja", "*.model", "*.txt", *(["*.safetensors"] if with_weights else [])]
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
) -> None:
    """Write everything but weights into ``directory``.

    Args:
        architecture: the model's class in transformers, by name (`fully_shard` puts one of its own in front).
        source: the model directory that training started from; its generation config is kept.
        stops: tokens that end what is trained; generation stops at them, too.
        adapter: the adapters that are trained, if any are; their config is written beside the model's.
        whole: the config of ``source``, if its text part is trained; all small files there are copied, and config.json
            changes only in what training changed of the text part.
    """
    directory, config = Path(directory), copy.deepcopy(config)
    if whole is not None and source is not None:
        copy_assets(source, directory)
        _change_text_config(directory / "config.json", config, whole)
    else:
        config.architectures = [architecture]
        config.save_pretrained(directory)
    generation, _ = generation_config(config, tokenizer=tokenizer, source=source, stops=stops)
    generation.save_pretrained(directory)
    if adapter is not None:
        adapter.save(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
        _drop_former_template(directory / "chat_template.json", tokenizer)


def _drop_former_template(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Delete a processor's file with another template than was trained on: it would go before the tokenizer's."""
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("chat_template") != tokenizer.chat_template:
        path.unlink()


def _change_text_config(path: Path, config: PretrainedConfig, whole: PretrainedConfig) -> None:
    """Write into a whole's config.json what differs in its text part's config; without a difference leave the file."""
    before = text_config_of(whole)
    assert before is not None, "it has a text part"
    old = before.to_dict()
    changed = {
        key: value for key, value in config.to_dict().items() if old.get(key) != value and key not in _INCIDENTAL
    }
    if changed:
        fields = json.loads(path.read_text(encoding="utf-8"))
        text = fields.get("text_config")
        (text if isinstance(text, dict) else fields).update(changed)  # some (Qwen2-VL's) are flat
        path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def copy_assets(source: Path, target: Path) -> None:
    """Copy a directory's files into another: all but weights, their index, an adapter's config, and hidden files."""
    for path in [*source.iterdir(), *source.glob("additional_chat_templates/*")]:
        is_asset = path.suffix in ASSET_SUFFIXES and not path.name.endswith(".index.json")
        if path.is_file() and is_asset and path.name != CONFIG_NAME and not path.name.startswith("."):
            copied = target / path.relative_to(source)
            copied.parent.mkdir(exist_ok=True, parents=True)
            shutil.copyfile(path, copied)


def generation_config(
    config: PretrainedConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Path | None,
    stops: Collection[int] = (),
) -> tuple[GenerationConfig, list[int]]:
    """The generation config of an export, and those of ``stops`` that its source lacked; see `save_assets`."""
    if source is not None and (source / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(source)
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


_EDGE, _SAMPLE, _SAMPLES = 64 * 1024, 4096, 4
"""Bytes of each end of a file, of a sample of a tensor, and how many samples."""


def weights_digest(place: str | Path) -> str:
    """Two digests of a safetensors file, or of a directory's: of sizes, headers and last bytes, and of samples of each
    tensor.

    They do not depend on the directory's path. Reading the files whole would take minutes.
    """
    edges, samples, place = hashlib.sha256(), hashlib.sha256(), Path(place)
    for path in [place] if place.is_file() else sorted(place.glob("*.safetensors")):
        if not path.is_file():
            raise UserError(str(path), "is no file, or a link to one that is not there", "fetch the model again")
        size = path.stat().st_size
        with path.open("rb") as file:
            edges.update(f"{path.name} {size}".encode())
            edges.update(file.read(_EDGE))
            file.seek(max(0, size - _EDGE))
            edges.update(file.read(_EDGE))
            for start, end in _tensor_bytes(file):
                last = max(start, end - _SAMPLE)
                for number in range(_SAMPLES):
                    file.seek(start + (last - start) * number // (_SAMPLES - 1))
                    samples.update(file.read(min(_SAMPLE, end - start)))
    return f"{edges.hexdigest()[:16]} {samples.hexdigest()[:16]}"


def _tensor_bytes(file: BinaryIO) -> list[tuple[int, int]]:
    """Where each tensor of a safetensors file begins and ends; empty for a damaged file, which loading reports."""
    file.seek(0)
    try:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        places = sorted(value["data_offsets"] for name, value in header.items() if name != "__metadata__")
        return [(8 + length + start, 8 + length + end) for start, end in places]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        return []
