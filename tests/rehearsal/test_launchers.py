"""What a launcher would start is rehearsed, and a script that starts another program is told so."""

import sys
from dataclasses import replace

import pytest

from study.cli.rehearsal import HowFar, Machines, WhatIsThere, request_of
from study.core.errors import Stop
from study.rehearsal.launchers import OURS, Group, StartedScript, launched, refuse_others, script_last
from tests.conftest import python
from tests.rehearsal.test_rehearsal import HEAD, LOOP, rehearsed, study_virtual, written  # noqa: F401
from tests.rehearsal.warm import study


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --standalone train.py --lr 1", StartedScript("train.py", ["--lr", "1"], [], None)),
        ("torchrun --nnodes=2 -m pkg.train a.yaml", StartedScript("pkg.train", ["a.yaml"], [], None)),
        ("deepspeed train.py -a", StartedScript("train.py", ["--local_rank=0", "-a"], [], None)),
        (
            "accelerate launch --config_file c.yaml --mixed_precision bf16 train.py --config_file own",
            StartedScript("train.py", ["--config_file", "own"], ["--mixed_precision", "bf16"], "c.yaml"),
        ),
        (
            "accelerate launch --debug --config-file=c.yaml train.py",
            StartedScript("train.py", [], ["--debug"], "c.yaml"),
        ),
    ],
)
def test_a_launchers_words_are_told_from_the_scripts(line, expected):
    program, *words = line.split()
    assert launched(program, words) == expected


@pytest.mark.parametrize(
    ("line", "group"),
    [
        ("torchrun --standalone --nproc-per-node 4 train.py", Group(4, 4)),
        ("torchrun --nnodes=1:2 --nproc_per_node=4 train.py --nproc_per_node 3", Group(8, 4)),
        ("torchrun --nproc_per_node auto train.py", Group()),
        ("deepspeed --num_gpus=2 --num_nodes 3 train.py", Group(6, 2)),
        ("deepspeed --include localhost:0,1,2,3 train.py", Group(4, 4)),
        ("deepspeed -i a:4,5,6,7@b:0,1,2,3 --master_port 1 train.py", Group(8, 4)),
        ("deepspeed --include=worker-0@worker-1:0,2 train.py", Group()),
        ("accelerate launch --num_processes 4 train.py", Group(4, None)),
        ("accelerate launch --num-processes=16 --num_machines 2 train.py", Group(16, 8)),
        ("srun -n 8 --ntasks-per-node=4 python -u train.py", Group(8, 4)),
        ("srun -N 2 torchrun --nnodes 2 --nproc_per_node 8 train.py", Group(16, 8)),
        ("mpirun -np 4 python train.py", Group(4, None)),
    ],
)
def test_a_launcher_says_how_many_ranks_there_are(line, group):
    program, *words = line.split()
    assert replace(launched(program, words), words=[], own=[]) == StartedScript("train.py", [], [], None, group)


