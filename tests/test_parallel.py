"""Tests of tensor, pipeline, context and expert parallelism, as Megatron-LM divides a model."""

from dataclasses import replace

import pytest

from study.cli.configs import write
from study.cli.predictions import estimate
from study.cli.steps import Divided, Kernels, Links, Training
from study.errors import Stop
from study.predictor.advice.advise import Advice, advise, best_layout
from study.predictor.advice.question import Given, Question
from study.predictor.architecture import decoder, named
from study.predictor.estimate import estimate as predict
from study.predictor.outside.published import Row, rows
from study.predictor.outside.trainings import compare
from study.predictor.parallel import pipeline
from study.predictor.parallel.layout import Layout
from study.predictor.setup import Setup
from study.predictor.timing.replay import length_s, replay
from study.predictor.timing.steptime import Machine, step_time
from study.predictor.wanted import Wanted
from study.report.advice import in_words

STAGE_1 = {"zero_optimization": {"stage": 1}}
LLAMA = Setup(
    model=named("llama3-8b"),
    deepspeed=STAGE_1,
    ranks=16,
    precision="bf16_cast",
    sequence=2048,
    micro_batch=1,
    accumulation=8,
    device="cuda",
    layout=Layout(tensor=4, pipeline=2),
)


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(1, 1, 3), (4, 1, 8), (4, 1, 2), (4, 2, 8), (2, 4, 6)])
def test_a_schedule_waits_as_long_as_the_papers_say(ranks, chunks, microbatches):
    # Megatron-LM (2104.04473), section 2.2: (p - 1) / v of a forward and a backward pass of a rank
    layout = Layout(pipeline=ranks, chunks=chunks)
    seconds = {"forward": [1.0 / chunks] * layout.stages, "backward": [2.0 / chunks] * layout.stages}
    tasks = pipeline.tasks(layout, microbatches, seconds)
    assert len(tasks) == 2 * microbatches * layout.stages
    assert length_s(replay(tasks)) == pytest.approx(3 * microbatches + 3 * (ranks - 1) / chunks)


def test_no_more_passes_wait_than_the_first_rank_warms_up_with():
    for layout in (Layout(pipeline=4), Layout(pipeline=4, chunks=2)):
        for place in range(4):
            waiting = most = 0
            for each in pipeline.order(layout, place, 8):
                waiting += 1 if each.phase == "forward" else -1
                most = max(most, waiting)
            assert (waiting, most) == (0, pipeline.in_flight(layout, place, 8))


def test_states_of_a_rank_by_hand():
    model = named("llama3-8b")
    at_peak = predict(LLAMA).at_peak
    layers = sum(t.elements for t in model.tensors if t.block.startswith("layer.") and len(t.shape) == 2) / 2 / 4
    ends = 128256 * 4096 / 4  # the embeddings on the first rank, the output matrix on the last
    norms = 16 * 2 * 4096  # whole on each rank
    assert at_peak["weights"] == pytest.approx(2 * (layers + ends + norms), rel=1e-5)
    assert at_peak["gradients"] == 2 * at_peak["weights"]
    assert at_peak["master"] + at_peak["moments"] == pytest.approx(at_peak["weights"] * 6 / 2)  # among two replicas
    alone = predict(replace(LLAMA, deepspeed=None)).at_peak
    assert alone["master"] == pytest.approx(2 * at_peak["master"], rel=1e-6)


def test_nanotron_keeps_more_and_divides_layers_by_costs():
    """By hand: a layer has 218 million weights and the head 525, so 34.4 layers are divided; 32 layers keep a gate."""
    megatrons = Layout(tensor=4, pipeline=2)
    layout = replace(megatrons, by_nanotron=True)
    assert [len(blocks) for blocks in megatrons.blocks(LLAMA.model)] == [17, 17]
    assert [len(blocks) for blocks in layout.blocks(LLAMA.model)] == [19, 15], "18 layers of 17.2, and both ends"
    assert layout.in_words == "tp4 pp2"
    one_stage = {library: Layout(tensor=4, by_nanotron=library == "nanotron") for library in ("nanotron", "megatron")}
    peaks = {name: predict(replace(LLAMA, layout=layout)).at_peak for name, layout in one_stage.items()}
    more = {part: peaks["nanotron"][part] - peaks["megatron"][part] for part in ("gradients", "activations", "weights")}
    weights = peaks["megatron"]["weights"] / 2
    assert more == pytest.approx({"gradients": 2 * weights, "activations": 32 * 2048 * 2 * 14336 / 4, "weights": 0})
    unsharded = replace(LLAMA, deepspeed=None, layout=one_stage["nanotron"])
    assert predict(unsharded).at_peak["gradients"] == pytest.approx((4 + 2 + 2) * weights)


