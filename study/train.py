"""What `accelerate launch` runs: read the request, prepare, train, measure, and leave a run folder.

    accelerate launch --config_file accelerate_configs/zero3.yaml study/train.py
    accelerate launch --config_file accelerate_configs/zero3.yaml study/train.py --help
"""

import contextlib
import datetime
import functools
import logging
import math
import os
import signal
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the launcher puts study/ there, not the repository

import psutil
import torch
import torch.distributed as dist
import transformers
import tyro
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed
from torch.utils.flop_counter import FlopCounterMode

from study import arms, hardware, meter, nvme, observe, record, tasks, traffic
from study.arms import Arm
from study.master import MasterAdamW
from study.meter import CUDA
from study.record import Stop
from study.settings import Settings, as_dict, check, learning_rate, resolve

BUCKET_MB = 25  # DDP's own default; the fair arms' DeepSpeed configs hold 25 MiB of fp32 as well


@dataclass
class Run:
    """A prepared run: what was asked for, and the objects that will do it."""

    settings: Settings
    arm: Arm
    folder: Path
    record: dict
    accelerator: Accelerator
    data: tasks.Data
    model: torch.nn.Module = None
    optimizer: torch.optim.Optimizer = None
    steps: int = 0

    @property
    def rows_per_step(self) -> int:
        return self.settings.micro_batch * self.settings.accumulation * self.accelerator.num_processes


# --- the algorithm -------------------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """Windows of steps with nothing else in them; between windows, everything else."""
    settings, accelerator = run.settings, run.accelerator
    clock, energy_j, losses, evals, rates = meter.Clock(), [], [], [], []
    evals.append(evaluate(run, 0))
    set_seed(settings.seed, device_specific=True)  # every arm meets the same dropout masks from here on
    for window in windows(run):
        rows = arrange(run, window)
        rates += [learning_rate(settings, step, run.steps) for step in window]
        energy = meter.Energy()
        with clock.window(accelerator.wait_for_everyone) as tick:
            # --- timed: nothing but training ------------------------------------------------------------------
            for step, microbatches in zip(window, rows, strict=True):
                set_rate(run, rates[step])
                losses.append(optimizer_step(run, microbatches))
                tick()
            # --- end of timed -----------------------------------------------------------------------------------
        if window[-1] + 1 == settings.warmup_steps:
            run.record["memory"] = {"setup": gathered(run, meter.peaks())}
            clock.step_s.clear()
            meter.reset_peaks()
            disk_before = meter.disk_bytes()
        elif window[0] >= settings.warmup_steps:
            energy_j.append(energy.joules())
        show(run, window, losses, rates, clock)
        if settings.eval_every and (window[-1] + 1) % settings.eval_every == 0 and window[-1] + 1 < run.steps:
            evals.append(evaluate(run, window[-1] + 1))
    evals.append(evaluate(run, run.steps))
    finish(run, clock, energy_j, losses, evals, rates, disk_before)


def optimizer_step(run: Run, microbatches: tasks.Rows) -> torch.Tensor:
    """One update from `accumulation` microbatches. Returns its loss on the device: reading it would make us wait."""
    total = 0.0
    for i in range(run.settings.accumulation):
        batch = {name: rows[i].to(run.accelerator.device, non_blocking=True) for name, rows in microbatches.items()}
        with run.accelerator.accumulate(run.model):
            loss = tasks.row_losses(run.settings, run.model, batch)[0].mean()
            run.accelerator.backward(loss)  # under DeepSpeed this takes the optimizer step as well
            run.optimizer.step()
            run.optimizer.zero_grad()
        total = total + loss.detach()
    return total / run.settings.accumulation


