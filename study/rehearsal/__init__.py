"""Somebody's own script as rank 0 of N, before a GPU is rented: real engines, real data, weights without values."""
