"""Every sentence about a library or a training has an id, in brackets, that one command explains and grep finds."""

import ast
import contextlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from study.cli.differences import diff
from study.cli.explain import explain, is_known
from study.cli.ids import answering, key, words, words_with
from study.configs import sources
from study.configs.differences import compare
from study.configs.oom.causes import rows
from study.configs.sentences import sentences
from study.configs.settings import descriptions
from study.core.arms import NAMES, all_paths
from study.core.errors import Stop
from study.core.glossary import meanings
from study.core.gpus import GPUS
from study.core.library_defaults import known_libraries, paths
from study.core.text import short
from study.known import faults
from study.known.explained import behind, comments_of_rule, function_at, makes, places
from study.known.faults import named
from study.known.findings import causes_of_hangs, texts
from study.ledger.texts import CERTAINTIES, TOPICS, VERDICTS, claims
from study.predict.advise import FULL, MISS
from study.predict.allocator import FRAGMENTATION, OUTSIDE_AT_MOST_BYTES, headroom_bytes
from study.records.collectives import RankLog
from study.report.answers import questions
from study.watch import hangs
from tests.cases import for_each
from tests.cli.test_cli import in_this_process
from tests.conftest import ROOT, table
from tests.known.test_stack import answers
from tests.shaped import changed, finished, put

TOLD = table("known/told.toml")
BEGIN = table("configs/config_cases.toml")["begin"] | {"stage_3": {"zero_optimization": {"stage": 3}}}
EXPLAINED = {each.id: each for each in sentences()}
HUNG = [json.loads(line) for line in (ROOT / "reports/cpu-2core/hangs.jsonl").read_text().splitlines()]
# What prints sentences, and may make a finding: all others name the id of a table.
MAKERS = {"study/known/findings.py", "study/cli/stack.py"}


def printed(capsys) -> set[str]:
    """The ids in brackets of what was printed."""
    return {*re.findall(r"\. \[([\w.-]+)\]", " ".join(capsys.readouterr().out.split()))}


def test_ids_are_unique_and_each_has_a_sentence():
    every = [*EXPLAINED, *(claim.id for claim in claims())]
    assert [id for id, number in Counter(map(key, every)).items() if number > 1] == []
    assert len(every) > 400
    assert [id for id, each in EXPLAINED.items() if not each.sentence] == []


def test_no_text_has_a_brace_that_nothing_fills():
    """A value that only a training has stands in <>."""
    unfilled = re.compile(r"\{\w+[^\s\"{}]*\}")
    shown = {id: f"{each.sentence} {each.remedy} {each.rests_on}" for id, each in EXPLAINED.items()}
    assert {id: unfilled.findall(text) for id, text in shown.items() if unfilled.search(text)} == {}
    assert "<half> weights" in shown["precision_by_default"]


@for_each("id", EXPLAINED)
def test_grep_for_an_id_finds_its_sentence_its_rule_and_its_test(id, capsys):
    (answer,) = explain((f"[{id}]",))
    assert answer["table"].startswith("study/")
    assert answer["tests"], "a case for it belongs into a table of tests, as told.toml"
    # A rule is code that names the id, or what stands in the table beside the sentence.
    is_table = EXPLAINED[id].kind != "finding" or "configs" in texts()[id]
    assert answer["rules"] or (is_table and (ROOT / EXPLAINED[id].read_by).is_file())
    said = capsys.readouterr().out
    places = [said.index(f"\n{word}: ") for word in ("Sentence", "Rests on", "Written", "Rule", "Test")]
    assert places == sorted(places), "what a reader asks comes first, places in the sources last"
    assert "\nCondition: " not in said[places[1] :]
    thread = "Nearest thread, not filed by us" if EXPLAINED[id].is_not_filed else "Upstream"
    assert f"\n{thread}: {EXPLAINED[id].upstream or 'no thread'}" in said


def test_the_thread_of_a_fault_that_nobody_here_has_filed_is_called_the_nearest():
    new = [fault for fault in faults.table().fault if fault.kind == "new finding"]
    assert len(new) > 20
    assert all(EXPLAINED[fault.id].is_not_filed for fault in new)
    assert EXPLAINED["L-69"].is_not_filed
    assert EXPLAINED["L-69"].kind == "documented difference of deepspeed", "it refuses Adafactor unless it is let in"


