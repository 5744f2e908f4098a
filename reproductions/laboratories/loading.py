"""The load observatory: host memory of real ranks while a model is loaded, by phase, in several ways.

python reproductions/laboratories/loading.py reports/cpu-2core/loading.jsonl [CELL ...]

A cell is a way to load a model, in files of some form, on some ranks. Each rank is a fresh process. Its memory is
read from outside, by the kernel's counts: private memory every few milliseconds, and at the end of each phase the
share of each rank in what is shared, with the page cache apart. Half of the cells, drawn by `SEED` before any was
measured, were held out while a prediction was built that nobody asked for: `loading_halves.json` beside the records.
The models have random weights, and are made here.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from study.core.machine import fields, free_port, operators_folder, put_programs_on_path

HERE = Path(__file__).parent
SEED = 32
WAYS = ("plain", "zero3", "zero3_late", "fsdp2", "fsdp2_efficient", "meta")
ALONE = ("safetensors", "safetensors_shards", "pickled", "legacy")  # on a single rank
PHASES = ("start", "imports", "from_pretrained", "prepare", "step")
EVERY_S = 0.004
MOST_S = 900
LONGEST = 240  # characters of a message


@dataclass(frozen=True)
class Cell:
    """A way to load a model from files of some form, as some ranks."""

    way: str
    model: str
    files: str  # safetensors, pickled (zip, as today), legacy (pickled before 2020), each one file or shards
    saved: str  # type of the values in the files
    dtype: str  # type of the loaded model
    ranks: int
    last: str = "prepare"  # phase

    @property
    def name(self) -> str:
        return "-".join([self.way, self.model, self.files, self.saved, self.dtype, str(self.ranks)])


def cells() -> list[Cell]:
    """Return all cells, in their order."""
    half, whole = "bfloat16", "float32"
    small = [
        *(Cell(way, "bert-large", "safetensors_shards", whole, whole, 2) for way in WAYS),
        *(Cell(way, "gpt2", "safetensors", whole, whole, 4) for way in WAYS),
        *(Cell(way, "gpt2-medium", "safetensors", half, whole, 2) for way in WAYS),
        *(Cell("plain", "gpt2-medium", form, whole, whole, 1) for form in ALONE),
        *(Cell(way, "gpt2", form, whole, whole, 2, "step") for form in ("pickled_shards", "legacy") for way in WAYS),
        *(Cell(way, "bert-base", "safetensors", half, whole, 2, "step") for way in WAYS),
        *(Cell(way, "bert-base", "safetensors", whole, whole, 8) for way in WAYS),
    ]
    last = {way: "from_pretrained" if "zero" in way else "prepare" for way in WAYS}  # stage 3's states are too large
    return [
        *small,
        *(Cell(way, "llama3.2-1b", "safetensors_shards", half, half, 2, last[way]) for way in WAYS),
        *(Cell(way, "gpt2-medium", "legacy", half, half, 4) for way in ("plain", "zero3", "fsdp2_efficient")),
    ]


def held_out(names: list[str]) -> set[str]:
    """Return half of the cells, which are not looked at while the prediction is built."""
    return set(random.Random(SEED).sample(sorted(names), len(names) // 2))


def written_model(cell: Cell, folder: Path) -> dict:
    """Return the model's class and size. Its files are written if they are not there."""
    note = folder / "made.json"
    if not note.exists():
        folder.mkdir(parents=True, exist_ok=True)
        arguments = [cell.model, cell.files, cell.saved, str(folder)]
        subprocess.run([sys.executable, str(HERE / "loading_models.py"), *arguments], check=True)
    return json.loads(note.read_text())


def _kib(values: dict[str, str], name: str) -> int:
    return int(values.get(name, "0").split()[0]) * 1024


