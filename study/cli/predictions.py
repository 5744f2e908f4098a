"""`study estimate`: predicts what a rank holds and moves, and whether it fits."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

import tyro

from study.cli import combinations, steps
from study.cli import loading as loads
from study.cli.steps import ARM, Kernels, Links, Training
from study.errors import Stop
from study.io.numbers import size
from study.io.tables import say, say_wrapped, show
from study.machine.gpus import GPUS
from study.predictor.advice.advise import MISS, fills
from study.predictor.advice.question import beside_bytes, check_share
from study.predictor.estimate import Estimate
from study.predictor.estimate import estimate as predict
from study.predictor.memory.memory_kinds import MemoryKinds, in_words, memory_kinds, reserve_bytes
from study.predictor.papers import recipe_of, states_bytes
from study.predictor.setup import OF_4_BITS, Fsdp, Setup, distribution, trainers_name
from study.predictor.timing.machine import Machine
from study.predictor.timing.steptime import StepTime, step_time
from study.predictor.wanted import Wanted, asked_for, count_of
from study.report.outside import accuracy
from study.spec import arms
from study.spec.optimizers import refusal
from study.spec.options import AsJson
from study.spec.shapes import with_size

Fits = Literal["yes", "only just", "no"]
FITS = {"yes": "It fits on {}.", "only just": "It fits only just on {}.", "no": "It does not fit on {}."}


def fits_on(gpu: str, peak_bytes: float, taken_bytes: float = 0) -> Fits:
    """Return whether a peak fits on a GPU of which other programs take some bytes. An advice keeps a reserve free."""
    headroom_bytes = GPUS[gpu].memory_bytes - taken_bytes - reserve_bytes(GPUS[gpu]) - peak_bytes
    if headroom_bytes < 0:
        return "no"
    return "yes" if headroom_bytes >= MISS * peak_bytes else "only just"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is predicted for a rank."""

    arm: str
    setup: Setup
    whole: Estimate
    kinds: MemoryKinds
    machine: Machine | None
    step: StepTime | None
    other_share: float = 0.0  # the share of the GPU that another program takes

    @property
    def gpu(self) -> str | None:
        return self.machine.gpu if self.machine else None

    @property
    def fits(self) -> Fits | None:
        """Return whether it fits on the GPU, by the rule of an advice. None: no GPU."""
        if self.gpu is None:
            return None
        answer = fits_on(self.gpu, self.whole.peak_bytes, beside_bytes(self.gpu, self.other_share))
        is_full = fills(self.gpu, self.kinds.driver, self.other_share)
        return "only just" if answer == "yes" and is_full else answer