@for_each("id", [id for id, row in rows().items() if "clue" in row])
def test_the_clue_of_a_cause_is_its_first_rule(id, capsys):
    (answer,) = explain((id,))
    file, _, line = answer["rules"][0].rpartition(":")
    assert (ROOT / file).read_text().splitlines()[int(line) - 1] == f"clue = '{rows()[id]['clue']}'"
    assert answer["conditions"][0] == f"the text matches the clue {rows()[id]['clue']}"
    assert f"Rule: {file}:{line}" in capsys.readouterr().out


def test_no_rule_writes_a_sentence_of_its_own():
    """A sentence without an id would need a finding that is made by hand, or a print of one without its id."""
    for path in (ROOT / "study").rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        makes = any(isinstance(call, ast.Name) and call.id == "Finding" for call in calls)
        assert not makes or str(path.relative_to(ROOT)) in MAKERS, path


@for_each("id", TOLD["stack"])
def test_a_fault_is_told_to_who_has_it(id, capsys):
    words = TOLD["stack"][id]
    found = answers(words)
    assert id in found, f"`study stack {words}` does not tell it, but {sorted(found)}: correct the case in told.toml"
    assert answers(f"{words} --details").keys() <= printed(capsys) | {"PEFT"}


def config_of(group: dict) -> dict:
    """A config that has a group of keys of a fault."""
    config: dict = {}
    for path, wanted in group.items():
        if wanted == "absent" or wanted == ["none"]:
            continue
        *above, last = path.split(".")
        section = config
        for name in above:
            section = section.setdefault(name, {})
        section[last] = next(each for each in wanted if each != "none") if isinstance(wanted, list) else wanted
    return config


def contradictions(words: str, groups: list[dict], folder: Path, capsys) -> list[str]:
    """What a flag of a case says otherwise than the keys of its fault, if it contradicts each group of them."""
    told: list[str] = []
    for group in groups:
        (folder / "config.json").write_text(json.dumps(config_of(group)))
        with contextlib.suppress(Stop):  # keys alone may be of no kind of config
            answers(f"{words} --config {folder}/config.json")
        said = " ".join(capsys.readouterr().out.split())
        overruled = re.findall(r"--\S+ \S+ counts, and not the config's [^.]*", said)
        if not overruled:
            return []
        told += overruled
    return told


WITH_KEYS = [id for id in TOLD["stack"] if "keys" in named(id).conditions]


@for_each("id", WITH_KEYS)
def test_a_case_contradicts_no_key_of_its_fault(id, tmp_path, capsys):
    assert contradictions(TOLD["stack"][id], named(id).when["keys"], tmp_path, capsys) == [], "correct it in told.toml"


def test_a_flag_that_contradicts_a_key_is_found(tmp_path, capsys):
    keys = [{"zero_optimization.offload_optimizer.device": ["cpu"], "zero_optimization.stage": 2}]
    (told,) = contradictions("deepspeed==0.18.2 --stage 2 --offload none", keys, tmp_path, capsys)
    assert told == "--offload none counts, and not the config's cpu"
    assert contradictions("deepspeed==0.18.2 --stage 2 --offload cpu", keys, tmp_path, capsys) == []


def test_faults_of_no_training_are_shown_elsewhere():
    for id, where in TOLD["elsewhere"].items():
        fault = named(id)
        assert fault.when is None
        assert where in (fault.script, *fault.adapters)


@for_each("id", TOLD["diff"])
def test_a_difference_that_matters_is_told(id, tmp_path, capsys):
    case = TOLD["diff"][id]
    for name, value in zip("ab", case["values"], strict=True):
        content = json.loads(json.dumps(BEGIN[case["begin"]]))
        *above, last = case["path"].split(".")
        section = content
        for each in above:
            section = section.setdefault(each, {})
        section[last] = value
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    answer = diff(tmp_path / "a.json", tmp_path / "b.json")
    ids = {row["id"] for row in answer["known"]}
    assert id in ids
    assert ids <= printed(capsys)


