"""All sentences that commands print of libraries and trainings, by id, besides claims."""

import functools

from study.configs.oom.causes import CAUSES
from study.configs.pasted.situations import TABLE as SITUATIONS
from study.configs.pasted.tracebacks import SIGNS, TRACEBACKS
from study.configs.settings import SETTINGS
from study.known.explained import Explained, of_faults, of_findings, of_table


@functools.cache
def sentences() -> list[Explained]:
    causes = of_table(CAUSES, "cause of an error about memory", "study/configs/oom/causes.py")
    settings = of_table(SETTINGS, "cause of different losses or memory", "study/configs/differences.py")
    messages = of_table(TRACEBACKS, "meaning of an error", "study/configs/pasted/tracebacks.py")
    signs = of_table(SIGNS, "sign in a text", "study/configs/pasted/tracebacks.py")
    said = of_table(SITUATIONS, "meaning of a person's words", "study/configs/pasted/situations.py")
    return [*of_faults(), *of_findings(), *causes, *settings, *messages, *signs, *said]
