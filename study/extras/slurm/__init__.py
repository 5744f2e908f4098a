"""Sweeps on Slurm."""