@pytest.mark.parametrize("id", TOLD["records"])
def test_a_difference_of_records_is_told(id, tmp_path):
    case = TOLD["records"][id]
    for name, value in zip("ab", case["values"], strict=True):
        put(tmp_path, changed(finished(name), **{case["path"]: value}))
    known, _ = compare(*(sources.read(tmp_path / name) for name in "ab"))
    assert id in [each.description.id for each in known]


@pytest.mark.parametrize("id", TOLD["hangs"])
def test_a_cause_of_a_hang_is_told_of_real_ranks(id):
    (row,) = [row for row in HUNG if [row["way"], row["arm"]] == TOLD["hangs"][id]]
    logs = [RankLog.model_validate(each) for each in row["logs"]]
    assert id in [finding.id for finding in (*hangs.causes(logs), *hangs.hangs(logs))]


@pytest.mark.parametrize("id", TOLD["typed"])
def test_what_is_typed_is_answered_with_its_id(id, monkeypatch, capsys, tmp_path):
    (tmp_path / "told.json").write_text('{"colour": "red"}')
    (tmp_path / "swift.yaml").write_text("{tuner_type: lora, learning_rate: 1, deepspeed: zero2}")
    words = TOLD["typed"][id].replace("FOLDER", str(tmp_path))
    in_this_process(monkeypatch, words)
    assert id in printed(capsys)


def test_a_sign_is_explained_by_the_function_that_makes_it(capsys):
    """And not by those that rank it, which name it as well."""
    (row,) = explain(("norm-sqrt2",))
    first, *others = row["rules"]
    assert function_at(first) == "norm_is_a_mark"
    assert any("ranking.py" in each for each in others)
    assert [re.sub(r":\d+:", ":", each) for each in row["conditions"]] == [
        "study/configs/pasted/losses.py: not (not counts or not counts[-1])",
        "study/configs/pasted/losses.py: not (counts[-2:] != [2, 2] and norms.lines[-1].values.get('loss') != 0)",
    ]
    assert "zero/stage3.py:2315 and 2625 of 0.19.7" in row["rests_on"]


def test_a_sign_that_a_call_makes_names_that_call_first():
    signs = [each for each in EXPLAINED.values() if each.kind == "sign in a text"]
    checked = 0
    for each in signs:
        found = behind(each)
        if any(makes(rule, each.id) for rule in found.rules):
            assert makes(found.rules[0], each.id), each.id
            assert not any("ranking.py" in condition for condition in found.conditions), each.id
            checked += 1
    assert checked > 15


def test_a_finding_rests_on_what_its_rule_says_of_it(capsys):
    """Where its row has no evidence, the comments of the rule give it: measured numbers, lines of libraries."""
    (row,) = explain(("no_sync_unused",))
    assert "Measured with four passes on two ranks" in row["rests_on"]
    assert "Measured with four passes on two ranks" in " ".join(capsys.readouterr().out.split())
    for id in [each.id for each in EXPLAINED.values() if not each.rests_on]:
        (row,) = explain((f"[{id}]",))
        said = [each for each in map(comments_of_rule, filter(is_code, row["rules"])) if each]
        assert all(each in row["rests_on"] for each in said), id


def is_code(place: str) -> bool:
    return ".py:" in place


def test_a_component_and_a_setting_are_explained_by_the_names_that_commands_print():
    for name in ("activations", "gathered_weights", "stage3_max_live_parameters"):
        assert explain((name,))[0]["sentence"], name


def test_a_setting_is_explained_with_what_it_changes_and_with_the_default_of_its_key(capsys):
    defaults = dict(paths("deepspeed"))
    told = 0
    for each in descriptions().values():
        if not each.sentence:
            continue
        explain((f"[{each.id}]",))
        said = capsys.readouterr().out
        assert f"\nChanges: {each.changes}\n" in said
        if defaults.get(each.deepspeed) is not None:
            by_default = f"a key of deepspeed {known_libraries()['deepspeed']['version']}, by default"
            assert f"\n{each.deepspeed}: {by_default} {short(defaults[each.deepspeed])}\n".lower() in said.lower()
            told += 1
    assert told > 10


