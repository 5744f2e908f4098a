"""`study estimate`: predicts what a rank holds and moves, and whether it fits."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

import tyro

from study.cli import loading as loads
from study.cli import steps
from study.errors import Stop
from study.io.numbers import size
from study.io.tables import say, say_wrapped, show
from study.machine.gpus import GPUS, gpu_named
from study.predictor import combinations
from study.predictor.combinations import beside_bytes
from study.predictor.estimate import Estimate
from study.predictor.estimate import estimate as predict
from study.predictor.memory.memory_kinds import MemoryKinds, in_words, memory_kinds, outside_bytes, reserve_bytes
from study.predictor.outside.stored import accuracy
from study.predictor.papers import recipe_of, states_bytes
from study.predictor.parallel.layout import SHORT, Layout
from study.predictor.setup import Frozen, Fsdp, Loss, Optimizer, Quantized, Setup, trainers_name
from study.predictor.timing.steptime import StepTime, step_time
from study.predictor.wanted import Wanted, asked_for, count_of
from study.spec import arms
from study.spec.optimizers import refusal
from study.spec.options import AsJson

Fits = Literal["yes", "only just", "no"]
FITS = {"yes": "It fits on {}.", "only just": "It fits only just on {}.", "no": "It does not fit on {}."}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """How the training computes. The defaults are the trainer's."""

    attention: Literal["sdpa", "eager"] | None = None
    """sdpa: fused. eager: written out. Default: sdpa if transformers has it for the model."""
    loss: Loss = "whole"
    """How the loss is computed. whole: from all logits at once, as in the trainer. in_place: by a kernel that
    overwrites the logits. chunked: part by part, as Liger does."""
    optimizer: Optimizer = "fused"
    """fused: PyTorch's fused AdamW, as in the trainer. foreach: AdamW with a copy of a moment during the update. The
    others are the trainer's."""
    frozen: Frozen = "as_weights"
    """The dtype of weights that do not train. as_weights: that of the other weights. bf16: bf16, under autocast."""
    quantized: Quantized | None = None
    """With --lora-rank: how the frozen linear layers are kept, as in QLoRA."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cuda: offloaded tensors are in host memory. cpu: host and device are one memory."""
    cuda: tuple[Literal["attention", "dropout", "autocast"], ...] = ("attention", "dropout", "autocast")
    """Where the CUDA kernels keep other bytes than the CPU's, and the prediction follows CUDA. Only for models that are
    predicted from their config.json, and with --device cuda."""

    def values(self) -> dict:
        """Return the fields of a setup, without those that are left to the model."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divided:
    """How ranks divide a model, as Megatron-LM does. The ranks that are left share optimizer states."""

    tp: int = 1
    """Tensor parallelism: ranks that divide each layer, and what lies between layers."""
    pp: int = 1
    """Pipeline parallelism: ranks that have some of the layers each; --accumulation is their microbatches."""
    cp: int = 1
    """Context parallelism: ranks that divide each row."""
    ep: int = 1
    """Expert parallelism: ranks that divide the experts of a mixture."""
    vp: int = 1
    """With --pp: chunks of layers on each rank. 1: the schedule is 1F1B; more: it is interleaved."""

    @property
    def layout(self) -> Layout | None:
        """Return the layout; None if nothing is divided."""
        sizes = {name: getattr(self, short) for name, short in SHORT.items()}
        if wrong := [f"--{SHORT[name]} {size}" for name, size in sizes.items() if size < 1]:
            raise Stop(f"{' and '.join(wrong)}: at least one rank has it", "give 1 or more")
        return Layout(**sizes) if self != Divided() else None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is predicted for a rank."""

    arm: str
    setup: Setup
    whole: Estimate
    kinds: MemoryKinds
    gpu: str | None
    step: StepTime | None
    beside: float = 0.0  # the share of the GPU that another program takes

    @property
    def fits(self) -> Fits | None:
        """Return whether it fits on the GPU. "only just": not with the reserve that an advice keeps. None: no GPU."""
        if self.gpu is None:
            return None
        free_bytes = GPUS[self.gpu].memory_bytes - self.whole.peak_bytes - beside_bytes(self.gpu, self.beside)
        if free_bytes < outside_bytes(self.setup.ranks):
            return "no"
        return "yes" if free_bytes >= reserve_bytes(GPUS[self.gpu]) else "only just"


