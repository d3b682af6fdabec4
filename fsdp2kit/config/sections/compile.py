"""[compile]: torch.compile."""

from __future__ import annotations

from fsdp2kit.config.section import Section


class CompileConfig(Section):
    """torch.compile."""

    enabled: bool = False
    """Compile each decoder layer, and on CUDA a cross-entropy in 16 bits: the first step takes minutes, the others
    less time and memory. torch caches the compiled code in TORCHINDUCTOR_CACHE_DIR."""
