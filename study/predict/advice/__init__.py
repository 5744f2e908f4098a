"""Which arm to use on which GPUs, and the config for it."""
