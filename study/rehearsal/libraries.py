"""How libraries run as rank 0 of N without a GPU. Each patch is applied when the script imports the library."""

import contextlib
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import distributed as ddp
from torch.utils._pytree import tree_leaves

from study.core.errors import Stop
from study.measure.virtual_rank import all_reduce
from study.rehearsal import gpu
from study.rehearsal.count import Count
from study.rehearsal.request import Request
from study.rehearsal.values import Shapes

TORCH: Any = torch  # whose parts are replaced
Patch = Callable[[types.ModuleType], None]


class WhenImported(importlib.abc.MetaPathFinder):
    """Applies a patch to a module right after it was imported."""

    def __init__(self, patches: dict[str, Patch]):
        self.patches = patches

    def find_spec(self, name, path, target=None):
        patch = self.patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module) -> None:
            load(module)
            patch(module)

        loader.exec_module = exec_module
        return spec


class Libraries:
    """The patches of a rehearsal."""

    def __init__(self, request: Request, shapes: Shapes, count: Count):
        self.request = request
        self.shapes = shapes
        self.count = count

    def patch(self) -> None:
        self._torch()
        later: dict[str, Patch] = {
            "accelerate.state": self._accelerate_state,
            "accelerate.accelerator": self._accelerator,
            "accelerate.utils.dataclasses": self._plugins,
            "transformers.modeling_utils": self._transformers,
            "transformers.generation.utils": self._generation,
            "transformers.models.auto.configuration_auto": self._configs,
            "transformers.integrations.deepspeed": self._transformers_deepspeed,
            "transformers.trainer": self._trainer,
            "transformers.trainer_callback": self._trainer_callback,
            "peft.peft_model": self._peft,
            "transformers.utils.import_utils": self._checks_of_transformers,
            "safetensors.torch": self._safetensors,
            "deepspeed.runtime.engine": self._deepspeed_engine,
            "deepspeed.runtime.zero.partitioned_param_coordinator": self._coordinator,
            "deepspeed.ops.adam.cpu_adam": self._cpu_adam,
            "deepspeed.comm.torch": self._deepspeed_comm,
            "study.watch.session": self._watch,
            "trl.kernels.chunked_logprob": self._trl_kernels,
        }
        for name, class_name in {
            "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
            "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
            "deepspeed.runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
            "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
            "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
            "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
        }.items():
            later[name] = self._without_values(class_name)
        later["deepspeed.runtime.zero.partition_parameters"] = self._partition
        sys.meta_path.insert(0, WhenImported(later))

    def _without_values(self, class_name: str) -> Patch:
        return lambda module: self.shapes.wrap_all(getattr(module, class_name))

    # --- PyTorch

    def _torch(self) -> None:
        parallel: Any = ddp
        # In agreement with the other ranks, DDP would regroup its buckets after the first step.
        TORCH.distributed.Reducer._rebuild_buckets = lambda *_, **__: False
        parallel._verify_param_shape_across_processes = lambda *_, **__: None
        begin = self.shapes.wrap(ddp.DistributedDataParallel.__init__)

        def wrap_in_ddp(model, *args, device_ids=None, output_device=None, **kwargs) -> None:
            made = self.count.watch.made
            if self.count.watch.device_type == "cuda":
                kwargs |= {"device_ids": device_ids, "output_device": output_device}
            begin(model, *args, **kwargs)
            self.count.watch.reassign(made, "backward")  # its buckets, which real ranks make anew in their first pass
            model.register_comm_hook(None, all_reduce)  # its C++ code needs a result that the fake backend lacks

        parallel.DistributedDataParallel.__init__ = wrap_in_ddp
        if not self.request.real:
            TORCH.Tensor.data_ptr = address
        TORCH.save = saving(torch.save)
        self.count.moments.wrap(torch, "save")
        if (
            self.request.gpu and not self.request.real
        ):  # a GPU's default is an update of all tensors at once (torch/optim/optimizer.py)
            for name, module in list(sys.modules.items()):
                if name.startswith("torch.optim.") and hasattr(module, "_default_to_fused_or_foreach"):
                    vars(module)["_default_to_fused_or_foreach"] = lambda *_, **__: (False, True)
        take = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
        count = self.count

        def next_batch(loader):
            count.moments.begin_batch(loader)
            batch = take(loader)
            count.take_batch(batch)
            return batch

        TORCH.utils.data.dataloader._BaseDataLoaderIter.__next__ = next_batch
        self._optimizers()
        self._fsdp2()
        self._fsdp1()

    def _optimizers(self) -> None:
        shapes = self.shapes
        make = torch.optim.Optimizer.profile_hook_step

        def with_values(step):
            hooked = make(step)

            def call(*args, **kwargs):
                with shapes.not_only():
                    return hooked(*args, **kwargs)

            return call

        TORCH.optim.Optimizer.profile_hook_step = staticmethod(with_values)

    def _fsdp2(self) -> None:
        from torch.distributed import fsdp
        from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state, _fully_shard

        make_mesh = _fully_shard._init_default_mesh
        shard = self.shapes.wrap(_fully_shard.fully_shard)
        meshes: list[Any] = []  # one, made outside of the mode without values, and handed out to each module

        def fully_shard(*args, **kwargs):
            if not meshes:
                meshes.append(make_mesh())
            return shard(*args, **kwargs)

        fully_shard.state = _fully_shard.fully_shard.state  # type: ignore[attr-defined]
        _fully_shard._init_default_mesh = lambda *_: meshes[0]
        fsdp.fully_shard = _fully_shard.fully_shard = fully_shard
        for owner in (_fsdp_param.FSDPParam, _fsdp_param_group.FSDPParamGroup, _fsdp_state.FSDPState):
            self.shapes.wrap_all(owner)

    def _fsdp1(self) -> None:
        """FSDP1 asks for a GPU by the streams of its device. Its weights are one flat tensor for each unit."""
        from torch.distributed.fsdp import _flat_param, _init_utils, _runtime_utils, fully_sharded_data_parallel

        module: Any = fully_sharded_data_parallel
        for owner, name in (
            (module.FullyShardedDataParallel, "__init__"), (module.FullyShardedDataParallel, "clip_grad_norm_"),
            (_runtime_utils, "_reduce_grad"), (_runtime_utils, "_reduce_grad_no_shard"),
            (_runtime_utils, "_unshard"), (_runtime_utils, "_unshard_grads"), (_runtime_utils, "_reshard"),
        ):  # fmt: skip
            setattr(owner, name, self.shapes.wrap(getattr(owner, name)))
        flat: Any = _flat_param
        self.shapes.wrap_all(flat.FlatParamHandle)
        if self.count.watch.device_type == "cuda":
            return

        def use_streams_of_nothing(state, *_) -> Any:
            state._device_handle = DeviceHandle()
            return state

        host = torch.device("cpu")
        flat.FlatParamHandle.to_cpu = lambda _: contextlib.nullcontext()  # it frees what it has moved
        initial: Any = _init_utils
        module._init_device_handle = use_streams_of_nothing
        initial._check_module_states_for_sync_module_states = lambda *_: None
        initial._get_device_from_device_id = initial._get_compute_device = lambda *_: host
        for owner in (_flat_param, _runtime_utils):
            vars(owner)["_no_dispatch_record_stream"] = lambda *_: None

    # --- Accelerate and transformers

    def _accelerate_state(self, module) -> None:
        def backend(state, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None):
            return backend or "fake", module.DistributedType.MULTI_GPU

        def set_device(state) -> None:
            state.device = torch.device("cpu")

        module.PartialState._prepare_backend = backend
        if self.count.watch.device_type == "cpu":
            module.PartialState.set_device = set_device

    def _checks_of_transformers(self, module) -> None:
        if not self.request.real:
            module.is_torch_bf16_gpu_available = lambda: True

    def _transformers(self, module) -> None:
        def from_pretrained(cls, name, *args, config=None, **kwargs):
            return from_config(cls, name, config, kwargs)

        if not self.request.real:
            module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
            module.PreTrainedModel.initialize_weights = lambda _: None

        def save_pretrained(model, folder, *_, **__) -> None:
            model.config.save_pretrained(folder)

        module.PreTrainedModel.save_pretrained = save_pretrained
        self.count.moments.wrap(module.PreTrainedModel, "save_pretrained")

    def _peft(self, module) -> None:
        def save_pretrained(model, folder, *_, **__) -> None:
            for config in model.peft_config.values():
                config.save_pretrained(folder)

        module.PeftModel.save_pretrained = save_pretrained
        self.count.moments.wrap(module.PeftModel, "save_pretrained")
        if not self.request.real:
            module.load_peft_weights = lambda *_, **__: {}

    def _configs(self, module) -> None:
        read = module.AutoConfig.from_pretrained

        def from_pretrained(cls, name, *args, **kwargs):
            try:
                return read(self.request.configs_of.get(str(name), name), *args, **kwargs)
            except OSError as error:
                what = f"the config of {name} cannot be had ({str(error).splitlines()[0]})"
                raise Stop(what, f"give --config-of {name}=FOLDER, a folder with its config.json") from None

        if not self.request.real:
            module.AutoConfig.from_pretrained = classmethod(from_pretrained)

    def _generation(self, module) -> None:
        def generate(*_, **__):
            raise Stop(
                "`generate` chooses tokens by values, which do not exist here", "leave it out with --skip FUNCTION"
            )

        if not self.request.real:
            module.GenerationMixin.generate = generate

    def _transformers_deepspeed(self, module) -> None:
        if not self.request.real:  # it gathers each weight to give it its first values: minutes of a large model
            module.initialize_weights_zero3 = lambda _: None

    def _trl_kernels(self, module) -> None:
        if (
            self.request.gpu and not self.request.real
        ):  # there a Triton kernel works in place, where a CPU makes six copies of a tile
            module._forward_tile = module._backward_tile = lambda *_, **__: None

    def _safetensors(self, module) -> None:
        module.save_file = self.nothing("save_file")

    def nothing(self, what: str) -> Callable:
        """Return a function that saves nothing. That it was called is noted."""

        def save(*_, **__) -> None:
            with self.count.moments.saving(what):
                pass

        return save

    def _accelerator(self, module) -> None:
        self.count.moments.wrap(module.Accelerator, "save_state", "save_model", "get_state_dict")

    def _plugins(self, module) -> None:
        if not self.request.real:
            module.is_cuda_available = lambda: True

    def _trainer(self, module) -> None:
        self.count.moments.wrap(module.Trainer, "save_model", "_save_checkpoint")

    def _trainer_callback(self, module) -> None:
        """Let a Trainer evaluate and save once the updates are made, and end."""
        end_step = module.CallbackHandler.on_step_end

        def on_step_end(handler, arguments, state, control, **kwargs):
            control = end_step(handler, arguments, state, control, **kwargs)
            if self.count.moments.is_over:
                control.should_training_stop = True
                control.should_evaluate |= self.request.evaluate and arguments.eval_strategy != "no"
                control.should_save |= self.request.save and arguments.save_strategy != "no"
            return control

        module.CallbackHandler.on_step_end = on_step_end

    # --- DeepSpeed

    def _deepspeed_engine(self, module) -> None:
        from deepspeed.accelerator import get_accelerator

        engine = module.DeepSpeedEngine
        for name in ("__init__", "allreduce_gradients", "save_checkpoint", "load_checkpoint", "save_16bit_model"):
            setattr(engine, name, self.shapes.wrap(getattr(engine, name)))
        self.count.moments.wrap(engine, "save_checkpoint", "save_16bit_model", "_zero3_consolidated_16bit_state_dict")
        take_step = self.shapes.wrap(engine.step)

        def step(this, *args, **kwargs):
            before = this.global_steps
            self.count.engine = this
            result = take_step(this, *args, **kwargs)
            if this.global_steps != before:
                self.count.end_update()
            return result

        engine.step = step
        if not self.request.real:
            get_accelerator().pin_memory = lambda tensor, *_, **__: tensor
            TORCH.Tensor.record_stream = lambda *_, **__: None

    def _deepspeed_comm(self, module) -> None:
        module.build_shm_op = lambda: None  # it would be compiled, for neighbours that do not exist

    def _coordinator(self, module) -> None:
        module.assert_ints_same_as_other_ranks = lambda *_, **__: None
        self.shapes.wrap_all(module.PartitionedParameterCoordinator)

    def _partition(self, module) -> None:
        self.shapes.wrap_all(module.Init)
        for owner in ("AllGatherHandle", "AllGatherCoalescedHandle", "MultipleAllGatherHandles", "GatheredParameters"):
            self.shapes.wrap_all(getattr(module, owner))

    def _cpu_adam(self, module) -> None:
        if self.request.real:
            return

        def nothing(*_, **__) -> None:
            pass

        operator = types.SimpleNamespace(create_adam=nothing, adam_update=nothing, destroy_adam=nothing)
        module.CPUAdamBuilder = lambda: types.SimpleNamespace(load=lambda: operator)

    def _watch(self, module) -> None:
        module.Watch.__enter__ = lambda watch: watch  # what it would look at is counted here


