"""Reads options from the command line with tyro, whose help shows `--gpu STR` where None is the default."""

from collections.abc import Callable

import tyro


def parsed(command: Callable, *config, **options):
    """Call a command, or build a dataclass, with the options of the command line. For a mistake, exit with code 2."""
    return tyro.cli(command, config=(tyro.conf.DisallowNone, *config), **options)
