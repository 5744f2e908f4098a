# The whole study. Every target sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAIN ?= --constraint constraints.txt  # empty for whatever is newest, or for a Python other than 3.11
RUNS ?= runs/smoke
WORKERS ?= 4  # of pytest, on two cores: many tests wait for processes, and each worker collects and imports for itself
# pip would turn every module into bytecode, two thirds of its time; Python does so for those that are imported.
# pip says nothing but errors: what it installs is in constraints.txt, and three hundred lines hide our ten.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Without an NVIDIA GPU, PyTorch's wheels for CPUs, if their index answers: those with CUDA have 2.9 GB more to download.
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
ANSWERS := import sys, urllib.request as web; web.urlopen(sys.argv[1], timeout=5)
# Where this is set, no bytecode is kept, and every process compiles all that it imports: six seconds for a rank.
export PYTHONDONTWRITEBYTECODE :=
# The caller's environment is not ours: another virtual environment, conda, a pip.conf with `user = true`.
unexport VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV PYTHONPATH PYTHONHOME PYTHONUSERBASE PYTHONSTARTUP PIP_TARGET PIP_PREFIX
export PIP_USER := 0
export PYTHONNOUSERSITE := 1
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help setup study report site notebook outputs test style size check versions parity virtual scoreboard gpu

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

# Operators are checked each time: what was missing for them (libaio, a compiler) may have been installed since.
setup: $(VENV)/.ready  ## install into .venv and compile DeepSpeed's operators; the second time: only what is missing
	@$(BIN)/study doctor --fix

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory $(VENV)/.ready-to-compile
	@echo "Step 2: the packages that train and report; a minute or two."
	@start=$$(date +%s); $(INSTALL) $(CONSTRAIN) --editable '.[train,report]' \
		&& echo "The packages are installed, after $$(($$(date +%s) - start)) s."
	@touch $@

# Continuous integration compiles while pip installs the other packages. Nothing that these need is replaced by then.
$(VENV)/.ready-to-compile: pyproject.toml constraints.txt
	@echo "Setting up $(VENV), once: 1.6 GB with PyTorch for CPUs, and more for GPUs; some minutes, most of them a download."
	@echo "Step 1: PyTorch and DeepSpeed."
	@$(PYTHON) -m venv $(VENV)
	@start=$$(date +%s); wheels=; if ! command -v nvidia-smi >/dev/null \
			&& $(PYTHON) -c '$(ANSWERS)' $(CPU_WHEELS)/torch/ 2>/dev/null; then \
		echo "There is no NVIDIA GPU: PyTorch for CPUs."; wheels="--extra-index-url $(CPU_WHEELS)"; fi; \
	$(INSTALL) $(CONSTRAIN) $$wheels torch deepspeed ninja 'setuptools>=77' --editable . \
		&& echo "PyTorch and DeepSpeed are installed, after $$(($$(date +%s) - start)) s."
	@touch $@

# Of a new environment this is step 2 as well: each time pip looks at all packages again, 13 s of a processor.
$(VENV)/.ready-to-test: $(VENV)/.ready-to-compile
	@echo "Step 3: what tests and the checks of style need, beside what trains and reports."
	@$(INSTALL) $(CONSTRAIN) --editable '.[train,report,test]'
	@touch $(VENV)/.ready $@

# Twenty-five seconds of a processor, which each of pytest's workers would need for itself: they all import at once.
# What keeps a file of tests from being imported is told by the tests themselves.
$(VENV)/.ready-with-bytecode: $(VENV)/.ready-to-test
	@echo "Step 4: bytecode of what tests import."
	@-$(BIN)/python -m pytest --collect-only -qq >/dev/null
	@touch $@

# A sweep compiles an operator before the first cell that needs it. The first answers need one of the four operators.
study: $(VENV)/.ready  ## train every arm on both tasks on the embedded corpus, and compare them; the second time: only what is not done
	@[ -e $(RUNS) ] || { echo "First GPT with the arms that do not offload."; \
		study sweep smoke --runs $(RUNS) --only task=wikitext part=arms offload=none; study compare --arms $(RUNS); \
		echo "Now all others, among them BERT."; }
	@study sweep smoke --runs $(RUNS); status=$$?; study compare --arms $(RUNS); study claims --runs $(RUNS); \
		echo "Next: make report (these runs as pages), study claims S002-25, study virtual YOUR_TRAIN.py"; exit $$status

report: $(VENV)/.ready  ## what `make study` found, as pages to open in a browser: reports/build/index.html
	study report --runs $(RUNS) --out reports/build

ADDRESS ?=  # where the site will stand, for the picture that a link to it shows
site: $(VENV)/.ready  ## one folder for any static host, from all kept records: reports/site/index.html
	study report --runs reports/cpu-2core/runs --out reports/site --address '$(ADDRESS)' --paste

$(VENV)/.ready-for-notebooks: $(VENV)/.ready
	@echo "Step 3: what the notebooks need."
	@$(INSTALL) $(CONSTRAIN) --editable '.[train,report,notebook]'
	@touch $@

notebook: $(VENV)/.ready-for-notebooks  ## open the notebooks in a browser, with Jupyter
	JUPYTER_PREFER_ENV_PATH=1 $(BIN)/jupyter lab notebooks

outputs: $(VENV)/.ready-for-notebooks  ## run the notebooks over the kept records, and keep what they show, for readers on GitHub
	JUPYTER_PREFER_ENV_PATH=1 $(BIN)/python tools/keep_outputs.py

test: setup $(VENV)/.ready-with-bytecode  ## every test that needs no GPU, except the slow ones
	pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -m "not slow and not gpu"

style: $(VENV)/.ready-to-test  ## the form of the code, and its layers
	ruff check && ruff format --check && lint-imports && mypy && python .ci/size.py && python .ci/disguises.py
	check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	check-jsonschema --builtin-schema vendor.github-actions action.yml
	check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*[!g].yml

size:  ## tokens of code by room, and the change since the last tag
	@$(PYTHON) .ci/size.py

check: setup style  ## style, layers, and every test that needs no GPU, the slow ones as well
	pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -m "not gpu"

versions:  ## five arms with the oldest and the newest libraries that pyproject.toml allows, in environments of their own (14 GB)
	PYTHON=$(PYTHON) .ci/versions $(WHICH)

parity: setup $(VENV)/.ready-to-test  ## the losses of all arms against DDP's: both tasks, three precisions, accumulation 1 and 4 (over half an hour)
	pytest -m slow tests/training/test_parity.py

virtual: setup $(VENV)/.ready-to-test  ## virtual ranks against real ones: every arm at N = 2 and 4, both tasks, two precisions (an hour)
	pytest -v -m slow -k every_arm tests/training/test_virtual.py

scoreboard: setup  ## who predicts memory best: DeepSpeed's estimators, Accelerate's and ours, against measured peaks (an hour)
	study sweep scoreboard --runs runs/scoreboard && $(BIN)/python benchmarks/scoreboard.py runs/scoreboard

gpu: setup $(VENV)/.ready-to-test  ## pack what a GPU machine without a network lacks: make gpu PACK="--data imdb/ wikitext-2/ --model bert-large-uncased/ gpt2/"
	$(BIN)/python windows/pack.py $(PACK)
