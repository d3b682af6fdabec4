"""The sections of a TOML: a file each, with the section's own checks in it."""
