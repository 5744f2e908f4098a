"""Measurements that others published, and how far predictions are from them."""
