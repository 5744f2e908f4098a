"""The report's calculator: its JavaScript and its page give the numbers of `study estimate`."""

import json
import random
import shlex
import shutil

import pytest
from browser import needs_browser, opened_browser

from study.cli import main
from study.io.numbers import size
from study.machine.gpus import GPUS
from study.predictor.architecture import Architecture
from study.predictor.estimate import estimate
from study.predictor.setup import Setup
from study.predictor.timing.steptime import Machine, step_time
from study.report import calculator
from study.report.calculator import ARMS
from study.report.templating import TEMPLATES

pytestmark = needs_browser
QUESTIONS, SEED = 1000, 18
RELATIVE = 1e-9  # of seconds: the two add floats up in another order. Bytes are equal
# What the page asks its own functions, in one go.
ASK = """
function ask(data, questions) {
  return questions.map((q) => {
    const setup = setupOf({ ...q.model }, data.arms[q.arm], q);
    const { parameters, atPeak, peakBytes, hostBytes, nvmeBytes, traffic } = estimate(setup);
    return { parameters, atPeak, peakBytes, hostBytes, nvmeBytes, traffic, ...stepTime(setup, data.gpus[q.gpu], data) };
  });
}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page in a browser."""
    folder = tmp_path_factory.mktemp("calculator")
    calculator.write(folder, {})
    for name in ("site.css", "site.js", *calculator.SCRIPTS):
        shutil.copyfile(TEMPLATES / name, folder / name)
    with opened_browser() as browser:
        browser.get((folder / "calculator.html").as_uri())
        yield browser
        assert browser.get_log("browser") == []


def questions(count: int) -> list[dict]:
    """Random questions: half of them about a model of the list with fewer layers, half about random numbers."""
    draw, known = random.Random(SEED), calculator.models()

    def listed(layers: int) -> dict:
        return known[draw.choice(list(known))] | {"layers": layers}

    return [
        {
            "model": decoder(draw)
            if draw.random() < 0.5
            else known[draw.choice(list(known))] | {"layers": 1 + number % 5},
            "arm": draw.choice(list(ARMS)),
            "gpu": draw.choice(list(GPUS)),
            "ranks": draw.choice([1, 2, 3, 4, 7, 8, 16, 64, 1000]),
            "precision": draw.choice(list(calculator.PRECISIONS)),
            "microBatch": draw.choice([1, 2, 3, 8, 31]),
            "accumulation": draw.choice([1, 1, 2, 5]),
            "sequence": draw.choice([1, 77, 128, 1024, 4096]),
            "checkpointing": draw.random() < 0.5,
        }
        for number in range(count)
    ]


