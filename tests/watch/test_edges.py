"""The thresholds of findings: each rule where it begins, and a step beside it. Those of losses: test_entered.py."""

import contextlib
from typing import Any

import numpy as np
import pytest

from study.records.schema import Record
from study.watch import costs, dynamics, mistakes, trends
from study.watch.facts import Facts, Unknown
from tests.cases import for_each
from tests.watch.test_steps import table

# A run of two ranks, with 1000 parameters in fp32: 4000 bytes of weights.
DDP = {"wrapper": "DistributedDataParallel", "ranks": 2, "parameters": 1000, "dtypes": {"weights": "float32"}}
ZERO = {"wrapper": "DeepSpeedEngine", "overlap": False, "bucket_elements": 1}
STAGE_2, STAGE_3 = ({**DDP, **ZERO, "stage": stage} for stage in (2, 3))


def named(rule, seen: dict, peak: dict, kept: int, moved: dict, watched: dict) -> list[str]:
    rank = {"at_peak": peak, "after_step": {"gathered_weights": kept}, "tracked_peak_bytes": sum(peak.values())}
    collectives = {kind: {"calls": 1, "bytes": moved[kind], "bytes_by_dtype": {}} for kind in moved}
    record: dict[str, Any] = {"run_id": "mine", "started_utc": "2026-01-02T03:04:05+00:00"}
    record |= {"observed": seen, "watched": watched, "memory": {"components": {"per_rank": [rank] * seen["ranks"]}}}
    record |= {"traffic": {"per_rank": [collectives] * seen["ranks"]}}
    found = []
    with contextlib.suppress(Unknown):
        for each in rule(Facts(Record.model_validate(record))):
            found.append(each if isinstance(each, str) else each[0])  # what comes before something unknown counts
    return found


def names(rule, case: dict) -> list[str]:
    parts: dict = {"seen": DDP, "peak": {"weights": 1}, "kept": 0, "moved": {}, "watched": {}} | case
    return named(rule, **parts)


