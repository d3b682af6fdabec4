"""An export's tokenizer: the files that it was loaded from, changed only in what differs from them now.

transformers 5 writes tokenizers in a form of its own, whose class transformers 4 does not know, and leaves
``tokenizer.model`` out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from fsdp2kit.files.local import read_json_object
from fsdp2kit.model.code_files import code_files

_CONFIG = "tokenizer_config.json"
_NAMES = (
    "tokenizer*",  # .json, _config.json, .model, .model.v3, .4.0.0.json
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "vocab.*",
    "merges.*",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "*.spm",
)
_NEVER = (".py", ".safetensors", ".bin", ".pt")
_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
_SETTINGS = ("model_max_length", "padding_side", "truncation_side")


def tokenizer_files(directory: Path, names: Mapping[str, str] | None = None) -> list[Path]:
    """A tokenizer's files in a directory, without code.

    Args:
        names: further names, of its class (``vocab_files_names``).
    """
    patterns = [*_NAMES, *(name for name in (names or {}).values() if Path(name).name == name)]
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file() and path.suffix not in _NEVER)


def source_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """The directory on this machine that a tokenizer was loaded from; None for one that was made in memory."""
    from huggingface_hub import snapshot_download

    name = str(tokenizer.name_or_path or "")
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # the hub client raises errors of many kinds
        return None


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    config: PretrainedConfig | None = None,
    has_processor: bool = False,
) -> None:
    """Write a tokenizer's files into a directory in place of those that are there.

    Files are as where it was loaded from; a new chat template, added tokens and other special tokens are written into
    them. Where that does not give the same tokenizer, they are as transformers writes them.

    Args:
        config: of the model, where it has code of its own, which is not run again; its class tells the tokenizer's.
        has_processor: the directory has a processor (of images), which reads the template from a file of its own.
    """
    _remove(directory, tokenizer)
    source = source_of_tokenizer(tokenizer)
    if source is not None:
        for path in tokenizer_files(source, tokenizer.vocab_files_names):
            _copy(path, directory / path.relative_to(source))
        code, _ = code_files(source, (_CONFIG,))
        for module in code:
            _copy(source / module, directory / module)
        if _write_changes(tokenizer, directory, config, has_processor=has_processor):
            return
        _remove(directory, tokenizer)
    tokenizer.save_pretrained(directory)
    _name_for_old_readers(tokenizer, directory, config)


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def _remove(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for path in tokenizer_files(directory, tokenizer.vocab_files_names):
        path.unlink()


def _write_changes(
    tokenizer: PreTrainedTokenizerBase, directory: Path, config: PretrainedConfig | None, *, has_processor: bool
) -> bool:
    """Write into a tokenizer's files what differs in memory; returns whether they give the same tokenizer."""
    if code_files(directory, (_CONFIG,))[0] and not type(tokenizer).__module__.startswith("transformers."):
        # Reading it again would run its code from here.
        _write_template(tokenizer, directory, has_processor=has_processor)
        return True
    stored = _load(directory, config)
    if stored is None:
        return False
    if _same(tokenizer, stored) and _settings(tokenizer) == _settings(stored):
        return True
    if stored.chat_template != tokenizer.chat_template:
        _write_template(tokenizer, directory, has_processor=has_processor)
    if _added(stored) != _added(tokenizer):
        _write_tokens(tokenizer, stored, directory)
    _write_settings(tokenizer, stored, directory)
    return _same(tokenizer, _load(directory, config))


def _load(directory: Path, config: PretrainedConfig | None) -> Any:
    try:
        return AutoTokenizer.from_pretrained(directory, config=config, local_files_only=True, trust_remote_code=False)
    except Exception:  # broken files surface as errors of many kinds
        return None


def _same(tokenizer: Any, other: Any) -> bool:
    """Whether two tokenizers make the same tokens of the same text and messages."""
    if other is None:
        return False
    facts = [
        (one.chat_template, one.special_tokens_map, one.get_vocab(), _added(one), _backend(one))
        for one in (tokenizer, other)
    ]
    return facts[0] == facts[1]


