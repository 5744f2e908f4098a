"""Runs and rows in the groups that tables and figures show."""

from study.records.groups import by
from study.records.runs import Run
from study.spec import arms

# What decides memory: two peaks are compared only where these are equal.
SETTINGS = ("task", "model", "precision", "micro_batch", "accumulation", "sequence", "checkpointing", "attention")
SETTINGS += ("optimizer", "lora_rank", "train_only", "compile")
SET_BY_MODEL = ("lr", "attention")  # their defaults depend on it
ORDER = {arm: place for place, arm in enumerate(arms.all_paths())}


def columns(run: Run, *names: str) -> dict:
    """Attributes of a run as columns."""
    return {name.replace("_", " "): run.value(name) for name in names}


def split_by_ranks(members_of: dict[str, list[Run]], with_lone: bool = False) -> dict[str, list[Run]]:
    """The groups, split by the number of ranks. Labels name that number if a group has several.

    `with_lone` adds the runs of a lone process to each part, because a rank of DDP should hold as much as they do; then
    all labels name the ranks.
    """
    split = {}
    for group, members in members_of.items():
        lone = [run for run in members if with_lone and run.arm == "single"]
        shared = by([run for run in members if run not in lone], "ranks") or {(1,): []}
        for (ranks,), mine in shared.items():
            named = f"{group}, {ranks} rank{'s' if ranks > 1 else ''}"
            split[named if with_lone or len(shared) > 1 else group] = lone + mine
    return split


def largest_groups(rows: list[dict], most: int) -> list[list[dict]]:
    """The groups that figures and sentences of a notebook show: those with the most arms on real ranks."""

    def shown(mine: list[dict]) -> tuple[int, int, int]:
        arms = [(row.get("arm", row.get("line")), row.get("kind", "real")) for row in mine]
        return len({arm for arm, kind in arms if kind == "real"}), len({arm for arm, _ in arms}), len(mine)

    return sorted(by(rows, "group").values(), key=shown, reverse=True)[:most]
