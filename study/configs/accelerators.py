"""What a script gives its own Accelerator, where the config or the flags of its launcher say otherwise.

Read in accelerate 1.15.0. Of gradient_accumulation_steps the launcher's counts before the script's, and arrives with
DeepSpeed alone (accelerator.py:547, utils/launch.py:569). A number in a DeepSpeed json counts before both, and 1 if it
has none (accelerator.py:2216, utils/dataclasses.py:1274). Of mixed_precision the script's counts before the launcher's
(state.py:926). A json may refuse it, or switch it off (utils/dataclasses.py:1436 and 1444).
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.configs import code
from study.configs.commands import Command
from study.configs.scripts import ACCELERATOR, ACCUMULATES
from study.configs.settings import AUTO, HALVES
from study.configs.sources import ACCELERATE, kind_of
from study.configs.syntax import assigned_calls, at_intervals, parsed
from study.core.files import section_at, value_at
from study.core.text import comparable, is_number
from study.known.findings import Finding, finding

MADE = re.compile("Accelerator")
DECIDES = re.compile("ACCELERATE_|deepspeed_plugin")  # in a script that itself says what a launcher says
PASSES, PRECISION, FILE = "gradient_accumulation_steps", "mixed_precision", "deepspeed_config_file"
OF_OPTIMIZER = re.compile(r"(?i)(?:^|\.)\w*opt\w*\.step$")
OTHER_ENGINES = {"multi_gpu", "use_fsdp", "use_megatron_lm", "cpu", "tpu"}


@dataclass(frozen=True)
class AccelerateLaunch:
    """What `accelerate launch` is given. A flag counts before the yaml."""

    flags: Mapping[str, Any]
    file: str  # the yaml's name
    yaml: Mapping[str, Any]
    command: str  # empty: none is given, and an argument of the script may be another than its default

    @property
    def is_with_deepspeed(self) -> bool | None:
        if not OTHER_ENGINES.isdisjoint(self.flags):
            return False
        if "use_deepspeed" in self.flags:
            return True
        return self.yaml["distributed_type"] == "DEEPSPEED" if "distributed_type" in self.yaml else None

    def said(self, name: str, section: str = "") -> tuple[Any, str]:
        """Return what is said, and by whom."""
        if name in self.flags:
            return self.flags[name], f"the launcher's --{name}"
        return value_at(dict(self.yaml), f"{section}.{name}".lstrip(".")), self.file


def overruled(name: str, text: str, contents: Mapping[str, dict], commands: list[Command]) -> Iterator[Finding]:
    """Yield what a script's one Accelerator is given, and its launcher says otherwise."""
    launch = _launch(name, contents, commands)
    if launch is None or DECIDES.search(text):
        return
    with_defaults, _ = code.with_defaults(text, launch.command)
    accelerators = [*code.calls(with_defaults if launch.command else text, MADE)]
    if len(accelerators) != 1:
        return
    ((call, values),) = accelerators
    json = ""
    if launch.is_with_deepspeed:
        json = Path(str(launch.said(FILE, "deepspeed_config")[0] or "")).name
    if json and json not in contents:
        return
    place = f"{name}:{call.lineno}"
    asked = values.get(PASSES, 1 if "gradient_accumulation_plugin" not in values and "**" not in values else AUTO)
    if PASSES in values and is_number(asked):
        yield from _passes(asked, place, launch, json, contents.get(json, {}))
    steps, _ = _of_engine(asked, launch, json, contents.get(json, {}))
    if launch.is_with_deepspeed and is_number(steps):
        yield from _counted_by_script(name, with_defaults, steps)
    if "**" not in values:
        yield from _precision(values.get(PRECISION), place, launch, json, contents.get(json, {}))


def _launch(name: str, contents: Mapping[str, dict], commands: list[Command]) -> AccelerateLaunch | None:
    """Return what launches a script. None: it is not known, or another program does."""
    started = [each for each in commands if each.script == name and "accelerate" in each.line]
    if len(started) != bool(commands):
        return None
    flags = started[0].launcher if started else {}
    named = Path(str(flags.get("config_file", ""))).name
    yamls = [each for each in contents if kind_of(contents[each]) == ACCELERATE and named in ("", each)]
    if len(yamls) > 1 or (named and not yamls):
        return None
    file = yamls[0] if yamls else ""
    return AccelerateLaunch(flags, file, contents.get(file, {}), started[0].line if started else "")


def _of_engine(asked: Any, launch: AccelerateLaunch, json: str, config: dict) -> tuple[Any, str]:
    """Return how many micro-batches DeepSpeed accumulates, and who says it."""
    of_json = comparable(config.get(PASSES, 1)) if json else AUTO
    if is_number(of_json):
        return of_json, f"{json}{'' if PASSES in config else ', which has none'}"
    said, by = launch.said(PASSES, "deepspeed_config")
    launched = comparable(said)
    return (launched, by) if is_number(launched) else (asked, "the Accelerator")


def _counted_by_script(name: str, text: str, steps: float) -> Iterator[Finding]:
    """Yield where a script steps its optimizer at intervals of its own, and DeepSpeed accumulates `steps`.

    With DeepSpeed the optimizer's step and zero_grad do nothing (utils/deepspeed.py:308 and 311). Since 1.8.0 a
    backward pass outside accumulate() updates whatever DeepSpeed accumulates (line 281).
    """
    tree = parsed(text)
    if tree is None or ACCUMULATES.search(ast.unparse(tree)):
        return
    for accelerator in assigned_calls(tree, ACCELERATOR):
        backward = f"{accelerator}.backward"
        for step, count in at_intervals(tree, OF_OPTIMIZER, re.compile(f"^{re.escape(backward)}$")):
            place, id = f"{name}:{step.lineno}", "counted_by_script" if steps == 1 else "counted_by_both"
            yield finding(id, backward=backward, count=count, place=place, steps=f"{steps:g}")
            return


def _passes(asked: float, place: str, launch: AccelerateLaunch, json: str, config: dict) -> Iterator[Finding]:
    said, by = launch.said(PASSES, "deepspeed_config")
    launched = comparable(said)
    if launch.is_with_deepspeed is False and is_number(launched) and launched != asked and PASSES in launch.flags:
        yield finding("launcher_overruled", name=PASSES, asked=asked, place=place, unused=f"{launched:g} of {by}")
    if not launch.is_with_deepspeed:
        return
    counts, whose = _of_engine(asked, launch, json, config)
    if counts != asked:
        says = "warns" if json and whose.startswith(json) else "says nothing"
        yield finding("accumulation_of_launcher", asked=asked, place=place, counts=f"{counts:g} of {whose}", says=says)


def _precision(asked: Any, place: str, launch: AccelerateLaunch, json: str, config: dict) -> Iterator[Finding]:
    said, by = launch.said(PRECISION)
    if json and PRECISION not in launch.flags:  # a yaml's beside a json is refused anyway
        said = None
    of_launcher, own = HALVES.get(str(said).lower()), HALVES.get(str(asked).lower())
    half = of_launcher if asked is None else own
    on = [each for each in ("bf16", "fp16") if section_at(config, each).get("enabled") is True]
    if half and on and half not in on:
        whose = f"of {by}" if asked is None else f"of the Accelerator ({place})"
        yield finding("precision_refused", asked=half, whose=whose, on=on[0], json=json)
    elif own and json and section_at(config, own).get("enabled") is False:
        yield finding("precision_overruled", asked=own, place=place, json=json)
    elif (own or (asked == "no" and not json)) and of_launcher not in (None, own):
        yield finding("launcher_overruled", name=PRECISION, asked=asked, place=place, unused=f"{said} of {by}")
