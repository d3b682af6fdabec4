"""Convert a distributed checkpoint to a Hugging Face directory, in one process and without a GPU.

fsdp2kit convert runs/x/checkpoints/step-000200 out/ --dtype bfloat16
fsdp2kit convert runs/lora/checkpoints/step-000200 out/ --merge   # an adapter, merged into its model
"""

from __future__ import annotations

import sys

from fsdp2kit.checkpoint.conversion import parse_conversion
from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.export_plan import MAX_SHARD_BYTES
from fsdp2kit.checkpoint.from_hf import compare_logits
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.merge import merge_to_hf
from fsdp2kit.console import in_one_line, show
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import fsspec_url, to_path
from fsdp2kit.model.code_files import code_files
from fsdp2kit.weights.adapters import CONFIG_NAME


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    options = parse_conversion(arguments, prog="dcp_to_hf", to_hf=True)
    checkpoint = to_path(options.source)
    out = to_path(options.out)
    if options.verify and (options.merge or (checkpoint / "hf" / CONFIG_NAME).is_file()):
        what = "compares a whole model's checkpoint with its export, and this one holds an adapter"
        raise UserError("--verify", what, "leave it out; every byte of the checkpoint is checked in any case")
    ExportDirectory(out).check_writable(where="out")
    size = MAX_SHARD_BYTES if options.max_shard_gb is None else int(options.max_shard_gb * 1e9)
    trust = {"trust_remote_code": options.trust_remote_code}
    given = {"dtype": options.dtype, "max_shard_bytes": size, "config_dir": options.config, **trust}
    if options.merge:
        base = options.merge if isinstance(options.merge, str) else None
        dtype = merge_to_hf(checkpoint, out, base=base, **given)
    else:
        dtype = dcp_to_hf(checkpoint, out, **given)
    show(f"{out}: written in {dtype}")
    missing = code_files(out)[1] if fsspec_url(out) is None else []
    if missing:  # of checkpoints that were saved before their code was copied
        lacking = f"its files name {missing[0]}, which {options.config or checkpoint} lacks"
        show(f"warning: {out}: {lacking}; give the model's directory with --config, or copy it")
    if options.verify:
        show(compare_logits(checkpoint, out, **trust))
    return 0


if __name__ == "__main__":
    sys.exit(main())
