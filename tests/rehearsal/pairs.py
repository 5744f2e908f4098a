"""What a rehearsed rank 0 of two holds, beside a real one: python -m tests.rehearsal.pairs FILE.csv [FOLDER [PART]]

Each script is launched on two gloo ranks under `study.watch`, and rehearsed. The real peak is without the data set,
which on a GPU is the host's. FOLDER has checkouts of public scripts, as in public.py; rows of other pairs in the file
stay as they are. Half an hour on two cores.
"""

import csv
import json
import sys
import tempfile
from pathlib import Path

from study.records.sections import RankComponents
from tests.conftest import forked
from tests.rehearsal.material import make
from tests.rehearsal.warm import study

ARMS = ("ddp", "zero1", "zero2", "zero3", "zero3_cpu")  # the examples train on CPUs without FSDP
OWN = ("accelerate_loop", "trainer_glue", "trl_sft")
STAGES = ("zero1", "zero2", "zero3")  # of a loop of DeepSpeed alone
TRAINER = (
    "--per_device_train_batch_size 2 --max_steps 16 --report_to none --output_dir out --do_train --save_strategy no"
)
GLUE = "--model_name_or_path bert-base-cased --train_file train.csv --validation_file train.csv --max_seq_length 64"
CLM = "--model_name_or_path gpt2 --train_file train.txt --block_size 32 --bf16 False"
PUBLIC = {  # the checkout's path of a script, its words, and the configs of material.py
    "nlp_example": ("accelerate/examples/nlp_example.py", "", ARMS),
    "complete_nlp_example": ("accelerate/examples/complete_nlp_example.py", "", ARMS),
    "run_glue": (
        "transformers/examples/pytorch/text-classification/run_glue.py",
        f"{GLUE} {TRAINER} --bf16 False",
        ARMS,
    ),
    "run_clm": (
        "transformers/examples/pytorch/language-modeling/run_clm.py",
        f"{CLM} {TRAINER}",
        (*ARMS, "fsdp2"),
    ),
    "run_clm --bf16": (
        "transformers/examples/pytorch/language-modeling/run_clm.py",
        f"{CLM} {TRAINER}".replace("--bf16 False", "--bf16 True"),
        ("ddp", "zero2", "zero3", "fsdp2"),
    ),
}


def weights(material: Path) -> None:
    """Write weights of the small models, which real ranks read."""
    from transformers import AutoConfig, AutoModel

    for name in ("bert-base-cased", "gpt2"):
        config = (material / name / "config.json").read_bytes()
        AutoModel.from_config(AutoConfig.from_pretrained(material / name)).save_pretrained(material / name)
        (material / name / "config.json").write_bytes(config)


def own_pair(script: str, arm: str, folder: Path) -> tuple[RankComponents, dict]:
    """Launch and rehearse an example of this repository, which has a watch."""
    config = f"accelerate_configs/{arm}.yaml"
    path = f"examples/{script}.py"
    words: tuple[str, ...] = ()
    given = (f"--config_file={config}",)
    if script == "deepspeed_loop":  # its config is in it: Accelerate's file only starts the ranks
        words, given = (f"--stage={arm[-1]}",), ()
    ended = forked(folder, config=config, script=path, flags=(f"--run_dir={folder}", *words))
    assert ended.code == 0, ended.output
    done = study("virtual", path, *given, "--ranks=2", "--json", "--", *words)
    return ended.record.memory.components.per_rank[0], json.loads(done.stdout)


def public_pair(name: str, arm: str, checkouts: Path, material: Path, folder: Path) -> tuple[RankComponents, dict]:
    """Launch and rehearse a script of others, unchanged."""
    path, words, _ = PUBLIC[name]
    script, config = checkouts.resolve() / path, f"{material}/{arm}.yaml"
    flags = (str(material), str(folder), str(script), *words.split())
    two = ("--num_processes", "2")
    ended = forked(folder, config=config, script="tests/rehearsal/watched.py", flags=flags, launcher=two)
    assert ended.code == 0, ended.output[-3000:]
    rehearsal = ("virtual", script, f"--config_file={config}", "--ranks=2", "--json", "--", *words.split())
    done = study(*rehearsal, folder=material)
    return ended.record.memory.components.per_rank[0], json.loads(done.stdout)


def row(script: str, arm: str, real: RankComponents, answer: dict) -> dict:
    """Return both peaks, and by how much of the peak the part of a role differs at most."""
    parts = dict(real.at_peak)
    real_bytes = real.tracked_peak_bytes - parts.pop("other", 0)
    rehearsed_bytes = max(
        answer["peaks"][1:]
    )  # a watch begins after the first update, which may peak higher: reports/log.md
    largest = max(abs(answer["parts"].get(role, 0) - held) for role, held in parts.items()) / real_bytes
    return {
        "script": script,
        "arm": arm,
        "real_peak_bytes": real_bytes,
        "rehearsed_peak_bytes": rehearsed_bytes,
        "off": f"{rehearsed_bytes / real_bytes - 1:.5f}",
        "part_off": f"{largest:.5f}",
    }


def main() -> None:
    file = Path(sys.argv[1])
    checkouts = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    part = sys.argv[3] if len(sys.argv) > 3 else ""
    rows = {(each["script"], each["arm"]): each for each in csv.DictReader(file.open())} if file.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "material").mkdir()
        make(folder / "material")
        weights(folder / "material")
        pairs = [(script, arm) for script in OWN for arm in ARMS]
        pairs += [("deepspeed_loop", arm) for arm in STAGES]
        if checkouts:
            pairs += [(name, arm) for name, (_, _, arms) in PUBLIC.items() for arm in arms]
        for script, arm in pairs:
            if part not in f"{script} {arm}":
                continue
            run_dir = folder / f"{script}-{arm}".replace(" ", "")
            if script in (*OWN, "deepspeed_loop"):
                real, answer = own_pair(script, arm, run_dir)
            else:
                real, answer = public_pair(script, arm, checkouts, folder / "material", run_dir)
            rows[script, arm] = row(script, arm, real, answer)
            with file.open("w", newline="") as out:
                writer = csv.DictWriter(out, rows[script, arm], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows.values())


if __name__ == "__main__":
    main()
