"""Rules that name mistakes of a run by its record. Lines are those of DeepSpeed 0.19.8 and Accelerate 1.15.0.

A rule yields the ids of its findings, whose sentences are in known/findings.toml, and the values that they show.
Names that end in `_bytes` are shown as sizes.
"""

import math
import re

from study.core.files import value_at
from study.core.recipes import AUTOCAST
from study.watch.facts import REDUCING, Facts, Results, required

FIRST_SCALE = 65536  # the initial loss scale of DeepSpeed and torch
HALVES = tuple(AUTOCAST.values())
READ_STEPS = 6  # whose gradients the watch reads
MOST = 0.5  # of the steps
LEAST_STEPS = 5  # of a run whose weights are expected to change
# Smaller shares and sizes than these get no finding.
FROZEN = 0.02  # of the parameters: whoever trains fewer of them uses adapters, whose names say so
UNCHANGED = 0.1  # of the parameters that should train: a head that no loss needs may stay
DECAYED = 0.05  # of each weight in a step: half of it is gone after 14. Recipes with Muon have up to 0.04
CLIPPED = 1000  # times the limit
DRIFT = 1e-9  # of the sum of the weights: copies that get equal gradients are equal
NEAR = 1e-3  # of a factor
MANY = 10  # updates
FEW = 1e-5  # of the weights: enough to average a loss, but less than the gradients of LoRA
# Optimizers whose update of an element depends on its row, column or norm. DeepSpeed's Muon gets whole matrices.
MATRIX_WISE = "(?i)adafactor|came|shampoo|soap|galore|apollo|lamb|lars|adam_?mini"
LOST_RANK = "another rank died"  # how a rank's record says that its connection broke


def memory(facts: Facts) -> Results:
    if facts.record.status == "oom":
        yield "memory_full"


def deepspeed(facts: Facts) -> Results:
    """Name a DeepSpeed that is asked for and does not train, or trains in another stage."""
    # Transformers reads the `deepspeed` of TrainingArguments when the object is made. A later assignment is stored and
    # shown, and the Trainer trains without DeepSpeed (reproductions/deepspeed_set_later.py).
    if required(facts.promised.deepspeed) and facts.wrapper:
        if facts.seen.stage is None:
            yield "deepspeed_off"
        elif facts.promised.stage not in (None, facts.stage):
            yield "other_stage"


def fsdp(facts: Facts) -> Results:
    """Name an FSDP that is asked for, where every rank holds the whole model."""
    wrapper = facts.wrapper
    # Without a GPU Accelerate makes DDP of an FSDP config, or nothing at all (state.py:769), and prints nothing.
    if required(facts.promised.fsdp) and (wrapper == "DistributedDataParallel" or not facts.sharded):
        yield "fsdp_off_on_a_cpu" if facts.device == "cpu" else "fsdp_off"


def ranks(facts: Facts) -> Results:
    """Name ranks that do not train together. Each of them prints losses that look right."""
    # gloo ends the process in C++ if it receives more than it expects: Python sees no exception there, and prints none.
    if facts.record.error and facts.record.error.message == LOST_RANK:
        yield "rank_without_a_word"
    rates = facts.watched.largest_rates
    if len({*rates}) > 1:
        yield "unequal_rates", {"least": min(rates), "most": max(rates), "rank": rates.index(max(rates))}
    # Without a GPU and without `cpu=True`, Accelerate 1.15.0 answers DistributedType.NO to two processes that use gloo:
    # two trainings that share nothing, and each exits with 0 (state.py:769, measured).
    counted = facts.seen.ranks_counted or facts.ranks
    if (facts.promised.ranks or 1) > counted:
        yield "separate_trainings", {"counted": counted}
    if facts.ranks == 1 or facts.sharded:
        return
    # Replicas that share gradients move each of them once a step. What moves a few bytes only averages a loss.
    reduced_bytes = facts.moved_bytes(*REDUCING)
    if reduced_bytes <= FEW * facts.weights_bytes:
        is_alone = facts.seen.distributed_type == "NO"
        yield "no_wrap" if is_alone else "gradients_not_shared", {"reduced_bytes": reduced_bytes}
        return
    sums = required(facts.watched.weights_sums)
    is_whole = not (facts.seen.tensor_ranks or facts.seen.sequence_ranks)
    if is_whole and len({*rates}) == 1 and max(sums) - min(sums) > DRIFT * max(1, *map(abs, sums)):
        yield "unequal_weights", {"least": min(sums), "most": max(sums)}


