"""`study oom`: what an error about memory means, and which change would fit."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tyro

from study.cli import given
from study.cli import pasted as texts
from study.cli.findings import say_indented
from study.configs import code, engines, sources
from study.configs.code import that_counts
from study.configs.oom import reading
from study.configs.oom.by_text import by_text, explained
from study.configs.oom.causes import Cause
from study.configs.oom.changes import may_hold_whole_gradients
from study.configs.oom.explain import IN_FP32, fits_no_tensor, tokens_of_logits, widths
from study.configs.oom.fitting import OF_HOST, far_beyond, named, predicted
from study.configs.oom.optimizers import UNSAID
from study.configs.oom.reading import OomError
from study.configs.oom.releases import of_other_releases
from study.configs.oom.remedies import with_known, with_remedies
from study.configs.oom.said import CHUNKING, LAYERS_DIVIDED, REDUCES_EACH, typed
from study.configs.oom.training import NEEDED, Described, KnownTraining, prediction_of
from study.configs.pasted import own_loops
from study.configs.pasted.answer import answer
from study.configs.pasted.memory import error_in
from study.configs.pasted.read import Pasted, read
from study.configs.pasted.said import left_open
from study.configs.scripts import among, shown
from study.core import arms
from study.core.errors import Stop
from study.core.files import is_file
from study.core.settings import flag
from study.core.text import say_wrapped
from study.known import lists
from study.known.faults import ANY
from study.known.findings import in_a_sentence, with_id
from study.known.stacks import Stack
from study.predict.front import Wanted, deepspeed_keys, default_sequence, papers, usual_precision
from study.report.advice import nodes_note
from study.report.estimates import autocast_note

DEEPSPEED_CONFIG = re.compile(r"\bdeepspeed(?:_config)?[\"']?\s*[:= ]\s*[\"']?([\w./-]{1,200}\.json)\b")
INSTALLED = re.compile(r"(?m)^[\w.-]+==\S+$")  # a line of pip freeze
RECOMPUTES = re.compile(r"(?i)checkpointing|utils\.checkpoint|checkpoint_wrapper|recomput")
OF_SEQUENCE = {"oom-padded", "oom-embeddings"}  # of one size: how long sequences are decides
SAID_AS = {
    "arm": "stage",
    "precision": "loaded",
    "chunked_loss": CHUNKING,
    "attention_kernel": "attention",
}  # what a text says of a flag, if it is called otherwise


def oom(error: tyro.conf.Positional[tuple[str, ...]] = (), /, *, model: Wanted, training: Described) -> dict:
    """Explain an error about memory: what its size is, and what made it. Nothing is run.

    It reads errors of CUDA and ROCm, of host memory and pinned memory, of processes that were killed, and of disks.
    With --model and --arm or --config, the size is matched with that training's tensors; with --micro-batch
    and --sequence also with what a micro-batch makes. With --model, --arm, --ranks and --micro-batch, and an error that
    tells the size of the GPU, it says which single change is predicted to fit. What a launch command or a config in the
    text says of these is taken from there; flags win.

    With --json: the causes with their points, what was read from the text, and the prediction.

    Example: `study oom train.log --vocabulary 248320 --sequence 4k --micro-batch 1`

    Args:
        error: The error, best in quotes, or the log that holds it. Default: the standard input.
        model: The model.
        training: The training.
    """
    paths, text = given.split(error or ("-",), "oom")
    if not text.strip():
        what = " ".join(error) or "the standard input"
        raise Stop(
            f"{what!r:.80} has no text of an error", "name the log of the training, or paste the error in quotes"
        )
    text, defaults = with_defaults(text)
    pasted = read(given.whole_text(paths, text, error))
    message = error_in(pasted.text)
    if message is None:
        return _of_words(pasted.text)
    if training.config is None:
        training = replace(training, config=_config_among(paths, engines.texts_of(error)))
    causes, known = explained(pasted, message, model, training)
    contradiction = _contradiction(message, known, causes)
    which = predicted(message, known, named(causes))
    told = with_known(pasted, known)
    said = (
        which.differs,
        far_beyond(message, known) or fits_no_tensor(message, known),
        _not_in_script(error, known, told),
    )
    say_wrapped(*filter(None, said))
    causes = with_remedies(message, known, causes, which, pasted)
    _show_causes(causes)
    say_wrapped("", f"The message ({message.where.removeprefix('oom-')}): {message.quoted}")
    read_words = _show_taken(pasted, known, vars(model) | vars(training), bool(which.words))
    if defaults:
        say_wrapped(
            f"Where the script reads {', '.join(defaults)}, their defaults count: the launch command may give others."
        )
    differ = [*engines.contradictions(engines.texts_of(error))]
    notes = [
        *map(in_a_sentence, differ),
        *engines.started(differ, error),
        *(each.sentence for each in known.conflicts),
        *_of_keys(known),
    ]
    of_name = pasted.said.get("stage_by") if "stage" in known.from_text and training.arm is None else None
    notes += left_open({"stage": told.said.get("stage"), "stage_by": of_name})
    notes += of_unknown_kind(paths)
    of_loop = own_loops.mistakes(pasted, among(error))
    notes += [each.noted("In the script") for each in of_loop if each.id == "losses_kept"]
    if LAYERS_DIVIDED in known.settings:
        notes.append("Layers, tokens or experts are divided among ranks: no size of theirs is known here.")
    if which.words:
        notes += nodes_note(arms.load_arm(known.arm), known.ranks)
        notes += _of_autocast(known)
    say_wrapped(*notes)
    if which.words:
        say_wrapped("", which.words, *of_other_releases(pasted, known))
    if contradiction:
        say_wrapped("", contradiction)
    _ask(message, known, causes, pasted.text, {path.name for path in paths}, _says_no_adapters(error))
    if not which.words:  # one that fits is what failed
        say_wrapped("`study advise` predicts which arms fit, and how long their steps take.")
    return {
        "error": asdict(message),
        "causes": list(map(asdict, causes)),
        "taken_as": known.used,
        "mistakes": list(map(asdict, differ)),
        "fine": not any(each.is_surely_wrong for each in differ),
        "read": read_words,
        "predicted": which.words or None,
        "contradiction": contradiction,
    }


def with_defaults(text: str) -> tuple[str, list[str]]:
    """Return a text with the defaults of its scripts' own arguments for their names, and which these are."""
    parts = text.split(reading.BETWEEN_TEXTS)
    written = [code.with_defaults(part, text) for part in parts]
    return reading.BETWEEN_TEXTS.join(part for part, _ in written), [each for _, taken in written for each in taken]


