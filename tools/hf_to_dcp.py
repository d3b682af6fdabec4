"""Convert Hugging Face weights or a state dict to a distributed checkpoint, in one process and without a GPU.

fsdp2kit convert hf_dir/ out/ [--verify]          # config.json and safetensors
fsdp2kit convert full.pt out/ --config hf_dir/    # torch.save of a state dict, e.g. FSDP1's FULL_STATE_DICT
fsdp2kit convert sharded/ out/ --config hf_dir/   # torch.distributed.checkpoint, e.g. its SHARDED_STATE_DICT
"""

from __future__ import annotations

import sys

from fsdp2kit.checkpoint.conversion import parse_conversion
from fsdp2kit.checkpoint.from_hf import compare_logits, hf_to_dcp
from fsdp2kit.console import in_one_line, show, user_path
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import check_writable
from fsdp2kit.migrate.state_dicts import torch_to_dcp


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    options = parse_conversion(arguments, prog="hf_to_dcp", to_hf=False)
    source = user_path(options.source)
    out = user_path(options.out)
    is_state_dict = source.is_file() or (source / ".metadata").is_file()
    if not is_state_dict and not (source / "config.json").is_file():
        what = "holds neither config.json nor .metadata" if source.exists() else "does not exist"
        kinds = "a Hugging Face directory, a file of torch.save, or a directory of torch.distributed.checkpoint"
        raise UserError(str(source), what, f"give {kinds}")
    check_writable(out.absolute().parent, where="out")
    if is_state_dict:
        if options.verify:
            what = f"compares with a Hugging Face directory, and {source} is none"
            raise UserError("--verify", what, "leave it out; names and shapes are checked in any case")
        dtype = torch_to_dcp(source, out, config_dir=options.config, trust_remote_code=options.trust_remote_code)
    elif options.config:
        raise UserError("--config", f"{source} is a Hugging Face directory with a config of its own", "leave it out")
    else:
        dtype = hf_to_dcp(source, out, trust_remote_code=options.trust_remote_code)
    show(f"{out}: written in {dtype}")
    if options.verify:
        show(compare_logits(out, source, trust_remote_code=options.trust_remote_code))
    return 0


if __name__ == "__main__":
    sys.exit(main())
