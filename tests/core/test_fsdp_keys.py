"""Each key and value of `fsdp_config`, as the launcher and the plugin of the installed Accelerate take it."""

import argparse
import os
from unittest import mock

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import dataclasses as plugin
from accelerate.utils.launch import prepare_multi_gpu_env

from study.core.fsdp_keys import KEYS, of_fsdp1, refused_in_fsdp, with_prefix, without_its_policy
from study.core.library_defaults import library_defaults

WORDS = [
    None, True, False, 0, 1, 2, 3, 4, 5, 6, 1.5, "true", "False", "yes", "off", "1", "3", "x", "BertLayer", "",
    *(word for key in KEYS.values() for name in key.names for word in (name, name.lower(), f"{name[:-1]}X")),
]  # fmt: skip
LAUNCHED = launch_command_parser().parse_args(["--use_fsdp", "train.py"])
POLICIES = KEYS["fsdp_auto_wrap_policy"].names


@pytest.fixture(scope="module", autouse=True)
def with_a_gpu():
    with (
        mock.patch.object(plugin, "is_cuda_available", return_value=True),
        mock.patch("torch.cuda.current_device", return_value=0),
    ):
        yield


def in_the_plugin(fsdp: dict) -> plugin.FullyShardedDataParallelPlugin | None:
    """The plugin of a rank that `accelerate launch` starts with a section. None: it does not start."""
    args = argparse.Namespace(**vars(LAUNCHED))
    for key, value in with_prefix(fsdp).items():  # commands/launch.py:1266
        setattr(args, key, value)
    args.num_processes, args.num_machines, args.mixed_precision, args.dynamo_backend = 2, 1, "no", "no"
    try:
        with mock.patch.dict(os.environ):
            os.environ |= environment(args)
            return plugin.FullyShardedDataParallelPlugin()
    except (ValueError, KeyError):
        return None


def environment(args: argparse.Namespace) -> dict[str, str]:
    return {name: value for name, value in prepare_multi_gpu_env(args).items() if name.startswith("FSDP_")}


def shown(fsdp: dict) -> dict | None:
    """What the plugin makes of a section; functions by their names."""
    made = in_the_plugin(fsdp)
    return made and {name: getattr(value, "__qualname__", value) for name, value in vars(made).items()}


def test_the_table_has_each_key_of_the_launcher():
    of_launcher = {key for key in library_defaults("accelerate")["fsdp_config"] if key.startswith("fsdp_")}
    assert KEYS.keys() == of_launcher


@pytest.mark.filterwarnings("ignore:sync_module_states cannot be False")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("key", [key for key in KEYS if key != "fsdp_version"])
def test_each_value_is_refused_where_the_plugin_refuses_it(key, version):
    besides: list[dict] = [{}]
    if key.startswith("fsdp_activation"):
        besides.append({"fsdp_activation_checkpointing": True})
    if key in ("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states"):
        besides += [{"fsdp_cpu_ram_efficient_loading": False}, {"fsdp_sync_module_states": False}]
    if KEYS[key].policy:
        besides += [{"fsdp_auto_wrap_policy": name} for name in POLICIES]
    wrong = []
    for beside in besides:
        for value in WORDS:
            fsdp = {"fsdp_version": version} | beside | {key: value}
            if (in_the_plugin(fsdp) is None) != bool([*refused_in_fsdp(fsdp)]):
                wrong.append(fsdp)
    assert wrong == []


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("key", [key for key in KEYS if key != "fsdp_version"])
def test_a_key_is_ignored_where_the_plugin_is_the_same_with_all_its_values(key, version):
    for policy in POLICIES:
        fsdp = {"fsdp_version": version, "fsdp_auto_wrap_policy": policy, "fsdp_cpu_ram_efficient_loading": False}
        fsdp |= {"fsdp_activation_checkpointing": True}
        if key in fsdp:
            continue
        plugins = [shown(fsdp | {key: value}) for value in WORDS]
        started = [each for each in plugins if each]
        is_ignored = all(each == started[0] for each in started)
        told = {name for name, _ in of_fsdp1({key: 1})} if version == 2 else set()
        if version == 1 and "1" not in KEYS[key].versions:
            told.add(key)
        if any(f"ignores {key} " in does for does, _ in without_its_policy(fsdp | {key: 1})):
            told.add(key)
        if key == "fsdp_activation_checkpointing_offload" and version == 1:
            continue  # true is refused, and so one value is left
        assert is_ignored == bool(told), (key, policy)
