"""What the pages look up: made by Python, and equal to what `study stack` and `study estimate` say."""

import dataclasses
import json
import random
import re
import typing

import pytest
from packaging.version import Version

from study.cli.estimate import PassFlags, training_of
from study.cli.stack import row_of
from study.core.arms import NAMES, ROOT, load_arm
from study.core.text import size
from study.known.faults import Release, table
from study.known.stacks import WAYS, Flags
from study.known.which_apply import Answer, which_apply
from study.predict.front import HOST_PROCESS_BYTES, PlaceFlags, Prediction, TrainingFlags, named
from study.report import calculator, stacks

MODELS = json.loads(calculator.FILE.read_text())


def looked_up(said: dict[str, str]) -> dict[str, tuple[Answer, str]]:
    """The faults that the page of stacks shows where fields say this: how sure it is, and what it asks."""
    found: dict[str, tuple[Answer, str]] = {}
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
            asked = [need["ask"] for name, need in needs if said.get(name) in (None, *need["still"])]
            answer: Answer = "applies if"
            if not asked and (not tested or said[row["package"]] in row["between"]):
                answer = "likely" if tested else "applies"
            found[row["id"]] = answer, " ".join(filter(None, [tested, *asked]))
    return found


def between_tested_releases() -> list[dict[str, str]]:
    """What a user chooses for a fault to likely apply: a release between two that have it, and all that it needs."""
    rows = [
        row
        for row in stacks.rows()
        if row["between"] and all(need["fits"] and not need["still"] for need in row["needs"].values())
    ]
    fits = [{name: need["fits"][0] for name, need in row["needs"].items()} for row in rows]
    return [chosen | {row["package"]: row["between"][0]} for row, chosen in zip(rows, fits, strict=True)]


def test_a_release_between_two_tested_ones_likely_has_their_faults():
    assert len(between_tested_releases()) > 5
    for chosen in between_tested_releases():
        theirs = looked_up(stacks.TAKEN | chosen)
        releases = {name: Version(chosen[name].partition("==")[2]) for name in stacks.PACKAGES if name in chosen}
        boxes = [word for name, word in (stacks.TAKEN | chosen).items() if name not in releases]
        ours = {each.fault.id: (each.answer, each.asks) for each in which_apply(stacks.stack_of(releases, boxes))}
        packages = {fault.id: fault.package for fault in table().fault}
        assert theirs == {id: each for id, each in ours.items() if packages[id] in releases}, chosen
        assert "likely" in {answer for answer, _ in theirs.values()}, chosen


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
        stack = stacks.stack_of(versions, [*boxes.values()])
        ours = [row_of(each) for each in which_apply(stack)]
        assert theirs == {row["id"]: (row["answer"], row["question"]) for row in ours}, (used, boxes)
        seen.update((name, answer) for name, (answer, _) in theirs.items())
    assert len(seen) > 100, "most faults, of which some apply"
    assert {answer for _, answer in seen} >= {"applies", "applies if"}
    assert ("fsdp1-clips-by-own-shard", "applies if") in seen


def test_the_page_asks_what_the_command_does():
    """Each flag has a box with each of its values, and a family one for each that the table knows."""
    ways = {each.removeprefix("--") for each in stacks.BOXES["stage"][1]}
    assert ways == {f"stage {stage}" for stage in range(4)} | {*WAYS}
    asked = {each.name for each in dataclasses.fields(Flags)} - {*WAYS}
    assert {*stacks.BOXES} - {"accumulates"} == asked
    of_table = {name for answers in table().families.values() for names in answers.values() for name in names}
    assert {box.removeprefix("--family ") for box in stacks.BOXES["family"][1]} == of_table
    assert of_table == {*typing.get_args(typing.get_args(typing.get_type_hints(Flags)["family"])[0])}
    assert {*table().families} <= {(fault.when or {}).get("script") for fault in table().fault}
    assert all(
        sum((name in names) for names in answers.values()) < 2
        for answers in table().families.values()
        for name in of_table
    )


def test_a_family_answers_for_a_script():
    """GPT-2 has the embeddings that Muon takes, Llama has not, and of BERT's tied ones nobody knows."""
    said = {"deepspeed": "deepspeed==0.19.8", "stage": "--stage 2", "optimizer": "--optimizer muon"}
    (question,) = (fault.asks["script"] for fault in table().fault if fault.id == "O-07")
    told = [
        looked_up(said | box).get("O-07") for box in ({}, {"family": "--family gpt2"}, {"family": "--family llama"})
    ]
    assert told == [("applies if", question), ("applies", ""), None]
    tied = {"accelerate": "accelerate==1.14.0", "torch": "torch==2.13.0", "stage": "--fsdp2"}
    assert looked_up(tied | {"family": "--family bert"})["fsdp2-tied-embeddings"][1].startswith("Has the model tied")
    for box in stacks.BOXES["family"][1]:
        versions: dict[str, Release] = {"accelerate": Version("1.14.0"), "torch": Version("2.13.0")}
        ours = which_apply(stacks.stack_of(versions, ["--fsdp2", box]))
        assert looked_up(tied | stacks.TAKEN | {"family": box}) == {
            each.fault.id: (each.answer, each.asks) for each in ours
        }