def optimizer(facts: Facts) -> Results:
    """Name an optimizer that updates nothing of the model, or whole matrices of which ZeRO leaves it pieces."""
    watched = facts.watched
    unchanged = watched.unchanged_parameters
    # Weights may be written from copies that the optimizer updates, as examples/zero_by_hand/stage3.py does.
    is_changed = unchanged is not None and unchanged < UNCHANGED * (facts.seen.trained_parameters or 0)
    if watched.optimized_tensors == 0:
        if not is_changed:
            yield "optimizer_of_other_tensors"
    elif (facts.seen.steps or 0) >= LEAST_STEPS and facts.seen.trained_parameters:
        unchanged = unchanged or 0
        if unchanged >= UNCHANGED * facts.seen.trained_parameters or watched.head_unchanged:
            names = f", such as {', '.join(watched.unchanged)}" if watched.unchanged else ""
            yield "weights_unchanged", {"unchanged": unchanged, "names": names}
    # A rank's part is one flat vector, so the optimizer sees no rows and columns (zero/stage_1_and_2.py:560). Measured:
    # a last loss of 7.65795 under DDP, and of 7.64581 under stage 1, with PyTorch's Adafactor.
    if required(facts.seen.stage) and re.search(MATRIX_WISE, facts.optimizer):
        yield "matrices_in_pieces"


def tensors(facts: Facts) -> Results:
    """Name tensors that should train, and do not."""
    watched = facts.watched
    if watched.not_optimized_tensors and watched.optimized_tensors:
        yield "tensors_not_optimized"
    if watched.without_gradient_tensors:
        yield "tensors_without_gradient", {"names": ", ".join(watched.without_gradient)}