def _backend(tokenizer: Any) -> dict[str, Any] | None:
    """All that the tokenizers library knows of it, but for what a call sets; None without that library."""
    if not tokenizer.is_fast:
        return None
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: value for key, value in fields.items() if key not in ("padding", "truncation")}


def _added(tokenizer: Any) -> dict[int, dict[str, Any]]:
    """Its added tokens by id, in the form of the files."""
    tokens = tokenizer.added_tokens_decoder
    return {at: {field: getattr(token, field) for field in _TOKEN_FIELDS} for at, token in tokens.items()}


def _write_template(tokenizer: Any, directory: Path, *, has_processor: bool) -> None:
    """Write the chat template wherever the files have one; else into the config, which all versions read."""
    template = tokenizer.chat_template
    if template is not None and not isinstance(template, str):
        return  # several by name
    for path in directory.glob("additional_chat_templates/*.jinja"):
        path.unlink()
    config = directory / _CONFIG
    plain = directory / "chat_template.jinja"
    former = directory / "chat_template.json"
    fields = _read_json(config)
    if template is None:
        plain.unlink(missing_ok=True)
        former.unlink(missing_ok=True)
        if fields.pop("chat_template", None) is not None:
            _write_json(config, fields)
        return
    if "chat_template" in fields or not plain.is_file():
        _write_json(config, {**fields, "chat_template": template})
    if plain.is_file() or (has_processor and not former.is_file()):
        plain.write_text(template, encoding="utf-8")
    if former.is_file():
        _write_json(former, {**_read_json(former), "chat_template": template})


def _write_tokens(tokenizer: Any, stored: Any, directory: Path) -> None:
    """Add the tokens that the files lack, or have otherwise."""
    before = _added(stored)
    new = {at: token for at, token in _added(tokenizer).items() if before.get(at) != token}
    own = directory / "tokenizer.json"
    config = directory / _CONFIG
    former = directory / "added_tokens.json"
    if own.is_file():
        fields = _read_json(own)
        tokens = {token["id"]: token for token in fields.get("added_tokens") or []}
        for at, token in new.items():
            tokens[at] = {"id": at, **token}
        fields["added_tokens"] = [tokens[at] for at in sorted(tokens)]
        _write_json(own, fields)
    fields = _read_json(config)
    if "added_tokens_decoder" in fields or not own.is_file():
        known = fields.get("added_tokens_decoder") or {str(at): token for at, token in before.items()}
        fields["added_tokens_decoder"] = {**known, **{str(at): token for at, token in new.items()}}
        _write_json(config, fields)
    if former.is_file():
        ids = {token["content"]: at for at, token in new.items()}
        _write_json(former, {**_read_json(former), **ids})


def _write_settings(tokenizer: Any, stored: Any, directory: Path) -> None:
    """Write other special tokens, lengths and sides than the files have."""
    config = directory / _CONFIG
    former = directory / "special_tokens_map.json"
    before = stored.special_tokens_map
    now = tokenizer.special_tokens_map
    tokens = {name: token for name, token in now.items() if isinstance(token, str) and before.get(name) != token}
    known = _settings(stored)
    settings = {name: value for name, value in _settings(tokenizer).items() if value != known[name]}
    if tokens or settings:
        _write_json(config, {**_read_json(config), **tokens, **settings})
    if tokens and former.is_file():
        _write_json(former, {**_read_json(former), **tokens})


def _name_for_old_readers(tokenizer: Any, directory: Path, config: PretrainedConfig | None) -> None:
    """Rename in transformers 5's config what transformers 4 does not read, if that gives the same tokenizer."""
    path = directory / _CONFIG
    fields = _read_json(path)
    before = dict(fields)
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    if fields == before:
        return
    content = path.read_bytes()
    _write_json(path, fields)
    if not _same(tokenizer, _load(directory, config)):
        path.write_bytes(content)


def _settings(tokenizer: Any) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in _SETTINGS}


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