def estimate(
    wanted: Annotated[Wanted, tyro.conf.arg(name="")],
    training: Annotated[steps.Training, tyro.conf.arg(name="")],
    kernels: Annotated[Kernels, tyro.conf.arg(name="")],
    divided: Annotated[Divided, tyro.conf.arg(name="")],
    *,
    ranks: int = 8,
    fsdp: Fsdp | None = None,
    recipe: str | None = None,
    gpu: str | None = None,
    beside: float = 0.0,
    host_pace: float | None = None,
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
        divided: How ranks divide the model.
        ranks: Number of processes that train together, one per GPU.
        fsdp: Instead of an arm, predict PyTorch's own FSDP without Accelerate, with each layer as a unit.
        recipe: Names the bytes per parameter of the paper's model states: mixed-adam, fp32-adam and others. Default:
            the recipe of the precision and the optimizer.
        gpu: Kind of GPU: H100, A100-40GB, L4 and others. Adds whether it fits, the time of a step, and how PyTorch's
            allocator frees cached memory when the GPU is nearly full.
        beside: With --gpu: the share of the GPU that another program takes, such as a reference model, or the
            gpu_memory_utilization of an inference engine.
        host_pace: With --gpu: seconds of the host for a kernel, over 51 us; study peaks measures it. 0: CUDA graphs.
            Default: unknown.
        explain: With --gpu: list every constant behind the predicted time, with its source.
        loading: Predict instead the host memory that a node needs until its ranks have loaded the model.
        as_json: Print the prediction as JSON.
    """
    layout = divided.layout
    arm = training.arm or ("zero1" if layout else steps.ARM)
    chosen = arms.load_arm(arm)
    if fsdp is None and (stop := refusal(chosen, trainers_name(kernels.optimizer), training.precision)):
        raise stop
    if (explain or beside or host_pace is not None) and gpu is None:
        raise Stop("--explain and --host-pace need a predicted time, and --beside the memory of a GPU", "give --gpu")
    combinations.check_share(beside)
    prediction = None
    if wanted.params is not None and wanted == Wanted(params=wanted.params):
        if gpu is not None:
            what = "the time of a step depends on the model's layers"
            raise Stop(what, "give --layers and --hidden, or leave out --gpu")
        parameters = count_of(wanted.params)
    else:
        links = None if gpu is None else steps.Links(gpu=gpu_named(gpu), host_pace=host_pace)
        prediction = _predicted(wanted, training, arm, kernels.values() | {"layout": layout}, ranks, fsdp, links)
        prediction = dataclasses.replace(prediction, beside=beside)
        parameters = prediction.whole.parameters
    if loading:
        return _loading(prediction, as_json)
    stage = {"full_shard": 3, "shard_grad_op": 2}.get(fsdp or "", chosen.stage or 0)
    parts = layout.tensor * layout.pipeline if layout else 1
    used = recipe or recipe_of(training.precision, kernels.optimizer)
    states = states_bytes(parameters / parts, stage, ranks // parts, used)
    if as_json:
        answer = {"arm": fsdp or arm, "ranks": ranks, "parameters": parameters}
        return answer | {"published_states_bytes": states} | _as_dict(prediction)
    if prediction:
        _show(prediction)
    _show_bytes("the ZeRO paper's model states", states | {"total": sum(states.values())})
    if prediction:
        say_wrapped("", accuracy(), *prediction.setup.model.remarks())
    if explain and prediction and prediction.step and prediction.gpu:
        say("")
        show(steps.parts(prediction.step))
        say("")
        show(steps.explained(prediction.step, prediction.gpu))
    return None


def _predicted(
    wanted: Wanted,
    training: steps.Training,
    arm: str,
    values: dict,
    ranks: int,
    fsdp: Fsdp | None,
    links: steps.Links | None,
) -> Prediction:
    model = asked_for(wanted, training.sequence or 1)
    options = training.values(model) | values
    if fsdp:
        setup = Setup(model=model, fsdp=fsdp, ranks=ranks, **options)
    else:
        setup = Setup.of_arm(model, arm, ranks=ranks, **options)
    gpu = links.gpu if links else None
    step = step_time(setup, links.machine(setup.ranks)) if links else None
    shown = f"{fsdp or arm} {setup.layout.in_words}" if setup.layout else fsdp or arm
    return Prediction(shown, setup, predict(setup), memory_kinds(setup, gpu), gpu, step)


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
    return combinations.answers(prediction.setup, prediction.gpu, prediction.beside)


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
    say("")


def _answer(prediction: Prediction) -> str:
    """Return the peak of a rank, what nvidia-smi will show, and whether it fits, in a sentence or two."""
    setup = prediction.setup
    gpu = prediction.gpu
    memory = "GPU memory" if setup.on_gpu else "memory"
    peak = size(prediction.whole.peak_bytes)
    text = f"A rank of {setup.ranks} under {prediction.arm} needs {peak} of {memory} at the peak, predicted"
    if setup.on_gpu and prediction.kinds.driver is not None:
        text += f"; nvidia-smi will show {size(prediction.kinds.driver)}"
    if gpu is None or prediction.fits is None:
        return f"{text}."
    other = " beside the other program" if prediction.beside else ""
    return f"{text}. {FITS[prediction.fits].format(f'{gpu} ({size(GPUS[gpu].memory_bytes)}){other}')}"


def _show_bytes(name: str, sizes: Mapping[str, float]) -> None:
    show([{name: part, "per rank": size(part_bytes)} for part, part_bytes in sizes.items()])