def estimate(
    wanted: Annotated[Wanted, tyro.conf.arg(name="")],
    training: Annotated[Training, tyro.conf.arg(name="")],
    kernels: Annotated[Kernels, tyro.conf.arg(name="")],
    links: Annotated[Links, tyro.conf.arg(name="")],
    *,
    ranks: Annotated[int, tyro.conf.arg(aliases=("--gpus",))] = 8,
    fsdp: Fsdp | None = None,
    recipe: str | None = None,
    beside: float = 0.0,
    explain: bool = False,
    loading: bool = False,
    as_json: AsJson = False,
) -> dict | None:
    """Predict the memory of one rank and the bytes that it moves in a step. Nothing is run.

    With --gpu the answer says whether it fits, and the time of a step. With --params alone, only the ZeRO paper's model
    states are given.

    Args:
        wanted: The model.
        training: The training.
        kernels: How it computes.
        links: The machine.
        ranks: Number of processes that train together, one per GPU.
        fsdp: Instead of an arm, predict PyTorch's own FSDP without Accelerate, with each layer as a unit.
        recipe: Names the bytes per parameter of the paper's model states: mixed-adam, fp32-adam and others. Default:
            the recipe of the precision and the optimizer.
        beside: With --gpu: the share of the GPU that another program takes, such as a reference model, or the
            gpu_memory_utilization of an inference engine.
        explain: With --gpu: list every constant behind the predicted time, with its source.
        loading: Predict instead the host memory that a node needs until its ranks have loaded the model.
        as_json: Print the prediction as JSON.
    """
    arm = training.arm or ARM
    is_number = _is_only_a_number(wanted)
    _refuse(arm, fsdp, training, kernels, links, is_number)
    if (explain or beside) and links.gpu is None:
        raise Stop("--explain needs a predicted time, and --beside the memory of a GPU", "give --gpu")
    check_share(beside)
    prediction = None
    if not is_number:
        known = steps.full_setup(asked_for(wanted, training.sequence or 1), training, kernels, links, ranks)
        prediction = _predicted(known if fsdp is None else steps.with_fsdp(known, fsdp), beside)
    if loading:
        return _loading(prediction, as_json)
    parameters = prediction.whole.parameters if prediction else count_of(wanted.params or 0)
    used = recipe or recipe_of(training.precision, kernels.optimizer)
    spread: dict = {"fsdp": fsdp} if fsdp else distribution(arms.load_arm(arm), ranks)
    stage = {"full_shard": 3, "shard_grad_op": 2}.get(spread.get("fsdp", ""), arms.load_arm(arm).stage or 0)
    parts = spread.get("tensor_ranks", 1)
    states = states_bytes(parameters / parts, stage, spread.get("group", ranks) // parts, used)
    if as_json:
        answer = {"arm": fsdp or arm, "ranks": ranks, "parameters": parameters, "published_states_bytes": states}
        return answer | _as_dict(prediction)
    if prediction:
        _show(prediction)
    else:
        total = size(sum(states.values()))
        say_wrapped(f"Model states alone take {total} on each of {ranks} ranks, by the ZeRO paper.", "")
    _show_bytes("the ZeRO paper's model states", states | {"total": sum(states.values())})
    if prediction:
        _show_basis(prediction, explain)
    return None


def _refuse(arm: str, fsdp: Fsdp | None, training: Training, kernels: Kernels, links: Links, is_number: bool) -> None:
    """Raise Stop for a training that is impossible, and for a time without the model's layers."""
    stop = refusal(arms.load_arm(arm), trainers_name(kernels.optimizer), training.precision)
    if fsdp is None and stop:
        raise stop
    if is_number and links.gpu is not None:
        what = "the time of a step depends on the model's layers"
        raise Stop(what, "give --layers and --hidden, or leave out --gpu")


def _is_only_a_number(wanted: Wanted) -> bool:
    """Return whether a number of parameters is all that is known of a model. A text such as 7B may name a shape."""
    if wanted.params is None or wanted != Wanted(params=wanted.params):
        return False
    return not (isinstance(wanted.params, str) and with_size(wanted.params))


def _predicted(known: steps.Asked, other_share: float) -> Prediction:
    setup = known.setup
    machine = known.machine
    step = step_time(setup, machine) if machine else None
    kinds = memory_kinds(setup, machine.gpu if machine else None)
    return Prediction(known.arm, setup, predict(setup), kinds, machine, step, other_share)


def _loading(prediction: Prediction | None, as_json: bool) -> dict | None:
    """Print the host memory of a node while its ranks load, or return it."""
    if prediction is None:
        raise Stop("--loading needs a model with its tensors", "give --model, or --layers and --hidden")
    if as_json:
        return {"loading": loads.needed_bytes(prediction.setup, prediction.gpu)}
    loads.tell(prediction.setup, prediction.gpu)
    return None


def _as_dict(prediction: Prediction | None) -> dict:
    """Return the values of a prediction, or None for each if only model states are known."""
    if prediction is None:
        return dict.fromkeys(("estimate", "kinds", "fits", "step", "answers"))
    return {
        "estimate": dataclasses.asdict(prediction.whole),
        "kinds": dataclasses.asdict(prediction.kinds),
        "fits": prediction.fits,
        "step": steps.as_dict(prediction.step) if prediction.step else None,
        "answers": [dataclasses.asdict(answer) for answer in _answers(prediction)],
    }


def _answers(prediction: Prediction) -> list[combinations.Answer]:
    return combinations.answers(prediction.setup, prediction.machine, prediction.other_share)


def _show(prediction: Prediction) -> None:
    whole = prediction.whole
    say_wrapped(_answer(prediction), *map(combinations.in_words, _answers(prediction)), "")
    say(f"at the peak ({whole.peak_when}), buffers and temporaries included:")
    _show_bytes("component", whole.at_peak | {"total": whole.peak_bytes})
    if prediction.setup.on_gpu:
        say_wrapped("", in_words(prediction.kinds))
    moved = ", ".join(f"{kind} {size(moved_bytes)}" for kind, moved_bytes in whole.traffic.items()) or "none"
    say("", f"host memory: {size(whole.host_bytes)}; collectives of a step: {moved}")
    if prediction.step:
        say(f"time, predicted: {steps.in_words(prediction.step)}")
        say_wrapped(*steps.of_bf16(prediction.setup, prediction.gpu), *_of_tf32(prediction), *_of_4_bits(prediction))
    say("")


def _of_tf32(prediction: Prediction) -> list[str]:
    """Say that products of fp32 are counted in TF32, if the GPU has it."""
    machine = prediction.machine
    if prediction.setup.precision != "fp32" or machine is None or not machine.tf32:
        return []
    if "tf32" not in GPUS[machine.gpu].peaks:
        return []
    return ["Matrix products run in TF32, which our trainer switches on. For full fp32, PyTorch's default: --no-tf32."]


def _of_4_bits(prediction: Prediction) -> list[str]:
    """Say which releases of bitsandbytes are slower, without autocast: seen with 0.46.1 and 0.47.0 on a CPU."""
    if prediction.setup.precision != "fp32" or prediction.setup.quantized not in OF_4_BITS:
        return []
    return [
        "Products of 4-bit weights are counted in 16 bits. Where values are in fp32, bitsandbytes up to 0.46 computes "
        "them in fp32, and ignores bnb_4bit_compute_dtype: use 0.47 or later, or autocast."
    ]


def _show_basis(prediction: Prediction, explain: bool) -> None:
    """Show how far off such predictions are, and with `explain` every constant behind the time."""
    say_wrapped("", accuracy(), *prediction.setup.model.remarks())
    if explain and prediction.step and prediction.gpu:
        say("")
        show(steps.parts(prediction.step))
        say("")
        show(steps.explained(prediction.step, prediction.gpu))


def _answer(prediction: Prediction) -> str:
    """Return the peak of a rank, what nvidia-smi will show, and whether it fits, in a sentence or two."""
    setup = prediction.setup
    gpu = prediction.gpu
    memory = "GPU memory" if setup.on_gpu else "memory"
    peak = size(prediction.whole.peak_bytes)
    text = f"A rank of {setup.ranks} under {prediction.arm} needs {peak} of {memory} at the peak, predicted"
    is_larger = gpu is not None and prediction.whole.peak_bytes > GPUS[gpu].memory_bytes  # so no tool will show it
    if setup.on_gpu and prediction.kinds.driver is not None and not is_larger:
        text += f"; nvidia-smi will show {size(prediction.kinds.driver)}"
    if gpu is None or prediction.fits is None:
        return f"{text}."
    other = " beside the other program" if prediction.other_share else ""
    free = f"{size(GPUS[gpu].memory_bytes)}, less {size(reserve_bytes(GPUS[gpu]))} for context and fragmentation"
    return f"{text}. {FITS[prediction.fits].format(f'{gpu} ({free}){other}')}"


def _show_bytes(name: str, sizes: Mapping[str, float]) -> None:
    show([{name: part, "per rank": size(part_bytes)} for part, part_bytes in sizes.items()])
