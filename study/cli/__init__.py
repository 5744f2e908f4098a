"""The `study` command. `commands.py` lists the commands; each command prints its own result."""

from study.cli.commands import main

__all__ = ["main"]
