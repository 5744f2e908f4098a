"""Memory and traffic of a rank, as DeepSpeed, DDP and FSDP hold and move it."""
