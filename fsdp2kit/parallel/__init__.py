"""A model spread over a mesh: context parallelism, activation checkpointing, compile, FSDP2, in one stated order."""