def test_a_box_says_whether_the_loop_accumulates_by_accelerate():
    """The fault of no_sync applies with yes, is gone with no, and is asked otherwise."""
    said = {"deepspeed": "deepspeed==0.16.4", "accelerate": "accelerate==1.8.1"}
    said |= {"stage": "--stage 2", "passes": "--passes 2"}
    told = [
        looked_up(said | box).get("no-sync-refused")
        for box in (
            {"accumulates": "accumulates"},
            {"accumulates": "accumulates not"},
            {},
        )
    ]
    assert told == [("applies", ""), None, ("applies if", f"{stacks.ACCUMULATES}?")]
    questions = {fault.when.get("script") for fault in table().fault if fault.when}
    assert stacks.ACCUMULATES in questions, "as the table asks it"


def test_the_page_of_stacks_has_all_faults_of_its_packages_the_worst_first():
    rows = stacks.rows()
    known = {fault.id for fault in table().fault if fault.when is not None}
    assert {row["id"] for row in rows} == known
    assert [row["milder"] for row in rows] == sorted(row["milder"] for row in rows)
    worst = [row["id"] for row in rows if not row["milder"]]
    assert {"last-pass-only", "frozen-weights-stay"} <= {*worst}, "wrong without a message, or forced by a trainer"
    assert all(row["in"] for row in rows), "each has a release to choose"


def estimated(model: str, sequence: str, gpus: str, arm: str, activations: str, rows: int, accumulation: int):
    """What `study estimate` predicts of a rank with the options that the page names."""
    flags = TrainingFlags(gpus=int(gpus), sequence=int(sequence), precision=calculator.PRECISION)
    recomputes = activations == "recomputed"
    passes = PassFlags(arm=arm, micro_batch=rows, accumulation=accumulation, checkpointing=recomputes)
    ours, _ = training_of(named(model), flags, PlaceFlags(gpu="H100"), passes, load_arm(arm), "cuda")
    return Prediction.of(ours)


def drawn(number: int):
    """Cells of the calculator's table, each by model, sequence, GPUs, arm and activations, with its lines."""
    draw = random.Random(18)
    for _ in range(number):
        model = draw.choice([*MODELS])
        sequence, arms = draw.choice([*MODELS[model].items()])
        arm, counts = draw.choice([*arms.items()])
        gpus, both = draw.choice([*counts.items()])
        for activations, lines in zip(calculator.ACTIVATIONS, both, strict=True):
            assert len(lines) == 1 or lines[0] != lines[1], "one line serves both"
            lines = lines * 2 if len(lines) == 1 else lines
            yield (model, sequence, gpus, arm, activations), lines


def test_drawn_cells_of_the_calculator_are_those_of_study_estimate():
    """After a change of the predictor run tools/calculator_tables.py."""
    for cell, lines in drawn(12):
        for accumulation, line in zip(calculator.ACCUMULATIONS, lines, strict=True):
            found = [estimated(*cell, rows, accumulation).memory for rows in calculator.MICRO_BATCHES]
            expected = [each.peak_bytes for each in found]
            if host_bytes := found[0].host_bytes:
                assert {each.host_bytes for each in found} == {host_bytes}, "whatever the micro-batch"
                expected += [min(int(cell[2]), 8) * (host_bytes + HOST_PROCESS_BYTES), found[0].swapped_bytes]
            assert line == [calculator.megabytes(each) for each in expected], cell


def test_what_drawn_cells_reserve_is_less_than_the_calculator_takes_as_sure():
    """Some arms need the larger numbers, and others do not. What offloads has the bound of its arm without, too."""
    of_arm = {arm: times for times, arms in calculator.RESERVED.items() for arm in arms}
    assert of_arm.keys() == {*calculator.ARMS}
    most: dict[float, float] = {}
    beside = 0
    for cell, _ in drawn(60):
        found = estimated(*cell, 1, 1).kinds()
        if found.allocated > 4e9:
            times = of_arm[cell[3]]
            assert found.reserved < times * found.allocated, cell
            assert found.driver - found.reserved < calculator.BESIDE_BYTES, cell
            most[times] = max(most.get(times, 0), found.reserved / found.allocated)
            model, sequence, gpus, arm, activations = cell
            on_gpu = re.sub("_cpu|_nvme", "", arm)
            if on_gpu != arm and gpus != "1":
                without = estimated(model, sequence, gpus, on_gpu, activations, 1, 1).memory.peak_bytes
                assert found.reserved < of_arm[on_gpu] * without, cell
                beside += 1
    assert beside > 5
    assert most.keys() == calculator.RESERVED.keys()
    assert max(most[1.5], most[1.7]) < 1.7 < most[3.2]


