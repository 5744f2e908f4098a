"""Runs experiments (protocols) unattended. The protocols are TOML files in `protocols/`."""
