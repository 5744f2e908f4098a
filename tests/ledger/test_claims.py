"""The numbers in the sentences of claims and faults are those that their evidence gives."""

import csv
import itertools
import json
import re
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path

import keep_answers
import pytest

from study.cli import claims as command
from study.cli import commands
from study.cli.explain import explain
from study.core import glossary
from study.core.errors import Stop
from study.core.files import load
from study.core.gpus import GPUS
from study.core.shapes import SHAPES
from study.core.text import is_number, number_of
from study.ledger import comparison, search, texts
from study.ledger.evidence import REPORTS, SENT, UNITS, OfRuns, calculated, kept_answers, settings_and_models
from study.predict.advise import fits_on
from study.predict.front import MISS, Prediction, reserve_bytes
from study.predict.outside import published, scores
from study.records import runs
from study.report.rows import of_card
from study.sweeps import protocol
from tests.cases import for_each
from tests.conftest import ROOT

SOURCES = ROOT.parent / "shared/sources"  # the four articles, where somebody has them
ANSWERS = [*csv.DictReader((REPORTS / "conform/answers.csv").read_text().splitlines())]

LEVELS = texts.CERTAINTIES
# The most certain that a claim can be with this as its best evidence; all other kinds allow "high".
MOST_CERTAIN = {"virtual": "moderate", "source": "low", "formula": "low", "prediction": "low"}
CLAIMS = texts.claims()
EVIDENCE = {
    f"{claim.id}-{number}": (claim, each)
    for claim in CLAIMS
    for number, each in enumerate(claim.evidence, 1)
    if each.kind != "source"
}


@pytest.fixture(scope="module", autouse=True)
def texts_are_made_once():
    """Thousands of searches look at the same claims, which are frozen: most of their time was writing these texts."""
    made = {}
    text_of = search.text_of

    def once(each, parts=search.TEXT) -> str:
        asked = id(each), parts
        if isinstance(each, texts.Aside):  # which each search makes anew
            return text_of(each, parts)
        if asked not in made:
            made[asked] = each, text_of(each, parts)  # who is kept here keeps its id
        return made[asked][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "text_of", once)
        yield


@pytest.fixture(scope="module")
def records():
    return runs.load(sorted(REPORTS.glob("*/runs"))).counting


@for_each(("claim", "piece"), EVIDENCE.values(), ids=EVIDENCE)
def test_evidence_gives_the_number_of_the_sentence(claim, piece, records):
    if not isinstance(piece, OfRuns):
        assert piece.agrees(value := piece.computed(records)), f"written {piece.value}, computed {value}"
        return
    # Over all machines: runs on a GPU are evidence where a selection says so, and where nothing else is there.
    # Each run agrees, and not a median, which hides most of them. There are as many as are written.
    valued = piece.values_with_runs(records)
    values = [value for value, _ in valued]
    assert len(values) == piece.n
    # Pairs are no sample size: byte counts of the same setting repeat.
    assert settings_and_models(valued) == (piece.settings, piece.models)
    assert all(map(piece.agrees, values)), f"written {piece.value}, computed {values}"
    if is_number(piece.value):
        ends = piece.value, piece.value if piece.most is None else piece.most
        assert (min(values), max(values)) == pytest.approx(ends, rel=piece.tolerance, abs=1e-12)