@for_each(("asked", "id"), [*((name, name) for name in all_paths()), ("stage 2 cpu", "zero2_cpu")])
def test_an_arm_is_explained_by_its_name(asked, id, capsys):
    (row,) = explain((asked,))
    assert capsys.readouterr().out.startswith(f"{id}: {row['sentence'][:40]}")
    assert (row["id"], row["kind"]) == (id, "arm")


TP = "tensor parallelism, tensor slicing, TP, AutoTP"
DDP = next(row for row in meanings() if row.startswith("data parallelism, "))
RECOMPUTED = next(row for row in meanings() if row.startswith("recomputed, "))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("tensor parallelism", [TP]),
        ("pipeline parallelism", ["pipeline parallelism, PP"]),
        ("Adam", ["Adam, AdamW, adamw_8bit, DeepSpeedCPUAdam"]),
        ("batch size", ["batch, batch size, global batch, mini-batch"]),
        ("bucket_size", ["bucket, buckets, bucket size"]),
        ("mixed precision", ["mixed precision"]),
        ("fully sharded data parallel", ["FSDP, FSDP1, fully sharded data parallel"]),
        ("stage 0", [DDP]),
        ("stage zero", [DDP]),
        ("ZeRO-0", [DDP]),
        ("ddp vs fsdp", ["ddp", "FSDP, FSDP1, fully sharded data parallel"]),
        ("loss", ["losses"]),
        ("16 bytes a parameter", ["16 bytes a parameter"]),
        *((word, [word]) for word in ("tensor", "attention", "DeepSpeed", "Accelerate", "layer")),
        ("PyTorch", ["PyTorch, torch"]),
        ("GPU", ["GPU, card"]),
        ("padding", ["padding, pad"]),
        ("embedding", ["embedding, tied"]),
        ("offload", ["offloading, offload, CPU offload, NVMe, ZeRO-Offload, ZeRO-Infinity"]),
        ("why is stage 2 smaller than stage 1", ["stage 2", "stage 1"]),
        ("stage 2", ["stage 2"]),
        ("zero stage 2", ["zero2"]),
        ("ZeRO stage two", ["zero2"]),
        ("stage three", ["stage 3"]),
        ("gradient checkpointing", [RECOMPUTED]),
        ("recomputation", [RECOMPUTED]),
        ("sharding", ["divide, partition, shard"]),
        ("all-gather", ["all-gather, gather"]),
        ("QLoRA", ["LoRA, QLoRA, PEFT, adapter"]),
        ("CUDA context", ["CUDA context"]),
        ("pinned memory", ["host memory, pinned memory"]),
        ("What does an all-reduce do?", ["all-reduce"]),
        ("why is my loss nan?", ["loss-nan"]),
        ("second bucket", ["second_bucket"]),
    ],
)
def test_what_a_student_asks_is_answered_by_words(asked, words, capsys):
    """In the arguments of a shell, and in quotes."""
    assert [row["id"] for row in explain(tuple(asked.split()))] == words
    assert [row["id"] for row in explain((asked,))] == words
    if words == ["stage 2", "stage 1"]:
        said = " ".join(capsys.readouterr().out.split())
        assert "keeps its part of the gradients; with stage 1 it keeps all of them until the update" in said, "why"


@for_each(
    ("asked", "page"),
    [
        ("Does ZeRO change the losses?", "losses"),
        ("is the loss the same", "losses"),
        ("what does ZeRO cost", "time"),
        ("how many bytes does stage 3 send", "traffic"),
        ("why does memory fall", "memory"),
        ("will it fit", "fit"),
        ("does stage 3 divide LoRA", "lora"),
        ("Does my release train correctly?", "releases"),
        *((each["question"], each["name"]) for each in questions()),
        ("why is my loss nan?", ""),  # a sentence is called so
        ("why is the loss scale small", ""),
        ("what is a loss", ""),
        ("memory", ""),
        ("the loss", ""),
        ("gradient clipping and memory", ""),
    ],
)
def test_a_question_that_readme_answers_is_answered_before_its_words(asked, page, capsys):
    first = explain(tuple(asked.split()))[0]
    said = " ".join(capsys.readouterr().out.split())
    if page:
        (row,) = [each for each in questions() if each["name"] == page]
        assert (first["id"], first["kind"]) == (row["question"], "answer")
        assert said.startswith(f"{row['question']} {row['answer']} How it is known: {row['known']}.")
        assert f"To read next: reports/answers/{page}.md" in said
    assert ("reports/answers/" in said) == bool(page)


