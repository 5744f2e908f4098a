"""The report's calculator: its page gives the numbers of `study estimate`."""

import gzip
import json
import random
import shlex
import shutil

import pytest
from browser import needs_browser, opened_browser

from study.cli import main
from study.core import arms
from study.core.gpus import GPUS
from study.core.optimizers import refusal
from study.core.text import size
from study.predict.architecture import named
from study.predict.estimate import estimate, operations
from study.predict.pace import peak_flops_per_s
from study.predict.question import with_buckets
from study.predict.setup import Setup, distribution
from study.report import calculator, site
from study.report.calculator import ARMS, FILE, GPUS_TRIED
from study.report.site import TEMPLATES
from study.report.topics import memory

pytestmark = needs_browser
QUESTIONS, SEED = 60, 18
MODELS = json.loads(gzip.decompress(FILE.read_bytes()))["models"]
REMEDY = "the predictor has changed: run python reproductions/laboratories/calculator_tables.py"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page in a browser, once its tables are read."""
    folder = tmp_path_factory.mktemp("calculator")
    site.Pages(folder).write("calculator", **calculator.values())
    for name in ("site.css", "site.js", calculator.SCRIPT):
        shutil.copyfile(TEMPLATES / name, folder / name)
    with opened_browser() as browser:
        browser.get((folder / "calculator.html").as_uri())
        ready(browser)
        yield browser
        assert browser.get_log("browser") == []


def ready(page) -> None:
    script = "const done = arguments[0]; (function look() { form.hidden ? setTimeout(look, 20) : done(); })()"
    page.execute_async_script(script)


def question(draw: random.Random) -> dict:
    model = draw.choice(list(MODELS))
    precisions = [name for name in calculator.PRECISIONS if name in MODELS[model]]
    most = min(MODELS[model]["positions"] or 10**6, 100_000)
    return {
        "model": model,
        "arm": draw.choice(ARMS),
        "gpu": draw.choice(list(GPUS)),
        "gpus": draw.choice(GPUS_TRIED),
        "precision": draw.choice(precisions),
        "rows": draw.choice([1, 2, 3, 8, 31, 1000]),
        "passes": draw.choice([1, 1, 2, 5]),
        "tokens": draw.choice([2, 77, 128, most]),
        "recomputes": draw.random() < 0.5,
        "optimizer": draw.choice(list(calculator.OPTIMIZERS)),
    }


def parts_of(components: dict[str, int]) -> list[int]:
    """Bytes by the page's parts, where temporaries are activations."""
    left = components | {"activations": components.get("activations", 0) + components.get("temporaries", 0)}
    return [sum(left.get(role, 0) for role in roles if role != "temporaries") for roles in memory.PARTS.values()]


def answer(question: dict) -> dict | None:
    """Return Python's answer; None where a library refuses the optimizer."""
    arm, precision = arms.load_arm(question["arm"]), question["precision"]
    if refusal(arm, question["optimizer"], precision):
        return None
    ranks = 1 if arm.distributed_type == "NO" else question["gpus"]
    values = {"micro_batch": question["rows"], "sequence": question["tokens"], "accumulation": question["passes"]}
    values |= {"checkpointing": question["recomputes"], "precision": precision, "ranks": ranks, "device": "cuda"}
    values |= {"optimizer": question["optimizer"]} if question["optimizer"] != "adamw" else {}
    setup = Setup(model=named(question["model"]), **distribution(with_buckets(arm), ranks), **values)
    whole = estimate(setup)
    return {
        "parts": parts_of(whole.at_peak),
        "peakBytes": whole.peak_bytes,
        "hostBytes": whole.host_bytes,
        "diskBytes": whole.nvme_bytes["held"],
        "traffic": whole.traffic,
        "leastS": pytest.approx(operations(setup) / peak_flops_per_s(question["gpu"], precision == "fp32"), rel=1e-9),
    }


def test_drawn_questions_have_the_answers_of_python(page):
    draw = random.Random(SEED)
    asked = [question(draw) for _ in range(QUESTIONS)]
    script = """return arguments[0].map((question) =>
        armsOf(question).includes(question.arm) ? answerOf(question, question.arm) : null)"""
    for each, theirs in zip(asked, page.execute_script(script, asked), strict=True):
        ours = answer(each)
        assert (theirs and ours and {name: theirs[name] for name in ours}) == ours, f"{each}: {REMEDY}"


def shown(page) -> dict[str, list[str]]:
    """Return the cells of the page's table by arm."""
    script = """return Object.fromEntries([...document.querySelectorAll("#arms tbody tr")].map((row) =>
        [row.dataset.arm, [...row.cells].slice(1).map((cell) => cell.textContent)]))"""
    return page.execute_script(script)


def type_in(page, **values) -> None:
    """Fill the form in, as a reader does."""
    script = """const field = form.elements[arguments[0]];
        if (field.type === "checkbox") field.checked = arguments[1]; else field.value = arguments[1];
        field.dispatchEvent(new Event("input", { bubbles: true }))"""
    for name, value in values.items():
        page.execute_script(script, name, value)


def test_what_is_typed_is_answered_and_kept_in_the_address(page, monkeypatch, capsys):
    """The command that the page names gives the same numbers."""
    typed = {"model": "qwen2.5-7b", "gpus": 16, "gpu": "A100-80GB", "tokens": 1024, "rows": 2, "passes": 3}
    type_in(page, **typed, recomputes=True)
    before = shown(page)
    assert page.find_element("id", "sentence").text.startswith("On 16 x A100-80GB (85.9 GB each), ")
    monkeypatch.setattr("sys.argv", [*shlex.split(page.find_element("id", "command").text), "--json"])
    main()
    said = json.loads(capsys.readouterr().out)
    assert before["zero3"][1] == size(said["estimate"]["peak_bytes"])
    page.refresh()
    ready(page)
    assert shown(page) == before
