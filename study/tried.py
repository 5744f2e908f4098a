"""Configurations tried for real. What needs DeepSpeed runs in another process, `study.trials`; answers are kept."""

from study.claim import Kind
from study.finding import NOT_TESTED, Finding


def _later() -> Finding:
    return Finding(None, "not written yet", without=NOT_TESTED, missing="this check is not written yet")


def deepspeed_config(*, config: dict, look: str = "accepted", ranks: int = 1) -> Finding:
    """What DeepSpeed makes of a config: "accepted" or "rejected", or a value by its dotted path."""
    return _later()


def accelerate_yaml(*, base: str, change: dict, look: str = "accepted") -> Finding:
    """What Accelerate makes of an arm's yaml with keys changed: of its plugin, DeepSpeed's dict, or the environment."""
    return _later()


def default(*, of: str, field: str) -> Finding:
    """The default of a field of a config class."""
    return _later()


def member(*, of: str, name: str) -> Finding:
    """Whether a class, enumeration or module has a member: yes or no."""
    return _later()


def reproduction(*, name: str) -> Finding:
    """What a script of `study/reproductions/` finds."""
    return _later()


TRIALS = (deepspeed_config, accelerate_yaml, default, member, reproduction)
KINDS = {"tried": Kind("tried", {trial.__name__: trial for trial in TRIALS}, "what")}
