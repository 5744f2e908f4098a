"""`study diagnose`: what is wrong with a run, or what a text means."""

from collections.abc import Collection, Mapping
from pathlib import Path

from study.cli import given, pasted
from study.cli.findings import say_indented, show_finding
from study.cli.ids import answering
from study.configs import engines
from study.configs.mistakes import compared_with, mistakes
from study.configs.oom.by_text import by_text
from study.configs.pasted.answer import answer
from study.configs.pasted.config_in_text import deepspeed_config
from study.configs.pasted.read import releases
from study.configs.scripts import among
from study.configs.sources import DEEPSPEED, Source, plain
from study.core.errors import Stop
from study.core.text import number_of, say_wrapped
from study.known.faults import Release
from study.records import store
from study.watch.about import About, about


def diagnose(runs: tuple[str, ...] = (), /, *, symptom: str = "", details: bool = False) -> list[dict]:
    """Say what is wrong or costly in a run, or what a log, an error or any pasted text means, and what to do about it.

    A text may be a log, a traceback, `pip freeze`, `transformers env`, `accelerate env`, `ds_report`, a config, a
    script, a command, your own sentences, or all of them: in files, through a pipe, or as words. Several make one
    answer: of a hang and its script it names lines that wait for all ranks, and that one rank alone runs.

    Of a folder with several runs it lists them, and tells each kind of finding once: name a run, and it tells all of
    its own. Of a watched run it also says what its steps show: waiting for data, slow ranks, memory that creeps, and
    more. If it is not finished, it says which rank waits for which. This works while the run hangs and after it was
    ended. It also reads a folder of Flight Recorder dumps in JSON, one of each rank.

    With --json: all findings of each run, and the answer to the text. The exit code is 1 if one is surely wrong,
    and 2 if the text, its last error or the symptom is not known here.

    Example: `study diagnose train.log`

    Args:
        runs: Texts, or folders of runs, record.json files, dumps, or configs, whose mistakes are named.
        symptom: What was seen, in your words, such as "loss is 0 and grad_norm 1.414 after a few hundred steps".
        details: Also the lines of the text that show it.
    """
    words = tuple(map(str, runs)) or (() if symptom else ("-",))
    paths, text = given.split(words)
    together = About("These files", "read together", [*engines.contradictions(engines.texts_of(words))])
    if together.findings:
        _show(together)
        say_wrapped(*engines.started(together.findings, words), "")
    told = []
    if text or symptom or not paths:
        told = _tell_text(paths, text, symptom, details, words, says_nothing=not together.findings)
    if text == " ".join(words) and (remedy := answering(words)):
        say_wrapped("", f"If you mean what has this id here: {remedy}.")
    if told and paths:
        say_wrapped("")
    of_runs = _runs(paths, together, releases(text))
    return [*([together.in_json()] if together.findings else []), *told, *of_runs]


def _tell_text(
    paths: list[Path], text: str, symptom: str, details: bool, words: tuple[str, ...], says_nothing: bool
) -> list[dict]:
    """Tell what a text means, and what is wrong in a config that it has."""
    # A config beside a text says more of the training that the text is about.
    told = answer(given.whole_text(paths, text, words), symptom, by_text, among(words))
    config = _config_in(text)
    if config is None:
        return [pasted.tell(told, details, says_nothing)]
    if told.found:
        first = pasted.tell(told, details)
        say_wrapped("")
        _show(config)
    else:
        _show(config)
        first = pasted.tell(told, details, says_nothing=False)
    return [first, config.in_json()]


def _config_in(text: str) -> About | None:
    """Return the mistakes of a DeepSpeed config that a text has; None without any."""
    config = deepspeed_config(text)
    if config is None:
        return None
    findings = list(mistakes(Source(Path("ds_config.json"), DEEPSPEED, plain(config.content))))
    return About("the text", DEEPSPEED, findings) if findings else None


def _runs(paths: list[Path], together: About, used: Mapping[str, Release]) -> list[dict]:
    """Tell the findings of runs, records, dumps and configs that were not told of them `together`.

    `used` are releases that a text beside them names.
    """
    folders = [folder for path in paths for folder in store.run_folders(path) or [path]]
    if len(folders) > len(paths):
        return _list(folders)
    told = []
    for folder in folders:
        run = about(folder)
        run.findings = [each for each in run.findings if each not in together.findings]
        told.append(run.in_json())
        _show(run)
        say_wrapped(*compared_with(run.findings, used if run.config else {}))
        if run.not_known:
            say_indented("", f"Not in this record: {', '.join(run.not_known)}.")
    return told


def _list(folders: list[Path]) -> list[dict]:
    """Tell each kind of finding of several runs once."""
    told = []
    quiet = []
    shown_ids: set[str] = set()
    for folder in folders:
        try:
            run = about(folder)
        except Stop as stop:  # one that cannot be read stops no other
            run = About(folder.name, stop.what)
        told.append(run.in_json())
        if not run.findings and run.how.endswith("done"):
            quiet.append(run.run)
        else:
            _show(run, shown_ids)
            shown_ids |= {finding.id for finding in run.findings}
    if quiet:
        say_wrapped(f"No findings: {', '.join(quiet)}.")
    return told


def _show(run: About, shown_ids: Collection[str] = ()) -> None:
    """Show what is known of a run, a config or a text, without the findings that were shown above."""
    findings = [finding for finding in run.findings if finding.id not in shown_ids]
    text = f"{run.run}: {run.how}: {number_of(len(run.findings), 'findings')}"
    if above := len(run.findings) - len(findings):
        text += f", {above} told above"
    if run.config:
        text += f" in its keys; `study stack --config {run.config}` names known faults of libraries"
    say_wrapped(f"{text}.")
    if error := run.error:
        say_indented(f"It ended: {error['message']}. What to do: {error['what_to_do']}.")
    if run.ranks:
        say_indented(run.ranks)
    for number, finding in enumerate(findings, 1):
        show_finding(f"{number:>2}. ", finding)
