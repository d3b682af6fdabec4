"""fsdp2kit: FSDP2 `fully_shard` recipes, from a Hugging Face model and a TOML to a Hugging Face directory."""

import logging
import os

__version__ = "0.1.0"

PARENT = os.getppid()
"""The parent process at start-up. Read here, because it may end during the seconds in which torch is imported."""

# transformers imports torchao if it is installed, and torchao logs which of its kernels this machine cannot load.
# Nothing here uses those kernels, and a user's mistake must stay one line.
for _logger in map(logging.getLogger, ("torchao", "torch.utils._pytree")):
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.ERROR)
