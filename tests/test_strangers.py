"""The code itself, walked: how paths are made, what may run code of others, and what parses their texts."""

import ast
import functools
from collections.abc import Iterator

import pytest

from study.spec.arms import PACKAGE

# --- paths ---------------------------------------------------------------------------------------------------------

# A name becomes a path by `study.io.files.below`, `read_below` or `write_below`. The other places are these, by
# what the name is.
OTHERWISE = {
    "what the user typed, or set in the environment": """
        cli/predictions: Path(folder)
        training/universal: Path(words[0])
        sweeps/moves: Path(sys.argv[1])
        offline/run: Path(home, 'bin', 'nvcc')
        offline/run: Path(nvcc)
        machine/compiling: Path(source)
        machine/compiling: Path(word[2:])
        machine/compiling: Path(words[words.index('-MF') + 1])
        machine/disk: Path(folder, 'libaio.h')
        machine/hub: Path(model)
        machine/launcher: Path(launch[1].config_file)
        machine/operators: Path(os.environ['TORCH_EXTENSIONS_DIR'], name)
        machine/operators: Path(first_on_path)
        machine/software: Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
        records/runs: Path(folder)
        machine/cluster: Path(os.environ.get('XDG_CACHE_HOME', '~/.cache'))
        machine/multinode: Path(os.path.expandvars(node_dir))
        machine/multinode: base / software.operators_folder().name
        machine/probe: Path(os.path.expandvars(folder))
        report/notebook: Path(data)
        report/readme: Path(folder)
        spec/settings: Path(os.environ.get('XDG_CACHE_HOME', '~/.cache'))
        spec/shapes: Path(model)
        spec/shapes: Path(name)
        sweeps/protocol: FOLDER / f'{name}.toml'
        sweeps/protocol: Path(name)
        theory/architecture: Path(model)
        training/data: Path(settings.data)
        machine/launcher: Path(sys.argv[0])
        training/launch: Path(sys.argv[0])
        watching/callback: Path(run_dir)
        watching/promises: Path(config)
        watching/promises: Path(path)
        watching/watch: Path(run_dir)
        watching/watch: run_dir.resolve().with_name(f'{run_dir.name}-{number}')
        watching/witness: Path(sys.argv[1])
    """,
    "a config's own file, which Accelerate opens too; of a stranger's config, `sources` reads only near it": """
        diagnosis/sources: Path(*found_at)
        diagnosis/sources: Path(*where)
        diagnosis/sources: folder / name
        diagnosis/sources: folder / section
        spec/arms: Path(file)
        spec/arms: ROOT / file
    """,
    "a name that stands in this project's code": """
        measure/collectives: Path(path)
        measure/collectives: Path(path) / FILE.format(rank=rank)
        offline/run: RESULTS / 'runs' / words[0]
        offline/run: RESULTS / 'speed' / f'{name}.json'
        offline/run: RESULTS / f'tests-{name}.txt'
        offline/run: WORK / f'tests-{name}.part'
        offline/run: usr / 'lib' / f'{platform.machine()}-linux-gnu'
        machine/operators: folder(name) / f'{name}.so'
        machine/software: cache / 'zero-study' / 'torch_extensions' / str(environment).strip('/').replace('/', '-')
        report/notebook: self.data / name
        report/site: TEMPLATES / name
        report/site: into / f'{name}.ipynb'
        report/site: out / 'notebooks' / f'{name}.ipynb'
        report/site: out / f'{name}.html'
        report/site: out / name
        report/site: site / 'data' / name
        report/site: site / name
        spec/arms: FOLDER / f'{name}.yaml'
        training/setup: folder / name
    """,
    "what the first rank of this launch said": """
        watching/watch: Path(folder)
    """,
    "made here: a number, a version, a temporary folder, a file beside another": """
        bench/bench: Path(folder)
        bench/bench: Path(folder) / f'{name}-{repeat}'
        claims/probe_worker: Path(folder)
        claims/probes: Path(folder)
        machine/cache: Path(scratch)
        machine/cluster: Path(f'/proc/{pid}/ns/net')
        sweeps/jobs: Path(submission.script)
        machine/cache: folder.with_name(f'{new.parent.name}-broken')
        machine/disk: Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder.parent))
        machine/disk: base / f'{PREFIX}{socket.gethostname()}-{launcher}'
        machine/hub: Path(huggingface_hub.hf_hub_download(model, 'config.json'))
        machine/linux: Path(path)
        machine/output: out.with_name(f'.{out.name}.being-made')
        machine/output: out.with_name(f'.{out.name}.replaced')
        machine/software: base / '-'.join((f"{package}-{version(package) or 'none'}" for package in COMPILED_FOR))
        offline/parcel: out / f'records-{len(parts) + 1}.tar.gz'
        records/store: Path(top)
        records/checkpoints: part.with_name(part.name.removesuffix(PART))
        records/store: path.with_name(f'{path.name}.part{os.getpid()}')
    """,
    "a folder's own name, as the file system has it": """
        cli/experiments: Path(os.path.relpath(pack, ROOT))
        cli/keep: into / 'runs' / top.resolve().name
        cli/keep: into / 'runs' / top.resolve().name / (relative if relative.parts else folder.resolve().name)
        offline/pack: options.out / kind
        offline/pack: options.out / kind / folder.resolve().name
        offline/pack: options.out / kind / folder.resolve().name / path.relative_to(folder)
    """,
    "compared with the names that may travel before anything is opened, and written by `write_below`": """
        offline/parcel: Path(member.name)
        offline/parcel: Path(name)
        offline/parcel: reports / name
    """,
}
FOLDERS = {"folder", "path", "file", "root", "out", "site", "here", "pack", "runs", "cache", "into", "top", "above"}
FOLDERS |= {"base", "usr", "data", "reports", "results", "work", "templates", "looks", "home", "place", "target", "dir"}
GIVE_PATHS = {"Path", "resolve", "absolute", "expanduser", "with_name", "parent", "below", "joinpath"}
OF_THIS_PROGRAM = {"__file__", "executable", "prefix", "devnull"}
ONLY_TEXT = {"name", "stem", "suffix"}  # of a path: nothing is opened