def test_what_to_read_next_is_said_once_and_a_part_of_a_word_is_told_as_such(capsys):
    explain(("ddp", "vs", "gradients", "and", "tensor"))
    assert capsys.readouterr().out.count("WORDS.md has all words") == 1
    for part, several in {"reduce": 2, "pipeline": 1}.items():
        assert len(explain((part,))) == several
        assert capsys.readouterr().out.startswith(f"No word is {part!r} alone. It is part of:\n")
    explain(("gradient",))
    assert "alone" not in capsys.readouterr().out, "a form of the word"


# Names that are told where they stand: of somebody's code and files, of our commands and protocols, of everybody.
IN_PLACE = {
    *("part", "return", "zero_grad", "clone", "argv", "True", "mlp", "c_proj", "cross_entropy", "generate"),
    *("lock", "prepare", "config", "num_workers", "beta", "mesh", "num_key_value_heads", "algorithms"),
    *("gpu_memory_utilization", "vllm_gpu_memory_utilization", "precompute_ref_log_probs", "DPOTrainer"),
    *("universal_checkpoint_info", "initialize_weights_zero3", "OMP_NUM_THREADS", "ZERO_STUDY_MACHINE"),
    *("RuntimeError", "CheckpointError", "Killed", "NaN"),
    *("diff", "compare", "advise", "stack", "diagnose", "conform", "estimate"),
    *("smoke", "at_scale", "guelph", "one_gpu", "tiny", "h100"),
    *("GPT", "XL", "BERT", "LLaMA"),
    *("GitHub", "WSL", "JSON", "DOI", "README", "READMEs", "WORDS", "CONTRIBUTING", "CITATION"),
}


def test_each_term_of_the_pages_for_learners_has_a_meaning():
    """Names in code and abbreviations of ZeRO by hand, of the guide and of the answers. Claims quote others' words."""
    pages = [ROOT / "examples/zero_by_hand/README.md", ROOT / "GUIDE.md", *(ROOT / "reports/answers").glob("*.md")]
    terms = {"DP", "MP", "PP", "TP", "mini-batch"}  # of the paper
    for page in pages:
        if page.stem != "claims":
            text = re.sub("(?m)^    .*$|(?s:```.*?```)", "", page.read_text())
            terms |= {term for term in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(r"[A-Za-z]\w+", term)}
            prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
            terms |= {*re.findall(r"\b[A-Z][A-Za-z]*[A-Z]\w*\b|\b[A-Z]_\w+", prose)}
    unknown = {term for term in terms if not is_known(term) and not words_with(term)}
    assert unknown == terms & IN_PLACE, "a row of study/core/glossary.toml, or told in its place"
    assert terms >= IN_PLACE


def test_what_nothing_explains_is_told_whole():
    with pytest.raises(Stop, match="no sentence has the id 'array slicing', and no word"):
        explain(("array", "slicing"))
    with pytest.raises(Stop, match="no sentence has the id 'four'"):
        explain(("stage", "four"))
    with pytest.raises(Stop, match=r"(?s)no sentence has the id 'stage 4', and no word.* did you mean 'stage'"):
        explain(("stage", "4"))
    with pytest.raises(Stop, match=r"(?s)no sentence has the id 'secondbucket'.* did you mean 'second_bucket'"):
        explain(("why", "secondbucket"))


