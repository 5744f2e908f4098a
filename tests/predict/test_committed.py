"""The traces that come with the package are those that a fresh trace finds, and need no torch."""

import itertools
import json
import random
import zipfile

import committed_traces
import pytest

from study.core import shapes
from study.core.arms import load_arm
from study.core.shapes import SHAPES, of_size
from study.predict import PlaceFlags, Question, StepFlags, TrainingFlags, advise, named
from study.predict.advise import _arms, fewest
from study.predict.architecture import Wanted, asked_for
from study.predict.prediction import Prediction
from study.predict.trace import committed, sections, tracing, transformer
from study.predict.trace.options import TraceOptions
from study.predict.trace.tape import compact, read
from study.predict.trace.transformer import Transformer
from tests.conftest import ROOT, python
from tests.predict.families import SMALL, config_of

pytestmark = pytest.mark.usefixtures("without_traces")
SOURCES = committed_traces.sources()
ADAPTED = next(source for source in SOURCES if source.rank)


def compare(model: Transformer, options: TraceOptions, *rows: int) -> None:
    """Assert that committed traces are the fresh ones, byte for byte and in the same order."""
    assert json.loads(json.dumps(tracing.look(model))) == json.loads(json.dumps(model.look))
    for count in rows:
        known = committed.tape(model.member, options, count)
        assert known is not None, (model.name, options, count)
        assert tracing.whole(model, options, (count,)) == [compact(known)]


def with_more_layers(model: Transformer, source: committed_traces.Source, more: int) -> Transformer:
    layers = committed.DIMENSIONS[source.family]["layers"]
    config = model.dimensions | {layers: model.dimensions[layers] + more}
    return Transformer.of(config, "drawn", dropout=source.dropout, lora_rank=model.lora_rank)


def drawn(source: committed_traces.Source, chance: random.Random) -> Transformer:
    """A model of a member, of dimensions that no sample had; or the built-in shape of the member."""
    if source.family is None:
        return source.samples[0][0]
    model, _ = source.sample(chance)
    return with_more_layers(model, source, chance.randrange(4) if source.member.layers == committed.MANY_LAYERS else 0)


def test_the_file_has_every_member_once_and_no_others():
    names = [source.name for source in SOURCES]
    with zipfile.ZipFile(committed.PATH) as archive:
        assert sorted(archive.namelist()) == sorted([*names, "versions"])