class DeviceHandle:
    """What FSDP1 asks of a GPU: streams, in which everything happens at once."""

    Stream = Event = gpu.Stream

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def current_stream(self) -> gpu.Stream:
        return gpu.Stream()

    def stream(self, _) -> gpu.Stream:
        return gpu.Stream()

    def synchronize(self) -> None:
        pass


read_address = torch.Tensor.data_ptr


def address(tensor: torch.Tensor) -> int:
    """Return where a tensor is. Accelerate and others tell tensors without memory apart by it, too."""
    local = getattr(tensor, "_local_tensor", tensor)
    if isinstance(local, FakeTensor):
        return local.untyped_storage()._cdata
    return read_address(tensor)


def saving(save: Callable) -> Callable:
    """Return a `torch.save` that saves what has values, such as a data set. The files are removed afterwards."""

    def save_values(content, *args, **kwargs) -> None:
        leaves = tree_leaves(content)
        if not any(isinstance(leaf, FakeTensor | torch.nn.Module | torch.optim.Optimizer) for leaf in leaves):
            save(content, *args, **kwargs)

    return save_values


def from_config(cls, name, config, options: dict):
    """Return a model of this class as `from_pretrained` would, without its weights."""
    from transformers import AutoConfig, PretrainedConfig

    if options.get("quantization_config") is not None:
        raise Stop("a rehearsal has no quantized weights", "leave quantization_config out, or ask `study estimate`")
    if not isinstance(config, PretrainedConfig):
        known = {key: options[key] for key in ("revision", "token", "trust_remote_code", "subfolder") if key in options}
        changed = {key: value for key, value in options.items() if key in ("num_labels", "use_cache", "id2label")}
        config = AutoConfig.from_pretrained(config or name, **known, **changed)
    if getattr(config, "quantization_config", None):
        raise Stop(f"{name} has quantized weights, and a rehearsal has none", "name a model whose weights are not")
    dtype = options.get("dtype", options.get("torch_dtype"))
    if dtype in (None, "auto"):
        dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    attention = options.get("attn_implementation")
    more = {"attn_implementation": attention} if attention else {}
    return cls._from_config(config, dtype=dtype or torch.float32, **more).eval()