def test_the_words_of_their_page_are_explained(capsys):
    """Of those that are an id as well one line says how to see its sentence."""
    written = {row["id"]: row["sentence"] for row in words().values() if row["kind"] == "word"}
    asked = {word: f"{row}: {meaning}." for row, meaning in written.items() for word in row.split(", ")}
    assert {"all-reduce", "all-gather", "gather", "reduce-scatter", "activations", "stage"} <= {*asked}
    assert {"model states", "P_os", "P_os+g", "P_os+g+p", "ZeRO-DP", "Ψ"} <= {*asked}, "which papers and outputs say"
    assert {*VERDICTS, *CERTAINTIES, "certainty"} <= {*asked}
    for word, answer in asked.items():
        explain(tuple(word.split()))  # without quotes
        said = " ".join(capsys.readouterr().out.split())
        assert said.startswith(f"{answer} To read next: ")
        assert not re.search(r"\.toml:|\.py:", said), "no places in our sources"
        if " A sentence has this name as well: " in said:
            explain((said.rpartition("study explain ")[2].strip("'"),))
            assert "\nSentence: " in capsys.readouterr().out
    explain(("stage",))
    assert "A sentence has this name as well: study explain '[differs-stage]'" in capsys.readouterr().out
    more = [name for name in all_paths() if re.search("_(hpz|qwz|qgz)$", name)]
    assert {*re.findall("`(.+?)`", asked["ZeRO++"])} == {*more}
    offloading = [name for name in NAMES if re.fullmatch(r"zero\d_(cpu|nvme)", name)]
    assert {*re.findall("`(.+?)`", asked["offloading"])} == {*offloading}
    card = GPUS["V100-32GB"]
    assert OUTSIDE_AT_MOST_BYTES == 2e9
    reserve = f"2 GB and {FRAGMENTATION:.0%}".replace("%", " %")
    left = f"{card.memory_bytes / 1e9:.1f} GB, of which {headroom_bytes(card, 0) / 1e9:.1f} are left for a peak"
    assert f": {reserve} of the card. A V100 of 32 GB has {left}" in written["reserve"]
    assert "a tenth larger" in written["only just"]
    assert "95 %" in written["only just"]
    assert (MISS, FULL) == (0.1, 0.95)
    notebook = (ROOT / "notebooks/stages.ipynb").read_text()
    assert "## 7. What no stage divides" in notebook, "which the row of activations names"


@for_each(
    ("asked", "row"),
    [
        ("gradient", "gradients"),
        ("partition", "divide, partition, shard"),
        ("partitioned", "divide, partition, shard"),
        ("sharded", "divide, partition, shard"),
        ("all-reduced", "all-reduce"),
        ("gathers", "all-gather, gather"),
        ("weight", "weights, parameters, params"),
        ("sharding", "divide, partition, shard"),
        ("allreduce", "all-reduce"),
        ("tensor parallel", TP),
        ("pipeline", "pipeline parallelism, PP"),
        ("buckets", "bucket, buckets, bucket size"),
        ("optimizer state", "optimizer states"),
        ("psi", "Ψ, psi, N_d, K"),
        ("communication volume", "volume, traffic, communication, communication volume"),
        ("stages", "ZeRO, stage"),
        ("recompute", RECOMPUTED),
        ("accumulate", "gradient accumulation"),
        ("checkpoints", "checkpoint"),  # and no key of DeepSpeed's
        ("optimizer", "optimizer, learning rate, scheduler"),  # and no cause of other losses
        *((f"stage {stage}", f"stage {stage}") for stage in (1, 2, 3)),
    ],
)
def test_a_word_is_found_in_each_of_its_forms(asked, row, capsys):
    (told,) = explain(tuple(asked.split()))
    assert (told["id"], told["kind"]) == (row, "word")
    assert "examples/zero_by_hand/" in capsys.readouterr().out
    assert not asked[-1].isdigit() or (ROOT / re.search(r"examples/\S+\.py", told["sentence"])[0]).is_file()


@pytest.mark.parametrize("topic", TOPICS)
def test_the_topic_of_claims_is_a_word_and_then_names_them(topic, capsys):
    """`study explain memory` listed 41 claims."""
    (told,) = explain((topic,))
    assert told["kind"] == "word"
    assert f"Its claims: study claims {topic}\n" in capsys.readouterr().out


def test_a_part_of_a_word_names_all_that_have_it_and_the_key_that_is_called_so(capsys):
    assert [row["id"] for row in explain(("reduce",))] == ["all-reduce", "reduce-scatter"]
    capsys.readouterr()
    explain(("pipeline",))
    assert "A key of a config has this name as well: study explain '[pipeline]'" in capsys.readouterr().out
    assert explain(("[pipeline]",))[0]["kind"] == "key"