def test_the_page_prints_the_digits_of_study_estimate():
    """calculator.js rounds MB, which are rounded already: from 100 MB on to the same three digits."""
    draw = random.Random(19)
    sizes = [6_204_600_000, 6_205_000_000, 999_600_000, *(int(10 ** draw.uniform(8, 12)) for _ in range(5000))]
    for size_bytes in sizes:
        number, unit = size(size_bytes).split()
        on_page = float(f"{calculator.megabytes(size_bytes) / 1e3 * (1 + 1e-12):.3g}")
        assert on_page == pytest.approx(float(number) * {"MB": 1e-3, "GB": 1, "TB": 1e3}[unit], rel=1e-9), size_bytes


def test_any_gradient_accumulation_takes_what_eight_micro_batches_take():
    """The page says how nearly. BERT-base with stage 1 is the furthest."""
    furthest = ("bert-base", "512", "64", "zero1", "recomputed")
    for cell, (_, line) in [*drawn(15), (furthest, MODELS["bert-base"]["512"]["zero1"]["64"][0])]:
        two, three, many = (estimated(*cell, 1, each).memory.peak_bytes / 1e6 for each in (2, 3, 64))
        assert (three, many) == pytest.approx((line[0], line[0]), rel=0.01), cell
        assert 0.96 < two / line[0] < 1.01, cell
    assert two / line[0] < 0.98


def test_the_calculator_has_each_arm_that_makes_sense_in_the_order_of_simplicity():
    for name, of_sequences in MODELS.items():
        assert [*map(int, of_sequences)] == calculator.sequences(named(name))
        for arms in of_sequences.values():
            assert [*arms] == [*calculator.ARMS]
            for gpus in calculator.GPUS_TRIED:
                assert [arm for arm in arms if str(gpus) in arms[arm]] == calculator.arms_of(gpus)
    assert sorted(calculator.ARMS, key=NAMES.index) == [*calculator.ARMS]
    assert [
        [*map(int, MODELS[name])] for name in ("bert-base", "llama-2-7b", "llama3-8b", "mistral-7b", "llama3.2-1b")
    ] == [
        [512],
        [2048, 4096],
        [2048, 4096, 8192],
        [2048, 4096, 8192, 32768],
        [2048, 4096, 8192, 32768, 131072],
    ]
    assert calculator.arms_of(1)[:2] == ["single", "zero1_cpu"]
    assert calculator.FILE.stat().st_size < 600_000


def test_the_calculator_begins_with_the_numbers_of_the_answer():
    """With several micro-batches FSDP2 keeps whole gradients: 34.9 GB stand beside the 20.1 of the answer.

    Activations are recomputed. Kept ones take at least as much.
    """
    shown = calculator.SHOWN
    assert (shown["micro_batch"], shown["accumulation"]) == (calculator.MICRO_BATCHES[0], calculator.ACCUMULATIONS[0])
    arms = MODELS[shown["model"]][str(shown["sequence"])]
    one, several = (
        {arm: counts["8"][0][-passes][0] / 1e3 for arm, counts in arms.items() if "8" in counts} for passes in (0, 1)
    )
    kept = {arm: counts["8"][1][0][0] / 1e3 for arm, counts in arms.items() if "8" in counts}
    assert (shown["activations"], "kept") == calculator.ACTIVATIONS
    assert all(kept[arm] >= one[arm] for arm in one)
    assert kept["zero3"] > 1.5 * one["zero3"]
    page = (ROOT / "reports" / "answers" / "memory.md").read_text()
    assert f"With kept activations stage 3 holds {kept['zero3']:.3g} GB" in page
    held = {"DDP": "ddp", "stage 1": "zero1", "stage 2": "zero2", "stage 3": "zero3", "FSDP2": "fsdp2"}
    for line, arm in held.items():
        assert f"| {line} | {one[arm]:.3g} GB |" in page
    assert f"FSDP2 holds {several['fsdp2']:.3g} GB" in page
    assert tuple(arm for arm in one if one[arm] < several[arm]) == calculator.GATHERING
