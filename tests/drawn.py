"""Cells of families that the scoreboard does not have, drawn by a seed and committed before any was predicted."""

import random

SEED = 20261123
CELLS = 45
MORE_SEED = 20261124  # 9 of the first cells cannot run, so more were drawn, of other families
MORE_CELLS = 8
# Half of them are decoders of today, the others older ones, encoders, mixtures and models of images.
FAMILIES = [
    "smollm3", "granite", "olmo", "cohere", "cohere2", "stablelm", "starcoder2", "phi", "gemma", "glm", "glm4",
    "nemotron", "exaone4", "ernie4_5", "helium", "arcee", "apertus", "opt", "gpt_neo", "biogpt", "roberta", "electra",
    "distilbert", "albert", "granitemoe", "olmoe", "deit", "dinov2",
]  # fmt: skip
MORE_FAMILIES = [
    "olmo3", "diffllama", "ministral", "seed_oss", "persimmon", "hunyuan_v1_dense", "nanochat", "jais2", "camembert",
    "ernie", "megatron-bert", "data2vec-text", "xlm-roberta", "vit_msn", "qwen2_moe", "phimoe",
]  # fmt: skip
ENCODERS = ("roberta", "electra", "distilbert", "albert", *MORE_FAMILIES[8:13])
ARMS = ["ddp", "zero1", "zero2", "zero3", "zero1_cpu", "zero2_cpu", "zero3_cpu", "zero3_hpz", "fsdp2", "fsdp2_grad_op"]
# What families call dimensions that most call as Llama does.
NAMES = {
    "opt": {"intermediate_size": "ffn_dim"},
    "gpt_neo": {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    "distilbert": {
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    },
}
MORE = {
    "opt": {"word_embed_proj_dim": "hidden_size", "ffn_dim": "intermediate_size"},
    "albert": {"embedding_size": "hidden_size"},
    "electra": {"embedding_size": "hidden_size"},
}


def _config(draw: random.Random, family: str) -> dict:
    heads = draw.choice((2, 4))
    sizes = {
        "hidden_size": heads * draw.choice((16, 32)),
        "intermediate_size": draw.choice((96, 160, 232)),
        "num_hidden_layers": draw.choice((2, 3, 5)),
        "num_attention_heads": heads,
    }
    config = {NAMES.get(family, {}).get(name, name): size for name, size in sizes.items()}
    config |= {name: sizes[like] for name, like in MORE.get(family, {}).items()}
    groups = draw.choice((1, 2))
    if family in ("deit", "dinov2", "vit_msn"):
        return {"model_type": family, "image_size": 32, "patch_size": 8, **config}
    config |= {"vocab_size": draw.choice((500, 1024)), "max_position_embeddings": 128}
    config |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "gpt_neo":
        config |= {"attention_types": [[["global", "local"], 1]], "num_layers": 2}
    if family not in ("opt", "gpt_neo", "biogpt", *ENCODERS):
        config["num_key_value_heads"] = heads // groups
    if family in ("granitemoe", "olmoe", "qwen2_moe", "phimoe"):
        config |= {"num_local_experts": 4} if family in ("granitemoe", "phimoe") else {"num_experts": 4}
        config["num_experts_per_tok"] = 2
    return {"model_type": family, **config}


def cells() -> list[dict]:
    """Return the cells of both draws."""
    return [*_drawn(SEED, FAMILIES, CELLS), *_drawn(MORE_SEED, MORE_FAMILIES, MORE_CELLS)]


def _drawn(seed: int, among: list[str], count: int) -> list[dict]:
    """Draw cells: each family once before any comes again, in a shuffled order."""
    draw = random.Random(seed)
    families = draw.sample(among, len(among))
    return [
        {
            "config": _config(draw, families[place % len(families)]),
            "arm": draw.choice(ARMS),
            "ranks": draw.choice((2, 4, 8, 64)),
            "precision": draw.choice(("fp32", "bf16", "bf16_cast", "bf16_pure")),
            "micro_batch": draw.choice((1, 2, 3)),
            "accumulation": draw.choice((1, 2)),
            "sequence": draw.choice((32, 48, 64)),
            "checkpointing": draw.random() < 0.3,
        }
        for place in range(count)
    ]