@for_each("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_has_the_numbers_of_its_evidence_and_what_its_verdict_needs(claim):
    for piece in claim.evidence:
        for value in filter(is_number, (piece.value, getattr(piece, "most", None))):
            text = f"{claim.found} {getattr(piece, 'quote', '')}".replace(",", "")
            forms = "|".join({re.escape(f"{value:g}"), re.escape(str(value))})
            # A verdict needs few numbers in its reasons: what else the table has is told by its note.
            assert re.search(rf"(?<![\d.])({forms})(?!\d)", text) or piece.note, piece
    is_open = claim.verdict == "cannot be decided here"
    assert 0 < len(claim.quote.split()) <= 60
    assert bool(claim.condition) == (claim.verdict == "holds only if")
    assert bool(claim.would_decide) == is_open
    assert is_open or (claim.certainty and claim.because and claim.evidence)
    assert bool(claim.instead) == (claim.verdict == "does not hold")
    assert not claim.is_reading or (claim.condition and claim.certainty != "high"), "the reading is ours"
    assert not re.match(r"[^,;]+, or |.*no more$", claim.condition) or not claim.is_reading, "another setting is enough"
    told = " ".join((claim.answer, claim.condition, claim.found, claim.because, claim.changes))
    assert not re.search(r"[Nn]ot judged|is judged in [PS]\d", told), "`not_judged` has it, so that lists say it too"
    if claim.certainty:  # no higher than the evidence allows
        allowed = [LEVELS.index(MOST_CERTAIN.get(piece.kind, "high")) for piece in claim.evidence]
        assert LEVELS.index(claim.certainty) >= min(allowed)


@for_each("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_sentence_of_a_claim_can_be_read_once(claim):
    said = " ".join(filter(None, (claim.found, claim.because, claim.changes, claim.would_decide, claim.instead)))
    assert [each for each in re.split(r"(?<=[.!?])\s+", said) if len(each.split()) > 40] == []
    assert not re.search(r"\brules? \d", said), "the rules are in CONTRIBUTING, which no card shows"
    assert len(claim.condition.split()) <= 48
    assert not claim.numbers.endswith("."), "the card ends it"


def alike(piece) -> dict:
    return piece.model_dump(include={"kind", "quantity", "per", "over", "collectives", "node_ranks"})


@for_each("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_ratio_of_chosen_models_stands_beside_those_of_all(claim, records):
    """P1-03 showed the formula's 5.5 of one model, and not the seven other kept runs."""
    ratios = [piece for piece in claim.evidence if isinstance(piece, OfRuns) and (piece.per or piece.over)]
    for piece in (each for each in ratios if "model" in each.where):
        others = {name: value for name, value in piece.where.items() if name != "model"}
        wide = piece.model_copy(update={"where": others}).values_with_runs(records)
        shown = {of for each in ratios if alike(each) == alike(piece) for _, of in each.values_with_runs(records)}
        assert {of for _, of in wide} <= shown, piece.what


@for_each("claim", CLAIMS, ids=lambda claim: claim.id)
def test_states_at_a_peak_before_any_gradient_do_not_count_and_are_told(claim, records):
    """P1-42 listed 5.0 bytes on four ranks, where stage 2 holds the same."""
    said = " ".join(each for each in re.split(r"(?<=[.!?])\s+", claim.found) if "before any gradient" in each)
    for piece in claim.evidence:
        if isinstance(piece, OfRuns) and piece.quantity == "states_bytes" and piece.per:
            all_of_them = piece.model_copy(update={"quantity": "component.weights"}).values_with_runs(records)
            not_counted = len(all_of_them) - piece.n
            assert not not_counted or re.search(rf"(?<![\d.]){not_counted} (?:more runs )?of ", said), piece.what


def test_two_predictions_beside_each_other_count_embeddings_alike():
    """P1-12 had them within its parameters and P2-01 not: its layers were made narrower, without a word."""
    pieces = [
        piece for claim in search.named(("P1-12", "P2-01")) for piece in claim.evidence if piece.kind == "prediction"
    ]
    for piece in pieces:
        of_layers, embedding = 12 * piece.layers * piece.hidden**2, SHAPES["gpt2"]["vocab_size"] * piece.hidden
        assert piece.parameters == pytest.approx(of_layers + embedding, rel=2e-3)


def test_bytes_of_two_algorithms_that_are_surely_sent_were_counted_on_more_than_two_ranks(records):
    """On two ranks a reduce to one of them, and half of an all-reduce, are alike. P1-17 was sure on one such pair."""
    for claim in CLAIMS:
        ranks: dict[str, int] = {}
        for piece in claim.evidence:
            if claim.certainty == "high" and isinstance(piece, OfRuns) and "arm" in (piece.over or {}):
                for _, (run, *_) in piece.values_with_runs(records) if piece.quantity in SENT else ():
                    arm = run.record.arm
                    ranks[arm] = max(ranks.get(arm, 0), run.record.observed.ranks)
        assert all(most > 2 for most in ranks.values()), (claim.id, ranks)


@for_each("claim", CLAIMS, ids=lambda claim: claim.id)
def test_losses_are_compared_over_the_validation_sequences(claim):
    """S002-10 compared the last batches of two seeds: mostly which sequences came last."""
    compared = [piece for piece in claim.evidence if isinstance(piece, OfRuns) and piece.over]
    validated = [(piece.where, piece.over) for piece in compared if piece.quantity == "eval_loss"]
    by_one_batch = [(piece.where, piece.over) for piece in compared if piece.quantity == "train_loss"]
    assert [pair for pair in by_one_batch if pair not in validated or "seed" in pair[1]] == []


@for_each("claim", CLAIMS, ids=lambda claim: claim.id)
def test_eager_attention_is_said_where_memory_is_predicted_with_it(claim):
    """S003-21 counted Gemma2-9B so without a word, which people train with flash attention."""
    eager = [
        (piece.what, piece.attention_kernel == "eager")
        for piece in claim.evidence
        if piece.kind == "prediction" and piece.quantity != "volume"
        if piece.training.model.attention_taken(piece.attention_kernel) == "eager"
    ]
    assert all(is_said for _, is_said in eager), eager
    assert not eager or "eager attention" in claim.found


IN_RANGE = {  # a number of the text, and what gives it by the number of GPUs or hosts
    ("S001-03", "on {0} to {1} GPUs", 8): "optimizer(1, 0, {0}) / optimizer(1, 1, {0})",
    ("P5-03", "from {0} hosts on", 1): "({0} * 8 - 1) / ({0} * 8 - 8)",
}


def test_a_range_of_gpus_is_that_in_which_the_number_is_right():
    """S001-03 had the GPUs whose number is equal to the text's, and by our own 15 % there are more."""
    conditions = {claim.id: claim.condition for claim in CLAIMS}
    for (id, said, number), expression in IN_RANGE.items():
        values = {each: calculated(expression.format(each)) for each in range(2, 1025)}
        right = [each for each, value in values.items() if abs(value - number) <= texts.NEAR * number]
        assert right == [*range(right[0], right[-1] + 1)]
        assert said.format(right[0], right[-1]) in conditions[id], id
    of_a_range = re.compile(r"(on|from|at \w+) \d+ (to \d+ |or \d+ )?(GPU|host)")
    named = {id for id, text in conditions.items() if of_a_range.search(text)}
    # A bound has no share, and what fits is another rule's.
    assert named == {id for id, _, _ in IN_RANGE} | {"S001-26", "S002-02"}


AMOUNT = r"\d+(?:,\d{3})*(?:\.\d+)?"
OF_A_UNIT = re.compile(
    rf"(?<![\w.,^])((?:(?:{AMOUNT}, )*{AMOUNT} (?:and|or|to) )?{AMOUNT}) (GB|TB|%|times|bytes)(?!\w)"
)
# A card's name has its size, and a parameter takes 16 bytes, or 20 with a copy of its gradient.
NAMES = {("32", "GB"), ("40", "GB"), ("80", "GB"), ("16", "bytes"), ("20", "bytes")}
# The host of a DGX-2, and what a margin is compared with.
NAMES |= {("1.5", "TB"), (f"{100 * MISS:.0f}", "%")}
# What a card has after our reserve.
RESERVED = {(f"{(gpu.memory_bytes - reserve_bytes(gpu)) / 1e9:.1f}", "GB") for gpu in GPUS.values()}
# Claims with such a number and no evidence of it: this list only gets shorter.
# Another test computes that of S001-19 and S002-19. P5-03 has a threshold.
WITHOUT = [
    "P1-01",
    "P1-25",
    "P2-01",
    "P2-08",
    "P5-03",
    "S000-13",
    "S000-30",
    "S001-19",
    "S001-34",
    "S002-10",
    "S002-12",
    "S002-14",
    "S002-19",
]


def without_evidence(claim) -> list[str]:
    """The numbers with a unit that neither evidence gives nor a text that it quotes, wherever the card says them."""
    given = {
        float(value)
        for piece in claim.evidence
        for value in (piece.value, getattr(piece, "most", None))
        if is_number(value)
    }
    texts_of = (claim.quote, claim.theirs, claim.where, *(getattr(piece, "quote", "") for piece in claim.evidence))
    given |= {float(number.replace(",", "")) for text in texts_of for number in re.findall(AMOUNT, text)}
    said = " ".join((claim.answer, claim.condition, *claim.parts.values(), claim.changes))
    found = [(number, unit) for several, unit in OF_A_UNIT.findall(said) for number in re.findall(AMOUNT, several)]
    return [
        " ".join(each)
        for each in found
        if each not in NAMES | RESERVED and float(each[0].replace(",", "")) not in given
    ]


def test_claims_with_a_number_that_no_evidence_gives_only_get_fewer():
    """A reviewer changed three such numbers, and nothing failed."""
    assert sorted(claim.id for claim in CLAIMS if without_evidence(claim)) == WITHOUT


def test_a_number_without_evidence_is_seen():
    (claim,) = search.named(("P1-11",))
    assert without_evidence(claim) == []
    changed = claim.model_copy(update={"found": claim.found.replace("31.5 GB", "49.3 GB")})
    assert without_evidence(changed) == ["49.3 GB"]


def decides_if_it_fits(piece) -> bool:
    return piece.kind == "prediction" and piece.quantity == "peak_bytes" and bool(piece.gpu)


NAMES_A_GPU = [claim for claim in CLAIMS if any(map(decides_if_it_fits, claim.evidence))]


@pytest.mark.parametrize("claim", NAMES_A_GPU, ids=lambda claim: claim.id)
def test_what_fits_only_just_decides_nothing(claim):
    """The rule of CONTRIBUTING. A predicted peak that decides names its GPU."""
    answers = set()
    for piece in filter(decides_if_it_fits, claim.evidence):
        gpu, peak_bytes = GPUS[piece.gpu], piece.raw()
        fits = fits_on(gpu, peak_bytes)
        if fits == "no":
            assert peak_bytes > gpu.memory_bytes, "our reserve alone decides nothing"
        else:  # as `study estimate` says it
            driver_bytes = Prediction(piece.training).kinds(gpu).driver
            fits = fits_on(gpu, peak_bytes, driver_bytes)
            shown = f"nvidia-smi would show {of_card(driver_bytes, gpu)}"
            assert fits == "yes" or shown in claim.found, shown
        answers.add(fits)
    assert (claim.verdict == "cannot be decided here") == ("only just" in answers)


@pytest.mark.parametrize("claim", NAMES_A_GPU, ids=lambda claim: claim.id)
def test_what_fits_only_just_is_never_said_to_fit(claim):
    """P3-18 said that 24 billion would fit, P1-11 one kept sequence, and P1-10 took 512 tokens for an answer."""
    (gpu,) = {GPUS[piece.gpu] for piece in claim.evidence if decides_if_it_fits(piece)}
    peaks = [piece for piece in claim.evidence if getattr(piece, "quantity", "") == "peak_bytes"]
    fits = [fits_on(gpu, piece.raw(), Prediction(piece.training).kinds(gpu).driver) for piece in peaks]
    assert "only just" in claim.found or "only just" not in fits


def what_fits(piece, gpu: str) -> bool:
    return piece.raw() <= GPUS[gpu].memory_bytes - reserve_bytes(GPUS[gpu])


@pytest.mark.parametrize(
    "claim", [each for each in NAMES_A_GPU if "data parallelism" in each.question], ids=lambda c: c.id
)
def test_a_number_of_sequences_is_the_first_that_does_not_fit(claim):
    """Some were the first that exceed the whole card, or one more than the first: one sequence was called two."""
    (gpu,) = {piece.gpu for piece in claim.evidence if decides_if_it_fits(piece)}
    # The one that names the GPU exceeds it by more than the prediction may miss.
    peaks = [piece for piece in claim.evidence if getattr(piece, "quantity", "") == "peak_bytes" and not piece.gpu]
    too_large = [piece for piece in peaks if not what_fits(piece, gpu)]
    several = [piece for piece in too_large if piece.micro_batch > 1]
    fewer = [piece.model_copy(update={"micro_batch": piece.micro_batch - 1}) for piece in several]
    assert [piece.what for piece in fewer if not what_fits(piece, gpu)] == []


def test_the_rule_for_margins_decides_claims_of_one_kind():
    assert {"P2-01", "P1-12", "P1-10", "S001-25"} <= {claim.id for claim in NAMES_A_GPU}


def test_kept_answers_are_what_faults_say_and_of_the_scripts_as_they_are():
    for fault in texts.faults():
        assert kept_answers()[fault.script] == fault.value, fault.id
    kept = json.loads((REPORTS / "cpu-2core/trials.json").read_text())
    scripts = {row["trial"]["name"]: row["code"] for row in kept if row["trial"]["what"] == "reproduction"}
    assert scripts == {name: keep_answers.code_of(name) for name in scripts}


def test_releases_of_faults_are_those_that_were_tried():
    kept = {
        row["trial"].get("name"): row["versions"] for row in json.loads((REPORTS / "cpu-2core/trials.json").read_text())
    }
    scripts_ran = [row for row in ANSWERS if row["adapter"].endswith("-reproduction")]
    tried = {name: {row[name] for row in scripts_ran} for name in ("deepspeed", "accelerate")}
    for fault in texts.faults():
        here = kept[fault.script]
        said = {*re.findall(r"[\d.]+\d", fault.releases)}
        assert said <= tried["deepspeed"] | tried["accelerate"] | {*here.values()}, fault.id
        assert here[fault.package] in said, "the release that gave the kept answer"
        for number in re.findall(r"in (\d+) releases", f"{fault.found} {fault.because}"):
            library = "deepspeed" if "DeepSpeed" in fault.because else fault.package
            assert int(number) == len(tried[library] - {"0.19.7"}), "of which ZenFlow alone was asked"


def test_each_release_that_was_asked_refuses_to_increase_pin_memory():
    (claim,) = search.named(("S001-56",))
    asked = [
        row
        for row in ANSWERS
        if row["adapter"] == "deepspeed-configuration" and re.search(r'"pin_memory": (2|"4GB")', row["property"])
    ]
    releases = {row["deepspeed"] for row in asked}
    assert {row["answer"] for row in asked} == {"rejected"}
    assert f"each of {len(releases)} releases, 0.15.0 to 0.19.8," in claim.because
    assert {"0.15.0", "0.19.8"} <= releases


@pytest.mark.skipif(not SOURCES.is_dir(), reason="needs the four articles in ../shared/sources")
@pytest.mark.parametrize("claim", [each for each in CLAIMS if each.id.startswith("S")], ids=lambda claim: claim.id)
def test_a_quote_stands_in_its_document(claim):
    # Cells of tables have lost the space between them there, and lists have it where the quote has a bar.
    (path,) = SOURCES.glob(f"{claim.document.removeprefix('S')}_*.txt")
    text, quote = (re.sub(r"[\s|]", "", text) for text in (path.read_text(), claim.quote))
    assert all(piece in text for piece in quote.split("..."))


def test_how_far_published_steps_with_offloading_are_off_is_computed():
    """DeepSpeed's: two claims rest their doubt on them."""
    offloading = {row.key for row in published.rows() if "'cpu'" in str(row.deepspeed)}
    known = [each for each in scores.numbers() if each.key in offloading and each.quantity == "time" and each.ours]
    times = [each.measured / each.ours for each in known]
    said = f"took {min(times):.2f} to {max(times):.1f} times the predicted seconds"
    assert {claim.id for claim in texts.claims() if said in claim.found + claim.because} == {"S001-19", "S002-19"}


def test_the_document_and_the_claim_that_contributing_shows_can_be_read(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to write a claim")[2]
    blocks = re.findall(r"(?m)^(?: {4}\w+ = .+\n|\n? {4}\[.+\n|    \].*\n|      \{.+\n)+", text)
    (tmp_path / "new.toml").write_text(textwrap.dedent("".join(blocks)))
    read = load(tmp_path / "new.toml", texts.Text, what="a document", remedy="correct it", most_bytes=10_000)
    assert (read.judged, len(read.claim)) == (1, 1)
    assert f"study claims {read.claim[0].id} --runs reports" in text


def test_the_ledger_is_whole():
    for text in texts.texts():
        assert 3 <= sum(claim.central for claim in text.claim) <= 5, text.document
        assert 0 < text.judged <= text.sentences
    ids = [each.id for each in (*CLAIMS, *texts.faults())]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("expression", "value"), [("400 * 38e12 / 1e15", 15.2), ("-(2 + 3) ** 2", -25), ("states(1, 0, 1)", 16)]
)
def test_an_expression_is_computed(expression, value):
    assert calculated(expression) == pytest.approx(value)


@pytest.mark.parametrize("expression", ["__import__('os')", "1 / 0", "2 +", "[1]", "states.x"])
def test_nothing_else_is_computed(expression):
    with pytest.raises(ValueError, match="cannot be computed"):
        calculated(expression)


def test_claims_are_found_by_id_document_and_words():
    first = CLAIMS[0]
    assert search.named((first.id.lower(),)) == [first]
    assert search.named((first.document,)) == [each for each in CLAIMS if each.document == first.document]
    with pytest.raises(Stop):
        search.named(("no such words",))


@pytest.mark.parametrize("typed", ["P1-17,P1-19", "P1-17, P1-19", "p1-17 ,P1-19", "P1,P4"])
def test_names_have_commas_between_or_spaces(typed, capsys):
    command.claims(tuple(typed.split()))
    printed = capsys.readouterr().out
    spaced = tuple(typed.replace(",", " ").split())
    assert ids_of(*typed.split()) == ids_of(typed) == ids_of(*spaced)
    command.claims(spaced)
    assert capsys.readouterr().out == printed


def ids_of(*words: str) -> set[str]:
    return {each.id for each in search.named(words) if not isinstance(each, texts.Aside)}


@pytest.mark.parametrize("word", [*texts.VERDICTS, *LEVELS])
def test_a_verdict_or_a_certainty_names_its_claims_alone(word):
    """`study claims high` found what has this word anywhere, `certainty high` nothing."""
    having = {claim.id for claim in CLAIMS if word in (claim.verdict, claim.certainty)}
    assert ids_of(word) == ids_of(*word.split()) == having
    if word in LEVELS:
        assert ids_of("certainty", word) == ids_of(word, "certainty") == ids_of(f"certainty: {word}") == having


# How the table of `study claims --all` and the answers' page call a verdict.
COUNTED = {"open": "cannot be decided here", "undecided": "cannot be decided here"} | {
    "refuted": "does not hold",
    "conditional": "holds only if",
}


@for_each("word", [*search.KINDS, *COUNTED])
def test_each_word_by_which_claims_are_counted_filters_and_narrows(word):
    """`study claims open` searched the word, and gave 3 of 34."""
    having = {claim.id for claim in CLAIMS if COUNTED.get(word, word) in claim.kinds}
    assert ids_of(*word.split()) == ids_of(word) == having
    for source in ("papers", "articles"):
        if both := having & ids_of(source):
            assert ids_of(source, *word.split()) == ids_of(*word.split(), source) == both
        else:
            with pytest.raises(Stop, match=f"no claim is all of these: {source}"):
                search.named((source, word))


# What people type for some claims: which these are, by each kind of filter.
FILTERS = {
    "a document": ("P1", lambda claim: claim.document == "P1"),
    "an address": ("arxiv.org/abs/2304.11277v1", lambda claim: claim.document == "P5"),
    "an author": ("Rajbhandari", lambda claim: "Rajbhandari" in search.text_of(claim)),
    "a year": ("2020", lambda claim: "2020" in search.text_of(claim)),
    "a verdict": ("does not hold", lambda claim: claim.verdict == "does not hold"),
    "its usual word": ("conditional", lambda claim: claim.verdict == "holds only if"),
    "one word": ("holds", lambda claim: claim.verdict == "holds"),
    "a certainty": ("high", lambda claim: claim.certainty == "high"),
    "as cards have it": ("certainty: low", lambda claim: claim.certainty == "low"),
    "a topic": ("memory", lambda claim: claim.topic == "memory"),
    "a usual topic": ("speed", lambda claim: claim.topic == "time"),
    "a source": ("papers", lambda claim: claim.document.startswith("P")),
    "posts": ("posts", lambda claim: claim.in_post),
}
# Each order of two; of three, one takes a fifth of the time, and what an order does shows in two.
SEVERAL = [*itertools.permutations(FILTERS, 2), *itertools.combinations(FILTERS, 3)]


def test_each_pair_and_triple_of_filters_narrows_by_all_of_them():
    """`1910.02054 memory high` gave all of P1, and `Rajbhandari does not hold` claims that hold."""
    for names in SEVERAL:
        words = [FILTERS[name][0] for name in names]
        documents = [FILTERS[name][1] for name in names if name in ("a document", "an address")]  # of any of these
        rules = [FILTERS[name][1] for name in names if FILTERS[name][1] not in documents]
        of_any = [claim for claim in CLAIMS if not documents or any(rule(claim) for rule in documents)]
        having = {claim.id for claim in of_any if all(rule(claim) for rule in rules)}
        try:
            found = ids_of(*" ".join(words).split())
        except Stop:
            found = set()
        assert found == having, words


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("1910.02054", "memory", "high"), {"P1-01", "P1-28"}),
        (("https://arxiv.org/abs/2304.11277", "traffic", "moderate"), {"P5-01", "P5-03"}),
        (("checkpointing", "papers"), {"P1-12", "P1-28", "P2-01"}),
        (("activation checkpointing", "papers"), {"P1-12", "P1-28", "P2-01"}),
        (("CPU Adam",), {"P2-08", "L-38"}),
        (("CPU", "Adam"), {"P2-08", "L-38"}),
        (("CPU-Adam",), {"P2-08"}),
        (("superlinear",), {"P1-40", "P3-19"}),
        (("super-linear",), {"P1-40", "P3-19"}),
        (("super", "linear"), {"P1-40", "P3-19"}),
    ],
)
def test_words_find_what_claims_write_in_another_spelling(words, found):
    assert found <= ids_of(*words)
    assert "papers" not in words or all(id.startswith("P") for id in ids_of(*words))


