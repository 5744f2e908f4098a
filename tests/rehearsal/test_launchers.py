"""What a launcher would start is rehearsed, and a script that starts another program is told so."""

import sys

import pytest

from study.core.errors import Stop
from study.rehearsal.launchers import StartedScript, launched, refuse_others, script_last
from tests.conftest import python
from tests.rehearsal.test_rehearsal import HEAD, LOOP, rehearsed, study_virtual, written  # noqa: F401


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --nproc_per_node 8 train.py --lr 1", StartedScript("train.py", ["--lr", "1"], [], None)),
        ("torchrun --nnodes=2 -m pkg.train a.yaml", StartedScript("pkg.train", ["a.yaml"], [], None)),
        ("deepspeed --num_gpus=8 train.py -a", StartedScript("train.py", ["--local_rank=0", "-a"], [], None)),
        (
            "accelerate launch --config_file c.yaml --mixed_precision bf16 train.py --config_file own",
            StartedScript("train.py", ["--config_file", "own"], ["--mixed_precision", "bf16"], "c.yaml"),
        ),
    ],
)
def test_a_launchers_words_are_told_from_the_scripts(line, expected):
    program, *words = line.split()
    assert launched(program, words) == expected


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
    launch = ("accelerate", "launch", "--use_deepspeed", "--zero_stage", "2", written(LOOP))
    done = python("-m", "study.cli", "virtual", *launch)
    assert "Your script decided: ZeRO stage 2" in " ".join(done.stdout.split()), done.stdout + done.stderr


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
        ("--model gpt2 --run-dir out.py", None),  # the value of an option
        ("--model gpt2", None),
        ("", None),
    ],
)
def test_the_script_and_its_words_come_last(typed, last):
    assert script_last(typed.split()) == (last and last.split())
