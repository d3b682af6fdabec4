"""An export's config.json: the source's own JSON, in which only what training or the user changed differs.

transformers 5 reads configs of every version, and writes them in a form of its own: ``rope_parameters`` for
``rope_theta`` and ``rope_scaling``, ``dtype`` for ``torch_dtype``. Readers of transformers 4 take such a config for
another model. So keys keep the names, and rotary embeddings the form, that the source has.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from fsdp2kit.model.hf_config import read_fields, trained_config

ROPE = "rope_parameters"

# Keys that say nothing about the model's values, or (dtype, architectures) are written by other rules.
_ASIDE = ("transformers_version", "dtype", "torch_dtype", "architectures", "model_type", "auto_map")
# How transformers 4 calls RoPE's base and the share of a head that is rotated; GPT-NeoX has names of its own.
_ROPE_NAMES = (("rope_theta", "partial_rotary_factor"), ("rotary_emb_base", "rotary_pct"))
_LOCAL_BASE = "rope_local_base_freq"


def changed_fields(
    fields: Mapping[str, Any], config: PretrainedConfig, whole: PretrainedConfig | None = None
) -> tuple[dict[str, Any], bool]:
    """The fields of a source's config.json with what ``config`` changes, under the source's names.

    Args:
        fields: of the source's config.json.
        config: of the model that is exported; with ``whole`` that of its text part.
        whole: the source's config, if it has other parts beside the text part.

    Returns:
        The fields, equal to ``fields`` if nothing was changed; and whether transformers reads them as ``config``.
    """
    found = copy.deepcopy(dict(fields))
    after = _values(config)
    before = _values(read_fields(found, config, None) if whole is None else trained_config(whole))
    # First what the source's file names; then also what transformers derives from other keys.
    for names_all in (False, True):
        if before == after:
            break
        for candidate in _candidates(found, before, after, config, is_part=whole is not None, names_all=names_all):
            values = _values(read_fields(candidate, config, whole))
            if values and values.get(ROPE) == after.get(ROPE):
                found = candidate
                before = values
                break
    return found, before == after


def with_old_rope(fields: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers 5 wrote, with RoPE's numbers also where transformers 4 reads them.

    They are left as they are where transformers 5 would then read another model, or where RoPE has another base for
    each kind of layer that transformers 4 has no keys for.
    """
    expected = _values(read_fields(fields, config, None))
    rope = fields.get(ROPE)
    if isinstance(rope, dict) and expected:
        for keys in _old_rope(fields, rope):
            candidate = {**fields, **{key: value for key, value in keys.items() if value is not None}}
            if _values(read_fields(candidate, config, None)) == expected:
                return candidate
    return dict(fields)


def with_dtype(fields: Mapping[str, Any], dtype: str, *, is_whole: bool = False) -> dict[str, Any]:
    """The fields of a config.json that names another dtype for the model, under the name that the file has for it.

    Args:
        is_whole: there are other parts beside the text part, which keep their dtypes; the text part names its own.
    """
    found = copy.deepcopy(dict(fields))
    name = _dtype_name(found)
    parts = {key: part for key, part in found.items() if isinstance(part, dict) and "model_type" in part}
    if is_whole:
        parts = {key: part for key, part in parts.items() if key == "text_config"}
    for part in (found, *parts.values()):
        names = [key for key in ("dtype", "torch_dtype") if part.get(key) is not None]
        if not names and (part is found or is_whole):
            names = [name]
        for key in names:
            part[key] = dtype
    return found


def dtype_of(fields: Mapping[str, Any]) -> str | None:
    """The dtype that a model's config.json names for itself, or for its text part; None if it names none."""
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if part.get(key):
                return str(part[key])
    return None


def config_text(fields: Mapping[str, Any]) -> str:
    """The text of a config.json."""
    return json.dumps(fields, indent=2) + "\n"


def _dtype_name(fields: Mapping[str, Any]) -> str:
    is_old = str(fields.get("transformers_version", "")).startswith("4.")
    return "torch_dtype" if "torch_dtype" in fields or (is_old and "dtype" not in fields) else "dtype"


def _values(config: PretrainedConfig | None) -> dict[str, Any]:
    """The values of a config that must be equal for two to be the same model, in JSON's types; none of None."""
    if config is None:
        return {}
    values = json.loads(json.dumps(config.to_dict(), default=str))
    found = {key: value for key, value in values.items() if key not in _ASIDE and not key.startswith("_")}
    if isinstance(found.get(ROPE), dict):
        found[ROPE] = _without_old_type(found[ROPE])
    return found


