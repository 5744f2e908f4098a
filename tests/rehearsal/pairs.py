"""What a rehearsed rank 0 of two holds, beside a real one: python -m tests.rehearsal.pairs FILE.csv [FOLDER [PART]]

Each script is launched on two gloo ranks under `study.watch`, and rehearsed. The real peak is without the examples'
data sets of tensors, which on a GPU are the host's. FOLDER has checkouts of public scripts, as in public.py; rows of
other pairs in the file stay as they are. An hour on two cores.

`off` is the difference of the peaks. `role_off` is the largest difference of a role as a share of that role itself,
of the roles from SLIVER_BYTES on, and `role` is its name. `part_off` is the largest one as a share of the peak, of all.
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

SLIVER_BYTES = 2**16
SIX = ("ddp", "zero1", "zero2", "zero3", "zero3_cpu", "fsdp2")
BERT = ("accelerate_loop", "trainer_glue", "nlp_example", "complete_nlp_example", "run_glue", "run_glue_no_trainer")
OWN = ("accelerate_loop", "trainer_glue", "trl_sft")
STAGES = ("zero1", "zero2", "zero3")  # of a loop of DeepSpeed alone
TRAINER = (
    "--per_device_train_batch_size 2 --max_steps 16 --report_to none --output_dir out --do_train --save_strategy no"
)
GLUE = "--model_name_or_path bert-base-cased --train_file train.csv --validation_file train.csv --max_seq_length 64"
TEXTS = "--model_name_or_path gpt2 --train_file train.txt --block_size 32"
CLM = f"{TEXTS} --bf16 False"
TWO = ("--num_processes", "2")
NO_TRAINER = "--per_device_train_batch_size 2 --num_train_epochs 1"
PUBLIC = {  # the checkout's path of a script, its words, and the configs of material.py
    "nlp_example": ("accelerate/examples/nlp_example.py", "", SIX),
    "complete_nlp_example": ("accelerate/examples/complete_nlp_example.py", "", SIX),
    "run_glue": (
        "transformers/examples/pytorch/text-classification/run_glue.py",
        f"{GLUE} {TRAINER} --bf16 False",
        SIX,
    ),
    "run_clm": (
        "transformers/examples/pytorch/language-modeling/run_clm.py",
        f"{CLM} {TRAINER}",
        (*SIX, "fsdp1"),
    ),
    "run_clm --bf16": (
        "transformers/examples/pytorch/language-modeling/run_clm.py",
        f"{CLM} {TRAINER}".replace("--bf16 False", "--bf16 True"),
        ("ddp", "zero2", "zero3", "fsdp2"),
    ),
    "run_glue_no_trainer": (
        "transformers/examples/pytorch/text-classification/run_glue_no_trainer.py",
        f"{GLUE.replace('max_seq_length', 'max_length')} {NO_TRAINER} --pad_to_max_length",
        SIX,
    ),
    # That of transformers, run_clm_no_trainer, names a kind of machine that Accelerate no longer has.
    "clm_no_trainer of accelerate": (
        "accelerate/examples/by_feature/deepspeed_with_config_support.py",
        f"{TEXTS} {NO_TRAINER} --output_dir out",
        SIX,
    ),
    "dpo": (
        "trl/trl/scripts/dpo.py",
        f"--model_name_or_path llama --dataset_name preferences --bf16 False {TRAINER.replace('--do_train ', '')}",
        ("ddp", "zero2", "zero3", "fsdp2"),
    ),
}


def weights(material: Path) -> None:
    """Write weights of the small models, which real ranks read."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    for name, kind in (("bert-base-cased", AutoModel), ("gpt2", AutoModel), ("llama", AutoModelForCausalLM)):
        config = (material / name / "config.json").read_bytes()
        kind.from_config(AutoConfig.from_pretrained(material / name)).save_pretrained(material / name)
        (material / name / "config.json").write_bytes(config)


def config_of(script: str, arm: str, material: Path) -> str:
    """Return the path of the config of Accelerate for a script and an arm."""
    if arm == "fsdp2" and script in BERT:
        arm = "fsdp2_bert"
    elif "fsdp" in arm:
        arm = f"{arm}_cpu"
    return f"{material}/{arm}.yaml"