@pytest.mark.parametrize("words", ["papers banana", "high banana", "P1 open banana", "faults memory", "P1 faults"])
def test_a_filter_that_leaves_no_claim_with_the_words_is_no_answer(words):
    with pytest.raises(Stop):
        search.named(tuple(words.split()))


def test_an_id_that_no_claim_has_is_named_beside_one_that_has(capsys):
    (chosen,) = command.claims(("P1-03", "P9-99"))
    assert chosen["id"] == "P1-03"
    assert "\nNo claim is named P9-99.\n" in capsys.readouterr().out


def test_a_contradiction_is_found_by_its_words_and_counted_apart(capsys):
    known = [each for each in texts.asides() if each.is_contradiction]
    assert search.named(("contradictions",)) == known
    assert search.named(("papers", "contradictions")) == [each for each in known if each.document.startswith("P")]
    assert search.named(("P2", "contradictions")) == search.named(("misprint",)) == search.named(("P2", "misprint"))
    for each in known:
        assert search.named((each.said,)) == [each]
    command.claims(("P2",))
    assert "study claims P2 contradictions" in capsys.readouterr().out
    command.claims()
    of = [sum(each.document.startswith(letter) for each in known) for letter in "PS"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "Papers contradict themselves {} times, articles {}, slips included, by our reading".format(*of) in printed
    # Another text of the same authors is no part of it, and what has a reading that agrees is open.
    assert not [each.said for each in known if re.search(r"tutorial|\bpost\b|\bmay be\b|abstract", each.said)]


def test_the_columns_of_the_table_are_such_words(capsys):
    command.claims(every=True)
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("document "))
    words = [word for word in re.split(r" {2,}", header.strip()) if word not in ("document", "sentences", "claims")]
    assert words == ["holds", "does not hold", "holds only if", "open"]
    assert {*words} <= {*search.KINDS, *COUNTED}