@torch.no_grad()
def evaluate(run: Run, step: int) -> dict:
    """Loss and metric over the evaluation rows, the work split over the ranks."""
    accelerator, rows = run.accelerator, run.data.eval
    run.model.eval()
    count = len(next(iter(rows.values())))
    share = run.settings.micro_batch * accelerator.num_processes
    order = torch.arange(math.ceil(count / share) * share) % count  # the last batch is filled with rows seen before
    mine = order.view(-1, accelerator.num_processes, run.settings.micro_batch)[:, accelerator.process_index]
    outputs = []
    for chosen in mine:
        batch = {name: values[chosen].to(accelerator.device) for name, values in rows.items()}
        outputs.append(torch.stack([x.double() for x in tasks.row_losses(run.settings, run.model, batch)]))
    gathered_ = accelerator.gather(torch.stack(outputs).unsqueeze(0))  # ranks, batches, (loss, prediction), rows
    losses, predictions = gathered_.permute(2, 1, 0, 3).flatten(1)[:, :count].cpu().numpy()
    run.model.train()
    result = {"step": step, "eval_loss": float(losses.mean())}
    result |= tasks.metric(run.settings, losses, predictions.astype(int), rows)
    if accelerator.is_main_process:
        record.append_step(run.folder, result)
        say(run.folder, f"  step {step:>5}  eval " + "  ".join(f"{k} {v:.4f}" for k, v in list(result.items())[1:] if v))
    return result


