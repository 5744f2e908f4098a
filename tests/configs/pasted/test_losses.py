"""What a log's losses say, in the form of each trainer: of trainings that go wrong, of healthy ones, and in words."""

import math
import random

import pytest

from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.answer import answer
from study.configs.pasted.condense import COLOR
from study.configs.pasted.lines import Log
from tests.cases import for_each
from tests.configs.pasted.test_pasted import EXAMPLES

OVERFLOW = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}\n"
OF_DEEPSPEED = (
    "[INFO] [logging.py:107:log_dist] [Rank 0] step={step}, skipped={skipped}, lr=[{rate:.4g}], mom=[(0.9, 0.999)]"
)
# How programs print a step, with their source. Megatron: training.py, training_log. torchtitan: components/metrics.py,
# with its colours. LLaMA-Factory: train/callbacks.py, LogCallback. nanotron: as its log parsers read it. Lightning:
# `train_loss` with on_step and on_epoch. Others: as the logs in healthy/.
FORMS = {
    "Trainer": "{{'loss': {loss:.4f}, 'grad_norm': {norm:.4f}, 'learning_rate': {rate:.4g}, 'epoch': {epoch:.2f}}}",
    "Trainer 5": (
        "{{'loss': '{loss:.4g}', 'grad_norm': '{norm:.4g}', 'learning_rate': '{rate:.4g}', 'epoch': '{epoch:.4g}'}}"
    ),
    "trainer_state.json": (
        '      "grad_norm": {norm:.4f},\n      "learning_rate": {rate:.4g},\n      "loss": {loss:.4f},\n     '
        ' "step": {step}'
    ),
    "axolotl": (
        "{{'loss': '{loss:.4f}', 'grad_norm': '{norm:.4f}', 'learning_rate': '{rate:.4g}', 'ppl': '3.4', "
        "'memory/max_active (GiB)': '12.1', 'epoch': '{epoch:.2f}'}}"
    ),
    "LLaMA-Factory": (
        '{{"current_steps": {step}, "total_steps": 906, "loss": {loss:.4f}, "lr": {rate:.4g}, "epoch": '
        '{epoch:.3f}, "percentage": 99.34, "elapsed_time": "1:44:23"}}'
    ),
    "LLaMA-Factory's page": (
        "[INFO|2026-03-02 10:00:00] llamafactory.train.callbacks:143 >> {{'loss': {loss:.4f}, "
        "'learning_rate': {rate:2.4e}, 'epoch': {epoch:.2f}, 'throughput': 1234.56}}"
    ),
    "DeepSpeed": OF_DEEPSPEED.replace("{skipped}", "0") + "\n[Rank 0] step {step}: loss {loss:.4f}, lr {rate:.2e}",
    "tqdm": " 12%|#2        | {step}/400 [00:12<01:30,  4.01it/s, loss={loss:.3f}, lr={rate:.2e}]",
    "torchrun": "[rank0]: step {step} loss = {loss:.4f} grad_norm = {norm:.3f}",
    "Megatron": (
        " iteration {step:8d}/  250000 | consumed samples:       246784 | learning rate: {rate:.6E} | global "
        "batch size:  1024 | load_balancing_loss: 1.012345E+00 | lm loss: {loss:.6E} | loss scale: 1.0 | "
        "grad norm: {norm:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |"
    ),
    "torchtitan": (
        "[rank0]:[titan] 2026-03-02 22:30:50,322 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: "
        "{loss:8.5f}  \x1b[38;2;180;60;0mgrad_norm: {norm:7.4f}  \x1b[36mmemory: 49.66GiB(52.28%)  "
        "\x1b[34mtps: 5,856\x1b[39m"
    ),
    "nanotron": (
        "12/21 01:39:51 [INFO|DP=0|TP=0|node7]: iteration: {step} / 1500000 | consumed_tokens: 480B | "
        "time_per_iteration_ms: 8.79K | global_batch_size: 1.6M | grad_norm: {norm:.3g} | lm_loss: "
        "{loss:.3g} | lr: {rate:.3g} | model_tflops_per_gpu: 15.4"
    ),
    "Lightning": (
        "Epoch 0:   6%|6         | {step}/1563 [00:06<01:44, 14.19it/s, v_num=0, train_loss_step={loss:.3f}, "
        "train_loss_epoch=2.100]"
    ),
    "torchtune": "Step {step} | loss:{loss:.6f} lr:{rate:.4g} tokens_per_second_per_gpu:42.4 grad_norm:{norm:.4f}",
    "json lines": '{{"step": {step}, "train/loss": {loss:.4f}, "train/grad_norm": {norm:.4f}, "train/lr": {rate:.4g}}}',
    "W&B's summary": "wandb:     train/grad_norm {norm:.5f}\nwandb:          train/loss {loss:.5f}",
}
TABLES = {
    "TensorBoard": ("loss.csv\nWall time,Step,Value", "1698314503.5367975,{step},{loss:.10f}"),
    "W&B": ('"Step","run - train/loss","run - train/loss__MIN"', '"{step}","{loss:.4f}","{loss:.4f}"'),
    "Lightning's CSV": ("epoch,lr-AdamW,step,train_loss,val_loss", "0,{rate:.4g},{step},{loss:.4f},"),
    "CSV": ("step,eval_loss,loss,grad_norm", "{step},9.9,{loss:.4f},{norm:.4f}"),
    "notebook": ("Step\tTraining Loss\tValidation Loss", "{step}\t{loss:.6f}\tNo log"),
}


