"""Makes a model parallel: context parallelism, activation checkpointing, compile, FSDP2."""
