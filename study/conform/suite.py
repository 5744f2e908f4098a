"""Runs the properties for an adapter, and shrinks what fails. Needs no torch: a process of its own has that."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from study.conform.properties import Property
from study.errors import Stop
from study.spec.arms import PACKAGE

HERE = Path(__file__).parent
LIMIT_S = 40  # for one property; it takes about a second
STATUSES = ("holds", "fails", "refused", "not applicable")


@dataclass(frozen=True)
class Adapter:
    """A file with the functions of an adapter, and the settings that it gets."""

    name: str
    file: str
    settings: dict = field(default_factory=dict)
    about: str = ""

    @property
    def ranks(self) -> int | None:
        """The only number of ranks with which this way can run. None: any."""
        return self.settings.get("ranks")


@dataclass(frozen=True)
class Result:
    """The outcome of one property for one adapter."""

    adapter: str
    property: str
    sentence: str
    source: str
    status: str
    words: str
    seconds: float = 0.0
    kind: str = ""  # of a failure: what must stay alike when it is made smaller
    shrunk: dict | None = None  # a smaller case that fails as well
    ranks: tuple[int, ...] = (2,)


def _ours(name: str, file: str, about: str, **settings) -> Adapter:
    return Adapter(name, str(HERE / "adapters" / f"{file}.py"), settings, about)


ADAPTERS = {
    each.name: each
    for each in (
        _ours("single", "ddp", "one process", ranks=1),
        _ours("ddp", "ddp", "PyTorch's DDP"),
        _ours("fsdp1", "fsdp", "PyTorch's FSDP1", version=1),
        _ours("fsdp2", "fsdp", "PyTorch's FSDP2", version=2),
        _ours("hsdp", "fsdp", "FSDP2 in two groups of two ranks", version=2, replicas=2, ranks=4),
        *(_ours(f"zero{stage}", "deepspeed_native", f"DeepSpeed stage {stage}", stage=stage) for stage in (1, 2, 3)),
        _ours("zero2-cpu", "deepspeed_native", "stage 2, optimizer in host memory", stage=2, offload="cpu"),
        _ours("zero3-cpu", "deepspeed_native", "stage 3, optimizer and weights in host memory", stage=3, offload="cpu"),
        _ours("zero3-nvme", "deepspeed_native", "stage 3, optimizer on disk", stage=3, offload="nvme"),
        _ours("zero3-hpz", "deepspeed_native", "stage 3 with hpZ, two groups of two ranks", stage=3, hpz=2, ranks=4),
        _ours("zero1-tp", "deepspeed_native", "stage 1 with AutoTP", stage=1, tensor=2, ranks=2),
        _ours("zero3-ulysses", "deepspeed_native", "stage 3 with Ulysses", stage=3, sequence=2),
        _ours("accelerate-ddp", "through_accelerate", "DDP through Accelerate", stage=0),
        _ours("accelerate-zero1", "through_accelerate", "DeepSpeed stage 1 through Accelerate", stage=1),
        _ours("accelerate-zero2", "through_accelerate", "DeepSpeed stage 2 through Accelerate", stage=2),
        _ours("accelerate-zero3", "through_accelerate", "DeepSpeed stage 3 through Accelerate", stage=3),
        _ours("accelerate-fsdp", "through_accelerate", "FSDP2 through Accelerate, told of a GPU", stage=0, fsdp={}),
    )
}


def environment(overlay: Path | None) -> dict[str, str]:
    """Return the environment of a process that uses the libraries of an overlay instead of the installed ones."""
    paths = [str(overlay.resolve())] if overlay else []
    path = os.pathsep.join([*paths, str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    changed = {"PYTHONPATH": path}
    if overlay and (overlay / "deepspeed").is_dir():  # its operators are compiled from its sources, and kept
        changed["TORCH_EXTENSIONS_DIR"] = f"{paths[0]}-operators"
    return os.environ | changed


class Ranks:
    """The process that forks the ranks of each property. Use it as a context manager."""

    def __init__(self, overlay: Path | None, log: Path) -> None:
        self.log = log.open("w")
        command = [sys.executable, "-P", "-m", "study.conform.ranks"]
        env, pipe = environment(overlay), subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe, stderr=self.log)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()

    def ask(self, adapter: Adapter, name: str, ranks: tuple[int, ...], case: dict, limit_s: float = LIMIT_S) -> dict:
        """Run a property with this case, in a fresh folder."""
        with tempfile.TemporaryDirectory(prefix="conform-") as folder:
            request: dict[str, object] = {"settings": adapter.settings, "property": name, "case": case}
            return self._answer(adapter, request | {"ranks": ranks, "folder": folder, "limit_s": limit_s})

    def imported(self, adapter: Adapter) -> dict[str, str | None]:
        """Return the versions of the libraries that the ranks of an adapter use."""
        return self._answer(adapter, {})

    def _answer(self, adapter: Adapter, request: dict) -> dict:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"adapter": adapter.file} | request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise Stop(f"the process that runs {adapter.name} ended", f"read {self.log.name}")
        answer = json.loads(line)
        if "stop" in answer:
            raise Stop(answer["stop"], "mend the adapter, or install what it needs")
        return answer


def run(
    adapter: Adapter, properties, ranks: Ranks, report: Callable[[Result], None], shrink: bool = True
) -> list[Result]:
    """Hold an adapter to properties, one after the other."""
    results = []
    for each in properties:
        result = run_one(adapter, each, ranks)
        if result.status == "fails" and shrink:
            result = Result(**asdict(result) | shrunk(adapter, each, result, ranks))
        report(result)
        results.append(result)
    return results


def run_one(adapter: Adapter, each: Property, ranks: Ranks) -> Result:
    """Hold an adapter to a property."""
    launches = each.ranks
    common = (adapter.name, each.name, each.sentence, each.source)
    if adapter.ranks is not None:
        if launches not in ((2,), (2, 2), (adapter.ranks,)):
            words = f"ranks of the property: {launches[-1]}; of the adapter: {adapter.ranks}"
            return Result(*common, "not applicable", words)
        launches = (adapter.ranks,) * len(launches)
    answer = ranks.ask(adapter, each.name, launches, each.case)
    if answer.get("kind") == "hangs":  # or the machine was busy
        answer = ranks.ask(adapter, each.name, launches, each.case, 3 * LIMIT_S)
    seconds, kind = answer.get("seconds", 0.0), answer.get("kind", "")
    return Result(*common, answer["status"], answer["words"], seconds, kind, ranks=launches)


# --- shrinking -----------------------------------------------------------------------------------------------------

SIMPLER = {
    "model": "Plain",
    "precision": "fp32",
    "optimizer": "sgd",
    "groups": "",
    "schedule": "",
    "clip": 0.0,
    "bucket": 0,
    "lengths": [1],
    "updates": 1,
    "passes": 1,
    "layers": 1,
    "width": 2,
}
BY_STEPS = {"updates": (1, 2), "passes": (1, 2), "layers": (0, 1, 2, 3), "width": (1, 2, 4, 8)}
SHRINK_S = 60


def shrunk(adapter: Adapter, each: Property, result: Result, ranks: Ranks) -> dict:
    """Return the smallest change of a case that still fails in the same way: field by field, then fewer ranks."""
    until, launches = time.monotonic() + SHRINK_S, result.ranks

    def fails(case: dict, launches: tuple[int, ...]) -> bool:
        if time.monotonic() > until:
            return False
        answer = ranks.ask(adapter, each.name, launches, each.case | case, 15)
        return answer["status"] == "fails" and answer.get("kind") == result.kind

    case: dict = {}
    for key, simplest in SIMPLER.items():
        own = each.setting(key)
        for value in BY_STEPS.get(key, (simplest,)):
            smaller = value < own if key in BY_STEPS else value != own
            if smaller and fails(case | {key: value}, launches):
                case[key] = value
                break
    one = (1,) * len(launches)
    if launches != one and adapter.ranks is None and fails(case, one):
        launches = one
    return {"shrunk": case, "ranks": launches}
