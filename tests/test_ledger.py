"""The ledger: what a claims file may say, and that every verdict comes from a check."""

import json
import math
import re
from dataclasses import replace
from fnmatch import fnmatch

import pytest
from conftest import ROOT
from shaped import changed, finished, put

from study.cli import results
from study.errors import Stop
from study.io.numbers import is_number
from study.ledger import committed, files, judging, ledger, model, predictions, theory_checks
from study.ledger import verdict as findings
from study.ledger.checks import THEORY
from study.ledger.judging import Verdict
from study.ledger.verdict import CONSISTENT, CONTRADICTS, INCONCLUSIVE, MEASURED, NOT_TESTED, OWN, TRIED, Finding
from study.ledger.words import lines
from study.records import evidence
from study.records.runs import Runs, load
from study.spec.settings import CACHE

HEAD = 'document = "000"\ntitle = "A title"\nfixed = 2026-11-20\nread = "in full"\n'
HEAD += 'tolerances = { "0.05" = "printed", "0.02" = "counted" }\n'
FIELDS = {
    "id": '"X-1"',
    "quote": '"four tokens in two steps"',
    "where": '"table 1"',
    "says": '"four tokens in two steps are two a step"',
    "kind": '"time"',
    "value": "2",
    "unit": '"tokens"',
    "tolerance": "0.05",
    "conditions": "{}",
    "check": '"arithmetic"',
    "with": "{ times = [4], over = [2] }",
}
ALSO = '\n[[claim.also]]\ncheck = "arithmetic"\n'
SETTLE = '{ machine = "a GPU", command = "study sweep smoke" }'
RAN = {"check": '"ran"', "with": "{ where = {} }"}
WORD = {"unit": '""', "tolerance": "0"}


STATES = {"check": '"theory"', "value": "16e9", "unit": '"bytes"'}
STATES |= {"with": '{ quantity = "states_bytes", parameters = 1e9, stage = 0, ranks = 8 }'}


def text(**fields) -> str:
    """A claim as a file writes it. A field that is None is left out."""
    lines = (FIELDS | fields).items()
    return "\n[[claim]]\n" + "".join(f"{name} = {value}\n" for name, value in lines if value is not None)


@pytest.fixture
def claims(tmp_path):
    """A function that writes claims into a file and reads them back."""

    def write(*several: str, head: str = HEAD):
        path = tmp_path / "claims.toml"
        path.write_text(head + "".join(several or (text(),)))
        return files.read_all(path)

    return write


def only(verdicts: list[Verdict]) -> Verdict:
    (verdict,) = verdicts
    return verdict


def judged(claims: list, *records: dict, folder=None) -> list[Verdict]:
    loaded = load([put(folder, *records)]) if records else Runs(())
    return ledger.judge_all(claims, evidence.gather(loaded))


# --- reading -------------------------------------------------------------------------------------------------------


def test_a_claim_is_read(claims):
    claim = only(claims(text(reading='"as printed"', relation='"at_least"', settle=SETTLE)))
    expected = {"id": "X-1", "document": "000", "kind": "time", "unit": "tokens", "reading": "as printed", "value": 2}
    expected |= {"relation": "at_least", "tolerance": 0.05, "at": "claims.toml, line 7"}
    assert {name: getattr(claim, name) for name in expected} == expected
    assert claim.cases == [model.Case({}, theory_checks.arithmetic, [{"times": [4], "over": [2]}])]


