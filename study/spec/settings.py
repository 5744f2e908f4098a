"""The settings of a run: one frozen dataclass with bounds, checked before anything expensive happens.

How training is distributed is not here: only the arm's yaml says that. `resolve` fills in fields that are None, so that
the record's `requested` shows what was really asked for.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from study.errors import Stop
from study.spec.shapes import NO_FUSED_ATTENTION, SHAPES, is_local, model_type
from study.spec.validation import nearest, sentence

MAX_STEPS = 10_000_000  # a record holds a loss and a rate for every step
Count = Annotated[int, Field(gt=0)]
Steps = Annotated[int, Field(gt=0, le=MAX_STEPS)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]  # the rank is added to it, and numpy takes 32 bits
Threads = Annotated[int, Field(gt=0, le=1024)]
Ranks = Annotated[int, Field(ge=2)]
Tokens = Annotated[int, Field(ge=2)]  # one token leaves nothing to predict
CapGiB = Annotated[float, Field(ge=0.01, le=2**20)]  # under a cap of a few MiB not even Python starts
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Optimizer = Literal["adamw", "adamw_8bit", "sgd", "adafactor", "muon"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train one model under the arm that `accelerate launch --config_file` names, measure it, leave a run folder."""

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False, revalidate_instances="always")

    task: Literal["imdb", "wikitext", "synthetic"] | None = None
    """imdb: BERT learns whether a review is positive. wikitext: GPT learns to predict the next token. synthetic: random
    rows of the shape that the model takes (text, images or sound), with nothing to learn; for virtual ranks only.
    Default: synthetic for a --model with --init none, imdb otherwise."""
    model: str | None = None
    """A hub name, a local folder, or a built-in shape: bert-tiny bert-base bert-large gpt-tiny gpt2 gpt2-medium
    gpt2-large gpt2-xl gpt3-2.7b gpt-j-6b gemma2-9b gpt3-13b gpt-neox-20b llama3-8b llama3.2-1b qwen2.5-7b qwen3-8b
    qwen3-32b mistral-7b gemma3-1b phi3-mini olmo2-7b mixtral-8x7b qwen3-30b-a3b t5-large modernbert-large vit-large
    whisper-large, and a small one of each family, as llama-micro. Default: the source documents' model on a GPU, a
    tiny one without."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, if it needs any. Without it such a model is refused."""
    tokenizer: str | None = None
    """A hub name or a local folder. Default: the model's own. The embedded corpus needs none."""
    data: str | None = None
    """'hub', 'embedded' (made by rule, no network), or a local folder. Default: the hub on a GPU, embedded without."""
    init: Literal["pretrained", "random", "in_place", "none"] | None = None
    """pretrained: published weights. random: drawn once per model and seed, saved, and loaded by every arm, so that
    losses can be compared. in_place: drawn where they live and never saved, for shapes too large for that; losses of
    two arms are then not comparable. none: tensors with shapes and no values, which need no memory; for virtual ranks
    only, which then tell of any model on any machine. Default: pretrained for a hub name, random otherwise."""
    precision: Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure", "fp8"] = "fp32"
    """fp32; bf16: autocast over fp32 weights; fp16: the same with PyTorch's loss scaling, for GPUs without bf16;
    bf16_cast: bf16 weights with an fp32 master copy; bf16_pure: weights and optimizer states in bf16, and so is the
    master copy, which DeepSpeed keeps all the same; fp8: products in 8 bits, by what Accelerate finds for it on a GPU
    that has them. It was never run, and is not predicted."""
    optimizer: Optimizer = "adamw"
    """adamw; adamw_8bit: bitsandbytes', with moments of 8 bits; sgd: with momentum 0.9; adafactor: PyTorch's, with a
    row and a column for each matrix of second moments; muon: DeepSpeed's, with one momentum for the matrices of the
    layers, and AdamW for the rest."""
    lora_rank: Count | None = None
    """Freeze the weights, and train two matrices of this rank beside each linear layer (LoRA), and the head."""
    train_only: str | None = None
    """Freeze the weights but those whose name this regular expression matches."""
    micro_batch: Count = 8
    """Rows per rank and forward pass."""
    accumulation: Count = 1
    """Forward and backward passes per optimizer step."""
    epochs: Positive = 1.0
    """Passes over the training rows. --steps overrides it."""
    steps: Steps | None = None
    """Optimizer steps. Default: what --epochs comes to."""
    warmup_steps: Count = 5
    """The first steps, trained like the others but left out of time and memory figures."""
    log_every: Count = 10
    """Steps in a window. Between windows, and only there, losses are fetched, written and shown."""
    eval_every: Count | None = None
    """Steps between evaluations. Default: at the end only."""
    checkpoint_every: Count | None = None
    """Steps between checkpoints in the run folder, of which the last two are kept. Default: none."""
    dies_after: Count | None = None
    """Kill the first rank after so many steps, unless the run goes on from a checkpoint: for measuring how it does."""
    resume: Path | None = None
    """The folder of a run that was interrupted: go on from its last good checkpoint, in a run folder of its own. The
    settings must be those of that run. A checkpoint is unpickled: give only your own."""
    sequence: Tokens | None = None
    """Tokens per row. Default: 128, or 1024 for wikitext on real text."""
    train_rows: Count | None = None
    """Rows to train on. Default: 800 for imdb, as in the source document; all for wikitext."""
    eval_rows: Count | None = None
    """Rows to evaluate on. Default: 200 for imdb, as in the source document; 100 for wikitext."""
    lr: Positive | None = None
    """Peak learning rate. Default: 5e-5, or 1e-3 for the tiny models."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises to its peak. After them it falls linearly to zero."""
    weight_decay: NotNegative = 0.0
    """The optimizer's weight decay."""
    dropout: Probability | None = None
    """Dropout probability everywhere in the model. Default: the model's own."""
    seed: Seed = 42
    """Decides the weights (--init random), the rows, their order and the dropout masks."""
    compile: bool = False
    """Compile the model with torch.compile."""
    checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    attention: Literal["sdpa", "eager"] | None = None
    """sdpa: fused attention. eager: written out, with its score matrices kept. Default: sdpa where transformers has
    it: not for GPT-J and Gemma 2."""
    tf32: bool = True
    """Let fp32 matrix products use TF32 where the device has it. No effect on a CPU."""
    instruments: bool = True
    """After training, take a few untimed steps to count collectives and split memory by component."""
    log_with: Literal["tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "aim", "clearml"] | None = None
    """Send losses, rates and step times to one of Accelerate's trackers as well, between windows of timed steps. Its
    package must be installed. What threads of its own it keeps runs beside the training. Default: none."""
    save: bool = False
    """After training, write the weights to the run folder, as a model that transformers can load."""
    threads: Threads | None = None
    """CPU threads per rank. Default: the cores divided by the ranks on this machine, and on a machine without a GPU
    by two at least, so that `single` gets no more than a rank of the other arms."""
    virtual_ranks: Ranks | None = None
    """See rank 0 of so many, alone in one process: memory, collectives and compute time are real, and there is no
    loss, because nothing comes from the others."""
    memory_cap_gib: CapGiB | None = None
    """Emulate a smaller device: GiB that a rank may allocate. On a GPU PyTorch's allocator keeps to it, and what is not
    PyTorch's (context, NCCL) comes on top. Without one the kernel does: the private memory a rank takes from the moment
    it builds its model, the offloaded part included."""
    hosts: Annotated[int, Field(ge=2, le=4)] | None = None
    """Hosts of the emulated cluster over which the ranks are spread. `study sweep --cluster` gives it, and the run
    fails if its ranks find themselves elsewhere."""
    bandwidth_mbit: Positive | Literal["unlimited"] | None = None
    """The declared bandwidth of each host's link, in Mbit/s: as hosts."""
    run_dir: Path | None = None
    """Where the record goes. Default: a new folder under runs/."""
    nvme_dir: Path | None = None
    """Where an arm that offloads to disk may write. Default: beside the run folder. Emptied when the run ends."""
    cache_dir: Path = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "zero-study"
    """Where prepared data and drawn weights are kept between runs."""


Repair = Literal["none", "fresh_model", "engaged"]  # of the published script: see study/bench/as_printed.py
HALF_WEIGHTS = ("bf16_cast", "bf16_pure")  # precisions whose weights are bf16
AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}  # precisions that are autocast over fp32 weights


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check(settings: Settings, name_of: Callable[[str], str] = flag) -> None:
    """Refuse impossible values, naming the flag, what was expected and what came."""
    try:
        _adapter().validate_python(settings)
    except ValidationError as error:
        raise Stop(sentence(error, name=lambda path: name_of(path[0])), "correct the value") from None
    if settings.init == "none" and settings.virtual_ranks is None:
        raise Stop("--init none leaves nothing to train", "give --virtual-ranks as well, or another --init")
    if settings.init == "none" and settings.precision == "fp16":
        raise Stop("--init none has no values to scale for fp16", "give --precision bf16, which takes as much memory")
    if settings.task == "synthetic" and settings.virtual_ranks is None:
        raise Stop("--task synthetic has nothing to learn", "give --virtual-ranks as well, or another --task")
    if settings.bandwidth_mbit is not None and settings.hosts is None:
        raise Stop("--bandwidth-mbit is that of an emulated cluster", "give --hosts as well, or neither")
    if settings.hosts is not None and settings.virtual_ranks is not None:
        raise Stop("--hosts needs ranks that send something", "give --hosts or --virtual-ranks, not both")
    if settings.virtual_ranks and (settings.checkpoint_every or settings.resume):
        raise Stop("virtual ranks have no training to go on with", "give them no --checkpoint-every and no --resume")
    if settings.hosts and settings.checkpoint_every:
        raise Stop("--checkpoint-every sends what an emulated link counts as the steps'", "give it without --hosts")
    if settings.steps is not None:
        check_steps(settings, settings.steps)


