"""The environment that a launcher gives a rank: Accelerate's from its config file, or torchrun's alone."""

import os
from typing import NoReturn

from study.core.errors import Stop
from study.rehearsal.request import Request


def environment(request: Request) -> dict[str, str]:
    """Return the variables that `accelerate launch` would set. It is asked itself, and starts nothing."""
    if request.config_file is None and not request.launch_words:
        return {}
    from accelerate.commands import launch
    from accelerate.utils import launch as variables

    prepared: list[dict[str, str]] = []
    launch.deepspeed_launcher = lambda arguments: prepared.append(variables.prepare_deepspeed_cmd_env(arguments)[1])
    launch.multi_gpu_launcher = lambda arguments: prepared.append(variables.prepare_multi_gpu_env(arguments))
    launch.simple_launcher = lambda arguments: prepared.append(variables.prepare_simple_launcher_cmd_env(arguments)[1])
    config = ["--config_file", request.config_file] if request.config_file else []
    words = [*config, *request.launch_words, "--num_processes", str(request.ranks), "--main_process_port", "0"]
    parser = launch.launch_command_parser()
    parser.error = refuse
    launch.launch_command(parser.parse_args([*words, request.script]))
    return {name: value for name, value in prepared[0].items() if os.environ.get(name) != value}


def refuse(message: str) -> NoReturn:
    """Raise Stop where Accelerate's parser would end the process."""
    raise Stop(f"accelerate launch says: {message}", "correct the words before the script")