def test_ranks_share_activations_and_operations():
    whole = predict(replace(LLAMA, ranks=1, layout=Layout()))
    for layout in (Layout(tensor=8), Layout(context=8), Layout(tensor=2, context=4)):
        part = predict(replace(LLAMA, ranks=8, layout=layout))
        assert part.at_peak["activations"] == pytest.approx(whole.at_peak["activations"] / 8, rel=0.02)
        assert part.flops_per_rank_and_step == pytest.approx(whole.flops_per_rank_and_step / 8, rel=0.1)
    machine = Machine(gpu="H100-80GB", host_pace=0.0)
    alone = step_time(replace(LLAMA, ranks=1, layout=Layout()), machine).seconds
    assert step_time(replace(LLAMA, ranks=8, layout=Layout(tensor=8)), machine).seconds > alone / 8


def test_a_pipeline_costs_memory_and_a_bubble():
    one, four = (replace(LLAMA, ranks=4, layout=Layout(pipeline=4), accumulation=passes) for passes in (1, 4))
    assert predict(four).at_peak["activations"] > 2 * predict(one).at_peak["activations"]
    step = step_time(replace(four, accumulation=64), Machine(gpu="H100-80GB", host_pace=0.0))
    assert 0 < step.parts["bubble"] < 0.15 * step.seconds
    between = step_time(replace(LLAMA, layout=Layout(tensor=8), ranks=8), Machine(gpu="H100-80GB", gpus_per_node=4))
    within = step_time(replace(LLAMA, layout=Layout(tensor=8), ranks=8), Machine(gpu="H100-80GB", gpus_per_node=8))
    assert between.seconds > within.seconds


def test_experts_are_divided():
    model = named("mixtral-8x7b")
    setup = replace(LLAMA, model=model, ranks=16, layout=Layout(expert=8))
    whole = predict(replace(setup, layout=Layout(pipeline=1)))
    part = predict(setup)
    assert part.at_peak["weights"] < 0.2 * whole.at_peak["weights"]
    assert part.traffic["all_to_all"] > 0


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tensor=3), "16 ranks are no multiple of those that tp3 needs"),
        (Layout(tensor=16), "8 num_key_value_heads do not divide evenly among 16 ranks"),
        (Layout(pipeline=16, chunks=4), "32 layers are fewer than 64 stages"),
        (Layout(pipeline=16, chunks=2), "interleaving needs passes that are a multiple of the 16 stages"),
        (Layout(expert=4), "1 experts and 16 replicas do not divide evenly among 4"),
    ],
)
def test_impossible_layouts_are_refused(layout, words):
    with pytest.raises(Stop) as stop:
        replace(LLAMA, layout=layout)
    assert words in stop.value.what


def test_only_states_are_shared():
    with pytest.raises(Stop, match="only states are shared"):
        replace(LLAMA, deepspeed={"zero_optimization": {"stage": 3}})


def test_the_command(capsys):
    training = Training(accumulation=8, sequence=2048)
    wanted = Wanted(model="llama3-8b")
    links = Links(gpu="H100")
    answer = estimate(wanted, training, Kernels(), Divided(tp=4, pp=2), links, ranks=16, as_json=True)
    assert answer["estimate"]["peak_bytes"] == predict(LLAMA).peak_bytes
    estimate(wanted, training, Kernels(), Divided(tp=4, pp=2), links, ranks=16)
    assert "A rank of 16 under zero1 tp4 pp2 needs" in capsys.readouterr().out
    with pytest.raises(Stop, match="--tp 0"):
        estimate(wanted, training, Kernels(), Divided(tp=0), links, ranks=16)


def test_a_model_is_divided_only_if_no_arm_fits(tmp_path):
    model = decoder(70e9, 80, 8192, 28672, kv_heads=8)
    question = Question.of(model, 32, "H100", Given(link="eth-25", price=2.0))
    assert advise(question).choice.arm == "zero3"
    choice = best_layout(question)
    assert (choice.arm, choice.fits) == ("megatron", True)
    advice = Advice(question, (choice,), choice, None)
    assert choice.micro_batch * choice.accumulation * 32 == question.batch * choice.row_ranks
    assert f"{choice.step_s * 2 * 32 / 3600:.2g} at 2 for an hour of a GPU" in in_words(advice)[0]
    (path,) = write(tmp_path / "train.sh", choice, question)
    text = path.read_text()
    assert f"--tensor-model-parallel-size {choice.layout.tensor} " in text
    assert "--num-query-groups 8 " in text
    with pytest.raises(Stop, match=r"ends in \.sh"):
        write(tmp_path / "train.yaml", choice, question)
    for change in ({"optimizer": "muon"}, {"precision": "fp32"}, {"model": named("gpt-j-6b")}):
        assert best_layout(replace(question, **change)).limit == "Megatron-LM", "no library trains it so"


def test_published_rows_are_near():
    """The rows are tests: nothing was fitted to them."""

    def published(source: str, words: str) -> Row:
        return next(row for row in rows() if source in row.source and row.parallel == words)

    memory, _ = compare(published("SimuMax", "tp4")).quantities
    assert abs(memory.error) < 0.05
    (time,) = compare(published("InternEvo", "tp2")).quantities
    assert abs(time.error) < 0.15
