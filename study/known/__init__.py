"""What is known of others' libraries: faults, which of them apply, lists of releases, and findings. Needs no torch."""
