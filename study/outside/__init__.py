"""Measurements that others published: rows, the setups that they describe, and how predictions compare with them."""
