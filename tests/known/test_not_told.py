"""Which faults do not apply: of each a training that has it, and the same with one thing otherwise."""

from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from study.known.faults import Fault, table
from study.known.stacks import UNSAID, Stack
from study.known.which_apply import Applies, which_apply
from tests.cases import for_each

FAULTS = {fault.id: fault for fault in table().fault if fault.when}
OTHER = "something else"  # that no condition wants


def training(fault: Fault, said: dict[str, Any], keys: dict[str, Any], release: str) -> Stack:
    packages = {name: Version(value) for name, value in said.items() if name in table().asked}
    conditions = {name: value for name, value in said.items() if name not in packages}
    releases = packages | {fault.package: Version(release)}
    return Stack(releases, UNSAID | {"optimizer": None} | conditions, keys.get)


def told(fault: Fault, *given: Any) -> Applies | None:
    return next((each for each in which_apply(training(fault, *given)) if each.fault.id == fault.id), None)


def fitting(wanted: Any) -> Any:
    """A value that a condition, or a key of a config, takes."""
    if wanted == "absent":
        return None
    if isinstance(wanted, str):
        return release_for(wanted, is_inside=True)
    return wanted[0] if isinstance(wanted, list) else wanted


def release_for(span: str, is_inside: bool) -> str:
    """A release in a range of another package, or beyond it: of those that its ends name, and far from them."""
    inside = SpecifierSet(span)
    near = [*(each.version for each in inside), "0.0.1", "999"]
    return next(release for release in near if (Version(release) in inside) == is_inside)


def breaking(name: str, wanted: Any) -> list[Any]:
    """Values that a condition, or a key of a config, does not take."""
    if name in table().asked:
        return [release_for(wanted, is_inside=False)]
    if wanted == "absent":
        return [OTHER]
    if isinstance(wanted, bool):
        return [not wanted]
    if isinstance(wanted, int):
        return [wanted - 1]
    return [each for each in table().values.get(name, [*table().optimizers, OTHER]) if each not in wanted]


def said_of(fault: Fault) -> dict[str, Any]:
    """What is said of a training that has a fault. Nobody can say what a script does."""
    return {name: fitting(wanted) for name, wanted in fault.conditions.items() if name not in ("keys", "script")}


def keys_of(group: dict[str, Any]) -> dict[str, Any]:
    return {path: fitting(wanted) for path, wanted in group.items()}


GROUPS = [(id, number) for id in FAULTS for number, _ in enumerate(FAULTS[id].conditions.get("keys", [{}]))]
SAID = [(id, name) for id in FAULTS for name in FAULTS[id].conditions if name not in ("keys", "script")]
KEYS = [(id, path) for id, number in GROUPS for path in FAULTS[id].conditions.get("keys", [{}])[number]]


@for_each(("id", "group"), GROUPS)
def test_a_training_that_has_all_conditions_has_the_fault(id, group):
    """Else what is not told below would say nothing."""
    fault = FAULTS[id]
    found = told(fault, said_of(fault), keys_of(fault.conditions.get("keys", [{}])[group]), fault.until)
    assert found is not None
    assert {each.condition for each in found.why} == fault.conditions.keys() & {"script"}
    assert found.answer == ("applies if" if found.why else "applies")


@for_each(("id", "name"), SAID)
def test_one_condition_that_is_otherwise_is_enough(id, name):
    fault = FAULTS[id]
    keys = keys_of(fault.conditions.get("keys", [{}])[0])
    values = breaking(name, fault.conditions[name])
    assert values, "any value has the fault: remove the condition"
    for value in values:
        assert told(fault, said_of(fault) | {name: value}, keys, fault.until) is None, value


@for_each(("id", "path"), KEYS)
def test_one_key_that_is_otherwise_is_enough(id, path):
    """In the groups that have it, and the other groups are not so."""
    fault = FAULTS[id]
    for group in fault.conditions["keys"]:
        if path not in group:
            continue
        keys = {
            other: breaking(other, wanted)[-1] for each in fault.conditions["keys"] for other, wanted in each.items()
        }
        keys |= keys_of(group)
        for value in breaking(path, group[path]):
            assert told(fault, said_of(fault), keys | {path: value}, fault.until) is None, value


@for_each("id", FAULTS)
def test_a_release_that_was_tested_and_is_right_does_not_have_it(id):
    fault = FAULTS[id]
    keys = keys_of(fault.conditions.get("keys", [{}])[0])
    for release in fault.asked or table().asked[fault.package]:
        has_it = Version(fault.since) <= Version(release) <= Version(fault.until)
        assert (told(fault, said_of(fault), keys, release) is not None) == has_it, release
