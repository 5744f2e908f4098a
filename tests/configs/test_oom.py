"""`study oom`: errors of public threads are named as their solutions name them, and sizes match a model's tensors."""

import io
import json
import re
import textwrap
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from study.cli import given
from study.configs.oom import changes, excess, fitting, reading, remedies
from study.configs.oom import training as trainings
from study.configs.oom.by_text import by_text, explained
from study.configs.oom.causes import Cause, causes
from study.configs.oom.causes import rows as cause_rows
from study.configs.oom.explain import DROPOUTS, explain, fits_no_tensor
from study.configs.oom.explain import _allocations as allocations
from study.configs.oom.means import framework, in_its_words, means
from study.configs.oom.recomputing import CLEARLY, with_recomputing
from study.configs.oom.releases import TRANSFORMERS
from study.configs.oom.said import stated
from study.configs.oom.training import Described, KnownTraining, predicted_memory
from study.configs.pasted import condense, memory
from study.configs.pasted.in_use import advised
from study.configs.pasted.read import read
from study.configs.pasted.said import levels
from study.core.errors import Stop
from study.core.fsdp_keys import KEYS as FSDP_KEYS
from study.core.library_defaults import known_libraries
from study.core.models.config import load
from study.core.shapes import SHAPES, config_of
from study.core.text import binary_size
from study.predict.front import FOLLOWED, Wanted, asked_for
from study.predict.trace import committed
from study.predict.trace.options import TraceOptions
from study.sweeps.launches import options
from tests.cases import for_each
from tests.cli.test_cli import in_this_process
from tests.conftest import ROOT, table

THREADS = table("configs/oom_threads.toml")["thread"]
MESSAGES = table("configs/oom_messages.toml")
NAMED_BY = {
    "tokens": ("oom-logits", "oom-attention", "oom-activations"),
    "states": ("oom-weights", "oom-optimizer"),
}
SCORED = ROOT / "reports/oom_threads.json"


def new(asked="7.83 GiB", free="4.11 GiB", allocated="72.50 GiB", unused="1.36 GiB") -> str:
    return MESSAGES["new"].format(asked=asked, free=free, allocated=allocated, unused=unused)


def test_a_log_may_come_through_a_pipe(monkeypatch):
    text = b"half a letter \xc3"
    monkeypatch.setattr(condense.sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert given.whole_text(*given.split(("-",))) == "half a letter \ufffd"


def cause_of(id: str) -> Cause:
    row = cause_rows()[id]
    return Cause(id, row["sentence"], 5, (), in_its_words(row["remedy"], {}), row["apart"])


def ids(text: str, model: str | None = None, **described) -> list[str]:
    causes, _ = explain(reading.find(text), Wanted(model=model), Described(**described))
    return [cause.id for cause in causes]


def scored(thread: dict) -> dict:
    """A thread, the cause that is listed first, and whether that is what the thread names."""
    named = next(iter(ids(thread["text"], **thread.get("settings", {}))), None)
    about = {name: thread[name] for name in ("id", "half", "url", "cause", "why")}
    return about | {"named": named, "hit": named in NAMED_BY.get(thread["cause"], (thread["cause"],))}


def test_threads_are_named_as_their_solutions_name_them(request):
    """The report shows the committed answers, so they must be those of today's matcher."""
    rows = [scored(thread) for thread in THREADS]
    if request.config.getoption("--refresh-golden"):
        SCORED.write_text(json.dumps(rows, indent=1) + "\n")
    assert rows == json.loads(SCORED.read_text())
    assert sum(row["hit"] for row in rows) == 22


def test_every_size_of_a_message_is_read():
    seen = reading.find("noise\n" + new("29.39 GiB"))
    assert seen.asked.low < 29.39 * 2**30 < seen.asked.high
    sizes = [seen.total, seen.free, seen.allocated, seen.unallocated, seen.outside]
    assert [round(size / 2**30, 2) for size in sizes] == [79.25, 4.11, 72.5, 1.36, 1.28]
    host = reading.find("DefaultCPUAllocator: not enough memory: you tried to allocate 77 bytes.").asked
    assert (host.low, host.high) == (77, 77), "host memory is not asked for in pieces, as a GPU's is"
    old = reading.find(MESSAGES["old"])
    assert (old.unallocated, old.asked.high) == (1.5 * 2**30, 10 * 2**20)  # 20 MiB are asked for 1 to 10


@pytest.mark.parametrize("eighths", [9, 11, 13, 15, 37])
def test_a_size_in_the_middle_between_two_digits_is_read(eighths):
    """4.625 GiB are printed as 4.62: the tokens of powers of two make many such sizes."""
    size_bytes = eighths * 2**27
    assert reading.find(new(f"{size_bytes / 2**30:.2f} GiB")).asked.fits(size_bytes)


def message_of_contributing() -> list[dict]:
    """What CONTRIBUTING.md shows to who was told a wrong cause."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"^    \[\[message\]\]\n(?:    .+\n)+", text, re.MULTILINE)[0]
    return tomllib.loads(textwrap.dedent(block))["message"]


@for_each("case", [*MESSAGES["message"], *message_of_contributing()])
def test_each_kind_of_message_has_its_cause(case):
    text = case.get("text", "") + (new(*case["sizes"]) if "sizes" in case else "")
    described = Described(**case.get("settings", {}))
    causes, _ = explain(reading.find(text), Wanted(model=case.get("model")), described)
    assert (causes[0].id, causes[0].is_likely) == (case["cause"], case["likely"])
    assert case.get("says", "") in str(causes)


CUTS = [(case["cause"], case["frames"][at : at + 1]) for case in MESSAGES["cut"] for at in range(len(case["frames"]))]
CUTS += [(case["cause"], case["frames"]) for case in MESSAGES["cut"]]


@for_each("has_code", [True, False])
@for_each(("cause", "frames"), CUTS, ids=lambda each: each if isinstance(each, str) else each[-1][1])
def test_where_no_activation_is_alive_none_is_named(cause, frames, has_code):
    """Of a traceback that is cut below any of its frames, as pasted ones often are, and one without its sources."""
    lines = [
        f'  File "{path}", line 3, in {function}\n' + f"    {code}\n" * has_code for path, function, code in frames
    ]
    text = (
        "Traceback (most recent call last):\n" + "".join(lines) + new("12.55 GiB", "12.00 GiB", "64.02 GiB", "1.00 GiB")
    )
    given = Described(arm="zero2", ranks=8, micro_batch=4, sequence=4096)
    causes, known = explained(read(text), reading.find(text), Wanted(model="llama3-8b"), given)
    assert (causes[0].id, causes[0].is_likely, known.inferred) == (cause, True, "")


@pytest.mark.parametrize(("asked", "arm", "ranks", "cause", "what"), MESSAGES["sizes"])
def test_sizes_are_matched_with_the_tensors_of_a_training(asked, arm, ranks, cause, what):
    described = Described(arm=arm, ranks=ranks, micro_batch=4, sequence=4096)
    causes, _ = explain(reading.find(new(asked)), Wanted(model="llama3-8b"), described)
    first, *_ = [each for each in causes if each.id != "oom-states"]  # of some of these all states nearly fill the GPU
    assert (first.id, first.is_likely) == (cause, arm != "ddp")
    assert what in first.what


@for_each("kernel", [None, "sdpa", "eager", "flash2"])
@for_each("precision", ["bf16", "fp32"])
@for_each("model", SHAPES)
def test_each_tensor_of_attention_that_a_size_may_name_is_made(model, precision, kernel):
    """Scores by eager attention alone, a byte for each by dropout alone, as transformers' config and a trace say."""
    tokens = 53  # in no other size by chance, as powers of two are
    given = Described(arm="ddp", ranks=8, micro_batch=2, sequence=tokens, precision=precision, attention_kernel=kernel)
    training = KnownTraining.of(Wanted(model=model), given)
    assert training.model
    named = [each for each in allocations(training, reading.find(new())) if each.cause == "oom-attention"]
    pairs = 2 * tokens**2
    of_heads = {int(each.elements / pairs * width) for each in named for width in each.widths if "heads" in each.words}
    taken = training.model.attention_taken(kernel or "sdpa")
    config = load(model)
    heads = config.num_attention_heads
    drops = any(getattr(config, name, 0) for name in DROPOUTS)
    element_bytes = ((4,) if precision == "fp32" else (4, 2)) + ((1,) if drops else ())
    assert of_heads == ({heads * width for width in element_bytes} if taken == "eager" else set())
    assert any("heads" not in each.words for each in named) == (taken == "eager" or kernel != "flash2")
    asked = TraceOptions(sequence=tokens, precision=precision, attention=taken, cuda=True)
    if tape := committed.tape(training.model.member, asked, 2):
        made = {entry[1] / pairs for entry in tape if entry[0] == "made"}
        assert ({heads * width for width in (4, 2, 1)} - {4, 2, 1}) & made == of_heads - {4, 2, 1}  # the mask's


def test_no_tensor_that_the_model_cannot_make_is_named():
    """Nor an optimizer's flat vector with DDP, nor 16 bits where all is in fp32. A frame that names scores does."""
    sizes = {"arm": "zero2", "ranks": 8, "micro_batch": 1, "sequence": 4096}
    assert "oom-attention" not in ids(new("512.00 MiB"), "llama3-8b", **sizes)
    assert "oom-attention" not in ids(new("1.00 GiB"), "llama3-8b", **sizes)
    frame = "Traceback (most recent call last):\n  attn_weights = torch.matmul(q, k)\n"
    (first, *_), _ = explain(reading.find(frame + new("1.00 GiB")), Wanted(model="llama3-8b"), Described(**sizes))
    assert "1 sequence x 32 heads x 4,096 x 4,096 tokens x 2 bytes" in first.what
    assert "oom-optimizer" not in ids(new("29.92 GiB"), "llama3-8b", **sizes | {"arm": "ddp"})
    assert "oom-logits" in ids(new("1002.00 MiB"), "llama3-8b", **sizes)
    assert "oom-logits" not in ids(new("1002.00 MiB"), "llama3-8b", **sizes, precision="fp32")


def test_stages_that_take_the_place_of_ddp_have_the_16_bits_of_deepspeed(monkeypatch, capsys):
    """Of Accelerate's bf16, which is autocast with DDP. Who says no precision is told which is taken."""
    ask = "oom 'Tried to allocate 512.00 MiB' --model llama3-8b --arm ddp --ranks 8 --gpu H100 --micro-batch 1 "
    in_this_process(monkeypatch, f"{ask} --checkpointing")
    usual = " ".join(capsys.readouterr().out.split())
    assert "--precision bf16 (usual with this arm)" in usual
    in_this_process(monkeypatch, f"{ask} --checkpointing --precision bf16")
    asked = " ".join(capsys.readouterr().out.split())
    assert re.findall(r"--arm zero\d \([^)]+\)", usual) == re.findall(r"--arm zero\d \([^)]+\)", asked) != []


def test_two_causes_of_one_size_are_no_likely_ones():
    both = dict.fromkeys(("oom-optimizer", "oom-frozen"), "29.92 GiB = ")
    error = reading.find(new("29.92 GiB"))
    assert not any(each.is_likely for each in causes(error, both, False, ""))
    assert causes(error, {"oom-frozen": "29.92 GiB = "}, False, "")[0].is_likely


@pytest.mark.parametrize(
    ("optimizer", "said", "is_first"),
    [(None, {}, True), (None, {"gpu": "H100"}, True), ("sgd", {}, True), ("adafactor", {}, False)],
)
def test_states_that_exceed_the_gpu_come_first(optimizer, said, is_first):
    """DDP of Llama-3-8B: 120 GiB with AdamW, 90 with SGD, 60 with Adafactor. Whatever has the size."""
    message = "CUDA out of memory. Tried to allocate 7.83 GiB." if said else new("7.83 GiB", allocated="50.00 GiB")
    given = Described(arm="ddp", ranks=8, micro_batch=4, sequence=4096, optimizer=optimizer, precision="bf16", **said)
    (first, *_), _ = explain(reading.find(message), Wanted(model="llama3-8b"), given)
    assert (first.id == "oom-states") is is_first, first


@pytest.mark.parametrize(
    ("asked", "changes", "is_said"),
    [
        ("7.83 GiB", {}, True),
        ("2.32 GiB", {}, False),  # the logits: 4 x 2,048 x 152,064 in 16 bits
        ("7.83 GiB", {"micro_batch": None}, False),  # too little is known
        ("7.83 GiB", {"arm": None}, False),
        ("2.00 MiB", {}, False),  # the memory was full before it
    ],
)
def test_a_size_of_no_known_tensor_is_told(asked, changes, is_said):
    given = {"arm": "zero3", "ranks": 8, "micro_batch": 4, "sequence": 2048} | changes
    error = reading.find(new(asked))
    _, known = explain(error, Wanted(model="qwen2.5-7b"), Described(**given))
    assert ("the size of no tensor of qwen2.5-7b" in fits_no_tensor(error, known)) == is_said


@pytest.mark.parametrize("case", MESSAGES["of_model"], ids=lambda case: case["cause"])
def test_sizes_that_the_model_alone_has(case):
    wanted = Wanted(model="llama3-8b", lora_rank=case.get("lora_rank"))
    causes, _ = explain(reading.find(new(case["asked"])), wanted, Described(**case["settings"]))
    is_guess = case["cause"] == "oom-padded"
    assert (causes[0].id, causes[0].is_likely) == (case["cause"], not is_guess)
    assert case["says"] in causes[0].what
    assert ("oom-padded" in [cause.id for cause in causes]) == is_guess


@pytest.mark.parametrize(
    ("arm", "has_both"), [("ddp", False), ("zero1", False), ("zero2", False), (None, True), ("fsdp2", True)]
)
def test_a_size_of_logits_and_of_both_matrices_decides_nothing(arm, has_both):
    """2 x 4,096 is twice the width of the usual 7 billion, and a usual length. A bucket has no two such matrices."""
    causes, _ = explain(reading.find(new("3.91 GiB")), Wanted(model="llama3-8b"), Described(arm=arm))
    found = [cause.id for cause in causes if cause.id in ("oom-padded", "oom-embeddings")]
    assert found == ["oom-padded", "oom-embeddings"][: 1 + has_both]
    assert not any(cause.is_likely for cause in causes if cause.id in found)


def test_the_guide_has_another_process_with_the_sign_and_the_remedy_of_oom():
    guide = (ROOT / "GUIDE.md").read_text()
    sign, remedy = re.search(r"\| another process \| \"(.+?)\";.*?\| (.+?) \|", guide).groups()
    message = new(free="20.00 MiB", allocated="60.00 GiB").replace("Including", f"{sign}. Including")
    (first, *_), _ = explain(reading.find(message), Wanted(), Described())
    assert first.id == "oom-other-process"
    assert "choose another GPU" in first.remedy
    assert "choose another GPU" in remedy


def test_a_flag_wins_over_the_vocabulary_of_the_model():
    """Some add words to a model's."""
    described = Described(vocabulary=130_000, micro_batch=4, sequence=4096)
    causes, _ = explain(reading.find(new("7.93 GiB")), Wanted(model="llama3-8b"), described)
    assert causes[0].what.startswith("7.93 GiB = 16,384 tokens x 130,000 x 4 bytes")


def test_states_that_nearly_fill_the_gpu_come_first(tmp_path):
    text = (
        "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 39.59 GiB of which 20.00 MiB is free."
    )
    wanted = Wanted(model="qwen2.5-7b")
    (first, *_), _ = explain(reading.find(text.format("38.00 MiB")), wanted, Described(arm="zero2", ranks=4))
    assert first.what.startswith("the model states: zero2 on 4 ranks holds 39 GiB before any activation")
    config = tmp_path / "swift.yaml"
    config.write_text("{tuner_type: lora, learning_rate: 1, optim: adamw_torch, deepspeed: zero2}")
    of_config = Described(config=config, ranks=4)
    others = [Described(arm=arm, ranks=ranks) for arm, ranks in (("zero2", 64), ("zero2_cpu", 4), ("zero2", None))]
    for training in (of_config, *others):
        causes, _ = explain(reading.find(text.format("38.00 MiB")), wanted, training)
        assert "oom-states" not in [each.id for each in causes]
    # --- less is allocated than they hold
    said = text.format("38.00 MiB") + " Of the allocated memory 30.00 GiB is allocated by PyTorch"
    assert ids(said, "qwen2.5-7b", arm="zero2", ranks=4)[0] != "oom-states"
    # --- whole, they are no part of what the arm divides
    (first, *_), _ = explain(reading.find(text.format("14.19 GiB")), wanted, Described(arm="zero2", ranks=64))
    assert (first.id, "7,615,616,512 parameters x 2 bytes" in first.what) == ("oom-weights", True)


def test_a_config_says_how_the_training_is_distributed_and_a_flag_wins(tmp_path):
    config = tmp_path / "ds.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 250_000_000}
    config.write_text(json.dumps({"zero_optimization": zero, "train_micro_batch_size_per_gpu": 4}))
    bucket = reading.find(new(f"{250_000_000 * 4 / 2**20:.2f} MiB"))
    causes, training = explain(bucket, Wanted(model="llama3-8b"), Described(config=config, ranks=4))
    here = {"arm": "zero2_cpu", "config": config, "buckets": 250_000_000}
    assert training.described == Described(**here, ranks=4, micro_batch=4)
    assert causes[0].id == "oom-buckets"
    _, training = explain(bucket, Wanted(model="llama3-8b"), Described(config=config, micro_batch=2))
    assert training.described == Described(**here, micro_batch=2)


@pytest.mark.parametrize("bucket", ["2e9", "2.0e9", "2000000000", "2000000000.0", '"2e9"'])
def test_accumulation_and_buckets_of_a_config_are_predicted_as_estimate_does(bucket, tmp_path, monkeypatch, capsys):
    """With a second micro-batch stage 2 holds its gradients beside the logits; a bucket is as large in any spelling."""
    config = tmp_path / "ds.json"
    config.write_text(
        f'{{"bf16": {{"enabled": true}}, "zero_optimization": {{"stage": 2, "reduce_bucket_size": {bucket}}}, '
        '"gradient_accumulation_steps": 8, "train_micro_batch_size_per_gpu": 2}'
    )
    log = tmp_path / "train.log"
    log.write_text(new("3.74 GiB"))
    shape = "--model llama3-8b --ranks 8 --sequence 2048 --checkpointing"
    is_text = bucket.startswith('"')  # which DeepSpeed refuses
    assert in_this_process(monkeypatch, f"estimate --config {config} {shape}") == (1 if is_text else None)
    needs = re.search(r"needs [\d.]+ GB \(([\d.]+ GiB)\)", " ".join(capsys.readouterr().out.split()))[1]
    for files in (f"{log} {config}", f"{log} --config {config}"):
        assert in_this_process(monkeypatch, f"oom {files} --gpu A100-40GB {shape}") in (None, 0)
        assert f"a rank needs {needs} at the peak" in " ".join(capsys.readouterr().out.split())


def test_a_message_ends_after_a_word():
    message = new() + " If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF" * 9
    line = reading.find(message).line
    assert len(line) <= reading.LONGEST_LINE
    assert line.startswith(new())
    assert line.endswith(" ...")
    assert set(line.removesuffix(" ...").split()) <= set(message.split())


def test_values_of_a_config_are_converted_or_said_to_be_none(tmp_path, capsys):
    config = tmp_path / "mine.json"

    def taken(value: object) -> int | None:
        config.write_text(json.dumps({"per_device_train_batch_size": value, "output_dir": "x"}))
        return explain(reading.find(new()), Wanted(), Described(config=config))[1].described.micro_batch

    assert [taken(value) for value in ("8", 8, "auto")] == [8, 8, None]
    for value in ("eight", True, -8, 8.5, 0, [1], {"a": 1}):
        assert taken(value) is None
        assert "per_device_train_batch_size must be a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("case", MESSAGES["shared"], ids=lambda case: case["asked"])
def test_a_state_that_other_ranks_share_is_said(case):
    """opt-1.3b has 1,315,758,080 parameters: 4.90 GiB in fp32, 2.45 on each of two ranks."""
    clue = "  File \"torch/optim/adam.py\", line 4, in _init_group\n    state['exp_avg_sq'] = torch.zeros_like(p)\n"
    ranks, other = case["ranks"], case.get("other")
    error = reading.find("Traceback (most recent call last):\n" + clue + new(case["asked"]))
    wanted, given = Wanted(model="opt-1.3b"), Described(arm="zero2", ranks=ranks, micro_batch=1)
    causes, training = explain(error, wanted, given)
    assert causes[0].id == "oom-optimizer"
    guess = next((cause for cause in causes if f"and not by {ranks}" in cause.what), None)
    assert (guess and guess.id) == case.get("cause")
    assert guess is None or not (guess.is_likely or guess is causes[0])
    said = fitting.predicted(error, training, causes[0]).words
    assert (f"states shared by {other}: did the launcher start {ranks}?" in said) == (other is not None)


def test_an_error_in_quotes_may_be_longer_than_the_name_of_a_file():
    for error in ("x" * 255 + " " + new(), "CUDA out of memory. " * 14):
        assert given.whole_text(*given.split((error,))) == error


def test_who_tells_of_full_memory_without_its_message_gets_the_answer_of_diagnose(monkeypatch, capsys):
    text = "OOM while saving the checkpoint, training itself works. 8xH800"
    for command in ("oom", "diagnose"):
        assert not in_this_process(monkeypatch, f"{command} {text}")
        assert "[oom-while-saving]" in capsys.readouterr().out
    assert in_this_process(monkeypatch, "oom all is well here")
    assert "no error about memory" in capsys.readouterr().err


def test_nonsense_and_long_logs_are_one_sentence(tmp_path):
    for text in ["hello\0world " * 1000, *MESSAGES["refused"]]:
        with pytest.raises(Stop, match="no error about memory"):
            reading.find(text)
    log = tmp_path / "train.log"
    with log.open("wb") as file:
        file.truncate(200 * 10**6)
    with pytest.raises(Stop, match="is no text"):
        given.split((str(log),))
    log.write_text("a line of a training\n" * 10**6)
    with pytest.raises(Stop, match="no error about memory"):
        reading.find(given.whole_text(*given.split((str(log),))))


def sizes_of(model: str) -> dict[str, float]:
    """Messages' sizes of what a training of a model has: a weight, the embedding and the head, all weights."""
    tensors = asked_for(Wanted(model=model), 1).tensors
    embedding = max(tensor.elements for tensor in tensors)
    elements = {"weight": embedding, "embedding and head": 2 * embedding, "all": sum(each.elements for each in tensors)}
    return {f"{what} x {width}": number * width / 2**30 for what, number in elements.items() for width in (2, 4)}


NEEDS_A_GRADIENT = {"oom-embeddings", "oom-weights"}


@for_each("arm", ["single", "ddp", "zero1", "zero2", "zero3", "fsdp2", None])
@for_each("model", ["llama3-8b", "qwen2.5-7b"])
def test_a_frozen_weight_has_no_gradient_and_no_moment(model, arm):
    """Nor is it gathered, where each rank has it whole. Who trains all weights hears of gradients."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for gibibytes in sizes_of(model).values():
        message = reading.find(new(f"{gibibytes:.2f} GiB"))
        for frozen in found:
            wanted = Wanted(model=model, lora_rank=16 if frozen else None)
            causes, _ = explain(message, wanted, Described(arm=arm, ranks=4, micro_batch=1, sequence=512))
            found[frozen] |= {each.id for each in causes}
            assert not (frozen and "train adapters" in str(causes))
    assert NEEDS_A_GRADIENT & found[False]
    assert not NEEDS_A_GRADIENT & found[True]
    assert ("oom-gather" in found[True]) == (arm in ("zero3", "fsdp2"))


def test_a_config_with_adapters_is_as_a_rank_of_adapters(tmp_path):
    config = tmp_path / "lf.yaml"
    config.write_text("{finetuning_type: lora, learning_rate: 1, deepspeed: ds.json, output_dir: x}")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    text = "model = accelerator.prepare(\n" + new("1.96 GiB")
    causes, _ = explain(reading.find(text), Wanted(model="llama3-8b"), Described(config=config, ranks=4))
    assert not NEEDS_A_GRADIENT & {each.id for each in causes}
    assert causes[0].id == "oom-frozen-weight"


SMALL_CARD = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of {} GiB of which 1 GiB is free."
)


@pytest.mark.parametrize(
    ("total", "settings", "says"),
    [
        (
            39.49,
            {"arm": "zero2", "micro_batch": 2},
            "would fit, the mildest first (* shrinks the activations): "
            "--micro-batch 1 and twice the accumulation (29.4 GiB)*; activations ",
        ),
        (39.49, {"arm": "zero2", "micro_batch": 1}, "That fits: something that was not given takes the rest"),
        (
            16.0,
            {"arm": "zero2", "micro_batch": 1, "checkpointing": True},
            "would fit, the mildest first: --arm zero3 (",
        ),
        (4.0, {"arm": "zero2", "micro_batch": 1}, "No single change that helps with it would fit"),
        (39.49, {"arm": "zero3", "micro_batch": 4, "checkpointing": True}, "and activations recomputed: a rank needs "),
    ],
)
def test_the_changes_that_would_fit_are_those_of_the_predictor(total, settings, says):
    given = Described(ranks=4, sequence=2048, **settings)
    error = reading.find(SMALL_CARD.format(total))
    training = KnownTraining.of(Wanted(model="llama3-8b", lora_rank=16), given)
    causes, _ = explain(reading.find(new("7.90 GiB")), Wanted(), Described())
    assert causes[0].id == "oom-activations"
    assert says in fitting.predicted(error, training, causes[0]).words
    assert fitting.predicted(error, KnownTraining.of(Wanted(), given), causes[0]).words == ""
    of_host = fitting.predicted(reading.find("exit code 137"), training, causes[0]).words
    assert of_host.startswith("Predicted for the host of a node with 4 ranks: ")
    assert "would fit" not in of_host, "no GPU"


@pytest.mark.parametrize(
    ("allocated", "unallocated", "free", "says"),
    [
        (20, 15, 0.5, "That fits, but 15 GiB are reserved by PyTorch and not used."),
        (20, 1, 0.5, "That fits, but 18 GiB are outside PyTorch: other processes, NCCL, a CUDA context."),
        (37, 1, 0.5, " GiB more in tensors: something that was not given takes them, or differs."),
        (16, 0.5, 22.5, "That fits: something that was not given takes the rest, or differs."),
    ],
)
def test_who_takes_what_was_predicted_to_be_free_is_named_with_its_size(allocated, unallocated, free, says):
    text = (
        f"CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 39.50 GiB of which {free:.2f} "
        f"GiB is free. Of the allocated memory {allocated:.2f} GiB is allocated by PyTorch, and {unallocated:.2f} GiB "
        "is reserved by PyTorch but unallocated."
    )
    given = Described(arm="zero2", ranks=4, micro_batch=1, sequence=2048, checkpointing=True)
    error = reading.find(text)
    causes, training = explain(error, Wanted(model="llama3-8b", lora_rank=16), given)
    assert says in fitting.predicted(error, training, causes[0]).words


@pytest.mark.parametrize("model", ["llama3-8b", "qwen2.5-7b", "opt-1.3b"])
def test_a_loss_in_pieces_is_tried_with_its_predicted_peak(model):
    """Nobody who has it is told to take it, and a config with Liger's kernels has it."""
    given = Described(arm="zero3", ranks=8, micro_batch=4, sequence=2048, checkpointing=True)
    wanted = Wanted(model=model)
    words = {change.words: change.training for change in changes.single_changes(given)}
    chunked = words["--chunked-loss, as by Liger"]
    assert chunked == replace(given, chunked_loss=True)
    assert trainings.predicted_memory(wanted, chunked).peak_bytes < trainings.predicted_memory(wanted, given).peak_bytes
    assert "--chunked-loss, as by Liger" not in {change.words for change in changes.single_changes(chunked)}


SDPA = "`attn_implementation`: sdpa"


@pytest.mark.parametrize("arm", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("optimizer", ["foreach", "single_tensor"])
def test_kernels_that_make_less_are_tried_with_the_number_of_an_estimate(arm, optimizer, monkeypatch, capsys):
    given = Described(arm=arm, ranks=4, micro_batch=2, sequence=256, optimizer=optimizer, attention_kernel="eager")
    wanted = Wanted(model="llama-micro")
    words = {change.words: change for change in changes.single_changes(given, asked_for(wanted, 256))}
    flags = f"estimate --model llama-micro --arm {arm} --gpus 4 --micro-batch 2 --sequence 256 --gpu H100 --json"
    peaks = []
    for change, changed in (
        (words[SDPA], f"--optimizer {optimizer}"),
        (words[changes.FUSED], "--attention-kernel eager"),
    ):
        assert in_this_process(monkeypatch, f"{flags} {changed}") is None
        peaks.append(json.loads(capsys.readouterr().out)["estimate"]["peak_bytes"])
        assert trainings.predicted_memory(wanted, change.training).peak_bytes == peaks[-1]
    assert peaks[0] < trainings.predicted_memory(wanted, given).peak_bytes, "the scores are most of it"
    assert peaks[0] != peaks[1]


@pytest.mark.parametrize("arm", ["ddp", "zero3", "fsdp2"])
def test_a_fused_update_is_named_where_only_the_roots_of_all_moments_are_too_much(arm):
    given = Described(arm=arm, ranks=4, micro_batch=1, sequence=16, checkpointing=True, optimizer="foreach")
    wanted = Wanted(model="llama3.2-1b")
    needs = trainings.predicted_memory(wanted, given).peak_bytes
    total = f"{(needs / 2**30 + 1.87) / 0.95:.2f} GiB"
    error = reading.find(f"CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of {total}.")
    causes, training = explain(error, wanted, given)
    words = fitting.predicted(error, training, causes[0]).words
    fused = trainings.predicted_memory(wanted, replace(given, optimizer="adamw")).peak_bytes
    assert f"{changes.FUSED} ({binary_size(fused)}" in words


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("llama-micro", Described(arm="zero3")),
        ("llama-micro", Described(arm="zero3", optimizer="adamw", attention_kernel="flash2")),
        ("llama-micro", Described(arm="zero2_cpu", optimizer="single_tensor")),
        ("llama-micro", Described(arm="zero3", homes=("cpu", "none"), optimizer="foreach")),
        ("deberta-v2-xlarge", Described(arm="ddp", attention_kernel="eager")),
    ],
)
def test_no_kernel_is_named_that_is_in_use_or_that_nobody_has(model, given):
    told = {change.words for change in changes.single_changes(given, asked_for(Wanted(model=model), 16))}
    assert told.isdisjoint({SDPA, "`attn_implementation`: flash_attention_2", changes.FUSED})