MALFORMED = (
    {"check": '"arithmetics"'},  # an unknown name
    {"valeu": "3"},  # a misspelt field
    {"says": None},  # a missing field
    {"tolerance": '"5 %"'},  # another type
    {"tolerance": "0.07"},  # no reason is given for it
    {"value": "nan"},
    {"value": "true"},  # with a unit and a tolerance
    {"value": "{ low = 3 }"},
    WORD | RAN | {"value": '"don"'},  # a text that the check never finds
    {"quote": f'"{"word " * 41}"'},  # too long
    {"unsaid": "{ tims = [[4]] }"},  # not an argument
    STATES | {"unit": '"parameters"'},  # another unit
    STATES | {"value": "16"},  # a forgotten unit
    {"with": '{ times = ["4"] }'},  # an argument of another type
    {"with": "{ times = [[4], [5]] }"},  # more calls than values
    {"check": '"ran"', "with": "{ where = {} }"},  # nothing that settles it
    {"with": f"{{ times = [4] }}{ALSO}with = {{ time = [9] }}"},  # in a further check
)
HEADS = (HEAD.replace("2026-11-20", '"soon"'), HEAD + 'colour = "red"\n', HEAD + "document\n")


def test_a_malformed_claim_is_one_clear_sentence(claims, golden, tmp_path):
    """The sentence names the file, the line and the claim, the wrong value, and possible values."""
    sentences = []
    for fields, head in [*((fields, HEAD) for fields in MALFORMED), *(({}, head) for head in HEADS)]:
        with pytest.raises(Stop) as caught:
            claims(text(**fields), head=head)
        sentence = caught.value.what.replace(f"{tmp_path}/", "")
        assert sentence.lstrip("'").startswith("claims.toml")
        assert "\n" not in sentence
        sentences.append(sentence)
    golden("claim_malformed.txt", "\n".join(sentences))


def test_an_id_stands_once_in_all_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(HEAD + text())
    with pytest.raises(Stop, match=r"b\.toml, line 7: the id X-1 is taken, at a\.toml, line 7"):
        files.read_all(tmp_path)
    (tmp_path / "b.toml").write_text(HEAD + text(id='"X-2"'))
    (tmp_path / "sources.toml").write_text("this is no claims file")
    assert [claim.id for claim in files.read_all(tmp_path)] == ["X-1", "X-2"]


# --- judging -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("relation", "tolerance", "supported", "refuted", "inconclusive"),
    [
        ("equal", 0.05, [100, 105, (96, 104)], [106, 94, (110, 130), math.inf], [(90, 104), (90, 110)]),
        ("equal", 0, [100 * (1 + 1e-12)], [100.1], [(90, 110)]),
        ("at_least", 0, [200, math.inf], [99], [(90, 110)]),
        ("at_least", 0.02, [99], [97], [(97, 99)]),
        ("at_most", 0, [100], [101], [(90, 110)]),
        ("above", 0, [101], [100], [(99, 103)]),
        ("below", 0, [99], [100], [(99, 103)]),
    ],
)
def test_a_number_is_held_against_what_the_claim_allows(relation, tolerance, supported, refuted, inconclusive):
    """The claim is 100. An interval must be allowed as a whole, or not at all."""
    expected = {"supported": supported, "refuted": refuted, "inconclusive": inconclusive}
    for verdict, values in expected.items():
        for result in values:
            interval = result if isinstance(result, tuple) else None
            finding = Finding(sum(interval) / 2 if interval else result, "", interval)
            assert findings.verdict(finding, 100, relation, tolerance) == verdict, result


def test_a_word_is_the_same_or_not():
    for same, value in (("fits", "fits"), (True, True), (math.inf, "never")):
        assert findings.verdict(Finding(same, ""), value, "equal", 0) == "supported"
    for other, value in (("does not fit", "fits"), (False, True), (3, "never"), ("auto", 5)):
        assert findings.verdict(Finding(other, ""), value, "equal", 0) == "refuted"
    assert findings.verdict(Finding(None, ""), 100, "equal", 0) == "inconclusive"
    assert findings.verdict(Finding(None, "", without="not tested here"), 100, "equal", 0) == "not tested here"