def check_steps(settings: Settings, steps: int) -> None:
    """Refuse a number of steps, given or from --epochs, that does not fit the other settings."""
    given = f"--steps {steps}" if settings.steps is not None else f"--epochs {settings.epochs:g} ({steps} steps)"
    if steps > MAX_STEPS:
        raise Stop(f"{given} is more than {MAX_STEPS} steps", "give fewer")
    if steps <= settings.lr_warmup_steps:
        what = f"--lr-warmup-steps {settings.lr_warmup_steps} never ends within {given}"
        raise Stop(what, "give fewer warm-up steps, or more steps")
    if steps <= settings.warmup_steps:
        what = f"{given} leaves nothing to time after --warmup-steps {settings.warmup_steps}"
        raise Stop(what, "give more steps, or fewer warm-up steps")


def build(values: dict, where: str) -> Settings:
    """Settings from names and values in a file, checked; `where` names the file in an error."""
    names = [field.name for field in fields(Settings)]
    if unknown := next((name for name in values if name not in names), None):
        raise Stop(f"{where}: there is no setting {unknown}", nearest(unknown, names))
    settings = Settings(**values)
    try:
        check(settings, name_of=str)
    except Stop as stop:
        raise Stop(f"{where}: {stop.what}", stop.remedy) from None
    return settings