def test_gemma_2_is_told_the_one_fused_attention_that_it_has():
    given = Described(arm="ddp", attention_kernel="sdpa")
    first, *_ = changes.single_changes(given, asked_for(Wanted(model="gemma2-9b"), 16))
    assert (first.words, first.training.attention_kernel) == ("`attn_implementation`: flash_attention_2", "flash2")


@pytest.mark.parametrize("key", ["use_liger_kernel", "enable_liger_kernel", "liger"])
def test_a_config_or_a_text_with_ligers_kernels_computes_the_loss_in_pieces(key, tmp_path):
    config = tmp_path / "args.yaml"
    for written, taken in (("true", True), ("false", None)):
        config.write_text(f"{{output_dir: x, learning_rate: 1, {key}: {written}}}")
        assert KnownTraining.of(Wanted(), Described(config=config)).described.chunked_loss is taken
        assert known(f"{key}: {written}").described.chunked_loss is taken
        assert known(f"{key}: true", given=Described(config=config)).described.chunked_loss is taken, "it wins"


@pytest.mark.parametrize("id", [id for id, row in cause_rows().items() if "{in_parts}" in row["remedy"]])
@pytest.mark.parametrize("trainer", means()["in_parts"])
def test_a_loss_in_parts_is_told_in_the_words_of_the_trainer(id, trainer):
    remedy = in_its_words(cause_rows()[id]["remedy"], {"trainer": trainer, "stage": 3})
    assert f"compute the loss in parts{means()['in_parts'][trainer]}, or" in remedy
    assert trainer == "otherwise" or read(remedy).said["chunked_loss"], "who does so is heard"


OF_TORCH_AS_WELL = {"cpu_offload", "pin_memory"}
DEEPSPEEDS = {name for names in known_libraries()["deepspeed"]["sections"].values() for name in names if "_" in name}
# What each framework alone has, and whose words are no other's advice.
KEYS_OF = {
    "DeepSpeed": "|".join(DEEPSPEEDS - OF_TORCH_AS_WELL)
    + r"|zero_to_fp32|zero\.Init|GatheredParameters|nvme_path|stage3_\w+",
    "FSDP1": "|".join(
        [
            *(name for name, key in FSDP_KEYS.items() if key.versions == ("1",)),
            r"ShardingStrategy|StateDictType|FullStateDictConfig|summon_full_params|CPUOffload\b|param_init_fn",
        ]
    ),
    "FSDP2": "(?:fsdp_)?reshard_after_forward|fully_shard|CPUOffloadPolicy|StateDictOptions|full_tensor",
    "DDP": "bucket_cap_mb|gradient_as_bucket_view",
}
OF_ANY_FSDP = "|".join(FSDP_KEYS)


@for_each("plain", [False, True])
@for_each("stage", [0, 1, 2, 3, "FSDP1", "FSDP2", "DDP"])
@for_each("id", cause_rows())
def test_a_remedy_names_keys_of_the_framework_that_is_in_use_alone(id, stage, plain):
    said = {"stage": stage, "plain": plain, "trainer": "own" if plain else "trainer"}
    remedy = in_its_words(cause_rows()[id]["remedy"], said)
    assert len(remedy) > 10
    assert "{" not in remedy, "all means are said"
    used = framework(said)
    for other, keys in KEYS_OF.items():
        assert other == used or not re.search(rf"\b(?:{keys})\b", remedy)
    if "FSDP" not in used or plain:
        assert not re.search(rf"\b(?:{OF_ANY_FSDP})\b", remedy)


GATHER = (
    '  File "torch/x.py", line 1, in unshard\n    unsharded_flat_param = self._alloc_padded_unsharded_flat_param()\n'
)
REDUCER = '  File "nn/parallel/distributed.py", line 1300, in _ddp_init_helper\n    self.reducer = dist.Reducer(\n'


@pytest.mark.parametrize(
    ("before", "frame", "config", "flags", "says"),
    [
        ("", GATHER, "", {"arm": "zero3"}, "lower `stage3_max_reuse_distance`"),
        ("", GATHER, "", {"arm": "fsdp2"}, "(`fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP`);"),
        ("", GATHER, "", {"arm": "hsdp"}, "(`fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP`);"),
        ("", GATHER, '{"version": 2, "xla": false}', {}, "(`fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP`);"),
        ("", GATHER, '{"version": 1}', {}, "`fsdp_backward_prefetch: NO_PREFETCH`"),
        ("FullyShardedDataParallel(model)\n", GATHER, "", {}, "(`auto_wrap_policy`)"),
        ("fully_shard(model)\n", GATHER, "", {}, "call `fully_shard` on each layer"),
        ("--deepspeed ds.json\n", GATHER, "", {}, "lower `stage3_max_reuse_distance`"),
        ("", REDUCER, "", {}, "`gradient_as_bucket_view=True`"),
    ],
)
def test_what_is_known_says_whose_keys_a_remedy_names(before, frame, config, flags, says, tmp_path):
    if config:
        (tmp_path / "fsdp.json").write_text(config)
        flags = {"config": tmp_path / "fsdp.json"}
    pasted = read(f"{before}Traceback (most recent call last):\n{frame}{new('9.88 GiB')}")
    error = reading.find(pasted.text)
    causes, training = explained(pasted, error, Wanted(), Described(**flags))
    (first, *_) = remedies.with_remedies(error, training, causes, fitting.WhatFits(), pasted)
    assert says in first.remedy


@pytest.mark.parametrize("name", means())
def test_what_a_remedy_has_in_braces_is_said_of_all_frameworks(name):
    row = means()[name]
    plain = {f"{each} plain" for each in KEYS_OF}
    assert row.keys() <= {"otherwise", *KEYS_OF, *plain, *(each.value for each in levels()["trainer"])}
    used = " ".join(each["remedy"] for each in cause_rows().values())
    assert f"{{{name}}}" in used


FULL = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of which 1.00 GiB is free. "
    "Of the allocated memory {allocated} is allocated by PyTorch"
)


@pytest.mark.parametrize(
    ("asked", "allocated", "settings", "says"),
    [
        # The logits come after all layers, which would have kept 94 GiB.
        ("7.83 GiB", "33.00 GiB", {}, True),
        ("3.91 GiB", "70.00 GiB", {"micro_batch": 2}, False),  # more than a rank needs that recomputes
        ("7.83 GiB", "74.00 GiB", {}, None),  # the layers alone would have kept 94, and it is more than the other needs
        ("7.83 GiB", "33.00 GiB", {"micro_batch": 2}, None),
        ("448.00 MiB", "70.00 GiB", {}, False),
        ("448.00 MiB", "38.00 GiB", {}, None),  # a layer's: the pass may be anywhere
        ("448.00 MiB", "300.00 GiB", {}, None),  # neither
        ("7.83 GiB", "33.00 GiB", {"checkpointing": False}, False),  # a flag wins
        ("7.83 GiB", "33.00 GiB", {"sequence": None}, None),
        ("7.83 GiB", "33.00 GiB", {"ranks": None}, None),
        ("7.83 GiB", "1.00 GiB", {}, None),  # not even the weights are there
    ],
)
def test_the_numbers_of_a_message_say_whether_activations_are_recomputed(asked, allocated, settings, says):
    given = Described(**{"arm": "zero3", "ranks": 8, "micro_batch": 4, "sequence": 4096} | settings)
    error = reading.find(FULL.format(asked=asked, allocated=allocated, total="79.25 GiB"))
    causes, training = explain(error, Wanted(model="llama3-8b"), given)
    answered = with_recomputing(error, training, causes)
    assert answered.described.checkpointing is says
    is_inferred = says is not None and "checkpointing" not in settings
    assert answered.inferred.endswith(f"(as the log's {float(allocated.split()[0]):g} GiB say)") == is_inferred
    said = fitting.predicted(error, answered, causes[0]).words
    is_open = "if they are recomputed, which is not known" in said
    fits_neither = "with recomputed ones; the log's " in said
    assert is_open + fits_neither == (says is None and not answered.missing)


FORWARD = """Traceback (most recent call last):
  File "modeling_llama.py", line 334, in forward
    hidden_states = self.mlp(hidden_states)
  File "modeling_llama.py", line 172, in forward
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
"""
BEFORE_LAYER = "last):\n  File "


@pytest.mark.parametrize(
    ("traceback", "allocated", "says"),
    [
        (FORWARD, "77.73 GiB", False),
        (FORWARD, "45.00 GiB", None),  # so much a rank may have that recomputes
        (
            FORWARD.replace(BEFORE_LAYER, 'last):\n  File "torch/utils/checkpoint.py", line 9, in g\n  File '),
            "77.73 GiB",
            None,
        ),
        (
            FORWARD.replace(BEFORE_LAYER, 'last):\n  File "t.py", line 9, in g\n    loss.backward()\n  File '),
            "77.73 GiB",
            None,
        ),
        ("", "77.73 GiB", None),  # the pass may be anywhere
    ],
    ids=["forward", "little", "recomputed", "backward", "anywhere"],
)
def test_what_is_in_use_in_the_forward_pass_of_a_layer_may_be_too_much_for_recomputing(traceback, allocated, says):
    given = Described(arm="zero2_cpu", ranks=4, micro_batch=4, sequence=8192)
    total = "79.25 GiB" if allocated == "77.73 GiB" else "47.50 GiB"
    error = reading.find(traceback + FULL.format(asked="896.00 MiB", allocated=allocated, total=total))
    causes, training = explain(error, Wanted(model="llama-3.1-8b"), given)
    assert with_recomputing(error, training, causes).described.checkpointing is says