@pytest.mark.parametrize("word", ["open", "papers", "traffic"])
def test_a_kind_beside_words_narrows_what_they_find(word):
    found = ids_of(word, "stage", "3")
    assert ids_of("stage", "3") & ids_of(word) <= found == ids_of("stage", "3", word) < ids_of(word)


def test_no_name_is_suggested_twice():
    with pytest.raises(Stop) as stop:
        search.named(("S000-200",))
    near = stop.value.remedy.removeprefix("did you mean ").removesuffix("?").lower().split(" or ")
    assert len(near) == len({*near}) > 1


def test_kinds_of_claims_narrow_each_other_and_a_document():
    papers = {claim.id for claim in CLAIMS if claim.document.startswith("P")}
    articles = {claim.id for claim in CLAIMS if claim.document.startswith("S")}
    assert (ids_of("papers"), ids_of("articles")) == (papers, articles), "as README counts them"
    assert papers > ids_of("posts") == {claim.id for claim in CLAIMS if claim.in_post}
    assert ids_of("papers", "high", "does", "not", "hold") == papers & ids_of("high") & ids_of("does not hold")
    assert ids_of("S001", "does not hold") == ids_of("S001") & ids_of("does not hold")
    assert ids_of("high", "bandwidth") - ids_of("high"), "beside other words it is a word"
    with pytest.raises(Stop, match="no claim is all of these: high, moderate"):
        search.named(("high", "moderate"))


@pytest.mark.parametrize("words", ["does", "all-reduces its gradients"])
def test_words_of_the_verdict_and_of_its_certainty_are_searched_as_words(words):
    """As cards print them. Several words are a phrase of a claim's head, or each is found."""
    printed = {
        each.id: f"{each.question} {each.quote} {each.answer} {each.found} {each.where} {each.condition} "
        f"{each.would_decide} {each.verdict} (certainty: {each.certainty})"
        for each in CLAIMS
    }
    having = {id for id, text in printed.items() if re.search(rf"(?i)(?<!\w){words}(?!\w)", text)}
    assert {each.id for each in search.named((words,)) if each.id in printed} == having
    apart = {each.id for each in search.named(tuple(words.split())) if each.id in printed}
    assert apart <= having, "without the phrases of the reasons"


def test_no_digit_of_a_value_is_cut(capsys):
    """0.99998 was printed as 1."""
    for claim in CLAIMS:
        command.claims((claim.id,), every=True)
        table = capsys.readouterr().out.partition("\n  Evidence")[2]
        for piece in claim.evidence:
            if isinstance(piece.value, float):
                numbers = [float(word) for word in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", table)]
                assert piece.value in numbers, (claim.id, piece.value)


@for_each("fault", texts.faults(), ids=lambda fault: fault.id)
def test_a_fault_reads_as_study_explain_shows_it(fault, capsys):
    """Keys of the table were printed as they are: `rests_on`, `do`."""
    command.claims((fault.id,))
    printed = capsys.readouterr().out
    explain((fault.id,))
    assert printed == capsys.readouterr().out
    assert not re.search(r"(?m)^(rests_on|do|when|asked|since|gpu): ", printed)


@pytest.mark.parametrize("words", [("",), (" ",), ("", "")])
def test_no_word_names_no_claim(words):
    """An empty phrase is in every sentence."""
    with pytest.raises(Stop, match="no claim is named"):
        search.named(words)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("gradeint", "gradient"), ("memroy", "memory"), ("offlod", "offload"), ("partitoining", "partitioning")]
    + [(word, None) for word in ("nonesuch", "something", "whichever", "testing", "banana", "mistake")],
)
def test_a_misspelt_word_gets_the_one_that_is_meant_and_another_word_none(word, meant):
    with pytest.raises(Stop, match="no claim is named") as stop:
        search.named((word,))
    assert stop.value.remedy.startswith(f"did you mean {meant}" if meant else "study claims --all")


def test_other_runs_agree_differ_or_decide_nothing(records):
    answers = {row.answer for row in comparison.compared(CLAIMS, records)}
    assert answers == {comparison.AGREES}
    # One run of many that is off is a difference.
    odd = next(run for run in records if run.record.arm == "zero2" and run.record.traffic.per_rank)
    record = odd.record.model_copy(deep=True)
    for count in record.traffic.per_rank[0].values():
        count.bytes *= 2
    changed = replace(odd, record=record)
    others = [changed if run is odd else run for run in records]
    assert {row.answer for row in comparison.compared(CLAIMS, others)} == {comparison.AGREES, comparison.DIFFERS}
    without = [run for run in records if run.record.arm != "zero2"]
    assert {row.answer for row in comparison.compared(CLAIMS, without)} >= {comparison.AGREES, comparison.NO_RUNS}


NUMBER = re.compile(r"\d[\d.,]*\d|\d")


@for_each("claim", CLAIMS, ids=lambda claim: claim.id)
def test_an_answer_is_read_in_ten_seconds_and_has_no_number_that_its_claim_lacks(claim):
    assert 3 < len(claim.answer.split()) <= 25
    assert len(NUMBER.findall(claim.answer)) <= 4, "of which some are names, such as stage 2 and 8 GPUs"
    assert claim.answer.endswith(".")
    assert len(claim.numbers.split()) <= 25
    behind = f"{claim.found} {claim.quote} {claim.where} {claim.condition} {claim.instead} {claim.changes}"
    said = {*NUMBER.findall(f"{claim.answer} {claim.ours} {claim.theirs}")}
    assert said <= {*NUMBER.findall(behind)}


@pytest.mark.parametrize(
    "words", [("stage", "3"), ("offloading",), ("stage", "3", "bytes"), ("000",), ("holds", "only", "if", "low")]
)
def test_a_list_has_a_line_for_each_claim_below_its_verdict(words, capsys):
    chosen = [each for each in command.claims(words) if "verdict" in each]
    printed = capsys.readouterr().out
    unwrapped = printed.replace("\n      ", " ")
    assert len(chosen) > 5
    for verdict in texts.VERDICTS:
        mine = [each for each in chosen if each["verdict"] == verdict]
        below = "the condition" if verdict == "holds only if" else "we find"
        assert (f"what the text says {verdict}: {number_of(len(mine), 'claims')}; {below}:\n" in printed) == bool(mine)
    for each in chosen:
        part = r" \(in part\)" if each["not_judged"] else ""
        quote, said = re.search(rf"  {each['id']}{part} “(.+?)”: (.+)\n", unwrapped).groups()
        whole = each["condition"] or each["answer"]
        begins = said.removesuffix(" ...")
        assert f"{whole} ".startswith(f"{begins} "), "cut at a word"
        assert said == whole or (each["condition"] and len(begins) > 100)
        assert quote == " ".join(each["quote"].split()), "an answer alone does not say of what"
    first, *_ = unwrapped.split("\n\n")
    numbers = [sum(each["verdict"] == verdict for each in chosen) for verdict in texts.VERDICTS]
    of_posts = sum(each["in_post"] for each in chosen)
    assert list(map(int, re.findall(r"(?<![\w-])\d+\b", first))) == [
        len(chosen),
        *filter(None, [*numbers, of_posts]),
    ], "a list begins with its counts"
    to_read = re.findall(r"\w+-\d+", first)
    assert len(to_read) <= 3
    assert {*to_read} <= {each["id"] for each in chosen if each["central"] and each["certainty"]}