def own_name(node: ast.AST) -> str:
    """The last name of an expression: `folder` of `self.folder`, `resolve` of `path.resolve()`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_fixed(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) or own_name(node).isupper() or own_name(node) in OF_THIS_PROGRAM


def is_path(node: ast.AST) -> bool:
    """Whether an expression is one by its name, or because something was joined to it."""
    if isinstance(node, ast.BinOp):
        return is_path(node.left) or isinstance(node.right, ast.JoinedStr)
    name = own_name(node)
    return name in GIVE_PATHS or name.lower().rpartition("_")[2] in FOLDERS


def made_paths(tree: ast.AST) -> Iterator[str]:
    """Every expression that makes a path of something that is not fixed in the code."""
    only_text = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ONLY_TEXT
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and not is_fixed(node.right):
            if is_path(node.left) or isinstance(node.right, ast.JoinedStr):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and not all(map(is_fixed, node.args)) and id(node) not in only_text:
            joins = own_name(node) in ("joinpath", "with_name") and isinstance(node.func, ast.Attribute)
            if joins or own_name(node) == "Path" or (isinstance(node.func, ast.Name) and node.func.id == "open"):
                yield ast.unparse(node)


@functools.cache
def modules() -> dict[str, ast.AST]:
    """The project's code by module. A reproduction is a script of its own, which takes no names."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if not {"inputs", "reproductions"} & set(path.parts)]
    return {path.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(path.read_text()) for path in paths}


def allowed(listed: dict[str, str]) -> set[str]:
    return {line.strip() for lines in listed.values() for line in lines.strip().splitlines()}


def test_a_name_becomes_a_path_in_one_place():
    made = {f"{name}: {expression}" for name, tree in modules().items() for expression in made_paths(tree)}
    remedy = "make it with study.io.files.below, or say in OTHERWISE why the name cannot be a stranger's"
    assert not made - allowed(OTHERWISE), remedy
    assert not allowed(OTHERWISE) - made, "these are gone: take them out of the list"


