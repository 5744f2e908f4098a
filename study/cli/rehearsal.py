"""`study virtual train.py`: somebody's own script as rank 0 of N, without a GPU."""

import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from study.cli.rehearsed import failed, show_answer, show_known, show_ranks
from study.configs import engines
from study.core.arms import Arm, load_arm
from study.core.errors import Stop, refuse_beyond
from study.core.gpus import gpu_named, num_gpus
from study.core.text import during, one_by_one, say_aside, say_wrapped
from study.known.findings import in_a_sentence
from study.records import store
from study.rehearsal import alternatives
from study.rehearsal.launchers import LAUNCHERS, Group, StartedScript, group_of_config, launched, misplaced
from study.rehearsal.request import Failure, Request
from study.rehearsal.scripts import locate
from study.rehearsal.start import parts_from_rank_1, run_request, try_arm

RANKS = 8  # of a group, and of a machine, if nobody says it
MOST_RANKS = 100_000
DEFAULT_CONFIG = Path("~/.cache/huggingface/accelerate/default_config.yaml")


@dataclass(frozen=True)
class Machines:
    """Where the script would run."""

    ranks: int | None = None
    """Ranks of the group. Default: as the launcher or the config says, otherwise 8."""
    config_file: Path | None = None
    """Accelerate's YAML. Default: that of `accelerate config`, if there is one."""
    gpu: str | None = None
    """A kind of GPU, such as H100 or 3090: what it would show, and whether it fits. An unknown name lists all."""
    gpus_per_node: int | None = None
    """Ranks on one machine. Default: as the launcher or the config says, otherwise 8."""

    def among(self, *groups: Group) -> tuple[int, int]:
        """Return the ranks, and those of a machine: as asked, or as the first of these groups that says it."""
        known = [Group(self.ranks, self.gpus_per_node), *groups, Group(RANKS, RANKS)]
        ranks = next(group.ranks for group in known if group.ranks is not None)
        refuse_beyond("--ranks", ranks, MOST_RANKS)
        per_machine = next(group.per_machine for group in known if group.per_machine is not None)
        return ranks, min(ranks, per_machine)


@dataclass(frozen=True)
class HowFar:
    """How far the script runs."""

    steps: int = 2
    """Updates. One more shows what the peak consists of."""
    tokens: int | None = None
    """Lengthen each sequence to so many tokens. With --gpu the default is the data set's longest row."""
    evaluate: bool = False
    """Go on until the script has evaluated: at most four batches of a loader."""
    save: bool = False
    """Go on until the script has saved. Nothing is written."""
    timeout: int = 900
    """Seconds after which it ends."""

    def __post_init__(self) -> None:
        refuse_beyond("--steps", self.steps, 1000)
        refuse_beyond("--tokens", self.tokens, 10_000_000)
        refuse_beyond("--timeout", self.timeout, 86400)


@dataclass(frozen=True)
class WhatIsThere:
    """What has values, and what takes the place of what has none."""

    real: bool = False
    """On a machine with a GPU: with real values, and CUDA's own peak beside the count."""
    config_of: tuple[str, ...] = ()
    """NAME=FOLDER: the folder with the config.json, and the tokenizer, of a model that is not here."""
    value: tuple[str, ...] = ()
    """NAME=NUMBER: the value of a variable of the script that it decides by, such as loss=2.3."""
    skip: tuple[str, ...] = ()
    """A function of the script that does nothing here."""