def _without_old_type(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE's parameters without ``type``, which transformers 5 keeps beside its ``rope_type``."""
    found = {key: _without_old_type(one) if isinstance(one, dict) else one for key, one in rope.items()}
    if "rope_type" in found:
        found.pop("type", None)
    return found


def _candidates(
    fields: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
    config: PretrainedConfig,
    *,
    is_part: bool,
    names_all: bool,
) -> Iterator[dict[str, Any]]:
    """Fields with the changes; several where RoPE changed, since that may be written in several ways."""
    changed = copy.deepcopy(fields)
    nested = changed.get("text_config") if is_part else None
    target = nested if isinstance(nested, dict) else changed  # some wholes are flat (Qwen2-VL's)
    _change(target, before, after, config.attribute_map, names_all=names_all)
    new_rope = after.get(ROPE)
    if before.get(ROPE) == new_rope or not isinstance(new_rope, dict):
        yield changed
        return
    for rope in _ropes(target, new_rope):
        candidate = copy.deepcopy(changed)
        inner = candidate["text_config"] if isinstance(nested, dict) else candidate
        for key, value in rope.items():
            if value is _REMOVED:
                inner.pop(key, None)
            else:
                inner[key] = value
        yield candidate


def _change(
    target: dict[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    aliases: Mapping[str, str],
    *,
    names_all: bool,
) -> None:
    """Write into the fields of a config what differs between two of them, in place; all but RoPE.

    Args:
        aliases: the config's own name of a key by each other name.
        names_all: also write keys that the fields lack.
    """
    for key, value in after.items():
        if key == ROPE or (key in before and before[key] == value):
            continue
        names = [key, *(alias for alias, own in aliases.items() if own == key)]
        named = next((name for name in names if name in target), None)
        if named is None and not names_all:
            continue
        name = named or key
        inner = target.get(name)
        old = before.get(key)
        if isinstance(value, dict) and "model_type" in value and isinstance(inner, dict) and isinstance(old, dict):
            _change(inner, old, value, {}, names_all=names_all)
        else:
            target[name] = value


_REMOVED: Any = object()


def _ropes(target: Mapping[str, Any], rope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The keys that say RoPE's parameters, in the form of a source's file; then in transformers 5's own."""
    old_names = ("rope_scaling", _LOCAL_BASE, *(name for names in _ROPE_NAMES for name in names))
    if ROPE in target:
        for keys in _old_rope(target, rope):
            yield {ROPE: rope, **{key: value for key, value in keys.items() if value is not None or key in target}}
    else:
        for keys in _old_rope(target, rope):
            yield {key: value for key, value in keys.items() if value is not None or key in target}
    yield {**{name: _REMOVED for name in old_names if name in target}, ROPE: rope}


def _old_rope(target: Mapping[str, Any], rope: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """RoPE's parameters as transformers 4 names them; nothing where it cannot."""
    theta_name, share_name = next(
        (names for names in _ROPE_NAMES if any(name in target for name in names)), _ROPE_NAMES[0]
    )
    kinds = {key: value for key, value in rope.items() if isinstance(value, dict)}
    flat = dict(rope)
    local: dict[str, Any] | None = None
    if kinds:
        if kinds.keys() != {"full_attention", "sliding_attention"}:
            return
        flat = dict(kinds["full_attention"])
        local = dict(kinds["sliding_attention"])
        if local.get("rope_type", "default") != "default":
            return
    keys: dict[str, Any] = {theta_name: flat.pop("rope_theta", None)}
    if local is not None:
        keys[_LOCAL_BASE] = local.get("rope_theta")
    share = flat.pop("partial_rotary_factor", None)
    if share is not None and (share_name in target or share != 1):
        keys[share_name] = share
    if flat.keys() <= {"rope_type"} and flat.get("rope_type", "default") == "default":
        yield {**keys, "rope_scaling": None}
        return
    if flat.get("rope_type") == "longrope":
        # Phi-3 of transformers 4 wants these three keys, and reads the length at the top.
        own = {"type": "longrope", **{key: flat[key] for key in ("short_factor", "long_factor") if key in flat}}
        length = flat.get("original_max_position_embeddings")
        yield {**keys, "rope_scaling": own, "original_max_position_embeddings": length}
    former = target.get("rope_scaling")
    if isinstance(former, dict) and "type" in former and "rope_type" not in former:
        flat = {"type": flat.pop("rope_type", "default"), **flat}
    yield {**keys, "rope_scaling": flat}