@pytest.mark.parametrize(("frames", "is_named"), [("BACKWARD", False), ("", True)])
def test_nothing_is_gathered_in_the_last_frame_of_autograd(frames, is_named):
    text = (BACKWARD if frames else "") + new("224.00 MiB")
    found = ids(text, "mistral-7b", arm="fsdp2", ranks=2, micro_batch=1, sequence=1024)
    assert ("oom-gather" in found) == is_named


def test_states_that_fill_a_gpu_say_nothing_of_activations():
    """Weights were moved to it, and no pass had begun."""
    error = reading.find(FULL.format(asked="100.00 MiB", allocated="22.50 GiB", total="23.99 GiB"))
    given = Described(arm="ddp", ranks=16, micro_batch=4, sequence=512)
    causes, training = explain(error, Wanted(model="llama-2-13b"), given)
    assert with_recomputing(error, training, causes).described.checkpointing is None


UNUSED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of "
    "79.11 GiB of which {free:.2f} GiB is free. Of the allocated memory {allocated} GiB is allocated by PyTorch, and "
    "{unused} GiB is reserved by PyTorch but unallocated."
)
LOSS = (
    'Traceback (most recent call last):\n  File "loss.py", line 45, in ForCausalLMLoss\n    logits = logits.float()\n'
)


@for_each("clue", ["", LOSS], ids=["by size", "by traceback"])
@for_each("arm", ["zero2", "zero3", "fsdp2"])
@for_each(
    ("model", "rows", "sequence"),
    [
        ("llama3-8b", 2, 4096),
        ("llama3-8b", 4, 2048),
        ("qwen2.5-7b", 2, 4096),
        ("qwen2.5-7b", 8, 2048),
        ("opt-1.3b", 8, 2048),
    ],
)
def test_predicted_numbers_of_either_kind_are_told_apart_and_others_are_of_neither(model, rows, sequence, arm, clue):
    wanted = Wanted(model=model)
    given = Described(arm=arm, ranks=8, micro_batch=rows, sequence=sequence)
    peaks = {
        kind: trainings.predicted_memory(wanted, replace(given, checkpointing=kind)).peak_bytes / 2**30
        for kind in (True, False)
    }
    logits = rows * sequence * asked_for(wanted, sequence).look.vocabulary * 4 / 2**30
    # More than the one needs at all, and less than the other's layers keep.
    above, below = CLEARLY * peaks[True] - logits, (peaks[False] - peaks[True]) / CLEARLY

    def decided(allocated: float, asked: float, clue: str) -> tuple[bool | None, bool]:
        message = FULL.format(asked=f"{asked:.2f} GiB", allocated=f"{allocated:.2f} GiB", total="139.72 GiB")
        error = reading.find(clue + message)
        answered = with_recomputing(error, *explain(error, wanted, given)[::-1])
        return answered.described.checkpointing, bool(answered.unfitting)

    for kind, peak in peaks.items():
        answer, is_of_neither = decided(peak - logits, logits, clue)
        assert answer is kind or (answer is None and arm == "zero2")
        assert not is_of_neither
    for factor in (2, 3):
        assert decided(factor * peaks[False], logits, clue) == (None, True)
        assert decided(factor * peaks[False], 1.11 * logits, "") == (None, True)
    if above < below:
        assert decided((above + below) / 2, logits, clue) == (None, True)


def test_the_command_shows_what_the_numbers_say_and_one_unit(monkeypatch, capsys, tmp_path):
    log = tmp_path / "train.log"
    log.write_text(FULL.format(asked="7.83 GiB", allocated="33.00 GiB", total="39.39 GiB"))
    shape = "--model llama3-8b --arm zero3 --ranks 8 --micro-batch 4 --sequence 4096"
    assert in_this_process(monkeypatch, f"oom {log} {shape}") in (None, 0)
    said = " ".join(capsys.readouterr().out.split())
    assert "--sequence 4096, activations recomputed (as the log's 33 GiB say)" in said
    assert "The message (GPU): CUDA out of memory. Tried to allocate 7.83 GiB. Taken as" in said
    assert "this GPU has 39.39 GiB (42.3 GB)" in said
    assert "--chunked-loss, as by Liger (" in said
    assert len(re.findall(r"\d GB\b", said)) == 1


@for_each("case", MESSAGES["message"])
def test_a_message_is_quoted_up_to_its_first_size(case):
    error = reading.find(case.get("text", "") + (new(*case["sizes"]) if "sizes" in case else ""))
    assert len(error.quoted) <= reading.LONGEST_QUOTE
    is_asked = f"Tried to allocate {error.asked.text}" in error.line
    assert is_asked == (f"Tried to allocate {error.asked.text}" in error.quoted)
    assert "total capacity" not in error.quoted


def test_each_change_that_is_tried_holds_no_more():
    wanted = Wanted(model="llama3-8b")
    for arm in ("ddp", "zero1", "zero2", "zero3", "fsdp2"):
        given = Described(arm=arm, ranks=4, micro_batch=4, sequence=2048)
        least = trainings.predicted_memory(wanted, given).peak_bytes
        for change in changes.single_changes(given):
            assert trainings.predicted_memory(wanted, change.training).peak_bytes <= least, (arm, change.words)


ERROR = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.25 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 72.50 GiB is allocated by PyTorch"
)


def known(text: str, wanted: Wanted | None = None, given: Described | None = None) -> KnownTraining:
    wanted, given = wanted or Wanted(), given or Described()
    return KnownTraining.of(wanted, given, stated(read(f"{text}\n{ERROR}\n")))


@for_each("case", MESSAGES["stated"], ids=lambda case: case["text"][:30].strip())
def test_what_a_text_says_of_its_training_is_taken(case):
    training = known(case["text"])
    used = {name: value for name, value in training.used.items() if value}
    assert used == case["taken"]
    by_default = {"arm", "precision", "optimizer"}  # the last is the Trainer's
    if "zero_optimization" in case["text"]:
        by_default.add("buckets")  # DeepSpeed's
    assert training.from_text >= used.keys() - by_default
    assert training.has_adapters == case.get("adapters", "lora_rank" in used)


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ('from_pretrained(MODEL, attn_implementation="flash_attention_2")', "flash2"),
        ("--attn_implementation eager", "eager"),
        ("attn_impl: flash_attn", "flash2"),
        ("flash_attn: fa2", "flash2"),
        ("attn_implementation=args.attention", None),
        ("flash_attn==2.7.4.post1", None),
        ("flash_attn 2.7.4", None),
        ('attn_implementation="eager"\nattn_implementation="sdpa"', None),
    ],
)
def test_the_attention_of_a_text_or_a_config_is_taken(text, kernel, tmp_path):
    assert known(text).described.attention_kernel == kernel
    if ": " in text:
        config = tmp_path / "args.yaml"
        config.write_text(f"output_dir: x\nlearning_rate: 1\n{text}\n")
        assert known("", given=Described(config=config)).described.attention_kernel == kernel


def test_eager_attention_is_predicted_with_its_scores_and_who_pastes_a_text_waits_for_no_trace():
    given = Described(arm="ddp", ranks=2, micro_batch=2, sequence=512)
    wanted = Wanted(model="llama-micro")
    peaks = {}
    for kernel in ("eager", "sdpa", "flash_attention_2"):
        training = known(f"attn_implementation: {kernel}", wanted, given)
        peaks[kernel] = trainings.predicted_memory(wanted, training.described).peak_bytes
    assert peaks["eager"] > 1.5 * peaks["sdpa"] == 1.5 * peaks["flash_attention_2"]
    for model, words, is_traced in (
        ("llama3-8b", "sdpa", True),
        ("llama3-8b", "eager", False),
        ("gemma2-9b", "eager", True),
        ("gemma2-9b", "flash_attention_2", False),
    ):
        assert known(f"attn_implementation={words}", Wanted(model=model)).comes_traced == is_traced


def test_a_flag_wins_over_the_text_and_so_does_what_a_config_writes(tmp_path):
    text = "torchrun --nproc_per_node 8 t.py --model Qwen/Qwen2.5-7B --per_device_train_batch_size 4 zero_stage: 3"
    assert known(text).described == Described(arm="zero3", ranks=8, micro_batch=4)
    training = known(text, Wanted(model="llama3-8b"), Described(arm="zero2", micro_batch=1))
    assert (training.wanted.model, training.described) == ("llama3-8b", Described(arm="zero2", ranks=8, micro_batch=1))
    config = tmp_path / "args.yaml"
    config.write_text(
        "{output_dir: x, learning_rate: 1, model_name_or_path: meta-llama/Llama-3-8B, per_device_train_batch_size: 2}"
    )
    of_config = known(text, given=Described(config=config))
    assert of_config.wanted.model == "llama3-8b"
    settings = Described(arm="zero3", config=config, ranks=8, micro_batch=2, accumulation=1, optimizer="adamw")
    assert of_config.described == settings
    assert of_config.from_text == {"stage", "ranks"}
    config.write_text("{output_dir: x, learning_rate: 1}")  # of which 8 sequences are the default
    assert known(text, given=Described(config=config)).described.micro_batch == 4
    assert KnownTraining.of(Wanted(), Described(config=config)).described.micro_batch == 8


IN_16 = 'model = AutoModel.from_pretrained(name_of("x"), torch_dtype=torch.bfloat16)'
# What the yaml writes, what a script does, and which precision is predicted. None: the arm's usual one.
PRECISION_OF = [
    ("FSDP", "bf16", "", None),
    ("FSDP", "'no'", "", "fp32"),
    ("FSDP", "'no'", IN_16, "bf16_pure"),
    ("FSDP", "'no'", 'Accelerator(mixed_precision="bf16")', None),  # a script's own argument wins
    ("FSDP", "bf16", IN_16, None),  # Accelerate makes them fp32 again
    ("FSDP", "'no'", 'torch.autocast("cuda", dtype=torch.bfloat16)', "fp32"),  # loads nothing
    ("MULTI_GPU", "bf16", IN_16, "bf16_pure"),
    ("MULTI_GPU", "bf16", IN_16 + "\npeft_config = LoraConfig(r=8)", None),
    ("MULTI_GPU", "fp16", "", "fp16"),
    ("MULTI_GPU", None, "", None),  # a flag of the launcher may say it
    ("DEEPSPEED", "bf16", IN_16, None),
    ("DEEPSPEED", "'no'", "", "fp32"),
]


@pytest.mark.parametrize(("kind", "mixed", "script", "precision"), PRECISION_OF)
def test_the_precision_of_a_config_and_of_loaded_weights_is_predicted(kind, mixed, script, precision, tmp_path):
    config = tmp_path / "a.yaml"
    section = {"FSDP": "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}"}
    section |= {"DEEPSPEED": "deepspeed_config: {zero_stage: 3}"}
    lines = [f"distributed_type: {kind}", "num_processes: 4", section.get(kind, "")]
    config.write_text("\n".join([*lines, f"mixed_precision: {mixed}" if mixed else ""]))
    training = known(script, Wanted(model="llama3-8b"), Described(config=config, micro_batch=1))
    assert training.described.precision == precision
    usual = trainings.predicted_memory(training.wanted, replace(training.described, precision=None)).peak_bytes
    predicted = trainings.predicted_memory(training.wanted, training.described).peak_bytes
    order = {"fp32": predicted > usual, "bf16_pure": predicted < usual}
    assert order.get(str(precision), predicted == usual)


def test_a_plain_loop_of_fsdp2_reduces_each_micro_batch():
    """Accelerate keeps whole gradients until the last one, as who calls set_requires_gradient_sync does."""
    given = Described(arm="fsdp2", ranks=8, micro_batch=1, sequence=2048, checkpointing=True, accumulation=4)
    wanted = Wanted(model="llama3-8b")
    plain = "for layer in model.layers: fully_shard(layer)"
    peaks = {}
    for text in (plain, f"{plain}\nmodel.set_requires_gradient_sync(False)", f"accelerate==1.15.0\n{plain}"):
        training = known(text, wanted, given)
        peaks[text] = trainings.predicted_memory(wanted, training.described).peak_bytes
    first, *others = peaks.values()
    whole = 2 * asked_for(wanted, 1).parameters
    parts = whole * 2 / 8
    assert others[0] == others[1]
    assert first + whole - 2 * parts < others[0] < first + whole, "all gradients in 16 bits, for a rank's part in 32"


def test_sync_each_batch_leaves_no_whole_gradients():
    """With the reduced ones of earlier micro-batches a rank holds more than with one micro-batch."""
    wanted = Wanted(model="llama3-8b")
    given = Described(arm="fsdp2", ranks=8, micro_batch=1, sequence=2048, checkpointing=True)
    plugin = "GradientAccumulationPlugin(num_steps=4, sync_each_batch={})"
    peaks = {}
    of_trainer = 'gradient_accumulation_steps: 4, "sync_each_batch": true'
    for text in ("", plugin.format(True), plugin.format(False), of_trainer):
        training = known(text, wanted, given)
        peaks[text] = trainings.predicted_memory(wanted, training.described).peak_bytes
    once, synced, unsynced, also_synced = peaks.values()
    whole = 2 * asked_for(wanted, 1).parameters
    parts = whole * 2 / 8
    assert once <= synced <= once + parts < unsynced
    assert unsynced - synced > whole - 2 * parts
    assert also_synced == synced


def test_plain_ddp_keeps_its_buckets_beside_the_gradients():
    """As a rehearsal of GPT-2 XL holds: 12.5 GB of temporaries and 6.23 GB of gradients in the update."""
    wanted = Wanted(model="gpt2-xl")
    given = Described(arm="ddp", ranks=8, micro_batch=8, sequence=1024, checkpointing=True, optimizer="foreach")
    whole = 4 * asked_for(wanted, 1).parameters
    held = {}
    for text in ("DDP(model)", "DDP(model, gradient_as_bucket_view=True)"):
        training = known(text, wanted, given)
        prediction = trainings.prediction_of(wanted, training.described)
        held[text] = prediction.most_bytes("update")
        words = {each.words for each in changes.single_changes(training.described)}
        assert (changes.IN_BUCKETS in words) == (text == "DDP(model)")
    beside, within = held.values()
    assert beside - within == whole
    assert beside == pytest.approx(6 * whole, rel=0.01), "weights, two moments, gradients, buckets and roots"


LOOP = "for batch in loader:\n    {}\n    {}.backward()\n    optimizer.step()\n    optimizer.zero_grad()"
KEEPS = [
    (LOOP.format("out = model(**batch)", "out.loss"), True),
    (LOOP.format("outputs = self.model(input_ids=x, labels=x)\n    loss = outputs.loss", "loss"), True),
    (LOOP.format("loss = model(**batch).loss", "loss"), False),
    (LOOP.format("loss = model(**batch)", "loss"), False),
    (LOOP.format("out = model(**batch)\n    loss = out.loss\n    del out", "loss"), False),
    (f"def f(batch):\n    out = model(**batch)\n    return out.loss\n{LOOP.format('loss = f(batch)', 'loss')}", False),
    (f"for batch in tests:\n    out = model(**batch)\n{LOOP.format('loss = f(batch)', 'loss')}", False),
]


@pytest.mark.parametrize(("script", "is_kept"), KEEPS)
def test_logits_that_a_loop_keeps_are_counted(script, is_kept):
    """A rehearsal of such a loop, GPT-2 in DDP on 8 ranks, peaks at 3.73 GB in fp32 with recomputation."""
    given = Described(arm="ddp", ranks=8, micro_batch=8, sequence=256, precision="fp32", checkpointing=True)
    error = reading.find(new("2.00 GiB"))
    training = known(script, Wanted(model="gpt2"), given)
    causes, _ = explain(error, Wanted(), Described())
    logits = 4 * 8 * 256 * 50257
    assert fitting.kept_bytes(training, training.described) == (logits if is_kept else 0)
    words = fitting.predicted(error, training, causes[0]).words
    assert ("a rank needs 3.47 GiB" in words) == (f"{binary_size(logits)} of it the logits that `" in words) == is_kept
    assert binary_size(3.73e9) == "3.47 GiB"
    half = replace(training.described, micro_batch=4)
    assert fitting.kept_bytes(training, half) == (logits // 2 if is_kept else 0)


OF_DDP = [
    ("DDP(model, device_ids=[0])", "", False),
    ("torch.nn.parallel.DistributedDataParallel(model)", "--precision fp32", False),
    ("DDP(model, gradient_as_bucket_view=True)", "--precision fp32 --optimizer foreach", True),
    ("accelerate.prepare(model)  # distributed_type: MULTI_GPU", "--checkpointing --accumulation 4", False),
    ("DistributedDataParallelKwargs(gradient_as_bucket_view=True)", "--checkpointing --micro-batch 2", True),
]


@pytest.mark.parametrize(("script", "flags", "is_in_buckets"), OF_DDP)
def test_an_estimate_names_the_number_of_oom_for_a_script_of_ddp(
    script, flags, is_in_buckets, monkeypatch, capsys, tmp_path
):
    flags = f"--model gpt2 --arm ddp --gpus 8 --sequence 128 {flags}"
    assert in_this_process(monkeypatch, f"estimate {flags}") is None
    said = " ".join(capsys.readouterr().out.split())
    first, *notes = re.findall(r"needs [\d.]+ [GM]B \(([\d.]+ [GM]iB)\)", said)
    checkpointing = "" if "--checkpointing" in flags else "--no-checkpointing"
    micro_batch = "" if "--micro-batch" in flags else "--micro-batch 1"
    error = f"{script}\nCUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB"
    (tmp_path / "train.log").write_text(error)
    assert (
        in_this_process(monkeypatch, f"oom {tmp_path}/train.log {flags} {checkpointing} {micro_batch} --json") is None
    )
    (needs,) = re.findall(r"a rank needs ([\d.]+ [GM]iB)", json.loads(capsys.readouterr().out)["predicted"])
    assert needs == (first if is_in_buckets or not notes else notes[0])
    assert first not in notes
    # With several micro-batches the gradients of the first ones lie beside the buckets in both.
    assert bool(notes) == ("[ddp_keeps_gradients_twice]" in said) == ("--accumulation" not in flags)


@pytest.mark.parametrize(
    ("release", "arm", "version", "is_reduced"),
    [
        ("1.6.0", "fsdp2", 2, True),
        ("1.10.1", "fsdp2", 2, True),
        ("1.10.1", "hsdp", 2, True),
        ("1.10.1", "fsdp2", 1, None),  # its no_sync works
        ("1.10.1", "zero3", 2, None),
        ("1.11.0", "fsdp2", 2, None),
    ],
)
def test_releases_of_accelerate_that_reduce_each_micro_batch_hold_no_whole_gradients(
    release, arm, version, is_reduced, tmp_path
):
    config = tmp_path / "a.yaml"
    config.write_text(f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {{fsdp_version: {version}}}\n")
    given = Described(arm=arm, ranks=8, config=config, micro_batch=1, sequence=2048, accumulation=4)
    training = known(f"accelerate=={release}", Wanted(model="llama3-8b"), given).described
    assert training.sync_each_batch == is_reduced
    synced = replace(given, sync_each_batch=True)
    peaks = [trainings.predicted_memory(Wanted(model="llama3-8b"), each).peak_bytes for each in (training, synced)]
    assert (peaks[0] == peaks[1]) == (is_reduced is True or arm == "zero3")


# With three micro-batches, with as many as nobody says, with each reduced at once, and of DeepSpeed.
@pytest.mark.parametrize(
    ("flags", "script", "is_assumed", "is_advised"),
    [
        ("--arm fsdp2 --ranks 4", "gradient_accumulation_steps=3", False, True),
        ("--arm fsdp2 --ranks 4", "", True, False),
        ("--arm fsdp2 --ranks 2", "gradient_accumulation_steps=3", False, False),
        ("--arm fsdp2 --ranks 4", "sync_each_batch=True", False, False),
        ("--arm zero3 --ranks 4", "gradient_accumulation_steps=3", False, False),
        ("--arm zero3 --ranks 4", "", False, False),
    ],
)
def test_who_accumulates_with_fsdp_is_told_of_whole_gradients(
    flags, script, is_assumed, is_advised, tmp_path, monkeypatch, capsys
):
    """Where that alone is not enough, with recomputing; and which number was taken where nobody says one."""
    (tmp_path / "train.py").write_text(f"from accelerate import Accelerator\naccelerator = Accelerator({script})\n")
    log, script_path = tmp_path / "train.log", tmp_path / "train.py"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB.")
    shape = "--model mistral-7b --sequence 2048 --micro-batch 4 --gpu A100-40GB"
    words = {}
    for recomputing in ("", "no-"):
        command = f"oom {log} {script_path} {shape} {flags} --{recomputing}checkpointing"
        assert in_this_process(monkeypatch, command) in (None, 0)
        said = " ".join(capsys.readouterr().out.split())
        assert ("--accumulation 1 (nobody says it; with more" in said) == is_assumed
        words[recomputing] = said
    plugin = "GradientAccumulationPlugin(sync_each_batch=True) ("
    assert (f"; {plugin}" in words[""].partition("the mildest first")[2]) == is_advised
    together = f"would fit, but these together would: activations recomputed and {plugin}"
    assert (together in words["no-"]) == is_advised


def test_an_mlp_of_a_config_in_fp32_has_four_bytes(tmp_path):
    """With --config, which no text repeats, as with a text that says it."""
    config = tmp_path / "a.yaml"
    config.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: 'no'\n")
    text = f"x = self.down_proj(x)\n{new('896.00 MiB')}"  # 4 x 4,096 x 14,336 x 4 bytes
    given = Described(config=config, micro_batch=2, sequence=4096)
    causes, _ = explained(read(text), reading.find(text), Wanted(model="llama3-8b"), given)
    assert "16,384 tokens, not 8,192, x 14,336 x 4 bytes" in causes[0].what


@pytest.mark.parametrize("text", ["--num_processes 4", "zero_stage: 2", 'dtype = "bfloat16"'])
def test_a_text_that_says_nothing_of_offloading_is_in_no_conflict_with_a_config_that_does(text, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}))
    training = known(text, given=Described(config=path))
    assert (training.arm, training.conflicts) == ("zero2_cpu", ())