def test_each_undecided_claim_says_what_would_decide_it(capsys):
    shown = command.claims(undecided=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert [each["id"] for each in shown] == [claim.id for claim in CLAIMS if claim.certainty is None]
    assert all(f"What would decide it: {' '.join(each['would_decide'].split())}" in printed for each in shown)


SEEN = r"tokens (?:a second|of)|FLOP/s|seconds|losses|bytes|operations|parameters (?:fit|run)|must fit|logs|sizes|shape"
WHERE = r"GPUs?\b|[VAH]100|DGX|cores|logs|engine|authors"


@for_each("claim", [each for each in CLAIMS if each.would_decide], ids=lambda claim: claim.id)
def test_what_would_decide_names_a_number_and_where_it_comes_from(claim):
    """Of one claim "A run on 512 V100" would have decided: of which model, and what should be read off?"""
    assert re.search(SEEN, claim.would_decide)
    assert re.search(WHERE, claim.would_decide)
    assert not re.match(r"(?:A|Another group's) run\b", claim.would_decide)


@for_each("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_card_says_how_an_all_reduce_counts(claim, capsys):
    """A ratio to DDP is another where it counts once: 1.5 times is 2 times. One card in two did not say so."""
    command.claims((claim.id,), every=True)
    printed = " ".join(capsys.readouterr().out.split())
    volumes = [piece for piece in claim.evidence if getattr(piece, "quantity", "") == "volume"]
    assert printed.count("volume (an all-reduce counts twice)") == len(volumes)
    moved = any(getattr(piece, "quantity", "") in ("volume", "tensors") for piece in claim.evidence)
    assert printed.count("What gloo writes to its sockets is more") == moved


LINKED = {text.document for text in texts.texts() if text.address.startswith("https:")}


@for_each("claim", [each for each in CLAIMS if each.document in LINKED], ids=lambda claim: claim.id)
def test_a_quote_beside_a_link_says_which_version_it_is_from(claim, capsys):
    """P1-20 is of SC20's version, and stood beside a link to arXiv's, which lacks it."""
    command.claims((claim.id,))
    printed = " ".join(capsys.readouterr().out.split())
    command.claims((claim.id,), every=True)
    said = claim.quoted_from or texts.of(claim).quotes
    assert f"The quote is from: {said}" in " ".join(capsys.readouterr().out.split())
    assert (f"The quote is from: {claim.quoted_from}" in printed) == bool(claim.quoted_from), "what all have is behind"
    is_elsewhere = claim.in_post or re.search("SC20|tutorial|^Post", claim.where)
    assert bool(claim.quoted_from) == bool(is_elsewhere)
    if claim.quoted_from:
        assert re.search(r"https://\S+, and not (?:in|from) ", claim.quoted_from)
        page = ROOT / f"reports/answers/claims/{claim.document}.md"
        assert claim.quoted_from in page.read_text()


def test_a_card_begins_with_the_verdict_the_answer_and_both_numbers(capsys):
    command.claims(("S000-20",))
    (claim,) = search.named(("S000-20",))
    verdict, *below = capsys.readouterr().out.splitlines()
    assert verdict == "S000-20 does not hold (certainty: moderate)"
    ours = "2.0 (measured) and 3.1 (virtual) times, or 1.5 (measured) and 1.55 (virtual) if all-reduces count twice"
    numbers = f"We find: {ours}. The text says: 2 and 4 times."
    assert " ".join(" ".join(below).split()).startswith(f"{claim.answer} {numbers} What holds instead: ")


@for_each("claim", [each for each in CLAIMS if each.ours], ids=lambda claim: claim.id)
def test_a_card_says_we_find_of_nothing_that_others_measured_or_that_was_divided(claim):
    kinds = {piece.kind for piece in claim.evidence}
    lead = claim.numbers.removesuffix(f". The text says: {claim.theirs}").removesuffix(f": {claim.ours}")
    if not kinds & {"runs", "virtual", "reproduction", "prediction"}:
        assert lead == ("By arithmetic" if kinds & {"arithmetic", "formula"} else "Others report")
    assert lead in ("We find", "By arithmetic", "Others report")
    if kinds == {"prediction"}:
        assert "(predicted)" in claim.ours


@for_each("claim", [each for each in CLAIMS if each.ours], ids=lambda claim: claim.id)
def test_what_virtual_ranks_alone_gave_is_called_virtual(claim):
    """A claim whose `ours` has a number of virtual ranks that no real run gave, or that rests on no other ranks."""
    kinds = {piece.kind for piece in claim.evidence}
    by_real = [piece.value for piece in claim.evidence if piece.kind in ("runs", "reproduction")]
    counted = [piece.value for piece in claim.evidence if piece.kind == "virtual" and piece.value not in by_real]
    printed = [float(number) for number in texts.NUMBER.findall(claim.ours.replace(",", ""))]
    no_others = "virtual" in kinds and not kinds & {"runs", "reproduction", "prediction"}
    assert ("(virtual)" in claim.ours) == (no_others or bool({*printed} & {*counted}))


@pytest.mark.parametrize("claim", [each for each in CLAIMS if each.ours], ids=lambda claim: claim.id)
def test_what_real_runs_gave_is_called_measured(claim):
    """P1-19 had the 1.5 and 1.0 of runs beside the 1.48 of a prediction, and S000-20 labelled virtual ones alone."""
    of_runs = [piece for piece in claim.evidence if piece.kind in ("runs", "reproduction")]
    counted = {value for piece in of_runs for value in (piece.value, getattr(piece, "most", None))}
    printed = {float(number) for number in texts.NUMBER.findall(claim.ours.replace(",", ""))}
    is_called_so = "(measured)" in claim.ours
    assert not is_called_so or printed & counted
    # P3-07 computes with its text's own 20 bytes, which runs have as well.
    assert is_called_so or not printed & counted or claim.given_by == "By arithmetic"


@pytest.mark.parametrize(
    ("id", "lead"),
    [
        ("S000-23", "Others report: 900"),
        ("P2-03", "By arithmetic: 32 %"),
        ("P5-05", "By arithmetic: 176"),
        ("P5-01", "We find: 1.25"),
    ],
)
def test_who_gives_a_number(id, lead):
    """Of P5-05 the first number is that of a formula, beside predictions."""
    (claim,) = search.named((id,))
    assert claim.numbers.startswith(lead)


def test_what_was_read_of_a_document_stands_on_its_cards_and_in_the_list(capsys):
    for text in texts.texts():
        assert search.named((text.document,)) == search.named((text.document.removeprefix("S"),)) == [*text.claim]
        assert text.claim[0].id.startswith(f"{text.document}-"), "a document has one name"
        command.claims((text.claim[0].id,), every=True)
        assert f"Read of it: {text.read}" in " ".join(capsys.readouterr().out.split())
    command.claims(every=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert all(f"{text.document}: {text.read}" in printed for text in texts.texts())


def test_a_card_names_its_text_and_a_list_its_faults(capsys):
    command.claims(("S000-20", "P1-01"))
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.index("Evidence (a setting: ") < printed.index("Source: "), "what it rests on comes first"
    assert "Source: ZeRO Optimization Strategies for Large-Scale Model Training" in printed
    assert "(Rajbhandari et al., 2020), https://arxiv.org/abs/1910.02054v3" in printed
    assert ".txt" not in printed, "a name of a file leads nobody anywhere"
    assert printed.count("Its text is not in the repository") == 1, "of an article, not of a paper with an address"
    command.claims(("faults",))
    assert capsys.readouterr().out.startswith("faults of libraries: "), "of no claims there is nothing to count"
    command.claims(("stage 3",))
    assert re.search(
        r"^faults of libraries: \d+\n  [A-Z]+-\d+ is a (fault|documented difference) of ",
        capsys.readouterr().out,
        re.MULTILINE,
    )


def test_words_are_searched_as_words_and_in_quotes_as_a_phrase():
    several = search.named(("GB", "60"))
    assert set(map(id, search.named(("60 GB",)))) < set(map(id, several))
    assert all({"60", "GB"} <= {*re.findall(r"\w+", search.text_of(each))} for each in several)


@pytest.mark.parametrize(
    ("id", "share", "said"),
    [
        ("P1-07", 1 - 7.2 / 8, "7.2 times on 64"),
        ("P1-42", 1 - 3.8 / 4, "3.8 times less on 64"),
        ("P1-44", 1 - 0.82, "82 %"),
        ("P1-25", 80.5 / 60 - 1, "80.5 GB"),
        ("P1-28", 67.1 / 33 - 1, "67.1 GB"),
        ("S000-20", 1 - 3.1 / 4, "3.1 (virtual)"),
        ("S001-08", 1 - 15.2 / 38, "15.2"),
        ("P5-03", 55 / 48 - 1, "from 7 hosts"),
        ("P5-03", 47 / 40 - 1, ""),  # with 6 hosts, which the condition leaves out
    ],
)
def test_one_share_says_which_number_is_near(id, share, said):
    """P1-07 held at 90 %, P5-03 asked for 5 %, and no word said why."""
    (most,) = re.findall(r"A number is right within (\d+) %", glossary.meanings()["holds"])
    assert int(most) == 100 * texts.NEAR
    (claim,) = [each for each in CLAIMS if each.id == id]
    holds = claim.verdict in ("holds", "holds only if") and bool(said)
    assert (share <= int(most) / 100) == holds
    assert said in f"{claim.ours} {claim.condition}"


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("activation", "activations"),
        ("offload", "offloads offloaded offloading"),
        ("rank", "ranks"),
        ("batch", "batches"),
        ("partition", "partitions partitioned partitioning"),
        ("quantize", "quantizes quantized quantizing quantization"),
        ("optimize", "optimizes optimized optimizing optimization optimizations"),
    ],
)
def test_a_word_finds_its_inflections_and_they_find_it(typed, written):
    """ "activation" found one claim, "activations" 28."""
    words = (typed, *written.split())
    whole = re.compile(rf"(?i)\b(?:{'|'.join(words)})\b")
    found = {each.id for each in search._judged() if whole.search(search.text_of(each))}
    assert all(found <= ids_of(word) for word in words)


FIELDS = [
    (text.document, words)
    for text in texts.texts()
    for words in (
        text.document,
        text.document.lower(),
        text.title,
        text.title.partition(":")[0],
        *re.findall(r"\b(?:19|20)\d\d\b", text.title),
        *filter(None, re.split(", | and ", text.authors)),
        *(name.split()[-1] for name in filter(None, re.split(", | and ", text.authors))),
        *(f"{before}{each}" for each in texts.ARXIV.findall(text.address) for before in ("", "arXiv:", "arxiv ")),
        *(f"arxiv.org/pdf/{each}v1" for each in texts.ARXIV.findall(text.address)),
        *([text.address] if text.address.startswith("https:") else []),
    )
]


@for_each(("document", "words"), FIELDS)
def test_what_a_catalogue_has_of_a_document_finds_all_its_claims(document, words):
    """`study claims 1910.02054` and `Rajbhandari` found nothing, `offload` none of ZeRO-Offload's paper."""
    mine = {claim.id for claim in CLAIMS if claim.document == document}
    for typed in ((words,), words.split()):
        assert mine <= ids_of(*typed) < {each.id for each in CLAIMS} | {each.id for each in texts.faults()}


@pytest.mark.parametrize("text", texts.texts(), ids=lambda text: text.document)
def test_the_name_by_which_people_know_a_document_finds_it_alone(text, capsys):
    """`study claims ZeRO paper` found three claims of an article, and none of that paper."""
    for typed in (text.called, f"the {text.called.lower()}", text.called.replace("-", " ")):
        assert ids_of(*typed.split()) == {claim.id for claim in text.claim}
    command.claims(tuple(text.called.split()))
    assert f"\nThe {text.called} is {text.document}: study claims {text.document}\n" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["offload", "ZeRO-Offload", "infinity", "ZeRO++", "fsdp"])
