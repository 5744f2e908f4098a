"""How lists, locks, configs and threads write releases: regular expressions for texts in small letters.

Behind each line stands what it reads. Each `as:` is an example, and its test.
"""

import re

# Names that a list may have misspelt.
REQUIRED = re.compile(
    r"""
    (?: ^[ \t-]*                              # a line of a list, as:   deepspede==0.17.6
      | ["'] )                                # a text of a project, as: "deepspede>=0.17"
    ([a-z][\w.-]*)
    (?= \[                                    # extras, as: deepspede[autotuning]
      | ["' \t\r]*(?:[\d=~<>!@;,]|$) )        # a release, a range, or nothing, as: deepspede ; python_version
    """,
    re.VERBOSE | re.MULTILINE,
)

COMMENT = re.compile(
    r"""
    (^|\s)\#(?![ ]editable[ ]install)[^\n]*   # pip freeze has releases in its own, as: a==1 # deepspeed==0.15.0
    | wheel[ ]compiled[^\n]*                  # of ds_report, as: deepspeed wheel compiled w. ... torch 2.5
    """,
    re.VERBOSE,
)

# Lists of requirements, projects, what pip, conda, ds_report and `transformers env` list, and the answers of threads. A
# local part, as in 2.13.0+cpu, is left out. All but the beginning is looked ahead at, so that names may follow at once.
LISTED = re.compile(
    r"""
    (?: (?<![\w./-])                          # a word of its own, as: deepspeed==0.17.6
      | (?<=/)(?=[a-z-]{1,20}(?:              # the end of an address,
          \.git@v?\d+\.                       # as: git+https://github.com/deepspeedai/deepspeed.git@v0.17.6
        | -\d[\w.+-]{0,80}\.(?:whl|tar\.gz)   # as: ./wheels/deepspeed-0.17.6-cp311-linux_x86_64.whl
        ))
      | (?<=pytorch/)(?=pytorch:\d) )         # an image; NVIDIA's have a month, as: pytorch/pytorch:2.6.0-cuda12.4
    (?=
      (deepspeed|accelerate|transformers|torch|pytorch|trl|ms[-_]swift|llama-?factory|axolotl|peft)
      (?: (?![\w.-])                          # and no longer name, such as torchvision
        | \.git@(?=v?\d+\.)
        | -(?=\d[\w.+-]{0,80}\.(?:whl|tar\.gz)) )
      (?![^\n]{0,12}not[ ]installed)
      (?: \[[^\]\n]{0,200}\] )?               # extras, as: deepspeed[autotuning] == 0.17.6
      # --- what stands between a name and its release
      (?: \{\s*(?="hashes")                   # three of a lock of pipenv
        | "hashes":\s*\[[^\]]{0,20000}\],\s*  # as: "deepspeed": { "hashes": ["sha256:0a1"], "version": "==0.17.6" }
        | "index":\s*"[^"]{0,80}",\s*         # as: "deepspeed": {"index": "pypi", "version": "==0.17.6"}
        | ,[ \t]*"version"                    # pip list in JSON, as: {"name": "deepspeed", "version": "0.17.6"}
        | @[ \t]*git\+[^\s@]{1,200}@(?=v?\d+\.)  # as: deepspeed @ git+https://x.org/deepspeed.git@v0.17.6
        | [`'"|(){:=. \t]                     # tables, dots and quotes, as: | deepspeed | 0.17.6 |
        | version | info                      # ds_report, as: deepspeed info ................... 0.17.6, unknown
        | gpu\? | accelerator\?               # transformers env, as: - pytorch version (gpu?): 2.6.0+cu124 (true)
        | v(?=\d) ){0,60}                     # as: deepspeed v0.17.6
      # --- the release or range; without one, only the name is read
      ( (?:[~^!<>]=?)?[ \t]*                  # as: deepspeed>=0.17
        (?:\d{1,4}!(?=\d))?                   # an epoch, as: deepspeed==1!0.17.6
        \d(?:(?!\.tar\.gz)[\w.*])*
        (?:-(?:rc|alpha|beta|dev|pre|post)[\d.]*)?     # as: deepspeed==0.17.6-rc1
        (?: [ \t]*,[ \t]*[~!<>=]=?[ \t]*\d[\w.*]*      # a second bound, as: deepspeed>=0.17.6 , <0.18.3
          | [ \t]*\|(?:\||[ \t]*[~!<>=])[^\n]* )*      # or, of conda and poetry, as: - deepspeed >=0.16,<0.17 | >=0.18
      )?
    )
    """,
    re.VERBOSE,
)

# What a log says that it ran. A list beside it is of what somebody meant to run.
RAN = re.compile(
    r"""
    \b(?:
      (deepspeed)[ ]info:[ ]version=(\d[\w.]*)            # as: deepspeed info: version=0.17.6, git-hash=unknown
    | (pytorch)[ ]version[ ](\d[\w.]*)\S*[ ]available    # of transformers, as: pytorch version 2.7.1+cu126 available.
    )
    """,
    re.VERBOSE,
)

# Files that a list of requirements names. They are not read.
INCLUDED = re.compile(
    r"""
    ^[ \t]*(?:-[rc]                           # as: -r base.txt
      | --requirement | --constraint)         # as: --constraint=versions.txt
    [ \t=]*([^\s#]+)
    """,
    re.VERBOSE | re.MULTILINE,
)

# Keys of a training's config, which is given in another way.
CONFIG = re.compile(
    r"""
    (?:^|[{,])[\s"]*
    (?: zero_optimization | train_batch_size
      | train_micro_batch_size_per_gpu        # of DeepSpeed, as: {"train_micro_batch_size_per_gpu": 4}
      | distributed_type | deepspeed_config
      | fsdp_config                           # of Accelerate, as: fsdp_config:
      | output_dir | per_device_train_batch_size | gradient_accumulation_steps
      | learning_rate                         # of the Trainer, as: learning_rate: 1e-5
      | base_model | micro_batch_size | model_name_or_path | finetuning_type | tuner_type
      | train_type                            # of other trainers, as: train_type: lora
    )"?[ \t]*:
    """,
    re.VERBOSE | re.MULTILINE,
)

# Two lines of a lock, as uv and poetry write it, or conda.
LOCKED = re.compile(
    r"""
    name(?:[ ]=[ ]|:[ ])"?(deepspeed|accelerate|transformers|torch|trl|ms-swift|llamafactory|axolotl|peft)"?\r?\n
    [ ]*version(?:[ ]=[ ]|:[ ])"?(\d[\w.]*)   # as: name = "deepspeed"\nversion = "0.17.6"
    """,
    re.VERBOSE,
)

# A line of a list of requirements: a package, an option, a comment, or nothing.
OF_LIST = re.compile(r"\s*(?:[#-].*|(?:[\w.-]+(?:\[[\w, -]+\])?\s*(?:[=<>~!;@].*)?)?)$")