def of_unknown_kind(paths: list[Path]) -> Iterator[str]:
    """Yield that a config beside a text is of no known kind. What lists packages is none."""
    for path in paths:
        with contextlib.suppress(Stop):
            if sources.read(path).kind == sources.OTHER and not lists.listed(lists.content(str(path))):
                yield f"{path.name} is of no kind that is known here: what looks like a setting was read, and no more."


def _config_among(paths: list[Path], texts: dict[str, str]) -> Path | None:
    """Return the config that stands beside a text. Of Accelerate's and the one that this names, Accelerate's."""
    kinds: dict[str, list[Path]] = {}
    for path in engines.that_may_count(paths, texts):
        with contextlib.suppress(Stop):  # what is no config is a text
            kinds.setdefault(sources.read(path).kind, []).append(path)
    for kind in (sources.TORCHTITAN, sources.ACCELERATE, sources.TRAINER, sources.DEEPSPEED):
        if kind in kinds:
            return kinds[kind][0] if len(kinds[kind]) == 1 else None
    return None


def _of_keys(training: KnownTraining) -> list[str]:
    """Say what of the config of DeepSpeed is counted, and what is not."""
    arm = training.arm.partition("_")[0]
    return deepspeed_keys.in_words(training.settings.get("deepspeed") or {}, papers.STAGES.get(arm), is_arm=False)


def _of_autocast(training: KnownTraining) -> list[str]:
    """Say what a training with DeepSpeed needs if 16 bits mean what they do in a config, and not autocast."""
    try:
        predicted_for = prediction_of(training.wanted, training.described).training
    except Stop:  # it is not predicted, which was said
        return []
    return autocast_note(training.described.precision or "fp32", predicted_for)


def _not_in_script(words: tuple[str, ...], training: KnownTraining, told: Pasted) -> str:
    """Return that a script recomputes nothing, and that the numbers of its log say otherwise. Empty: not so."""
    script = next((Path(word).name for word in words if word.endswith(".py")), None)
    if not script or not training.inferred or not training.described.checkpointing or RECOMPUTES.search(told.text):
        return ""
    return (
        f"{script} and its log differ: it recomputes no activations, and the log's numbers say that they are "
        "recomputed. --no-checkpointing predicts what the script says."
    )


