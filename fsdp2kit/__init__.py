"""fsdp2kit: FSDP2 `fully_shard` recipes, from a Hugging Face model and a TOML to a Hugging Face directory."""

import logging
import os

__version__ = "0.1.0"

PARENT = os.getppid()
"""The process that started this one; taken here, since it may end while torch is imported, for seconds."""

# transformers imports torchao wherever it is installed, and torchao says what of it this machine cannot load: kernels
# that nothing here uses. A user's mistake is to stay one line.
for _logger in map(logging.getLogger, ("torchao", "torch.utils._pytree")):
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.ERROR)