def test_all_of_several_values_must_hold(claims):
    for values, expected in (("[2, 3]", CONSISTENT), ("[2, 4]", CONTRADICTS), ("[1, 4]", CONTRADICTS)):
        verdict = only(judged(claims(text(value=values, **{"with": "{ times = [[4], [6]], over = [2] }"}))))
        assert (verdict.verdict, verdict.found) == (expected, [2, 3])


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"value": "true"} | WORD, "value is True, and the check finds 2"),
        ({"value": '"two"'} | WORD, r"value is 'two', and the check finds 2\.0"),
        ({"value": "[2, 3]"}, r"value has 2 elements, and the check finds 2\.0"),
        ({"with": "{ times = [1], over = [0] }"}, "an arithmetic check divides by 0"),
    ],
)
def test_a_claim_that_its_check_cannot_decide_is_an_error(claims, fields, what):
    """An example is a value of a kind that the check never finds: such a claim could only be refuted."""
    with pytest.raises(Stop, match=rf"claims\.toml, line 7, claim X-1, arithmetic: {what}"):
        judged(claims(text(**fields)))


def test_further_evidence_is_shown_and_never_decides(claims):
    several = claims(text() + ALSO + "with = { times = [9] }\n" + ALSO + "value = 9\nwith = { times = [9] }\n")
    verdict = only(judged(several))
    assert verdict.verdict == CONSISTENT
    assert [other.verdict for other in verdict.also] == [CONTRADICTS, CONSISTENT]


@pytest.mark.parametrize(("unit", "value"), [("GB", 16), ("GiB, each", 14.9), ("TB", 0.016)])
def test_a_size_is_in_the_units_of_the_claim(claims, unit, value):
    verdict = only(judged(claims(text(**STATES | {"unit": f'"{unit}"', "value": str(value)}))))
    assert verdict.verdict == "supported"
    assert verdict.found == pytest.approx(value, rel=0.01)


def judged_states(claims, **more) -> Verdict:
    """A model of a billion parameters has 16 GB of states on 8 ranks: 4 GB of fewer bytes each, or 2 GB in stage 3."""
    return only(judged(claims(text(**STATES | more))))


STAGE_0_OR_ALONE = ("stage 0, ranks 8", "ranks 1")


@pytest.mark.parametrize(
    ("unsaid", "verdict", "holds", "fails"),
    [
        ("{ ranks = [8, 64] }", "supported", (), ()),
        ("{ stage = [2, 3] }", "refuted", (), ()),
        ("{ stage = [0, 3] }", "inconclusive", ("stage 0",), ("stage 3",)),
        ("{ stage = [0, 3], part = ['all'] }", "inconclusive", ("stage 0",), ("stage 3",)),
        ("{ stage = [0, 3], ranks = [1, 8] }", "inconclusive", STAGE_0_OR_ALONE, ("stage 3, ranks 8",)),
    ],
)
def test_what_is_unsaid_must_not_decide(claims, unsaid, verdict, holds, fails):
    result = judged_states(claims, unsaid=unsaid)
    assert (result.verdict, result.holds_under, result.fails_under) == (verdict, holds, fails)
    assert (result.interval is None) == (result.found is None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"better": '"higher"'}, "understated"),
        ({"better": '"lower"'}, "refuted"),
        ({"value": "20e9", "better": '"lower"'}, "understated"),
        ({"relation": '"up_to"'}, "understated"),
        ({"relation": '"up_to"', "value": "16e9"}, "supported"),
        ({"relation": '"up_to"', "value": "20e9"}, "refuted"),
        ({"relation": '"up_to"', "value": "16e9", "unsaid": "{ stage = [3, 0] }"}, "supported"),
    ],
)
def test_a_claim_has_a_direction(claims, fields, expected):
    """A claim is understated if the truth is better. "Up to" is about the best case."""
    assert judged_states(claims, **{"value": "8e9"} | fields).verdict == expected


