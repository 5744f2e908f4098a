"""After the last step: completes and checks the record, saves weights, and runs the instruments."""

import contextlib
import logging
from collections.abc import Callable

import torch
import transformers
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.flop_counter import FlopCounterMode

from study.core import cache, machine
from study.core.errors import Stop
from study.core.models.values import GROUPED, WithoutValues
from study.measure import readback, roles, traffic
from study.measure.clock import Clock
from study.measure.memory import difference, io_bytes, memory_by_component
from study.records import store
from study.records.sections import Components, Loss, Saved, Time
from study.training import ending, models, tasks
from study.training.display import say
from study.training.run import History, OpenRun

FLOPS_FORMAT = 1  # of the cached counts: raise it whenever what is counted changes
SETTLING_STEPS = 2  # in the first step after an evaluation, stage 3 still holds parameters from it


def finish(run: OpenRun, history: History) -> None:
    """Complete and write the record of a finished training. Raise Stop if it is not what the arm promises."""
    record = run.record
    run.heartbeat.beat("writing the record")
    # --- what is there now, after the last step
    record.observed.dtypes = roles.dtypes(run.model, run.optimizer)
    record.observed.learning_rates = history.rates
    record.observed.loss_scale = readback.loss_scale(run.accelerator, run.optimizer)
    # --- what was measured
    record.loss = Loss(train=history.losses, eval=history.evals)
    record.time = _times(run, history.clock)
    peaks = history.peaks
    if run.arm.uses_nvme:
        now = io_bytes()
        peaks.nvme_read_bytes = difference(now["read_bytes"], history.io_before["read_bytes"])
        peaks.nvme_written_bytes = difference(now["write_bytes"], history.io_before["write_bytes"])
    record.memory.per_rank = run.gathered(peaks)
    run.keep()
    # --- whether it is what it says
    wrong = readback.dtype_mismatches(run.settings, record.observed.dtypes)
    swapped = [rank.nvme_written_bytes for rank in record.memory.per_rank]  # None: unknown, or another arm
    if any(size is not None and size < machine.LEAST_SWAPPED_BYTES for size in swapped):
        wrong.append("the arm offloads to disk, and nothing was swapped there: partitions under 1 MiB stay in memory")
    if wrong:
        what = f"the trained run does not match its settings: {'; '.join(wrong)}"
        raise Stop(what, "choose a larger model, or fewer ranks", where="after training")


def after_training(run: OpenRun, step: Callable[[], object]) -> bool:
    """Save the weights and run the instruments. The run is already done, and stays done if this fails.

    `step` takes one more, untimed optimizer step. Returns whether all ranks got to the end. If not, they are out of
    step, and none may wait for another. A rank that has failed leaves: the others lose its connection, or time out.
    """
    observed = run.record.observed
    parts = {"save": save, "instruments": inspect}  # in this order, because the instruments change the weights
    parts = {part: call for part, call in parts.items() if getattr(run.settings, part)}
    run.accelerator.wait_for_everyone()  # before this, any rank may still find that the run has failed
    for part in parts:
        setattr(observed, f"{part}_failed", store.UNFINISHED)
    run.record.status = "done"
    run.keep()
    run.accelerator.wait_for_everyone()  # after this, each rank may write into the record why it failed
    for part, call in parts.items():
        try:
            run.heartbeat.beat(part)
            call(run, step)
        except BaseException as error:  # Ctrl-C and a full device as well
            logging.getLogger("study").warning("%s failed", part, exc_info=error)
            why = ending.reason(error).what
            with contextlib.suppress(OSError, Stop):  # the disk is full, or on another machine
                # Not the reason of a rank that failed after another one, only because that one is gone.
                why = store.explain_what_failed(run.folder, f"{part}_failed", why)
            setattr(observed, f"{part}_failed", why)
            run.keep()
            if run.accelerator.is_main_process:
                say(run.folder, f"the run is done, but without its {part} ({why})")
            return False
        setattr(observed, f"{part}_failed", None)
    run.keep()
    run.accelerator.wait_for_everyone()
    return True


