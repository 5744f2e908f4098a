"""What the pages look up: made by Python, and equal to what `study stack` and `study estimate` say."""

import json
import random

from packaging.version import Version

from study.cli.estimate import PassFlags, training_of
from study.cli.stack import row_of
from study.core.arms import NAMES, ROOT
from study.known.faults import Release, table
from study.known.which_apply import Stack, which_apply
from study.predict.front import BUCKET_ELEMENTS, HOST_PROCESS_BYTES, PlaceFlags, TrainingFlags, estimate, named
from study.report import calculator, stacks

MODELS = json.loads(calculator.FILE.read_text())


def looked_up(said: dict[str, str]) -> dict[str, str]:
    """The faults that the page of stacks shows where fields say this, each with what it asks."""
    found = {}
    given = dict(said)
    for name in stacks.LISTED.keys() & said.keys():
        given.setdefault("trainer", stacks.LISTED[name])
    given = stacks.implied().get(given.get("trainer", ""), {}) | given
    for row in stacks.rows():
        said = dict(given)
        if (forcing := row["forced"].get(said.get("trainer"))) is not None:
            is_so = "--reentrant" in said.values() or bool({*forcing} & {*said.values()})
            said = {name: word for name, word in said.items() if name != "reentrant"}
            said |= {"reentrant": "--reentrant"} if is_so else {}
        tested = row["in"].get(said.get(row["package"], ""))
        needs = row["needs"].items()
        if tested is not None and all(said[name] in need["fits"] for name, need in needs if name in said):
            asked = [tested, *(need["ask"] for name, need in needs if name not in said)]
            found[row["id"]] = " ".join(filter(None, asked))
    return found


def test_drawn_stacks_have_the_answers_of_study_stack():
    draw = random.Random(67)
    seen = set()
    for _ in range(200):
        packages = stacks.PACKAGES if draw.random() < 0.5 else stacks.PACKAGES[:-1]  # with TRL, or without
        used = {package: draw.choice(stacks.releases(package)) for package in packages}
        names = draw.sample([*stacks.BOXES], draw.randint(0, 8))
        boxes = stacks.TAKEN | {name: draw.choice([*stacks.BOXES[name][1]]) for name in names}
        theirs = looked_up({package: f"{package}=={release}" for package, release in used.items()} | boxes)
        versions: dict[str, Release] = {package: Version(release) for package, release in used.items()}
        stack = Stack.of(versions, stacks.flags_of([*boxes.values()]))
        ours = [row_of(each) for each in which_apply(stack)]
        assert theirs == {row["id"]: row["question"] for row in ours}, (used, boxes)
        seen.update((name, not question) for name, question in theirs.items())
    assert len(seen) > 100, "most faults, of which some apply"
    assert {is_sure for _, is_sure in seen} == {True, False}


def test_the_page_of_stacks_has_all_faults_of_its_packages_the_worst_first():
    rows = stacks.rows()
    known = {fault.id for fault in table().fault if fault.when is not None}
    assert {row["id"] for row in rows} == known
    assert [row["milder"] for row in rows] == sorted(row["milder"] for row in rows)
    worst = [row["id"] for row in rows if not row["milder"]]
    assert {"last-pass-only", "frozen-weights-stay"} <= {*worst}, "wrong without a message, or forced by a trainer"
    assert all(row["in"] for row in rows), "each has a release to choose"


def test_drawn_cells_of_the_calculator_are_those_of_study_estimate():
    """After a change of the predictor run tools/calculator_tables.py."""
    draw = random.Random(18)
    for _ in range(40):
        model, gpus = draw.choice([*MODELS]), draw.choice(calculator.GPUS_TRIED)
        sequence, of_gpus = draw.choice([*MODELS[model].items()])
        arm, cell = draw.choice([*of_gpus[str(gpus)].items()])
        flags = TrainingFlags(gpus=gpus, sequence=int(sequence), precision=calculator.PRECISION)
        passes = PassFlags(arm=arm, micro_batch=1, accumulation=128 // gpus, checkpointing=True)
        ours, _ = training_of(named(model), flags, PlaceFlags(gpu="H100"), passes, BUCKET_ELEMENTS)
        whole = estimate(ours)
        host_bytes = min(gpus, 8) * (whole.host_bytes + HOST_PROCESS_BYTES) if whole.host_bytes else 0
        assert cell == [whole.peak_bytes, host_bytes, whole.swapped_bytes], (model, sequence, gpus, arm)


def test_the_calculator_has_each_arm_that_makes_sense_in_the_order_of_simplicity():
    for name, of_sequences in MODELS.items():
        assert [*map(int, of_sequences)] == calculator.sequences(named(name))
        for of_gpus in of_sequences.values():
            assert {int(gpus): [*arms] for gpus, arms in of_gpus.items()} == {
                gpus: calculator.arms_of(gpus) for gpus in calculator.GPUS_TRIED
            }
    assert sorted(calculator.ARMS, key=NAMES.index) == [*calculator.ARMS]
    assert [[*map(int, MODELS[name])] for name in ("bert-base", "llama-2-7b", "llama3-8b")] == [
        [512],
        [2048, 4096],
        [2048, 4096, 8192],
    ]
    assert calculator.arms_of(1)[:2] == ["single", "zero1_cpu"]
    assert calculator.FILE.stat().st_size < 300_000


def test_the_calculator_names_the_arms_that_hold_less_with_one_micro_batch():
    """With several FSDP2 keeps whole gradients: 34.9 GB stand beside the 20.1 of an answer."""
    name, gpus, tokens = "llama3-8b", 8, 2048
    of_many = MODELS[name][str(tokens)][str(gpus)]
    less = [arm for arm in of_many if calculator.needs(named(name), arm, gpus, tokens, passes=1)[0] < of_many[arm][0]]
    assert tuple(less) == calculator.GATHERING
    said = f"FSDP2 holds {of_many['fsdp2'][0] / 1e9:.1f} GB there"
    assert said in (ROOT / "reports" / "answers" / "memory.md").read_text()