def test_a_value_may_be_what_another_check_finds(claims):
    """No threshold is copied by hand. If the other check finds nothing, this one finds nothing."""
    first = text(**STATES)
    other = STATES["with"].replace("stage = 0", "stage = 3")
    also = f"{ALSO}".replace("arithmetic", "theory") + f"with = {other}\n"
    fields = {"id": '"X-2"', "relation": '"below"', "tolerance": "0"}
    for value, expected in (('{ finding_of = "X-1" }', "supported"), ('{ finding_of = "X-1", also = 1 }', "refuted")):
        second = text(**STATES | fields | {"value": value, "with": STATES["with"].replace("= 0,", "= 2,")})
        assert judged(claims(first + also, second))[1].verdict == expected
    mistakes = (('{ finding_of = "X-9" }', "X-9, which is no claim"), ('{ finding_of = "X-1", also = 3 }', "3 of X-1"))
    for value, what in mistakes:
        with pytest.raises(Stop, match=what):
            claims(first, text(**STATES | fields | {"value": value}))


def test_a_papers_own_formula_shows_only_that_it_is_consistent(claims):
    """The ZeRO paper's formula against its own table says nothing of the world; of another document it predicts."""
    verdicts = {}
    for document in ("P1", "000"):
        (verdict,) = judged(claims(text(**STATES | {"kind": '"memory"'}), head=HEAD.replace('"000"', f'"{document}"')))
        verdicts[document] = (verdict.verdict, verdict.basis)
    assert verdicts == {"P1": (CONSISTENT, "own numbers"), "000": ("supported", "predicted")}
    for names in THEORY.published.values():
        assert set(names) <= theory_checks.QUANTITIES.keys()


def test_premises_are_apart_and_a_contradiction_counts_once(claims):
    several = [text(id=f'"X-{n}"', value="3", contradiction='"the same"') for n in range(3)]
    verdicts = judged(claims(text(id='"P"', premise="true", quote=None), *several))
    totals = ledger.totals([ledger.row(each) for each in verdicts])
    assert (len(verdicts), totals["claims"], totals[CONTRADICTS], totals["premises"]) == (4, 1, 1, 1)


def test_the_coverage_of_a_document_is_what_no_claim_judges(tmp_path):
    head = 'document = "D"\ntitle = "T"\nfixed = 2026-01-01\ntestable = 3\nunjudged = ["One sentence."]\nclaim = []\n'
    (tmp_path / "d.toml").write_text(head)
    (known,) = files.coverage(tmp_path)
    assert (known.testable, known.judged, known.contact, known.response) == (3, 2, "not asked yet", "none")


def test_a_file_may_have_its_own_sources(claims):
    source = '[[source]]\nid = "MINE"\ntitle = "A paper"\naddress = "https://example.org"\nread = "original"\n'
    given = '{ source = "MINE", where = "page 1", value = 2, sentence = "There are two." }'
    verdict = only(judged(claims(text(check='"cited"', **{"with": given}), head=HEAD + source)))
    assert (verdict.verdict, verdict.basis, verdict.sentence) == ("supported", "read", "There are two.")


SOURCES = ROOT.parent / "shared" / "sources"


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the texts of the documents are not beside the repository")
def test_every_quote_is_in_its_document():
    texts = {path.name: " ".join(path.read_text().split()) for path in SOURCES.glob("*.txt")}
    quoted = [claim for claim in files.read_all() if claim.text and claim.quote]
    assert len(quoted) >= 178
    for claim in quoted:
        (document,) = [text for name, text in texts.items() if fnmatch(name, claim.text)]
        for piece in claim.quote.split(" ... "):
            words = " ".join(piece.split())  # " | " stands between the cells of a table, which the texts glue together
            assert words in document or words.replace(" | ", "") in document, claim.id


# --- records -------------------------------------------------------------------------------------------------------

STEP_S = {"ddp": 0.1, "zero2": 0.12, "zero3": 0.2}
PER_ARM = [finished(f"{arm}-{n}", arm, seed=n, loss=2 + n / 1000, step=STEP_S[arm]) for arm in STEP_S for n in range(4)]
PEAK, LOSS, ARMS = "memory.per_rank.0.host_peak_bytes", "loss.eval.-1.eval_loss", '["ddp", "zero2", "zero3"]'
ZERO2, TO_DDP = '{ arm = "zero2" }', '{ arm = "ddp" }'
OOM = {"kind": "MemoryError", "message": "no more memory", "where": "rank 0", "what_to_do": "ask for less"}


