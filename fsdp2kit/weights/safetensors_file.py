"""Writing a safetensors file from its first byte to its last, a block at a time, to a disk or an object store.

safetensors' own `save_file` wants all tensors of a file at once and copies their bytes: twice the file in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import drop_cache, flush_to_disk
from fsdp2kit.weights.transfer import Reader

LET_GO_BYTES = 1 << 26
_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}


def file_size(forms: Mapping[str, Tensor]) -> int:
    """Bytes of a file with these (meta) tensors, in this order."""
    return len(_header(forms)) + sum(form.nbytes for form in forms.values())


def write_safetensors(
    path: Path,
    forms: Mapping[str, Tensor],
    reader: Reader,
    *,
    advance: Callable[[int], object] = lambda size: None,
) -> None:
    """Write a file and sync it; only what `reader` gives is ever in memory.

    Args:
        forms: meta tensors by name, in the order of their bytes. Wider dtypes first keeps each aligned.
        reader: of these tensors; they are cast to the forms' dtypes.
        advance: called with the bytes of each block that was written.

    Raises:
        UserError: values beyond float16's range, where it is asked for.
    """
    with path.open("wb") as file:
        file.write(_header(forms))
        waiting = 0
        for name, form in forms.items():
            written = 0
            for block in reader.blocks(name):
                size = file.write(_cast(block, form.dtype, name).contiguous().cpu().view(torch.uint8).numpy().data)
                written += size
                advance(size)
            assert written == form.nbytes, f"{name}: {written} bytes for {form}"
            waiting += written
            if waiting >= LET_GO_BYTES:  # the cache is for what is being read
                drop_cache(file, path)
                waiting = 0
        flush_to_disk(file, path)


def _cast(block: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The block in another dtype. float16 ends at 65,504: what bfloat16 holds, it may not."""
    cast = block.to(dtype)
    if dtype == torch.float16 and block.dtype != dtype and (cast.isinf() & block.isfinite()).any():
        what = f"{name} has values that float16 does not hold (the largest is {block.abs().max().item():.3g})"
        raise UserError("export", what, "export in bfloat16 or float32")
    return cast


def _header(forms: Mapping[str, Tensor]) -> bytes:
    """The length of the header in 8 bytes, and the header, padded so that the tensors begin at a multiple of 8."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, form in forms.items():
        offsets = [start, start + form.nbytes]
        header[name] = {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": offsets}
        start += form.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
