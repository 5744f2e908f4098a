"""Rules for what enters a loss: each at the count where it begins, one below it, and with the share that it says."""

from types import SimpleNamespace

from study.records.sections import Targets
from study.watch import entered
from tests.cases import for_each


def said(rule, **counts) -> list[tuple[str, dict]]:
    facts = SimpleNamespace(watched=SimpleNamespace(targets=Targets(**counts)))
    return [(each, {}) if isinstance(each, str) else each for each in rule(facts)]  # without values: the id alone


# rule, counts at which it names something, one of them that is a step too small, its finding, and what it says
CASES = [
    (entered.function, {"read": 10, "no_logarithms": 6}, {"no_logarithms": 5}, "no_logarithms", {}),
    (entered.function, {"read": 10, "mixed": 6}, {"mixed": 5}, "view_for_transpose", {}),
    (entered.function, {"read": 10, "broadcast": 6}, {"broadcast": 5}, "loss_broadcasts", {}),
    (entered.function, {"probabilities": "softmax"}, {"probabilities": None}, "probabilities_as_logits",
     {"function": "softmax"}),
    (entered.targets, {"ignored": 7}, {"counted": 1}, "targets_ignored", {"total": 7}),
    (entered.targets, {"counted": 90, "ignored": 10, "rows": 40, "rows_ignored": 4}, {"rows_ignored": 3},
     "rows_without_targets", {"share": 0.1}),
    (entered.targets, {"counted": 90, "read": 8, "without_targets": 4}, {"without_targets": 3},
     "rows_without_targets", {"share": 0.5}),
    (entered.classes, {"read": 6, "uniform": [0, 0, 0, 1, 1]}, {"uniform": [0, 0, 0, 1]}, "rows_sorted", {"count": 6}),
    (entered.classes, {"read": 6, "uniform": [0, 1, 1, 1, 1]}, {"uniform": [1, 1, 1, 1, 1]}, "rows_sorted",
     {"count": 6}),
    (entered.places, {"compared": [64, 64, 64], "equal": [0, 0, 58]}, {"equal": [0, 0, 57]}, "targets_shifted_twice",
     {"share": 58 / 64}),
    (entered.places, {"compared": [64, 64, 64], "equal": [58, 0, 0]}, {"compared": [64, 64, 63]}, "targets_are_inputs",
     {"share": 58 / 64}),
    (entered.places, {"compared": [64, 64, 64], "equal": [58, 31, 0]}, {"equal": [58, 32, 0]}, "targets_are_inputs",
     {"share": 58 / 64}),
    (entered.padding, {"counted": 100, "padding": 2}, {"padding": 1}, "padding_in_loss", {"share": 0.02}),
    (entered.padding, {"read": 8, "unmasked": 4}, {"unmasked": 3}, "padding_unmasked", {}),
    (entered.padding, {"tokens": 100, "hidden": 50}, {"hidden": 49}, "tokens_hidden", {"share": 0.5}),
    (entered.special_tokens, {"rows": 10, "two_starts": 5}, {"two_starts": 4}, "two_starts", {"share": 0.5}),
    (entered.special_tokens, {"ends": 8}, {"ends": 7}, "ends_not_learned", {"ends": 8}),
    (entered.special_tokens, {"ends": 8}, {"ends_learned": 1}, "ends_not_learned", {"ends": 8}),
    (entered.special_tokens, {"read": 8, "positions_alike": 4}, {"positions_alike": 3}, "positions_alike", {}),
    (entered.special_tokens, {"tokens": 100, "unknown": 20}, {"unknown": 19}, "tokens_unknown", {"share": 0.2}),
    (entered.special_tokens, {"tokens": 64, "unknown": 32}, {"tokens": 63}, "tokens_unknown", {"share": 0.5}),
]  # fmt: skip


@for_each(("rule", "counts", "less", "id", "values"), CASES)
def test_a_rule_begins_where_it_says(rule, counts, less, id, values):
    assert said(rule, **counts) == [(id, values)]
    assert said(rule, **counts | less) == []


def test_nothing_that_was_read_is_no_finding():
    rules = (entered.function, entered.targets, entered.classes, entered.places, entered.padding)
    assert [said(rule) for rule in (*rules, entered.special_tokens)] == [[]] * 6