@pytest.mark.parametrize(
    "code",
    [
        "runs / record.run_id",
        "(out / 'runs' / claim['name']).read_text()",
        "Path(claim['file']).read_text()",
        "Path(settings.data, name)",
        "folder.joinpath(name)",
        "record_folder.resolve() / name",
        "path.with_name(f'{name}.json')",
        "open(name)",
        "Path('runs') / f'{run_id}.html'",
    ],
)
def test_a_path_that_is_made_otherwise_is_found(code):
    assert list(made_paths(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["below(runs, name)", "total / count", "Path(__file__)", "FOLDER / 'a.toml'", "Path(a).name"]
)
def test_what_makes_no_path_of_a_name_is_left_alone(code):
    assert not list(made_paths(ast.parse(code)))


# --- code of others ------------------------------------------------------------------------------------------------

MAY_ASK = {
    "from_pretrained",
    "load_dataset",
    "load_dataset_builder",
    "load_metric",
    "pipeline",
    "get_class_from_dynamic_module",
}
TRUSTED = "get_class_from_dynamic_module("  # once, where a config's class came with the model: see test_models
AUTO = ("Auto", "evaluate")  # transformers' classes that choose by name; `evaluate.load` fetches code
SAID = {"False", "trust_remote_code", "settings.trust_remote_code", "trust"}


def asks(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Every call that could run code which comes with a model or data set, and what it says about that."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        of = own_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        auto = of.startswith(AUTO) and own_name(node) in ("from_config", "from_pretrained", "load")
        if own_name(node) in MAY_ASK or auto:
            said = next((ast.unparse(word.value) for word in node.keywords if word.arg == "trust_remote_code"), None)
            yield ast.unparse(node), said


def test_code_of_others_is_refused_wherever_something_could_ask():
    calls = {call: said for tree in modules().values() for call, said in asks(tree)}
    assert len(calls) >= 4, "a config, a tokenizer, weights, data"
    unsaid = [call for call, said in calls.items() if said not in SAID]
    assert len(unsaid) == 1, unsaid
    assert unsaid[0].startswith(TRUSTED)


@pytest.mark.parametrize(
    "code", ["AutoModel.from_config(x)", "datasets.load_dataset(name)", "evaluate.load('f1')", "T.from_pretrained(n)"]
)
def test_a_call_that_does_not_say_so_is_found(code):
    assert [said for _, said in asks(ast.parse(code))] == [None]


RUNS_TEXT = {"eval", "exec", "compile", "__import__", "system", "popen"}
UNPICKLES = {("torch", "load"), ("pickle", "load"), ("pickle", "loads"), ("numpy", "load"), ("np", "load")}
UNPICKLES |= {
    ("joblib", "load"),
    ("marshal", "loads"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
}


def runs_others(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            of = own_name(node.func.value) if isinstance(node.func, ast.Attribute) else None
            shell = any(word.arg == "shell" and ast.unparse(word.value) != "False" for word in node.keywords)
            if (of in (None, "os") and own_name(node) in RUNS_TEXT) or (of, own_name(node)) in UNPICKLES or shell:
                yield ast.unparse(node)


def test_nothing_unpickles_or_runs_a_text():
    """No eval, no pickle, no shell, in all of the code."""
    assert not [found for tree in modules().values() for found in runs_others(tree)]
    for code in ("eval(x)", "torch.load(f)", "os.system(x)", "subprocess.run(x, shell=True)", "yaml.load(x)"):
        assert list(runs_others(ast.parse(code))), code


# --- texts of others -----------------------------------------------------------------------------------------------

# What is parsed with limits by `study.io.parsing`, and not elsewhere. The rest is written by this program.
PARSERS = {("tomllib", "loads"), ("tomllib", "load"), ("yaml", "safe_load"), ("json", "load"), ("json", "loads")}
OWN_TEXTS = {
    "bench/bench": "its own results, of a moment ago",
    "bench/kernels": "kernels.json, which comes with the package",
    "claims/probe_worker": "trials that were checked by study.ledger.probes, and the arms of this project",
    "claims/probes": "what its own process printed",
    "machine/cache": "an answer, whose size and checksum are checked: a look at a model has more values than a config",
    "machine/cluster": "the state of a cluster that it has brought up, in the user's own cache",
    "machine/disk": "the marker of a folder to offload to, compared and not used",
    "machine/hosts": "what its probe printed on a host that the user named",
    "machine/output": "the list of files of an earlier report, compared with what is there",
    "machine/probe": "the questions of the doctor that started it",
    "measure/collectives": "what PyTorch says of this process",
    "measure/network": "what tc says of a link",
    "offline/pack": "pyproject.toml",
    "offline/parcel": "whether a record is whole",
    "offline/run": "pack.json, which was made for this machine: what it installs is code anyway",
    "outside/compare": "comes with the package",
    "outside/written": "comes with the package",
    "records/compare": "keys that it has made",
    "records/groups": "keys that it has made",
    "report/claim_pages": "the documents' addresses, which come with the package",
    "report/notebook": "what the report has just written",
    "report/site": "notebooks that it has executed",
    "report/run_pages": "records that were read before",
    "sweeps/jobs": "what it has written itself beside a job's script",
    "sweeps/launches": "the last lines of a run in progress, for its progress",
    "training/machines": "what another rank of this launch said",
    "theory/configure": "an arm of this project",
    "theory/pace": "pace.toml, which comes with the package",
    "theory/tracing": "a config that was read before",
    "theory/transformer": "its own answer",
    "theory/work": "kernels.json, which comes with the package",
}


def parses(tree: ast.AST) -> bool:
    uses = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return any((own_name(node.value), node.attr) in PARSERS for node in uses)


def test_texts_of_others_are_parsed_in_one_place():
    assert {name for name, tree in modules().items() if parses(tree)} == OWN_TEXTS.keys()
    assert parses(ast.parse("tomllib.loads(Path(claims).read_text())"))


def test_links_are_followed_only_where_the_user_named_the_file():
    """`read_text` and the like follow links: where records of a stranger are read, `read_below` is used."""
    for package in ("records", "claims"):
        for name, tree in modules().items():
            if name.startswith(package):
                calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
                reads = [call for call in calls if call.endswith((".read_text()", ".read_bytes()"))]
                assert all(any(word in call for word in OF_THIS_PROJECT) for call in reads), (name, reads)


OF_THIS_PROJECT = ("scripts()", "all_paths()", "path.read_bytes()")  # the last: answers in reports/, which are ours


def test_all_of_the_code_is_walked():
    assert len(modules()) > 100
