"""Lists all checks of a record. Each finding is a sentence with a remedy, and names a claim or script as evidence.

A check looks at one thing. It returns None if the record lacks the values that the check needs: nothing is guessed.
"""

from collections.abc import Callable

from study.records.findings import Finding
from study.records.schema import Record
from study.watcher import memory, precision, settings, traffic
from study.watcher.facts import Facts

Check = Callable[[Facts], list[Finding] | None]
# By what each check looks at, as a user reads it. Mistakes come first, then costs in memory or bytes.
CHECKS: dict[str, Check] = {
    "whether DeepSpeed is on": settings.deepspeed_is_on,
    "whether FSDP is on": settings.fsdp_is_on,
    "whether the ranks train together": settings.ranks_train_together,
    "clipping": settings.clipping,
    "accumulation": settings.accumulation,
    "precision": precision.precision,
    "offloading": settings.offloading,
    "the optimizer": settings.optimizer,
    "checkpointing": settings.checkpointing,
    "copies of the weights": memory.master_copies,
    "buckets": memory.buckets,
    "gathered weights": memory.gathered_weights,
    "activations": memory.activations,
    "ZeRO on one rank": memory.one_rank,
    "what every rank holds": memory.replicated,
    "gathers in a step": traffic.gathers,
    "gradients reduced in a step": traffic.reductions,
    "the second copy of hpZ": traffic.second_copy,
}


def diagnose(record: Record) -> list[Finding]:
    """All findings of a record, mistakes before costs. Empty: the checks that `looked_at` names found nothing."""
    facts = Facts(record)
    return [finding for check in CHECKS.values() for finding in check(facts) or []]


def looked_at(record: Record) -> tuple[list[str], list[str]]:
    """The checks for which the record has the values, and the others."""
    facts = Facts(record)
    judged = [name for name, check in CHECKS.items() if check(facts) is not None]
    return judged, [name for name in CHECKS if name not in judged]
