"""Keys of a config that no library knows, and those that Accelerate, DeepSpeed or its stage ignores."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from study.core.errors import close_names, nearest
from study.core.files import section_at
from study.core.library_defaults import library_defaults

OFFLOADS = ("offload_optimizer", "offload_param")
MOST_UNKNOWN = 200  # keys of a section that are compared with the library's, which takes milliseconds each
# Only stage 3 is given them (DeepSpeed 0.19.8, _configure_zero_optimizer of runtime/engine.py, zero/stage3.py and what
# they call), and those that begin with stage3_, also without this. The last are of offload_optimizer.
OF_STAGE_3 = (
    "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "sub_group_size", "memory_efficient_linear", "override_module_apply", "leaf_module",
    "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory",
)  # fmt: skip
OF_ITS_OFFLOAD = (
    "buffer_count", "pipeline_read", "pipeline_write", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc",
)  # fmt: skip
# Only stages 1 and 2 are given them.
OF_STAGES_1_AND_2 = (
    "allgather_bucket_size", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters", "round_robin_gradients",
    "parameter_alignment",
)  # fmt: skip
GATHERS = (
    "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)  # fmt: skip
# Accelerate refuses a yaml that sets any of these beside a json (utils/dataclasses.py:1507 of Accelerate 1.15.0).
SAID_BY_THE_JSON = (
    "zero_stage", "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path",
    "offload_param_nvme_path", "gradient_clipping", "gradient_accumulation_steps", "zero3_save_16bit_model",
)  # fmt: skip


@dataclass(frozen=True)
class UnknownKey:
    """A key that a library does not know: it ignores it, or does not start."""

    library: str
    section: str  # its dotted path; empty: the upper level
    key: str
    written: dict  # all keys of that section

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}".lstrip(".")

    @property
    def known(self) -> dict[str, Any]:
        """The keys that the library has in that section."""
        return library_defaults(self.library)[self.section]

    @property
    def is_note(self) -> bool:
        """Whether it is somebody's note, such as _comment."""
        return not self.key[:1].isalpha()

    @property
    def places(self) -> list[str]:
        """The sections that have such a key."""
        return _places(self.library, self.key)


def unknown_keys(library: str, config: dict) -> Iterator[UnknownKey]:
    """Yield each key that a library does not know, by the sections in which it stands."""
    for path, known in library_defaults(library).items():
        section = section_at(config, path)
        unknown = [key for key in section if key not in known]
        for key in unknown[:MOST_UNKNOWN]:
            yield UnknownKey(library, path, str(key), section)


def as_meant(library: str, config: dict) -> dict:
    """Return a config with each misspelt key under the name that is proposed for it.

    Who corrects the name should hear in the same answer what is ignored under the right one.
    """
    meant = copy.deepcopy(config)
    for each in unknown_keys(library, config):
        if not each.is_note:
            for name in close_names(each.key, each.known):
                section = section_at(meant, each.section)
                section.setdefault(name, section.pop(each.key, None))
    return meant


def stage_meant(stage: Any) -> Any:
    """Return a stage as a number, if it is one in quotes, as the libraries do."""
    return int(stage) if str(stage).isdecimal() else stage


def _places(library: str, key: str) -> list[str]:
    return [section for section, keys in library_defaults(library).items() if section and key in keys]


def without_a_reader(library: str, config: dict) -> Iterator[str]:
    """Yield what to do about each key that a library does not know. Notes, such as _comment, are left alone."""
    for each in unknown_keys(library, config):
        if not each.is_note:
            places = [f"write it into {place}" for place in each.places]
            if library == "accelerate":  # people write DeepSpeed's keys there
                places += [f"write it into {place} of a DeepSpeed json" for place in _places("deepspeed", each.key)]
                if each.key in library_defaults("deepspeed")[""]:
                    places.append("write it into a DeepSpeed json")
            remedy = nearest(each.key, each.known, otherwise=" or ".join(places) or "remove it")
            yield f"{library} has no key {each.path:.80}: {remedy}"


