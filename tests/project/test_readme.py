"""The tables and numbers of the READMEs, which people write, are those of the ledger and of the records."""

import json
import math
import re
from collections import Counter

from packaging.version import Version

from study.cli import diagnosis
from study.conform import releases
from study.core.text import size
from study.ledger import texts
from study.records import metrics, runs
from study.report import answers
from study.report.topics import memory
from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text()
KEPT = ROOT / "reports/cpu-2core"
DIGITS = {"four": 4, "five": 5, "six": 6}


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    lines = [line.split("|") for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE)]
    return {first.strip(): [cell.strip() for cell in cells] for first, *cells in lines}


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


def test_the_verdicts_and_their_counts():
    known = {claim.id: [claim.verdict, claim.certainty or ""] for claim in texts.claims()}
    printed = {name: row for name, row in rows_of(TEXT).items() if name in known}
    assert len(printed) > 8
    for name, (*verdict, short) in printed.items():
        assert verdict == known[name]
        (claim,) = texts.named((name,))
        said, found = (
            {*re.findall(r"\d[\d.]*\d|\d", text)}
            for text in (short, f"{claim.document} {claim.quote} {claim.where} {claim.found}")
        )
        assert said <= found, "the row has no number that its claim lacks"
    counted = rows_of((KEPT / "README.md").read_text())
    for row in texts.by_document():
        assert counted[row.pop("document")] == list(map(str, row.values()))
        assert row["claims"] == sum(row[verdict] for verdict in texts.VERDICTS) <= row["sentences"]
    for path in (ROOT / "README.md", KEPT / "README.md"):
        assert texts.in_words(texts.claims()) in " ".join(path.read_text().split())
    records = len(runs.load(KEPT / "runs"))
    assert f"From {records} runs" in (KEPT / "README.md").read_text()


def test_the_losses():
    table = answers.of_losses(answers.trained_here(runs.load(KEPT / "runs/smoke"))).rows
    distances = table[table["arm"] != "ddp"].groupby("arm")["difference"].max().dropna()
    (words, said) = re.search(r"(\w+) arms stay\s+within ([\de-]+) of DDP's", TEXT).groups()
    assert (words, f"{distances.max():.0e}") == ("eleven", said.replace("e-", "e-0"))
    assert len(distances) == 11
    precise, coarse = texts.named(("S003-14",))[0].evidence
    kept = runs.load(KEPT / "runs/stages").counting
    digits = [-math.log10(max(abs(value - 1) for value in piece.values(kept))) for piece in (precise, coarse)]
    said = re.search(r"agree to (\w+) digits in fp32, and to (\w+) in bf16", TEXT).groups()
    assert [DIGITS[word] for word in said] == [min(6, int(digits[0])), int(digits[1])], "a loss is printed with six"


def test_the_times_and_the_traffic():
    rows = answers.of_time().rows.set_index(["setting", "arm", "source"])
    one = rows.loc["1 x 2048 tokens", "zero3", answers.PREDICTED]
    pair = [rows.loc["4 x 512 tokens", "zero3", source]["seconds"] for source in (answers.PREDICTED, answers.PUBLISHED)]
    text = " ".join(TEXT.split())
    assert f"to take {one['over DDP']:.1f} times DDP's seconds under stage 3" in text
    assert f"interval from {one['at least']:.1f} to {one['at most']:.0f}" in text
    assert f"is {pair[1]:.2f} s, where {pair[0]:.2f} s are predicted" in text
    sent = [piece.value for piece in texts.named(("P1-17",))[0].evidence]
    assert f"stage 2 sends {sent[2]:g} times" in text
    assert f"In the same precision stages 1 and 2 send {sent[1]:g} times" in text


def test_the_run_that_hung_is_diagnosed_as_printed(capsys):
    diagnosis.diagnose((KEPT / "hung/rank0_reduces",))
    printed = {line.strip() for line in capsys.readouterr().out.splitlines()}
    _, *block = TEXT[TEXT.index("study diagnose reports") :].partition("\n\n")[0].splitlines()
    assert len(block) == 4
    assert {line.strip() for line in block} <= printed


def test_the_guide_counts_what_is_kept():
    guide = " ".join((ROOT / "GUIDE.md").read_text().split())
    ends = Counter(json.loads(line)["outcome"] for line in (KEPT / "hangs.jsonl").read_text().splitlines())
    at_once = ends["crashes"] + ends["fails"]
    assert f"{ends.total()} trainings {ends['hangs']} hang, {at_once} end at once" in guide
    threads = json.loads((ROOT / "reports/oom_threads.json").read_text())
    named = Counter(thread["half"] for thread in threads if thread["hit"])
    assert f"keeps {len(threads)}. The rules name the cause of {named.total()}" in guide
    assert f"{named['looked_at']} of the ten" in guide
    assert f"{named['last']} of the 20" in guide


def test_the_sizes_and_the_advice():
    at_scale = answers.of_scale(runs.load(KEPT / "runs/at_scale"))
    held = {run.record.arm: memory.held_bytes(run) for run in at_scale}
    assert all(f"{size(held[arm])} under" in " ".join(TEXT.split()) for arm in ("ddp", "zero1", "zero2", "zero3"))
    assert all(line in TEXT for line in answers.advice())


def test_the_releases():
    """Each row of the table has the releases that get its property wrong under stage 2; the last row has the others."""
    kept = releases.answers()
    stage_2 = kept[kept["adapter"] == "zero2"]
    assert {*stage_2[stage_2["deepspeed"] == "0.18.9"]["answer"]} == {"fails"}
    assert "0.18.9 trains no stage 2 without a GPU" in TEXT
    asked = sorted({*stage_2["deepspeed"]} - {"0.18.9"}, key=Version)
    # --- wrong are those that give another result without a message
    wrong = kept[kept["kind"] == "differs"].groupby(["adapter", "property"])["deepspeed"].agg(set)
    norms, last_pass, inner = wrong["zero2"][["autocast-norms", "accumulation-4", "inner-forward"]]
    assert norms == wrong["zero2", "autocast"]
    printed = []
    for cell, words in re.findall(r"^\| (0\.\d+[^|]*?) \|([^|]*)", TEXT, re.MULTILINE):
        first, last = re.split(r" to |, ", cell)
        printed.append(asked[asked.index(first) : asked.index(last) + 1])
        said = ("the norm is wrong", "the last pass", "`engine.module`", "without these three")
        assert said[len(printed) - 1] in words
    assert [*map(set, printed[:3])] == [norms, last_pass, inner - last_pass]
    assert min(printed[3], key=Version) > max(inner, key=Version)
    assert asked[-1] == printed[3][-1]
    assert f"tested {len(asked) + 1} releases" in TEXT
    page = (ROOT / "study/report/templates/index.html").read_text()
    assert f"{len(norms | last_pass | inner | {'0.18.9'})} of {len(asked) + 1} releases of DeepSpeed" in page
    for stage in ("zero1", "zero3"):
        assert wrong[stage, "inner-forward"] - {"0.18.9"} == {*printed[2]}
