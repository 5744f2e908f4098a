"""README has the answers of `answers.toml`, and their pages have the numbers of the ledger and of the records."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pandas as pd
import pictures
import pytest
from packaging.version import Version

from study.cli import diagnosis
from study.configs.pasted.situations import situations
from study.conform import releases
from study.core.arms import NAMES, all_paths, load_arm
from study.core.recipes import RECIPES
from study.core.text import size
from study.ledger import search, texts, verdicts
from study.ledger.evidence import SETTING, OfRuns
from study.predict import front
from study.predict.front import Batch, Placement, Training, papers
from study.records import metrics, runs
from study.report import answers
from study.report.topics import losses as topic_of_losses
from study.report.topics import memory
from study.report.topics import traffic as topic_of_traffic
from tests.conftest import ROOT
from tools.times import PREDICTED, PUBLISHED

README = (ROOT / "README.md").read_text()
KEPT = ROOT / "reports/cpu-2core"
DIGITS = {"four": 4, "five": 5, "six": 6}
QUESTIONS = answers.questions()
KNOWN = {each["name"]: each["known"] for each in QUESTIONS}


def page_of(name: str) -> str:
    return (ROOT / f"reports/answers/{name}.md").read_text()


def answer_of(name: str) -> str:
    """Return what README prints as an answer, with its one number."""
    return next(each["answer"] for each in QUESTIONS if each["name"] == name)


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    lines = [re.split(r"(?<!\\)\|", line) for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE)]
    return {first.strip(): [cell.strip().replace(r"\|", "|") for cell in cells] for first, *cells in lines}


def test_what_a_rank_with_adapters_holds_is_what_its_records_hold():
    """In the guide and on the page. Recomputing by either way holds as much."""
    guide = rows_of((ROOT / "GUIDE.md").read_text())
    page = (ROOT / "study/report/templates/stack.html").read_text()
    found = runs.load([KEPT / "runs/lora"]).done
    assert len(found) == 9
    for name, recomputes in {"kept": False, "recomputed, reentrant or not": True}.items():
        chosen = [run for run in found if run.record.requested.checkpointing == recomputes]
        pairs = {(run.record.arm, f"{metrics.value(run.record, 'tracked_peak_bytes') / 1e9:.1f}") for run in chosen}
        held = dict(pairs)
        assert len(held) == len(pairs) == 3, "repeats of an arm hold the same"
        assert guide[name] == [held[arm] for arm in guide["activations"]]
        assert "".join(f"<td>{cell}</td>" for cell in (name, *guide[name])) in page


def test_readme_is_read_in_two_minutes():
    lines = README.splitlines()
    assert len(lines) <= 90
    assert len(README.split()) <= 900
    code = [line for line in lines if line.startswith("    ")]
    assert max(map(len, code)) <= 100, "a longer line runs out of its box"
    doors = re.findall(r"^\*\*(.+?)\*\*", README.partition("\n## ")[0], re.MULTILINE)
    assert doors == [
        "I want to understand ZeRO.",
        "Will my training fit, and is it right?",
        "Do published claims hold?",
    ]


def test_readme_says_how_many_arms_there_are_and_what_each_count_counts():
    table = answers.of_losses(answers.trained_here(runs.load(KEPT / "runs/smoke"))).rows
    trained = {*table.dropna(subset="difference")["arm"]} | {"ddp"}
    variants = len(all_paths()) - len(NAMES)
    assert f"{len(NAMES)} ways to train (*arms*) and {variants} variants: `accelerate_configs/`" in README
    assert "The losses of twelve ways to train coincide" in README
    assert len(trained) == 12
    assert f"{len(trained) - 1} arms are within" in page_of("losses"), "those beside ddp"


@pytest.mark.parametrize("each", QUESTIONS, ids=lambda each: each["name"])
def test_readme_has_each_answer_with_one_number_and_its_page(each):
    link = f"[{each['question']}](reports/answers/{each['name']}.md)"
    assert f"| {link} | {each['answer']} | {each['known']} |" in README
    title, _, bold, *_ = page_of(each["name"]).splitlines()
    assert title == f"# {each['question']}"
    assert re.fullmatch(r"\*\*.+\*\*", bold), "the answer comes first"
    assert len(each["answer"].split()) <= 20
    assert re.search(r"\d", each["answer"]), "an answer has its number"


def to_card(claim) -> str:
    return f"[{claim.id}](claims/{claim.document}.md#{claim.id.lower()})"


def test_the_verdicts_and_their_counts():
    page = page_of("claims")
    printed = rows_of(page)
    # All of them, and of each verdict first the surest.
    held, false, conditional, undecided = verdicts.by_verdict(verdicts.surest_first(texts.claims())).values()
    rows = {to_card(each): [each.graded, each.answer, each.ours, each.theirs] for each in (*false, *held)}
    rows |= {to_card(each): [each.graded, f"“{each.quote}”", each.condition] for each in conditional}
    rows |= {to_card(each): [f"“{each.quote}”", each.would_decide] for each in undecided}
    of_claims = {name: row for name, row in printed.items() if re.match(r"\[(S\d+|P\d)-\d+", name)}
    assert of_claims == rows
    for verdict, found in verdicts.by_verdict(verdicts.surest_first(texts.claims())).items():
        for source, letter in (("papers", "P"), ("articles", "S")):
            below = page.partition(f"\n### {verdict[0].upper()}{verdict[1:]}: {source}\n")[2].partition("\n#")[0]
            mine = [to_card(each) for each in found if each.document.startswith(letter)]
            assert [name for name in rows_of(below) if name in rows] == mine
    assert all(all(row) for row in rows.values()), "an empty cell looks like a number that was lost"
    for text in texts.texts():
        held_of_it = [claim for claim in text.claim if claim.verdict == "holds"]
        of_posts = ", all of posts" if held_of_it and all(claim.in_post for claim in held_of_it) else ""
        assert of_posts or not any(claim.in_post for claim in held_of_it), "then the cell says how many"
        _, *others = verdicts.counts(text.claim).values()
        counts = [text.sentences, text.judged, len(text.claim), f"{len(held_of_it)}{of_posts}", *others]
        assert printed[text.claim[0].id.partition("-")[0]] == [text.read, *map(str, counts)]
    for topic in texts.TOPICS:
        found = verdicts.counts(each for each in texts.claims() if each.topic == topic)
        assert printed[topic] == [*map(str, found.values())]
    sentences, judged = (sum(getattr(text, name) for text in texts.texts()) for name in ("sentences", "judged"))
    assert f"Of {sentences} sentences {judged} are judged" in page
    counted = rows_of((KEPT / "README.md").read_text())
    for each in verdicts.by_document():
        assert counted[each.pop("document")] == list(map(str, each.values()))
        assert each["claims"] == sum(each[verdict] for verdict in texts.VERDICTS) <= each["sentences"]
    for text in (page, (KEPT / "README.md").read_text()):
        assert verdicts.in_words(texts.claims()) in " ".join(text.split())
    by_source = [
        verdicts.counts(claim for claim in texts.claims() if source in claim.kinds) for source in ("papers", "articles")
    ]
    papers, of_the_others = ([*map(str, each.values())] for each in by_source)
    shown = "of papers {} hold, {} do not, {} under a condition, {} are open; of articles ".format(*papers)
    shown += "{}, {}, {} and {}".format(*of_the_others)
    assert f'<img alt="Published claims by verdict: {shown}"' in page
    number = verdicts.counts(texts.claims())
    total = sum(number.values())
    articles = [text for text in texts.texts() if text.document.startswith("S")]
    assert len(articles) == DIGITS["four"]
    written = [claim for text in articles for claim in text.claim]
    of_papers = [claim for claim in texts.claims() if claim.document.startswith("P")]
    held = [claim for claim in written if claim.verdict == "holds"]
    of_articles = len(written)
    others = [claim for claim in of_papers if claim.verdict == "holds"]
    posts = [claim for claim in others if re.match("Post|DeepSpeed's tutorial", claim.where)]
    false = [len([each for each in part if each.verdict == "does not hold"]) for part in (of_papers, written)]
    words = f"A third of papers' and posts' {total - of_articles} claims hold, a ninth of articles' {of_articles}. "
    assert answer_of("claims") == words + "Most others are conditional or open."
    assert len(others) / (total - of_articles) == pytest.approx(1 / 3, abs=0.03)
    assert len(held) / of_articles == pytest.approx(1 / 9, abs=0.02)
    held_or_not = len(others) + len(held) + sum(false)
    assert (total - held_or_not) / (total - len(others) - len(held)) > 2 / 3
    words = f"{len(others)} hold ({len(posts)} of DeepSpeed's posts), "
    assert f"Of {total - of_articles} claims of 5 papers {words}" in page
    assert [text.document for text in texts.texts() if text.is_read_in_part] == ["P2", "P3", "P4"]
    assert verdicts.by_reading() in " ".join(page.split())
    apart = page.partition("\nOf these three we read abstract,")[2].partition("\n#")[0]
    assert {"P2", "P3", "P4"} == {name for name in rows_of(apart) if re.fullmatch(r"[PS]\d+", name)}
    assert "The English bodies of the papers P2, P3 and P4 were not read, so" in page
    assert "Three papers' English bodies were not read." in README
    assert f"[How {total} were judged](reports/answers/claims.md)" in README
    decided = [claim for claim in texts.claims() if claim.certainty]
    sure = Counter(claim.certainty for claim in decided)
    said = f"{sure['high']} are of high certainty, {sure['moderate']} of moderate, and {sure['low']} of low."
    assert f"Of the {len(decided)} decided claims {said}" in page
    without = [claim for claim in decided if not {piece.kind for piece in claim.evidence} & {"runs", "reproduction"}]
    assert f"{len(without)} rest on no real run of ours" in page
    records = len(runs.load(KEPT / "runs"))
    assert f"From {records} runs" in (KEPT / "README.md").read_text()


def digits(values, number: int) -> str:
    return ", ".join(f"{float(f'{each:.{number}g}'):,.12g}" for each in values)


def test_the_numbers_that_follow_from_others_are_computed_again():
    """57 arithmetic sentences were not judged, and that class gave two of the three claims of papers that fail."""
    section = page_of("claims").partition("\n## Arithmetic sentences checked\n")[2].partition("\n## ")[0]
    checked = [(text.document, each) for text in texts.texts() for each in text.checked]
    rows = {
        f"{document}, {each.where}": [
            f"{digits(each.says, 5)} {each.unit}".rstrip(),
            digits(each.computed, 4),
            "yes" if all(each.agree) else f"no: {each.note}",
        ]
        for document, each in checked
    }
    assert {name: row for name, row in rows_of(section).items() if re.match(r"P\d, ", name)} == rows
    assert len(rows) == len(checked)
    assert [each.where for _, each in checked if all(each.agree) == bool(each.note)] == []
    agree = [one for _, each in checked for one in each.agree]
    tables = [each for document, each in checked if document == "P1" and re.match("table [12]", each.where)]
    off = [abs(now / said - 1) for each in tables for now, said in zip(each.computed, each.says, strict=True)]
    said = f"Of {len(agree)} numbers of papers that follow from their other numbers {sum(agree)} agree, within "
    said += f"{100 * texts.NEAR:.0f} %: the {len(off)} of tables 1 and 2 of P1 within 3 %."
    assert said in section
    assert max(off) <= 0.03


@pytest.mark.parametrize(
    ("day", "said"),
    [
        (29, "On 29 November readers still changed {} verdicts, of {} that there are now."),
        (30, "On 30 November they changed {}."),
    ],
)
def test_how_stable_verdicts_are_is_what_the_log_says(day, said):
    of_the_day = re.findall(rf"(?m)^- {day}: .*(?:\n .*)*", (ROOT / "reports/log.md").read_text())
    verdict = r"\"?(?:holds only if|does not hold|holds|open)\"?"
    changed = {
        claim
        for entry in of_the_day
        for claim in re.findall(rf"\b([PS]\d+-\d+)(?:,| flipped from)\s{verdict}\sto\s{verdict}", entry)
    }
    assert said.format(len(changed), len(texts.claims())) in (ROOT / "GUIDE.md").read_text(), changed


def test_the_losses():
    page = page_of("losses")
    table = answers.of_losses(answers.trained_here(runs.load(KEPT / "runs/smoke"))).rows
    distances = table[table["arm"] != "ddp"].groupby("arm")["difference"].max().dropna()
    equal = [arm for arm, distance in distances.items() if distance == 0]
    others = distances.drop(equal)
    (steps,) = {*table.groupby("arm").size()}
    offloading = ("zero1_cpu", "zero2_cpu", "zero3_cpu", "zero3_nvme")
    assert (sorted(others.index), len(equal)) == (sorted(offloading), 7)
    assert {"zero1", "zero2", "zero3", "fsdp2"} < {*equal}
    most = f"{others.max():.0e}".replace("e-0", "e-")
    words = "seven ways to train have DDP's loss to the last bit at each step, FSDP2's offloading among them. Four stay"
    assert (
        f"two ranks, {steps} steps | {words} within {most} nats of it: {', '.join(f'`{arm}`' for arm in offloading)}"
        in page
    )
    precise, coarse, *_ = search.named(("S003-14",))[0].evidence
    kept = runs.load(KEPT / "runs/stages").counting
    digits = [-math.log10(max(abs(value - 1) for value in piece.values(kept))) for piece in (precise, coarse)]
    said = re.search(r"agree with DDP to (\w+) digits in fp32, and to (\w+) in bf16", page).groups()
    assert [DIGITS[word] for word in said] == [min(6, int(digits[0])), int(digits[1])], "a loss is printed with six"
    adafactor = search.named(("P1-37",))[0].evidence[1]
    assert f"the last loss is {adafactor.value:g} times DDP's" in page
    assert len(adafactor.values(runs.load(KEPT / "runs").counting)) == 1, "one pair"


def test_the_losses_of_a_hundred_steps():
    """Rounding grows. Seeds in their order; both sides are one process, so only the way to keep numbers differs."""
    trained: dict[int, dict[str, list[float]]] = {}
    for run in runs.load(KEPT / "runs/guelph").done:
        if len(run.record.loss.train) == 100:
            assert (run.record.requested.model, run.record.requested.precision) == ("bert-tiny", "fp32")
            trained.setdefault(run.record.requested.seed, {})[run.record.arm] = run.record.loss.train
    pairs = [(mine["single"], mine["zero3_cpu"]) for _, mine in sorted(trained.items())]
    assert len(pairs) == 3
    apart = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairs]
    first, second, third = (f"{each:.1e}".replace("e-0", "e-") for each in apart)
    last = sorted(divided[-1] / alone[-1] for alone, divided in pairs)
    words = f"are at most {first}, {second} and {third} nats apart, and the last ones "
    assert f"{words}{last[0]:.5f} to {last[-1]:.5f} times each other" in page_of("losses")


def test_how_far_fsdp2_is_off_in_bf16():
    kept = runs.load(KEPT / "runs/nodes").select(precision="bf16", ranks=2).done
    losses = {run.record.arm: run.record.loss.train for run in kept if run.record.arm in ("ddp", "fsdp2")}
    apart = max(abs(a - b) for a, b in zip(losses["ddp"], losses["fsdp2"], strict=True))
    said = f"at most {apart:.0e} nats off in {len(losses['ddp'])} steps".replace("e-0", "e-")
    assert said in " ".join((ROOT / "GUIDE.md").read_text().split())


def volume(arm: str, precision: str, passes: int) -> float:
    """Bytes of a step as the papers count them, of Llama-3-8B on eight ranks, as `study estimate` predicts them."""
    batch = Batch(1, passes, 2048)
    training = Training(front.named("llama3-8b"), RECIPES[precision], batch, Placement.of(load_arm(arm), 8, "cuda"))
    return papers.wire_bytes(front.estimate(training).traffic, 8)


def test_the_times_and_the_traffic():
    rows = pd.read_csv(ROOT / "reports/times.csv").set_index(["setting", "arm", "source"])
    one = rows.loc["1 x 2048, recomputed", "zero3", PREDICTED]
    pair = [rows.loc["4 x 512, kept", "zero3", source]["seconds"] for source in (PREDICTED, PUBLISHED)]
    time = page_of("time")
    assert f"stage 3 is predicted to take {one['over DDP']:.1f} times DDP's seconds" in time
    assert f"anything from {one['at least']:.1f} to {one['at most']:.0f} times" in time
    assert f"{pair[1]:.2f} s, where {pair[0]:.2f} s are predicted" in time
    several = rows.loc["4 x 512, kept", "zero3", PREDICTED]
    words = (
        f"{several['over DDP']:.1f} times, anything from {several['at least']:.1f} to {several['at most']:.0f} times"
    )
    assert f"| Llama-3-8B on eight H100, four micro-batches of 512 tokens, activations kept | {words} |" in time
    stages = [rows.loc["4 x 512, kept", f"zero{stage}", PUBLISHED]["seconds"] for stage in (1, 2, 3)]
    words = "{:.3f}, {:.3f} and {:.3f} s".format(*stages)
    words_of_stage_3 = f": stage 3 took {stages[2] / stages[0]:.1f} times stage 1's"
    assert words + words_of_stage_3 in time
    assert f"published by others, on eight GPUs{words_of_stage_3}" in KNOWN["time"]
    sent = [piece.value for piece in search.named(("P1-17",))[0].evidence]
    traffic = rows_of(page_of("traffic"))
    assert traffic["stage 2"] == [f"{sent[1]:g}", f"{sent[2]:g}"]
    of_libraries = [volume("zero2", "bf16_cast", passes) / volume("ddp", "bf16", passes) for passes in (1, 8)]
    printed = traffic["stage 2 in DeepSpeed's bf16, over DDP in Accelerate's bf16"]
    assert printed == [f"{over:.2f}" for over in of_libraries]
    at_scale = answers.of_topic("traffic", topic_of_traffic, [], answers.of_scale(runs.load(KEPT / "runs/at_scale")))
    over_ddp = at_scale.table.set_index("arm").iloc[:, 0]
    one, two, three = (over_ddp[f"zero{stage}"] for stage in (1, 2, 3))
    assert [traffic[f"stage {stage}"][0] for stage in (1, 2, 3)] == [one, two, three]
    assert one == two == f"{sent[1]:g}"
    assert float(three) < float(one)


def sent_over_ddp(records, arm: str, over: Mapping[str, object] = {"arm": "ddp"}, **setting) -> list[float]:
    """Bytes of a step of one micro-batch over DDP's, of kept records with equal settings, virtual or not.

    Bytes depend on no machine. Pairs of one machine alone left out a vision model.
    """
    where = {"arm": arm, "accumulation": 1, "device": ["cpu", "cuda"], **setting}
    ours, theirs = (
        [
            each
            for kind in ("runs", "virtual")
            for each in OfRuns(kind=kind, where=side, quantity="volume", n=1, value=1).values_with_runs(records)
        ]
        for side in (where, where | {**over})
    )
    equal = {*SETTING, "optimizer", "lora_rank"} - {*over}
    return [
        mine / of_ddp
        for (mine, (run,)), (of_ddp, (base,)) in itertools.product(ours, theirs)
        if of_ddp and all(run.facts[name] == base.facts[name] for name in equal)
    ]


def test_no_kept_record_of_a_stage_sends_more_or_less_than_the_answer_says():
    """The answer was true of the records that it names, and exceeded by others."""
    records = runs.load(sorted((ROOT / "reports").glob("*/runs"))).counting
    one, two, three = (sent_over_ddp(records, f"zero{stage}", optimizer="adamw") for stage in (1, 2, 3))
    assert [*one, *two] == pytest.approx([1.5] * len(one + two), rel=1e-3)
    _, _, bold, *_ = page_of("traffic").splitlines()
    assert f"stages 1 and 2 send 1.5 times DDP's bytes, and stage 3 {min(three):.1f} to {max(three):.2f} times" in bold
    (by_algorithm, *_) = search.named(("P1-19",))[0].evidence
    assert by_algorithm.value == 1.5
    assert "the paper's stage 3 sends as much" in KNOWN["traffic"]
    # Of every arm of DeepSpeed, also with offloading, second partitions or sequence parallelism.
    no_tensors = [arm for arm in NAMES if arm.startswith("zero") and not arm.endswith("_tp")]
    every = [share for arm in no_tensors for share in sent_over_ddp(records, arm, optimizer="adamw")]
    assert (len(no_tensors), f"{min(every):.1f}") == (9, "1.0")
    assert f": stages 1 and 2 send {one[0]:.1f} times DDP's bytes in a step of one micro-batch." in answer_of("traffic")
    # All ranks of tensor parallelism have the same sequences: as many in a step as two ranks of DDP with half of them.
    halves = {"over": {"arm": "ddp", "micro_batch": 4}, "micro_batch": 8, "optimizer": "adamw"}
    by_tensors = [share for arm in ("zero1_tp", "zero2_tp") for share in sent_over_ddp(records, arm, **halves)]
    assert (len(by_tensors), len({*by_tensors})) == (8, 1)
    assert f"`zero1_tp` and `zero2_tp`, send {by_tensors[0]:.2f} times DDP's bytes" in " ".join(
        page_of("traffic").split()
    )
    # What the sentence leaves out on purpose has other numbers, which the first condition names.
    adapters, fsdp2 = (sent_over_ddp(records, arm, lora_rank=4) for arm in ("zero3", "fsdp2"))
    muon = sent_over_ddp(records, "zero3", optimizer="muon")
    assert [len(each) for each in (adapters, fsdp2, muon)] == [1, 1, 1]
    said = " ".join(page_of("traffic").split())
    assert f"{adapters[0]:.0f} times DDP's bytes in a small GPT on two ranks, and FSDP2 {fsdp2[0]:.0f} times" in said
    assert f"With Muon stage 3 sends {muon[0]:.1f} times there" in said
    up_to_335m, xl = (sent_over_ddp(records, "zero3", model=model) for model in ("bert-large", "gpt2-xl"))
    assert f"and up to BERT-large, {max(xl):.2f} in GPT-2 XL" in said
    assert max(up_to_335m) == pytest.approx(1, abs=1e-3)
    equal = {"optimizer": "adamw", "precision": ["fp32", "bf16_cast"]}  # Accelerate's bf16 is another in DDP
    *others, vit, mixtral = sorted(sent_over_ddp(records, "fsdp2", **equal))
    padded = [sent_over_ddp(records, "fsdp2", model=model) for model in ("vit-micro", "mixtral-micro")]
    assert [[vit], [mixtral]] == padded
    assert len(others) > 50
    assert f"and {min(others):.2f} to {max(others):.2f} times with other models and ranks" in said
    (autocast,) = sent_over_ddp(records, "fsdp2", precision="bf16")
    assert f"In Accelerate's bf16 FSDP2 sends less than DDP, {autocast:.2f} times with a small GPT on two ranks" in said
    assert f"a small vision model sends {vit:.2f} times, and a small Mixtral with 4 experts {mixtral:.2f} times" in said


def test_no_kept_record_with_adam_is_further_from_ddp_than_the_answer_says():
    """Of AdamW in fp32. 8-bit Adam, which works in blocks, has a row of its own."""
    kept = runs.load(KEPT / "runs/optimizers").select(precision="fp32", lora_rank=None).done
    losses = {(run.facts["optimizer"], run.record.arm): run.record.loss.train for run in kept}
    apart = {
        (optimizer, arm): max(abs(a - b) for a, b in zip(mine, losses[optimizer, "ddp"], strict=True))
        for (optimizer, arm), mine in losses.items()
        if arm != "ddp" and (optimizer, "ddp") in losses
    }
    page = page_of("losses")
    one, three = (f"{apart['adamw_8bit', arm]:.1e}".replace("e-0", "e-") for arm in ("zero1", "zero3"))
    assert f"at most {one} nats from DDP's loss with stage 1, and {three} with stage 3" in page
    assert apart["muon", "zero1"] == apart["muon", "zero3"] == 0
    assert "| Muon with stages 1 and 3, the same training | DDP's losses |" in page


def test_which_optimizer_differs_from_ddps_and_by_how_much_in_any_kept_record():
    """Of AdamW in fp32, by the class of the optimizer that ran: DDP's is PyTorch's."""
    kept = runs.load(sorted((ROOT / "reports").glob("*/runs"))).select(precision="fp32")
    table = topic_of_losses.table(kept).query("against == 'ddp'").dropna(subset="difference")
    apart: dict[tuple[str, int], list[float]] = {}
    of_stages = []  # 1 and 2 with PyTorch's AdamW on two ranks
    by_id = {run.record.run_id: run.record for run in kept.done}
    for id, differences in table.groupby("run")["difference"]:
        observed = by_id[id].observed
        if by_id[id].requested.optimizer in (None, "adamw"):
            apart.setdefault((observed.optimizer, observed.ranks), []).append(differences.max())
            if observed.arm in ("zero1", "zero2") and observed.ranks == 2:
                of_stages.append(differences.max())
    assert {*apart} == {("AdamW", 2), ("AdamW", 4), ("DeepSpeedCPUAdam", 2)}
    low, high, torch_two, torch_four, stages = (
        f"{value:.0e}".replace("e-0", "e-")
        for value in (
            min(apart["DeepSpeedCPUAdam", 2]),
            max(apart["DeepSpeedCPUAdam", 2]),
            max(apart["AdamW", 2]),
            max(apart["AdamW", 4]),
            max(of_stages),
        )
    )
    page = " ".join(page_of("losses").split())
    assert f"`DeepSpeedCPUAdam` {low} to {high} nats" in page
    assert f"with PyTorch's AdamW at most {stages} with stages 1 and 2 on two ranks" in page
    assert (torch_two, torch_four) == ("1e-6", "1e-6")
    assert f"and at most {torch_two} with stage 3, with FSDP2 and on four ranks" in page
    within = max(torch_two, torch_four)
    assert float(within) < float(high)
    assert f"the losses stay within {high} of DDP's." in answer_of("losses")
    assert np.mean([each == 0 for ranks in (2, 4) for each in apart["AdamW", ranks]]) > 1 / 2
    assert "on four ranks, mostly by nothing" in page
    first_page = (ROOT / "study/report/templates/index.html").read_text()
    assert f"and other small models are within {within} of theirs" in first_page


def test_why_stage_3_has_several_numbers():
    released, tiny, gemma = (
        search.named((id,))[0].evidence[place].value for id, place in (("P1-19", 0), ("S001-42", 0), ("S000-20", 1))
    )
    page = " ".join(page_of("traffic").split())
    llama = rows_of(page_of("traffic"))["stage 3"][0]
    assert f"is released after use it sends {released:g} times (`study claims P1-19`)" in page
    assert f"{tiny:.1f} times in a tiny model (`study claims S001-42`) and up to BERT-large" in page
    assert f"in GPT-2 XL, {llama} in Llama-3-8B" in page
    assert f"Gemma2-9B sends {gemma:g} times (`study claims S000-20`)" in page
    of_four_ranks = search.named(("P5-01",))[0].evidence[0].value
    assert f"FSDP2 sends {of_four_ranks:g} times as much with a small BERT on four ranks" in page
    read_out = [front.named(name).reads_out_by_embeddings for name in ("llama3-8b", "gemma2-9b")]
    assert read_out == [False, True]


def sent_by_a_node(arm: str) -> float:
    """Bytes that one of two nodes of two ranks sends in a step, on rings, from the counted tensors of rank 0."""
    found = [run.record for run in runs.load(KEPT / "runs/nodes").select(arm=arm, precision="fp32").done]
    (collectives,) = [each.traffic.per_rank[0] for each in found if len(each.traffic.per_rank) == 4]
    sent = 0.0
    for name, moved in collectives.items():
        for ranks, size_bytes in moved.by_ranks(4).items():
            turns = 2 if name == "all_reduce" else 1
            on_a_link = turns * (len(ranks) - 1) / len(ranks) * size_bytes
            if ranks == (0, 1, 2, 3):
                sent += on_a_link  # the ring leaves a node once
            elif ranks == (0, 2):
                sent += 2 * on_a_link  # ranks 1 and 3 do the same
    return sent


def test_what_a_node_sends():
    hsdp, fsdp2 = (f"{sent_by_a_node(arm) / 1e6:.1f}" for arm in ("hsdp", "fsdp2"))
    assert f"a node sends {hsdp} MB in a step, and {fsdp2} with FSDP2" in page_of("traffic")


def test_the_run_that_hung_is_diagnosed_as_printed(capsys):
    diagnosis.diagnose((KEPT / "hung/rank0_reduces",))
    printed = {line.strip() for line in capsys.readouterr().out.splitlines()}
    _, *block = README[README.index("study diagnose reports") :].partition("\n\n")[0].splitlines()
    assert len(block) == 3
    assert {line.strip() for line in block} <= printed


def test_the_page_of_reports_counts_what_is_kept():
    page = (ROOT / "reports/README.md").read_text()
    ends = Counter(json.loads(line)["outcome"] for line in (KEPT / "hangs.jsonl").read_text().splitlines())
    at_once = ends["crashes"] + ends["fails"]
    assert f"{ends.total()} trainings {ends['hangs']} hang, {at_once} end at once" in page
    threads = json.loads((ROOT / "reports/oom_threads.json").read_text())
    named = Counter(thread["half"] for thread in threads if thread["hit"])
    assert f"keeps {len(threads)}. The rules of `study oom` name the cause of {named.total()}" in page
    assert f"{named['looked_at']} of the ten" in page
    assert f"{named['last']} of the 20" in page


def test_the_sizes_and_the_advice():
    at_scale = answers.of_scale(runs.load(KEPT / "runs/at_scale"))
    held = {run.record.arm: memory.held_bytes(run) for run in at_scale}
    page = rows_of(page_of("memory"))
    arms = {"DDP": "ddp", "stage 1": "zero1", "stage 2": "zero2", "stage 3": "zero3"}
    assert {name: page[name][0] for name in arms} == {name: size(held[arm]) for name, arm in arms.items()}
    ddp, *stages = (f"{held[arm] / 1e9:.0f}" for arm in arms.values())
    usual = f"{16 * front.named('llama3-8b').parameters / 1e9:.0f}"  # bytes a parameter
    assert f'{ddp} GB on each with DDP. {stages[0]}, {stages[1]} and {stages[2]} GB with stages 1, 2 and 3."' in README
    of_ddp = next(metrics.components(run.record) for run in at_scale if run.record.arm == "ddp")
    beyond_bytes = of_ddp["gradients"] - of_ddp["weights"] + of_ddp["temporaries"]
    assert f"{(sum(of_ddp.values()) - beyond_bytes) / 1e9:.0f}" == usual, "its bar is parted there"
    counts = re.findall(r"^\| (\d+) \| (\d+)", page_of("memory"), re.MULTILINE)
    assert [
        (gb, each) for gb, each in counts if gb == f"{int(each) * front.named('llama3-8b').parameters / 1e9:.0f}"
    ] == [
        (usual, "16"),
        (ddp, "20"),
        (ddp, "20"),
        ("177", "22"),
    ], "Accelerate's 147 has activations beside its 16 bytes a parameter"
    pair = f"{stages[2]} GB of Llama-3-8B with stage 3, and {ddp} GB with DDP."
    assert pair in answer_of("memory"), "both counted alike"
    states_gb = (16 / 8) * front.named("llama3-8b").parameters / 1e9
    title = f"{ddp} GB on each with DDP, {stages[2]} GB with ZeRO's stage 3"
    assert f"The field's 16 bytes a parameter are [{usual} of DDP's {ddp} GB](reports/answers/memory.md)." in README
    assert README.count(usual) == 1, "beside one pair that is counted alike"
    assert README.startswith(f"# Llama-3-8B on eight GPUs: {title}\n")
    assert f"{pictures.TITLE.partition(':')[0]}:" in README.splitlines()[0]
    kept = runs.load(KEPT / "runs").select(model="llama3-8b", ranks=8, virtual=True, lora_rank=None).done
    peaks = {(run.record.requested.checkpointing, run.record.arm): memory.held_bytes(run) for run in kept}
    shares = {recomputed: peaks[recomputed, "zero3"] / peaks[recomputed, "ddp"] for recomputed in (True, False)}
    share = f"{shares[True]:.0%}".replace("%", " %")
    of_usual = f"{held['zero3'] / (16 * front.named('llama3-8b').parameters):.0%}".replace("%", " %")
    assert f"It has {share} of DDP's {ddp} GB, and {of_usual} of the {usual}." in page_of("memory")
    words = f"With kept activations stage 3 holds {size(peaks[False, 'zero3'])}: {shares[False]:.0%} of our DDP's"
    assert words.replace("%", " %") in " ".join(page_of("memory").split())
    drag = (ROOT / "study/report/templates/drag.html").read_text()
    copies = "the [update's copies](../../WORDS.md) of gradients"
    assert f"with stage 3 6.0 of the {size(held['zero3'])} are {copies}" in page_of("memory")
    assert f"{held['zero3'] / 1e9 - states_gb:.1f}" == "6.0", "most of what the formula has not, under the slider"
    peaks = f"peak is {size(held['zero2'])} with stage 2 and {size(held['zero3'])} with stage 3, in the update"
    assert f"{peaks}: each has 6.0 GB of the update's copies. With stage 1 it is {size(held['zero1'])}," in drag
    assert f"{6 / 8 * front.named('llama3-8b').parameters / 1e9:.1f}" == "6.0", "6 bytes a parameter, as it says"
    reserved = {"stage 2": "57.0", "stage 3": "30.7", "FSDP2": "28.0"}
    of_h200 = (ROOT / "reports/h200-3/README.md").read_text()
    for arm, name in {"zero2": "stage 2", "zero3": "stage 3", "fsdp2": "FSDP2"}.items():
        row = re.search(
            rf"llama3-8b, 1 x 2048, recomputed \| bf16_cast \| {arm} \| ([\d.]+) \| [\d.]+ \| ([\d.]+)", of_h200
        )
        assert f"{float(row[2]) + 1e-9:.1f}" == reserved[name]
        assert reserved[name] in page_of("memory")
        if name == "stage 2":
            assert (
                f"PyTorch reserved {float(row[2]) / float(row[1]) - 1:.0%} more in one run.".replace("%", " %")
                in README
            )
        assert page[name][0] == f"{float(row[1]) + 1e-9:.1f} GB"
    assert (
        f"README's figure has {ddp} GB for our DDP. {usual} of them are these"
        in (ROOT / "notebooks/stages.ipynb").read_text()
    )
    first_page = (ROOT / "study/report/templates/index.html").read_text()
    assert f">{README.splitlines()[0].removeprefix('# ')}.<" in first_page
    asked = [run.record.requested for run in at_scale]
    taken = {(each.micro_batch, each.sequence, each.accumulation, each.checkpointing) for each in asked}
    assert taken == {(1, 2048, 1, True)}
    assert "one recomputed sequence of 2,048 tokens." in page_of("memory")
    assert "with one recomputed sequence of 2,048 tokens." in README


def test_the_guide_says_in_which_order_to_try_the_stages():
    guide, held, sent = map(rows_of, ((ROOT / "GUIDE.md").read_text(), page_of("memory"), page_of("traffic")))
    assert guide["DDP, no stage"][1:] == [held["DDP"][0], "1", "1"]
    for stage in ("stage 1", "stage 2", "stage 3"):
        assert guide[stage][1:] == [held[stage][0], *sent[stage]]


def test_what_makes_a_training_slow_has_the_numbers_of_the_pages():
    guide, sent, seconds = rows_of((ROOT / "GUIDE.md").read_text()), rows_of(page_of("traffic")), page_of("time")
    seconds = re.search(
        r"over DDP's seconds on the same machine \| (.+)\n\| the same with offloading \| (.+)\n", seconds
    )
    assert seconds
    of_passes = [situations()["micro-batches-sent"].sentence, guide["gradient accumulation with stage 2 or 3"][0]]
    of_one_gpu = [situations()["stage-on-one-gpu-slow"].sentence, guide["one GPU and a stage"][0]]
    ratios = dict(re.findall(r"`(zero[23])` ([\d.]+ to [\d.]+)", seconds[1]))
    offloaded = re.match(r"`zero1_cpu`, `zero2_cpu` and `zero3_cpu` ([\d.]+ to [\d.]+)", seconds[2])
    for stage in (2, 3):
        assert all(sent[f"stage {stage}"][1] in each for each in of_passes)
        assert all(ratios[f"zero{stage}"] in each for each in of_one_gpu)
    assert offloaded
    assert offloaded[1] in guide["offloading to the host"][0]


def test_the_releases():
    """Each row of the table has the releases that get its property wrong with stage 2; the last row has the others."""
    page = page_of("releases")
    kept = releases.answers()
    stage_2 = kept[kept["adapter"] == "zero2"]
    assert {*stage_2[stage_2["deepspeed"] == "0.18.9"]["answer"]} == {"fails"}
    assert "0.18.9 trains no stage 2 without a GPU" in page
    asked = sorted({*stage_2["deepspeed"]} - {"0.18.9"}, key=Version)
    # --- wrong are those that give another result without a message
    wrong = kept[kept["kind"] == "differs"].groupby(["adapter", "property"])["deepspeed"].agg(set)
    norms, last_pass, inner = wrong["zero2"][["autocast-norms", "accumulation-4", "inner-forward"]]
    assert norms == wrong["zero2", "autocast"]
    printed = []
    for cell, words in re.findall(r"^\| (0\.\d+[^|]*?) \|([^|]*)", page, re.MULTILINE):
        first, last = re.split(r" to |, ", cell)
        printed.append(asked[asked.index(first) : asked.index(last) + 1])
        said = ("the norm is wrong", "the last micro-batch", "`engine.module`", "without these three")
        assert said[len(printed) - 1] in words
    assert [*map(set, printed[:3])] == [norms, last_pass, inner - last_pass]
    assert min(printed[3], key=Version) > max(inner, key=Version)
    assert asked[-1] == printed[3][-1]
    assert f"tested {len(asked) + 1} releases" in page
    schedules = [wrong["zero2", f"schedule-{name}"] for name in ("warmup-groups", "stairs", "cosine-groups")]
    assert schedules[0] == schedules[1]
    assert schedules[2] - {*printed[3], *norms, *last_pass, *inner}, "also those that have none of the three"
    groups, cosine = len(schedules[0]), len(schedules[2])
    said = (
        f"`schedules-of-groups` in {groups} of the {len(asked)} with stage 2, `cosine-starts-at-the-rate` in {cosine},"
    )
    assert said in " ".join(page.split())
    by_setting, total = norms | last_pass, len(asked) + 1
    by_script = (inner | {"0.18.9"}) - by_setting
    more = f"{len(by_script)} more if a loss calls"
    words = f"Each of {total} tested releases of DeepSpeed has silent faults with some settings or scripts."
    assert answer_of("releases") == words
    assert {*wrong["zero2", "bf16-master-weights"]} | {"0.18.9"} >= {*stage_2["deepspeed"]}, "each has some fault"
    every = f"Each of {total} tested releases of DeepSpeed has some fault without a message."
    said = f"{every} Three that came and went hit {len(by_setting)} of {total} with some settings, and {more}"
    assert said in page
    assert f"So {len(by_setting)} and {len(by_setting | by_script)} of {total} are no rates" in page
    first_page = (ROOT / "study/report/templates/index.html").read_text()
    assert said in first_page
    passes = "with several micro-batches in a step"
    assert f"`engine.module` {passes}" in page.splitlines()[2]
    assert f"<code>engine.module</code> {passes}" in first_page
    for stage in ("zero1", "zero3"):
        assert wrong[stage, "inner-forward"] - {"0.18.9"} == {*printed[2]}
    assert inner & last_pass == last_pass, "0.17.6 to 0.18.2 fail it with stage 2 alone"
    halved = [len(wrong[stage, "fp16-scale"]) for stage in ("zero2", "zero3")]
    words = (
        f"wrong in all {halved[0]} releases whose stage 2 could be tested, and in all {halved[1]} whose stage 3 could."
    )
    assert words in " ".join(page.split())
    assert wrong["zero2", "unused-decay"] == {"0.19.7", "0.19.8"}
