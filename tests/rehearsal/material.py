"""What public scripts name and no network gives: small configs, tokenizers, data sets and metrics, in one folder.

A script that is started in that folder finds them by the names of the hub, as a folder of the name comes first.
"""

import json
from pathlib import Path

WORDS = ["the", "a", "cat", "dog", "bird", "sees", "likes", "hears", "red", "green", "small", "old", "and", "runs"]
SPECIAL = {name: f"<{name.partition('_')[0]}>" for name in (
    "pad_token", "unk_token", "bos_token", "eos_token", "cls_token", "sep_token", "mask_token"
)}  # fmt: skip
CHAT = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
VOCABULARY = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
SAME = {  # names of the hub that scripts have in them
    "llama": ("HuggingFaceTB/SmolLM-360M", "Qwen/Qwen2-0.5B-Instruct", "bigscience/bloomz-7b1"),
    "bert-base-cased": ("roberta-base",),
    "t5": ("t5-base",),
}
METRIC = """
import datasets
import evaluate

class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(a == b for a, b in zip(predictions, references)) / len(predictions)
        return {"accuracy": right, "f1": right}
"""


def configs() -> dict:
    """Return the small models' configs by their names."""
    from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config, ViTConfig

    return {
        "bert-base-cased": BertConfig(**LAYERS, vocab_size=64, max_position_embeddings=128),
        "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **VOCABULARY),
        "llama": LlamaConfig(**LAYERS, **VOCABULARY, max_position_embeddings=256),
        "t5": T5Config(
            d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0, **VOCABULARY
        ),
        "vit": ViTConfig(**LAYERS, image_size=32, patch_size=8),
    }