def _of_words(text: str) -> dict:
    """Say what a text without an error about memory means, as `study diagnose` does. Raise Stop if it says nothing."""
    told = answer(text, by_text=by_text)
    if not told.found:
        reading.find(text)
    return texts.tell(told, details=False)


def _show_taken(pasted: Pasted, training: KnownTraining, given: dict[str, Any], is_predicted: bool) -> list[str]:
    """Show what the training was taken for, and return what of it, and which releases, the text said."""
    # Configs and texts say more of it than the flags do. A wrong guess has to be seen.
    taken = [f"{name} {release}*" for name, release in pasted.releases.items() if release != ANY]
    for name, value in training.used.items():
        if value is None:
            continue
        is_read = given[name] is None and SAID_AS.get(name, name) in training.from_text
        taken.append(f"{_as_taken(training, name, value)}{'*' if is_read else ''}")
    if training.settings.get("selective recomputing") and training.described.checkpointing is None:
        taken.append("selective recomputing, which takes more than recomputing all activations and less than none")
    taken += _assumed(training) if is_predicted else []
    words = [each.removesuffix("*") for each in taken if each.endswith("*")]
    if taken:
        say_wrapped(f"Taken as: {', '.join(taken)}{' (* read from the text; flags win)' if words else ''}.")
    return words


def _assumed(training: KnownTraining) -> Iterator[str]:
    """Yield the settings that a prediction assumes, as neither the text nor a flag gives them."""
    described, model = training.described, training.model
    if not training.sequence and model and model.row_names == "sequences":
        yield f"{typed('sequence', default_sequence(model))} (nobody says it; give yours)"
    if described.accumulation is None and may_hold_whole_gradients(described):
        yield "--accumulation 1 (nobody says it; with more, Accelerate's FSDP holds whole gradients)"
    if described.optimizer is None and not training.arm.endswith(("_cpu", "_nvme")):
        yield UNSAID
    if described.precision is None:
        yield f"{typed('precision', usual_precision(arms.load_arm(training.arm)))} (usual with this arm)"
    with contextlib.suppress(Stop):  # it is not predicted, which was said
        zero = prediction_of(training.wanted, described).training.placement.zero
        yield from deepspeed_keys.of_stage_3(zero)
    if model and (note := model.attention_note(described.attention_kernel or "sdpa")):
        yield f"--attention-kernel eager ({note})"


def _as_taken(training: KnownTraining, name: str, value: Any) -> str:
    """Return a setting as its flag, with why it is assumed if nobody says it."""
    if name == "optimizer" and training.settings["optimizer"] == value:
        return f"{typed(name, value)} ({training.settings['optimizer by']})"
    if name == "optimizer" and value == "sgd":
        return f"{typed(name, value)} (with momentum)"
    if name == "plain":
        return "a loop of PyTorch's own"
    if name == "sync_each_batch":
        release = training.settings.get(REDUCES_EACH)
        return f"gradients reduced in each micro-batch (by {release})" if release else "sync_each_batch=True"
    if name == "reference":
        return f"a reference model of {value} bytes a weight"
    if name == "bucket_view":
        return "gradient_as_bucket_view=True"
    if name in training.by_size:
        return f"{typed(name, value)} (as the size says)"
    if name == "checkpointing" and training.inferred:
        return training.inferred
    if name == "arm" and "stage" in training.from_text and (why := training.settings.get("assumed")):
        return f"{typed(name, value)} ({why})"
    pairs = value // 2 if name == "micro_batch" else 0
    return f"{typed(name, value)} ({pairs} pairs)" if pairs and training.settings.get("pairs") else typed(name, value)


def _show_causes(causes: list[Cause]) -> None:
    first, *others = causes
    how = "Likely" if first.is_likely else "Perhaps"
    say_wrapped(with_id(f"{how}: {first.what}", first.id), "")
    if not first.is_likely:
        say_indented("A memory snapshot of PyTorch would tell.")
    say_indented(f"What to do: {first.remedy}.", f"Tells it apart: {first.apart}.")
    say_indented(f"It rests on: {'; '.join(first.reasons)}.")
    if others:
        say_wrapped("", "If it is not that:")
    for number, cause in enumerate(others, 1):
        why = f"{'likely' if cause.is_likely else 'possible'}: {'; '.join(cause.reasons)}"
        what = with_id(f"{cause.what[0].upper()}{cause.what[1:]} ({why})", cause.id)
        say_wrapped("", what, indent="    ", first=f"{number:>2}. ")
        say_indented(f"What to do: {cause.remedy}.", f"Tells it apart: {cause.apart}.")