def windows(run: Run) -> list[range]:
    """Steps cut into windows: the warm-up first, then `log_every` at a time, ending where an epoch or a span ends."""
    settings = run.settings
    per_epoch = len(next(iter(run.data.train.values()))) // run.rows_per_step
    cuts = {run.steps, settings.warmup_steps, *range(0, run.steps, per_epoch)}
    cuts |= set(range(settings.warmup_steps, run.steps, settings.log_every))
    cuts |= set(range(0, run.steps, settings.eval_every or run.steps))
    edges = sorted(cut for cut in cuts if 0 <= cut <= run.steps)
    return [range(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def arrange(run: Run, window: range) -> list[tasks.Rows]:
    """This rank's rows for each step of a window, in the order that seed and epoch decide, ready to be copied.

    The order is over all rows, so that it is the same however many ranks share it.
    """
    rows = run.data.train
    count = len(next(iter(rows.values())))
    epoch, first = divmod(window[0], count // run.rows_per_step)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(run.settings.seed * 1000 + epoch))
    steps = order[first * run.rows_per_step : (first + len(window)) * run.rows_per_step]
    shape = (len(window), run.settings.accumulation, run.accelerator.num_processes, run.settings.micro_batch)
    mine = steps.view(shape)[:, :, run.accelerator.process_index]
    chosen = {name: values[mine] for name, values in rows.items()}
    if CUDA:
        chosen = {name: values.pin_memory() for name, values in chosen.items()}
    return [{name: values[i] for name, values in chosen.items()} for i in range(len(window))]


def set_rate(run: Run, rate: float) -> None:
    for group in observe.inner_optimizer(run.optimizer).param_groups:
        group["lr"] = rate


# --- before it: prepare --------------------------------------------------------------------------------------------


def open_accelerator(settings: Settings, arm: Arm, disk: Path | None) -> Accelerator:
    """The Accelerator that the arm's yaml means, with the run's precision, batch and disk folder filled in."""
    backend = ("nccl" if CUDA else "gloo") if "LOCAL_RANK" in os.environ else None  # None: alone, without a group
    common = {
        "gradient_accumulation_steps": settings.accumulation,
        "dynamo_backend": "inductor" if settings.compile else "no",
        "kwargs_handlers": [
            InitProcessGroupKwargs(backend=backend, timeout=datetime.timedelta(minutes=10)),
            # As lean as DDP can be: gradients live in the buckets, and BERT's constant buffers are not sent round.
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=BUCKET_MB
            ),
        ],
    }
    if arm.deepspeed is None:
        # On a machine without a GPU, cpu=False would give two trainings that never hear of each other.
        return Accelerator(cpu=not CUDA, mixed_precision="bf16" if settings.precision == "bf16" else "no", **common)
    if file := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(arms.find(file))
    plugin = DeepSpeedPlugin()
    config = plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = settings.micro_batch
    config["gradient_accumulation_steps"] = settings.accumulation
    if settings.precision == "bf16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    elif settings.precision == "bf16_cast":
        config["bf16"] = {"enabled": True, "check_grad_overflow": False}  # DDP does not skip a step on overflow either
    for part in ("offload_optimizer", "offload_param"):
        section = config["zero_optimization"].get(part) or {}
        if section.get("device") == "nvme":
            section["nvme_path"] = str(disk)
    return Accelerator(deepspeed_plugin=plugin, **common)


def prepare(run: Run) -> None:
    """Build the model, hand it to Accelerate, and make sure that what came back is what was promised."""
    settings, accelerator = run.settings, run.accelerator
    config = tasks.model_config(settings, run.data.vocabulary)
    if settings.init == "random" and accelerator.is_main_process:
        tasks.drawn_weights(settings, config)
    accelerator.wait_for_everyone()
    model = tasks.build_model(settings, config, accelerator.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    masters = settings.precision == "bf16_cast" and run.arm.deepspeed is None
    optimizer = (MasterAdamW if masters else torch.optim.AdamW)(
        parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=True
    )
    with quiet():
        run.model, run.optimizer = accelerator.prepare(model, optimizer)
    seen = observe.distribution(accelerator, run.model, run.optimizer)
    seen |= {
        "arm": run.arm.name,
        "weights_checksum": observe.weights_checksum(accelerator, run.model),
        "weights_shared": settings.init != "in_place",
        "data_checksum": run.data.checksum,
        "data_source": run.data.source,
        "rows_per_step": run.rows_per_step,
        "tokens_per_step": run.rows_per_step * settings.sequence,
        "steps": run.steps,
        "held_parameters_per_rank": gathered(run, seen["held_parameters"]),
        "tf32": torch.backends.cuda.matmul.allow_tf32 if CUDA else None,
    }
    run.record["observed"] = seen
    if wrong := observe.mismatches(run.arm, settings, seen, int(os.environ.get("WORLD_SIZE", 1))):
        raise Stop(f"what runs is not what {run.arm.name} promises ({'; '.join(wrong)})",
                   "mend the arm's files, or report this", where="prepare")  # fmt: skip


def flops_per_row(run: Run) -> float:
    """Operations of a forward and backward pass over one row, counted on a model without memory."""
    config = tasks.model_config(run.settings, run.data.vocabulary)
    model = tasks.on_meta(run.settings, config)
    batch = {name: torch.empty((1, *v.shape[1:]), dtype=v.dtype, device="meta") for name, v in run.data.train.items()}
    with FlopCounterMode(display=False) as counter:
        tasks.row_losses(run.settings, model, batch)[0].mean().backward()
    return counter.get_total_flops()


# --- after it: measure and record ----------------------------------------------------------------------------------


def finish(run: Run, clock, energy_j, losses, evals, rates, disk_before) -> None:
    """Everything that is known at the end, checked and put into the record."""
    settings, seen = run.settings, run.record["observed"]
    training = gathered(run, meter.peaks())
    disk_after = meter.disk_bytes()
    disk = {k: v - disk_before[k] for k, v in disk_after.items()} if None not in disk_after.values() else {}
    disk = gathered(run, disk if run.arm.uses_nvme else {})
    step_s = [max(times) for times in zip(*gathered(run, clock.step_s), strict=True)]
    energy = gathered(run, None if None in energy_j else sum(energy_j))
    seen |= {"dtypes": observe.dtypes(run.model, run.optimizer), "learning_rates": rates}
    instruments = inspect(run) if settings.instruments else {}
    seen["dtypes"] |= {k: v for k, v in instruments.pop("dtypes", {}).items() if v}
    per_rank = [
        peaks | {"nvme_read_bytes": io.get("read_bytes"), "nvme_written_bytes": io.get("write_bytes")}
        for peaks, io in zip(training, disk, strict=True)
    ]
    flops = flops_per_row(run) * run.rows_per_step / run.accelerator.num_processes
    peak = hardware.peak_flops(hardware.device_name(), settings.precision, settings.tf32)
    run.record |= {
        "loss": {"train": mean_losses(run, losses), "eval": evals, "final_train": None, "final_eval": evals[-1]},
        "time": {
            "setup_s": run.record["time"]["setup_s"],
            "step_s": step_s,
            "median_step_s": statistics.median(step_s),
            "tokens_per_s": seen["tokens_per_step"] * len(step_s) / sum(step_s),
            "samples_per_s": seen["rows_per_step"] * len(step_s) / sum(step_s),
            "flops_per_rank_and_step": flops,
            "mfu": flops * len(step_s) / sum(step_s) / peak if peak else None,
        },
        "memory": run.record["memory"] | {"per_rank": per_rank, "components": instruments.get("components")},
        "traffic": instruments.get("traffic") or {"per_rank": None},
        "energy": {"joules_per_rank": energy, "steps": len(step_s)},
    }
    run.record["loss"]["final_train"] = run.record["loss"]["train"][-1]
    wrong = observe.dtype_mismatches(settings, seen["dtypes"])
    if run.arm.uses_nvme and not all(io["nvme_written_bytes"] for io in per_rank):
        wrong.append("the arm offloads to disk, and no byte was written: partitions under 1 MiB stay in memory")
    if wrong:
        raise Stop(f"the run is not what it says ({'; '.join(wrong)})", "choose a larger model, or fewer ranks",
                   where="after training")  # fmt: skip


def inspect(run: Run) -> dict:
    """Three more steps, untimed: one to count collectives, two to split memory by component."""
    rows = arrange(run, range(run.steps - 1, run.steps))[0]
    step = functools.partial(optimizer_step, run, rows)
    seen_dtypes: dict = {}
    inner = observe.inner_optimizer(run.optimizer)
    hook = inner.register_step_pre_hook(lambda *_: seen_dtypes.update(observe.dtypes(run.model, run.optimizer)))
    before = traffic.socket_bytes_written()
    with traffic.CollectiveCounter() as counter:
        step()
    after = traffic.socket_bytes_written()
    hook.remove()
    components = observe.memory_by_component(step, run.model, run.optimizer, run.accelerator.device.type)
    host_homed = run.arm.offload_optimizer != "none"
    return {
        "dtypes": seen_dtypes,
        "traffic": {
            "per_rank": gathered(run, counter.counts),
            "kernel_bytes_written": gathered(run, after - before if before is not None else None),
            "gloo_wire_bytes": gathered(run, traffic.gloo_wire_bytes(counter.counts, run.accelerator.num_processes)),
        },
        "components": {"per_rank": gathered(run, components), "optimizer_on_host": host_homed},
    }


def mean_losses(run: Run, losses: list[torch.Tensor]) -> list[float]:
    """The loss of each step, averaged over the ranks: one collective for all of them."""
    return run.accelerator.reduce(torch.stack(losses), "mean").tolist()


def gathered(run: Run, thing) -> list:
    """What every rank has to say, in the order of the ranks."""
    if not dist.is_initialized():
        return [thing]
    out: list = [None] * run.accelerator.num_processes
    dist.all_gather_object(out, thing)
    return out


def show(run: Run, window: range, losses, rates, clock) -> None:
    """Between windows: fetch the losses, write them, show the last one, and stop if the run has come apart."""
    values = mean_losses(run, losses[-len(window) :])
    if run.accelerator.is_main_process:
        for step, loss in zip(window, values, strict=True):
            record.append_step(run.folder, {"step": step + 1, "loss": loss, "lr": rates[step]})
        speed = f"  {statistics.median(clock.step_s[-len(window) :]):.3f} s/step" if clock.step_s else "  warm-up"
        say(run.folder, f"  step {window[-1] + 1:>5} of {run.steps}  loss {values[-1]:.4f}{speed}")
    if not all(math.isfinite(value) for value in values):
        run.record["loss"] = {"train": [v if math.isfinite(v) else None for v in values]}
        raise Stop(f"the loss is no number any more, at step {window[-1] + 1}", "give a lower --lr", "diverged", "loss")


# --- around it: start, end, and everything that can go wrong --------------------------------------------------------


def main() -> None:
    """Run, and leave a record whatever happens."""
    rank = int(os.environ.get("RANK", 0))
    settings = tyro.cli(Settings, prog="train.py", description=__doc__, console_outputs=rank == 0)
    launch = arms.find_launch()
    if launch is None or launch.config_file is None:
        say(None, "this script is started by its launcher, which says how to distribute it:\n"
                  "  accelerate launch --config_file accelerate_configs/single.yaml study/train.py")  # fmt: skip
        sys.exit(2)
    signal.signal(signal.SIGTERM, _interrupted)
    folder, disk = None, None
    try:
        arm = arms.read(arms.find(launch.config_file))
        if arms.is_surplus_rank(arm, launch, torch.cuda.device_count()):
            os._exit(0)
        settings = resolve(settings, CUDA)
        folder = open_folder(settings, arm, launch, rank)
        check(settings)
        disk = claim_disk(settings, arm, launch, folder)
        run_to_the_end(settings, arm, folder, disk)
        nvme.empty(disk)
        leave(0, launch)
    except BaseException as error:
        nvme.empty(disk)
        leave(fail(folder, rank, error), launch)


def run_to_the_end(settings: Settings, arm: Arm, folder: Path, disk: Path | None) -> None:
    started = time.perf_counter()
    set_threads(settings)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    with quiet():
        accelerator = open_accelerator(settings, arm, disk)
    announce(settings, arm, accelerator, folder)
    with accelerator.main_process_first():  # the first to come prepares the rows, the others find them prepared
        data = tasks.load_data(settings)
    entry = record.load_running(folder) if accelerator.is_main_process else record.new(folder.name, sys.argv)
    run = Run(settings, arm, folder, entry, accelerator, data)
    per_epoch = len(next(iter(data.train.values()))) // run.rows_per_step
    if not per_epoch:
        raise Stop(f"one step needs {run.rows_per_step} rows, and there are {len(next(iter(data.train.values())))}",
                   "give a smaller --micro-batch or --accumulation, or more --train-rows")  # fmt: skip
    run.steps = settings.steps or max(settings.warmup_steps + 1, int(settings.epochs * per_epoch))
    prepare(run)
    run.record["time"] = {"setup_s": time.perf_counter() - started}
    train(run)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        run.record |= {"status": "done", "finished_utc": record.now_utc()}
        record.write(folder, run.record)
        summary(run)


def open_folder(settings: Settings, arm: Arm, launch: arms.Launch, rank: int) -> Path:
    """The run folder, with a record that says 'running'. Every rank names it alike; the first one makes it."""
    when = datetime.datetime.fromtimestamp(launch.started, datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    name = f"{when}-{arm.name}-{settings.task}-{Path(settings.model).name}-s{settings.seed}-{launch.pid}"
    folder = (settings.run_dir or Path("runs") / name).resolve()
    if rank == 0:
        if (folder / "record.json").exists():
            raise Stop(f"--run-dir {folder} already holds a run, and runs are not overwritten", "give a new folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            disk = settings.nvme_dir if settings.nvme_dir and settings.nvme_dir.exists() else folder
            entry = record.new(folder.name, sys.argv) | {
                "requested": as_dict(settings) | {"arm": arm.name, "config_file": launch.config_file},
                "hardware": hardware.describe(disk),
                "software": hardware.software(),
            }
            record.write(folder, entry)
        except OSError as error:
            raise Stop(f"--run-dir {folder} cannot be written ({error.strerror})", "give another folder") from None
    _log_to(folder if rank == 0 else None)
    return folder


def claim_disk(settings: Settings, arm: Arm, launch: arms.Launch, folder: Path) -> Path | None:
    if not arm.uses_nvme:
        return None
    if arm.stage != 3:
        raise Stop(f"{arm.name} is stage {arm.stage} with nvme, which DeepSpeed quietly treats as cpu",
                   "use stage 3 for the disk, or write cpu")  # fmt: skip
    nvme.check_libaio()
    vocabulary = tasks.corpus.VOCABULARY
    parameters = sum(p.numel() for p in tasks.on_meta(settings, tasks.model_config(settings, vocabulary)).parameters())
    nodes = int(os.environ.get("WORLD_SIZE", 1)) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = int(parameters * nvme.BYTES_PER_PARAMETER / nodes)
    return nvme.give((settings.nvme_dir or folder.parent / "nvme").resolve(), f"run-{launch.pid}", needed)


def set_threads(settings: Settings) -> None:
    """As many threads per rank in every arm, `single` included: a fair share of the cores."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = settings.threads or max(1, hardware.usable_cores() // (local if CUDA else max(2, local)))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for DeepSpeed's own operators, which are loaded later
    torch.set_num_threads(threads)


def announce(settings: Settings, arm: Arm, accelerator: Accelerator, folder: Path) -> None:
    if not accelerator.is_main_process:
        return
    where = hardware.device_name() or "CPU"
    ranks = f"{accelerator.num_processes} rank{'s' * (accelerator.num_processes > 1)}"
    data = "the embedded corpus" if settings.data == "embedded" else f"{settings.task} from {settings.data}"
    say(folder, f"{arm.name}: {settings.model} on {data}, {settings.precision}, {ranks} on {where}")
    small = settings.model in ("bert-tiny", "gpt-tiny")
    if not CUDA and small and settings.data == "embedded":
        say(folder, "This is the small run that needs no GPU and no network. The source document's run: "
                    "--model bert-large-uncased --data hub")  # fmt: skip
    elif CUDA and settings.model == "bert-large-uncased" and settings.data == "hub":
        say(folder, "This is the source document's run. The small one, which needs no network: "
                    "--model bert-tiny --data embedded")  # fmt: skip


def summary(run: Run) -> None:
    made = run.record
    evals = made["loss"]["final_eval"]
    ram = [rank["peak_allocated_bytes"] or rank["host_peak_bytes"] for rank in made["memory"]["per_rank"]]
    sent = made["traffic"]["per_rank"]
    say(run.folder, "done: " + ", ".join(filter(None, [
        f"loss {made['loss']['train'][0]:.4f} -> {made['loss']['final_train']:.4f}",
        *(f"{k} {v:.4f}" for k, v in evals.items() if k not in ("step", "eval_loss") and v is not None),
        f"{made['time']['tokens_per_s']:.0f} tokens/s",
        f"{max(ram) / 1e9:.2f} GB {'device' if CUDA else 'host'} peak per rank" if all(ram) else None,
        f"{sum(c['bytes'] for c in sent[0].values()) / 1e6:.1f} MB in collectives per step" if sent else None,
    ])) + f"\n{run.folder / 'record.json'}")  # fmt: skip


def fail(folder: Path | None, rank: int, error: BaseException) -> int:
    """Say what went wrong in one sentence, put it in the record, and give the exit code."""
    if isinstance(error, Stop):
        stop = error
    elif isinstance(error, torch.OutOfMemoryError):
        stop = Stop(f"the device ran out of memory ({str(error).split('.')[0]})",
                    "give a smaller --micro-batch, --checkpointing, or an arm that offloads", "oom")  # fmt: skip
    elif isinstance(error, KeyboardInterrupt):
        stop = Stop("interrupted", "start it again", "interrupted")
    else:
        stop = Stop(f"{type(error).__name__}: {error}", "this is a fault of the study or a library: see log.txt", "failed")
    stop.where = stop.where or (f"rank {rank}" if rank else None)
    expected = isinstance(error, (Stop, torch.OutOfMemoryError, KeyboardInterrupt))
    trace = None if expected else "".join(traceback.format_exception(error))
    if folder is not None and record.end_badly(folder, stop, type(error).__name__) or (folder is None and rank == 0):
        say(folder, f"{stop.status}: {stop.what}. What to do: {stop.remedy}." + (f"\n{trace}" if trace else ""))
    return 1


def leave(code: int, launch: arms.Launch) -> None:
    """End this process, with the exit code that is true and nothing left running.

    Gloo's threads sometimes abort a process that exits in the ordinary way (torch 2.13, about 3 in 20), hence os._exit.
    When the run failed, its one sentence has been said. The launcher would bury it under a traceback of its own that
    says only that a child has failed, so it is ended by a signal, whose exit code is not 0 either.
    """
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0 and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(launch.pid)
            others = [child for child in launcher.children(recursive=True) if child.pid != os.getpid()]
            launcher.send_signal(signal.SIGUSR1)
            for child in psutil.wait_procs(others, timeout=5)[1]:
                child.kill()
    elif code != 0:
        with contextlib.suppress(psutil.Error):
            psutil.Process(launch.pid).wait(timeout=20)  # let rank 0 speak before the launcher sees us gone
    os._exit(code)


def _interrupted(*_) -> None:
    raise KeyboardInterrupt


def say(folder: Path | None, text: str) -> None:
    """Tell the user, and the run's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    if folder is not None:
        with contextlib.suppress(OSError), (folder / "log.txt").open("a") as log:
            log.write(text + "\n")


def _log_to(folder: Path | None) -> None:
    """Send what the libraries log and warn of to log.txt of the first rank, not to the screen."""
    handler = logging.FileHandler(folder / "log.txt") if folder else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for name in ("DeepSpeed", "transformers", "datasets", "accelerate", "torch"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    transformers.utils.logging.disable_progress_bar()
    tasks.datasets.disable_progress_bars()


@contextlib.contextmanager
def quiet():
    """Keep what DeepSpeed prints while it starts off the screen."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


if __name__ == "__main__":
    main()
