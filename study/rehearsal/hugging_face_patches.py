"""How Accelerate, transformers, PEFT, TRL and timm run as rank 0 of N without a GPU."""

import copy
import json
import tempfile
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from study.core.errors import Stop
from study.core.shapes import config_of, model_of_name, prepare_to_load
from study.rehearsal.hub import TOKENIZERS, loading, missing, telling, why
from study.rehearsal.libraries import Patch, Rehearsal

# Options of a model's `from_pretrained` that are its config's.
OF_CONFIG = ("revision", "token", "trust_remote_code", "subfolder", "num_labels", "use_cache", "id2label")
DEFAULT_TOKENS = 20  # of an answer, if nobody gives a length (transformers, generation/utils.py)


def accelerate_state(rehearsal: Rehearsal, module) -> None:
    def backend(state, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None):
        return backend or "fake", module.DistributedType.MULTI_GPU

    def set_device(state) -> None:
        state.device = torch.device("cpu")

    module.PartialState._prepare_backend = backend
    if rehearsal.on_cpu:
        module.PartialState.set_device = set_device


def accelerate_launchers(rehearsal: Rehearsal, module) -> None:
    module.notebook_launcher = lambda function, args=(), *_, **__: function(*args)  # this process is one of its ranks


def accelerate_plugins(rehearsal: Rehearsal, module) -> None:
    module.is_cuda_available = lambda: True


def accelerator(rehearsal: Rehearsal, module) -> None:
    rehearsal.count.moments.wrap(module.Accelerator, "save_state", "save_model", "get_state_dict")
    save_state, load_state = module.Accelerator.save_state, module.Accelerator.load_state
    saved: set[Path] = set()  # folders, in which no weights are

    def save(accelerator, *args, **kwargs):
        folder = save_state(accelerator, *args, **kwargs)
        saved.add(Path(folder).resolve())
        return folder

    def load(accelerator, input_dir=None, *args, **kwargs) -> None:
        if not saved or (input_dir is not None and Path(input_dir).resolve() not in saved):
            load_state(accelerator, input_dir, *args, **kwargs)

    module.Accelerator.save_state, module.Accelerator.load_state = save, load
    module.filter_trackers = lambda *_: []  # a rehearsal logs nowhere
    begin = module.Accelerator.__init__

    def init(accelerator, *args, **kwargs) -> None:
        begin(accelerator, *args, **kwargs)
        has_engine = accelerator.distributed_type in (
            module.DistributedType.DEEPSPEED,
            module.DistributedType.MEGATRON_LM,
        )
        if accelerator.mixed_precision == "fp16" and not has_engine:
            asked = accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler else {}
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", **asked)

    # On a CPU Accelerate 1.15.0 has neither autocast nor a scale for fp16 (accelerator.py:566).
    if rehearsal.on_cpu:
        module.Accelerator.__init__ = init


def transformers_checks(rehearsal: Rehearsal, module) -> None:
    module.is_torch_bf16_gpu_available = lambda: True


def transformers_models(rehearsal: Rehearsal, module) -> None:
    watch = rehearsal.count.watch

    def from_pretrained(cls, name, *args, config=None, **kwargs):
        before = watch.made
        model = from_config(cls, name, config, kwargs)
        if not module.is_deepspeed_zero3_enabled():  # which makes each weight on the GPU
            rehearsal.count.answer.loaded.append((before, watch.made))
        return model

    if not rehearsal.request.real:
        module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
        module.PreTrainedModel.initialize_weights = lambda _: None
        module.PreTrainedModel._flash_attn_can_dispatch = lambda *_, **__: True
        module.lazy_import_flash_attention = lambda *_, **__: None
        for version in FLASH:
            module.ALL_ATTENTION_FUNCTIONS[version] = flash_attention

    def save_pretrained(model, folder, *_, **__) -> None:
        model.config.save_pretrained(folder)

    module.PreTrainedModel.save_pretrained = save_pretrained
    rehearsal.count.moments.wrap(module.PreTrainedModel, "save_pretrained")


