"""All sentences that commands print of libraries and trainings, by id, besides claims."""

import functools
from dataclasses import replace

from study.configs.oom.causes import CAUSES, rows
from study.configs.oom.means import in_its_words
from study.configs.pasted.situations import SITUATIONS
from study.configs.pasted.tracebacks import SIGNS, TRACEBACKS
from study.configs.settings import SETTINGS
from study.known.explained import Explained, of_faults, of_table
from study.known.findings import FINDINGS, HANGS

TABLES = (  # what their sentences are, and the module that applies a rule which stands in the table
    (FINDINGS, "finding", "study/configs/mistakes.py"),
    (HANGS, "cause of a hang", "study/watch/hangs.py"),
    (CAUSES, "cause of an error about memory", "study/configs/oom/causes.py"),
    (SETTINGS, "cause of different losses or memory", "study/configs/differences.py"),
    (TRACEBACKS, "meaning of an error", "study/configs/pasted/tracebacks.py"),
    (SIGNS, "sign in a text", "study/configs/pasted/tracebacks.py"),
    (SITUATIONS, "meaning of words beside a setting", "study/configs/pasted/situations.py"),
)


@functools.cache
def sentences() -> list[Explained]:
    return of_faults() + [
        replace(each, remedy=in_its_words(rows()[each.id]["remedy"], {})) if each.table == CAUSES else each
        for table in TABLES
        for each in of_table(*table)
    ]