def decoder(draw: random.Random) -> dict:
    """The numbers that a reader may type, some of them odd."""
    kv_heads = draw.choice([1, 2, 8])
    heads = kv_heads * draw.choice([1, 2, 5])
    sizes = {"layers": draw.randint(1, 6), "hidden": heads * draw.choice([16, 64, 100, 128]), "heads": heads}
    sizes |= {"kv_heads": kv_heads, "inner": draw.randint(50, 9000), "vocabulary": draw.randint(100, 300_000)}
    fixed = {"family": "llama", "head_width": sizes["hidden"] // heads, "positions": 0, "rotary": 0, "biases": False}
    fixed |= {"parallel": False, "hidden_dropout": 0, "attention_dropout": 0, "embedding_dropout": 0, "labels": 2}
    return sizes | fixed | {"tied": draw.random() < 0.5, "activation": None}


def answer(question: dict) -> dict:
    """Python's answer."""
    model, names = Architecture(**question["model"]), ("accumulation", "sequence", "precision", "checkpointing")
    values = {name: question[name] for name in names} | {"micro_batch": question["microBatch"], "device": "cuda"}
    values["attention"] = "sdpa" if model.has_fused_attention else "eager"
    setup = Setup.of_arm(model, question["arm"], ranks=question["ranks"], **values)
    whole, step = estimate(setup), step_time(setup, Machine(gpu=question["gpu"]))
    return {
        "parameters": whole.parameters,
        "atPeak": whole.at_peak,
        "peakBytes": whole.peak_bytes,
        "hostBytes": whole.host_bytes,
        "nvmeBytes": whole.nvme_bytes["held"],
        "traffic": whole.traffic,
        "seconds": step.seconds,
        "low": step.low_s,
        "high": step.high_s,
    }


def differs(ours: dict, theirs: dict) -> dict:
    """The fields in which two answers differ."""
    return {
        name: (value, theirs[name])
        for name, value in ours.items()
        if theirs[name] != (pytest.approx(value, rel=RELATIVE) if name in ("seconds", "low", "high") else value)
    }


@pytest.fixture(scope="module")
def asked() -> list[tuple[dict, dict]]:
    """The questions, with Python's answers."""
    return [(question, answer(question)) for question in questions(QUESTIONS)]


def wrong(page, asked: list[tuple[dict, dict]]) -> list[tuple[dict, dict]]:
    """The questions with other answers on the page than in Python, and the fields that differ."""
    theirs = page.execute_script(f"{ASK}\nreturn ask(data, arguments[0])", [question for question, _ in asked])
    both = zip(asked, theirs, strict=True)
    return [(question, missed) for (question, ours), each in both if (missed := differs(ours, each))]


def test_a_thousand_random_questions_have_the_answers_of_python(page, asked):
    assert wrong(page, asked) == []


@pytest.mark.parametrize(
    ("function", "mistake"),
    [
        ("standing", "() => ({})"),
        ("layerBytes", "() => 0"),
        ("pinnedPadding", "() => 0"),
        ("refetched", "() => 0"),
        ("wholeOf", "() => 1"),
        ("filled", "() => 1"),
    ],
)
def test_a_mistake_in_a_formula_is_noticed(function, mistake, page, asked):
    """A fault is planted for some questions; then the page has its own function again."""
    page.execute_script(f"window.kept = {function}; {function} = {mistake}")
    try:
        assert wrong(page, asked[:200])
    finally:
        page.execute_script(f"{function} = window.kept")
    assert wrong(page, asked[:20]) == []


def shown(page) -> dict[str, list[str]]:
    """The table of the page: a row's cells by its arm."""
    script = """return Object.fromEntries([...document.querySelectorAll("#arms tbody tr")].map((row) =>
        [row.dataset.arm, [...row.cells].slice(1).map((cell) => cell.textContent)]))"""
    return page.execute_script(script)


def type_in(page, **values) -> None:
    """Fill the form in, as a reader does."""
    for name, value in values.items():
        script = """const field = document.getElementById("calculator").elements[arguments[0]];
            if (field.type === "checkbox") field.checked = arguments[1]; else field.value = arguments[1];
            field.dispatchEvent(new Event("input", { bubbles: true }))"""
        page.execute_script(script, name, value)


def test_without_a_script_the_page_shows_what_the_script_shows_first(page):
    """The one is drawn by Python, the other by the browser."""
    drawn = {bar.name: bar.total for bar in calculator._bars().bars}
    assert drawn == {arm: cells[1] for arm, cells in shown(page).items()}
    assert list(drawn) == list(ARMS)


def test_what_is_typed_is_answered_and_kept_in_the_address(page):
    typed = {"layers": 12, "hidden": 1024, "heads": 16, "kv_heads": 4, "inner": 2816, "vocabulary": 50000}
    type_in(page, model=calculator.OWN, **typed, gpus=4, gpu="L4", sequence=512, microBatch=8, checkpointing=True)
    fixed = decoder(random.Random()) | typed | {"head_width": 64, "tied": False}
    question = {"model": fixed, "ranks": 4, "gpu": "L4", "precision": "bf16_cast", "microBatch": 8, "sequence": 512}
    question |= {"accumulation": 1, "checkpointing": True}
    before = shown(page)
    for arm, cells in before.items():
        ours = answer(question | {"arm": arm})
        assert cells[1] == size(ours["peakBytes"]), arm
        assert cells[0] == "yes", arm
    assert page.find_element("id", "sentence").text.startswith(
        "On 4 x L4 (24.2 GB each), 12 of 12 arms fit for a model of 2"
    )
    page.refresh()
    assert {arm: cells[:2] for arm, cells in shown(page).items()} == {arm: cells[:2] for arm, cells in before.items()}


def test_as_many_rows_as_the_page_says_fit_and_one_more_does_not(page):
    type_in(page, model="llama3-8b", gpus=8, gpu="H100-80GB", sequence=2048, microBatch=1, checkpointing=False)
    page.execute_async_script("""const done = arguments[0], table = document.getElementById("arms");
        (function look() { table.textContent.includes("…") ? setTimeout(look, 20) : done(); })()""")
    rows = int(shown(page)["zero3"][2])
    for more, fits in ((0, True), (1, False)):
        type_in(page, microBatch=rows + more)
        assert (shown(page)["zero3"][0] != "no") == fits


def test_a_number_that_cannot_be_is_named_and_nothing_is_shown_for_it(page):
    type_in(page, model="llama3-8b", heads=31)
    assert page.find_element("id", "problem").text == "Heads (31) must divide the hidden size (4096)."
    type_in(page, heads=32, gpus="")
    assert page.find_element("id", "problem").text == "GPUs must be a whole number, at least 1."
    assert not page.find_element("id", "answer").is_displayed()
    type_in(page, gpus=8)
    assert page.find_element("id", "answer").is_displayed()


def test_the_command_that_the_page_names_gives_its_numbers(page, capsys, monkeypatch):
    type_in(page, model="qwen2.5-7b", gpus=16, gpu="A100-80GB", sequence=1024, microBatch=2, checkpointing=True)
    command = page.find_element("id", "command").text
    assert command.startswith("study estimate --params")
    monkeypatch.setattr("sys.argv", [*shlex.split(command), "--json"])
    main()
    said = json.loads(capsys.readouterr().out)
    cells = shown(page)["zero3"]
    assert cells[1] == size(said["estimate"]["peak_bytes"])
    assert cells[5].split(" s ")[0] == f"{said['step']['seconds']:.2g}"