@cache
def _adapter() -> TypeAdapter:
    return TypeAdapter(Settings)


def resolve(settings: Settings, gpu: bool) -> Settings:
    """Fill in the defaults that depend on the task and on whether there is a GPU."""
    task = settings.task or ("synthetic" if settings.init == "none" and settings.model else "imdb")
    imdb, model = task == "imdb", settings.model
    if model is None:
        # `bert-large-uncased` is the hub's name, with weights; `bert-large` is the bare shape, for the embedded corpus.
        bert = "bert-large" if settings.data == "embedded" else "bert-large-uncased"
        model = (bert if imdb else "gpt2") if gpu else ("bert-tiny" if imdb else "gpt-tiny")
    tiny = model in ("bert-tiny", "gpt-tiny")
    data = settings.data or ("hub" if gpu and not tiny else "embedded")
    if task == "synthetic":
        data = "synthetic"
    # Of other types, transformers' own class knows it.
    fused = {shape["model_type"] for shape in SHAPES.values()}
    kind = model_type(model)
    attention = "eager" if kind in NO_FUSED_ATTENTION else "sdpa" if kind in fused else None
    defaults = {
        "task": task,
        "model": model,
        "data": data,
        "init": "random" if model in SHAPES or is_local(model) else "pretrained",
        "sequence": 128 if imdb or data in ("embedded", "synthetic") else 1024,
        "lr": 1e-3 if tiny else 5e-5,
        "train_rows": 800 if imdb else None,
        "eval_rows": 200 if imdb else 100,
        "attention": attention,
    }
    blanks = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    return replace(settings, **blanks, cache_dir=settings.cache_dir.expanduser())


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    """The rate for a step counted from 0: a linear rise, then a linear fall to zero, as the source document's."""
    if step < settings.lr_warmup_steps:
        return settings.lr * (step + 1) / settings.lr_warmup_steps
    return settings.lr * (steps - step) / max(1, steps - settings.lr_warmup_steps)


def options(values: dict) -> list[str]:
    """Settings by name as words of a command line."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            words += [flag(name), str(value)]
    return words


def as_dict(settings: Settings) -> dict:
    return {f.name: str(v) if isinstance(v := getattr(settings, f.name), Path) else v for f in fields(settings)}