class Watched:
    """The ranks of a cell, and the highest memory of each and of all together since the last phase."""

    def __init__(self, cell: Cell, folder: Path, model: dict, models: Path):
        self.cell, self.folder = cell, folder
        settings = asdict(cell) | model | {"folder": str(folder), "model_folder": str(models / model["folder"])}
        base = os.environ | {"WORLD_SIZE": str(cell.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        base |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "LOCAL_WORLD_SIZE": str(cell.ranks)}
        base |= {"TORCH_EXTENSIONS_DIR": str(operators_folder()), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(HERE / "loading_rank.py"), json.dumps(settings)]
        self.output = [(folder / f"output-{rank}").open("w+") for rank in range(cell.ranks)]
        self.processes = [
            subprocess.Popen(command, env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=out, stderr=out)
            for rank, out in enumerate(self.output)
        ]

    def phase(self, name: str) -> dict | None:
        """Return the memory during a phase and at its end. None if a rank has ended before."""
        begun_s = time.monotonic()
        highest, of_rank, mapped = 0, [0] * self.cell.ranks, 0
        ends = [self.folder / f"{name}-{rank}" for rank in range(self.cell.ranks)]
        while not all(path.exists() for path in ends):
            if any(process.poll() is not None for process in self.processes) or time.monotonic() > begun_s + MOST_S:
                return None
            now = [fields(f"/proc/{process.pid}/status") for process in self.processes]
            private = [_kib(values, "RssAnon") for values in now]
            highest = max(highest, sum(private))
            mapped = max(mapped, max(_kib(values, "RssFile") for values in now))
            of_rank = list(map(max, of_rank, private))
            time.sleep(EVERY_S)
        seconds = time.monotonic() - begun_s
        ended = [fields(f"/proc/{process.pid}/smaps_rollup") for process in self.processes]
        (self.folder / f"{name}-go").touch()
        private = [_kib(values, "Pss_Anon") for values in ended]
        return {
            "seconds": round(seconds, 2),
            "peak_bytes": max(highest, sum(private)),  # private memory of all ranks at one moment
            "rank_peak_bytes": list(map(max, of_rank, private)),
            "private_bytes": private,  # at the end of the phase, as what follows
            "shared_bytes": sum(_kib(values, "Pss_Shmem") for values in ended),
            "cache_bytes": sum(_kib(values, "Pss_File") for values in ended),  # of files that are mapped
            "cache_rank_peak_bytes": mapped,
            "proportional_bytes": [_kib(values, "Pss") for values in ended],
        }

    def phases(self) -> Iterator[tuple[str, dict]]:
        for name in PHASES[: PHASES.index(self.cell.last) + 1]:
            values = self.phase(name)
            if values is None:
                return
            yield name, values

    def end(self) -> tuple[list[int], str]:
        """Return the exit codes of the ranks, and the last line of the first that failed."""
        try:
            codes = [process.wait(10) for process in self.processes]
        except subprocess.TimeoutExpired:
            for process in self.processes:
                process.kill()
            codes = [process.wait() for process in self.processes]
        for output in self.output:
            output.close()
        for rank, code in enumerate(codes):
            if code > 0:
                lines = (self.folder / f"output-{rank}").read_text(errors="replace").split("\n")
                return codes, next((line for line in reversed(lines) if "Error" in line), "")[:LONGEST]
        return codes, ""


def measure(cell: Cell, models: Path) -> dict:
    """Return the record of a cell."""
    folder = f"{cell.model}-{cell.files}-{cell.saved}"
    model = written_model(cell, models / folder) | {"folder": folder}
    with TemporaryDirectory() as place:
        watched = Watched(cell, Path(place), model, models)
        phases = dict(watched.phases())
        codes, message = watched.end()
        note = Path(place) / "software-0"
        software = json.loads(note.read_text()) if note.exists() else {}
    outcome = "loads" if cell.last in phases else "fails"
    known = {"parameters": model["parameters"], "outcome": outcome, "codes": codes, "message": message}
    return {"cell": cell.name} | asdict(cell) | known | {"phases": phases, "software": software}


def main(path: Path, chosen: list[str]) -> None:
    put_programs_on_path()
    models = Path(os.environ.get("LOADING_MODELS", "runs/loading"))
    done = {json.loads(line)["cell"] for line in path.read_text().splitlines()} if path.exists() else set()
    every = {cell.name: cell for cell in cells()}
    out = held_out([*every])
    with path.open("a") as file:
        for name in chosen or [*every]:
            if name in done:
                continue
            row = measure(every[name], models) | {"held_out": name in out}
            file.write(json.dumps(row) + "\n")
            file.flush()
            last = row["phases"].get(row["last"], {})
            sys.stdout.write(f"{name}: {row['outcome']} {last.get('peak_bytes', 0) / 1e9:.2f} GB {row['message']}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