def measured(check: str, given: str, value, kind: str, conditions: str = "{}") -> str:
    fields = {"check": f'"{check}"', "value": json.dumps(value), "kind": f'"{kind}"', "conditions": conditions}
    tolerance = "0.05" if is_number(value) else "0"
    unit = '"bytes"' if check == "observed" else '""'
    return text(**fields | {"unit": unit, "tolerance": tolerance, "settle": SETTLE, "with": given})


def slower(by: float):
    return lambda record: finished(record["run_id"], "zero2", seed=record["requested"]["seed"], step=0.12 * by)


def of_traffic(record: dict) -> dict:
    size = 4 * record["observed"]["parameters"]
    more = {"send": {"calls": 1, "bytes": size, "bytes_by_dtype": {"float32": size}}}  # gloo's has no formula
    collectives = [rank | more for rank in record["traffic"]["per_rank"]]
    return changed(record, traffic__per_rank=collectives)


def of_memory(record: dict) -> dict:
    return changed(record, memory__per_rank__0__host_peak_bytes=9 * 10**8)


def of_loss(record: dict) -> dict:
    loss = 2.5 + record["requested"]["seed"] / 1000
    return changed(record, loss__eval__0__eval_loss=loss)


# What a claim gives to each check, its value and kind, and a change of the runs of zero2 that refutes it.
CLAIMS = {
    "ratio": (f'{{ quantity = "step_s", of = {ZERO2}, to = {TO_DDP} }}', 1.2, "time", slower(2)),
    "order": (f'{{ quantity = "step_s", arms = {ARMS} }}', True, "time", slower(5)),
    "counted": (f"{{ where = {ZERO2}, over = {TO_DDP} }}", 1.5, "bytes", of_traffic),
    "same_loss": ('{ arms = ["ddp", "zero2"], margin = 0.01 }', True, "convergence", of_loss),
    "equal": (f'{{ field = "{LOSS}", of = {ZERO2}, to = {TO_DDP} }}', True, "convergence", of_loss),
    "observed": (f'{{ field = "{PEAK}", where = {ZERO2} }}', 6e8, "memory", of_memory),
    "ran": (f"{{ where = {ZERO2} }}", "done", "capacity", lambda record: changed(record, status="oom", error=OOM)),
}
TOML = {check: measured(check, *about[:3]) for check, about in CLAIMS.items()}
NUMBERED = [toml.replace('"X-1"', f'"X-{number}"') for number, toml in enumerate(TOML.values())]


WEAKER = """
[claim.until_tested]
check = "theory"
unit = "times as long"
value = {}
tolerance = 0
relation = "above"
[claim.until_tested.with]
quantity = "step_ratio"
arm = "zero3"
over = "ddp"
model = "gpt2"
gpus = 8
gpu = "A100-80GB"
link = "nvlink3"
sequence = 512
batch = 64
micro_batch = 8
"""
RATIO = '{ quantity = "step_s", of = { arm = "zero3" }, to = { arm = "ddp" } }'
RATIO_CLAIM = measured("ratio", RATIO, 1.2, "time")
ARITHMETIC = '\n[claim.until_tested]\ncheck = "arithmetic"\nwith = { times = [2] }\n'


@pytest.mark.parametrize(("value", "expected"), [(0.01, "supported"), (2, "inconclusive"), (1000, "refuted")])
def test_what_no_run_has_tested_a_prediction_decides_if_its_whole_interval_does(value, expected, claims):
    verdict = only(judged(claims(RATIO_CLAIM + WEAKER.format(value))))
    assert (verdict.verdict, verdict.basis, verdict.rests_on) == (expected, "predicted", "predicted")
    assert verdict.interval[0] < verdict.found < verdict.interval[1]
    assert "a GPU: study sweep smoke" in verdict.missing, "what would test it"
    assert "a GPU: study sweep smoke" in ledger.otherwise(verdict)
    assert ledger.as_json(verdict)["basis"] == "predicted"
    assert "(predicted)" in lines(verdict)[0] + lines(verdict)[1]