def test_an_option_counts_first_then_the_launcher_then_the_config(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    config = tmp_path / "c.yaml"
    config.write_text("{num_processes: 6, num_machines: 2, distributed_type: MULTI_GPU}")
    monkeypatch.chdir(tmp_path)

    def ranks(program, *words, given=None):
        request = request_of(program, list(words), Machines(given), HowFar(), WhatIsThere())
        return request.ranks, request.ranks_per_machine

    launch = ("accelerate", "launch", "--config_file", "c.yaml")
    assert ranks(*launch, "train.py") == (6, 3)
    assert ranks(*launch, "--num_processes=4", "train.py") == (4, 3)
    assert ranks(*launch, "--num_processes=4", "train.py", given=2) == (2, 2)
    config.write_text("{num_processes: auto}")
    assert ranks(*launch, "train.py") == (8, 8)


@pytest.mark.parametrize(
    ("line", "code", "is_told"),
    [
        ("srun -n 2 python train.py", "os.environ['RANK']", True),
        ("srun -n 2 python train.py", "os.environ['SLURM_PROCID']", False),
        ("srun -n 2 python train.py", "import lightning as L", False),
        ("srun -N 2 torchrun --nproc_per_node 2 train.py", "os.environ['RANK']", False),
        ("torchrun --nproc_per_node 2 train.py", "os.environ['RANK']", False),
    ],
)
def test_who_starts_ranks_by_srun_alone_is_told_that_it_sets_no_rank(
    line, code, is_told, tmp_path, monkeypatch, capsys
):
    """A rehearsal sets RANK, so that a script runs which ends on the cluster, or trains there on each GPU alone."""
    (tmp_path / "train.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    program, *words = line.split()
    request_of(program, words, Machines(), HowFar(), WhatIsThere())
    assert ("srun sets SLURM_PROCID, and no RANK." in capsys.readouterr().err) == is_told


@pytest.mark.parametrize("word", ["--ranks", "--gpu=H100"])
def test_an_option_of_ours_among_a_launchers_words_is_sent_before_it(word):
    with pytest.raises(Stop, match="write it before accelerate: `study virtual"):
        launched("accelerate", ["launch", word, "4", "train.py"])


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--gpu", "A100", "--lr", "3"], "import torch  # one gpu", ["--gpu"]),
        (["--gpus-per-node=8"], 'parser.add_argument("--lr")', ["--gpus-per-node"]),
        (["--steps", "4"], 'parser.add_argument("--steps", type=int)', []),
        (["--steps", "4"], "class Words:\n    steps: int = 3\n", []),  # of an HfArgumentParser
        (["--save"], "print(args.save)", []),
        (["--lr", "3"], "", []),
    ],
)
def test_an_option_of_ours_behind_a_launchers_script_is_told_before_it_runs(words, code, told, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(code)
    request = request_of("torchrun", [str(script), *words], Machines(), HowFar(), WhatIsThere())
    said = capsys.readouterr().err
    assert request.words == words
    assert [name for name in OURS if f"{name} went to train.py" in said] == told
    assert ("write it before torchrun" in said) == bool(told)
    request_of(str(script), words, Machines(), HowFar(), WhatIsThere())  # they stand behind `--`
    assert not capsys.readouterr().err


def test_what_accelerate_does_not_take_is_its_own_sentence(written):  # noqa: F811
    ended = study("virtual", "accelerate", "launch", "--nosuch", written(LOOP))
    words = " ".join(ended.stdout.split())
    assert words.startswith("A rehearsal cannot go on: accelerate launch says: unrecognized arguments: --nosuch"), words


def test_a_launcher_without_a_script_is_one_sentence():
    with pytest.raises(Stop, match="no script of accelerate is seen in its words"):
        launched("accelerate", ["launch", "-h"])


@pytest.mark.parametrize("words", [["torchrun", "--nproc_per_node=8", "x"], [sys.executable, "-u", "train.py"]])
def test_a_training_that_is_started_by_a_script_is_not_followed(words):
    with pytest.raises(Stop, match="starts another program, which is not followed"):
        refuse_others("subprocess.Popen", (words[0], words, None, None))
    refuse_others("subprocess.Popen", ("gcc", ["gcc", "-c", "a.c"], None, None))
    refuse_others("subprocess.Popen", ("sh", "uname -p", None, None))


def test_what_accelerate_would_launch_is_rehearsed(written):  # noqa: F811
    launch = ("accelerate", "launch", "--use_deepspeed", "--zero_stage", "2", "--num_processes", "4", written(LOOP))
    done = python("-m", "study.cli", "virtual", "--gpu", "H100", *launch)
    words = " ".join(done.stdout.split())
    assert words.startswith("Rank 0 of 4"), done.stdout + done.stderr
    assert "Your script decided: ZeRO stage 2" in words
    assert "of 80 GiB" in words


def test_the_command_of_an_advice_trains_in_16_bits(written):  # noqa: F811
    start = "accelerate launch --config_file accelerate_configs/zero1.yaml --mixed_precision bf16"
    script = written(LOOP.replace("x.cuda()", "x.cuda().bfloat16()"))
    words = " ".join(study("virtual", "--ranks=2", *start.split(), script).stdout.split())
    assert "Your script decided: ZeRO stage 1; weights in bfloat16, master in float32" in words, words


def test_ranks_that_a_script_spawns_are_this_process(written):  # noqa: F811
    spawns = "def main(rank):\n{}\ntorch.multiprocessing.spawn(main, nprocs=2)\n"
    script = written(spawns.format(indented(LOOP)))
    assert rehearsed(script)["observed"]["ranks"] == 2


def test_a_script_that_starts_another_training_is_one_sentence(written):  # noqa: F811
    ended = study_virtual(written("import subprocess\nsubprocess.run(['torchrun', '--nproc_per_node=8', 'a.py'])\n"))
    words = " ".join(ended.stdout.split())
    assert words.startswith("A rehearsal cannot go on at script.py:10: here it starts another program"), words


def indented(lines: str) -> str:
    names = "    global model, loader\n"
    return names + "".join(f"{line}\n" for line in lines.splitlines())


@pytest.mark.parametrize(
    ("typed", "last"),
    [
        ("train.py --ranks 4", "--ranks 4 -- train.py"),
        ("--ranks 4 train.py -- --epochs 2", "--ranks 4 -- train.py --epochs 2"),
        ("--json train.py", "--json -- train.py"),  # a switch takes no value
        ("--ranks=4 train.py", "--ranks=4 -- train.py"),
        ("axolotl.cli.train --ranks 4 -- c.yaml", "--ranks 4 -- axolotl.cli.train c.yaml"),
        ("torchrun --nproc_per_node 8 train.py", "-- torchrun --nproc_per_node 8 train.py"),
        ("--ranks 4 torchrun a.py --x -- b", "--ranks 4 -- torchrun a.py --x -- b"),
        (
            "--json accelerate launch --mixed_precision bf16 a.py",
            "--json -- accelerate launch --mixed_precision bf16 a.py",
        ),
        ("--model gpt2 --run-dir out.py", None),  # the value of an option
        ("--model gpt2", None),
        ("", None),
    ],
)
def test_the_script_and_its_words_come_last(typed, last):
    assert script_last(typed.split()) == (last and last.split())