def transformers_configs(rehearsal: Rehearsal, module) -> None:
    read = module.AutoConfig.from_pretrained

    def from_pretrained(cls, name, *args, **kwargs):
        asked = rehearsal.request.configs_of.get(str(name), name)
        prepare_to_load(str(asked))  # without a network transformers asks again for a minute
        try:
            return read(asked, *args, **kwargs)
        except OSError as error:
            known = model_of_name(str(name))
            if known is None:
                raise missing("config", str(name), why(error)) from None
        from study.core.models.config import architectures  # it imports transformers, as the script has by now

        rehearsal.count.answer.built_in[str(name)] = known
        config = config_of(known)
        config["architectures"] = architectures(config["model_type"])
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            built_in = read(folder, *args, **kwargs)
        for each in built_in if isinstance(built_in, tuple) else (built_in,):
            if not isinstance(each, dict):
                each.name_or_path = str(name)  # by which a trainer loads the tokenizer
        return built_in

    module.AutoConfig.from_pretrained = classmethod(from_pretrained)


def transformers_tokenizers(rehearsal: Rehearsal, module, name: str = "AutoTokenizer") -> None:
    """Read the tokenizer of a model from its --config-of folder, too. Without one transformers makes an empty one."""
    folders = rehearsal.request.configs_of
    reader = getattr(module, name)
    read = reader.from_pretrained

    def from_pretrained(cls, name, *args, **kwargs):
        folder = folders.get(str(name), str(name))
        if folder in folders.values() and not any((Path(folder) / file).is_file() for file in TOKENIZERS):
            what = f"{folder} has no tokenizer, so a sequence would have one token or none"
            raise Stop(what, f"put the model's tokenizer there, beside config.json: {TOKENIZERS[0]}, or what it has")
        with loading("tokenizer", folder):
            return read(folder if folder in folders.values() else name, *args, **kwargs)

    reader.from_pretrained = classmethod(from_pretrained)


def transformers_processors(rehearsal: Rehearsal, module) -> None:
    transformers_tokenizers(rehearsal, module, "AutoProcessor")


def transformers_generation(rehearsal: Rehearsal, module) -> None:
    def generate(model, inputs=None, generation_config=None, **options):
        config = copy.deepcopy(generation_config or model.generation_config)
        options = config.update(**options)
        prompt = options.get("input_ids") if inputs is None else inputs
        if prompt is None or config.return_dict_in_generate:
            what = "`generate` should return tokens alone, of input_ids: their values do not exist here"
            raise Stop(what, "leave out return_dict_in_generate, or by --skip the function that calls it")
        rehearsal.count.answer.generates = True
        if any(each.numel() == 0 or type(each).__name__ == "DTensor" for each in model.parameters()):
            rehearsal.shapes.values.note("generate")  # whose passes gather, and so wait for all ranks
        if model.config.is_encoder_decoder:
            prompt = torch.full((len(prompt), 1), config.decoder_start_token_id or 0)
        more = config.max_new_tokens or DEFAULT_TOKENS
        if config.max_length and not config.max_new_tokens:
            more = max(0, config.max_length - prompt.shape[1])
        ends = {config.pad_token_id, config.bos_token_id, *tree_leaves(config.eos_token_id)}
        word = next(each for each in range(len(ends) + 1) if each not in ends)
        rows = prompt.repeat_interleave(config.num_return_sequences or 1, 0)
        with _disable_current_modes():
            return functional.pad(rows, (0, more), value=word)

    module.GenerationMixin.generate = generate


def transformers_deepspeed(rehearsal: Rehearsal, module) -> None:
    # It gathers each weight to give it its first values: minutes of a large model.
    module.initialize_weights_zero3 = lambda _: None


def trainer(rehearsal: Rehearsal, module) -> None:
    rehearsal.count.moments.wrap(module.Trainer, "save_model", "_save_checkpoint")
    module.get_reporting_integration_callbacks = lambda _: []
    train = module.Trainer.train

    def noted(this, *args, **kwargs):
        lengths = (getattr(this.args, name, None) for name in ("max_length", "max_seq_length"))  # of new and old TRL
        rehearsal.count.answer.max_length = next(filter(None, lengths), None)
        # TRL 1.7 to 1.15 named it so. Of later ones `trl_kernels` notes it.
        rehearsal.count.answer.loss_in_chunks = getattr(this.args, "loss_type", None) == "chunked_nll"
        return train(this, *args, **kwargs)

    module.Trainer.train = noted


