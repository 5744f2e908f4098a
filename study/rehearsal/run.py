"""The process of a rehearsal: python -m study.rehearsal.run FOLDER

It becomes rank 0 before the script imports anything, runs the script as __main__, and writes what it saw beside the
request into the folder.
"""

import ast
import contextlib
import gc
import importlib
import linecache
import os
import re
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

import torch

import study
from study.core.errors import Stop
from study.measure.virtual_rank import become_virtual_rank
from study.rehearsal import deepspeed_patches, hugging_face_patches, launch, ranks, torch_patches
from study.rehearsal.count import Count
from study.rehearsal.files import Files
from study.rehearsal.gpu import answer_as_a_gpu
from study.rehearsal.hub import refuse_missing
from study.rehearsal.kernels import kernels
from study.rehearsal.launchers import refuse_others
from study.rehearsal.libraries import Rehearsal, WhenImported
from study.rehearsal.moments import Enough
from study.rehearsal.nothing import MissingLogs, Nothing
from study.rehearsal.request import ANSWER, PROGRESS, REQUEST, Failure, Request
from study.rehearsal.user_code import NoValue, Script
from study.rehearsal.values import HAS_NO_VALUES, NEEDS_VALUES, OnOneDevice, Shapes, Values


def main(folder: Path) -> None:
    request = Request.read(folder / REQUEST)
    path = Path(request.script).resolve()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if not (request.real and torch.cuda.is_available()):
        os.environ["DS_ACCELERATOR"] = "cpu"
    become_virtual_rank(request.ranks, request.rank)
    script = Script(path, request.values)
    if not request.real:
        answer_as_a_gpu(request, script)
    count = Count(request, folder / PROGRESS)
    agreement = ranks.Agreement(folder, request)
    values = Values(script, agreement, request.most_collectives)
    ranks.answer_alone(values.note)
    shapes = Shapes(values, count.watch, request.real)
    count.shapes = shapes
    shapes.weights()
    rehearsal = Rehearsal(request, shapes, count)
    torch_patches.patch(rehearsal)
    patches = hugging_face_patches.PATCHES | deepspeed_patches.PATCHES
    if not request.real:
        patches |= hugging_face_patches.WITHOUT_VALUES | deepspeed_patches.WITHOUT_VALUES
    WhenImported(rehearsal, patches).attach()
    gc.freeze()  # the searches for models and tensors pass by what is imported so far
    logs = MissingLogs(script.reader)
    sys.meta_path.insert(0, logs)
    failure = None
    try:
        os.environ |= launch.environment(request) | {"WANDB_MODE": "disabled"}
        sys.argv = [request.script, *request.words]
        sys.path[0] = str(Path.cwd() if request.module else path.parent)
        refuse_missing(path, request.configs_of)
        Files(folder).guard()
        sys.addaudithook(refuse_others)
        one_device = contextlib.nullcontext() if request.real else OnOneDevice(count.moments, script)
        with values, count.watch, one_device, kernels(request, count.answer):
            run_script(path, request.skips, request.module)
    except Enough:
        count.answer.is_cut = True
    except BaseException as error:
        # A script that asks by `next` meets the end of a loader, which is ours. A generator makes a RuntimeError of it.
        if count.moments.ends_loaders and isinstance(error.__cause__ or error, StopIteration):
            count.answer.is_cut = True
        elif not (isinstance(error, SystemExit) and not error.code):
            failure = failed(error, script, logs.left_out)
    answer = count.finish(folder)
    answer.failure = failure
    answer.collectives = values.collectives
    answer.decides = script.decides
    answer.left_out = logs.left_out
    if failure is None and not answer.updates:
        why = "" if answer.batches else ": no loader gave a batch, as its data set has too few samples or none"
        answer.failure = Failure("script", f"the script ended without an update of an optimizer{why}")
    agreement.write()
    answer.write(folder / ANSWER)
    sys.stdout.flush()
    os._exit(0)  # threads of libraries may wait for ranks that do not exist


