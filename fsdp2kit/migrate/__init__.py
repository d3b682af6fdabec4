"""From an FSDP1 configuration (JSON, or accelerate's YAML) to a TOML, and from FSDP1's state dicts to checkpoints.

No field is dropped: each is translated, explained if FSDP2 has no counterpart, or listed as unknown.
"""