def test_one_word_of_a_title_finds_its_claims_and_those_that_have_it(word):
    titled = {claim.id for claim in CLAIMS if word.lower() in texts.of(claim).title.lower()}
    assert titled
    assert titled <= ids_of(word)


@for_each("claim", CLAIMS, ids=lambda claim: claim.id)
def test_the_fields_of_a_claim_narrow_its_document_to_it_and_others_like_it(claim):
    for field in filter(None, (claim.topic, claim.verdict, claim.certainty)):
        like_it = {each.id for each in CLAIMS if each.document == claim.document and field in each.kinds}
        assert ids_of(claim.document, *field.split()) == ids_of(*field.split(), claim.document) == like_it
    if claim.certainty:
        word = max(re.findall(r"\w+", claim.question), key=len)
        narrowed = ids_of(word, claim.topic, claim.document, "certainty", *claim.certainty.split())
        assert claim.id in narrowed
        assert narrowed <= ids_of(claim.document, claim.topic, claim.certainty)
    number = int(claim.id.partition("-")[2])
    assert ids_of(f"{claim.document}-{number}") == ids_of(f"{claim.document.lower()}-{number:03}") == {claim.id}


@pytest.mark.parametrize(("typed", "topic"), [("speed", "time"), ("speed open papers", "time")])
def test_a_usual_word_for_a_topic_is_the_topic(typed, topic):
    """`study claims speed open papers` gave 5 claims that say so, of 12."""
    having = [each for each in CLAIMS if each.topic == topic]
    if "open" in typed:
        having = [each for each in having if each.document.startswith("P") and not each.certainty]
    assert ids_of(*typed.split()) == {each.id for each in having}


@pytest.mark.parametrize(
    ("typed", "near"), [("P1-2", "P1-01 or P1-03 or P1-07"), ("P1-200", "P1-43 or P1-44 or P1-45"), ("0-19", None)]
)
def test_an_id_that_no_claim_has_gets_the_nearest_of_its_document(typed, near):
    with pytest.raises(Stop) as stop:
        search.named((typed,))
    assert stop.value.remedy == f"did you mean {near}?" if near else "S000-18 or S000-20" in stop.value.remedy


def test_words_beside_a_document_are_looked_for_in_it():
    """P1 was a word, which other documents' claims have that refer to P1-19."""
    found = ids_of("P1", "stage", "3")
    assert found == {id for id in ids_of("stage 3") | ids_of("stage", "3") if id.startswith("P1-")}
    assert "P1-19" in found


@pytest.mark.parametrize("words", ["outermost unit", "mixture of experts"])
def test_words_of_a_condition_and_of_the_reasons_are_found(words):
    assert ids_of(words) == {"P5-01"}
    assert ids_of(*words.split()) >= {"P5-01"}


def test_claims_of_one_question_have_one_topic():
    topics = {}
    for claim in CLAIMS:
        assert topics.setdefault(claim.question, claim.topic) == claim.topic
    assert {*topics.values()} == {*texts.TOPICS}


@pytest.mark.parametrize("topic", texts.TOPICS)
def test_a_topic_names_its_claims_and_narrows_other_words(topic):
    having = {claim.id for claim in CLAIMS if claim.topic == topic}
    assert ids_of(topic) == having
    assert ids_of(topic, "articles") == having & ids_of("articles")
    documents = {claim.document for claim in CLAIMS if claim.topic == topic}
    assert all(ids_of(each, topic) == having & ids_of(each) for each in documents)


def test_a_topic_beside_words_leaves_other_topics_out():
    """`memory stage 1` gave seventeen claims, most of them not about that."""
    found = ids_of("memory", "stage", "1")
    assert {"P1-03", "S001-03"} <= found < ids_of("memory")
    assert len(found) < 10
    assert ids_of("memory", "memlock") == {"S001-56"}, "no claim of this topic has the word, so both are words"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("does not holds", "does not hold"),
        ("S001 dos not hold", "does not hold"),
        ("hold only if", "holds only if"),
        ("cannot be decided", "cannot be decided here"),
    ],
)
def test_a_verdict_with_a_wrong_letter_lists_no_claims(typed, meant):
    """Each of these words is in claims of another verdict, and those were listed."""
    with pytest.raises(Stop, match="no verdict is called") as stop:
        search.named(tuple(typed.split()))
    assert stop.value.remedy == f"did you mean {meant}?"


def test_a_verdict_beside_words_is_no_wrong_letter():
    assert ids_of("offloading", "holds", "only", "if")
    assert ids_of("memory", "does", "not", "hold")


