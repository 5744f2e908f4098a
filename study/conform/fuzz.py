"""`study fuzz`: hold ways of sharding to one process, on random trainings.

A training that differs is repeated with DDP. If DDP does it right, it is a finding: it is made smaller, and written as
a script. If DDP differs as well, the bound is too narrow, and the trial says so.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pandas as pd
import tyro

from study.conform import output, scripts
from study.conform.command import chosen_adapters
from study.conform.suite import (
    ADAPTERS,
    DEFAULTS,
    PROPERTIES,
    STATUSES,
    Adapter,
    Property,
    Ranks,
    run_one,
    shrunk,
    table,
)
from study.io.parsing import from_json
from study.io.tables import say, show

SEARCHED = ("zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu", "zero3-hpz", "fsdp1", "fsdp2", "hsdp")
KINDS = ("model", "optimizer", "groups", "schedule", "precision")  # fields whose values are words
SHRUNK_EACH = 3  # findings of one kind that are made smaller


@dataclass(frozen=True)
class Trial:
    """A random training and its outcome."""

    adapter: str
    check: str
    case: dict
    ranks: tuple[int, ...]
    status: str
    words: str = ""
    ddp: str = ""  # the status of DDP with the same training; only of a failure
    known: str = ""  # the property of the suite that fails for the same reason; only of a failure
    smaller: dict = field(default_factory=dict)  # the smallest case that fails; only of a finding

    @property
    def is_finding(self) -> bool:
        return self.status == "fails" and self.ddp == "holds" and not self.known

    @property
    def kind(self) -> tuple:
        """The words of its smallest case: what findings of one kind have in common."""
        case = self.smaller or self.case
        words = (f"{name} {case[name]}" for name in KINDS if case[name] != DEFAULTS[name])
        return (self.adapter, self.check, *words)


def fuzz(
    names: tyro.conf.Positional[tuple[str, ...]] = SEARCHED,
    /,
    *,
    minutes: float = 30.0,
    seed: int = 0,
    out: Path = Path("runs/fuzz"),
) -> None:
    """Search for trainings that a library computes wrongly: random models, options and ranks, held to one process.

    Each failure is repeated with DDP, and made smaller. Run it again to go on with other trainings.

    Args:
        names: The adapters, as in study conform.
        minutes: The time to search.
        seed: The seed of the first training. Each further one has the next seed.
        out: The folder for the trials (trials.jsonl) and a script of each finding.
    """
    adapters = chosen_adapters(names)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "trials.jsonl"
    trials = load(path)
    until = time.monotonic() + 60 * minutes
    with Ranks(None, out / "log.txt") as ranks, path.open("a", encoding="utf-8") as lines:
        while time.monotonic() < until:
            source = random.Random(seed + len(trials))
            trial = attempt(source.choice(adapters), source, ranks, Counter(each.kind for each in trials))
            trials.append(trial)
            lines.write(json.dumps(asdict(trial)) + "\n")
            lines.flush()
            if trial.is_finding:
                (out / f"{trial.adapter}-{len(trials)}.py").write_text(script(trial), encoding="utf-8")
                say(f"{len(trials)}: {', '.join(trial.kind)}: {trial.words}")
    summarize(trials)


def load(path: Path) -> list[Trial]:
    """Read the trials of earlier searches."""
    rows = [from_json(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [Trial(**row | {"ranks": tuple(row["ranks"])}) for row in rows]


def attempt(adapter: Adapter, source: random.Random, ranks: Ranks, kinds: Counter[tuple]) -> Trial:
    """Draw a training and try it. A failure that no property of the suite explains is repeated with DDP."""
    drawn = draw(source)
    result = run_one(adapter, drawn, ranks)
    trial = Trial(adapter.name, drawn.check, drawn.case, result.ranks, result.status, result.words)
    if result.status != "fails":
        return trial
    trial = replace(trial, known=next(explained_by(adapter, drawn), ""))
    if trial.known:
        return trial
    trial = replace(trial, ddp=run_one(ADAPTERS["ddp"], replace(drawn, ranks=result.ranks), ranks).status)
    whole = replace(trial, smaller=drawn.case)
    if not trial.is_finding or kinds[whole.kind] >= SHRUNK_EACH:
        return whole
    smaller = shrunk(adapter, drawn, result, ranks)
    return replace(trial, smaller=drawn.case | (smaller.shrunk or {}), ranks=smaller.ranks)


def draw(source: random.Random) -> Property:
    """Return a random training, as a property of the suite with another case."""
    choices, properties = table("fuzz"), list(PROPERTIES.values())
    models = sorted({each.setting("model") for each in properties})
    case = {name: source.choice(values) for name, values in choices["case"].items()}
    case |= {"model": source.choice(models), "width": source.randint(1, 33)}
    check = source.choice(choices["checks"])
    if check in ("checkpoint_of_weights", "one_large_batch"):  # their references have no schedule or master weights
        case |= {"schedule": "", "precision": "fp32"}
    launches = 2 if check.startswith("checkpoint") else 1
    base = next(each for each in properties if each.check == check)
    return replace(base, case=DEFAULTS | case, ranks=(source.choice(choices["ranks"]),) * launches)


def explained_by(adapter: Adapter, drawn: Property) -> Iterator[str]:
    """Yield the properties that this adapter is known to fail, if the training has all that sets them apart."""
    reasons = [each for each in output.explanations() if adapter.name in each.adapters and not each.releases]
    known = {name for each in reasons for name in each.properties}
    alike = [each for each in PROPERTIES.values() if each.check in ("same_training", drawn.check)]
    for each in alike:
        apart = {name: value for name, value in each.case.items() if name in KINDS}
        if apart and each.name in known and apart.items() <= drawn.case.items():
            yield each.name


def script(trial: Trial) -> str:
    adapter = ADAPTERS[trial.adapter]
    failing = Property(trial.check, "", "", trial.smaller, trial.check, trial.ranks)
    about = f"Found by study fuzz. Seen ({adapter.about or adapter.name}): {trial.words}"
    return scripts.script(adapter, failing, about)


def summarize(trials: list[Trial]) -> None:
    """Show how many trainings were tried, and each kind of finding once."""
    findings = [each for each in trials if each.is_finding]
    kinds = {each.kind: each for each in reversed(findings)}
    say(f"{len(trials)} random trainings, {len(findings)} findings of {len(kinds)} kinds.", "")
    rows = pd.DataFrame([vars(each) for each in trials], columns=["adapter", "status", "known", "ddp"])
    counts = pd.crosstab(rows["adapter"], rows["status"]).reindex(columns=list(STATUSES), fill_value=0)
    show(counts.reset_index().to_dict("records"))
    failed = rows[rows["status"] == "fails"]
    reasons = failed["known"].where(failed["known"] != "", "DDP " + failed["ddp"]).value_counts()
    say("", "The failures: " + (", ".join(f"{name} {count}" for name, count in reasons.items()) or "none"))
    for kind, each in kinds.items():
        say("", f"{', '.join(kind)}: {each.words}")