def log(losses, form: str = "Trainer", norms=(), rate=2e-5, epochs: float = 0.9, more: str = "") -> str:
    """Return the lines of a log; `more` are keys of a Trainer's line, before its epoch."""
    draw = random.Random(len(losses))
    head, row = TABLES.get(form, ("", FORMS.get(form, "")))
    lines = [head] if head else []
    for number, loss in enumerate(losses, 1):
        values = {"step": 10 * number, "loss": loss, "epoch": epochs * number / len(losses)}
        values["norm"] = norms[number - 1] if norms else draw.uniform(0.8, 2)
        values["rate"] = rate(number) if callable(rate) else rate
        lines.append(row.format(**values).replace("'epoch'", f"{more}'epoch'"))
    return "\n".join(lines) + "\n"


def falling(count: int, first: float = 2.4, last: float = 1.3, noise: float = 0.01) -> list[float]:
    draw = random.Random(count)
    return [(last + (first - last) * math.exp(-5 * step / count)) * draw.gauss(1, noise) for step in range(count)]


def evaluated(blocks: list[list[float]], losses: list[float]) -> str:
    """Return losses of training, with one of evaluation after each block."""
    lines = [
        log(block) + f"{{'eval_loss': {loss}, 'eval_runtime': 20.1}}\n"
        for block, loss in zip(blocks, losses, strict=True)
    ]
    return "".join(lines)


LOST = [1.61, 1.52, 1.49, 7.91, 8.33, 7.95]
EXPLODED = [1.2, 1.1, 38.2, 4120.7, 88.0, 12.2]


@for_each("form", [*FORMS, *TABLES])
def test_a_run_that_diverges_is_read_in_the_form_of_each_trainer(form):
    text = COLOR.sub("", log(LOST, form, EXPLODED))
    assert Log.of(text).losses.values == pytest.approx(LOST, abs=0.01)
    assert "loss-jumps-and-stays" in [each.id for each in answer(text).found]