def test_each_number_of_a_range_is_counted_again_and_shown(capsys):
    """Of such a range only the median was shown."""
    rows = command.claims(("S002-12",), runs=(REPORTS,))
    printed = capsys.readouterr().out
    (row,) = [each for each in rows if each["committed"] == "8.94 to 11.8"]
    assert len(row["values"]) == 3
    assert row["yours"] == f"{min(row['values']):.12g} to {max(row['values']):.12g}"
    flat = " ".join(printed.split())
    assert all(f" {value:.12g}: {of} " in flat for value, of in zip(row["values"], row["runs"], strict=True))
    assert printed.count("and not these records again.") == 1


def test_evidence_of_records_names_them():
    """Two numbers of records were typed as arithmetic: no command led to them."""
    (claim,) = search.named(("P5-01",))
    chosen = command.resting_on([REPORTS / "cpu-2core/runs/scoreboard/fsdp2-micro-fsdp2-b6ed71af-r1.1"])
    assert chosen == [claim]
    expressions = [each.expression for one in CLAIMS for each in one.evidence if each.kind == "arithmetic"]
    assert [each for each in expressions if re.search(r"\d{7}(?!\d* \*\*)", each)] == [], "bytes, to the last digit"


def test_several_words_are_a_phrase_where_claims_have_them_so(capsys):
    """`study claims stage 3` printed claims with a stage and a 3 somewhere: 70 lines."""
    about = [each for each in search.named(("STAGE", "3")) if not isinstance(each, texts.Aside)]
    assert all("stage 3" in search.text_of(each, ("head",)).lower() for each in about)
    apart = search.named(("3", "stage"))
    assert set(map(id, about)) < set(map(id, apart)), "no claim has these as a phrase, so each is a word"
    assert set(map(id, about)) < set(map(id, search.named(("stage 3",)))), "in quotes also in the reasons"
    command.claims(("stage", "3"))
    assert len(re.findall(r"(?m)^  [A-Z]\d*-\d+ ", capsys.readouterr().out)) == len(about) < 30


def estimated(words: str, quantity: str, capsys) -> float:
    """Return a quantity by the command that a card shows."""
    commands.start([*words.split()[1:], "--json"])
    answer = json.loads(capsys.readouterr().out)
    estimate = answer["estimate"]
    if quantity == "tokens per s":  # but for the batch, which both sides of a ratio may have of their own
        given = dict(re.findall(r"--([a-z-]+) (\d+)", words))
        rows = int(given.get("micro-batch", 1)) * int(given.get("accumulation", 1))
        return int(given["gpus"]) * rows * int(given["sequence"]) / answer["step"]["seconds"]
    known = {name.replace("_", " "): value for name, value in (estimate | estimate["at_peak"]).items()}
    known["volume"] = sum(estimate["traffic"].values()) + estimate["traffic"].get("all_reduce", 0)
    return known[quantity]


# One of each set of flags.
OF_FLAGS = {
    (*sorted(piece.model_fields_set), piece.quantity, *(piece.over or ())): id
    for id, (_, piece) in EVIDENCE.items()
    if piece.kind == "prediction" and piece.tf32
}.values()


@for_each(("claim", "piece"), [EVIDENCE[id] for id in OF_FLAGS], ids=OF_FLAGS)
def test_a_prediction_is_shown_as_the_command_that_gives_it(claim, piece, capsys):
    """Its fields were no flags: parameters 1.309e+10, ranks 8."""
    quantity, _, command_line = piece.what.partition(" by ")
    first, _, other = command_line.partition(", over that with ")
    quantity = quantity.removesuffix(" (an all-reduce counts twice)")
    value = estimated(first, quantity, capsys)
    if other:
        value /= estimated(f"{first} {other}", quantity, capsys)
    assert piece.agrees(value / UNITS[piece.unit] if piece.unit else value)


def test_the_records_of_a_claim_fit_the_terminal_and_its_commands_stay_commands(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    command.claims(("P1-17",), runs=(REPORTS / "cpu-2core/runs/algorithms",))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    (first, *_) = re.findall(r"More like them: ((?:.+\\\n)+.+)", said)
    (row, *_) = comparison.compared([claim for claim in CLAIMS if claim.id == "P1-17"], runs.load(REPORTS).counting)
    assert " ".join(first.replace("\\\n", " ").split()) in row.alike


def test_a_card_ends_with_the_command_that_computes_its_evidence_again(capsys):
    for claim in CLAIMS:
        command.claims((claim.id,))
        of_runs = any(isinstance(piece, OfRuns) for piece in claim.evidence)
        assert (f": study claims {claim.id} --runs reports\n" in capsys.readouterr().out) == of_runs


@pytest.mark.parametrize(
    ("id", "found", "others"), [("S000-01", [3], 4), ("S000-20", [23, 1, 39, 1, 39, 23], 0), ("S000-06", [3, 3, 2], 11)]
)
def test_a_number_leads_to_its_records_and_what_is_not_of_runs_is_named(id, found, others, capsys):
    """Who checked a claim had to look for its records, and did not see that predictions were left out."""
    rows = command.claims((id,), runs=(REPORTS,))
    printed = capsys.readouterr().out
    agree = f"{len(found)} agree" if len(found) > 1 else "1 agrees"
    assert f"of runs, compared with the {len(runs.load([REPORTS]))} kept records: {agree}.\n" in printed
    assert [len(row["runs"]) for row in rows] == found
    folders = [folder for row in rows for pair in row["runs"] for folder in pair.split(" over ")]
    assert all(Path(folder, "record.json").is_file() for folder in folders)
    for row in rows:
        ends = [row["runs"][0], row["runs"][-1]]
        flat = " ".join(printed.split())
        assert all(re.search(rf" [\d.]+: {re.escape(pair)} ", flat) for pair in ends)
    assert (f"Not of runs: {others} pieces of evidence" in printed) == bool(others)


def test_no_condition_is_one_that_we_looked_for():
    """S003-06 left out DeepSpeed's copy of the weights, and S000-06 its text's batch."""
    fitted = r"that we chose (?:to come near|as they give)"
    assert not [each.id for each in CLAIMS if each.condition and re.search(fitted, each.because)]
    assert "**No condition is fitted.**" in (ROOT / "reports/answers/claims.md").read_text()


@pytest.mark.parametrize(("kind", "lead"), [("is_reading", "Conditions of a word"), ("not_judged", "Judged in part")])
def test_readings_and_parts_are_counted_apart_on_the_page(kind, lead):
    ids = [each.id for each in CLAIMS if getattr(each, kind)]
    page = (ROOT / "reports/answers/claims.md").read_text()
    (said,) = re.findall(rf"\*\*{lead}.*?\*\*.*?\((.*?)\)", page, re.DOTALL)
    assert sorted(re.findall(r"[PS]\d+-\d+", said)) == sorted(ids)
    if kind == "not_judged":
        assert all(f"| {each.graded} |" in page for each in CLAIMS if each.id in ids and each.certainty)


def test_no_folder_of_records_alone_contradicts_what_all_of_them_show():
    """A number of a CPU and one of a GPU are never one: three folders of a GPU's runs had another number of P3-07."""
    folders = {run.folder.parents[1] for run in runs.kept_as_evidence()}
    assert len(folders) >= 5
    for folder in folders:
        rows = comparison.compared(CLAIMS, runs.load([folder]).counting)
        assert [(row.claim, row.evidence.what) for row in rows if row.answer == comparison.DIFFERS] == [], folder


def test_runs_of_one_setting_are_counted_once(records):
    """23 pairs of six tiny architectures were read as a sample of 23."""
    (claim,) = search.named(("P1-17",))
    piece = claim.evidence[1]
    assert "in 23 pairs: 14 settings of 6 models" in piece.what
    (one, *_) = valued = piece.values_with_runs(records)
    assert settings_and_models([*valued, one]) == settings_and_models(valued) == (14, 6)
    other = replace(one[1][0], record=one[1][0].record.model_copy(deep=True))
    other.record.requested.micro_batch += 100
    assert settings_and_models([*valued, (one[0], (other,))]) == (15, 6)
    assert all(re.search(r", in \d+ (pair|run)", each.what) for _, each in of_runs()), "with a ratio or without"


def of_runs():
    return [(claim, piece) for claim in CLAIMS for piece in claim.evidence if isinstance(piece, OfRuns)]


@for_each("claim", CLAIMS, ids=lambda claim: claim.id)
def test_the_first_ten_lines_of_a_card_are_enough(claim, capsys):
    command.claims((claim.id,))
    printed = capsys.readouterr().out
    first = " ".join(" ".join(printed.splitlines()[:10]).split())
    for said in (claim.judged, claim.answer, claim.theirs, claim.condition, claim.would_decide, claim.instead):
        assert said in first
    assert "The text: “" in first
    command.claims((claim.id,), every=True)
    whole = capsys.readouterr().out
    assert len(printed.splitlines()) <= len(whole.splitlines())
    assert whole.count(" prediction: ") + whole.count(" formula: ") >= sum(
        piece.kind in ("prediction", "formula") for piece in claim.evidence
    )


def test_claims_that_share_evidence_are_one_list(records, capsys):
    found = comparison.shared(CLAIMS, records)
    textbook = next(ids for what, ids in found.items() if "zero3_textbook, accumulation 1, precision fp32" in what)
    assert {"P1-19", "P4-04"} <= {*textbook}, "the same three pairs"
    assert {"P1-03", "P1-07", "P1-42"} <= {*found[comparison.FORMULA]}
    assert "P1-28" not in {id for ids in found.values() for id in ids}, "a multiplication of its own numbers"
    chosen = command.claims(shared=True)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{len(chosen)} of {len(CLAIMS)} claims share evidence with another: {len(found)} facts")
    page = " ".join((ROOT / "reports/answers/claims.md").read_text().split())
    assert f"{len(chosen)} of the {len(CLAIMS)} share evidence with another, {len(found)} facts in all" in page
    (by_default,) = [ids for what, ids in found.items() if "of arm zero1 or zero2" in what and "volume" in what]
    of_both = f"{len(found[comparison.FORMULA])} compute with one formula, the ZeRO paper's of model states. "
    assert f"{of_both}{len(by_default)} rest on DeepSpeed's default with stages 1 and 2 beside DDP." in page
    arithmetic = sum(text.unjudged["arithmetic"] for text in texts.texts() if text.document.startswith("P"))
    assert f"*Arithmetic*, {arithmetic} of papers" in page


def test_what_differs_is_shown_from_the_least_to_the_most(records):
    """A median would hide the record that differs."""
    (row, *_) = [each for each in comparison.compared(CLAIMS, records) if len(each.values) > 2]
    other = row._replace(answer=comparison.DIFFERS, values=[1, *row.values[1:-1], 14])
    assert command.row_of(other)["yours"] == "1 to 14"


@pytest.mark.parametrize(
    ("words", "document"),
    [("backward prefetch", "P5"), ("delayed update", "P2"), ("perplexity", "P1"), ("bandwidth", "P3"), ("10x", "P2")],
)
def test_what_is_not_judged_is_found_beside_claims_and_alone(words, document, capsys):
    """`study claims bandwidth` hid that the model of P3 is not judged, as two claims have the word."""
    for typed in (words, f"{words} {document}", f"{document} {words}"):
        told = [each for each in search.named(tuple(typed.split())) if isinstance(each, texts.Aside)]
        assert [each.document for each in told if not each.is_contradiction and each.document == document] != []
        command.claims(tuple(typed.split()))
        assert "not judged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("qgZ",), {"P4-01", "P4-16"}),
        (("5X",), {"P5-16"}),
        (("60", "GB"), {"P1-25"}),
        (("60 GB",), {"P1-25", "P1-28", "S001-06"}),
        (("60GB",), {"P1-25", "P1-28", "S001-06"}),
    ],
)
def test_a_number_with_its_unit_is_whole_and_a_word_of_the_evidence_alone_is_found(words, found):
    """5X found 1.5x, and qgZ nothing."""
    assert ids_of(*words) == found


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (('"stage 3"',), ("stage 3",)),
        (("“stage 3”",), ("stage 3",)),
        (('"stage 3" sends',), ("stage 3", "sends")),
        (("sends", '"stage 3"'), ("sends", "stage 3")),
        (('"stage', '3"'), ("stage 3",)),
        (('"does not hold"', "P1"), ("does", "not", "hold", "P1")),
        (('"P1-17,P1-19"',), ("P1-17", "P1-19")),
        (('5"',), ("5",)),  # none in pairs
    ],
)
def test_quotes_within_what_is_typed_make_a_phrase(typed, meant):
    """`study claims '"stage 3"'` found nothing."""
    assert search.named(typed) == search.named(meant)


