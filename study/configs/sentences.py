"""All sentences that commands print of libraries and trainings, by id, besides claims."""

import functools

from study.configs.oom.causes import CAUSES
from study.configs.settings import SETTINGS
from study.known.explained import Explained, of_faults, of_findings, of_table


@functools.cache
def sentences() -> list[Explained]:
    causes = of_table(CAUSES, "cause of an error about memory", "study/configs/oom/causes.py")
    settings = of_table(SETTINGS, "cause of different losses or memory", "study/configs/differences.py")
    return [*of_faults(), *of_findings(), *causes, *settings]
