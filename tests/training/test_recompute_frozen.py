"""Recomputation of layers behind frozen embeddings, in both kinds and under each engine: real trainings."""

import json

import pytest

from tests.conftest import ranks_of

# What reentrant recomputation does with frozen embeddings whose output requires no gradient: if only adapters train,
# and if the head trains, too. All other combinations have the losses of a training without recomputation.
NO_GRADIENT = "stops at the first backward pass (the loss has no grad_fn)"
SILENT = "leaves the adapters as they are and says nothing"
REENTRANT = {
    "DDP": (NO_GRADIENT, "stops in the second step (a reduction has not finished)"),
    "ZeRO": ("stops at the first backward pass (loss must be a scalar tensor)", SILENT),
    "FSDP2": (NO_GRADIENT, SILENT),
}
SCRIPT = """
import json, sys, torch, transformers
from accelerate import PartialState

PartialState(cpu=True)
rank = torch.distributed.get_rank()
config = transformers.LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=4)
ZERO = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False}

def losses(engine, trained, reentrant, inputs_require):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    for name, tensor in model.named_parameters():
        is_adapter = "q_proj" in name or "v_proj" in name
        tensor.requires_grad_(is_adapter or trained in name)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if not inputs_require:
            model.disable_input_require_grads()
    called = model
    if engine == "FSDP2":
        from torch.distributed.fsdp import fully_shard
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    if engine == "DDP":
        called = torch.nn.parallel.DistributedDataParallel(model)
    if engine.startswith("ZeRO"):
        import deepspeed
        zero = ZERO | {"zero_optimization": {"stage": int(engine[-1])}}
        called = deepspeed.initialize(model=model, optimizer=optimizer, config=zero)[0]
    rows = torch.Generator().manual_seed(rank)
    values = []
    for _ in range(3):
        ids = torch.randint(0, 128, (1, 8), generator=rows)
        loss = called(input_ids=ids, labels=ids).loss
        values.append(loss.item())
        if engine.startswith("ZeRO"):
            called.backward(loss)
            called.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return values

def outcome(*how):
    try:
        return losses(*how)
    except Exception as error:
        return str(error)

for engine in sys.argv[1:]:
    for trained in ("no other", "lm_head", "embed_tokens"):
        plain = losses(engine, trained, None, True)
        cells = {"non-reentrant": (False, False), "reentrant": (True, True), "by hand": (True, False)}
        seen = {name: outcome(engine, trained, *how) for name, how in cells.items()}
        seen = {name: "as without" if each == plain else each for name, each in seen.items()}
        if rank == 0:
            print("SEEN", json.dumps([engine, trained, seen]), flush=True)
"""
WORDS = {  # of the message, or of none, for an outcome
    NO_GRADIENT: "does not have a grad_fn",
    "stops in the second step (a reduction has not finished)": "Expected to have finished reduction",
    "stops at the first backward pass (loss must be a scalar tensor)": "loss must be a scalar tensor",
}


def is_seen(outcome: str, seen: str | list[float]) -> bool:
    return isinstance(seen, list) if outcome == SILENT else isinstance(seen, str) and WORDS[outcome] in seen


@pytest.mark.slow
def test_the_table_of_recomputation_with_frozen_embeddings(tmp_path):
    run = ranks_of(SCRIPT, tmp_path, "DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3", "FSDP2")
    lines = [json.loads(line.partition("SEEN ")[2]) for line in run.output.splitlines() if "SEEN " in line]
    assert len(lines) == 5 * 3, run.output
    for engine, trained, seen in lines:
        assert (seen["non-reentrant"], seen["reentrant"]) == ("as without", "as without"), (engine, trained)
        alone, with_head = REENTRANT[engine.split()[0]]
        expected = {"no other": alone, "lm_head": with_head}.get(trained)
        assert seen["by hand"] == "as without" if expected is None else is_seen(expected, seen["by hand"]), lines
