"""Dtypes: FSDP1's ``MixedPrecision``, and the switches that others have for it, → ``[fsdp]``.

FSDP1 without mixed precision computes in the parameters' own dtype; ours computes in bfloat16 by default. So
``param_dtype`` is always written.
"""

from __future__ import annotations

from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import Field, Fields
from fsdp2kit.migrate.values import as_bool, as_dtype, word

_NO_SCALER = "fp16 needed a gradient scaler, which is not offered; bfloat16 needs none"


def translate_precision(fields: Fields, draft: Draft) -> None:
    """``fsdp.param_dtype``, ``reduce_dtype``, ``output_dtype`` and ``storage_dtype``."""
    dtype, field, more = _compute_dtype(fields)
    if dtype in ("float16", "float8"):
        more = _NO_SCALER if dtype == "float16" else "float8 is not offered"
        draft.warnings.append(f"{field}: {more}; bfloat16 was written")
        dtype = "bfloat16"
    if field is None:
        draft.set("fsdp.param_dtype", dtype, "not in the file: without mixed precision FSDP1 computes in float32")
    else:
        draft.was("fsdp.param_dtype", dtype, field, more)
    reduce = fields.take("mixed_precision_reduce_dtype", "reduce_dtype", "mixed_precision.reduce_dtype",
                         "mp_reduce_dtype", "grad_reduce_dtype", "mixed_precision.grad_reduce_dtype")  # fmt: skip
    if reduce is not None:
        draft.was("fsdp.reduce_dtype", as_dtype(fields, reduce), reduce)
    elif dtype != "float32":
        why = 'not in the file: FSDP1 then reduces gradients in param_dtype; "float32" is exact, for twice the bytes'
        draft.set("fsdp.reduce_dtype", dtype, why)
    output = fields.take("output_dtype", "mixed_precision.output_dtype")
    if output is not None:
        draft.was("fsdp.output_dtype", as_dtype(fields, output), output)
    _translate_storage(fields, draft)


def _compute_dtype(fields: Fields) -> tuple[str, Field | None, str]:
    """The dtype of the computation, the field that says so, and a remark."""
    explicit = fields.take("mixed_precision_param_dtype", "mixed_precision.param_dtype", "param_dtype",
                           "mixed_precision_dtype", "mp_param_dtype")  # fmt: skip
    switch = fields.take("mixed_precision", "mixed_precision_policy", "mp_policy", "precision", "amp")
    halves = [(fields.take("fp16", "use_fp16"), "float16"), (fields.take("bf16", "use_bf16"), "bfloat16")]
    stored = fields.take("dtype", "torch_dtype", "compute_dtype", "model_dtype", "model.torch_dtype", "model.dtype")
    pure = fields.take("pure_bf16")
    on = {dtype: field for field, dtype in halves if field and _is_on(fields, field)}
    if pure is not None and as_bool(fields, pure):
        return "bfloat16", pure, ""
    if explicit is not None:
        return as_dtype(fields, explicit), explicit, ""
    if switch is not None and word(switch.value) == "true":
        dtype = next(iter(on), "bfloat16")
        return dtype, switch, f"and {on[dtype]}" if dtype in on else ""
    if switch is not None and word(switch.value) != "false":
        return as_dtype(fields, switch), switch, ""
    if on:
        dtype = next(iter(on))
        return dtype, on[dtype], ""
    if stored is not None and word(stored.value) != "auto":
        return (
            as_dtype(fields, stored),
            stored,
            'shards stay float32; fsdp.storage_dtype = "bfloat16" would store it so',
        )
    return "float32", switch or stored, ""


def _is_on(fields: Fields, field: Field) -> bool:
    """A switch for a dtype; "auto" is on where the device can, as every one here can."""
    return word(field.value) == "auto" or as_bool(fields, field)


def _translate_storage(fields: Fields, draft: Draft) -> None:
    asked = fields.take("storage_dtype", "master_weight_dtype", "master_dtype")
    if asked is not None:
        draft.was("fsdp.storage_dtype", as_dtype(fields, asked), asked)
    elif draft.get("fsdp.param_dtype") == "bfloat16" and _is_pure(fields):
        draft.set("fsdp.storage_dtype", "bfloat16", "was pure_bf16: updates below 1/512 of a parameter are lost")


def _is_pure(fields: Fields) -> bool:
    return any(field.name == "pure_bf16" and as_bool(fields, field) for field in fields.everything)