def test_what_cannot_be_of_a_training_is_not_taken_from_a_text():
    """Nor is a number of a node taken for all ranks, a method of quantization for full training, or 0 for a number."""
    assert known("--model_name_or_path facebook/opt-1.3b max_length=100000").wanted == Wanted()
    assert known("torchrun --nnodes 2 --nproc_per_node 8").described.ranks == 16
    assert known("torchrun --nnodes 2 num_gpus=8").described.ranks is None
    assert known("num_processes: 0, zero_stage: 2").described == Described(arm="zero2")
    assert known("base_model: meta-llama/Llama-3-8B, lora_r: 8, finetuning_type: full").wanted.lora_rank is None
    assert known("compares Qwen2.5-7B and Llama-3-8B").wanted.model is None
    assert known("--model Qwen/Qwen2.5-7B, and Llama-3-8B works").wanted.model == "qwen2.5-7b"


def test_a_config_that_names_a_file_that_is_not_here_says_no_arm(tmp_path):
    config = tmp_path / "args.yaml"
    config.write_text("{output_dir: x, learning_rate: 1, deepspeed: elsewhere.json}")
    assert KnownTraining.of(Wanted(), Described(config=config)).arm == ""


def test_adapters_of_unknown_rank_are_not_predicted_as_full_training():
    training = known(
        "deepspeed --num_gpus 4 t.py --model meta-llama/Llama-3-8B --use_peft true zero_stage: 2 micro_batch_size: 1"
    )
    assert training.missing == ["lora_rank"]
    error = reading.find(ERROR)
    causes, _ = explain(error, training.wanted, training.described)
    assert fitting.predicted(error, training, causes[0]).words == ""


RECOMPUTES = MESSAGES["recomputing"]


@for_each(
    ("text", "is_on"), [*((text, True) for text in RECOMPUTES["on"]), *((text, None) for text in RECOMPUTES["off"])]
)
def test_recomputing_is_seen_however_it_is_written(text, is_on):
    assert (known(text).described.checkpointing or None) is is_on


@pytest.mark.parametrize(
    "key",
    [
        "gradient_checkpointing: true",
        "gradient_checkpointing: unsloth",
        "fsdp: full_shard, fsdp_config: {activation_checkpointing: true}",
    ],
)
def test_recomputing_of_a_config_is_taken(key, tmp_path):
    config = tmp_path / "args.yaml"
    config.write_text(f"{{output_dir: x, learning_rate: 1, {key}}}")
    training = KnownTraining.of(
        Wanted(model="llama3-8b"), Described(config=config, arm="zero2", ranks=8, micro_batch=4)
    )
    assert training.described.checkpointing is True
    error = reading.find(ERROR)
    causes, _ = explain(error, Wanted(), Described())
    said = fitting.predicted(error, training, causes[0]).words
    assert "activations recomputed: a rank needs" in said
    assert "activations recomputed (" not in said


def test_a_script_recomputes_what_fsdps_own_key_does_not(tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text("distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_activation_checkpointing: false}")
    given = Described(config=config)
    assert known("", given=given).described.checkpointing is False
    assert known("model.gradient_checkpointing_enable()", given=given).described.checkpointing is True


# What a rank holds, by the predictor's roles, of each part of memory.
WEIGHTS = ("weights", "gathered_weights")
ROLES = {"optimizer": ("moments", "master"), "weights": WEIGHTS, "gradients": ("gradients", "buckets")}


def held(training: Described, part: str) -> float:
    """Bytes of a part: what stays between steps of states, and what a pass makes of tokens."""
    memory = trainings.predicted_memory(Wanted(model="llama3-8b"), training)
    if part in changes.TOKENS:
        return memory.peak_bytes
    return sum(memory.at_peak.get(role, 0) for role in ROLES[part])


def as_changed(given: Described, change: changes.Change) -> tuple[Described, Described]:
    """A training and what a change makes of it. Logits are most of what is held where activations are recomputed."""
    if change.training.chunked_loss:
        given = replace(given, checkpointing=True, sequence=4096)
        return given, replace(given, chunked_loss=True)
    return given, change.training


@for_each("id", cause_rows())
def test_an_advised_change_shrinks_what_is_named(id):
    cause = cause_of(id)
    for arm in ("ddp", "zero1", "zero2", "zero3", "fsdp2", "fsdp2_grad_op", "hsdp"):
        given = Described(arm=arm, ranks=4, micro_batch=4, sequence=512, accumulation=2)
        for change in filter(lambda change: change.shrinks_part(cause), changes.that_help(cause, given)):
            before, after = as_changed(given, change)
            parts = change.shrinks.intersection(cause.part_of)
            assert any(held(after, part) < held(before, part) for part in parts), (arm, change.words)


@for_each("id", cause_rows())
def test_of_states_only_changes_that_shrink_some_are_advised_and_else_all(id):
    cause = cause_of(id)
    given = Described(arm="zero2", ranks=4, micro_batch=4, sequence=512)
    advised = changes.that_help(cause, given)
    if not cause.part_of or changes.TOKENS.intersection(cause.part_of):
        assert advised == [*changes.single_changes(given)]
    else:
        assert [change.words for change in advised] == ["--arm zero3", "--arm zero3_cpu"]


@pytest.mark.parametrize("clue", [LOSS, "", LOSS.replace("logits = logits.float()", "x = self.down_proj(x)")])
@pytest.mark.parametrize(("allocated", "unused"), [(33.0, 38.61), (71.0, 0.61)])
def test_every_change_that_fits_is_listed_whatever_is_named(clue, allocated, unused):
    """With the predicted peak; those are marked that shrink what is named."""
    free = 79.11 - allocated - unused - 2.29
    error = reading.find(clue + UNUSED.format(asked=7.83, allocated=allocated, unused=unused, free=free))
    given = Described(arm="zero3", ranks=8, micro_batch=2, sequence=4096, checkpointing=False)
    causes, training = explain(error, Wanted(model="llama3-8b"), given)
    cause = fitting.named(causes)
    said = fitting.predicted(error, training, cause).words
    assert "--chunked-loss, as by Liger (67.5 GiB, only just)" in said
    assert "Only just: less than 10% of the peak would be left, or nvidia-smi" in said
    assert "--micro-batch 1 and twice the accumulation (47.4 GiB)" in said
    assert "activations recomputed (30.9 GiB)" in said
    assert said.index("--chunked-loss") < said.index("--micro-batch 1") < said.index("activations recomputed (")
    assert ("only just)*" in said) == ("logits" in cause.part_of)
    assert ("47.4 GiB)*" in said) == bool(cause.part_of)
    assert ("30.9 GiB)*" in said) == ("activations" in cause.part_of)


# By hand: a rank's part of 13,015,864,320 weights in bf16 is 3.25 GB, which the arm has on the host.
@pytest.mark.parametrize(
    ("offload_param", "more_bytes"), [("", 2 * 13_015_864_320 / 8), (', "offload_param": {"device": "cpu"}', 0)]
)
@pytest.mark.parametrize("is_pasted", [True, False])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_weights_that_are_not_offloaded_are_on_the_gpu(offload_param, more_bytes, device, is_pasted, tmp_path):
    zero = f'{{"zero_optimization": {{"stage": 3, "offload_optimizer": {{"device": "{device}"}}{offload_param}}}}}'
    given = Described(ranks=8, micro_batch=1, sequence=4096, checkpointing=True, buckets=6_553_600)
    (tmp_path / "ds.json").write_text(zero)
    config = {} if is_pasted else {"config": tmp_path / "ds.json"}
    text = zero if is_pasted else ""
    wanted = Wanted(model="llama-2-13b")
    training = KnownTraining.of(wanted, replace(given, **config), stated(read(text)))
    assert training.described.arm == f"zero3_{device}"
    peaks = [
        trainings.predicted_memory(wanted, each).peak_bytes
        for each in (training.described, replace(given, arm=f"zero3_{device}"))
    ]
    assert peaks[0] - peaks[1] == pytest.approx(more_bytes, rel=0.001)


GATHERED = """\
Traceback (most recent call last):
  File "torch/autograd/graph.py", line 823, in _engine_run_backward
    return Variable._execution_engine.run_backward(
  File "deepspeed/runtime/zero/partitioned_param_coordinator.py", line 492, in __all_gather_params_
    handle = param_group[0].all_gather_coalesced(param_group, quantize=quantize)
  File "deepspeed/runtime/zero/partition_parameters.py", line 1259, in all_gather_coalesced
    param_buffer = torch.empty(
"""


@pytest.mark.parametrize(
    ("micro_batch", "checkpointing", "cause"),
    # By hand: a layer keeps about 36 x 4,096 x 5,120 bytes of a sequence, 40 layers 30 GB; checkpoints alone 1.7 GB.
    [(4, False, "oom-activations"), (2, None, "oom-activations"), (1, False, "oom-gather"), (4, True, "oom-gather")],
)
def test_what_a_gather_lacks_room_for_is_what_more_than_fills_the_gpu(micro_batch, checkpointing, cause):
    """The weight that was asked for last is small then, and smaller units leave no room."""
    given = Described(arm="zero3_cpu", ranks=8, micro_batch=micro_batch, sequence=4096, checkpointing=checkpointing)
    text = GATHERED + new("136.00 MiB", free="0.06 GiB", allocated="76.98 GiB", unused="1.28 GiB")
    error = reading.find(text)
    causes, training = explained(read(text), error, Wanted(model="llama-2-13b"), given)
    assert (causes[0].id, causes[0].is_likely) == (cause, True)
    if cause == "oom-activations":
        assert "oom-gather" in [each.id for each in causes]
        assert "activations recomputed (" in fitting.predicted(error, training, causes[0]).words


@for_each("id", cause_rows())
def test_a_remedy_is_of_what_is_named(id):
    """A smaller micro-batch is advised only for what grows with it, and recomputing to nobody who recomputes."""
    cause = cause_of(id)
    advises_fewer_rows = re.search(r"micro-batch(?! does not help| makes none)|shorter sequences", cause.remedy)
    assert not advises_fewer_rows or changes.TOKENS.intersection(cause.part_of)
    assert "recompute" not in advised(cause.remedy, read("gradient_checkpointing: true"))
    assert "recompute" not in cause.remedy or "activations" in cause.part_of


def test_the_optimizers_states_do_not_shrink_with_the_micro_batch():
    clue = 'Traceback (most recent call last):\n  File "torch/optim/adam.py", line 4, in _init_group\n    exp_avg = 1\n'
    error = reading.find(clue + SMALL_CARD.format(70))
    for arm, other in (
        ("zero1", "--arm zero3_cpu"),
        ("zero3", "--arm zero3_cpu"),
        ("fsdp2", "--arm fsdp2_cpu"),
        ("fsdp2_grad_op", "--arm fsdp2_cpu"),
        ("hsdp", "--arm fsdp2_cpu"),
    ):
        training = KnownTraining.of(
            Wanted(model="llama3-8b"), Described(arm=arm, ranks=4, micro_batch=4, sequence=4096)
        )
        causes, _ = explain(error, Wanted(), training.described)
        said = fitting.predicted(error, training, causes[0]).words
        assert causes[0].id == "oom-optimizer"
        assert "--micro-batch" not in said
        assert "activations recomputed" not in said
        assert other in said or "No single change that helps with it would fit" in said


def test_where_the_message_has_no_size_a_text_or_a_flag_names_the_gpu():
    text = "8 x A100 40GB, --model meta-llama/Llama-3-8B, zero_stage: 2, micro_batch_size: 4"
    error = reading.find("torch.OutOfMemoryError: CUDA out of memory.")
    for training in (
        KnownTraining.of(Wanted(), Described(), stated(read(text))),
        KnownTraining.of(
            Wanted(model="llama3-8b"), Described(arm="zero2", ranks=8, micro_batch=4, gpu="A100-40GB"), None
        ),
    ):
        causes, _ = explain(error, Wanted(), Described())
        assert "this GPU has 40 GiB (42.9 GB)" in fitting.predicted(error, training, causes[0]).words
    assert stated(read("on A100s")).get("gpu") is None, "there are two sizes"
    with pytest.raises(Stop, match="A1000"):
        Described(gpu="A1000-x")


def test_the_command_says_what_it_read_from_the_text(tmp_path, monkeypatch, capsys):
    log = tmp_path / "train.log"
    log.write_text(
        f"deepspeed==0.18.2\ndeepspeed --num_gpus 8 t.py --model_name_or_path meta-llama/Llama-3-8B\n{ERROR}\n"
    )
    assert in_this_process(monkeypatch, f"oom {log} --ranks 4") in (None, 0)
    said = " ".join(capsys.readouterr().out.split())
    # The same is not told twice.
    assert "Taken as: deepspeed 0.18.2*, --model llama3-8b*, --ranks 4 (* read from the text; flags win)." in said
    assert "Read from the text" not in said
    assert "--ranks 4 counts, and not the text's --ranks 8." in said
    in_this_process(monkeypatch, f"oom {log} --json")
    assert json.loads(capsys.readouterr().out)["read"] == ["deepspeed 0.18.2", "--model llama3-8b", "--ranks 8"]


def test_diagnose_says_what_it_read_from_the_text(tmp_path, monkeypatch, capsys):
    log = tmp_path / "train.log"
    log.write_text(f"{MESSAGES['stated'][0]['text']}\n{ERROR}\n")
    in_this_process(monkeypatch, f"diagnose {log}")
    said = " ".join(capsys.readouterr().out.split())
    for words in ("stage 2", "8 ranks", "micro-batch 4", "sequence 4096", "gradient checkpointing", "model llama3-8b"):
        assert words in said.partition("Read: ")[2]


@pytest.mark.parametrize(
    ("asked", "allocated", "unused", "is_first"),
    [
        (7.83, 33.0, 38.61, True),
        (3.91, 20.0, 50.0, True),
        (7.83, 64.0, 8.0, False),  # the GPU is nearly full
        (7.83, 64.5, 5.0, False),  # nor would the unused part in one piece be enough
    ],
)
@pytest.mark.parametrize("settings", [{}, {"ranks": 8, "micro_batch": 2, "sequence": 4096}])
def test_fragmentation_comes_first_where_all_would_fit_without_pieces(asked, allocated, unused, is_first, settings):
    free = 79.11 - allocated - unused - 2.29
    error = reading.find(LOSS + UNUSED.format(asked=asked, allocated=allocated, unused=unused, free=free))
    (first, *_), _ = explain(error, Wanted(model="llama3-8b"), Described(arm="zero3", **settings))
    assert first.id == ("oom-fragmentation" if is_first else "oom-logits")
    total = f"{allocated:g} GiB allocated + {asked} GiB asked for = {allocated + asked:.1f} GiB of 79.11 GiB"
    assert (total in str(first.reasons)) == is_first


@for_each(
    ("asked", "rows", "sequence", "tokens"),
    [
        ("7.83 GiB", 2, 4096, 16_384),
        ("5.87 GiB", 2, 4096, 12_288),
        ("11.74 GiB", 1, 8192, 24_576),
        ("7.83 GiB", 4, 4096, None),  # as many as were given
        ("3.42 GiB", 4, 4096, None),  # a batch whose longest row is shorter
        ("7.90 GiB", 2, 4096, None),  # no thousands
        ("7.83 GiB", 2, None, None),
    ],
)
@for_each("clue", ["", LOSS])
def test_logits_of_more_tokens_than_were_given_are_said(
    asked, rows, sequence, tokens, clue, tmp_path, monkeypatch, capsys
):
    log = tmp_path / "train.log"
    log.write_text(clue + FULL.format(asked=asked, allocated="70.00 GiB", total="79.11 GiB"))
    length = f"--sequence {sequence}" if sequence else ""
    shape = f"--model llama3-8b --arm zero3 --ranks 8 --micro-batch {rows} {length}"
    assert in_this_process(monkeypatch, f"oom {log} {shape}") in (None, 0)
    said = " ".join(capsys.readouterr().out.split())
    if tokens is None or sequence is None:
        assert "you gave" not in said
        assert "you said" not in said
    elif clue and tokens <= 8192 * rows:  # more are several sequences, as the model reads 8,192
        size = f"{asked} = {tokens:,} tokens x 128,256 x 4 bytes"
        longer = f"the logits of a micro-batch of {rows} x {tokens // rows:,} tokens; you said {sequence:,}: {size}"
        assert longer in said.replace("The logits", "the logits")
        assert f"--sequence {tokens // rows}" in said
        assert "you gave" not in said
        assert "[oom-padded]" not in said
    else:
        verb = "are" if clue else "would be"
        assert f"{asked} {verb} the fp32 logits of {tokens:,} tokens; you gave {rows * sequence:,} (" in said
        assert f"Is the micro-batch {tokens // sequence}, are sequences longer, or are several packed into one?" in said
        assert f"{asked} = {tokens:,} tokens, not {rows * sequence:,}, x 128,256 x 4 bytes" in said


def test_a_traceback_that_names_logits_says_it_where_other_tensors_have_the_size(tmp_path, monkeypatch, capsys):
    """3.91 GiB are the embedding and the head in bf16, too."""
    log = tmp_path / "train.log"
    shape = "--model llama3-8b --arm zero3 --ranks 8 --micro-batch 2 --sequence 2048"
    for clue in (LOSS, ""):
        log.write_text(clue + FULL.format(asked="3.91 GiB", allocated="70.00 GiB", total="79.11 GiB"))
        assert in_this_process(monkeypatch, f"oom {log} {shape}") in (None, 0)
        said = " ".join(capsys.readouterr().out.split()).lower()
        assert ("the logits of a micro-batch of 2 x 4,096 tokens; you said 2,048: 3.91 gib = " in said) == bool(clue)


LOG = ROOT / "tests/configs/oom_logs/stage_2_logits.log"  # of a Trainer with DeepSpeed, as it is pasted


def said_of(log: Path, flags: str, monkeypatch, capsys) -> str:
    in_this_process(monkeypatch, f"oom {log} {flags}")
    return " ".join(capsys.readouterr().out.split())


def test_a_log_alone_says_what_filled_the_memory_and_what_fits(monkeypatch, capsys):
    """The model, the stage's file, ranks and rows are in it; its size says how long sequences were."""
    said = said_of(LOG, "", monkeypatch, capsys)
    assert said.startswith("Likely: the logits of a micro-batch of 4 x 8,192 tokens: 15.66 GiB = ")
    assert "--model llama3-8b*, --arm zero2 (as the text names stage_1_and_2.py" in said
    assert "--ranks 8*" in said
    assert "Predicted with 4 sequences of 8,192 tokens" in said
    for change in ("--chunked-loss, as by Liger (", "--micro-batch 2 and twice the accumulation ("):
        assert change in said.partition("Each of these would fit")[2]
    assert "(`use_liger_kernel=True` in TrainingArguments after `pip install liger-kernel`)" in said
    assert "with --config ds_config.json its settings count" in said


NAMED = ("README.md", "GUIDE.md", "study/report/templates/index.html", "study/report/templates/paste.html")


@pytest.mark.parametrize("page", NAMED)
def test_the_command_that_a_page_names_says_which_change_fits(page, tmp_path, monkeypatch, capsys):
    """A script and a config beside the log, and no flag."""
    files = re.search(r"study oom (train\.log [\w. ]*\w)", (ROOT / page).read_text())
    assert files
    script, *_ = [case["text"] for case in MESSAGES["stated"] if "SFTTrainer(" in case["text"]]
    size = FULL.format(asked="4.64 GiB", total="39.39 GiB", allocated="35.21 GiB")
    texts = {"train.log": size, "train.py": script, "zero2.yaml": "zero_stage: 2\nnum_processes: 4\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch, f"oom {files[1]}")
    assert "each of these would fit" in " ".join(capsys.readouterr().out.lower().split())


@for_each("total", [16, 40, 80, 140])
@for_each("rows", [2, 8])
@for_each("checkpointing", [True, False])
def test_the_first_remedy_names_no_change_that_would_not_fit(total, rows, checkpointing, monkeypatch, capsys):
    """The logits came last, and a loss in parts was advised where its own list said that it would not fit."""
    elements = rows * 4096 * 128256
    message = FULL.format(
        asked=f"{4 * elements / 2**30:.2f} GiB", allocated=f"{0.95 * total:.2f} GiB", total=f"{total:.2f} GiB"
    )
    flags = f"--arm zero3 --ranks 8 --micro-batch {rows} --sequence 4096"
    flags += " --checkpointing" if checkpointing else " --no-checkpointing"
    said = said_of(message, f"--model llama3-8b {flags}", monkeypatch, capsys)
    needs = float(re.search(r"a rank needs ([\d.]+) GiB at the peak", said)[1])
    assert said.startswith(f"The training as given needs {needs:g} GiB, predicted, on a GPU") == (needs > 1.2 * total)
    first = re.search(r"\[(oom-[\w-]+)\].*?What to do: (.*?) Tells it apart", said)
    assert first[1] == ("oom-states" if total == 16 else "oom-logits")
    remedy = first[2]
    if " would fit" in said and total > 16:
        assert ("in parts" in remedy) == ("--chunked-loss, as by Liger (" in said)
        assert ("fewer tokens" in remedy) <= (")*" in said)


@pytest.mark.parametrize(
    ("script", "differ"), [("model.train()\n", True), ("model.gradient_checkpointing_enable()\n", False), (None, False)]
)
def test_a_script_that_recomputes_nothing_and_a_log_that_does_differ(script, differ, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.log").write_text(FULL.format(asked="7.83 GiB", allocated="33.00 GiB", total="39.39 GiB"))
    (tmp_path / "train.py").write_text(f"import torch\n{script}")
    files = f"{tmp_path}/train.log {tmp_path}/train.py" if script else f"{tmp_path}/train.log"
    words = f"oom {files} --model llama3-8b --arm zero3 --ranks 8 --micro-batch 4 --sequence 4096"
    assert in_this_process(monkeypatch, words) in (None, 0)
    assert ("train.py and its log differ: " in capsys.readouterr().out) == differ


def test_a_loss_in_pieces_that_is_asked_about_is_not_blamed_for_the_logits(monkeypatch, capsys):
    said = said_of(LOG, "--chunked-loss", monkeypatch, capsys)
    assert "That fits: a loss in pieces never makes the whole logits, of which the message is." in said


def test_logits_of_fewer_tokens_than_were_given_are_said(tmp_path, monkeypatch, capsys):
    log = tmp_path / "train.log"
    shape = "--model llama3-8b --arm zero3 --ranks 8 --micro-batch 4 --sequence 4096"
    says = (
        "3.91 GiB are the fp32 logits of 8,192 tokens; you gave 16,384 (micro-batch 4 x 4,096). Is the micro-batch 2,"
    )
    for clue, is_said in ((LOSS, True), ("", False)):  # by its size alone it may be anything
        log.write_text(clue + FULL.format(asked="3.91 GiB", allocated="70.00 GiB", total="79.11 GiB"))
        said = said_of(log, shape, monkeypatch, capsys)
        assert (f"{says} is its longest row 2,048, or is the text of another run?" in said) == is_said


def test_whole_logits_beside_a_script_with_the_loss_in_pieces_mean_that_it_was_not_at_work(
    tmp_path, monkeypatch, capsys
):
    log = tmp_path / "train.log"
    log.write_text(LOSS + FULL.format(asked="7.83 GiB", allocated="70.00 GiB", total="79.11 GiB"))
    shape = "--model llama3-8b --arm zero3 --ranks 8 --micro-batch 4 --sequence 4096"
    not_at_work = "What to do: find out why the loss in pieces was not at work in that run"
    for script, flags, is_said in (
        ("SFTConfig(use_liger_kernel=True)", "", True),
        ("SFTConfig()", "", False),
        ("SFTConfig()", "--chunked-loss", False),  # asks about a next run
    ):
        (tmp_path / "train.py").write_text(script)
        said = said_of(f"{log} {tmp_path}/train.py", f"{shape} {flags}", monkeypatch, capsys)
        assert (not_at_work in said) == is_said


def test_sequences_that_are_longer_than_was_said_come_first_and_are_predicted(monkeypatch, capsys):
    said = said_of(LOG, "--sequence 4096", monkeypatch, capsys)
    assert said.startswith("Likely: the logits of a micro-batch of 4 x 8,192 tokens; you said 4,096: 15.66 GiB = ")
    assert "63.02 GiB allocated + 15.66 GiB asked for = 78.7 GiB, and 56.1 GiB are predicted with 4,096" in said
    assert "Predicted with 4 sequences of 8,192 tokens" in said
    # More than the model reads cannot be one sequence: then several are packed into one.
    said = said_of(LOG, "--micro-batch 1 --sequence 8192", monkeypatch, capsys)
    assert "Is the micro-batch 4, are sequences longer, or are several packed into one?" in said


@pytest.mark.parametrize(
    ("asked", "flags", "precision", "rows"),
    [
        ("896.00 MiB", "--micro-batch 1 --sequence 8192", "bf16", 4),
        ("896.00 MiB", "--micro-batch 1 --sequence 8192", "", 4),
        ("896.00 MiB", "--micro-batch 2 --sequence 8192", "bf16", 4),  # of 4 bytes it would be what was given
        ("896.00 MiB", "--micro-batch 2 --sequence 8192", "", None),
        ("896.00 MiB", "--micro-batch 4 --sequence 8192", "bf16", None),  # as many as were given
        ("896.00 MiB", "--micro-batch 8 --sequence 8192", "bf16", None),  # a batch whose rows are shorter
        ("900.00 MiB", "--micro-batch 1 --sequence 8192", "bf16", None),  # no whole sequences
        ("896.00 MiB", "--micro-batch 1 --sequence 512", "bf16", None),
    ],
)
def test_a_size_of_more_sequences_than_were_given_is_said_and_predicted(
    asked, flags, precision, rows, tmp_path, monkeypatch, capsys
):
    log = tmp_path / "train.log"
    log.write_text(
        f"MICRO_BATCH = 4\n{precision}\n{FORWARD}{FULL.format(asked=asked, allocated='77.73 GiB', total='79.25 GiB')}"
    )
    said = said_of(log, f"--model llama-3.1-8b --arm zero2_cpu --ranks 4 {flags}", monkeypatch, capsys)
    given = int(flags.split()[1])
    assert (f"tokens, not {8192 * given:,}, x 14,336 x 2 bytes" in said) == bool(rows)
    if rows:
        of_rows = f"Likely: activations of a micro-batch of {rows} x 8,192 tokens; you said {given}: {asked} = "
        assert of_rows in said
        assert "counts, and not the text's" not in said
        assert f"Predicted with {rows} sequences of 8,192 tokens per micro-batch and activations kept" in said
    else:
        assert "you said" not in said


CONFIGS = {
    "nothing": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
}


@pytest.mark.parametrize(
    ("printed", "config", "arm", "conflict"),
    [
        ("CPU Offload: False", "nothing", "zero2", ""),
        ("CPU Offload: True", "nothing", "zero2", "--arm zero2 counts, and not the text's --arm zero2_cpu."),
        ("CPU Offload: False", "cpu", "zero2_cpu", ""),
        ("zero_stage: 3", "nothing", "zero2", "--arm zero2 counts, and not the text's --arm zero3."),
        ("stage_1_and_2.py", "nothing", "zero2", ""),
    ],
)
def test_a_config_wins_over_what_a_text_says_of_offloading_and_a_conflict_is_said(
    printed, config, arm, conflict, tmp_path
):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2} | CONFIGS[config]}))
    training = known(printed, given=Described(config=path))
    assert training.arm == arm
    assert " ".join(each.sentence for each in training.conflicts) == (f"The config's {conflict}" if conflict else "")


