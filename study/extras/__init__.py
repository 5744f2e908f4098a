"""Not part of the core: Slurm, several hosts, an emulated cluster, GPU machines without a network."""
