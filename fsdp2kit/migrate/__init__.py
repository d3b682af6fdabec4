"""From an FSDP1 configuration (JSON, or accelerate's YAML) to a TOML of ours, and from its state dicts to checkpoints.

Nothing is dropped: a field is translated, or explained where FSDP2 has no counterpart, or listed as unknown.
"""
