"""An ordinary DeepSpeed loop. Two lines were added: the import, and `with watch(...)` around the loop.

torchrun --standalone --nproc_per_node 2 examples/deepspeed_loop.py --stage 2 --run_dir runs/mine

It ends with the last loss. On CPUs the first start silently compiles an operator of DeepSpeed before it trains: on two
busy cores the first took four minutes, the second 48 seconds. If it is stopped while it compiles, the next start waits
for ever: GUIDE.md says which `lock` to delete.
"""

import argparse

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from study.watch import watch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run_dir", default="runs/deepspeed_loop")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--local_rank", type=int)
    args = parser.parse_args()

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": args.stage,
            "reduce_bucket_size": 100_000,
            "stage3_prefetch_bucket_size": 100_000,
        },
    }
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    set_seed(42)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())

    with watch(model=engine, run_dir=args.run_dir):
        engine.train()
        for _ in range(args.steps * args.accumulation):
            ids = torch.randint(0, 1000, (4, 32), generator=generator).to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
    if torch.distributed.get_rank() == 0:
        print(f"last loss {loss.item():.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