def test_runs_decide_before_a_prediction(claims, tmp_path):
    toml, value = TOML["ratio"] + WEAKER.format(1000), CLAIMS["ratio"][1]
    verdict = only(judged(claims(toml), *PER_ARM, folder=tmp_path))
    assert (verdict.verdict, verdict.basis) == ("supported", "measured")
    assert verdict.found == pytest.approx(value, rel=0.05)
    assert only(judged(claims(toml))).verdict == "refuted", "the prediction, without them"


def test_a_weaker_check_is_of_a_claim_about_runs(claims):
    for claim in (text() + WEAKER.format(1), RATIO_CLAIM + ARITHMETIC):
        with pytest.raises(Stop, match="until_tested is a check that predicts or cites, for a claim whose own check"):
            claims(claim)


@pytest.mark.parametrize("check", CLAIMS)
def test_another_number_in_a_record_is_another_verdict(check, claims, tmp_path):
    """Without the records there is no verdict."""
    several, change = claims(TOML[check]), CLAIMS[check][3]
    other = [change(record) if record["requested"]["arm"] == "zero2" else record for record in PER_ARM]
    before = only(judged(several, *PER_ARM, folder=tmp_path / "before"))
    after = only(judged(several, *other, folder=tmp_path / "after"))
    without = only(judged(several))
    assert before.basis == after.basis == without.basis == "measured"
    assert (before.verdict, after.verdict, without.verdict) == ("supported", "refuted", "not tested here")
    assert before.evidence
    assert set(before.evidence) <= {record["run_id"] for record in PER_ARM}
    assert "on a GPU: study sweep smoke" in without.missing == ledger.otherwise(without)


def test_the_same_records_give_the_same_numbers(claims, tmp_path):
    """The order of the records and earlier random numbers do not matter."""
    several = claims(*NUMBERED)
    forth = judged(several, *PER_ARM, folder=tmp_path / "a")
    back = judged(several[::-1], *PER_ARM[::-1], folder=tmp_path / "b")[::-1]
    for ours, theirs in zip(forth, back, strict=True):
        assert (ours.found, ours.interval, ours.working) == (theirs.found, theirs.interval, theirs.working)


# --- what is shown -------------------------------------------------------------------------------------------------


@pytest.fixture
def printed(tmp_path, capsys):
    """A function that returns what `study claims` prints for the claims file of the test."""

    def run(*words, records=(), to_json: bool = False, **filters) -> str:
        runs = tmp_path / "runs"
        if not runs.exists():
            put(runs, *records or [finished()])
        options = {name: filters.pop(name) for name in ("verbose",) if name in filters}
        chosen = results.Filters(**filters)
        file = tmp_path / "claims.toml"
        answer = results.claims(words, runs=(runs,), as_json=to_json, file=file, filters=chosen, **options)
        return json.dumps(answer) if to_json else capsys.readouterr().out

    return run


def test_a_new_claim_of_a_known_kind_needs_no_code(claims, printed, golden):
    arguments = '{ quantity = "states_bytes", stage = 3, ranks = 64, parameters = 1e9 }'
    fields = {"value": "0.25e9", "unit": '"bytes"', "kind": '"memory"', "check": '"theory"', "with": arguments}
    claims(text(id='"MINE-1"', **fields))
    out = printed(verbose=True)
    assert max(map(len, out.splitlines())) <= 100
    golden("command_claims.txt", re.sub(r", in\s+/\S+", ", in RUNS", out) + printed("MINE-1"))


def test_one_claim_with_all_there_is_to_it(claims, printed, golden):
    claims(measured("counted", *CLAIMS["counted"][:3], conditions='{ model = "gemma2-9b", ranks = 8 }'))
    golden("command_claims_one.txt", printed("x-1", records=PER_ARM))


