"""A rehearsal in words: which moment is the peak, which other arm would fit, what the script decided."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from study.records.sections import Observed
from study.rehearsal.on_gpu import OnGpu
from study.rehearsal.request import Answer, Failure, Moment, Request
from study.rehearsal.start import Tried
from study.report import estimates, rehearsals
from study.report.rehearsals import Peak

MOMENTS = [
    Moment("evaluation", 0, 1, parts={"logits": 3}),
    Moment("evaluation", 1, 2, parts={"logits": 5, "weights": 1}),
    Moment("saving", 2, 3, parts={"weights": 9}),
]


@pytest.mark.parametrize(
    ("held", "when", "parts"),
    [
        ({"peak": 9, "training": 9, "saving": 9}, "step 2", {"gradients": 7}),
        ({"peak": 9, "training": 8, "saving": 9}, "saving", {"weights": 9}),
        ({"peak": 9, "training": 8, "evaluation": 9}, "evaluation", {"logits": 5, "weights": 1}),
        ({"peak": 9, "training": 8, "evaluation": 6, "whole_evaluation": 9}, "evaluation", {"logits": 5, "weights": 1}),
    ],
)
def test_the_peak_is_of_an_update_unless_another_moment_holds_more(held, when, parts):
    answer = Answer(peaks=[3, 9, 8], moments=MOMENTS)
    assert Peak.of(answer, OnGpu(reserved=0, driver=0, host=0, **held), {"gradients": 7}) == Peak(when, parts)


def said_of(script: Path, after_step: dict, wrapper=None, batch_bytes: int = 0, **parts) -> str:
    rank = SimpleNamespace(after_step=after_step)
    components = SimpleNamespace(per_rank=[rank])
    observed = SimpleNamespace(wrapper=wrapper)
    record = SimpleNamespace(memory=SimpleNamespace(components=components), observed=observed)
    device = OnGpu(peak=10**8, reserved=0, driver=0, host=0)
    request = SimpleNamespace(script=str(script), steps=2)
    answer, peak = Answer(batch_bytes=batch_bytes), Peak("step 2", {"weights": 1, **parts})
    of = SimpleNamespace(record=record, device=device, request=request, answer=answer, peak=peak)
    return " ".join(rehearsals.parts_of_peak(of))


@pytest.mark.parametrize(("kept", "is_told"), [(6, True), (4, False)])
def test_outputs_that_a_script_keeps_after_a_step_are_told_with_their_line(kept, is_told, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("for batch in loader:\n    out = model(**batch)\n    out.loss.backward()\n    optimizer.step()\n")
    said = said_of(script, {"activations": kept * 10**6})
    assert (f"When the optimizer steps, {kept} MB of activations are still held" in said) == is_told
    assert ("what `out = model(**batch)` gives" in said) == is_told
    assert "are still held" not in said_of(script, {"activations": kept * 10**6}, batch_bytes=10**6)
    script.write_text("train()\n")
    assert ("a model's outputs" in said_of(script, {"activations": kept * 10**6})) == is_told


@pytest.mark.parametrize("when", ["evaluation", "saving"])
def test_a_moment_before_the_last_update_has_no_parts_and_says_why(when):
    of = SimpleNamespace(peak=Peak(when, {}), answer=Answer(updates=3), request=SimpleNamespace(steps=2))
    said = f"What the peak consists of was not seen: this {when} came before the last update."
    assert rehearsals.parts_of_peak(of) == [said]
    of.request.steps = 3
    assert "another one shows it" in rehearsals.parts_of_peak(of)[0]


def test_an_evaluation_without_a_loader_is_not_denied():
    device, request = OnGpu(peak=9, reserved=0, driver=0, host=0), SimpleNamespace(evaluate=True)
    for batches, begins in (
        (0, "Whether it evaluated is not known"),
        (3, "It did not evaluate in its first 3 updates"),
    ):
        answer = Answer(updates=3, batches=batches)
        (said,) = rehearsals.evaluation(SimpleNamespace(device=device, answer=answer, request=request))
        assert said.startswith(begins)


@pytest.mark.parametrize(("wrapper", "is_told"), [("DistributedDataParallel", True), ("DeepSpeedEngine", False)])
def test_buckets_beside_gradients_are_told_of_ddp_alone(wrapper, is_told, tmp_path):
    assert ("[ddp_buckets_beside]" in said_of(tmp_path, {}, wrapper, buckets=1)) == is_told


def test_an_evaluation_that_is_not_extrapolated_says_what_it_does_not_count():
    answer = Answer(moments=[Moment("evaluation", 0, 1, batches_left=6)])

    def said(**held) -> str:
        device = OnGpu(peak=9, reserved=0, driver=0, host=0, evaluation=8, **held)
        return " ".join(rehearsals.evaluation(SimpleNamespace(device=device, answer=answer)))

    assert said() == (
        "Evaluation peaks at 8 bytes. At most 4 batches of a loader are run: "
        "predictions that are kept over more batches are not counted."
    )
    assert "not counted" not in said(whole_evaluation=9)


@pytest.mark.parametrize(
    ("driver", "ends"),
    [
        (
            84 * 2**30,
            "more than 80 GiB: it does not fit. PyTorch would reserve 82.0 GiB, and the CUDA context and NCCL take 2.0",
        ),
        (78 * 2**30, "would show 78.0 of 80 GiB: it does not fit, as its tensors leave less than the 5.8 GiB kept for"),
        (60 * 2**30, "would show 60.0 of 80 GiB: it fits, with 5.8 GiB kept for"),
    ],
)
def test_a_verdict_about_a_gpu_has_the_peak_in_its_unit_too(driver, ends):
    fits = "no" if driver > 70 * 2**30 else "yes"
    device = OnGpu(peak=71 * 10**9, training=71 * 10**9, reserved=driver - 2 * 2**30, driver=driver, host=0, fits=fits)
    request = Request("train.py", [], 4, 4, 2, gpu="H100-80GB")
    of = SimpleNamespace(request=request, device=device, peak=Peak("step 2", {}))
    said = rehearsals.verdict(of)
    assert "peaks at 71 GB (66.1 GiB) in step 2" in said
    assert ends in said


def test_the_least_arm_that_fits_is_named_if_the_scripts_own_does_not():
    rows = [
        Tried("zero2", 9, 9, "yes"),
        Tried("zero3", 5, 5, "only just"),
        Tried("ddp", 1, 1, "no"),
        Tried("x", error="e"),
    ]
    assert rehearsals.other_arm("no", rows) == ["With zero3 it fits only just: it peaks at 5 bytes."]
    assert rehearsals.other_arm("no", [Tried("ddp", 1, 1, "no")]) == []
    assert rehearsals.other_arm("no", []) == ["`--try zero2,zero3,zero3_cpu,fsdp2` rehearses it with other arms."]
    assert rehearsals.other_arm("yes", rows) == rehearsals.other_arm(None, rows) == []


@pytest.mark.parametrize(
    ("seen", "how"),
    [
        ({"stage": 0, "wrapper": "DeepSpeedEngine"}, "ZeRO stage 0"),
        ({"fsdp": {"units": 2}}, "FSDP2"),
        ({"wrapper": "FullyShardedDataParallel"}, "FSDP1"),
        ({"wrapper": "DistributedDataParallel"}, "DistributedDataParallel"),
        ({}, "one process"),
    ],
)
def test_what_the_script_decided_begins_with_how_it_shards(seen, how):
    assert rehearsals.sharding(Observed(**seen)) == how


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({}, True),
        ({"autocast": "bfloat16"}, False),
        ({"fsdp": {"gather_dtype": None}}, True),
        ({"fsdp": {"gather_dtype": "bfloat16"}}, False),
        ({"wrapper": "FullyShardedDataParallel"}, False),  # whose policy is not in the record
    ],
)
def test_that_a_script_trains_in_fp32_is_not_said_where_fsdp_gathers_in_16_bits(seen, says):
    assert bool(rehearsals.in_fp32(Observed(dtypes={"weights": "float32"}, **seen), "")) == says


@pytest.mark.parametrize(
    ("stage", "script", "remedy"),
    [
        (None, "model = DDP(model)\nmodel(x).backward()", "`torch.autocast("),
        (2, "engine, *_ = deepspeed.initialize(model=m)\nengine.backward(engine(x))", '`"bf16": {"enabled": true}`'),
        (2, "accelerator.backward(model(x))", "`accelerate launch --mixed_precision bf16`"),
        (None, "trainer = SFTTrainer(model)\ntrainer.train()", "bf16=True of a Trainer"),
        (None, "from trl.cli import main\nmain()", "bf16=True of a Trainer"),
    ],
)
def test_16_bits_are_asked_for_where_the_script_reads_it(stage, script, remedy):
    (said,) = rehearsals.in_fp32(Observed(dtypes={"weights": "float32"}, stage=stage), script)
    assert remedy in said
    assert ("--mixed_precision" in said) is ("backward" not in script or "accelerator" in script)


@pytest.mark.parametrize(
    ("ranks", "seen", "lines", "ids"),
    [
        (4, {"wrapper": "DistributedDataParallel"}, "if rank == 0:\n        dist.barrier()", ["hang_a_branch"]),
        (4, {}, "if rank == 0:\n        dist.barrier()", ["hang_a_branch"]),
        (1, {}, "if rank == 0:\n        dist.barrier()", []),
        (4, {"stage": 3}, "if rank == 0:\n        model.generate(rows)", ["hang_evaluation"]),
        (4, {"fsdp": {"units": 2}}, "if rank == 0:\n        model.generate(rows)", ["hang_evaluation"]),
        (4, {"stage": 2}, "if rank == 0:\n        model.generate(rows)", []),
        (4, {"stage": 2}, "if loss.isnan():\n        continue\n    loss.backward()", ["batch_skipped_alone"]),
        (4, {}, "if loss.isnan():\n        continue\n    loss.backward()", []),  # nothing is divided
        (4, {"stage": 2}, "total += loss\n    loss.backward()\n    optimizer.step()", ["losses_kept"]),
        (4, {"stage": 2}, "loss.backward()\n    optimizer.step()", []),
    ],
)
def test_a_rehearsal_remarks_what_diagnose_reads_in_the_script(ranks, seen, lines, ids, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"clear(optimizer)\nfor rows in loader:\n    loss = model(rows).loss\n    {lines}\n")
    request = Request(str(script), [], ranks, ranks, 2)
    remarks = dict(rehearsals.in_script(request, Observed(**seen), ()))
    assert [*remarks] == ids
    assert all(f"{script}:" in each and f"[{id}]" in each for id, each in remarks.items())
    assert [*rehearsals.in_script(request, Observed(**seen), ids)] == []


def test_a_division_that_the_steps_have_shown_is_told_once(tmp_path):
    script = tmp_path / "train.py"
    lines = "    loss = f(rows) / engine.gradient_accumulation_steps()\n    engine.backward(loss)\n    engine.step()\n"
    script.write_text(f"engine, *_ = deepspeed.initialize(model=model)\nfor rows in loader:\n{lines}")
    request = Request(str(script), [], 4, 4, 2)
    for found, ids in (((), ["divided_again"]), (["loss_divided_twice"], [])):
        assert [id for id, _ in rehearsals.in_script(request, Observed(stage=2), found)] == ids


def test_adapters_and_offloading_are_decided_too():
    seen = Observed(parameters=1000, trained_parameters=10, offload_optimizer="cpu", offload_param="none")
    assert rehearsals.training(seen) == ["10 of 1,000 parameters train"]
    assert rehearsals.offloading(seen) == ["optimizer offloaded to cpu"]
    assert rehearsals.training(Observed(parameters=1000, trained_parameters=1000)) == []


@pytest.mark.parametrize(
    ("kind", "skips", "said"),
    [
        ("hang", [], "It hangs at a.py:3, as it would on 8 GPUs: m"),
        ("script", [], "It ends at a.py:3, as it would on 8 GPUs: m"),
        ("script", ["f"], "It ends at a.py:3, with --skip: m"),
        ("missing", [], "A rehearsal cannot go on at a.py:3: m"),
        ("value", [], "A rehearsal cannot go on at a.py:3: m"),
    ],
)
def test_how_a_script_ended_is_said(kind, skips, said):
    request = Request("a.py", [], ranks=8, ranks_per_machine=8, steps=2, skips=skips)
    assert rehearsals.ending(Failure(kind, "m", "a.py:3"), request) == said


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("the package for FlashAttention2 doesn't seem to be installed.", 'attn_implementation="sdpa"'),
        ("the script needs flash_attn, which is not installed here", 'attn_implementation="sdpa"'),
        ("the script needs xformers.ops, which is not installed here", "PyTorch's own attention"),
        ("You need to install `bitsandbytes` in order to use bitsandbytes optimizers", 'optim="adamw_torch"'),
        ("Trainer tried to instantiate apex FusedAdam but apex is not installed!", "fused AdamW"),
        ("Tried to train with `fp8` and TransformerEngine, which is not installed", "bf16 in place of fp8"),
        ("You have set `use_liger_kernel` to `True` but liger-kernel >= 0.3.0 is not available.", "leave Liger out"),
    ],
)
def test_a_package_that_needs_a_gpu_is_this_machines_lack_and_a_remedy_is_given(message, remedy):
    request = Request("a.py", [], ranks=4, ranks_per_machine=4, steps=2)
    said = rehearsals.ending(Failure("missing", message, "a.py:3"), request)
    assert said.startswith(f"A rehearsal cannot go on at a.py:3: {message}")
    assert "it is not here, and the machine of the 4 GPUs may have it. To rehearse, " in said
    assert remedy in said
    assert ".." not in said


@pytest.mark.parametrize(
    ("seen", "longest", "to", "most", "is_short"),
    [(128, None, None, 4096, True), (128, 400, 400, 4096, True), (128, 4000, 4000, 4096, False),
     (128, None, 4096, 4096, False), (2048, None, None, 4096, False), (128, None, None, None, False)],
)  # fmt: skip
def test_sequences_that_are_far_shorter_than_the_script_asks_for_are_said(seen, longest, to, most, is_short):
    answer = Answer(row_tokens=seen, longest_row=longest, lengthened_to=to, max_length=most)
    said = rehearsals.short(SimpleNamespace(answer=answer))
    assert bool(said) == is_short
    if said:
        assert f"sequences of at most {to or seen} tokens, and the script's max_length is 4,096." in said[0]
        assert "--tokens 4096 rehearses them" in said[0]


def test_tokens_that_lengthened_no_batch_are_said():
    def said(tokens: int | None) -> str:
        request = SimpleNamespace(tokens=tokens)
        return " ".join(rehearsals.longest_seen(SimpleNamespace(request=request, answer=Answer(batches_read=[[4, 8]]))))

    assert "--tokens lengthened none" in said(64)
    assert "--tokens" not in said(None)


def test_what_each_collective_sends_is_said_as_the_papers_count_it():
    assert estimates.collectives({}) == "collectives of a step: none"
    said = estimates.collectives({"all_reduce": 2 * 10**9, "all_gather": 10**9, "reduce_scatter": 3})
    assert said == "collectives of a step: all_reduce 2 GB (sent twice), all_gather 1 GB, reduce_scatter 3 bytes"
