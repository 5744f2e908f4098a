"""GPU machines without a network."""
