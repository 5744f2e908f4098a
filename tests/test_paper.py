"""The paper: no number of it is typed, and each is that of the records."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from pypdf import PdfReader

from study.errors import Stop
from study.publishing import paper
from study.records import runs as records
from study.records.runs import Runs
from study.report.topics import claims

NAMED = (
    r"[A-Z]+[0-9]*-[0-9]+",  # a claim
    r"S00[0-9]-[0-9]+",
    r"00[0-3]|P[1-5]|\b[1-5]pt",
    r"[Ss]tages? [0-3]( to [0-3]| and [0-3])?",
    r"GPT-2|FSDP2|ZeRO-[0-3]|Llama-3-8B|H100|Apache-2\.0|issue [0-9]+",
    r"\b(fp32|fp16|bf16)\b",
    r"@[a-z-]+",
    r"rank 0",
)
MARKUP = (r'#n\("[^"]*"\)', r"`[^`]*`", r"[0-9.]+(fr|cm|pt|%)")


@pytest.fixture(scope="module")
def judged():
    return claims.judge(records.load([paper.RUNS]))


@pytest.fixture(scope="module")
def built(judged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    for source in (paper.FOLDER / "paper.typ", paper.FOLDER / "references.yml"):
        shutil.copy(source, folder)
    paper.write(judged, folder)
    return folder


def words_of(folder) -> str:
    pages = PdfReader(paper.compiled(folder)).pages
    assert 8 <= len(pages) <= 12
    return " ".join("\n".join(page.extract_text() for page in pages).split())


def test_no_number_of_the_text_is_typed():
    text = (paper.FOLDER / "paper.typ").read_text().partition("*Abstract.*")[2]
    for pattern in (*MARKUP, *NAMED):
        text = re.sub(pattern, "", text)
    lines = [line for line in text.splitlines() if re.search("[0-9]", line)]
    assert lines == []


@pytest.mark.slow
def test_each_number_of_the_text_is_in_the_pdf(built):
    text = words_of(built)
    numbers = json.loads((built / "build" / "data.json").read_text())["numbers"]
    asked = set(re.findall(r'#n\("([^"]+)"\)', (built / "paper.typ").read_text()))
    assert len(asked) > 60
    assert [name for name in sorted(asked) if numbers[name] not in text] == []


@pytest.mark.slow
def test_a_changed_record_changes_the_text(judged, built):
    before = words_of(built)
    runs = judged.runs
    (one,) = [run for run in runs.select(task="wikitext", model="gpt-tiny", ranks=2) if run is _furthest(runs)]
    loss = one.record.loss.model_copy(update={"train": [each + 0.5 for each in one.losses]})
    changed = replace(one, record=one.record.model_copy(update={"loss": loss}))
    others = Runs(tuple(changed if run is one else run for run in runs))
    data = built / "build" / "data.json"
    content = json.loads(data.read_text())
    kept = data.read_text()
    content["numbers"] |= {f"losses.{name}": str(value) for name, value in paper._losses(others).items()}
    data.write_text(json.dumps(content))
    after = words_of(built)
    data.write_text(kept)
    kept_words = f"stay within {json.loads(kept)['numbers']['losses.worst']} of"
    assert kept_words in before
    assert kept_words not in after
    assert "stay within 0.5 nats of" in after


def _furthest(runs):
    rows = paper.answers.trained(runs)
    name = rows[rows["arm"] == paper.losses.furthest(rows)["arm"]]["run"].iloc[0]
    return next(run for run in runs if run.name == name)


@pytest.mark.slow
def test_a_number_that_no_record_gives_stops_the_build(built):
    text = (built / "paper.typ").read_text()
    (built / "paper.typ").write_text(text + '\n#n("losses.invented")\n')
    with pytest.raises(Stop, match=r"no record gives the number losses\.invented"):
        paper.compiled(built)
    (built / "paper.typ").write_text(text)