# finding, rule, what it begins with, and one part of that which is a step beside it
OF_RECORDS = [
    # --- costs
    ("second_bucket", costs.buckets_and_copies,
     {"seen": STAGE_2 | {"overlap": True}, "peak": {"buckets": 100, "weights": 900}},
     {"peak": {"buckets": 99, "weights": 901}}),
    ("second_bucket", costs.buckets_and_copies,
     {"seen": STAGE_2 | {"overlap": True}, "peak": {"buckets": 100, "weights": 900}},
     {"seen": STAGE_3 | {"overlap": True}}),
    ("buckets_dominate", costs.buckets_and_copies,
     {"seen": STAGE_2 | {"bucket_elements": 101}, "peak": {"buckets": 1001, "weights": 1000}},
     {"peak": {"buckets": 1000, "weights": 1000}}),
    ("buckets_dominate", costs.buckets_and_copies,
     {"seen": STAGE_2 | {"bucket_elements": 101}, "peak": {"buckets": 1001, "weights": 1000}},
     {"seen": STAGE_2 | {"bucket_elements": 100}}),
    ("zero_on_one_rank", costs.buckets_and_copies, {"seen": STAGE_2 | {"ranks": 1}}, {"seen": STAGE_2}),
    ("fp32_copies", costs.buckets_and_copies,
     {"seen": STAGE_2 | {"dtypes": {"weights": "float32", "master": "float32"}}, "peak": {"master": 1}},
     {"peak": {"master": 0, "weights": 1}}),
    ("weights_stay_gathered", costs.gathered_weights,
     {"seen": STAGE_3, "peak": {"weights": 100}, "kept": 2000}, {"kept": 1999}),
    ("weights_stay_gathered", costs.gathered_weights,
     {"seen": STAGE_3, "peak": {"weights": 30_000}, "kept": 3000}, {"kept": 2999}),
    ("all_weights_gathered", costs.gathered_weights,
     {"seen": STAGE_3, "peak": {"gathered_weights": 3600}}, {"peak": {"gathered_weights": 3599}}),
    ("all_weights_gathered", costs.gathered_weights,
     {"seen": STAGE_3, "peak": {"gathered_weights": 4000, "activations": 36_000}},
     {"peak": {"gathered_weights": 4000, "activations": 36_010}}),
    ("all_weights_gathered", costs.gathered_weights,
     {"seen": STAGE_3, "peak": {"gathered_weights": 3600}}, {"seen": STAGE_3 | {"ranks": 1}}),
    ("frozen_weights_gathered", costs.gathered_weights,
     {"seen": STAGE_3 | {"checkpointing": True, "trained_parameters": 999}, "peak": {"gathered_weights": 3600}},
     {"seen": STAGE_3 | {"checkpointing": True, "trained_parameters": 1000}}),
    ("activations_dominate", costs.activations,
     {"peak": {"activations": 500, "weights": 500}}, {"peak": {"activations": 499, "weights": 501}}),
    ("states_replicated", costs.states,
     {"peak": {"moments": 500, "activations": 500}}, {"peak": {"moments": 499, "activations": 501}}),
    ("states_replicated", costs.states,  # stage 1 would save 100 of 1000 bytes, or 99
     {"peak": {"weights": 400, "moments": 200, "activations": 400}},
     {"peak": {"weights": 402, "moments": 198, "activations": 400}}),
    ("states_replicated", costs.states,
     {"peak": {"weights": 400, "master": 200, "activations": 400}},
     {"seen": STAGE_2}),
    ("stage_0_replicates", costs.states,
     {"seen": DDP | {"stage": 0}, "peak": {"moments": 500, "activations": 500}}, {"seen": DDP}),
    ("reductions_repeated", costs.traffic,
     {"seen": STAGE_2 | {"accumulation": 2}, "moved": {"all_reduce": 6000}}, {"moved": {"all_reduce": 5999}}),
    ("gathers_repeated", costs.traffic,
     {"seen": STAGE_3 | {"accumulation": 2}, "moved": {"all_gather": 6000}}, {"moved": {"all_gather": 5999}}),
    ("no_sync_unused", costs.traffic,
     {"seen": DDP | {"accumulation": 2, "trained_parameters": 500}, "moved": {"all_reduce": 3000}},
     {"moved": {"all_reduce": 2999}}),
    ("no_sync_unused", costs.traffic,
     {"seen": DDP | {"accumulation": 2}, "moved": {"all_reduce": 6000}}, {"seen": DDP | {"accumulation": 1}}),
    # --- mistakes
    ("gradients_not_shared", mistakes.ranks,
     {"seen": DDP | {"parameters": 1_000_000}, "moved": {"all_reduce": 40}}, {"moved": {"all_reduce": 41}}),
    ("unequal_weights", mistakes.ranks,
     {"moved": {"all_reduce": 4000}, "watched": {"weights_sums": [1e12, 1e12 + 1001], "largest_rates": [1.0, 1.0]}},
     {"watched": {"weights_sums": [1e12, 1e12 + 999], "largest_rates": [1.0, 1.0]}}),
    ("weights_unchanged", mistakes.optimizer,
     {"seen": DDP | {"steps": 5, "trained_parameters": 1000},
      "watched": {"optimized_tensors": 1, "unchanged_parameters": 100}},
     {"watched": {"optimized_tensors": 1, "unchanged_parameters": 99}}),
    ("weights_unchanged", mistakes.optimizer,
     {"seen": DDP | {"steps": 5, "trained_parameters": 1000},
      "watched": {"optimized_tensors": 1, "unchanged_parameters": 100}},
     {"seen": DDP | {"steps": 4, "trained_parameters": 1000}}),
    ("optimizer_of_other_tensors", mistakes.optimizer,
     {"seen": DDP | {"trained_parameters": 1000}, "watched": {"optimized_tensors": 0, "unchanged_parameters": 100}},
     {"watched": {"optimized_tensors": 0, "unchanged_parameters": 99}}),
    ("fewer_rows_than_a_step", mistakes.data,
     {"seen": DDP | {"accumulation": 2}, "watched": {"rows_per_pass": 8, "data_rows": 31}},
     {"watched": {"rows_per_pass": 8, "data_rows": 32}}),
    ("no_update", mistakes.updates, {"watched": {"passes_without_update": 11}},
     {"watched": {"passes_without_update": 10}}),
    ("no_update", mistakes.updates, {"seen": DDP | {"accumulation": 4}, "watched": {"passes_without_update": 17}},
     {"watched": {"passes_without_update": 16}}),
    ("gradients_not_cleared", mistakes.updates, {"watched": {"gradients_kept": 4}}, {"watched": {"gradients_kept": 3}}),
    ("gradients_are_zero", mistakes.updates, {"watched": {"without_gradients": 4}},
     {"watched": {"without_gradients": 3}}),
    ("decay_too_large", mistakes.updates, {"watched": {"largest_decay": 0.05}}, {"watched": {"largest_decay": 0.0499}}),
    ("clipped_to_nothing", mistakes.updates,
     {"seen": DDP | {"clipping": 0.5, "optimizer": "SGD"}, "watched": {"usual_norm": 500.0}},
     {"watched": {"usual_norm": 499.9}}),
    ("frozen", mistakes.model, {"seen": DDP | {"trained_parameters": 19}, "watched": {"model": "mine"}},
     {"seen": DDP | {"trained_parameters": 20}}),
    ("frozen", mistakes.model,
     {"seen": DDP | {"trained_parameters": 19}, "watched": {"model": "mine", "trained_share": 0.019}},
     {"watched": {"model": "mine", "trained_share": 0.02}}),
    ("gradients_cleared", mistakes.accumulation,
     {"seen": DDP | {"steps": 8, "accumulation": 2}, "watched": {"passes_cleared": 1, "updates_beside_others": 4}},
     {"watched": {"passes_cleared": 1, "updates_beside_others": 5}}),
    ("gradients_cleared", mistakes.accumulation,
     {"seen": DDP | {"steps": 8, "accumulation": 2}, "watched": {"passes_cleared": 1, "inputs_per_rank": [["a", "b"]]}},
     {"watched": {"passes_cleared": 1, "inputs_per_rank": [["a", "a"]]}}),
    ("gradients_summed", mistakes.accumulation,
     {"seen": DDP | {"accumulation": 2}, "watched": {"loss_base": "mean"}},
     {"watched": {"loss_base": "mean", "passes_cleared": 1}}),
    ("schedule_unused", mistakes.idle_schedule,
     {"seen": DDP | {"steps": 5, "learning_rates": [1.0]}, "watched": {"schedule_steps": 0, "has_schedule": True}},
     {"seen": DDP | {"steps": 4, "learning_rates": [1.0]}}),
    ("model_not_run", mistakes.between, {"watched": {"updates_without_model": 10}},
     {"watched": {"updates_without_model": 9}}),
    ("moved_in_evaluation", mistakes.between, {"watched": {"evaluations": 4, "moved_in_evaluation": 2}},
     {"watched": {"evaluations": 5, "moved_in_evaluation": 2}}),
    ("moved_in_evaluation", mistakes.between, {"watched": {"evaluations": 2, "moved_in_evaluation": 2}},
     {"watched": {"evaluations": 2, "moved_in_evaluation": 2, "moved_besides": 1}}),
    ("moved_in_evaluation", mistakes.between, {"watched": {"evaluations": 2, "moved_in_evaluation": 2}},
     {"watched": {"evaluations": 1, "moved_in_evaluation": 1}}),
    ("dropout_repeated", mistakes.between, {"watched": {"random_states": ["a"] * 6, "inputs_per_rank": [["a", "b"]]}},
     {"watched": {"random_states": ["a"] * 4 + ["b"] * 2, "inputs_per_rank": [["a", "b"]]}}),
    ("dropout_repeated", mistakes.between, {"watched": {"random_states": ["a"] * 6, "inputs_per_rank": [["a", "b"]]}},
     {"watched": {"random_states": ["a"] * 6, "inputs_per_rank": [["a", "a"]]}}),
    ("gradients_summed_over_ranks", mistakes.accumulation,
     {"seen": DDP | {"accumulation": 1},
      "watched": {"loss_base": "mean", "gradient_factor": 1.0005, "inputs_per_rank": [["a"], ["b"]]}},
     {"watched": {"loss_base": "mean", "gradient_factor": 1.002, "inputs_per_rank": [["a"], ["b"]]}}),
    ("gradients_summed_over_ranks", mistakes.accumulation,
     {"seen": DDP | {"accumulation": 1},
      "watched": {"loss_base": "mean", "gradient_factor": 1.0, "inputs_per_rank": [["a"], ["b"]]}},
     {"watched": {"loss_base": "mean", "gradient_factor": 1.0, "inputs_per_rank": [["a"], ["a"]]}}),
    ("rows_repeated", mistakes.rows, {"watched": {"inputs_per_rank": [["a"] * 6]}},
     {"watched": {"inputs_per_rank": [["a"] * 5]}}),
]  # fmt: skip