def own_pair(script: str, arm: str, folder: Path, material: Path) -> tuple[RankComponents, dict]:
    """Launch and rehearse an example of this repository, which has a watch."""
    config = config_of(script, arm, material) if "fsdp" in arm else f"accelerate_configs/{arm}.yaml"
    path = f"examples/{script}.py"
    words: tuple[str, ...] = ()
    given = (f"--config_file={config}",)
    flags: tuple[str, ...] = (f"--run_dir={folder}",)
    launched = path
    if script == "deepspeed_loop":  # its config is in it: Accelerate's file only starts the ranks
        words, given = (f"--stage={arm[-1]}",), ()
    if "fsdp" in arm:  # on a CPU by itself it would train without
        launched, flags = "tests/rehearsal/watched.py", (".", str(folder), path, *flags)
    ended = forked(folder, config=config, script=launched, flags=(*flags, *words), launcher=TWO)
    assert ended.code == 0, ended.output
    done = study("virtual", path, *given, "--ranks=2", "--json", "--", *words)
    return ended.record.memory.components.per_rank[0], json.loads(done.stdout)


def public_pair(name: str, arm: str, checkouts: Path, material: Path, folder: Path) -> tuple[RankComponents, dict]:
    """Launch and rehearse a script of others, unchanged."""
    path, words, _ = PUBLIC[name]
    script, config = checkouts.resolve() / path, config_of(name, arm, material)
    flags = (str(material), str(folder), str(script), *words.split())
    ended = forked(folder, config=config, script="tests/rehearsal/watched.py", flags=flags, launcher=TWO)
    assert ended.code == 0, ended.output[-3000:]
    rehearsal = ("virtual", script, f"--config_file={config}", "--ranks=2", "--json", "--", *words.split())
    done = study(*rehearsal, folder=material)
    return ended.record.memory.components.per_rank[0], json.loads(done.stdout)


def row(script: str, arm: str, real: RankComponents, answer: dict) -> dict:
    """Return both peaks, and by how much they and the parts of roles differ."""
    held, parts = dict(real.at_peak), dict(answer["parts"])
    real_bytes = real.tracked_peak_bytes
    other = held.pop("other", 0)  # what was there before the watch
    if script in (*OWN, "deepspeed_loop"):
        real_bytes -= other  # tensors of the data set
    else:  # another model's weights, which a watch takes for temporaries while they are gathered
        held["temporaries"] = held.get("temporaries", 0) + other
        parts["temporaries"] = parts.get("temporaries", 0) + parts.get("other_models", 0)
    # A watch begins after the first update, which may peak higher: reports/log.md
    rehearsed_bytes = max(answer["peaks"][1:])
    differences = {role: abs(parts.get(role, 0) - size) for role, size in held.items()}
    shares = {role: differences[role] / size for role, size in held.items() if size >= SLIVER_BYTES}
    role = max(shares, key=shares.__getitem__)
    return {
        "script": script,
        "arm": arm,
        "real_peak_bytes": real_bytes,
        "rehearsed_peak_bytes": rehearsed_bytes,
        "off": f"{rehearsed_bytes / real_bytes - 1:.5f}",
        "role_off": f"{shares[role]:.5f}",
        "role": role,
        "part_off": f"{max(differences.values()) / real_bytes:.5f}",
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
        pairs = [(script, arm) for script in OWN for arm in (*SIX, "fsdp1")]
        pairs += [("deepspeed_loop", arm) for arm in STAGES]
        if checkouts:
            pairs += [(name, arm) for name, (_, _, arms) in PUBLIC.items() for arm in arms]
        for script, arm in pairs:
            if part not in f"{script} {arm}":
                continue
            run_dir = folder / f"{script}-{arm}".replace(" ", "")
            if script in (*OWN, "deepspeed_loop"):
                real, answer = own_pair(script, arm, run_dir, folder / "material")
            else:
                real, answer = public_pair(script, arm, checkouts, folder / "material", run_dir)
            rows[script, arm] = row(script, arm, real, answer)
            with file.open("w", newline="") as out:
                writer = csv.DictWriter(out, rows[script, arm], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows.values())


if __name__ == "__main__":
    main()
