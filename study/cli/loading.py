"""`study estimate --loading`: the host memory that a node needs until its ranks have loaded a model."""

from study.io.numbers import number_of, size
from study.io.tables import say_wrapped, show
from study.machine.gpus import GPUS
from study.predictor.memory.loading import HOST_PROCESS_BYTES, WAYS, Load, Way, peaks, process_bytes
from study.predictor.setup import Setup

LOCAL = 8  # ranks of a node, if no GPU says how many it has
THREADS = "https://github.com/huggingface/transformers/issues/43749, https://github.com/Roblox/FAI-RL/pull/68"


def loads(setup: Setup, gpu: str | None) -> dict[Way, dict[str, Load]]:
    """Return each way to load the model, from files of three kinds, as the ranks of one node."""
    ranks = min(setup.ranks, GPUS[gpu].per_node if gpu else LOCAL)
    same = setup.stored_bytes
    other = 4 if same == 2 else 2
    kinds = {
        "files in that type": (same, False),
        "in another type": (other, False),
        "pickled before 2020": (same, True),
    }
    return {
        method: {
            kind: Load(setup.model, method, ranks, saved, same, reads_whole=legacy, on_gpu=setup.on_gpu)
            for kind, (saved, legacy) in kinds.items()
        }
        for method in WAYS
    }


def needed_bytes(setup: Setup, gpu: str | None) -> dict[Way, dict[str, float]]:
    """Return the private memory of a node at the highest peak, by way and kind of files, without the page cache."""
    return {
        method: {kind: max(peaks(load).values()) for kind, load in row.items()}
        for method, row in loads(setup, gpu).items()
    }


def tell(setup: Setup, gpu: str | None) -> None:
    """Print what a node needs in each way, and what the numbers mean."""
    one = loads(setup, gpu)["plain"]["files in that type"]
    dtype = "fp32" if one.weight_bytes == 4 else "16 bits"
    node = f"A node with {number_of(one.ranks, 'ranks')}"
    rows = needed_bytes(setup, gpu).items()
    needs = [needed for _, row in rows for needed in row.values()]
    span = f"{size(min(needs))} to {size(max(needs))}" if min(needs) < max(needs) else size(needs[0])
    say_wrapped(f"{node} needs {span} of host memory to load {one.model.name} in {dtype}, predicted.", "")
    show([{"way": WAYS[method]} | {kind: size(needed) for kind, needed in row.items()} for method, row in rows])
    each = f"{size(HOST_PROCESS_BYTES)} each, assumed" if setup.on_gpu else "counted on a CPU"
    say_wrapped(
        "",
        f"Of this, {size(process_bytes(one)[0])} are the processes themselves ({each}). The mapped files take "
        f"{size(one.files_bytes)} of page cache besides, once for all ranks, which the kernel takes back if it must.",
        "Counted with transformers 5.23. With cpu_ram_efficient_loading, 5.0.0 and 5.6.0 take 1.3 whole copies on each "
        f"rank but the first, whatever the files are; 4.57.6 takes none ({THREADS}).",
    )