def save(run: OpenRun, _) -> None:
    """Write the trained weights, gathered by all ranks if each has a part. The first rank records what it wrote."""
    # Whole weights are not gathered: Accelerate would clone each tensor and write tied weights twice.
    in_parts = run.arm.stage == 3 or run.arm.tensor_ranks > 1 or run.arm.fsdp
    state = run.accelerator.get_state_dict(run.model) if in_parts else None
    if not run.accelerator.is_main_process:
        return
    folder = run.folder / "model"
    model = run.accelerator.unwrap_model(run.model)
    model._weight_conversions = None  # else the old names of a checkpoint, and under stage 3 those of any BERT
    if state and run.arm.fsdp:  # each name of a tied weight was gathered by itself
        state = {name: tensor for name, tensor in state.items() if name not in model.all_tied_weights_keys}
    model.save_pretrained(folder, state_dict=state)
    files = list(folder.glob("*.safetensors"))
    written = [tensor for path in files for tensor in load_file(path).values()]
    run.record.observed.saved = Saved(
        bytes=sum(path.stat().st_size for path in files),
        parameters=sum(map(torch.numel, written)),
        dtypes=sorted({str(tensor.dtype).removeprefix("torch.") for tensor in written}),
    )


def _times(run: OpenRun, clock: Clock) -> Time:
    """Return the step times, each the slowest rank's, and the wall time of the timed windows."""
    times = run.record.time
    rows = run.settings.micro_batch * run.settings.accumulation / run.arm.row_ranks  # ranks that share rows share work
    if run.accelerator.is_main_process:  # which writes the record
        times.flops_per_rank_and_step = flops_per_row(run) * rows
    if run.has_values:  # without, nothing was computed
        times.step_s = [max(ranks) for ranks in zip(*run.gathered(clock.step_s), strict=True)]
        # The ranks wait for each other before a window and nowhere else, so it takes as long as its slowest rank: less
        # than the sum of each step's slowest rank, if the ranks are slow in turns.
        times.window_s = sum(max(ranks) for ranks in zip(*run.gathered(clock.window_s), strict=True))
    return times


def inspect(run: OpenRun, step: Callable[[], object]) -> None:
    """Take a few untimed steps: count collectives, read the gradients' dtype, split memory by component."""
    observed = run.record.observed
    for _ in range(SETTLING_STEPS):
        step()

    def look() -> None:
        dtypes = roles.dtypes(run.model, run.optimizer)
        observed.dtypes |= {role: dtype for role, dtype in dtypes.items() if dtype}

    # --- one step is counted: by the dispatcher, and by the kernel as a check
    before = io_bytes()["wchar"]
    with roles.before_each_update(run.optimizer, look), traffic.CollectiveCounter() as counter:
        step()
    after = io_bytes()["wchar"]
    traffic.refuse_uncounted(counter)
    moved = run.record.traffic
    moved.per_rank = run.gathered(counter.counts)
    moved.kernel_bytes_written = run.gathered(difference(after, before))
    # --- three more, each operation followed: where the peak stands is known only after the first
    components = memory_by_component(step, run.model, run.optimizer, run.accelerator.device.type)
    if components is not None and not run.has_values:
        components.allocator_peak_bytes = None  # nothing was allocated
    run.record.memory.components = Components(per_rank=run.gathered(components))


def flops_per_row(run: OpenRun) -> float:
    """Return the operations of both passes over one row, counted without memory, and without recomputation, as MFU.

    To count them takes longer than a few steps of a small model, so the cache keeps the answer.
    """
    settings, rows = run.settings, run.data.train
    config = models.model_config(settings, run.data.vocabulary)
    row = {name: [*values.shape[1:], values.dtype] for name, values in rows.items()}
    asked = [settings.task, settings.sequence, settings.attention, models.weights_dtype(settings)]
    # In training mode, Ulysses has replaced attention by its own.
    trains = run.arm.sequence_ranks == 1
    key = [config.to_dict(), row, asked, trains, torch.__version__, transformers.__version__]
    folder, name = settings.cache_dir / f"flops-{FLOPS_FORMAT}", cache.fingerprint(key)
    known = cache.answer(folder, name)
    if known is None:
        with unset_fake_temporarily():
            model = models.on_meta(settings, config).train(trains)
            batch = {name: values[:1].to("meta") for name, values in rows.items()}
            with WithoutValues(), FlopCounterMode(display=False, custom_mapping=GROUPED) as counter:
                tasks.row_losses(settings, model, batch)[0].mean().backward()
        known = float(counter.get_total_flops())
        cache.keep(folder, name, known)
    return known
