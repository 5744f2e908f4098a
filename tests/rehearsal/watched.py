"""A real rank of somebody's script on a CPU, unchanged, under `study.watch`: watched.py FOLDER RUN_DIR SCRIPT WORDS...

Accelerate takes a process without a GPU for one that trains alone. It is told of gloo, and otherwise trains as ever.
A script whose words have --run_dir has a watch of its own. It hears of a GPU, so that it does not ask for a CPU.
"""

import atexit
import os
import runpy
import sys
from pathlib import Path

import accelerate
import torch
import transformers
from accelerate import state
from torch.nn.parallel import DistributedDataParallel
from transformers import training_args

from study.watch import WatchCallback
from study.watch.session import Watch


def on_gloo() -> None:
    training_args.is_torch_bf16_gpu_available = lambda: True
    state.PartialState._prepare_backend = lambda *_, **__: ("gloo", state.DistributedType.MULTI_GPU)
    state.PartialState.set_device = lambda this: setattr(this, "device", torch.device("cpu"))
    begin = DistributedDataParallel.__init__

    def without_devices(this, *args, device_ids=None, output_device=None, **kwargs) -> None:
        begin(this, *args, **kwargs)

    DistributedDataParallel.__init__ = without_devices


def watch_all(run_dir: str) -> None:
    begin = transformers.Trainer.__init__
    prepare = accelerate.Accelerator.prepare
    trainers = []

    def with_callback(this, *args, **kwargs) -> None:
        trainers.append(this)
        begin(this, *args, **kwargs)
        this.add_callback(WatchCallback(run_dir))

    def prepare_and_watch(this, *args, **kwargs):
        prepared = prepare(this, *args, **kwargs)
        objects = prepared if isinstance(prepared, tuple | list) else (prepared,)
        models = [each for each in objects if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        if models and optimizers and not trainers:
            watch = Watch(this, models[0], optimizers[0], run_dir=run_dir)
            watch.__enter__()
            atexit.register(watch.end, None)
        return prepared

    transformers.Trainer.__init__ = with_callback
    accelerate.Accelerator.prepare = prepare_and_watch


if __name__ == "__main__":
    folder, run_dir, script, *words = sys.argv[1:]
    os.chdir(folder)
    on_gloo()
    if any(word.startswith("--run_dir") for word in words):
        script = str(Path(script).resolve())
        torch.cuda.is_available = lambda: sys._getframe(1).f_code.co_filename == script
    else:
        watch_all(run_dir)
    sys.argv = [script, *words]
    sys.path[0] = os.path.dirname(script)  # noqa: PTH120
    runpy.run_path(script, run_name="__main__")