def write(folder: Path, config, names: tuple[str, ...]) -> None:
    """Write a config and a tokenizer under each of these names."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=128, **SPECIAL)
    tokenizer.chat_template = CHAT
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    for name in names:
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def text(number: int, words: int = 12) -> str:
    return " ".join(WORDS[(number * 5 + place * (number % 7 + 1)) % len(WORDS)] for place in range(words))


def data_set(folder: Path, rows: list[dict], config: str = "default", splits=("train", "validation", "test")) -> None:
    """Write rows as a data set that `load_dataset` reads, with one config."""
    (folder / config).mkdir(parents=True)
    for split in splits:
        (folder / config / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {config}/{split}.jsonl\n" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


def configs_of_accelerate(folder: Path) -> None:
    """Write a YAML of Accelerate for each way to train, as people have them."""
    machine = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1}
    zero = {"zero3_init_flag": False, "zero3_save_16bit_model": True, "gradient_accumulation_steps": 1}
    offload = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    fsdp = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    # Real ranks without a GPU cannot send each other their first weights.
    each_loads = {"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False}
    files = {
        "ddp": {"distributed_type": "MULTI_GPU"},
        "zero1": {"distributed_type": "DEEPSPEED", "deepspeed_config": zero | {"zero_stage": 1}},
        "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": zero | {"zero_stage": 2}},
        "zero3": {"distributed_type": "DEEPSPEED", "deepspeed_config": zero | {"zero_stage": 3}},
        "zero3_cpu": {"distributed_type": "DEEPSPEED", "deepspeed_config": zero | offload | {"zero_stage": 3}},
        "fsdp1": {"distributed_type": "FSDP", "fsdp_config": fsdp | {"fsdp_version": 1}},
        "fsdp2": {"distributed_type": "FSDP", "fsdp_config": fsdp | {"fsdp_version": 2}},
        "fsdp1_cpu": {"distributed_type": "FSDP", "fsdp_config": fsdp | each_loads | {"fsdp_version": 1}},
        "fsdp2_cpu": {"distributed_type": "FSDP", "fsdp_config": fsdp | each_loads | {"fsdp_version": 2}},
        "fsdp2_bert": {  # of its own choice of units Accelerate 1.15 makes two of one module, and the script ends
            "distributed_type": "FSDP",
            "fsdp_config": fsdp | each_loads | {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "BertLayer"},
        },
    }
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(json.dumps(machine | content))  # which is YAML as well
    adam = {"type": "AdamW", "params": {"lr": 1e-4}}
    engine = {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, "zero_optimization": {"stage": 3}}
    (folder / "zero3.json").write_text(json.dumps(engine | {"bf16": {"enabled": True}}))


def images(folder: Path) -> None:
    """Write pictures of two kinds of cats, by their names."""
    from PIL import Image

    folder.mkdir()
    for number in range(80):
        kind = ("Bengal", "Birman")[number % 2]
        Image.new("RGB", (64, 48), (number, 0, 255 - number)).save(folder / f"{kind}_{number}.jpg")


def folders_of_images(folder: Path) -> None:
    """Write pictures of three kinds, a folder each."""
    from PIL import Image

    for kind in range(3):
        (folder / f"kind{kind}").mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (40, 40), (number, 80 * kind, 0)).save(folder / f"kind{kind}" / f"{number}.jpg")


def make(folder: Path) -> None:
    """Write everything into a folder."""
    for name, config in configs().items():
        write(folder, config, (name, *SAME.get(name, ())))
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
    (folder / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
    pairs = [
        {"sentence1": text(n), "sentence2": text(n, 8 + n % 5), "label": n % 2, "idx": n} for n in range(128)
    ]  # fmt: skip
    data_set(folder / "nyu-mll" / "glue", pairs, "mrpc")
    lines = [{"text": text(n, 40)} for n in range(512)]
    data_set(folder / "Salesforce" / "wikitext", lines, "wikitext-2-v1")
    data_set(folder / "wikitext", lines, "wikitext-2-v1")
    data_set(folder / "texts", lines)
    asked = [{"instruction": text(n), "input": "", "output": text(n + 1)} for n in range(128)]
    data_set(folder / "tatsu-lab" / "alpaca", asked, splits=("train",))
    (folder / "alpaca.json").write_text(json.dumps(asked))
    prompts = [{"prompt": text(n), "chosen": text(n + 1), "rejected": text(n + 2)} for n in range(128)]
    data_set(folder / "preferences", prompts)
    judged = [{"prompt": text(n), "completion": text(n + 1), "label": n % 2 == 0} for n in range(128)]
    data_set(folder / "judged", judged)
    data_set(folder / "prompts", [{"prompt": text(n)} for n in range(128)])
    chats = [
        {"messages": [{"role": "user", "content": text(n)}, {"role": "assistant", "content": text(n + 1)}]}
        for n in range(128)
    ]
    data_set(folder / "chats", chats)
    data_set(folder / "Dahoas" / "rm-static", prompts)
    bank = [{"sentence": text(n), "label": WORDS[n % 3]} for n in range(128)]
    data_set(folder / "temp" / "data", bank, "FinancialPhraseBank-v1.0")
    for split, name in (("train", "train"), ("validation", "val")):
        path = folder / "temp" / "data" / "FinancialPhraseBank-v1.0"
        (path / f"{split}.jsonl").rename(path / f"financial_phrase_bank_{name}.jsonl")
    (folder / "data" / "tiny").mkdir(parents=True)
    for split in ("train", "val"):  # 16-bit numbers of tokens
        (folder / "data" / "tiny" / f"{split}.bin").write_bytes(bytes(5000))
    configs_of_accelerate(folder)
    images(folder / "images")
    folders_of_images(folder / "pictures")
    for name in ("glue", "accuracy"):
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(METRIC)
    (folder / "train.csv").write_text("sentence1,sentence2,label\n" + "".join(
        f"{each['sentence1']},{each['sentence2']},{each['label']}\n" for each in pairs
    ))  # fmt: skip
    (folder / "train.txt").write_text("".join(f"{each['text']}\n" for each in lines))
