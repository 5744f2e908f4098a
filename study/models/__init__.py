"""Any transformers model from its config: its class, the model itself, what a training step feeds it, and its loss."""