# Llama, GPT-2 with dropout and in several precisions, and with eager attention, and Llama with adapters; then all.
@pytest.mark.parametrize(
    ("source", "step"),
    [
        *zip((SOURCES[0], SOURCES[1], SOURCES[6], ADAPTED), (14, 12, 6, 5), strict=True),
        *(pytest.param(source, 1, marks=pytest.mark.slow) for source in SOURCES),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_committed_trace_is_a_fresh_one(source, step):
    chance = random.Random(source.name)
    for options in source.options[::step]:
        model = drawn(source, chance)
        if committed.key(options, 1) in committed._content(source.name)["passes"]:
            tokens = chance.randrange(40, min(model.look.limit or 400, 400))
            compare(model, options._replace(sequence=tokens), 1, chance.choice((2, 3)))  # one pass is of both


HEADS = [source for source in SOURCES if source.family not in (None, "bert")]


# GPT-2 with eager attention, whose mask is freed late; tied Qwen; Llama with adapters; then all. No step is divisible
# by the three ways to cut, so each step meets all three.
@pytest.mark.parametrize(
    ("source", "step"),
    [
        *zip((SOURCES[6], SOURCES[14], ADAPTED), (11, 13, 11), strict=True),
        *(pytest.param(source, 1, marks=pytest.mark.slow) for source in HEADS),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_chunked_loss_is_written_from_a_whole_one(source, step):
    """In one piece, in equal ones, and with a smaller last one: what is held and done is that of a fresh trace."""
    chance = random.Random(source.name)
    passes = {*committed._content(source.name)["passes"]}
    asked = [options for options in source.options if committed.key(options, 1) in passes]
    cuts = ((17, 17, 1), (128, 128, 2), (129, 349, 3))
    for options, (least, most, rows) in [*itertools.product(asked, cuts)][::step]:
        model = drawn(source, chance)
        options = options._replace(sequence=chance.randint(least, most), loss="chunked", keeps_logits=True)
        (fresh,) = tracing.whole(model, options, (rows,))
        known = committed.tape(model.member, options, rows)
        assert known is not None
        assert read(known, model.tensors) == read(fresh, model.tensors), (options, rows)


def test_a_loss_in_chunks_of_as_many_tokens_as_words_is_traced():
    """Copies of the weight and of the hidden states look alike then. And an encoder has no logits of a vocabulary."""
    model, encoder = (Transformer.of(shapes.config_of(name), name) for name in ("llama3-8b", "bert-base"))
    options = TraceOptions(128256, "bf16", "sdpa", True, "chunked", cuda=True)
    assert committed.tape(model.member, options, 1) is None
    assert committed.tape(model.member, options._replace(sequence=128255), 1)
    assert committed.tape(encoder.member, options._replace(sequence=128), 1) is None


@pytest.mark.parametrize("precision", ["bf16", "bf16_cast"])
@pytest.mark.parametrize(("times", "zero3_linear"), [(2, False), (0.5, True)])
def test_factors_of_a_chunked_loss_whose_sizes_in_two_types_are_equal_are_told_apart(times, zero3_linear, precision):
    """As with Mistral-7B in 16 sequences of 4,096 tokens, and with stage 3 in 4."""
    model = Transformer.of(shapes.config_of("mistral-7b"), "mistral-7b")
    tokens = int(times * model.look.vocabulary)
    options = TraceOptions(tokens, precision, "sdpa", True, "chunked", zero3_linear=zero3_linear, cuda=True)
    here, near = (committed.tape(model.member, options._replace(sequence=each), 1) for each in (tokens, tokens - 1))
    kept, nearly = (sum(read(tape, model.tensors).profile.most) for tape in (here, near))
    assert kept == pytest.approx(nearly, rel=1e-4)


# Of each family, with copies of all weights that are freed after the last layer.
@pytest.mark.parametrize("source", SOURCES[:3], ids=lambda source: source.name)
def test_models_with_any_number_of_layers_repeat_the_one_in_the_middle(source):
    model, _ = source.sample(random.Random(7))
    cast = [options for options in source.options if options.precision == "bf16"]
    for more, options in zip((0, 1, 6), cast, strict=False):
        compare(with_more_layers(model, source, more), options._replace(sequence=50), 5)


@pytest.mark.parametrize(("name", "changes", "precision", "checkpointing"), SMALL["layers"])
def test_sections_make_the_tape_that_was_cut(name, changes, precision, checkpointing):
    model = Transformer.of(config_of(name, **changes), name)
    options = TraceOptions(40, precision, "sdpa", checkpointing, cuda=True)
    (whole,) = tracing.whole(model, options, (2,))
    (marked,) = tracing.whole(model, options, (2,), sections.MarkingRecorder)
    cut = sections.cut(marked)
    plan = [(section.name, section.layer, number) for number, section in enumerate(cut)]
    assert compact(committed.joined(plan, {number: section.entries for number, section in enumerate(cut)})) == whole
    # A layer's entries are those of others.
    different = {str(section.entries) for section in cut}
    assert len(different) < 0.75 * len(cut)


def different_fourth(monkeypatch) -> None:
    """Plant a layer that does what no other does."""
    unplanted = tracing._built

    def built(*arguments):
        model = unplanted(*arguments)
        model.model.layers[3].register_forward_hook(lambda _, __, out: out * 2.0)
        return model

    monkeypatch.setattr(tracing, "_built", built)


def test_layers_that_do_other_things_are_not_committed(monkeypatch):
    different_fourth(monkeypatch)
    with pytest.raises(committed_traces.NoSum, match="two layers in the middle"):
        SOURCES[0]._pass(SOURCES[0].options[0], (1,))


@pytest.mark.parametrize("loss", ["chunked", "in_place"])
@pytest.mark.parametrize("source", [SOURCES[0], SOURCES[1], ADAPTED], ids=lambda source: source.name)
def test_few_layers_of_a_known_family_tell_what_more_of_them_do(source, loss, monkeypatch):
    """Neither loss is in the file."""
    model = with_more_layers(source.sample(random.Random(5))[0], source, 2)
    options = TraceOptions(40, "bf16", "sdpa", loss == "in_place", loss, cuda=True)
    through_all = tracing.whole(model, options, (2,))
    lengthened = []
    monkeypatch.setattr(tracing, "lengthened", lambda *asked: lengthened.append(asked) or sections.lengthened(*asked))
    assert tracing.followed(model, options, (2,)) == through_all
    assert len(lengthened) == 1


def test_a_layer_that_does_other_things_is_followed_itself(monkeypatch):
    different_fourth(monkeypatch)
    model = with_more_layers(SOURCES[0].sample(random.Random(5))[0], SOURCES[0], 2)
    options = TraceOptions(40, "bf16", "sdpa", loss="chunked", cuda=True)
    assert tracing.followed(model, options, (2,)) == tracing.whole(model, options, (2,))


CODE = """
import sys
sys.modules["torch"] = None
from study.predict.architecture import named
from study.core.arms import load_arm
from study.core.recipes import RECIPES
from study.core.shapes import config_of
from study.predict.placement import Placement
from study.predict.trace.transformer import Transformer
from study.predict.prediction import estimate
from study.predict.training import Batch, Training
model = Transformer.of(config_of("gpt-j-6b"), "gpt-j-6b")
how = RECIPES["bf16_cast"], Batch(rows=2, tokens=1024), Placement.of(load_arm("zero3"), 8, "cuda")
print(estimate(Training(model, *how, attention="eager")).peak_bytes)
llama = Transformer.of(config_of("llama3-8b"), "llama3-8b")
print(estimate(Training(llama, *how, attention="sdpa", loss="chunked")).peak_bytes)
print(estimate(Training(model, *how, attention="eager", loss="chunked")).peak_bytes)
"""


def test_without_torch_committed_traces_are_enough_and_others_are_a_sentence(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin", "PYTHONPATH": str(ROOT)}
    done = python("-c", CODE, env=env)
    assert all(int(peak_bytes) > 10e9 for peak_bytes in done.stdout.split())
    assert len(done.stdout.split()) == 2
    assert "this model with these options has to be traced, and torch is not installed" in done.stderr
    assert "or give --no-chunked-loss, which needs at least as much memory" in done.stderr


WANTING = """
import sys
sys.modules["torch"] = None
from study.core.arms import load_arm
from study.core.recipes import RECIPES
from study.core.shapes import config_of
from study.predict.placement import Placement
from study.predict.trace.transformer import Transformer
from study.predict.prediction import estimate
from study.predict.training import Batch, Training
precision, model = sys.argv[1:]
how = RECIPES[precision], Batch(rows=1, tokens=1024), Placement.of(load_arm("zero3"), 8, "cuda")
print(estimate(Training(Transformer.of(config_of(model), model), *how)).peak_bytes)
"""


@pytest.mark.parametrize(
    ("precision", "model", "said"),
    [
        ("bf16", "olmo2-7b", "or give --precision bf16_cast: its traces come with the package"),
        ("bf16", "t5-small", "or name a model whose traces come with the package: bert-tiny, bert-base, "),
    ],
)
def test_without_torch_what_needs_no_trace_is_named(precision, model, said, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin", "PYTHONPATH": str(ROOT)}
    assert said in python("-c", WANTING, precision, model, env=env).stderr


# Built-in shapes whose passes with adapters are traced when they are asked for.
TRACED = (
    "bert-tiny", "bert-base", "bert-large", "gpt-tiny", "gpt-j-6b", "gemma2-9b", "gpt-neox-20b", "gemma3-1b",
    "phi3-mini", "olmo2-7b", "mixtral-8x7b", "qwen3-30b-a3b", "t5-large", "modernbert-large", "vit-giant",
    "deberta-v2-xlarge", "vit-large", "whisper-large",
)  # fmt: skip


def test_built_in_shapes_with_adapters_have_their_passes_in_the_file():
    """All passes that an advice tries. Those that lack some are named."""
    lacking = []
    for name in SHAPES:
        content = committed._content(named(name, lora_rank=16).member.name) or {"passes": ()}
        asked = [committed.key(each, rows) for each in committed_traces.with_adapters((0,)) for rows in (1, 2)]
        if not {*asked} <= {*content["passes"]}:
            lacking.append(name)
    assert lacking == [name for name in SHAPES if name in TRACED or name.endswith("-micro")]


def test_an_advice_reads_few_tapes(monkeypatch):
    """Each of 80 layers takes a tenth of a second: 37 were read where it was found how many GPUs are enough."""
    read = []
    tape = committed.tape
    monkeypatch.setattr(committed, "tape", lambda *asked: read.append(asked) or tape(*asked))
    transformer.traced.cache_clear()
    Prediction.of.cache_clear()
    flags = TrainingFlags(), PlaceFlags(gpu="H100"), StepFlags()
    assert fewest(named("llama3-70b", lora_rank=16), *flags).with_offloading == 1
    assert len(read) <= 23


# They have 456, 898 and 270 a layer.
@pytest.mark.parametrize(
    ("name", "rank", "most"), [("llama3-8b", None, 470), ("llama3-70b", 16, 920), ("gpt2", None, 280)]
)
def test_committed_tapes_have_few_entries(name, rank, most):
    """An answer reads all of them: their number decides how long it takes. `compact` would leave out hardly any."""
    model = named(name, lora_rank=rank)
    asked = Question.of(model, TrainingFlags(gpus=8), PlaceFlags(gpu="H100"), StepFlags(checkpointing=rank is not None))
    options = asked.training(load_arm("zero3"), 2, 1).trace_options
    tape = committed.tape(model.member, options, 2)
    layers = {tensor.block for tensor in model.tensors if tensor.block.startswith("layer.")}
    assert len(tape) <= most * len(layers)
    assert len(tape) - len(compact(tape)) <= 2 * len(layers)


@pytest.mark.parametrize(("gpus", "flags"), [(8, {}), (1, {"quantized": "nf4"})])
def test_an_advice_with_adapters_traces_nothing(gpus, flags, monkeypatch):
    """Every arm that is tried, also beside 4 bits."""
    monkeypatch.setattr(transformer, "_kept", lambda *asked: pytest.fail(f"traced: {asked[1:]}"))
    place = PlaceFlags(gpu="H100", **flags)
    assert advise(Question.of(named("llama3-8b", lora_rank=13), TrainingFlags(gpus=gpus), place)).choice


BILLIONS = (0.5, 1, 1.3, 1.5, 1.7, 2.7, 3, 4, 6, 6.7, 7, 8, 9, 12, 13, 14, 20, 24, 30, 32, 40, 65, 70)
# Of these sizes, by the rank of adapters, no known model has all its passes in the file.
NEAR_NONE = {None: [1, 40], 16: [1, 2.7, 40]}
# Arms that train adapters are compared in bf16_cast unless somebody gives another precision.
RECIPES_ASKED = {None: (None, "bf16", "bf16_cast", "fp32"), 16: ("bf16_cast",)}


class Traced(Exception):
    """Somebody would wait for a trace, beside a bar that says so."""


@pytest.fixture
def nothing_is_traced(monkeypatch):
    def traced(model: Transformer, *asked):
        raise Traced(model.name, *asked)

    monkeypatch.setattr(transformer, "_kept", traced)


def is_in_the_file(name: str, rank: int | None) -> bool:
    """Whether the file has each pass that an advice on a model asks for."""
    model = named(name, lora_rank=rank)
    in_file = (committed._content(model.member.name) or {"passes": ()})["passes"]
    if not in_file:
        return False
    bits = (None, "nf4") if rank else (None,)
    for precision, quantized, gpus, again in itertools.product(RECIPES_ASKED[rank], bits, (1, 8), (False, True)):
        training, place = TrainingFlags(gpus=gpus, precision=precision), PlaceFlags(gpu="H100", quantized=quantized)
        question = Question.of(model, training, place, StepFlags(checkpointing=again))
        for arm in _arms(question):
            options = question.training(arm, 1, 1).trace_options
            if not {committed.key(options, rows) for rows in (1, 2)} <= {*in_file}:
                return False
    return True


@pytest.mark.parametrize("rank", [None, 16])
@pytest.mark.usefixtures("nothing_is_traced")
def test_a_number_of_parameters_means_a_model_that_need_not_be_traced(rank):
    traced = []
    for billions in BILLIONS:
        try:
            chosen = asked_for(Wanted(params=1e9 * billions, lora_rank=rank), 1).name
        except Traced as one:
            chosen = one.args[0]
        if not is_in_the_file(chosen, rank):
            assert not any(is_in_the_file(name, rank) for name in of_size(1e9 * billions)), (billions, chosen)
            traced.append(billions)
    assert traced == NEAR_NONE[rank]


@pytest.mark.parametrize("rank", [None, 16])
@pytest.mark.usefixtures("nothing_is_traced")
def test_an_advice_on_a_number_of_parameters_traces_nothing(rank):
    """Of 1.3 billion a GPT-Neo was taken, whose trace takes 9 s of a processor, or 30 s with adapters."""
    model = asked_for(Wanted(params=1.3e9, lora_rank=rank), 1)
    training = TrainingFlags(gpus=1, precision="bf16_cast" if rank else None)
    assert advise(Question.of(model, training, PlaceFlags(gpu="H100"))).choice