def _contradiction(message: OomError, training: KnownTraining, causes: list[Cause]) -> str | None:
    """Return that the logits are of other tokens than were given. None: they are not.

    Of fewer only where the text names the logits, and the tokens make whole sequences.
    """
    ids = {cause.id for cause in causes}
    tokens, given_tokens = tokens_of_logits(message, training), training.rows * training.sequence
    if tokens is None or not training.sequence or ids.isdisjoint(("oom-logits", "oom-padded")):
        return None
    is_named = bool(IN_FP32.search(message.traceback))
    if tokens < given_tokens and (tokens % training.sequence or not is_named):
        return None
    are = "are" if "oom-logits" in ids else "would be"  # the text names them, or the size alone does
    kind = "fp32" if max(widths("oom-logits", message, training)) == 4 else "16-bit"
    given = f"you gave {given_tokens:,} (micro-batch {training.rows} x {training.sequence:,})"
    others = "are sequences longer, or are several packed into one?"
    if tokens < given_tokens:
        others = f"is its longest row {tokens / training.rows:,g}, or is the text of another run?"
    question = f"Is the micro-batch {tokens / training.sequence:g}, {others}"
    return f"{message.asked.text} {are} the {kind} logits of {tokens:,} tokens; {given}. {question}"


def _says_no_adapters(words: tuple[str, ...]) -> bool:
    """Whether a whole script is given, and nothing in it or beside it names adapters, but for what is installed."""
    files = [word for word in words if is_file(word)]
    given_text = INSTALLED.sub("", "\n".join(map(that_counts, map(lists.content, files))))
    return shown(among(files), "", given_text, Stack.of({})).get("peft") is False


def _ask(
    message: OomError, training: KnownTraining, causes: list[Cause], text: str, files: set[str], has_none: bool
) -> None:
    """Say which flags would tell more. `files` are the configs beside the text; `has_none`: no adapters are in it."""
    named_config = DEEPSPEED_CONFIG.search(text)
    is_given = training.described.config is not None or (named_config and Path(named_config[1]).name in files)
    if named_config and not is_given:
        say_wrapped("", f"The text names {named_config[1]}: with --config {named_config[1]} its settings count.")
    if training.model is None and (altered := training.settings.get("altered")):
        say_wrapped(
            "", f"The model is {altered}: its tensors are not known. Give --model and a folder with its config.json."
        )
    elif training.model and not (training.has_adapters or training.says_all_train or has_none):
        say_wrapped("", "If only adapters train, give --lora-rank as well.")
    missing, heard = _open(message, training, {cause.id for cause in causes})
    if missing and heard and LAYERS_DIVIDED not in training.settings:
        *first, last = missing
        flags = " and ".join(filter(None, [", ".join(first), last]))
        say_wrapped(*([] if training.model else [""]), f"Give {flags} to hear {' and '.join(heard)}.")


def _open(message: OomError, training: KnownTraining, ids: set[str]) -> tuple[list[str], list[str]]:
    """Return which flags are missing, and what they would tell."""
    names = {"arm", "ranks"} if message.where in OF_HOST else {*NEEDED, "lora_rank"}
    missing = [f"{flag(name)}{' or --config' * (name == 'arm')}" for name in training.missing if name in names]
    is_named = training.model is not None or bool(training.settings.get("altered"))
    missing = missing if is_named else ["--model", *missing]
    if message.where in OF_HOST:
        return missing, ["what the host needs"]
    if message.where != "GPU":
        return [], []
    heard = [] if is_named else ["which tensor of this training has the size"]
    if not OF_SEQUENCE.isdisjoint(ids):
        heard.append("whether the size is of the logits")
    if training.missing or training.model is None:
        heard.append("which change is predicted to fit")
    are_images = training.model and training.model.row_names == "images"
    missing += [] if training.sequence or are_images else ["--sequence"]
    missing += [] if message.total or training.gpu_bytes or (training.model and not training.missing) else ["--gpu"]
    return missing, heard
