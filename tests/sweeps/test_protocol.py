"""Declared experiments: what a TOML file expands into, and what is said of a mistake in one."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from study.core.arms import NAMES
from study.core.errors import Stop
from study.core.settings import TrainerFlags
from study.sweeps import protocol
from tests.cases import for_each
from tests.conftest import DECODERS_ALONE, ROOT, table

MISTAKEN = table("sweeps/mistaken.toml")
PART = MISTAKEN["protocol"]


def cells_of(tmp_path, text: str | bytes) -> list[protocol.Cell]:
    (tmp_path / "mine.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return protocol.cells(protocol.read(str(tmp_path / "mine.toml")), "tiny")


def test_lists_are_axes_and_scales_replace(tmp_path):
    cells = cells_of(tmp_path, PART)
    settings = {"steps": 9, "micro_batch": 2}
    wanted = [(arm, {"seed": seed, **settings}) for arm in ("ddp", "zero2") for seed in (1, 2, 3)]
    assert [(cell.arm, cell.settings) for cell in cells] == wanted
    assert {cell.settings["steps"] for cell in cells_of(tmp_path, PART + "steps = 12\n")} == {12}


def test_a_name_tells_what_a_cell_asks_for(tmp_path):
    names = [cell.name for cell in cells_of(tmp_path, PART)]
    other = [cell.name for cell in cells_of(tmp_path, PART.replace("steps = 9", "steps = 10"))]
    assert names == [cell.name for cell in cells_of(tmp_path, PART)]
    assert len({*names, *other}) == 2 * len(names)


@for_each(("before", "after", "words"), MISTAKEN["mistakes"])
def test_a_mistake_is_named_with_file_key_and_remedy(before, after, words, tmp_path):
    """In a protocol, of which `after` stands in the place of `before`, or at the end."""
    assert before in PART
    with pytest.raises(Stop) as caught:
        cells_of(tmp_path, PART.replace(before, after) if before else PART + after)
    assert all(word in caught.value.sentence for word in words), caught.value.sentence


# By their types, so that another one is not forgotten.
FOLDERS = [field.name for field in fields(TrainerFlags) if Path in (field.type, *get_args(field.type))]
OTHERS = [(f'{PART}{path} = "x"\n', f"{path} is a folder of one machine") for path in FOLDERS]
OTHERS += [(PART.replace("[1, 2, 3]", str(list(range(10_001)))), "at most 10000 cells")]


@pytest.mark.parametrize(("text", "words"), [*OTHERS, (b"\xff\x00[[", "mine.toml' cannot be read")])
def test_a_folder_of_one_machine_too_many_cells_and_what_is_no_text_are_refused(text, words, tmp_path):
    with pytest.raises(Stop, match=words):
        cells_of(tmp_path, text)


@pytest.mark.parametrize("name", ["as_printed", "guelph", "offload", "smoke"])
def test_what_was_run_keeps_its_cells_name(name):
    """The committed records of two cores are found again. Of `single` only: other arms' files have changed since."""
    cells = protocol.cells(protocol.read(name), "tiny")
    names = {cell.name for cell in cells}
    folder = ROOT / "reports/cpu-2core/runs" / name
    kept = {run.name.rpartition("-r")[0] for run in folder.glob("*-single-*")}
    assert kept
    assert kept <= names


# Protocols of our own questions: there is no published setting to replicate.
UNPUBLISHED = ("smoke", "scoreboard", "optimizers", "at_scale", "predictions", "cuda_only", "windows", "lora")


@for_each("name", protocol.names())
def test_every_protocol_expands_and_tiny_has_the_structure_of_paper(name):
    """The same parts, arms and axes; only smaller."""
    read = protocol.read(name)
    cells = {scale: protocol.cells(read, scale) for scale in protocol.SCALES if scale in str(read["part"])}
    assert ("paper" in cells) == (name not in UNPUBLISHED)
    tiny = {(cell.part, cell.arm, cell.script) for cell in cells["tiny"]}
    assert {(cell.part, cell.arm, cell.script) for cell in cells.get("paper", cells["tiny"])} == tiny
    assert not {cell.name for cell in cells.get("paper", ())} & {cell.name for cell in cells["tiny"]}


def test_smoke_is_every_arm_on_both_tasks():
    cells = protocol.cells(protocol.read("smoke"), "tiny")
    combinations = {(arm, task) for arm in NAMES for task in ("imdb", "wikitext")}
    combinations -= {(arm, "imdb") for arm in DECODERS_ALONE}
    assert {(cell.arm, cell.settings["task"]) for cell in cells} == combinations