def test_an_author_and_a_year_in_quotes_are_those_of_a_text():
    assert ids_of("Rajbhandari 2021") == {claim.id for claim in CLAIMS if claim.document in ("P2", "P3")}


def test_a_record_leads_to_the_part_of_a_protocol_that_makes_runs_like_it(records):
    """No card named the protocol, and the records of the first days do not."""
    pieces = [(claim, piece) for claim in CLAIMS for piece in claim.evidence if isinstance(piece, OfRuns)]
    runs_of = {run: claim.id for claim, piece in pieces for _, of in piece.values_with_runs(records) for run in of}
    for run in runs_of:
        program, *words = protocol.alike(run).split()
        if program == "study":
            _, name, _, part, *scale = words
            cells = protocol.cells(protocol.read(name), scale[1] if scale else "tiny")
            assert run.record.arm in {cell.arm for cell in cells if f"part={cell.part}" == part}, run.folder
    without = {row.claim for row in comparison.compared(CLAIMS, records) if not row.alike[0].startswith("study sweep")}
    by_hand, gone = {"P1-17", "P1-42"}, {"P4-02", "S001-42"}
    assert without == by_hand | gone, "they were launched by hand, or their protocol is gone"


def test_other_peoples_runs_are_told_what_they_need(capsys):
    command.claims(("P1-17",), runs=(REPORTS / "cpu-2core/runs/smoke",))
    printed = capsys.readouterr().out
    assert "kept records: 1 agrees, 2 need other runs.\n" in printed
    launches = re.findall(r"(?m)^  accelerate launch --config_file (\S+) .*study/train.py --run-dir runs/", printed)
    assert launches
    assert all((ROOT / each).is_file() for each in launches)
    assert "Not of runs: 1 piece of evidence (" in printed


def test_what_agrees_is_named_where_most_needs_other_runs(capsys):
    folder = REPORTS / "cpu-2core/runs/algorithms"
    command.claims(runs=(folder,))
    printed = capsys.readouterr().out
    rows = comparison.compared(CLAIMS, runs.load([folder]).counting)
    agreeing = Counter(row.claim for row in rows if row.answer == comparison.AGREES)
    said = re.search(r"(?s)\nAgree: (.+?)\. The numbers: ", printed).group(1)
    assert {id: int(number or 1) for id, number in re.findall(r"([SP]\d+-\d+)(?: \((\d+)\))?", said)} == agreeing
    assert f": {agreeing.total()} agree, " in printed
    assert "\n\n\n" not in printed, "of an empty table"


def test_a_folder_of_records_leads_to_the_claims_that_rest_on_it(capsys):
    chosen = command.claims((str(REPORTS / "cpu-2core/runs/algorithms/adamw-zero2_reduce"),))
    assert [each["id"] for each in chosen] == ["P1-42", "P1-17"]
    assert "P1-17 “So the total" in capsys.readouterr().out
    with pytest.raises(Stop, match="no claim rests on"):
        command.claims((str(REPORTS / "cpu-2core/hung"),))


def test_a_card_is_as_wide_as_text(monkeypatch, capsys):
    """Its table of evidence had 144 columns in a pipe, whatever the terminal's width."""
    monkeypatch.setenv("COLUMNS", "80")
    command.claims(every=True)
    for claim in CLAIMS:
        command.claims((claim.id,))
        command.claims((claim.id,), every=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []


def test_the_name_of_an_arm_is_that_of_its_stage():
    """`study claims zero3 sends` found nothing: claims write stage 3 or ZeRO-3, and only evidence names arms."""
    for stage in "123":
        assert ids_of(f"zero{stage}") >= ids_of(f"stage {stage}") | ids_of(f"ZeRO-{stage}")
    sending = ids_of("zero3", "sends")
    assert sending >= ids_of("stage", "3", "sends")
    assert "S002-04" in sending
    assert not sending & {claim.id for claim in CLAIMS if "send" not in search.text_of(claim).lower()}
    with pytest.raises(Stop):
        search.named(("zero33",))


@pytest.mark.parametrize(
    ("words", "said", "id"),
    [
        ("stage 3 50% more communication", "4 of these 5 words", "S002-04"),
        ("offloading 13B single gpu V100 slow", "4 of these 6 words", "P2-01"),
    ],
)
def test_words_that_no_claim_has_together_get_the_nearest_claims(words, said, id):
    with pytest.raises(Stop) as stop:
        search.named(tuple(words.split()))
    assert stop.value.remedy.startswith(f"the nearest have {said}: ")
    assert f"{id} “{next(claim.quote for claim in CLAIMS if claim.id == id)}”" in stop.value.remedy


def test_a_short_word_that_no_claim_has_is_not_taken_for_another():
    with pytest.raises(Stop) as stop:
        search.named(("lora",))
    assert stop.value.remedy == "study claims --all lists the documents"
    with pytest.raises(Stop) as stop:
        search.named(("lora", "zero"))
    assert stop.value.remedy == "give fewer words; study claims --all lists the documents"
    with pytest.raises(Stop) as stop:
        search.named(("gradeint",))
    assert "gradient" in stop.value.remedy
