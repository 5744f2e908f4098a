"""The report's calculator: its page gives the numbers of `study estimate`."""

import gzip
import itertools
import json
import random
import shlex
import shutil

import pytest
from browser import needs_browser, opened_browser
from test_one_answer import QUESTIONS as ASKED
from test_one_answer import SLOW, answer_to

from study.cli import main
from study.cli.predictions import fits_on
from study.io.numbers import size
from study.machine.gpus import GPUS
from study.predictor.advice.settled import BUCKET_ELEMENTS
from study.predictor.estimate import estimate, operations
from study.predictor.timing.pace import peak_flops_per_s
from study.predictor.tracing.transformer import Transformer
from study.report import calculator
from study.report.calculator_tables import ARMS, FILE, GPUS_TRIED, setup_of
from study.report.templating import TEMPLATES
from study.spec import arms
from study.spec.optimizers import refusal
from study.spec.shapes import config_of

pytestmark = needs_browser
QUESTIONS, SEED = 60, 18
MODELS = json.loads(gzip.decompress(FILE.read_bytes()))["models"]
REMEDY = "the predictor has changed: run python -m study.report.calculator_tables"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page in a browser, once its tables are read."""
    folder = tmp_path_factory.mktemp("calculator")
    calculator.write(folder, {})
    for name in ("site.css", "site.js", calculator.SCRIPT):
        shutil.copyfile(TEMPLATES / name, folder / name)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1.5e6
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


def answer(question: dict) -> dict | None:
    """Return Python's answer; None where a library refuses the optimizer."""
    if refusal(arms.load_arm(question["arm"]), question["optimizer"], question["precision"]):
        return None
    values = {"micro_batch": question["rows"], "sequence": question["tokens"], "accumulation": question["passes"]}
    values |= {"checkpointing": question["recomputes"]}
    values |= {"optimizer": question["optimizer"]} if question["optimizer"] != "adamw" else {}
    model = Transformer.of(config_of(question["model"]), question["model"])
    precision = question["precision"]
    setup = setup_of(model, precision, question["arm"], question["gpus"], **values)
    whole = estimate(setup)
    return {
        "parts": [*calculator.parts_of(whole.at_peak).values()],
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


def test_without_a_script_the_page_shows_what_the_script_shows_first(page):
    drawn = {bar.name: bar.total for bar in calculator._bars().bars}
    assert drawn == {arm: cells[1] for arm, cells in shown(page).items()}
    assert list(drawn) == list(ARMS)


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


def test_as_many_rows_as_the_page_says_fit_and_one_more_does_not(page):
    type_in(page, model="llama3-8b", gpus=8, gpu="H100-80GB", tokens=2048, passes=1, recomputes=False)
    rows = int(shown(page)["zero3"][2])
    for more, fits in ((0, True), (1, False)):
        type_in(page, rows=rows + more)
        assert (shown(page)["zero3"][0] != "no") == fits


def test_a_number_that_cannot_be_is_named_and_nothing_is_shown_for_it(page):
    type_in(page, model="gpt-j-6b", tokens=2049)
    assert page.find_element("id", "problem").text == "This model reads at most 2048 tokens per row."
    type_in(page, tokens=1)
    assert page.find_element("id", "problem").text == "Tokens per row must be a whole number, at least 2."
    assert not page.find_element("id", "answer").is_displayed()
    type_in(page, tokens=2048)
    assert page.find_element("id", "answer").is_displayed()


def text(page, name: str) -> str:
    return page.execute_script("return document.getElementById(arguments[0]).textContent", name)


def test_rows_per_step_are_rows_per_pass_times_gpus_times_passes(page):
    type_in(page, model="llama3-8b", gpus=8, tokens=2048, passes=3, rows=2)
    value = "return form.elements[arguments[0]].value"
    assert page.execute_script(value, "batch") == "48"
    type_in(page, batch=64)
    assert page.execute_script(value, "passes") == "4"
    type_in(page, batch=65)
    assert text(page, "problem").endswith("passes of 2 rows on 8 GPUs: give a multiple of 16.")
    type_in(page, rows=1)
    assert [page.execute_script(value, "batch"), text(page, "problem")] == ["32", ""]


def test_a_pasted_config_chooses_its_model_or_says_what_is_missing(page):
    known = calculator.configs(MODELS)
    count = "return arguments[0].map(parametersOf)"
    counted = [MODELS[name]["parameters"] for name in known]
    assert page.execute_script(count, list(known.values())) == counted
    for name, config in known.items():
        published = config | {"architectures": ["A"], "torch_dtype": "bfloat16", "rope_theta": 1e6}
        type_in(page, config=json.dumps(published))
        assert text(page, "config-answer") == f"This model has the dimensions of {name}, which is now chosen."
        assert page.execute_script("return form.elements.model.value") == name
    llama = known["llama3-8b"]
    longer = llama | {"max_position_embeddings": 131072}
    type_in(page, config=json.dumps(longer | {"rope_scaling": {"rope_type": "llama3"}}))
    assert text(page, "config-answer").endswith("It is answered up to 8192 tokens per row.")
    asked = {"model": "llama3-8b", "rows": 2, "tokens": 128, "passes": 1, "gpus": 8, "gpu": "H100-80GB"}
    asked |= {"precision": "bf16", "recomputes": False, "optimizer": "adamw"}
    theirs = page.execute_script("return answerOf(arguments[0], 'zero3').peakBytes", asked)
    assert theirs == estimate(setup_of(Transformer.of(longer, "longer"), "bf16", "zero3", 8, sequence=128)).peak_bytes
    for config, problem in {
        "{": "This is not JSON: ",
        "[]": "the model_type here is not given.",
        '{"model_type": "falcon"}': "the model_type here is falcon.",
        json.dumps(llama | {"hidden_size": None}): "hidden_size, head_dim must be a whole number",
        json.dumps(llama | {"attention_bias": True, "new": 1}): "does not know what attention_bias, new changes.",
        json.dumps(llama | {"num_hidden_layers": 16}): "A llama with 4,540,469,248 parameters",
    }.items():
        type_in(page, config=config)
        assert problem in text(page, "config-answer")
        assert text(page, "config-answer").endswith("the folder with the config.json.") or config == "{"


def advised(question: dict) -> str | None:
    """Return the arm that the rule of `study advise` chooses if all arms take as long."""
    model = Transformer.of(config_of(question["model"]), question["model"])
    values = {"micro_batch": question["rows"], "sequence": question["tokens"], "accumulation": question["passes"]}
    alone = question["gpus"] == 1
    candidates = {}
    for name in ARMS if alone else ARMS[1:]:
        setup = setup_of(model, question["precision"], name, question["gpus"], **values)
        fits = fits_on(question["gpu"], estimate(setup).peak_bytes)
        if fits != "no":
            candidates[name] = (arms.load_arm(name).offload_optimizer != "none", fits == "only just")
    if "single" in candidates:
        candidates = {name: each for name, each in candidates.items() if name == "single" or each[0]}
    order = {name: (sum(each), arms.NAMES.index(name)) for name, each in candidates.items()}
    return min(order, key=order.__getitem__, default=None)


def test_the_arm_by_memory_alone_and_the_order_by_fit(page):
    draw = random.Random(SEED)
    chosen = set()
    for gpus, gpu, rows in itertools.product((1, 8, 64), ("H100-80GB", "RTX4090"), (1, 4)):
        each = question(draw) | {"gpus": gpus, "gpu": gpu, "rows": rows, "recomputes": False, "optimizer": "adamw"}
        each |= {"model": draw.choice(["gpt2-xl", "llama3-8b"]), "precision": "bf16_cast", "tokens": 512}
        script = """const answers = Object.keys(data.arms).map((name) => answerOf(arguments[0], name));
            return choiceOf(arguments[0], answers)?.name"""
        chosen.add(advised(each))
        assert page.execute_script(script, each) == advised(each), each
    assert len(chosen) > 2
    type_in(page, model="llama3-8b", gpus=8, gpu="A100-40GB", precision="bf16_cast", rows=1, tokens=2048, order="fit")
    cells = "return [...document.querySelectorAll('#arms tbody tr')].map((row) => row.cells[1].textContent)"
    fits = page.execute_script(cells)
    assert fits == sorted(fits, key=["yes", "just", "no"].index)
    assert len(set(fits)) > 1
    assert text(page, "choice").startswith("With these rows and by memory alone, ")
    type_in(page, order="arms")


@pytest.mark.parametrize("asked", [*ASKED, *SLOW])
def test_the_page_gives_the_answer_of_advise(asked, page, monkeypatch, capsys):
    """The arm, the peak and whether it fits, for what the page can be asked; else it says what it leaves out."""
    words = shlex.split(asked)
    given = dict(zip(words[::2], words[1::2], strict=True))
    advice = answer_to(f"advise {asked}", monkeypatch, capsys)
    choice, machine = advice["choice"], advice["question"]
    if given.get("--model") not in MODELS or machine["gpus"] not in GPUS_TRIED or "--lora-rank" in given:
        return
    type_in(page, model=given["--model"], gpus=machine["gpus"], gpu=machine["gpu"])
    kept = page.execute_script("return adviceOf(asked())")
    if kept and len(given) == 3:
        assert kept["words"] == advice["in_words"], REMEDY
        assert [line for line in kept["words"] if line not in text(page, "advice")] == []
    if choice is None or choice["arm"] not in ARMS or choice["checkpointing"] > 1:  # of some layers: no table has it
        return
    if choice["precision"] not in MODELS[given["--model"]]:  # qwen3-30b-a3b has a table of one precision
        option = f"#calculator select[name=precision] option[value={choice['precision']}]"
        assert not page.find_element("css selector", option).is_enabled()
        return
    type_in(page, precision=choice["precision"], tokens=machine["sequence"], recomputes=choice["checkpointing"])
    type_in(page, rows=choice["micro_batch"], passes=choice["accumulation"], optimizer="adamw")
    fits, peak, *_ = shown(page)[choice["arm"]]
    assert choice["bucket_elements"] in (None, BUCKET_ELEMENTS)
    assert peak == size(choice["peak_bytes"])
    assert fits == ("just" if choice["headroom_bytes"] < 0.1 * choice["peak_bytes"] else "yes")
    assert (kept is None) == ("may choose another" in text(page, "choice"))
    assert f"alone, {choice['arm']}: " in text(page, "choice") or "also knows the time of a step" in text(
        page, "choice"
    )


def test_the_settings_of_the_advice_are_shown(page):
    type_in(page, model="mistral-7b", gpus=8, gpu="H100-80GB", rows=3, recomputes=True)
    page.execute_script("document.querySelector('#advice button').click()")
    assert not page.find_element("css selector", "#advice button").is_displayed()
    assert shown(page)["zero1"][:2] == ["yes", "68.1 GB"]
    type_in(page, optimizer="sgd")
    assert "zero1_cpu" not in shown(page)
    assert "sgd does not go with zero1_cpu" in text(page, "choice")
    type_in(page, optimizer="adamw")


def test_the_page_alone_needs_no_other_file(page, tmp_path, monkeypatch):
    before = page.current_url
    monkeypatch.setattr("sys.argv", ["study", "report", "--calculator-only", str(tmp_path / "alone")])
    main()
    (path,) = (tmp_path / "alone").iterdir()
    page.get(path.as_uri())
    ready(page)
    assert set(shown(page)) == set(ARMS)
    assert page.execute_script("return getComputedStyle(document.querySelector('.stack')).display") == "grid"
    links = "return [...document.querySelectorAll('[src], [href]')].map((each) => each.outerHTML)"
    assert page.execute_script(links) == ['<link rel="icon" href="data:,">']
    page.get(before)
    ready(page)
