"""A replication study of DeepSpeed ZeRO that anyone can run."""