STUDENTS = """
sharding shard all-gather reduce broadcast bucket checkpoint pipeline momentum variance epoch autocast amp token
overflow world_size local_rank node nccl gloo torchrun ulysses moe nvme bandwidth nvlink mfu fragmentation lora
peft adapters dpo grpo logits clipping scheduler quantization float16 adafactor replica barrier deadlock
context_parallelism reference_model half_precision loss_scale gradient_norm forward backward oom hang norm
"""


@for_each("asked", STUDENTS.split())
def test_what_a_student_meets_in_a_course_is_a_word(asked):
    """And no sentence of ours or key of a config that is called so."""
    assert {row["kind"] for row in explain((asked,))} == {"word"}
    assert {row["kind"] for row in explain((asked.replace("_", " "),))} == {"word"}


def test_the_id_of_a_sentence_as_it_is_printed_comes_before_a_form_of_a_word():
    assert explain(("data-parallel",))[0]["sentence"] == EXPLAINED["data-parallel"].sentence
    assert [row["kind"] for row in explain(("data parallel",))] == ["word"]


def test_arguments_that_together_are_a_word_are_one():
    """Also with other words beside them, and an arm."""
    asked_for = explain(("optimizer", "states", "reduce", "scatter", "stage", "2", "second_bucket"))
    assert [row["id"] for row in asked_for] == ["optimizer states", "reduce-scatter", "stage 2", "second_bucket"]


def test_an_unknown_id_is_refused_with_the_nearest():
    with pytest.raises(Stop) as stop:
        explain(("secondbucket",))
    assert "did you mean 'second_bucket'" in stop.value.remedy
    with pytest.raises(Stop, match="no sentence has the id ''"):
        explain(("",))


def test_all_that_has_an_id_has_a_command():
    ids = [*EXPLAINED, *(claim.id for claim in claims()), *all_paths(), *faults.table().symptoms]
    ids += [path for each in faults.table().fault for group in each.conditions.get("keys", []) for path in group]
    assert len(ids) > 700
    assert [id for id in ids if not answering([id])] == []
    assert answering(["P1-1", "nothing"]) == ""


IDS = ["P1-1", "0-20", "L-69", "last-pass-only", "second_bucket", "zero2", "slow", "norm"]
IDS += ["gradient_clipping", "zero_optimization.overlap_comm", "zero_optimization.zenflow"]


@for_each("command", ["explain", "claims", "stack", "diagnose"])
@for_each("id", IDS)
def test_each_command_answers_an_id_or_names_the_one_that_does(command, id, monkeypatch, capsys):
    code = in_this_process(monkeypatch, f"{command} {id}")
    said = capsys.readouterr()
    if code == 2 or command == "diagnose":
        (other,) = re.findall("ask `study (.+?)`", " ".join((said.out + said.err).split()))
        assert other.split()[0] != command or "--symptom" in other
        assert in_this_process(monkeypatch, other) in (None, 0, 1)
        assert capsys.readouterr().out


def test_without_an_id_the_kinds_are_counted(capsys):
    rows = explain(())
    printed = capsys.readouterr().out
    counts = [int(number) for number in re.findall(r"^ *(\d+) of the kind", printed, re.MULTILINE)]
    assert sum(counts) == len(rows)
    assert len(printed.splitlines()) < 40
    assert "study explain second_bucket" in printed
    assert "study explain --all" in printed


def test_all_are_listed_one_a_line_and_a_claim_is_explained_as_claims_does(capsys):
    rows = explain((), every=True)
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(rows)
    assert {row["id"] for row in rows} >= {"second_bucket", "last-pass-only", "S000-20"}
    (claim,) = explain(("[s000-20]",))
    assert claim["verdict"] == "does not hold"


def test_a_test_that_leaves_an_id_out_is_none_of_it():
    """COSTS of test_broken.py are taken from what was found."""
    for id in ("loader_waits", "no_sync_unused", "straggler", "states_replicated"):
        assert not [place for place in places(id) if place.startswith("tests/watch/test_broken.py:13")], id


def test_ids_of_hangs_are_places_in_one_table():
    assert all(any("hangs.toml" in place for place in places(id)) for id in causes_of_hangs())