def trainer_callbacks(rehearsal: Rehearsal, module) -> None:
    """Let a Trainer evaluate and save once the updates are made, and end."""
    end_step = module.CallbackHandler.on_step_end

    def on_step_end(handler, arguments, state, control, **kwargs):
        control = end_step(handler, arguments, state, control, **kwargs)
        if rehearsal.count.moments.is_over:
            control.should_training_stop = True
            control.should_evaluate |= rehearsal.request.evaluate and arguments.eval_strategy != "no"
            control.should_save |= rehearsal.request.save and arguments.save_strategy != "no"
        return control

    module.CallbackHandler.on_step_end = on_step_end


def peft_model(rehearsal: Rehearsal, module) -> None:
    def save_pretrained(model, folder, *_, **__) -> None:
        for config in model.peft_config.values():
            config.save_pretrained(folder)

    module.PeftModel.save_pretrained = save_pretrained
    rehearsal.count.moments.wrap(module.PeftModel, "save_pretrained")
    if not rehearsal.request.real:
        module.load_peft_weights = lambda *_, **__: {}


def trl_kernels(rehearsal: Rehearsal, module) -> None:
    compute = module._forward_tile
    # A GPU's Triton kernel works in place, where a CPU makes six copies of a tile.
    in_place = rehearsal.request.gpu and not rehearsal.request.real

    def forward_tile(*args, **kwargs):
        rehearsal.count.answer.loss_in_chunks = True
        return None if in_place else compute(*args, **kwargs)

    module._forward_tile = forward_tile
    if in_place:
        module._backward_tile = lambda *_, **__: None


def safetensors(rehearsal: Rehearsal, module) -> None:
    module.save_file = lambda *_, **__: None
    rehearsal.count.moments.wrap(module, "save_file")


def datasets_load(rehearsal: Rehearsal, module) -> None:
    module.load_dataset_builder = telling("data set", module.load_dataset_builder)  # by which load_dataset begins


def hub_files(rehearsal: Rehearsal, module) -> None:
    module.snapshot_download = telling("weights", module.snapshot_download)


FLASH = ("flash_attention_2", "flash_attention_3")  # whose packages need a GPU to be installed


def flash_attention(module, query, key, value, attention_mask, dropout=0.0, **_):
    """Stand in for flash-attn: PyTorch's kernel without a mask keeps the same, and scores neither."""
    shares_heads = query.shape[1] != key.shape[1]
    out = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, enable_gqa=shares_heads)
    return out.transpose(1, 2).contiguous(), None


def from_config(cls, name, config, options: dict):
    """Return a model of this class as `from_pretrained` would, without its weights."""
    from transformers import AutoConfig, PretrainedConfig

    if options.get("quantization_config") is not None:
        raise Stop("a rehearsal has no quantized weights", "leave quantization_config out, or ask `study estimate`")
    if not isinstance(config, PretrainedConfig):
        of_config = {key: value for key, value in options.items() if key in OF_CONFIG}
        config = AutoConfig.from_pretrained(config or name, **of_config)
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


def timm_weights(rehearsal: Rehearsal, module) -> None:
    module.load_pretrained = lambda *_, **__: None


def watch(rehearsal: Rehearsal, module) -> None:
    module.Watch.__enter__ = lambda watch: watch  # what it would look at is counted here


PATCHES: dict[str, Patch] = {
    "accelerate.state": accelerate_state,
    "datasets.load": datasets_load,
    "huggingface_hub._snapshot_download": hub_files,
    "accelerate.accelerator": accelerator,
    "accelerate.launchers": accelerate_launchers,
    "transformers.modeling_utils": transformers_models,
    "transformers.models.auto.processing_auto": transformers_processors,
    "transformers.models.auto.tokenization_auto": transformers_tokenizers,
    "transformers.trainer": trainer,
    "transformers.trainer_callback": trainer_callbacks,
    "peft.peft_model": peft_model,
    "safetensors.torch": safetensors,
    "study.watch.session": watch,
    "trl.kernels.chunked_logprob": trl_kernels,
}
WITHOUT_VALUES: dict[str, Patch] = {  # beside them, unless values are real
    "accelerate.utils.dataclasses": accelerate_plugins,
    "transformers.generation.utils": transformers_generation,
    "transformers.models.auto.configuration_auto": transformers_configs,
    "transformers.integrations.deepspeed": transformers_deepspeed,
    "transformers.utils.import_utils": transformers_checks,
    "timm.models._builder": timm_weights,
}