def rehearse(
    script: str,
    words: tuple[str, ...] = (),
    /,
    *,
    machines: Machines,
    how_far: HowFar,
    there: WhatIsThere,
    others: Annotated[str | None, tyro.conf.arg(name="try")] = None,
    run_dir: Path | None = None,
) -> dict:
    """Run a training script as rank 0 of N without a GPU, and say what the rank would hold and whether it would run.

    The script's libraries, data and tokenizer are real. Other ranks do not exist; weights have shapes but no values.
    The script runs with your rights, as when you start it yourself. An exception of the script is the answer. The exit
    code is 1 then, and if a mistake or a known fault is named. With --evaluate or --save rank 1 runs as well: where it
    calls other collectives, all wait.

    With --json: the same. Example: `study virtual examples/trainer_glue.py --ranks 8 -- --steps 4`

    Args:
        script: The script, as `accelerate launch` and `torchrun` take it; or a program on the PATH, or a module.
        words: After `--`: the script's own words.
        machines: Where the script would run.
        how_far: How far it runs.
        there: What has values here.
        others: Arms, such as zero2,zero3,fsdp2: what the same script would hold with each.
        run_dir: Keep the record in this new folder.
    """
    if run_dir and run_dir.exists():
        raise Stop(f"--run-dir {run_dir} exists", "give a new folder")
    arms = [load_arm(name.strip()) for name in others.split(",")] if others else []
    request = request_of(script, list(words), machines, how_far, there)
    others_follow = f", then as rank 1, for at most {how_far.timeout} s each" if request.compares_ranks else ""
    during(f"running {Path(request.script).name} as rank 0 of {request.ranks}{others_follow}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = run_dir or Path(temporary, "run")
        folder.mkdir(parents=True)
        return rehearsed(request, folder, arms, how_far.timeout)


def rehearsed(request: Request, folder: Path, arms: list[Arm], timeout_s: int) -> dict:
    """Run the script, say what its rank holds, and what it would hold with other arms."""
    answer = run_request(request, folder, timeout_s)
    if answer.failure or not answer.updates:
        return failed(answer.failure or Failure("script", "it made no update of an optimizer"), request)
    if parted := parts_from_rank_1(request, answer, folder, timeout_s):
        return failed(parted, request)
    rows = [try_arm(arm, request, folder / arm.name, timeout_s) for arm in one_by_one(arms, "arm")]
    shown = show_answer(request, answer, store.read(folder / store.RECORD), rows, folder)
    files = engines.texts_of(filter(None, [request.script, request.config_file]))
    command = " ".join(["accelerate launch", *request.launch_words, request.script, *request.words])
    differ = [*engines.contradictions(files | {"the command": command})]
    say_wrapped(*map(in_a_sentence, differ))
    faults = show_known(folder, answer.releases)
    may_hang = show_ranks(request, answer, folder)
    fine = not (may_hang or faults or shown["remarks"] or any(not each["may_be"] for each in shown["findings"]))
    fine = fine and not any(each.is_surely_wrong for each in differ)
    said = {"faults": faults, "contradictions": list(map(asdict, differ)), "tried": list(map(asdict, rows))}
    return shown | said | {"fine": fine}


def request_of(script: str, words: list[str], machines: Machines, how_far: HowFar, there: WhatIsThere) -> Request:
    """Return the request for a rehearsal. Raise Stop if the words make none."""
    launch = launched(script, words) if script in LAUNCHERS else StartedScript(script, words, [], None)
    path, module = locate(launch.script)
    if script in LAUNCHERS:
        code = path.read_text(errors="replace")
        for name in misplaced(launch.words, code):
            say_aside(f"{name} went to {path.name}, which does not name it. For study virtual write it before {script}")
        # Lightning reads Slurm's variables itself.
        if script == "srun" and {*words}.isdisjoint(LAUNCHERS) and not re.search("SLURM|(?i:lightning)", code):
            say_aside(
                f"srun sets SLURM_PROCID, and no RANK. {path.name} does not name Slurm's variables: on the cluster set "
                "RANK, LOCAL_RANK and WORLD_SIZE from them. Here it runs as by torchrun."
            )
    if there.real and not num_gpus():
        raise Stop("--real needs a GPU, and there is none here", "leave it out: a rehearsal without values needs none")
    config = config_of(machines.config_file or launch.config_file)
    said = group_of_config(alternatives.read(config)) if config else Group()
    ranks, per_machine = machines.among(launch.group, said)
    return Request(
        script=str(path),
        module=module,
        words=launch.words,
        launch_words=launch.own,
        ranks=ranks,
        ranks_per_machine=per_machine,
        steps=how_far.steps,
        tokens=how_far.tokens,
        config_file=str(config) if config else None,
        configs_of=pairs("--config-of", there.config_of),
        values={name: number_in(text) for name, text in pairs("--value", there.value).items()},
        skips=list(there.skip),
        gpu=gpu_named(machines.gpu) if machines.gpu else None,
        evaluate=how_far.evaluate,
        save=how_far.save,
        real=there.real,
    )


def config_of(named: Path | str | None) -> Path | None:
    """Return Accelerate's YAML: the one that is named, or that of `accelerate config`, if there is one."""
    default = DEFAULT_CONFIG.expanduser()
    if named is None and not default.is_file():
        return None
    config = Path(named or default)
    if not config.is_file():
        raise Stop(f"there is no --config_file {config}", "name Accelerate's YAML")
    alternatives.refuse_missing(config)  # Accelerate would end with a traceback
    return config


def pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    """Return NAME=TEXT by name."""
    for text in texts:
        if "=" not in text:
            raise Stop(f"{option} takes NAME=VALUE (got {text!r:.80})", f"write {option} {text}=...")
    return dict(text.split("=", 1) for text in texts)


def number_in(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Stop(f"--value takes NAME=NUMBER (got {text!r:.80})", "give a number") from None
