"""What this machine has and lacks: GPUs, disk, compiled operators, the Hugging Face Hub, other hosts."""