@pytest.mark.parametrize(
    "text",
    [
        "loading /data/hub/models--meta-llama--Meta-Llama-3-8B/snapshots/8cde5ca/config.json",
        "LlamaConfig "
        + json.dumps(
            config_of("llama3-8b") | {"rope_scaling": None, "torch_dtype": "bfloat16", "auto_map": {"a": "b"}}
        ),
        "GPT2Config " + json.dumps(config_of("gpt2") | {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    ],
)
def test_the_hubs_cache_and_a_printed_config_name_the_model(text):
    assert known(text).wanted.model == ("gpt2-xl" if "n_embd" in text else "llama3-8b")


def test_of_an_unknown_model_a_printed_config_says_the_vocabulary():
    training = known('{"hidden_size": 1000, "vocab_size": 77777, "num_hidden_layers": 3}')
    assert (training.wanted.model, training.vocabulary) == (None, 77_777)


def test_what_cannot_be_predicted_without_torch_is_said(monkeypatch):
    def unavailable(wanted, given):
        if given.chunked_loss:
            raise Stop("this model has to be traced, and torch is not installed", "install PyTorch", "unavailable")
        return whole(wanted, given)

    whole = trainings.prediction_of
    for module in (fitting, trainings):
        monkeypatch.setattr(module, "prediction_of", unavailable)
    error = reading.find(SMALL_CARD.format(39.49))
    for chunked in (None, True):
        given = Described(arm="zero2", ranks=4, micro_batch=2, sequence=2048, chunked_loss=chunked)
        training = KnownTraining.of(Wanted(model="llama3-8b", lora_rank=16), given)
        causes, _ = explain(reading.find(new("7.90 GiB")), Wanted(), Described())
        said = fitting.predicted(error, training, causes[0]).words
        assert "torch is not installed." in said
        assert ("What to do: install PyTorch." in said) == bool(chunked), "of a flag that nobody gave it tells nothing"
        assert said.startswith("Not predicted: " if chunked else "Predicted with ")
    # What could not be tried is not said to be too little.
    logits = cause_of("oom-logits")
    which = fitting.predicted(error, replace(training, described=replace(given, chunked_loss=None)), logits)
    assert "in parts" in remedies.in_accord(logits, which.may_fit, read(""))


@pytest.mark.parametrize(
    ("clue", "total", "allocated", "is_named"),
    [
        ("", 39.49, 38, False),  # the prediction fits, and the message failed
        ("", 39.49, 16, False),
        ("", 39.49, 80, False),  # nor would any change
        ("", 20, 19, True),  # other changes fit
        ("", 8, 7, True),  # none does alone
        ("EVALUATION", 79.11, 62, False),  # what fits is the training
        ("NO MODEL", 39.49, 38, True),  # nothing is predicted
    ],
)
def test_advise_is_named_only_where_it_does_not_tell_what_failed(clue, total, allocated, is_named, monkeypatch, capsys):
    size = FULL.format(asked="1.96 GiB", total=f"{total} GiB", allocated=f"{allocated}.00 GiB")
    frames = "Traceback (most recent call last):\n" + EVALUATION if clue == "EVALUATION" else ""
    model = "" if clue == "NO MODEL" else "--model llama3-8b --lora-rank 16"
    monkeypatch.setattr(condense.sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{frames}{size}".encode())))
    said = said_of("-", f"{model} --arm zero2 --ranks 4 --micro-batch 1 --sequence 2048", monkeypatch, capsys)
    assert ("`study advise`" in said) == is_named, said


@pytest.mark.parametrize("is_known", [True, False])
def test_changes_are_tried_beside_what_was_not_predicted_only_if_it_is_known(is_known):
    """As a second, whole model is. What is not known may grow with any change, or be more at the peak."""
    wanted, given = Wanted(model="qwen2.5-7b"), Described(arm="zero2", ranks=8, micro_batch=2, sequence=2048)
    peak = trainings.predicted_memory(wanted, given).peak_bytes
    more = 2 * asked_for(wanted, 1).parameters + (not is_known) * 2**31
    said = said_beside((peak + more) / 2**30 - 0.5, 0.5, wanted, given)
    assert re.search(r"That fits, but this process had [\d.]+ GiB more in tensors: ", said)
    assert ("With that on top each of these would fit" in said) == is_known
    assert ("No change can be said to fit before that is known." in said) != is_known


@pytest.mark.parametrize(
    ("asked", "flags", "assumes", "asks"),
    [
        ("3.91", "", False, "Give --micro-batch and --sequence to hear whether the size is of the logits and which ch"),
        ("3.91", "--micro-batch 1", True, "Give --sequence to hear whether the size is of the logits."),
        ("0.44", "", False, "Give --micro-batch and --sequence to hear which change is predicted to fit."),
        ("0.44", "--micro-batch 1", True, None),
        ("3.91", "--micro-batch 1 --sequence 8192", False, None),
        ("0.44", "--sequence 8192", False, "Give --micro-batch to hear which change is predicted to fit."),
    ],
)
def test_a_length_that_nobody_says_is_told_and_asked_for(asked, flags, assumes, asks, tmp_path, monkeypatch, capsys):
    log = tmp_path / "train.log"
    log.write_text(FULL.format(asked=f"{asked} GiB", allocated="70.00 GiB", total="79.11 GiB"))
    said = said_of(log, f"--model llama3-8b --arm zero2 --ranks 8 {flags}", monkeypatch, capsys)
    assert (
        ("--sequence 2048 (nobody says it; give yours)" in said)
        == ("with 1 sequence of 2,048 tokens" in said)
        == assumes
    )
    assert (asks or "Taken as") in said
    assert (" to hear " in said) == bool(asks)


@pytest.mark.parametrize(
    ("allocated", "unused", "says", "is_first"),
    [
        (
            62.0,
            13.0,
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves room for them (65.9 GiB)",
            True,
        ),
        # As much is unused on most GPUs: what else is in tensors is named.
        (62.0, 4.5, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves room for them (65.9 GiB)", False),
        (62.0, 3.9, None, False),  # it is not enough for the tensor
        (71.0, 5.0, None, False),  # with it the GPU is full
        (34.0, 13.0, "not used. Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True first.", True),
        (34.0, 3.9, None, False),
    ],
)
def test_the_setting_that_costs_nothing_is_the_first_change_where_the_unused_part_is_enough(
    allocated, unused, says, is_first
):
    """And the first cause, where little else explains the error."""
    free = 79.11 - allocated - unused - 1.5
    error = reading.find(UNUSED.format(asked=3.91, allocated=allocated, unused=unused, free=free))
    given = Described(arm="zero2", ranks=8, micro_batch=1, sequence=8192, checkpointing=True)
    causes, training = explain(error, Wanted(model="llama3-8b"), given)
    said = fitting.predicted(error, training, fitting.named(causes)).words
    assert (says or "That fits") in said
    assert ("expandable_segments" in said) == bool(says)
    ordered, _ = explained(read(LOSS + error.line), replace(error, context=LOSS), Wanted(model="llama3-8b"), given)
    ids = [cause.id for cause in ordered]
    assert ids.index("oom-logits") == is_first
    assert (ids[0] == "oom-fragmentation") == is_first
    assert len(ids) == len({*ids})
    assert [cause.points for cause in ordered] == sorted((cause.points for cause in ordered), reverse=True)


@pytest.mark.parametrize(
    ("text", "line", "advice"),
    [
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "x = self.down_proj(x)", "expandable_segments"),
        ("gradient_checkpointing: true", "x = self.down_proj(x)", "recompute activations"),
        (
            "stage3_gather_16bit_weights_on_model_save: false",
            "engine.save_checkpoint(x)",
            "stage3_gather_16bit_weights_on_model_save",
        ),
    ],
)
def test_what_a_text_has_in_use_is_not_advised(text, line, advice, tmp_path, monkeypatch, capsys):
    """PyTorch's own advice does not say so."""
    error = UNUSED.format(asked=3.91, allocated=62, unused=13, free=2.6)
    error += " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    frames = LOSS.replace("logits = logits.float()", line)
    log = tmp_path / "train.log"
    for before, is_advised in (("", True), (f"{text}\n", False)):
        log.write_text(f"{before}{frames}{error}\n")
        flags = "--model llama3-8b --arm zero2 --ranks 8 --micro-batch 1 --sequence 8192"
        assert (advice in said_of(log, flags, monkeypatch, capsys)) == is_advised


def test_what_only_just_fits_names_the_change_that_leaves_room(monkeypatch, capsys):
    message = UNUSED.replace("79.11", "39.39").format(asked=3.74, allocated=28.06, unused=7.42, free=2.61)
    flags = "--model llama3-8b --arm zero2 --ranks 8 --micro-batch {} --sequence 2048 --checkpointing"
    for rows in (1, 2):
        said = said_of(message, flags.format(rows), monkeypatch, capsys)
        assert said.startswith("Likely: fragmentation: ")
        assert said.index("[oom-fragmentation]") < said.index("[oom-states]")
        is_tight = "That only just fits" in said
        assert ("If it fails again, each of these would fit" in said) == is_tight
        assert ("--arm zero3 (" in said) == is_tight
    assert is_tight


MAKES_MOMENTS = """Traceback (most recent call last):
  File "train.py", line 9, in {function}
    self.optimizer.step()
  File "deepspeed/ops/adam/fused_adam.py", line 127, in step
    {line}
"""


@pytest.mark.parametrize(
    ("function", "line", "is_first"),
    [
        ("step", "state['exp_avg_sq'] = torch.zeros_like(p.data)", True),
        ("step", 'state["exp_avg"] = torch.zeros_like(', True),
        ("step", "exp_avg_sq_sqrt = torch._foreach_sqrt(exp_avg_sqs)", False),
        ("initialize_optimizer_states", "state['exp_avg_sq'] = torch.zeros_like(p.data)", False),
    ],
)
def test_the_first_update_makes_what_later_steps_need_beside_all_else(function, line, is_first):
    message = FULL.format(asked="3.74 GiB", allocated="28.00 GiB", total="79.11 GiB")
    error = reading.find(MAKES_MOMENTS.format(function=function, line=line) + message)
    wanted = Wanted(model="llama3-8b")
    given = Described(arm="zero2", ranks=8, micro_batch=2, accumulation=8, sequence=2048, checkpointing=True)
    causes, training = explain(error, wanted, given)
    assert causes[0].id == "oom-optimizer"
    assert ("the first update makes Adam's moments" in causes[0].what) == is_first
    told = re.search(r"later steps, which need ([\d.]+) GiB more", fitting.predicted(error, training, causes[0]).words)
    more = trainings.predicted_memory(wanted, given).peak_bytes / 2**30 - 28 - 3.74
    assert (told and float(told[1])) == (pytest.approx(more, abs=0.02) if is_first else None)
    unsaid = replace(training, described=replace(given, checkpointing=None))  # of two peaks none is the one
    assert "later steps, which" not in fitting.predicted(error, unsaid, causes[0]).words


OF_OPTIMIZER = {"shard the states", "offload them", "train on more ranks", "`foreach=False`", "8 bits"}


@pytest.mark.parametrize(
    ("text", "flags", "left_out"),
    [
        ("", "", set()),
        ("", "--arm ddp", set()),
        ("", "--arm zero2", {"shard the states"}),
        ("", "--arm fsdp2_cpu", {"shard the states", "offload them"}),
        ("ZeRO stage 2\nDeepSpeed Basic Optimizer = FusedAdam", "", {"shard the states", "`foreach=False`"}),
        ("optim: adamw_torch_fused, zero_stage: 3", "", {"shard the states", "`foreach=False`"}),
        ("optim: adamw_bnb_8bit", "--arm zero1", {"shard the states", "`foreach=False`", "8 bits"}),
        ("offload_optimizer_device: cpu, zero_stage: 2", "", {"shard the states", "offload them"}),
    ],
)
def test_the_remedy_of_the_optimizer_is_of_what_it_has_not(text, flags, left_out, monkeypatch, capsys):
    error = MAKES_MOMENTS.format(function="step", line="state['exp_avg'] = 1").replace("fused_adam", "other")
    monkeypatch.setattr(condense.sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n{error}{new()}".encode())))
    remedy = said_of("-", flags, monkeypatch, capsys).partition("What to do: ")[2].partition("Tells it apart")[0]
    assert {each for each in OF_OPTIMIZER if each not in remedy} == left_out


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("", True),
        ("Number of trainable parameters = 20,971,520", True),
        ("Number of trainable parameters = 8,030,261,248", False),
        ("finetuning_type: full", False),
        ("python train.py --full_finetune --bf16", False),
        ("python train.py --full_finetune False --bf16", True),
        ("torchrun train.py --use_peft False", False),
        ("torchrun train.py --use_lora false", False),
        ("torchrun -m trl.scripts.dpo --max_length 2048", False),
        ("torchrun -m trl.scripts.dpo --max_length 2048 --adapter x", True),
        ("torchrun examples/run_clm.py --bf16", False),
    ],
)
def test_who_says_that_all_train_is_not_asked_for_adapters(text, asks, monkeypatch, capsys):
    monkeypatch.setattr(condense.sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n{new()}".encode())))
    assert ("give --lora-rank" in said_of("-", "--model llama3-8b", monkeypatch, capsys)) == asks


@pytest.mark.parametrize(
    ("text", "arm", "told"),
    [
        ("deepspeed==0.16.4", "zero2", "yours has deepspeed 0.16.4."),
        (f"deepspeed=={FOLLOWED} transformers=={TRANSFORMERS}", "zero2", ""),
        ("deepspeed==0.16.4", "fsdp2", ""),
        ("deepspeed", "zero2", ""),
        ("transformers==4.55.0", "fsdp2", "yours has transformers 4.55.0."),
        ("deepspeed==0.16.4 transformers==4.55.0", "zero2", "yours has deepspeed 0.16.4 and transformers 4.55.0."),
    ],
)
def test_a_prediction_says_which_release_it_follows_if_the_text_names_another(text, arm, told, monkeypatch, capsys):
    monkeypatch.setattr(condense.sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n{new()}".encode())))
    flags = f"--model llama3-8b --arm {arm} --ranks 8 --micro-batch 1 --checkpointing"
    said = said_of("-", flags, monkeypatch, capsys)
    assert "Predicted with " in said
    assert (f"transformers {TRANSFORMERS} allocate; {told}" in said) if told else "Predicted is what" not in said


@pytest.mark.parametrize(
    ("text", "flags", "is_told"),
    [
        ("transformers==4.48.3", "", True),
        ("transformers==4.49.0", "", False),
        ("    loss = fixed_cross_entropy(shift_logits, shift_labels)", "", True),
        ("", "", False),
        ("transformers==4.48.3", "--chunked-loss", False),
        ("transformers==4.48.3", "--precision fp32", False),
        ("transformers==4.48.3", "--micro-batch 1", False),  # one sequence without its last token needs no copy
    ],
)
def test_what_older_losses_make_more_is_told(text, flags, is_told, monkeypatch, capsys):
    monkeypatch.setattr(condense.sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n{new()}".encode())))
    usual = "" if "--micro-batch" in flags else "--micro-batch 4"
    arm = f"--model llama3-8b --arm zero2 --ranks 8 --sequence 4096 --checkpointing {usual} {flags}"
    said = said_of("-", arm, monkeypatch, capsys)
    assert "Predicted with " in said
    assert ("up to 3.91 GiB more (16,384 tokens x 128,256 x 2 bytes)" in said) == is_told


def test_the_releases_that_are_followed_are_those_that_the_study_runs():
    assert f'"deepspeed=={FOLLOWED}"' in (ROOT / "pyproject.toml").read_text()
    assert version("transformers") == TRANSFORMERS


@pytest.mark.parametrize(
    ("free", "unused", "allocated", "is_first"),
    [
        ("7.50 GiB", "1.36 GiB", "69.00 GiB", True),
        ("7.50 GiB", "0.40 GiB", "70.00 GiB", False),
        ("4.11 GiB", "4.50 GiB", "69.00 GiB", False),
    ],
)
def test_what_costs_nothing_is_tried_first_where_little_was_missing(
    free, unused, allocated, is_first, monkeypatch, capsys
):
    """The tensor had nearly room beside the pieces."""
    text = new(free=free, allocated=allocated, unused=unused)
    monkeypatch.setattr(condense.sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    said = said_of("-", "--vocabulary 128256 --sequence 8192 --micro-batch 2", monkeypatch, capsys)
    assert said.startswith("Likely: 7.83 GiB")
    assert ("What to do: first set PYTORCH_CUDA_ALLOC_CONF" in said) == is_first


def test_a_key_of_the_config_is_counted_as_estimate_counts_it(tmp_path, monkeypatch, capsys):
    """Whatever fits only just there is said to do so here, too."""
    zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": False}
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": zero, "data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}})
    )
    monkeypatch.setattr(condense.sys, "stdin", io.TextIOWrapper(io.BytesIO(new().encode())))
    flags = f"--model qwen2.5-14b --config {tmp_path}/ds.json --ranks 8 --sequence 4096 --micro-batch 4 --checkpointing"
    said = said_of("-", flags, monkeypatch, capsys)
    in_this_process(monkeypatch, f"estimate {flags} --gpu A100-80GB")
    of_estimate = " ".join(capsys.readouterr().out.split())
    for each in (said, of_estimate):
        assert "Counted of the config: data_types.grad_accum_dtype fp32." in each
        assert "Not counted, though memory depends on it: zero_optimization.contiguous_gradients." in each
    assert "That only just fits" in said
    assert "fits only just" in of_estimate
    needs = re.search(r"a rank needs ([\d.]+ GiB)", said)[1]
    assert f"({needs}) of GPU memory at the peak" in of_estimate


UPDATE = '  File "a.py", line 1, in train\n    optimizer.step()\n'
AS_MUCH = {
    "activations, if recomputing is not in effect": {"checkpointing": False},
    "a sequence of 4,096 tokens": {"sequence": 4096},
    "a sequence of 8,192 tokens": {"sequence": 8192},
    "a model that was loaded in fp32": {},
    "the cache of keys and values (`use_cache`)": {},
}


@pytest.mark.parametrize("arm", ["ddp", "fsdp2", "hsdp"])
def test_weights_that_are_predicted_in_fp32_are_no_excess(arm):
    training = KnownTraining.of(Wanted(model="llama3-8b"), Described(arm=arm, ranks=8, micro_batch=1, sequence=2048))
    weights = trainings.predicted_memory(training.wanted, training.described).at_peak["weights"]
    assert excess.IN_FP32 not in excess._near(reading.find(ERROR), training, training.model, weights)


@pytest.mark.parametrize("what", AS_MUCH)
@pytest.mark.parametrize(("model", "arm"), [("llama3-8b", "zero1"), ("qwen2.5-7b", "zero2")])
def test_an_excess_names_what_would_take_about_as_much(what, model, arm):
    """And not what takes a half more. No change is said to fit beside it."""
    wanted = Wanted(model=model)
    given = Described(arm=arm, ranks=8, micro_batch=16, sequence=2048, checkpointing=True)
    memory = trainings.predicted_memory(wanted, given)
    config = config_of(model)
    heads = config["num_key_value_heads"] / config["num_attention_heads"] * config["hidden_size"]
    excess_bytes = {
        "a model that was loaded in fp32": memory.at_peak["weights"],
        "the cache of keys and values (`use_cache`)": 4 * 16 * 2048 * heads * config["num_hidden_layers"],
    }.get(what) or trainings.predicted_memory(wanted, replace(given, **AS_MUCH[what])).peak_bytes - memory.peak_bytes

    def said(factor: float, asked: float) -> str:
        return said_beside(memory.peak_bytes / 2**30 - asked + factor * excess_bytes / 2**30, asked, wanted, given)

    near = said(0.9, 0.5)
    assert what in near.partition("; about as much is taken by ")[2]
    assert near.count(", or ") <= excess.MOST_NEAR
    assert "more in tensors" in said(1.5, 0.5)
    assert what not in said(1.5, 0.5)
    may_be_missed = 0.9 * excess_bytes <= fitting.MISSED * memory.peak_bytes
    assert ("With that on top each of these would fit" in near) == may_be_missed
    assert ("No change can be said to fit" in near) == (not may_be_missed)


def said_beside(
    allocated: float, asked: float, wanted: Wanted, given: Described, clue: str = "", stated_by: str = ""
) -> str:
    """What is said where a GPU that is large enough has so many GiB in tensors, and 1 GiB outside of PyTorch."""
    message = FULL.format(asked=f"{asked:.2f} GiB", allocated=f"{allocated:.2f} GiB", total="900.00 GiB")
    frames = f"Traceback (most recent call last):\n{clue}" if clue else ""
    error = reading.find(frames + message.replace("1.00 GiB is free", f"{899 - allocated:.2f} GiB is free"))
    causes, training = explain(error, wanted, given, stated(read(stated_by)))
    return fitting.predicted(error, training, causes[0]).words


@pytest.mark.parametrize("clue", [LOSS, UPDATE, ""])
def test_an_excess_is_of_the_moment_that_the_traceback_names(clue):
    """A pass of DDP has more than its update: what an update has beside that is no less."""
    wanted = Wanted(model="llama3-8b")
    given = Described(arm="ddp", ranks=8, micro_batch=1, sequence=2048, bucket_view=True)
    prediction = trainings.prediction_of(wanted, given)
    peak = prediction.memory.peak_bytes
    assert prediction.most_bytes("") == prediction.most_bytes("backward") == peak
    more = (peak - prediction.most_bytes("update")) / 2**30
    assert more > 2
    said = said_beside(peak / 2**30, 0.5, wanted, given, clue)
    excess = re.search(r"had ([\d.]+) GiB more in tensors", said)
    assert (excess and float(excess[1])) == (pytest.approx(more + 0.5, abs=0.1) if clue == UPDATE else None)


EVALUATION = """  File "transformers/trainer.py", line 4711, in evaluation_loop
    all_preds.add(logits)
  File "transformers/trainer_pt_utils.py", line 87, in torch_pad_and_concatenate
    return torch.cat((tensor1, tensor2), dim=0)
"""


@pytest.mark.parametrize("clue", ["evaluation", "saving", "none"])
@pytest.mark.parametrize("asked", ["14.20 GiB", "27.83 GiB", "28.39 GiB", "7.10 GiB"])
def test_a_size_near_that_of_a_number_of_parameters_says_less_than_a_traceback(asked, clue):
    """Sizes are near 7.62 billion x 4 or 2 bytes, whole or of a rank."""
    frames = {"evaluation": EVALUATION, "saving": '  File "a.py", line 1, in save_checkpoint\n    x()\n', "none": ""}
    shape = "num_elems = 7.62B, zero_stage: 3, world_size = 4\n"
    text = f"{shape}Traceback (most recent call last):\n{frames[clue]}{new(asked, '9.44 GiB', '62.18 GiB')}"
    told = by_text(read(text), reading.find(text))
    if clue != "none":
        assert told[0].id == f"oom-{clue}"
    else:  # of stage 3 a rank has no whole state
        assert (told[0].id == "oom-optimizer") == (asked == "7.10 GiB")


BUCKET = "zero_stage: 2, world_size = 8, 7B model\n" + new("1.86 GiB")  # 500 million elements of 4 bytes
SAID_AS_WELL = {
    "nothing": "",
    "parameters": "num_elems = 7.62B, zero_stage: 3, world_size = 4\n",
    "a model": "--model_name_or_path meta-llama/Meta-Llama-3-8B zero_stage: 2 --per_device_train_batch_size 2\n",
}


@for_each("said", SAID_AS_WELL)
@for_each("number", range(len(MESSAGES["message"]) + 1))
def test_diagnose_and_oom_name_one_first_cause(number, said, monkeypatch, capsys):
    case = [*MESSAGES["message"], {"text": BUCKET}][number]
    text = case.get("text", "") + (new(*case["sizes"]) if "sizes" in case else "")
    pasted = read(f"{SAID_AS_WELL[said]}{text}")
    monkeypatch.setattr(condense.sys, "stdin", io.TextIOWrapper(io.BytesIO(pasted.text.encode())))
    in_this_process(monkeypatch, "oom - --json")
    (first, *_) = json.loads(capsys.readouterr().out)["causes"]
    told = memory.of_error(pasted, reading.find(pasted.text), by_text)
    is_killed = first["id"] == "oom-host" and told and told.id == "process-killed"  # which has its own sentence
    assert told is None or is_killed or first["what"] in told.sentence
    assert told is None or is_killed or told.remedy.startswith(first["remedy"])


HOST = "CPU Virtual Memory:  used = 412.88 GB, percent = {}%\n"


@pytest.mark.parametrize(
    ("percents", "steps", "is_told"),
    [([12, 82.1], 0, True), ([95.3], 20, True), ([24.7], 0, False), ([82.1, 30], 0, False), ([82.1], 1000, False)],
)
def test_a_host_that_was_nearly_full_before_a_kill_is_quoted(percents, steps, is_told):
    text = "".join(map(HOST.format, percents)) + "step 1\n" * steps + "failed (exitcode: -9) local_rank: 4\n"
    error = reading.find(text)
    told = memory.of_error(read(text), error, by_text)
    (cause,) = causes(error, {}, False, "")
    line = f"`CPU Virtual Memory: used = 412.88 GB, percent = {percents[-1]}%`"
    assert (told.id, told.sure) == ("process-killed", "likely" if is_told else "possible")
    assert [line in each for each in (told.evidence, " ".join(cause.reasons))] == [is_told, is_told]


LOGS = sorted((ROOT / "tests/configs/oom_logs").glob("*.log"))


@pytest.mark.parametrize("log", LOGS, ids=[log.stem for log in LOGS])
def test_of_a_whole_log_both_commands_say_one_first_cause_and_one_first_remedy(log, monkeypatch, capsys):
    in_this_process(monkeypatch, f"oom {log} --json")
    (first, *_) = json.loads(capsys.readouterr().out)["causes"]
    in_this_process(monkeypatch, f"diagnose {log} --json")
    (answer,) = json.loads(capsys.readouterr().out)
    told = answer["found"][0]
    assert first["what"] in told["sentence"]
    assert told["remedy"].startswith(first["remedy"])


@pytest.mark.parametrize(
    ("checkpointing", "total", "says"),
    [
        (True, "79.11 GiB", "activations recomputed: the training fits ("),
        (None, "79.11 GiB", "activations recomputed: the training fits ("),  # kept ones do not fit, and it ran
        (None, "139.72 GiB", "activations kept: the training fits ("),
        (True, "39.39 GiB", "Each of these would fit"),
    ],
)
def test_what_fills_memory_between_steps_is_the_rest_of_a_training_that_fits(checkpointing, total, says):
    given = Described(arm="zero3", ranks=4, micro_batch=2, sequence=4096, checkpointing=checkpointing)
    text = "Traceback (most recent call last):\n" + EVALUATION
    error = reading.find(text + FULL.format(asked="27.83 GiB", allocated="62.18 GiB", total=total))
    causes, training = explain(error, Wanted(model="qwen2.5-7b"), given)
    said = fitting.predicted(error, with_recomputing(error, training, causes), fitting.named(causes)).words
    assert says in said or (total == "39.39 GiB" and "would fit: `study advise`" in said)
    if "fits (" in said:
        assert said.endswith(" GiB); the rest is evaluation.")


IN_AN_EVALUATION = LOSS.replace("  File", EVALUATION.partition("\n")[0] + "\n    x = model(y)\n  File")


@pytest.mark.parametrize(
    ("traceback", "total", "remedy"),
    [
        (IN_AN_EVALUATION, 79.11, "`per_device_eval_batch_size`"),
        (IN_AN_EVALUATION, 39.39, "`per_device_eval_batch_size`"),
        (LOSS, 79.11, "activations recomputed ("),
        (LOSS.replace("logits = logits.float()", "x = self.down_proj(x)"), 79.11, "activations recomputed ("),
    ],
)
def test_recomputing_and_fewer_sequences_are_no_advice_for_an_evaluation(
    traceback, total, remedy, tmp_path, monkeypatch, capsys
):
    log = tmp_path / "train.log"
    log.write_text(traceback + FULL.format(asked="7.83 GiB", allocated=f"{total - 8} GiB", total=f"{total} GiB"))
    said = said_of(log, "--model llama3-8b --arm zero3 --ranks 8 --micro-batch 4 --sequence 4096", monkeypatch, capsys)
    assert remedy in said
    is_evaluation = "eval" in remedy
    assert any(change in said for change in ("activations recomputed (", "the accumulation (")) != is_evaluation
    assert ("`eval_accumulation_steps`" in said) == ("`preprocess_logits_for_metrics`" in said) == is_evaluation


@pytest.mark.parametrize(
    ("error", "asks"),
    [
        (
            new("2.00 GiB"),
            "Give --model, --arm or --config, --ranks, --micro-batch and --sequence to hear which tensor",
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "--micro-batch, --sequence and --gpu to hear which tensor"),
        ("DefaultCPUAllocator: not enough memory", "Give --model, --arm or --config and --ranks to hear what the host"),
        ("OSError: [Errno 28] No space left on device", ""),
    ],
)
def test_a_bare_message_asks_by_their_flags_for_what_would_tell_more(error, asks, monkeypatch, capsys):
    said = said_of(error, "", monkeypatch, capsys)
    assert asks in said
    assert (" to hear " in said) == bool(asks)


@pytest.mark.parametrize(("optimizer", "arm"), [("sgd", "zero3"), ("adamw", "zero3"), ("sgd", "zero2")])
def test_what_stage_3_gathers_and_the_momentum_of_sgd_are_told(optimizer, arm, monkeypatch, capsys):
    flags = f"--model llama3-8b --arm {arm} --ranks 8 --micro-batch 4 --sequence 4096 --optimizer {optimizer}"
    said = said_of(FULL.format(asked="2.00 GiB", allocated="70.00 GiB", total="79.11 GiB"), flags, monkeypatch, capsys)
    (taken,) = re.findall(r"Taken as: .+?\.", said)
    assert ("--optimizer sgd (with momentum)" in taken) == (optimizer == "sgd")
    keys = "stage3_prefetch_bucket_size 6.55 million, stage3_param_persistence_threshold 100,000, "
    assert (keys in said) == (arm == "zero3")


def test_a_config_that_was_given_beside_a_log_is_not_asked_for(tmp_path, monkeypatch, capsys):
    config = tmp_path / "ds_config.json"
    config.write_text('{"zero_optimization": {"stage": 2}}')
    for files, is_asked in ((f"{LOG}", True), (f"{LOG} {config}", False)):
        assert (
            "with --config ds_config.json its settings count" in said_of(files, "", monkeypatch, capsys)
        ) == is_asked


BAR = "  3%|▎         | {}/2000 [1:21:11<42:00:00, 78s/it]\n"
# What a log has before its error, and whether steps ran: their peak had room.
RAN = [
    (BAR.format(61), True),
    (BAR.format(4), False),  # it may count micro-batches
    ("".join(f"{{'loss': 2.{each}, 'learning_rate': 1e-5, 'epoch': 0.1}}\n" for each in range(5)), True),
    ("Loading checkpoint shards: " + BAR.format(61).strip(), False),
    ("Resuming training from out/checkpoint-60\n" + BAR.format(61), False),
    ("", False),
]


@pytest.mark.parametrize("unused", ["4.40 GiB", "812.10 MiB"])
@pytest.mark.parametrize(("log", "has_run"), RAN)
def test_steps_that_ran_refute_a_peak_that_does_not_fit(log, has_run, unused, tmp_path, monkeypatch, capsys):
    text = f"{log}{LOSS}{new('3.91 GiB', '2.51 GiB', '24.10 GiB', unused)}".replace("79.25 GiB", "31.73 GiB")
    (tmp_path / "train.log").write_text(text)
    flags = "--model llama3-8b --arm fsdp2 --ranks 8 --micro-batch 2 --accumulation 4 --sequence 4096 --checkpointing"
    said = said_of(tmp_path / "train.log", flags, monkeypatch, capsys)
    assert ("The training as given needs" in said) != has_run
    assert ("no single change" in said.lower()) != has_run
    assert ("That does not fit, but steps ran here" in said) == has_run
    assert ("Likely: fragmentation" in said) == (has_run and unused == "4.40 GiB")


@pytest.mark.parametrize(
    ("total", "free", "others", "says", "is_first"),
    [
        # The training fits without the other process, which is what to end first.
        (48.0, 0.5, "Process 7 has 20.00 GiB memory in use. ", "but 21 GiB are outside PyTorch: process 7 has", True),
        (48.0, 0.5, "", "but 21 GiB are outside PyTorch: other processes", True),
        # It does not: a change helps only without that.
        (39.39, 0.5, "Process 7 has 11.00 GiB memory in use. ", "Without the 12.4 GiB outside PyTorch, each of", False),
        (39.39, 0.5, "", "Without the 12.4 GiB outside PyTorch, each of these would fit", False),
        (39.39, 11.9, "", "context and fragmentation. Each of these would fit", False),
    ],
)
def test_what_others_have_on_the_gpu_is_first_told_of_what_would_fit(
    total, free, others, says, is_first, tmp_path, monkeypatch, capsys
):
    text = f"{LOSS}{new('3.91 GiB', f'{free} GiB', '25.90 GiB', '612.10 MiB')}".replace("79.25 GiB", f"{total} GiB")
    (tmp_path / "train.log").write_text(text.replace("Including", f"{others}Including"))
    flags = "--model llama3-8b --arm fsdp2 --ranks 8 --micro-batch 2 --accumulation 4 --sequence 4096 --checkpointing"
    said = said_of(tmp_path / "train.log", flags, monkeypatch, capsys)
    assert says in said
    assert said.startswith("Likely: something else holds a part of this GPU") == is_first


def test_no_setting_of_the_allocator_comes_first_where_the_training_does_not_fit_with_an_excess(
    tmp_path, monkeypatch, capsys
):
    moments = '  File "torch/optim/adamw.py", line 172, in _init_group\n    state["exp_avg_sq"] = torch.zeros_like(\n'
    text = f"Traceback (most recent call last):\n{moments}{new('250.00 MiB', '120.31 MiB', '21.87 GiB', '812.10 MiB')}"
    (tmp_path / "train.log").write_text(text.replace("79.25 GiB", "23.64 GiB"))
    flags = "--model llama3-8b --arm fsdp2 --ranks 8 --micro-batch 2 --accumulation 4 --sequence 4096 --checkpointing"
    said = said_of(tmp_path / "train.log", flags, monkeypatch, capsys)
    assert "That does not fit, but this process had" in said
    assert "which costs nothing" not in said


@pytest.mark.parametrize("more", ["", "--micro-batch 1 --sequence 2048", "--micro-batch 8 --sequence 4096"])
def test_where_much_is_unused_the_setting_comes_first_whatever_else_is_given(more, tmp_path, monkeypatch, capsys):
    frame = '  File "deepspeed/runtime/zero/stage_1_and_2.py", line 1013, in reduce_independent_p_g_buckets\n'
    text = f"Traceback (most recent call last):\n{frame}{new('1.50 GiB', '700.00 MiB', '27.10 GiB', '10.20 GiB')}"
    (tmp_path / "train.log").write_text(text.replace("79.25 GiB", "39.39 GiB"))
    said = said_of(tmp_path / "train.log", f"--model llama3-8b --arm zero2 --ranks 8 {more}", monkeypatch, capsys)
    assert "What to do: first set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which costs nothing" in said


@pytest.mark.parametrize(
    ("asked", "allocated", "total", "sequence", "says"),
    [
        ("1.50 GiB", "27.10 GiB", "39.39 GiB", 2048, "28.6 GiB; what was given makes 33.8 GiB at its peak, predicted."),
        ("1.50 GiB", "27.10 GiB", "39.39 GiB", 8192, "It failed before that, or micro-batch, sequence, recomputing or"),
        ("1.50 GiB", "72.50 GiB", "79.25 GiB", 2048, "74 GiB; what was given makes at most 41.4 GiB then, predicted."),
        ("1.50 GiB", "37.00 GiB", "39.39 GiB", 8192, ""),  # the GPU is full, as predicted
        ("1.50 GiB", "27.10 GiB", "79.25 GiB", 2048, ""),  # it fits: pieces or others take the rest
    ],
)
def test_a_log_with_more_or_less_than_is_predicted_is_told_so(asked, allocated, total, sequence, says):
    text = FULL.format(asked=asked, allocated=allocated, total=total)
    given = Described(arm="zero2", ranks=8, micro_batch=1, sequence=sequence)
    causes, known = explained(read(text), reading.find(text), Wanted(model="llama3-8b"), given)
    differs = fitting.predicted(reading.find(text), known, fitting.named(causes)).differs
    assert (says in differs) if says else differs == ""


def test_an_inference_engine_beside_a_training_is_no_part_of_its_numbers():
    engine = "is allocated by PyTorch, with 40.10 GiB allocated in private pools (e.g., CUDA Graphs)"
    frame = '  File "trl/trainer/grpo_trainer.py", line 3, in per_token\n    logits = model(**inputs).logits\n'
    text = frame + FULL.format(asked="4.64 GiB", allocated="75.40 GiB", total="79.11 GiB")
    text = text.replace("is allocated by PyTorch", engine)
    given = Described(arm="zero3", ranks=8, micro_batch=8, sequence=2048)
    causes, known = explained(read(text), reading.find(text), Wanted(model="qwen2.5-7b"), given)
    assert known.inferred == "activations recomputed (as the log's 35.3 GiB say)"
    words = fitting.predicted(reading.find(text), known, fitting.named(causes)).words
    assert "this GPU has 39.01 GiB (41.9 GB) beside an engine's 40.1 GiB, less 3.81 GiB" in words


@pytest.mark.parametrize(
    ("frame", "flags", "unsaid"),
    [
        ("torch/optim/optimizer.py", "--optimizer adamw_8bit", "8 bits"),
        ("torch/optim/optimizer.py", "--optimizer adamw_8bit", "fused"),
        ("torch/optim/optimizer.py", "--optimizer adamw", "fused"),
        ("bitsandbytes/functional.py", "--lora-rank 16 --quantized nf4", "quantize them"),
    ],
)
def test_what_a_flag_says_is_in_use_is_no_remedy(frame, flags, unsaid, tmp_path, monkeypatch, capsys):
    text = f'Traceback (most recent call last):\n  File "{frame}", line 3, in make\n{new("112.00 MiB")}'
    (tmp_path / "train.log").write_text(text)
    given = "--model llama3-8b --arm single --ranks 1 --micro-batch 1 --sequence 2048"
    does = [
        said_of(tmp_path / "train.log", f"{given} {more}", monkeypatch, capsys).partition("Taken as")[0]
        for more in (flags, flags.partition(" --q")[0] if "--q" in flags else "")
    ]
    assert [unsaid in said for said in does] == [False, True]


MAKES_ONE = {
    'base = pipeline(\n    "text-generation", model=M, device=int(os.environ["LOCAL_RANK"])\n)': "`base = pipeline(`",
    "model = AutoModel.from_pretrained(N)\njudge = AutoModel.from_pretrained(X).to(0)": "`judge = AutoModel.from",
    "model = AutoModel.from_pretrained(N).cuda()\nref_model = make()": "`ref_model = make()`",
    "best = deepcopy(optimizer.state_dict())": "such as a reference, a pipeline or",
    "ema = copy.deepcopy(model)": "`ema = copy.deepcopy(model)`",
    "trainer = MyTrainer(model, ref_model=reference)": "ref_model=reference",
    "# ema = deepcopy(model)\nref_model = None\npipe = pipeline(model)": "such as a reference, a pipeline or",
    "tokenizer = AutoTokenizer.from_pretrained(M)": "such as a reference, a pipeline or",
}


@for_each("script", MAKES_ONE)
@for_each("width", [2, 4])
def test_as_much_as_a_whole_model_is_one_and_the_line_that_makes_it_is_named(script, width):
    wanted, given = Wanted(model="qwen2.5-7b"), Described(arm="zero3", ranks=8, micro_batch=1, sequence=2048)
    prediction = trainings.prediction_of(wanted, given)
    whole = width * asked_for(wanted, 1).parameters

    def said(factor: float) -> str:
        allocated = (prediction.memory.peak_bytes + factor * whole) / 2**30 - 0.5
        return said_beside(allocated, 0.5, wanted, given, stated_by=script)

    assert f"it may be a second, whole model (7,615,616,512 parameters x {width} bytes), such as " in said(1)
    assert MAKES_ONE[script] in said(1)
    assert "second, whole model" not in said(1.03)


@pytest.mark.parametrize(
    ("arm", "asked", "frame", "is_whole"),
    [
        ("fsdp2", "224.00 MiB", "state['exp_avg_sq'] = torch.zeros_like(", True),  # 14,336 x 4,096 x 4 bytes
        ("fsdp2_grad_op", "224.00 MiB", "state['exp_avg'] = torch.zeros_like(", True),
        ("fsdp2", "250.50 MiB", "state['exp_avg_sq'] = torch.zeros_like(", False),  # an eighth of the embedding
        ("fsdp2", "16.00 MiB", "state['exp_avg_sq'] = torch.zeros_like(", False),  # FSDP1 may hold 1,024 x 4,096 whole
        ("fsdp2", "224.00 MiB", "torch._foreach_sqrt(exp_avg_sqs)", False),  # makes other tensors
        ("zero3", "224.00 MiB", "state['exp_avg_sq'] = torch.zeros_like(", False),  # whose states are flat
    ],
)
def test_a_moment_of_a_whole_weight_says_that_fsdp_does_not_divide_it(arm, asked, frame, is_whole):
    text = (
        f'Traceback (most recent call last):\n  File "torch/optim/adamw.py", line 172, in f\n    {frame}\n{new(asked)}'
    )
    given = Described(arm=arm, ranks=8, micro_batch=2, sequence=4096)
    causes, _ = explained(read(text), reading.find(text), Wanted(model="llama3-8b"), given)
    assert (causes[0].id == "oom-not-divided") == is_whole
    if is_whole:
        assert "14,336 x 4,096 of model.layers.0.mlp" in causes[0].what
        assert {"oom-gather", "oom-weights"}.isdisjoint(cause.id for cause in causes)


@for_each("number", [4, 8, 6])
@for_each("model", ["llama3-8b", "mistral-7b", "qwen2.5-7b"])
@for_each("arm", ["fsdp2", "ddp"])
@for_each("frame", ["state['exp_avg_sq'] = torch.zeros_like(", "torch._foreach_sqrt(exp_avg_sqs)"])
def test_what_the_update_makes_of_one_weight_is_of_this_ranks_part(number, model, arm, frame):
    """A rank of FSDP2 has as many rows as the others, rounded up: no other number of ranks explains a size."""
    weights = {tensor.shape for tensor in asked_for(Wanted(model=model), 1).tensors if len(tensor.shape) == 2}
    for rows, columns in weights:
        size_bytes = 4 * columns * (-(-rows // number) if arm == "fsdp2" else rows)
        if size_bytes <= reading.SMALL:  # its message has the size of a segment
            continue
        asked = binary_size(-(-size_bytes // reading.ROUND) * reading.ROUND, 4)
        head = 'Traceback (most recent call last):\n  File "torch/optim/adam.py", line 178, in f\n    '
        text = f"{head}{frame}\n{new(asked)}"
        error, given = reading.find(text), Described(arm=arm, ranks=number, micro_batch=1, sequence=2048)
        causes, training = explained(read(text), error, Wanted(model=model), given)
        of_update = next(cause for cause in causes if cause.id == "oom-optimizer")
        assert of_update.is_likely
        assert f" x 4 bytes{f' / {number} ranks' if arm == 'fsdp2' else ''}: " in of_update.what
        assert "shared by" not in f"{causes} {fitting.predicted(error, training, of_update)}"


TRAINED = 'model = GPT2LMHeadModel.from_pretrained("gpt2-xl").cuda()'
BRANCHES = f"if half:\n    {TRAINED.replace('.cuda', '.half().cuda')}\nelse:\n    {TRAINED}"
JUDGE = 'judge = AutoModelForCausalLM.from_pretrained("x/y", device_map={"": 0})'


@pytest.mark.parametrize(
    ("arm", "script", "names"),
    [
        ("ddp", TRAINED, "a reference"),  # of the one that is trained no rank has a second
        ("zero2", TRAINED, "a reference"),
        ("ddp", BRANCHES, "a reference"),
        ("ddp", f"{TRAINED}\n{JUDGE}", f"`{JUDGE}`"),
        ("ddp", f"{TRAINED}\nema = deepcopy(model)", "`ema = deepcopy(model)`"),
        ("zero3", TRAINED, f"`{TRAINED}`"),  # of which a rank should have a part
    ],
)
def test_the_only_model_of_a_script_is_no_second_one(arm, script, names):
    wanted, given = Wanted(model="qwen2.5-7b"), Described(arm=arm, ranks=8, micro_batch=1, sequence=2048)
    had = trainings.predicted_memory(wanted, given).peak_bytes + 2 * asked_for(wanted, 1).parameters
    for more in (0, 2**31):  # as much as a model, and something else
        said = said_beside((had + more) / 2**30 - 0.5, 0.5, wanted, given, stated_by=script)
        assert (f"such as {names}" in said) == (more == 0)
        assert (TRAINED in said) == (TRAINED in names)
        assert ("second, whole model" in said) == (more == 0 and arm != "zero3")
        assert ("the whole model beside this rank's part of it" in said) == (more == 0 and arm == "zero3")


FIXES = {
    "a model that was loaded in fp32": 'torch_dtype="bfloat16"',
    "activations, if recomputing is not in effect": 'File "torch/utils/checkpoint.py", line 1, in checkpoint',
    "the cache of keys and values (`use_cache`)": "model.config.use_cache = False",
}


@pytest.mark.parametrize("what", AS_MUCH)
def test_what_a_text_or_a_size_has_fixed_is_no_guess_for_an_excess(what):
    wanted = Wanted(model="llama3-8b")
    given = Described(arm="zero1", ranks=8, micro_batch=16, sequence=2048, checkpointing=True)
    size = dict(excess._takers(*known_of(wanted, given)), **dict(excess._longer(*known_of(wanted, given))))[what]
    logits = 16 * 2048 * 128_256 * 4 / 2**30
    allocated = (trainings.predicted_memory(wanted, given).peak_bytes + size) / 2**30
    if what in FIXES:
        is_said = [
            what in said_beside(allocated - 0.5, 0.5, wanted, given, stated_by=each) for each in ("", FIXES[what])
        ]
    else:  # the size of the logits
        is_said = [what in said_beside(allocated - each, each, wanted, given) for each in (0.5, logits)]
    assert is_said == [True, False]


def known_of(wanted: Wanted, given: Described) -> tuple:
    training = KnownTraining.of(wanted, given)
    return training, training.model


BACKWARD = """Traceback (most recent call last):
  File "/opt/torch/autograd/graph.py", line 824, in _engine_run_backward
    return Variable._execution_engine.run_backward(  # Calls into the C++ engine to run the backward pass
"""


@pytest.mark.parametrize(
    ("text", "asked", "cause", "likely", "says"),
    [
        ("num_elems = 7.62B\n", "9.28 GiB", "oom-logits", True, "= 16,384 tokens x 152,064 x 4 bytes, with the voc"),
        ("num_elems = 7.62B\n", "9.20 GiB", "oom-activations", False, "most messages"),
        ("num_elems = 5.62B\n", "9.28 GiB", "oom-activations", False, "most messages"),
        ("", "9.28 GiB", "oom-activations", False, "most messages"),
    ],
)
def test_where_the_backward_pass_begins_a_number_of_parameters_says_whose_logits_have_the_size(
    text, asked, cause, likely, says
):
    text = f"{text}{BACKWARD}{new(asked)}"
    (first, *_), _ = explained(read(text), reading.find(text), Wanted(), Described())
    assert (first.id, first.is_likely) == (cause, likely)
    assert says in str(first)
    recomputed = text.replace("  File", '  File "torch/utils/checkpoint.py", line 3, in backward\n    x()\n  File')
    (first, *_), _ = explained(read(recomputed), reading.find(recomputed), Wanted(), Described())
    assert first.id == "oom-activations"


@pytest.mark.parametrize(
    ("named", "says", "leaves"),
    [
        (
            "Process 7 has 33.90 GiB memory in use. Including non-PyTorch memory, this process has 41.96 GiB",
            "33.9",
            None,
        ),
        (
            "Process 7 has 20.00 GiB memory in use. Including non-PyTorch memory, this process has 41.96 GiB",
            "20",
            "15.57",
        ),
        # In a container this process is one of them.
        ("Process 7 has 33.90 GiB memory in use. Process 9 has 41.96 GiB", "33.9", None),
        ("Process 9 has 41.96 GiB", "", "35.57"),
    ],
)
def test_processes_that_a_message_names_are_told_with_what_they_have(named, says, leaves):
    message = (
        "CUDA out of memory. Tried to allocate 9.28 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.25 GiB is "
        f"free. {named} memory in use. Of the allocated memory 38.19 GiB is allocated by PyTorch, and 2.10 GiB is "
        "reserved by PyTorch but unallocated."
    )
    error = reading.find(message)
    given = Described(arm="zero3", ranks=8, micro_batch=1, sequence=16384, checkpointing=True)
    (first, *_), training = explain(error, Wanted(model="qwen2.5-7b"), given)
    assert first.id == "oom-other-process"
    found = re.search(r"process 7 has ([\d.]+) GiB", str(first.reasons))
    assert (found[1] if found else "") == says
    left = re.search(r"leave ([\d.]+) GiB of the GPU unexplained", str(first.reasons))
    assert (left[1] if left else None) == leaves
    outside = fitting.predicted(error, training, first).words.partition(" are outside PyTorch: ")[2]
    assert outside.startswith(f"process 7 has {says} GiB, and" if says else "other processes")


def test_who_gives_a_script_without_adapters_is_not_asked_for_them(tmp_path, monkeypatch, capsys):
    log, script, installed = tmp_path / "train.log", tmp_path / "train.py", tmp_path / "freeze.txt"
    log.write_text(new())
    installed.write_text("numpy==2.1.3\npeft==0.15.2\n")
    for text, asks in (("trainer = SFTTrainer(model)\n", False), ("weight.requires_grad = False\n", True)):
        script.write_text(text)
        said = said_of(f"{log} {script} {installed}", "--model llama3-8b --ranks 8", monkeypatch, capsys)
        assert ("give --lora-rank" in said) == asks


QLORA = """
model = AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-70B", quantization_config=bnb)
peft_config = LoraConfig(r=16)
args = SFTConfig(max_length=2048, per_device_train_batch_size=2, gradient_checkpointing=True)
fsdp_version: 2
num_processes: 4
"""


@pytest.mark.parametrize(
    ("bits", "linear_bytes", "scales_bytes"),
    [("", 2, 0), ("load_in_8bit=True", 1, 0), ("load_in_4bit=True", 0.5, 1 / 16)],
)
def test_quantized_weights_are_predicted_as_they_are_kept(bits, linear_bytes, scales_bytes):
    """By hand: embedding and head stay in 16 bits, adapters in fp32; each rank holds all scales."""
    training = known(f"{QLORA}BitsAndBytesConfig({bits})")
    words, adapters = 2 * 128256 * 8192, 207.1e6
    linear = 70.55e9 - words
    held = (linear * linear_bytes + words * 2 + adapters * 4) / 4 + linear * scales_bytes
    memory = trainings.predicted_memory(training.wanted, training.described)
    assert memory.at_peak["weights"] == pytest.approx(held, rel=0.01)


IN_LOSS = """Traceback (most recent call last):
  File "/opt/transformers/loss/loss_utils.py", line 55, in ForCausalLMLoss
    LINE
"""


@for_each("line", ["logits = logits.float()", "loss = nn.functional.cross_entropy(source, target)"])
@for_each("model", ["llama3-70b", "llama3-8b"])
@for_each("lora_rank", [None, 16])
@for_each("arm", ["fsdp2", "zero3"])
def test_the_logits_are_not_a_weight_of_their_size(line, model, lora_rank, arm):
    """With as many tokens as half the width, logits in fp32 are as large as the embedding in bf16."""
    tokens = asked_for(Wanted(model=model), 1).dimensions["hidden_size"] // 2
    error = reading.find(IN_LOSS.replace("LINE", line) + new(f"{tokens * 128256 * 4 / 2**30:.2f} GiB"))
    given = Described(arm=arm, ranks=4, micro_batch=1, sequence=tokens)
    causes, _ = explain(error, Wanted(model=model, lora_rank=lora_rank), given)
    assert causes[0].id == "oom-logits"
    assert {"oom-gather", "oom-weights", "oom-frozen-weight"}.isdisjoint(cause.id for cause in causes)


def test_embeddings_are_of_16_bits_or_32():
    """Nobody quantizes them, so that one byte of each element is no size of theirs."""
    error = reading.find(new("1.96 GiB"))
    causes, _ = explain(error, Wanted(model="llama3-70b", lora_rank=16), Described(arm="fsdp2", ranks=4))
    assert causes
    assert not any("x 1 bytes" in cause.what for cause in causes)


@pytest.mark.parametrize(
    "line", ["ref_model = AutoModelForCausalLM.from_pretrained(name)", "vllm_gpu_memory_utilization=0.6,"]
)
def test_what_a_script_puts_on_a_gpu_besides_is_named(line):
    wanted, given = Wanted(model="qwen2.5-7b"), Described(arm="zero3", ranks=8, micro_batch=1, sequence=2048)
    allocated = trainings.prediction_of(wanted, given).memory.peak_bytes / 2**30 + 20
    said = said_beside(allocated, 0.5, wanted, given, stated_by=f"args(\n    {line}\n)")
    assert f"more in tensors: `{line.strip(',')}`, which is not predicted, or something" in said


MARKED = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/opt/transformers/models/mistral/modeling_mistral.py", line 46, in forward
[rank0]:     down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
MARKS[rank0]: """


@pytest.mark.parametrize(
    ("marks", "named"),
    [
        ("", "up_proj"),
        (f"[rank0]: {' ' * 43}{'^' * 17}\n", "`self.gate_proj(x)`"),
        (f"[rank0]: {' ' * 31}{'~' * 31}^{'~' * 16}\n", "`self.act_fn(self.gate_proj(x)) * self.up_proj(x)`"),
    ],
)
def test_what_carets_mark_is_named_and_not_what_stands_beside_it(marks, named):
    error = reading.find(MARKED.replace("MARKS", marks) + new("224.00 MiB"))
    causes, _ = explain(error, Wanted(), Described())
    assert f"the text names {named}" in causes[0].reasons


@pytest.mark.parametrize("trainer", ["DPO", "SFT"])
def test_a_config_counts_pairs_as_its_script_does(trainer, tmp_path):
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}')
    script = f"trainer = {trainer}Trainer(model, args=Config(per_device_train_batch_size=4))"
    training = known(script, given=Described(config=config))
    assert training.rows == (8 if trainer == "DPO" else 4)
    assert not training.conflicts


REFERENCES = [
    ("DPOTrainer(model, args=args)", "zero2", 1, 2),
    ("KTOTrainer(model, ref_model=ref)", "zero1", 1, 2),
    ("DPOTrainer(model, ref_model=ref)", "zero3", 4, 2),
    ("DPOTrainer(model, args=args)", "zero3_cpu", None, 2),
    ("DPOTrainer(model, args=args)", "ddp", 1, 4),
    ("m = AutoModelForCausalLM.from_pretrained(n, dtype=torch.bfloat16)\nDPOTrainer(m)", "ddp", 1, 2),
    ("DPOTrainer(model, args=DPOConfig(precompute_ref_log_probs=True))", "zero2", None, 2),
    ("DPOTrainer(model, ref_model=ref, args=DPOConfig(precompute_ref_log_probs=True))", "zero2", 1, 2),
    ("DPOTrainer(model, peft_config=LoraConfig(r=8))", "zero2", None, 2),
    ("GRPOTrainer(model, args=GRPOConfig(beta=0.04))", "zero2", 1, 2),
    ("RLOOTrainer(model)\n# started with --beta 0.1", "zero3", 4, 2),
    ("GRPOTrainer(model)", "zero2", None, 2),  # by default beta is 0
    ("GRPOTrainer(model, args=GRPOConfig(beta=0.0))", "zero2", None, 2),
    ("GRPOTrainer(model, args=GRPOConfig(beta=0.04), peft_config=LoraConfig(r=8))", "zero2", None, 2),
    ("SFTTrainer(model)\nbeta = 0.04", "zero2", None, 2),
    ("SFTTrainer(model)", "zero2", None, 2),
    ("CPOTrainer(model)", "zero2", None, 2),
]


@pytest.mark.parametrize(("script", "arm", "parts", "width"), REFERENCES)
def test_the_reference_model_of_preferences_is_counted_and_said(script, arm, parts, width):
    given = Described(arm=arm, ranks=4, micro_batch=2, sequence=512, checkpointing=True)
    training = known(script, Wanted(model="gpt2"), given)
    wanted = training.model.parameters * width // parts if parts else 0
    assert training.described.reference in (None, width)
    error = reading.find(new("200.00 GiB"))
    causes, _ = explain(error, Wanted(), Described())
    words = fitting.predicted(error, training, causes[0]).words
    assert ("of it the reference model, which is frozen" in words) == bool(wanted)
    assert fitting.kept_bytes(training, training.described) == wanted
    alone = predicted_memory(training.wanted, replace(training.described, reference=None))
    assert predicted_memory(training.wanted, training.described).peak_bytes == alone.peak_bytes + wanted


def test_a_rank_of_adapters_is_not_asked_for_if_a_script_says_it():
    training = known("trainer = SFTTrainer(peft_config=LoraConfig(r=16))")
    assert training.has_adapters
    assert "lora_rank" not in training.missing


@pytest.mark.parametrize("kind", ["pasted", "file"])
def test_a_script_beside_an_error_is_no_traceback(kind, tmp_path, monkeypatch, capsys):
    """Nor are its words those of the lines above the message."""
    script, log = tmp_path / "train.py", tmp_path / "train.log"
    script.write_text("model, optimizer = accelerator.prepare(model, optimizer)\noptimizer.step()\n")
    log.write_text(new("500.00 MiB"))
    words = {"pasted": f"{new('500.00 MiB')} {script}", "file": f"{script} {log}"}[kind]
    assert not in_this_process(monkeypatch, f"oom {words}")
    said = capsys.readouterr().out
    assert "It rests on: " in said
    assert "the text names" not in said


OLDER_SIZES = "(GPU 0; 7.93 GiB total capacity; 6.71 GiB already allocated; {}399.36 MiB {}"
NEWER_SIZES = (
    "GPU 0 has a total {} of 7.93 GiB of which 512.00 MiB is free. {}Of the allocated memory 6.71 GiB is allocated by "
    "PyTorch, {}and 399.36 MiB is reserved by PyTorch but unallocated."
)
OF_PROCESS = "Including non-PyTorch memory, this process has 7.40 GiB memory in use. "
IN_POOLS = "with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), "
HALF_FREE = "512.00 MiB free; "
# As CUDACachingAllocator.cpp has written it: 1.0, 1.4, 1.8 with a limit, 2.1, 2.2 to 2.9, with a limit, on ROCm.
BY_RELEASE = {
    "CUDA out of memory. Tried to allocate 2.00 GiB " + OLDER_SIZES.format(HALF_FREE, "cached)"): 7.93,
    "CUDA out of memory. Tried to allocate 2.00 GiB "
    + OLDER_SIZES.format(HALF_FREE, "x").replace("399.36 MiB x", "7.10 GiB reserved in total by PyTorch)"): 7.93,
    "CUDA out of memory. Tried to allocate 2.00 GiB "
    + OLDER_SIZES.format(f"{HALF_FREE}7.20 GiB allowed; ", "x").replace(
        "399.36 MiB x", "7.10 GiB reserved in total by PyTorch)"
    ): 7.2,
    "CUDA out of memory. Tried to allocate 2.00 GiB. " + NEWER_SIZES.format("capacty", OF_PROCESS, ""): 7.93,
    "CUDA out of memory. Tried to allocate 2.00 GiB. " + NEWER_SIZES.format("capacity", OF_PROCESS, IN_POOLS): 7.93,
    "CUDA out of memory. Tried to allocate 2.00 GiB. " + NEWER_SIZES.format("capacity", "7.20 GiB allowed; ", ""): 7.2,
    "HIP out of memory. Tried to allocate 2.00 GiB. " + NEWER_SIZES.format("capacity", "", ""): 7.93,
}


@pytest.mark.parametrize("text", BY_RELEASE)
def test_the_message_of_each_release_has_the_same_sizes(text):
    """A limit that the process has set is its GPU: a training was said to fit the whole one."""
    error = reading.find(f"RuntimeError: {text}")
    total, gib = BY_RELEASE[text], 2**30
    sizes = [each / gib for each in (error.total, error.allocated, error.unallocated, error.asked.high)]
    assert sizes == pytest.approx([total, 6.71, 0.39, 2.0], abs=0.01)
    assert error.free / gib == pytest.approx(0.5 if total == 7.93 else 0.1, abs=0.01)
    assert error.outside >= 0


def test_the_message_of_the_runtime_before_the_allocator_had_one():
    text = "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58"
    assert reading.find(text).where == "GPU"


@pytest.mark.parametrize(
    ("flags", "decides"),
    [
        ("--model llama3-8b --arm zero3_cpu --ranks 2", "The offloaded states decide."),
        ("--model llama3-8b --arm fsdp2_cpu --ranks 8", "The offloaded states decide, unless each rank loads so."),
        ("--model llama3-8b --arm zero2 --ranks 8", "Loading decides."),
    ],
)
def test_of_a_full_host_it_is_said_what_a_node_needs_and_what_decides(flags, decides, tmp_path, monkeypatch, capsys):
    log = tmp_path / "host.log"
    log.write_text("['/usr/bin/python', 'train.py'] exits with return code = -9\n")
    said = said_of(log, flags, monkeypatch, capsys)
    in_this_process(monkeypatch, f"estimate {flags} --json")
    on_host = json.loads(capsys.readouterr().out)["estimate"]["host_bytes"]
    ranks = int(flags[-1])
    assert f"{binary_size(ranks * (on_host + 4e9))} from the start of training on" in said
    whole = 4 * 8_030_261_248
    assert f"{binary_size(ranks * 4e9)}, and {binary_size(ranks * (whole + 4e9))} if each rank" in said
    assert decides in said
    unsaid = flags.partition(" --ranks")[0]
    assert "from the start" not in said_of(log, unsaid, monkeypatch, capsys)


def test_advise_estimate_and_oom_predict_the_same_of_every_arm(monkeypatch, capsys):
    """Of groups of ranks, which are nodes, oom took one node of all."""
    in_this_process(monkeypatch, "advise --model llama3.2-1b --gpus 16 --gpu V100-16GB --json")
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {"ddp", "zero3", "fsdp2_cpu", "hsdp", "zero3_hpz"} < {row["arm"] for row in rows}
    for row in rows:
        names = ("arm", "micro_batch", "accumulation", "precision", "checkpointing", "sync_each_batch")
        chosen = {name: row[name] for name in names} | {"ranks": 16, "sequence": 2048}
        given = Described(**chosen, buckets=row["bucket_elements"], bucket_view=True)
        assert predicted_memory(Wanted(model="llama3.2-1b"), given).peak_bytes == row["peak_bytes"], row["arm"]
        asked = chosen | {"buckets": row["bucket_elements"]}
        flags = options({name: value for name, value in asked.items() if value})
        for gpu in ("", "--gpu V100-16GB"):
            in_this_process(monkeypatch, f"estimate --model llama3.2-1b {' '.join(flags)} {gpu} --json")
            predicted = json.loads(capsys.readouterr().out)["estimate"]
            assert predicted["peak_bytes"] == row["peak_bytes"], (row["arm"], gpu)


HAD = {
    "micro_batch": ("per_device_train_batch_size=4", "--micro-batch 4 and"),
    "checkpointing": ("gradient_checkpointing=True", "activations recomputed ("),
    "arm": ('{"zero_optimization": {"stage": 3}}', "--arm zero3 ("),
}


@pytest.mark.parametrize("name", HAD)
def test_what_was_at_work_in_the_run_that_failed_is_no_change(name):
    """Flags win over the text, but the run had what its text says."""

    def would_fit(text):
        text += "\n" + LOSS + new("7.83 GiB")
        given = Described(arm="zero2", ranks=64, micro_batch=8, sequence=2048, checkpointing=False)
        error = reading.find(text)
        training = KnownTraining.of(Wanted(model="llama3-8b"), given, stated(read(text)))
        error = replace(error, allocated=None, total=141 * 2**30)
        return fitting.predicted(error, training, cause_of("oom-logits")).words

    said, change = HAD[name]
    assert all(each in would_fit("") for _, each in HAD.values())
    assert [each for _, each in HAD.values() if each not in would_fit(said)] == [change]


def test_where_the_numbers_of_a_log_refute_what_counts_no_change_is_said_to_fit():
    """Stage 2 on four GPUs: activations that are kept would have taken more than the log has."""
    text = LOSS + new("9.28 GiB", "5.71 GiB", "70.11 GiB", "2.30 GiB")
    given = Described(arm="zero2", ranks=4, micro_batch=4, sequence=4096, checkpointing=False)
    pasted, error = read(text), reading.find(text)
    causes, training = explained(pasted, error, Wanted(model="qwen2.5-7b"), given)
    which = fitting.predicted(error, training, causes[0])
    assert (which.may_fit, "would fit" in which.words) == (None, False)
    assert "The log shows something else: --checkpointing predicts that." in which.words
    recomputed = explained(pasted, error, Wanted(model="qwen2.5-7b"), replace(given, checkpointing=True))
    remedy, other = (
        remedies.with_remedies(error, known, each, fitting.predicted(error, known, each[0]), pasted)[0].remedy
        for each, known in ((causes, training), recomputed)
    )
    assert remedy == other


TITAN = {
    "new": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n[parallelism]\n'
    'data_parallel_shard_degree = 8\n[activation_checkpoint]\nmode = "full"\n[optimizer]\nimplementation = "foreach"\n',
    "old": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 2\nseq_len = 8192\n'
    "data_parallel_shard_degree = 8\n[activation_checkpoint]\nmode = 'full'\n[optimizer]\nimplementation = 'foreach'\n",
}


@for_each("age", TITAN)
@for_each(
    ("was", "written", "expected"),
    [
        ("", "", {}),
        ('"full"', '"selective"', {"checkpointing": None}),
        ('"full"', '"none"', {"checkpointing": False}),
        ('"foreach"', '"fused"', {"optimizer": "adamw"}),
        ("degree = 8", "degree = -1", {"ranks": None}),
        ("degree = 8", "degree = 8\ndata_parallel_replicate_degree = 2", {"ranks": 16, "arm": "hsdp"}),
        ("degree = 8", "degree = 1\ndata_parallel_replicate_degree = 4", {"ranks": 4, "arm": "ddp"}),
        ("degree = 8", "degree = 8\ntensor_parallel_degree = 2", {"ranks": None, "arm": None}),
        ("degree = 8", 'degree = 8\nfsdp_reshard_after_forward = "never"', {"arm": "fsdp2_grad_op"}),
        ("8192\n", "8192\nenable_cpu_offload = true\n", {"arm": "fsdp2_cpu", "optimizer": "single_tensor"}),
        ("8192\n", '8192\ndtype = "bfloat16"\n', {"precision": "bf16_pure"}),
    ],
)
def test_a_config_of_torchtitan_is_read(age, was, written, expected, tmp_path):
    config = tmp_path / "titan.toml"
    config.write_text(TITAN[age].replace("'", '"').replace(was, written))
    used = KnownTraining.of(Wanted(), Described(config=config)).used
    usual = {"model": "llama3-8b", "arm": "fsdp2", "ranks": 8, "micro_batch": 2, "sequence": 8192, "plain": True}
    usual |= {"checkpointing": True, "optimizer": "foreach", "precision": None} | expected
    if usual["arm"] in ("ddp", None):
        usual["plain"] = None
    assert {name: used[name] for name in usual} == usual


DIVIDING = {
    "titan.toml": TITAN["new"].replace("degree = 8", "degree = 8\ntensor_parallel_degree = 2"),
    "run.sh": "torchrun pretrain_gpt.py --model llama3-8b --seq-length 8192 --micro-batch-size 2 "
    "--tensor-model-parallel-size 2",
}


@pytest.mark.parametrize("name", DIVIDING)
def test_where_ranks_share_layers_no_size_is_of_a_whole_tensor(name, tmp_path, monkeypatch, capsys):
    """7.83 GiB are the logits of this micro-batch, and of no rank that has a half of the vocabulary."""
    (tmp_path / "train.log").write_text(new("7.83 GiB"))
    (tmp_path / name).write_text(DIVIDING[name])
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch, f"oom train.log {name}")
    printed = " ".join(capsys.readouterr().out.split())
    assert "Layers, tokens or experts are divided among ranks" in printed
    assert "Likely" not in printed
    assert "to hear" not in printed


@pytest.mark.parametrize(
    ("name", "content", "is_told"),
    [
        ("mine.yaml", "trainer: {devices: 8}\nmodel: {micro_batch_size: 2}\n", True),
        ("ds.json", '{"zero_optimization": {"stage": 2}}', False),
        ("titan.toml", TITAN["new"], False),
        ("uv.lock.toml", '[[package]]\nname = "deepspeed"\nversion = "0.19.8"\n', False),
    ],
)
def test_a_config_of_an_unknown_kind_is_said_to_be_one(name, content, is_told, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_text(content)
    (tmp_path / "train.log").write_text(new())
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch, f"oom train.log {name}")
    assert (f"{name} is of no kind that is known here" in " ".join(capsys.readouterr().out.split())) == is_told


def test_a_setting_by_the_size_is_not_marked_as_one_of_the_text(monkeypatch, capsys, tmp_path):
    (tmp_path / "train.py").write_text("SFTConfig(max_length=4096, per_device_train_batch_size=2)")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.log").write_text(LOSS + new("9.28 GiB"))
    in_this_process(monkeypatch, "oom train.log train.py --model qwen2.5-7b --arm zero2")
    printed = " ".join(capsys.readouterr().out.split())
    assert "--micro-batch 2*, --sequence 8192 (as the size says)" in printed