def lost_paths(section: dict) -> list[str]:
    """Return the folders for NVMe that Accelerate reads and never passes on: the files go to ./none.

    It is so in Accelerate 1.15.0 (reproductions/nvme_path_from_yaml.py).
    """
    paths = [f"{part}_nvme_path" for part in OFFLOADS]
    return [path for path in paths if section.get(path) not in ("none", "None", None)]


def beside_a_json(section: dict) -> list[str]:
    """Return the keys of Accelerate's `deepspeed_config` that it refuses beside `deepspeed_config_file`.

    A folder for NVMe that does not arrive is none of them: it is of no use in the yaml at all.
    """
    if not section.get("deepspeed_config_file"):
        return []
    lost = lost_paths(section)
    return [key for key in SAID_BY_THE_JSON if key in section and key not in lost]


def accelerate_ignores(section: dict, stage: int) -> Iterator[tuple[str, str]]:
    """Yield what Accelerate ignores in its `deepspeed_config` with a stage, and what to do."""
    section = as_meant("accelerate", {"deepspeed_config": section})["deepspeed_config"]
    # It warns of the first, and goes on without (utils/dataclasses.py of 1.15.0). The second is a key of stage 3.
    for key in ("zero3_init_flag", "zero3_save_16bit_model"):
        if stage in (0, 1, 2) and str(section.get(key)).lower() == "true":
            yield f"ignores {key} with stage {stage}", "take stage 3, or remove it"


def promises_ignored(config: dict, stage: int) -> list[tuple[str, str]]:
    """Return what a stage does otherwise than `zero_optimization` promises, without a message, and what to do.

    It is so in DeepSpeed 0.19.8, whatever the value of a key that is not read.
    """
    if stage not in (0, 1, 2, 3):  # such as "two": which stage is meant is not known
        return []
    config = as_meant("deepspeed", config)
    zero = section_at(config, "zero_optimization")
    found = []
    home = _home(zero, "offload_optimizer")
    if stage == 0 and home != "none":  # no class of ZeRO is made, which alone offloads
        found.append(("ignores offload_optimizer", "take a stage that divides states, or remove it"))
    elif stage != 3 and home == "nvme":  # they only ask whether it is none (stage_1_and_2.py:220)
        found.append(("takes nvme for cpu, and writes nothing to a disk", "write cpu, or take stage 3"))
    if ignored := _unread(config, stage):
        reading = "stage 1 or 2" if stage == 3 else "stage 3"
        them = "it" if len(ignored) == 1 else "them"
        found.append((f"ignores {' and '.join(ignored)}", f"take {reading}, or remove {them}"))
    return found


def _unread(config: dict, stage: int) -> list[str]:
    """Return the dotted paths in `zero_optimization` that a stage never reads, whatever is written there."""
    zero = section_at(config, "zero_optimization")
    if stage == 3:
        return [key for key in zero if key in OF_STAGES_1_AND_2]
    # Accelerate asks for some where AutoTP divides the weights, as well.
    read = GATHERS if section_at(config, "tensor_parallel").get("autotp_size") else ()
    return [key for key in zero if _is_of_stage_3(key) and key not in read] + _unread_of_offloads(zero, stage)


def _unread_of_offloads(zero: dict, stage: int) -> list[str]:
    """Return what stages 0, 1 and 2 do not read of the sections for offloading."""
    unread = []
    if _home(zero, "offload_param") != "none":
        unread.append("offload_param")  # reproductions/offload_param_without_stage3.py
    if stage != 0 and _home(zero, "offload_optimizer") not in ("none", "nvme"):
        # Of its section they read device and pin_memory alone.
        unread += [f"offload_optimizer.{key}" for key in zero["offload_optimizer"] if key in OF_ITS_OFFLOAD]
    return unread


def _home(zero: dict, part: str) -> str:
    return section_at(zero, part).get("device") or "none"


def _is_of_stage_3(key: str) -> bool:
    known = library_defaults("deepspeed")["zero_optimization"]
    return key in known and (key in OF_STAGE_3 or key.startswith("stage3_") or f"stage3_{key}" in known)