SHORT, NONE = {"norms": [1.1, 38, 4120]}, 6 * [0.0]
A = falling(30)
PARTED = [each * (1 + 0.01 * max(0, number - 8)) for number, each in enumerate(A)]
GROWN = [each * (1 + 5e-4 * number * (-1) ** number) for number, each in enumerate(A)]
WRONG = {
    "diverges within three lines": (log(LOST[2:5], **SHORT), "loss-jumps-and-stays"),
    "diverges, without norms": (log(LOST, "tqdm"), "loss-jumps-and-stays"),
    "a stair": (log([1.31, 1.3, 1.32, 1.31, 0.88, 0.87, 0.88, 0.87, 0.4, 0.41, 0.4, 0.4], epochs=3), "loss-stair"),
    "ln of a known model's words": (
        f"model_id: Qwen/Qwen2.5-7B\n{log(6 * [11.932], norms=NONE)}",
        "norm-zero ln(152,064)",
    ),
    "ln of usual words": (log([11.7621, 11.7618, 11.7623, 11.7619], norms=NONE), "norm-zero ln(128,256)"),
    "ln of a printed config": (
        f'{{\n "hidden_size": 64,\n "vocab_size": 49152\n}}\n{log(6 * [10.8027], norms=NONE)}',
        "norm-zero ln",
    ),
    "ln, with norms": (log(6 * [11.762]), "loss-plateau 128,256"),
    "constant, norm 0": (log(9 * [2.3145], norms=9 * [0.0]), "loss-stands-still"),
    "constant, norm nan": (log(9 * [2.3145], norms=9 * [math.nan]), "norm-nan"),
    "0": (log(6 * [0.0], "LLaMA-Factory"), "loss-zero"),
    "nan from the first step": (log(4 * [math.nan]), "loss-nan"),
    "nan, filled to five characters": (log(4 * [math.nan], "Lightning").replace("nan", "nan.0"), "loss-nan"),
    "nan later": (log([*A, math.nan, math.nan], "Megatron"), "loss-nan"),
    "overflow to the lowest scale": (
        "".join(OVERFLOW.format(2**n, 2**n // 2) for n in range(16, 0, -1)),
        "overflow-skips",
    ),
    "a few overflows, norm and rate 0": (
        "\n".join(
            OVERFLOW.format(2**n, 2**n // 2) + log([8.5 + n / 99], norms=[0.0], rate=0) for n in range(16, 11, -1)
        ),
        "overflow-skips",
    ),
    "norm 0 after overflows": (OVERFLOW.format(65536, 32768) + "\n" + log(6 * [8.5], norms=NONE), "norm-zero"),
    "overflow of the fused optimizer": (
        30 * "[Rank 0] Overflow detected. Skipping step. Attempted loss scale: 4, reducing to 4\n",
        "overflow-skips",
    ),
    "overflow without a scale": (
        30 * "[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite\n",
        "overflow-skips",
    ),
    "DeepSpeed skips": (OF_DEEPSPEED.format(step=90, skipped=88, rate=0), "overflow-skips"),
    "Megatron skips": (30 * " iteration 9/ 90 | number of skipped iterations:   1 |\n", "overflow-skips"),
    "rate 0": (log(A, "LLaMA-Factory", rate=0), "rate-zero"),
    "DeepSpeed's rate 0": (
        "\n".join(OF_DEEPSPEED.format(step=n, skipped=0, rate=0) for n in (10, 20, 30)),
        "rate-zero",
    ),
    "8 times evaluation": (
        "gradient_accumulation_steps: 8\n" + evaluated([[13.06, 12.7]], [1.5504]),
        "train-above-evaluation",
    ),
    "1/4 of evaluation": (
        "gradient_accumulation_steps: 4\n" + evaluated([[0.391], [0.38]], [1.5504, 1.52]),
        "train-below-evaluation 4 micro-batches",
    ),
    "1/8 of evaluation": (
        "world_size: 8\n" + evaluated([[0.195], [0.19]], [1.5504, 1.52]),
        "train-below-evaluation 8 ranks",
    ),
    "8 times evaluation, nobody says why": (
        evaluated([[13.06, 12.7, 12.4]], [1.55]),
        "train-above-evaluation if it has 8",
    ),
    "evaluation as before": (evaluated([[2.3], [2.2], [2.1]], 3 * [2.4113]), "loss-evaluated-same"),
    "two logs, 4 times": (f"--nproc_per_node 4\n{log(A)}{log([4 * each for each in A])}", "logs-apart-loss"),
    "two logs, rounding": (
        f"DDP\n{log(A)}ZeRO-3\n{log([each + 0.0004 * (-1) ** n for n, each in enumerate(A)])}",
        "logs-part-rounded 0.0",
    ),
    "two logs, not rounding": (
        f"DDP\n{log(A, 'json lines')}ZeRO-3\n{log(PARTED, 'json lines')}",
        "logs-part at step 100 ",
    ),
    "two logs, from the first line": (
        f"DDP\n{log(A)}ZeRO-3\n{log([each + 0.35 for each in A])}",
        "logs-part , the first,",
    ),
}


@for_each("case", WRONG)
def test_what_goes_wrong_is_told_first(case):
    text, expected = WRONG[case]
    told, (id, _, words) = answer(text), expected.partition(" ")
    assert told.id == id, told.found
    assert words in told.found[0].sentence


PAIRS, REWARD = "'rewards/chosen': 0.0, 'rewards/margins': 0.0, ", "'reward': 0.2, 'reward_std': 0.1, 'kl': 0.0004, "
WELL = {
    "noise": log([1.2 * random.Random(number).gauss(1, 0.4) for number in range(200)]),
    "warm-up": log([10.85, 10.87, 10.86, 10.85, 10.82, 10.8, 10.71], rate=lambda number: 1e-6 * (number - 1)),
    "high losses that come back, usual norms": log([*falling(40), 7.9, 6.1, 4.0, 2.1, 1.6, *falling(20, 1.4)]),
    "one spike at the end": log([1.5, 1.5, 1.4, 7.9], norms=[1, 1, 1, 400]),
    "two high lines, usual norms": log([1.6, 1.5, 1.5, 7.9, 8.3]),
    "a fall at the first steps": log([10.9, 8.2, 6.9, 6.1, 5.8, 5.6, 5.5]),
    "DPO at ln 2": log([0.6931, 0.6931, 0.6925, 0.69, 0.68, 0.66, 0.63], more=PAIRS),
    "GRPO around 0": log(
        [0.0, 0.0, 0.0001, -0.0002, 0.0003, 0.0, 0.001], norms=[0, 0.1, 0.1, 0.2, 0.1, 0.3, 0.1], more=REWARD
    ),
    "a mixture of experts": log(falling(40, 10.9, 3.2), "Megatron"),
    "distillation": log(falling(40, 38, 21), more="'kl_loss': 20.1, "),
    "epochs without a stair": log(falling(90, 2, 0.5), epochs=3),
    "epochs of single rows": log(
        [*(1.21 * random.Random(n).gauss(1, 0.1) for n in range(40)), *falling(40, 0.99, 0.98, 0.1)], epochs=2
    ),
    "one overflow in a thousand steps": "".join(
        OVERFLOW.format(131072, 65536) + log([1.3 - n / 200], "tqdm") for n in range(40)
    ),
    "DeepSpeed's first steps": "\n".join(
        OF_DEEPSPEED.format(step=n, skipped=min(n, 11), rate=1e-7 * n) for n in range(10, 99, 10)
    ),
    "Megatron's first steps": 12 * " iteration 9/ 90 | number of skipped iterations:   1 |\n" + log(A, "Megatron"),
    "two logs that agree": f"DDP\n{log(A)}ZeRO-3\n{log(A)}",
    "two runs, not compared": f"{log(A)}{log([each + 0.35 for each in A])}",
    "rounding that grew": f"DDP\n{log(A)}ZeRO-3\n{log(GROWN)}",
    "evaluation far above, learnt by heart": "8 GPUs\ngradient_accumulation_steps: 4\n"
    + evaluated([[0.4], [0.1], [0.02]], [1.6, 1.7, 1.8]),
    "a loss that fell fast before evaluation": evaluated([[10.9, 8.2, 6.6]], [2.1]),
    "evaluation at the end of learning": evaluated([[1.2], [1.19], [1.18], [1.18]], [1.2113, 1.2109, 1.2109, 1.2108]),
    "evaluation that a bar repeats": "".join(
        f"Epoch 2:  {n}%|#2      | {n}/99 [00:06<01:44,  1.19it/s, v_num=0, train_loss=2.{n}, val_loss=2.2901]\n"
        for n in range(30, 20, -1)
    ),
    "TensorBoard's table of no loss": log(LOST, "TensorBoard").replace("loss.csv\n", ""),
}


@for_each("case", WELL)
def test_a_healthy_training_stays_silent(case):
    assert answer(WELL[case]).found == ()


SAID = {
    "the loss suddenly jumps from 1.5 to 8 and never comes back": "loss-jumps-and-stays",
    "my loss exploded at step 400 and stayed at 7": "loss-jumps-and-stays",
    "loss spikes and does not recover": "loss-jumps-and-stays",
    "training diverges after 2000 steps, loss goes up to 9": "loss-goes-up",
    "grad_norm explodes to 4000 and then the loss is 8": "loss-goes-up",
    "loss drops sharply at the start of each epoch and is flat within": "loss-stair",
    "staircase loss curve, a drop at every epoch boundary": "loss-stair",
    "why does my training loss fall in steps exactly when a new epoch begins": "loss-stair",
    "loss stays at 10.37 which is ln(32000)": "loss-plateau",
    "loss is stuck at 11.76 from the beginning": "loss-plateau",
    "loss is constant and grad_norm is 0": "norm-zero",
    "loss is 0.0 from the first step": "loss-zero",
    "loss becomes nan after 300 steps": "loss-nan",
    "fp16: every step is skipped because of overflow until the loss scale is 1": "overflow-skips",
    "learning rate stays at 0": "rate-zero",
    "eval_loss is exactly the same at every evaluation": "loss-evaluated-same",
    "validation loss does not change at all": "loss-evaluated-same",
    "my training loss is ten times the eval loss": "times-in-words",
    "loss differs between DDP and ZeRO-2 in the fourth decimal": "logs-part-rounded",
    "DDP and ZeRO-3 losses agree for 100 steps and then drift apart slightly": "logs-part-rounded",
    "the loss falls well and goes down to 1.2": "",
    "the loss drops suddenly in the first steps, is that normal": "",
}


@for_each("words", SAID)
def test_a_strangers_words_find_what_belongs_to_them(words):
    found = [each.id for each in answer("", words).found]
    assert (SAID[words] in found) if SAID[words] else not found


@pytest.mark.parametrize(
    "words",
    [
        "my loss went from 2.1 to 7.9 after switching from DDP to ZeRO stage 2",
        "my loss is 7.9 with ZeRO stage 2 instead of 2.1 with DDP",
        "since we moved to fsdp the loss is strange",
    ],
)
def test_who_compares_two_ways_to_train_is_asked_for_both(words):
    assert "study diff" in str(answer("", words).questions)


def test_each_sign_of_a_log_has_words_without_braces():
    for id in {id for id in SAID.values() if id in EXAMPLES and id != "times-in-words"}:
        words = next(words for words in SAID if SAID[words] == id)
        seen = next(each for each in answer("", words).found if each.id == id)
        assert not {*"{}"} & {*seen.sentence, *seen.remedy}


WELL_UP_TO_9 = "".join(
    f"{{'loss': {2.4 - step / 99:.3f}, 'grad_norm': 1.{step}, 'epoch': 0.{step}}}\n" for step in range(9)
)


@pytest.mark.parametrize(
    ("lines", "id", "quoted"),
    [
        ((("2.31", "nan"), *3 * [("0.0", "nan")]), "loss-zero", "{'loss': 2.31, 'grad_norm': nan"),
        ((("7841", "inf"), ("2.31", "nan"), ("0.0", "nan")), "loss-zero", "{'loss': 7841, 'grad_norm': inf"),
        ((("2.31", "nan"), ("2.32", "1.1"), *3 * [("0.0", "nan")]), "loss-zero", "{'loss': 0.0, 'grad_norm': nan"),
        (3 * (("0.0", "nan"),), "loss-zero", "{'loss': 0.0, 'grad_norm': nan"),
        ((("2.31", "inf"), ("2.32", "nan"), ("2.33", "nan")), "norm-nan", "{'loss': 2.31, 'grad_norm': inf"),
    ],
)
def test_the_line_that_is_quoted_is_the_first_with_trouble(lines, id, quoted):
    told = answer(
        WELL_UP_TO_9 + "".join(f"{{'loss': {loss}, 'grad_norm': {norm}, 'epoch': 0.9}}\n" for loss, norm in lines)
    )
    assert (told.id, told.found[0].line.startswith(quoted)) == (id, True)


def test_the_overflow_that_is_quoted_is_the_first_of_those_without_a_step_between():
    before = OVERFLOW.format(2**16, 2**15) + OVERFLOW.format(2**15, 2**14)
    told = answer(before + "".join(OVERFLOW.format(2**scale, 2 ** (scale - 1)) for scale in range(24, 0, -1)))
    assert (told.id, f"scale: {2**24}," in told.found[0].line) == ("overflow-skips", True)


TIMED = [
    "step {step} loss 2.3 step_time {s:.2f}s tokens/s 40000",
    "iter {step}: loss 2.3, time {ms:.2f}ms, mfu 30%",
    "iteration {step}/ 100 | elapsed time per iteration (ms): {ms:.1f} | lm loss: 2.3E+00",
    "{{'loss': 2.3, 'step_time': {s:.3f}, 'epoch': 0.{step}}}",
    "step {step} loss 2.3 ({s:.2f} s/step)",
    "micro_step=20/global_step={step}, RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec={rate:.3f}, MemAllocated=1GB",
    "step: {step}  loss: 2.3  memory: 40GiB  tps: {rate:.0f},000  mfu: 30%",
    "step {step} | loss 2.3 | {rate:.3f} tok/s",
    "iteration {step} loss=2.3 {rate:.2f} it/s lr=1e-5",
    "Step {step} | loss:2.3 tokens_per_second_per_gpu:{rate:.3f}",
    "[step {step}] loss 2.3, 12 rows, {rate:.3f} samples/sec",
]


@pytest.mark.parametrize("form", TIMED)
def test_steps_that_grow_are_told_in_whatever_form_their_time_stands(form):
    def lines(seconds):
        rows = [form.replace("2.3", f"2.{99 - step}") for step in range(99)]  # a loss that stands still is another sign
        return "\n".join(
            row.format(step=step, s=s, ms=1000 * s, rate=40 / s)
            for step, (row, s) in enumerate(zip(rows, seconds, strict=False))
        )

    told = answer(lines([0.81, 0.80, 2.95, 3.05]))
    assert told.id == "steps-slow-down"
    # The first compiles; one saves.
    for well in ([0.81, 0.80, 1.2, 1.3], [30.0, 0.8, 2.9, 3.0], [0.81, 0.80, 0.82, 3.05]):
        assert answer(lines(well)).id != "steps-slow-down"
    # From some line on, wherever that is: the more lines, the less it takes.
    for slow in (
        [9, *4 * [0.8], *7 * [1.4]],
        [*5 * [0.8], *12 * [1.4]],
        [*50 * [0.8], *9 * [2]],
        [*3 * [1], *3 * [3.7]],
    ):
        told = answer(lines(slow))
        assert told.id == "steps-slow-down"
        assert answer(lines(slow[::-1])).id != "steps-slow-down"
        assert answer(lines(12 * [0.8]) + BETWEEN_TEXTS + lines(12 * [9])).found == ()
    for well in ([*5 * [0.8], *7 * [1.1]], [0.8, 2.9, *5 * [0.8, 0.9], 3.0]):
        assert answer(lines(well)).id != "steps-slow-down"


@pytest.mark.parametrize("form", [TIMED[0], TIMED[6], TIMED[7], "[rank{rank}]: " + TIMED[6]])
def test_a_first_step_that_was_counted_otherwise_is_no_trend(form):
    def told(seconds):
        steps = enumerate(seconds)
        rows = [form.format(step=step, s=s, rate=40 / s, rank=rank) for step, s in steps for rank in range(4)]
        rows = rows if "{rank}" in form else rows[::4]
        return answer("\n".join(row.replace("2.3", f"2.{999 - at}") for at, row in enumerate(rows))).id

    assert told([0.4, 1.0, 1.05, 1.1, 1.15]) != "steps-slow-down"
    assert told([0.4, 1.0, 1.0]) != "steps-slow-down"
    assert told([0.9, 1.0, 1.3, 1.7, 2.2, 2.9]) == "steps-slow-down"


@pytest.mark.parametrize(
    "form", ["iteration: {step} / 99 | tokens_per_sec: {rate} | lm_loss: 9.{left}", "step {step} | {rate} tok/s"]
)
def test_thousands_of_tokens_are_fewer_than_millions(form):
    """As nanotron writes them: the first step compiles."""

    def told(*rates):
        rows = enumerate(rates)
        return answer("\n".join(form.format(step=step, rate=rate, left=99 - step) for step, rate in rows)).id

    assert told("466K", "3.71M", "3.7M", "3.72M", "3.7M", "3.69M") != "steps-slow-down"
    assert told("3.7M", "3.71M", "3.7M", "466K", "460K", "461K") == "steps-slow-down"


@pytest.mark.parametrize("epoch", ["nan", "inf", "1e400"])
def test_an_epoch_that_is_no_number_is_not_read(epoch):
    text = log(falling(30)).replace("'epoch': 0.9", f"'epoch': {epoch}")
    assert epoch in text
    assert answer(text).found == ()


@pytest.mark.parametrize("name", ["train_time", "total time"])
def test_a_time_since_the_start_is_not_that_of_a_step(name):
    """As speedruns of nanoGPT write it: their first steps have none."""
    form = "step:{}/1750 train_loss:{:.3f} {}:{}ms step_avg:130.10ms"
    rows = [form.format(step, 10.8 - step / 9, name, max(0, step - 9) * 130) for step in range(30)]
    assert answer("\n".join(rows)).id != "steps-slow-down"
    assert answer("\n".join(f"step {step} loss {9 - step / 9} step_time 0s" for step in range(30))).found == ()


TIMED_ONCE = "loss {:.3f} step_time {}s"
SLOWER = (1.1, 1.12, 1.31, 1.58, 1.97, 2.41)  # the second is hardly slower
GROWING = [
    " 1%|#   | {step}/999 [00:05<1:00:00, {s:.2f}s/it]",
    "{{'loss': {loss:.3f}, 'step_time': {s:.2f}}}",
    "{{'loss': {loss:.3f}, 'tokens_per_second': {rate:.0f}}}",
]


@pytest.mark.parametrize("form", GROWING)
@pytest.mark.parametrize("count", [5, 20, 60, 200])
def test_steps_that_grow_steadily_are_told_however_many_there_are(form, count):
    def told(first, last, noise=0.0):
        seconds = [first + (last - first) * at / count + noise * (at % 3) for at in range(count)]
        return answer(
            "\n".join(form.format(step=at, s=s, loss=9 - at / 99, rate=4e4 / s) for at, s in enumerate(seconds))
        ).id

    assert told(5, 11) == told(1, 200) == "steps-slow-down"
    assert answer("\n".join(TIMED_ONCE.format(2.4 - at / 99, s) for at, s in enumerate(SLOWER))).id == "steps-slow-down"
    assert told(5, 6) != "steps-slow-down" != told(5, 5, noise=2.0)


@pytest.mark.parametrize("form", ["step {n} | loss {loss} | step_time {s} s", "step {n} loss {loss} {rate} tokens/s"])
@pytest.mark.parametrize(
    ("period", "lines", "late", "is_told"),
    [(10, 80, 14.2, True), (5, 20, 8, True), (10, 80, 2.5, False), (40, 80, 14.2, False), (25, 400, 3.5, False)],
)
def test_steps_that_stop_at_regular_places_are_told_with_their_period_and_share(form, period, lines, late, is_told):
    seconds = [late if n % period == 0 else 1.1 for n in range(1, lines + 1)]
    seconds[1] = 1.3
    told = answer("\n".join(form.format(n=n, loss=3 - n / 200, s=s, rate=900 / s) for n, s in enumerate(seconds, 1)))
    assert (told.id == "steps-stop") is is_told
    if is_told:
        share = sum(s - 1.1 for s in seconds if s == late) / sum(seconds)
        assert f"One timed line in {period} " in told.found[0].sentence
        assert f"that is {share:.0%} of the time" in told.found[0].sentence
        assert not any("seconds" in each for each in told.questions)


def test_single_slow_steps_are_no_period():
    seconds = [40.0 if n in (1, 8, 21, 55, 70) else 1.1 for n in range(80)]
    log = "\n".join(f"step {n} | loss {3 - n / 200} | step_time {s} s" for n, s in enumerate(seconds))
    told = answer(log, "slow")
    assert "steps-stop" not in [each.id for each in told.found]
    assert not any("seconds" in each for each in told.questions)


@pytest.mark.parametrize("asked", ["slow", "hang", "it hangs", "steps are slow", "loss is nan", ""])
def test_what_was_asked_and_not_found_is_said(asked):
    lines = "".join(f"step {step} loss {loss} step_time 1.0s\n" for step, loss in enumerate((2.4, 2.3, "nan", "nan")))
    told = answer(lines, asked)
    assert told.id == "loss-nan"
    assert "the time of 4 steps" in told.read
    assert any(note.startswith("You asked about") for note in told.notes) == ("slow" in asked or "hang" in asked)


def test_a_fault_that_makes_nan_does_not_explain_losses_that_are_finite():
    stack = "deepspeed==0.15.4\n{'bf16': {'enabled': true}, 'zero_optimization': {'stage': 2, 'overlap_comm': true}}"
    finite = "\n".join(f"{{'loss': 11.9{digit}, 'grad_norm': 1.{digit}}}" for digit in (4, 3, 2))
    given = [(finite, "loss does not fall"), (finite, "the loss becomes nan later"), ("", "loss does not fall")]
    told = [answer(f"{stack}\n{log}", symptom) for log, symptom in given]
    is_blamed = ["overlap-buffer-freed" in {each.id for each in each.found} for each in told]
    assert is_blamed == [False, True, True]
    assert "overlap-buffer-freed" in {each.fault.id for each in told[0].applying}


def test_all_that_makes_steps_slow_is_told_together():
    causes = {
        "offload-slow": '"offload_optimizer": {"device": "cpu"}',
        "small-buckets-slow": '"reduce_bucket_size": 500000',
        "prefetch-off-slow": '"stage3_prefetch_bucket_size": 0',
        "timers-slow": '"wall_clock_breakdown": true',
        "memory-pressure-slow": '"x": "14 pytorch allocator cache flushes since last step"',
        "sockets-between-nodes": '"y": "n1:41:41 [0] NCCL INFO NET/Socket : Using [0]eth0:10.1.0.7<0>"',
    }
    config = f'{{"zero_optimization": {{"stage": 3}}, {", ".join(causes.values())}}}'
    assert {*causes} <= {each.id for each in answer(config, "slow").found}
    well = '{"zero_optimization": {"stage3_prefetch_bucket_size": 0.5e8}, "wall_clock_breakdown": false}'
    assert not {*causes} & {each.id for each in answer(well, "slow").found}


def test_a_time_since_the_start_is_none_of_a_step():
    assert (
        answer("\n".join(f"step {step} loss {2.3 - step / 99:.3f} time {10 * step}" for step in range(1, 40))).found
        == ()
    )


def test_a_slow_saving_is_not_the_offloading():
    told = answer(
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}', "saving takes 20 minutes"
    )
    assert (told.id, told.unknown) == ("saving-slow", "")


UNUSED = "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters"


@pytest.mark.parametrize("words", ["", "DDP is slow", "slow"])
def test_a_line_of_healthy_trainings_that_costs_time_is_told_to_who_says_slow(words):
    told = answer(f"{UNUSED}\n{log(falling(30))}", words)
    assert told.id == ("no-unused-parameters" if words else "")


FLUSHES = "[WARNING] [stage3.py:2941:step] 3 pytorch allocator cache flushes since last step. this happens when"


def test_flushes_are_the_cause_where_steps_are_slow_and_else_a_note():
    slow = "\n".join(f"step {step} loss 2.3 step_time {s}s" for step, s in enumerate([0.81, 0.80, 2.95, 3.05]))
    assert answer(f"{slow}\n{FLUSHES}").id == "memory-pressure-slow"
    assert answer(FLUSHES, "slow").id == "memory-pressure-slow"
    alone = answer(f"{FLUSHES}\n{FLUSHES}")
    assert alone.found == ()
    assert any("6 flushes of PyTorch's cache in 2 warnings" in note for note in alone.notes)
    assert answer("\n".join([FLUSHES] * 3)).id == "memory-pressure-slow"
    assert answer(f'"offload_optimizer": {{"device": "cpu"}}\n{FLUSHES}', "slow").id == "memory-pressure-slow"


def test_gradients_that_explode_right_before_nan_are_named():
    def lines(norms):
        finite = [f"{{'loss': 1.9, 'grad_norm': {norm}, 'epoch': 0.0{at}}}" for at, norm in enumerate(norms)]
        return "\n".join([*finite, "{'loss': nan, 'grad_norm': nan, 'epoch': 0.1}"])

    named = "finite before, with grad_norm 48.2 in the last line and 0.8 until then"
    assert named in answer(lines([0.8, 0.81, 0.79, 48.2])).found[0].sentence
    assert "grad_norm" not in answer(lines([0.8, 0.81, 0.79, 2.2])).found[0].sentence
