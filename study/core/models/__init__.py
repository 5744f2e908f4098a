"""Any transformers model from its config: its class, the model itself, the inputs of a step, and its loss."""
