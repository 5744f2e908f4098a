"""Traces of models without values: every tensor and kernel of a pass."""