def schedule(facts: Facts) -> Results:
    """Name a schedule that ends before the training does."""
    steps = required(facts.watched.schedule_steps_in_update)
    if steps == 1:
        return
    if steps != facts.ranks:
        yield "schedule_too_fast"
        return
    # Accelerate's scheduler takes a step for each rank (scheduler.py:70): right for a length that counts the batches of
    # all ranks, as a loader has them before it is prepared, and wrong for one that counts this rank's.
    length = required(facts.watched.schedule_length)
    epoch = max(1, required(facts.watched.passes_in_epoch) // (facts.seen.accumulation or 1))
    if length < epoch * steps or (length % epoch == 0 and length % (epoch * steps)):
        yield "schedule_ends_early", {"ends": length // steps, "epoch": epoch}


def data(facts: Facts) -> Results:
    """Name a data set that has not the rows of a step."""
    needed = required(facts.watched.rows_per_pass) * (facts.seen.accumulation or 1) * facts.ranks
    if required(facts.watched.data_rows) < needed:
        yield "fewer_rows_than_a_step", {"needed": needed}


def updates(facts: Facts) -> Results:
    """Name updates that are missing, or made by gradients that are not those of the step."""
    watched = facts.watched
    usual = facts.seen.accumulation or 1
    if (watched.passes_without_update or 0) > max(2 * LEAST_STEPS, 4 * usual):
        yield "optimizer_made_anew" if watched.updates_by_another else "no_update"
    read = min(READ_STEPS, facts.seen.steps or READ_STEPS)
    if 2 * watched.gradients_kept > read:
        yield "gradients_not_cleared", {"read": read}
    if 2 * watched.without_gradients > read:
        yield "gradients_are_zero", {"read": read}
    if watched.moments_lost:
        yield "moments_lost"
    if watched.loss_unscaled:
        yield "loss_unscaled"
    if watched.clipped_scaled:
        yield "clipped_scaled"
    if watched.clipped_part:
        yield "clipped_part"
    if (watched.largest_decay or 0.0) >= DECAYED:
        yield "decay_too_large"
    # Adam divides by the size of gradients, so it makes the same updates of smaller ones.
    limit, norm = facts.seen.clipping, watched.usual_norm
    if limit and norm and facts.seen.optimizer == "SGD" and norm >= CLIPPED * limit:
        yield "clipped_to_nothing", {"times": norm / limit}


def model(facts: Facts) -> Results:
    """Name a model that is hardly trained, or not the one of its config."""
    if facts.watched.tie_lost:
        yield "tie_lost"
    if facts.watched.layers_in_evaluation:
        yield "layers_in_evaluation"
    trained = required(facts.seen.trained_parameters)
    # A new head above a body that was trained before is no mistake.
    is_head = facts.watched.head_alone_trains and facts.watched.frozen_untrained is False
    # What is frozen at first may train later: whoever unfreezes layer by layer begins with the head.
    share = max(trained / facts.parameters, facts.watched.trained_share or 0.0)
    if required(facts.watched.model) and not facts.watched.has_adapters and share < FROZEN and not is_head:
        yield "frozen", {"share": share, "trained": round(share * facts.parameters)}


def idle_schedule(facts: Facts) -> Results:
    """Name a schedule that changes no rate."""
    watched = facts.watched
    is_idle = watched.schedule_steps == 0 and len(set(required(facts.seen.learning_rates))) == 1
    if is_idle and watched.other_schedule_steps and not watched.has_schedule:
        yield "schedule_of_another_optimizer"
    elif is_idle and watched.has_schedule and facts.steps >= LEAST_STEPS:
        yield "schedule_unused"


def clipping(facts: Facts) -> Results:
    """DeepSpeed clips at the value of its config, not at the one that the script gives clip_grad_norm_."""
    seen = facts.clipping
    requested = facts.promised.clipping
    in_script = facts.watched.clip_grad_norm  # 0: it asks for the norm alone
    is_zero = facts.seen.stage is not None
    # Under DeepSpeed, Accelerate's clip_grad_norm_ returns a norm and does not read its max_norm (accelerator.py:3023).
    if is_zero and in_script not in (None, 0, seen):
        yield "clip_grad_norm_ignored"
    elif requested is None:
        # That default is new: DeepSpeed's pull request 8068, June 2026. For "auto" Accelerate fills in 1.0 as well
        # (accelerator.py:2224), so equal losses under DDP need clipping at 1.0, or none on both sides.
        if is_zero and not in_script and seen > 0:  # 1.0 by default (runtime/constants.py:203)
            yield "clipping_by_default", {"off": _unclipped(facts.promised.source or "")}
    elif max(requested, 0) != max(seen, 0):  # all values up to 0 mean off
        # A yaml with `gradient_clipping: 0.0` comes here: Accelerate drops the zero, and DeepSpeed then clips at 1.0.
        # Measured: -1.0 in the yaml switches clipping off, and so does 0.0 in a DeepSpeed json.
        yield "clipping_differs" if is_zero else "clipping_missing"


def _unclipped(source: str) -> str:
    """Return what switches clipping off, in the file that the script has: in a yaml of Accelerate 0.0 does not."""
    in_yaml, in_json = "`gradient_clipping: -1.0` in {}", '`"gradient_clipping": 0.0` in {}'
    if source.endswith((".yaml", ".yml")):
        return in_yaml.format(source)
    if source.endswith((".json", "DeepSpeed config")):
        return in_json.format(source)
    return f"{in_yaml.format('a yaml of Accelerate')}, or {in_json.format('a DeepSpeed json')}"


def accumulation(facts: Facts) -> Results:
    """The library divides each loss by the passes of a step: name passes that are not what it takes them for."""
    passes = facts.accumulation
    parts = facts.watched.loss_parts or 1
    # A script may give DeepSpeed another number than the launcher's file. What its loop counts is no second setting.
    resolved = value_at(facts.seen.deepspeed, "gradient_accumulation_steps")
    if None not in (resolved, facts.promised.accumulation) and resolved != facts.promised.accumulation:
        yield "accumulation_set_twice", {"resolved": resolved}
    # Who divides: Accelerate under DDP and FSDP (accelerator.py:2851), the engine under DeepSpeed
    # (runtime/engine.py:3413). Measured: with 2 and with 4 passes a step, DDP and stages 0 to 3 have equal losses.
    if parts not in (1, passes):
        yield "accumulate_unused" if passes == 1 else "passes_differ"
    yield from _divisions(facts, passes, parts)
    # A zero_grad in each pass does harm in plain loops only. Accelerate's optimizer skips it within a step
    # (optimizer.py:113), and under DeepSpeed always (utils/deepspeed.py:308).
    if facts.watched.passes_cleared:
        yield "cleared_on_purpose" if _clears_on_purpose(facts, passes) else "gradients_cleared"


def _clears_on_purpose(facts: Facts, passes: int) -> bool:
    """Return whether passes without effect may be meant: those of a generator, or of SAM, which looks ahead."""
    if facts.watched.updates_beside_others > MOST * facts.steps:
        return True
    inputs = facts.watched.inputs_per_rank
    first = inputs[0][:passes] if inputs else []
    return len(first) == passes and len(set(first)) == 1


def _divisions(facts: Facts, passes: int, parts: int) -> Results:
    """Name a loss that is divided once too often, or not at all."""
    watched = facts.watched
    divisors = list(watched.loss_divisors)
    ranks = facts.seen.ranks or 1
    # The script's own division may be for something else, but not if it is by the same number.
    if parts > 1 and watched.loss_divisor == parts:
        yield "loss_divided_twice"
    # The Trainer and Lightning divide before backward, as a script does. The Trainer's items are those of a step
    # (transformers 5.23.0, trainer.py:2106).
    by_items = watched.loss_base == "items" and bool(watched.is_trainer)
    if passes > 1 and parts == 1 and divisors.count(passes) + by_items > 1:
        yield "loss_divided_by_both", {"by": "the items of the step" if by_items else f"{passes}"}
    is_undivided = parts == 1 and watched.loss_base == "mean"
    if is_undivided and max(passes, ranks) > 1:
        times = passes / math.prod(divisors)
        if watched.is_trainer and times > 1 and times >= passes:
            # It divides only if the model's forward takes no other keywords (transformers 5.23.0, trainer.py:521 and
            # 2106), and multiplies by the ranks (trainer.py:2206), as if the loss were divided by the items of all.
            yield "trainer_sums_means", {"times": times}
        elif (summed := passes - (watched.passes_cleared or 0)) > 1 and not divisors:
            yield "gradients_summed", {"summed": summed}
    if watched.loss_negated:
        yield "loss_negated"
    # An all-reduce of one's own sums.
    if watched.gradient_factor is not None and abs(watched.gradient_factor - 1) < NEAR:
        if is_undivided and not divisors and _reads_apart(facts):
            yield "gradients_summed_over_ranks"
        return
    # DDP, ZeRO and FSDP average over ranks by themselves.
    if ranks > 1 and watched.loss_base in ("mean", "items") and ranks in divisors and ranks not in (passes, parts):
        yield "loss_divided_by_ranks"


def _reads_apart(facts: Facts) -> bool:
    """Return whether each rank has sequences of its own: ranks that share a model or a sequence have to sum."""
    inputs = facts.watched.inputs_per_rank
    return len({*map(tuple, inputs)}) == len(inputs) == facts.ranks


def between(facts: Facts) -> Results:
    """Name what happens to a model between its updates."""
    watched = facts.watched
    if watched.updates_without_model >= MANY:
        yield "model_not_run"
    # Who moves weights in every few steps, as Lookahead does, or keeps them within limits, means it.
    moved = watched.moved_in_evaluation
    if moved > 1 and not watched.moved_besides and moved >= MOST * watched.evaluations:
        yield "moved_in_evaluation"
    states = watched.random_states
    alike = max(map(states.count, states), default=0)  # whoever seeds after an update has another first one
    if alike >= READ_STEPS - 1 and all(len(set(each)) > 1 for each in watched.inputs_per_rank):
        yield "dropout_repeated", {"alike": alike, "count": len(states)}


def rows(facts: Facts) -> Results:
    """Name ranks with other numbers of rows, and ranks with the same rows. Constant inputs say nothing."""
    rows = facts.watched.rows_per_rank
    # A loader that Accelerate prepared gives equal numbers of rows: `even_batches`, on by default, begins the data
    # again to fill the last batch (data_loader.py:134). DDP averages gradients over ranks, not rows: fewer rows weigh
    # more each.
    if len(set(rows)) > 1:
        yield "unequal_rows", {"least": min(rows), "most": max(rows), "rank": rows.index(min(rows))}
    if facts.watched.evaluations_in_training:
        yield "evaluation_in_training"
    inputs = required(facts.watched.inputs_per_rank)
    if len(inputs[0]) >= READ_STEPS and all(len(set(each)) == 1 for each in inputs):
        yield "rows_repeated", {"count": len(inputs[0])}
    elif facts.watched.orders_repeated:
        yield "order_repeated"
    alike = [str(rank) for rank, each in enumerate(inputs) if inputs.count(each) > 1 and len(set(each)) > 1]
    if alike and not (facts.seen.tensor_ranks or facts.seen.sequence_ranks):  # these share rows on purpose
        yield "same_rows", {"ranks": ", ".join(alike), "count": len(inputs[0])}


def precision(facts: Facts) -> Results:
    """Name a precision that is not the one asked for, or that loses updates."""
    seen = facts.seen
    weights = facts.weights
    requested = facts.promised.precision
    dtype = AUTOCAST.get(requested or "")
    # Accelerate leaves the precision to DeepSpeed (state.py:957), which casts all weights (runtime/engine.py:2080).
    # Measured on a small BERT: its first loss is 0.685729 under DDP's autocast, and 0.6875 after the cast, since the
    # loss itself is then a bfloat16.
    if dtype in weights.split() and seen.autocast is None and seen.stage is not None:
        yield "cast_instead_of_autocast", {"dtype": dtype}
    if weights == "float32" and dtype and seen.autocast != requested:
        yield "no_autocast"
    # In bfloat16, an update below a 512th of its weight changes nothing.
    # It has 8 significant bits, so half the distance to the next number is a 512th to a 256th of a number.
    if weights in HALVES and seen.dtypes.get("moments") == weights and not seen.dtypes.get("master"):
        yield "no_fp32_copy", {"weights": weights}
    lowered = "lower_loss_scale_on_overflow" in seen.patches
    # DeepSpeed 0.19.8 sees the overflow by the norm, and skips the step before its GradScaler hears of it. A scale that
    # fits also stays at 2^16 for 2000 steps (torch/amp/grad_scaler.py:129): so the remedy is to look whether weights
    # change.
    if seen.autocast == "fp16" and seen.stage and seen.loss_scale == FIRST_SCALE and not lowered:
        yield "loss_scale_stuck"


def offloading(facts: Facts) -> Results:
    """Name optimizer states and weights that are elsewhere than asked for."""
    stage = required(facts.seen.stage)
    states = facts.seen.offload_optimizer
    home = facts.requested_home("offload_optimizer")
    # Measured: stages 1 and 2 with nvme exit with 0, and no file is written.
    if (home, states) == ("nvme", "cpu") and stage < 3:  # it only asks for "not none" (zero/stage_1_and_2.py:220)
        yield "nvme_is_cpu"
    elif states not in (None, home):
        yield "states_not_offloaded", {"home": home}
    home = facts.requested_home("offload_param")
    # Stage 2 takes the section and trains without it (reproductions/offload_param_without_stage3.py).
    if home != "none" and "weights" not in facts.seen.offloads:
        yield "weights_not_offloaded", {"home": home}


def checkpointing(facts: Facts) -> Results:
    """Name recomputation that was asked for and is off."""
    # Only a model of transformers says whether it recomputes.
    if required(facts.promised.checkpointing) and not facts.checkpointing:
        yield "checkpointing_off"


MISTAKES = (
    memory,
    deepspeed,
    fsdp,
    ranks,
    optimizer,
    updates,
    model,
    tensors,
    schedule,
    idle_schedule,
    data,
    clipping,
    accumulation,
    between,
    rows,
    precision,
    offloading,
    checkpointing,
)