@for_each(("id", "rule", "begins", "beside"), OF_RECORDS)
def test_a_rule_of_records_begins_where_it_says(id, rule, begins, beside):
    assert names(rule, begins) == [id]
    assert id not in names(rule, begins | beside)


STEPS = np.arange(100)


def first(count: int, these: float, others: float) -> trends.Column:
    """A value of the first steps, and another of the later ones."""
    return np.where(count > STEPS, these, others)


def rates(values: trends.Column) -> trends.Column:
    return values[:, None]  # of all groups


def turning(least: float, last: float) -> trends.Column:
    return rates(np.concatenate([np.linspace(1, least, 50), np.linspace(least, last, 50)]))


def rising(uneven: float) -> trends.Column:
    """A warm-up whose last part is smaller than the others."""
    values = np.arange(1, 101) / 100
    values[-1] -= uneven
    return rates(values)


def leaking(start: float, growth: float) -> trends.Column:
    """Memory that grows by so much between the medians of the first and the last quarter, 67.5 steps apart."""
    return start + growth / 67.5 * (STEPS - 21)  # step 21 is the median of the first


# finding, columns of one rank or of several, and those of the last rank that are a step beside
OF_STEPS = [
    # --- the course
    ("rate_is_zero", [{"rates": rates(first(90, 1, 0))}], {"rates": rates(first(91, 1, 0))}),
    ("rate_too_small", [{"rates": 0.99e-8}], {"rates": 1e-8}),
    ("rate_rises_again", [{"rates": turning(0.1, 0.6)}], {"rates": turning(0.1, 0.59)}),
    ("rate_rises_again", [{"rates": turning(0.1, 0.7)}], {"rates": turning(0.101, 0.7)}),
    ("warmup_unfinished", [{"rates": rising(0.00095)}], {"rates": rising(0.00105)}),
    ("eval_while_training", [{"training": first(20, 0, 1), "dropouts_off": 0}],
     {"training": first(19, 0, 1), "dropouts_off": 0}),
    ("dropout_off", [{"training": 1, "dropouts_off": first(20, 1, 0)}],
     {"training": 1, "dropouts_off": first(19, 1, 0)}),
    ("frozen_on_the_way", [{"trained": first(50, 1, 0.49)}], {"trained": first(50, 1, 0.5)}),
    ("clipped_in_each_pass", [{"passes": 4, "clipped_in": first(50, 1, 4)}],
     {"passes": 4, "clipped_in": first(49, 1, 4)}),
    ("clipped_after_the_update", [{"passes": 4, "clipped_in": first(50, 0, 4)}],
     {"passes": 4, "clipped_in": first(49, 0, 4)}),
    ("schedule_in_each_pass", [{"scheduled": first(50, 2, 1)}], {"scheduled": first(49, 2, 1)}),
    ("loss_rises", [{"loss": first(75, 2, 3.01)}], {"loss": first(75, 2, 3)}),
    ("loss_rises", [{"loss": first(75, 2, 3.01)}], {"loss": first(76, 2, 3.01)}),
    ("rank_learns_nothing", [{"loss": first(5, 5, 4)}, {"loss": 5.0}], {"loss": first(5, 5, 4.79)}),
    ("rank_learns_nothing", [{"loss": 5.0}, {"loss": first(5, 5, 4)}], {"loss": first(5, 5, 4.01)}),
    ("rank_learns_nothing", [{"loss": first(5, 5, 4)}, {"loss": first(98, 5, 3.9)}], {"loss": first(97, 5, 3.9)}),
    # --- the time and the memory of steps; the first ten do not count
    ("loader_waits", [{"data": 0.004, "update": 0.006}], {"data": 0.0039, "update": 0.0061}),
    ("outside_steps", [{"outside": 0.0061, "update": 0.0039}], {"outside": 0.0059, "update": 0.0041}),
    ("straggler", [{}, {"backward": 0.0231}], {"backward": 0.0229}),
    ("straggler", [{}, {"backward": first(64, 0.03, 0.02)}], {"backward": first(63, 0.03, 0.02)}),
    ("straggler", [{"waiting": 0.086}, {"backward": 0.026, "waiting": 0.086}], {"backward": 0.026, "waiting": 0.092}),
    ("memory_creeps", [{"memory_bytes": leaking(1e9, 1.001 * 2**24)}], {"memory_bytes": leaking(1e9, 0.999 * 2**24)}),
    ("memory_creeps", [{"memory_bytes": leaking(1e10, 1.001e8)}], {"memory_bytes": leaking(1e10, 0.999e8)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "stretch"),
    [
        (np.r_[0, np.ones(19), np.zeros(80)], "0 in 81 of 100 steps, without a break from step 21 to step 100"),
        (np.r_[np.zeros(5), np.ones(40), np.zeros(10), np.ones(45)], "from step 46 to step 55"),
    ],
)
def test_the_longest_stretch_without_a_rate_is_told(rate, stretch):
    """A warm-up begins at 0 as well."""
    (said,) = [each for each in dynamics.findings({0: table(100, rates=rates(rate))}) if each.id == "rate_is_zero"]
    assert stretch in said.sentence


def found(*columns: dict, steps: int = 100) -> list[str]:
    tables = {rank: table(steps, **each) for rank, each in enumerate(columns)}
    return [each.id for each in dynamics.findings(tables) + trends.findings(tables)]


@for_each(("id", "begins", "beside"), OF_STEPS)
def test_a_rule_of_steps_begins_where_it_says(id, begins, beside):
    assert id in found(*begins)
    assert id not in found(*begins[:-1], beside)


# finding, columns, and the fewest steps of which it is said
FEWEST = [
    ("eval_while_training", {"training": 0, "dropouts_off": 0}, 10),
    ("loss_rises", {"loss": np.array([2.0] + [4.0] * 19)}, 20),
    ("loader_waits", {"data": 1.0}, 30),
]


@pytest.mark.parametrize(("id", "columns", "fewest"), FEWEST)
def test_nothing_is_said_of_fewer_steps(id, columns, fewest):
    assert id in found(columns, steps=fewest)
    shorter = {name: value[:-1] if isinstance(value, np.ndarray) else value for name, value in columns.items()}
    assert id not in found(shorter, steps=fewest - 1)