def test_the_table_can_be_filtered(claims, printed):
    def ids(*words, **filters) -> list[str]:
        return [entry["id"] for entry in json.loads(printed(*words, to_json=True, **filters))]

    claims(TOML["ratio"])
    assert ids(basis="measured") == [], "no run is left: what is not tested here rests on nothing"
    claims(text(), text(id='"X-2"', value="3"), text(id='"X-3"', kind='"memory"'))
    for words, filters, left in (
        ((), {"verdict": CONTRADICTS}, ["X-2"]),
        ((), {"kind": "memory"}, ["X-3"]),
        ((), {"basis": "measured"}, []),
        (("x-2", "X-1"), {}, ["X-2", "X-1"]),
    ):
        assert ids(*words, **filters) == left
    for words, filters, what in (
        ((), {"verdict": "refusde"}, "--verdict must be one of supported, refuted"),
        (("Y",), {}, "there is no claim Y"),
    ):
        with pytest.raises(Stop, match=what):
            printed(*words, **filters)


def test_the_studys_claims_are_well_formed():
    """Every file is valid; claims that rest on predictions or sources are decided without a run."""
    claims = [claim for claim in files.read_all() if claim.basis not in (MEASURED, TRIED)]
    for verdict in [judging.judge(claim.model_copy(update={"also": ()}), evidence.Evidence()) for claim in claims]:
        assert verdict.verdict != "not tested here", verdict.claim.id
        assert verdict.working, verdict.claim.id


# --- the whole ledger ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known():
    return {claim.id: claim for claim in files.read_all()}


def test_each_claim_has_a_committed_verdict(known):
    assert committed.verdicts().keys() == known.keys(), "study claims --keep"


def test_each_open_claim_about_the_world_says_what_would_decide_it(known):
    opened = {name for name, entry in committed.verdicts().items() if entry.verdict == INCONCLUSIVE}
    about_the_world = {name for name in opened if known[name].basis != OWN and not known[name].premise}
    assert len(about_the_world) > 50
    assert {name for name in about_the_world if not known[name].would_decide} == set()


def test_a_verdict_that_is_not_the_committed_one_is_named(claims, monkeypatch):
    verdict = only(judged(claims()))
    monkeypatch.setattr(committed, "verdicts", lambda: {"X-1": committed.Committed(verdict=CONTRADICTS, found="9")})
    words = "1 verdicts differ from the committed ones: X-1 consistent (was contradicts itself)"
    assert committed.changes([verdict]) == [words]
    assert committed.differences([verdict])[0] == words
    left_open = replace(verdict, verdict=INCONCLUSIVE)
    assert committed.differences([left_open])[1].startswith("These runs leave 1 verdict open")


def test_what_a_formula_finds_is_kept_for_the_same_code(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path))
    asked = []

    def formula(*, ranks: int) -> Finding:
        asked.append(ranks)
        return Finding(math.inf, "more ranks do not help", (1.0, 2.0), evidence=("P1",))

    for code, times in (("a", 1), ("a", 1), ("b", 2), ("a", 3)):
        predictions._kept.cache_clear()
        monkeypatch.setattr(predictions, "_code", lambda code=code: code)
        found = predictions.find(formula, {"ranks": 8})
        assert (found.value, found.interval, found.evidence) == (math.inf, (1.0, 2.0), ("P1",))
        predictions.keep()
        assert len(asked) == times, code
    predictions._kept.cache_clear()


def test_the_claims_file_of_the_guide_is_valid(tmp_path):
    """Its three claims have the verdicts that the guide says."""
    guide = (ROOT / "CONTRIBUTING.md").read_text().split("## How to write a claims file")[1]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(re.findall(r"^    (.*)$", guide, re.MULTILINE)))
    first, second, third = ledger.judge_all(files.read_all(path), evidence.Evidence())
    assert (first.verdict, first.holds_under) == (INCONCLUSIVE, ("recipe mixed-adam",))
    assert (second.verdict, third.verdict) == (CONSISTENT, NOT_TESTED)
