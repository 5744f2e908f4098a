"""Tables that documents print, and beside them what was measured and predicted here."""

from study.predictor.architecture import named, parameters
from study.predictor.estimate import estimate
from study.predictor.setup import Setup
from study.records import stats
from study.records.groups import groups, lines
from study.records.runs import Runs
from study.report import published, seconds
from study.report.grouping import split_by_ranks
from study.report.topics import memory


def memory_000(runs: Runs) -> list[dict]:
    """Document 000's setting with activations kept and recomputed, predicted and measured; and its printed numbers."""
    name, ranks, tokens = published.MODEL_000, published.RANKS_000, published.SEQUENCE_000
    shape, passes = named(name), published.BATCH_000 // ranks
    setting = {"ranks": ranks, "sequence": tokens, "precision": "bf16_cast", "micro_batch": 1}
    fixed = setting | {"accumulation": passes, "attention": "eager", "device": "cuda"}
    rows = []
    for arm, printed_bytes in published.MEMORY_000.items():
        place = {"group": f"{name}, {ranks} ranks, {tokens} tokens, bf16_cast", "line": arm, "arm": arm}
        place |= {"ranks": ranks, "parameters": parameters(shape), "kind": "real"}
        measured = [run for run in runs.select(model=name, arm=arm, **setting).done if run.components]
        for recompute, how in ((False, ""), (True, ", recomputing")):
            if repeats := [run for run in measured if bool(run.checkpointing) == recompute]:
                run = max(repeats, key=memory.held_bytes)
                held = memory.parts(run.components)
                rows += memory.stack(place | {"kind": run.kind}, f"measured{how}", held, len(repeats))
            ours = estimate(Setup.of_arm(shape, arm, checkpointing=recompute, **fixed))
            rows += memory.stack(place, f"predicted{how}", memory.parts(ours.at_peak), 0)
        rows += memory.stack(place, "document 000", {"all": printed_bytes}, 0)
    return rows


def memory_003(runs: Runs) -> list[dict]:
    """What each stage holds on four ranks, measured, and as document 003 says."""
    ranks, arms_003 = published.RANKS_003, ("ddp", *published.MEMORY_003)
    rows = [row for row in memory.table(runs) if row["ranks"] == ranks and row["arm"] in arms_003 and row["parameters"]]
    rows = [row for row in rows if row["source"] != "predicted"]
    for group in dict.fromkeys(row["group"] for row in rows):
        for arm, held in published.MEMORY_003.items():
            place = {"group": group, "line": arm, "arm": arm, "ranks": ranks, "kind": "real"}
            rows += memory.stack(place | {"parameters": published.PARAMETERS_003}, "document 003", held, 0)
    return rows


def throughput_000(runs: Runs) -> list[dict]:
    """Document 000's table, and below it the speed relative to DDP in each of our groups that has all three arms."""
    printed, tokens = published.TOKENS_PER_S_AND_GPU_000, published.BATCH_000 * published.SEQUENCE_000
    rows = []
    for arm, speed in printed.items():
        row = {"group": "document 000", "arm": arm, "tokens/s/rank": speed, "over DDP's": speed / printed["ddp"]}
        by_tokens = 3600 * speed * published.RANKS_000 / tokens
        rows.append(row | {"steps/h": published.STEPS_PER_HOUR_000[arm], "steps/h by its tokens/s": by_tokens})
    all_groups = groups(seconds.timed(runs))
    members_of = {group: [run for run in mine if run.arm in printed] for group, mine in all_groups.items()}
    for group, members in split_by_ranks(members_of).items():
        of_arm = {arm: [run for run in members if run.arm == arm] for arm in printed}
        for arm, mine in of_arm.items() if all(of_arm.values()) else ():
            run, step_s = mine[0], stats.median(seconds.of(mine))
            speed = seconds.middle(seconds.of(of_arm["ddp"]), seconds.of(mine))
            row = {"group": group, "arm": arm, "tokens/s/rank": run.rows_per_step * run.sequence / step_s / run.ranks}
            row |= {"over DDP's": speed["median"], "from": speed["low"], "to": speed["high"], "n": speed["n"]}
            rows.append(row | {"steps/h": 3600 / step_s})
    return rows if len(rows) > len(printed) else []


def offload_001(runs: Runs) -> list[dict]:
    """Document 001's table of 20 billion parameters, and below it our runs of the same arms, however they ended."""
    rows = [{"group": "document 001, 20B on eight GPUs"} | row for row in published.OFFLOAD_001]
    for group, members in groups(runs.select(arm=["single", "ddp", "zero3", "zero3_cpu", "zero3_nvme"])).items():
        for line, mine in lines(members).items() if any(run.arm == "zero3_nvme" for run in members) else ():
            times, run, outcomes = seconds.of(mine), mine[0], ", ".join(sorted({run.status for run in mine}))
            place = {"group": group, "arm": line, "ranks": run.ranks, "outcome": outcomes, "n": len(mine)}
            place |= {"peak bytes": run.peak_bytes}
            rows.append(place | {"samples/s": run.rows_per_step / stats.median(times) if times else None})
    return rows if len(rows) > len(published.OFFLOAD_001) else []