def run_script(path: Path, skips: list[str], module_name: str | None = None) -> None:
    """Run a script as __main__. Functions that it should leave out do nothing: its own ones, or a library's."""
    tree = ast.parse(path.read_bytes(), filename=str(path))
    left_out = set(skips)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in left_out:
            node.body = [ast.copy_location(ast.Pass(), node.body[0])]
    for name in left_out:
        module, _, function = name.rpartition(".")
        if module:
            setattr(importlib.import_module(module), function, Nothing())
    script = types.ModuleType("__main__")
    script.__file__ = str(path)
    if module_name:  # what it imports from its own package
        script.__package__ = module_name.rpartition(".")[0]
    sys.modules["__main__"] = script
    exec(compile(tree, str(path), "exec"), vars(script))  # noqa: S102 - it is the user's own script


LOOKS_UP, PASSES_ON = re.compile("__get(attr|attribute|item)__"), re.compile(r"^raise\b|\(\*args, \*\*kwargs\)")
OF_WORKER = "Original Traceback (most recent call last)"  # torch/_utils.py, of a loader's worker
FRAME = re.compile(r'File "(.+)", line (\d+)')
# As libraries say what a setting needs, in place of Python.
NOT_INSTALLED = re.compile(r"\bpip install\b|\b(is not|to be) installed\b")


def failed(error: BaseException, script: Script, left_out: Sequence[str] = ()) -> Failure:
    """Return how the script ended: by itself, or because a value does not exist here."""
    where, code = script.place_of(error)
    names = {type(each).__name__ for each in (error, error.__cause__, error.__context__)}
    message = str(error).strip()
    # PyTorch's own refusals of tensors without values begin with this word.
    refused = names & set(NEEDS_VALUES) or any(name.startswith("FakeTensor") for name in names)
    is_of_value = refused or isinstance(error, NoValue) or message.startswith(HAS_NO_VALUES)
    kind = "value" if is_of_value else "script"
    if OF_WORKER in message:
        where, code = place_in_worker(message, script) or (where, code)
        message = message.splitlines()[-1].removeprefix(type(error).__name__).removeprefix(": ")
    if isinstance(error, Stop):
        kind, message = "hub" if error.status == "hub" else "value", error.sentence
        if error.where:  # before the script ran
            where, code = error.where, linecache.getline(str(script.path), int(error.where.rpartition(":")[2])).strip()
    elif isinstance(error, ModuleNotFoundError):  # which the rented machine may have
        kind = "missing"
        message = f"the script needs {error.name}, which is not installed here" if error.name else message
    elif (isinstance(error, ImportError) and error.name is None) or NOT_INSTALLED.search(message):
        kind = "missing"
    elif left_out and Nothing.__name__ in message:
        kind, message = "missing", f"it reads a value of {' or '.join(left_out)}, not installed here ({message})"
    elif not isinstance(error, NoValue):
        message = ": ".join(filter(None, (type(error).__name__, message)))
        if is_own(error, script):
            kind, message = "own", f"it failed itself, which says nothing of your training ({message})"
    trace = "".join(traceback.format_exception(error))
    return Failure(kind, message, where, code, trace)


def place_in_worker(message: str, script: Script) -> tuple[str, str] | None:
    """Return the last line of the script's own code in the traceback that another process has sent."""
    mine = [(file, int(line)) for file, line in FRAME.findall(message) if script.owns(file)]
    if not mine:
        return None
    file, line = mine[-1]
    return f"{Path(file).relative_to(script.folder)}:{line}", linecache.getline(file, line).strip()


def is_own(error: BaseException, script: Script) -> bool:
    """Whether a line of this package failed, and does not raise or pass on what libraries raise on the rented machine.

    Of what is looked up in vain, that is the line that asks for it, and not a `__getattr__` or `__getitem__`.
    """
    while error.__cause__ and error.__cause__.__traceback__:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    asks = [frame for frame in frames if script.owns(frame.filename) or not LOOKS_UP.fullmatch(frame.name)]
    is_here = bool(asks) and Path(asks[-1].filename).is_relative_to(Path(study.__file__).parent)
    if not is_here or script.owns(asks[-1].filename):
        return False
    is_mistake = isinstance(error, AttributeError | NameError | KeyError | AssertionError)
    return is_mistake and not PASSES_ON.search(asks[-1].line or "")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
