"""What changes the 16 bytes: bytes per parameter by component, as claimed, predicted and measured."""

from collections.abc import Iterable
from dataclasses import replace

from study.bench.prediction import predicted
from study.predictor import papers
from study.records.runs import FIRST_OPTIMIZER, Run, Runs

PROTOCOL = "optimizers"
COMPONENTS = ("weights", "gradients", "master", "moments", "staging")


def of_protocol(runs: Runs) -> Runs:
    """The runs of the protocol for which this table was made."""
    return replace(runs, runs=tuple(run for run in runs if run.record.cell.protocol == PROTOCOL))


def table(runs: Runs) -> list[dict]:
    """Bytes of each component per parameter of the model, on the first rank between two steps.

    Claims about gradients are left out: after a step, stages 1 and 2 and FSDP2 hold none, and DDP's buckets all.
    """
    rows = []
    for repeats in _alike(run for run in runs.done if run.components and run.parameters):
        run = repeats[0]
        held, theory = run.record.memory.components.per_rank[0].after_step, predicted(run.record)
        of_papers = claimed(run)
        for component in COMPONENTS:
            numbers = {
                "claimed": of_papers.get(component),
                "predicted": theory and theory.after_step.get(component, 0) / run.parameters,
                "measured": held.get(component, 0) / run.parameters,
            }
            if any(numbers.values()):
                rows.append(_place(run) | {"component": component} | numbers | {"n": len(repeats)})
    return rows


def claimed(run: Run) -> dict[str, float]:
    """What papers count per parameter: no states for frozen weights, a share of what a stage divides.

    They count a master copy of 16-bit weights alone, and nothing that an engine keeps beside the moments.
    """
    weights, _, states = papers.RECIPES[papers.recipe_of(run.precision, run.optimizer or FIRST_OPTIMIZER)]
    master = 4 if run.precision == "bf16_cast" else 0
    observed, ranks = run.record.observed, run.ranks
    stage = 3 if observed.fsdp else observed.stage or 0
    share = (observed.trained_parameters or run.parameters) / run.parameters / (ranks if stage else 1)
    whole = {"weights": weights / (ranks if stage == 3 else 1), "master": master * share}
    return whole | {"moments": (states - master) * share, "staging": 0}


def what_changes(run: Run) -> str:
    """The optimizer of a run, and which part of the model trains."""
    part = f", LoRA of rank {run.lora_rank}" if run.lora_rank else f", only {run.train_only}" if run.train_only else ""
    return f"{run.optimizer or FIRST_OPTIMIZER}{part}"


def _place(run: Run) -> dict:
    return {
        "what": what_changes(run),
        "precision": run.precision,
        "arm": run.arm,
        "ranks": run.ranks,
        "kind": run.kind,
    }


def _alike(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of equal settings, in the order of the table."""
    members: dict[tuple, list[Run]] = {}
    for run in runs:
        members.setdefault((*_place(run).values(), run.model), []).append(run)
    return [members[key] for key in sorted(members, key=str)]
