"""What the four documents print in their tables and figures, as rows. The claims say what to think of it."""

# Document 000: Gemma2-9B on eight H100, 2048 tokens, bfloat16, effective batch 144 unless said otherwise.
MODEL_000, RANKS_000, SEQUENCE_000, BATCH_000 = "gemma2-9b", 8, 2048, 144
MEMORY_000 = {"ddp": 76e9, "zero2": 45e9, "zero3": 28e9}  # "Memory Utilization"
TOKENS_PER_S_AND_GPU_000 = {"ddp": 2847, "zero2": 2698, "zero3": 2234}  # "Training Throughput"
STEPS_PER_HOUR_000 = {"ddp": 385, "zero2": 365, "zero3": 302}
# "Communication Amortization Effects": speed over DDP's, for effective batches from and to.
BATCHES_000 = (
    {"from": 32, "to": 64, "zero2": 0.92, "zero3": 0.72},
    {"from": 96, "to": 144, "zero2": 0.95, "zero3": 0.78},
    {"from": 192, "to": 384, "zero2": 0.96, "zero3": 0.85},
    {"from": 512, "to": 512, "zero2": 0.97, "zero3": 0.89},  # "512+"
)
# "Communication Overhead Analysis": traffic over ZeRO-0's, of which it also says that it moves nothing in a step.
TRAFFIC_000 = {"zero2": 2.0, "zero3": 4.0}

# Document 001: "Overcoming Bottlenecks", 20 billion parameters on eight GPUs.
OFFLOAD_001 = (
    {"arm": "ddp", "outcome": "OOM", "peak bytes": 48e9, "samples/s": None},
    {"arm": "zero3_cpu", "outcome": "done", "peak bytes": 12e9, "samples/s": 1200},
    {"arm": "zero3_nvme", "outcome": "done", "peak bytes": 8e9, "samples/s": 950},
)

# Document 002: figure 2 has no numbers in the text but these. BERT-large, one A100.
SMALLEST_SPEEDUP_002 = -0.05  # "almost 5 %" slower
WORTHWHILE_FROM_BYTES_002 = 2e9  # "crossing the 2GB barrier", read as the size of the fp32 weights

# Document 003: scenarios 1 to 3, four GPUs, a model whose weights take 4 GB; read as 10^9 parameters in fp32.
RANKS_003, PARAMETERS_003 = 4, 1e9
MEMORY_003 = {
    "zero1": {"weights": 4e9, "gradients": 4e9, "optimizer": 1e9},
    "zero2": {"weights": 4e9, "gradients": 1e9, "optimizer": 1e9},  # and, a sentence later, "approximately 5 GB"
    "zero3": {"weights": 1e9, "gradients": 1e9, "optimizer": 1e9},
}
