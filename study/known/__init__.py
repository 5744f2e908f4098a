# ruff: noqa: F401
"""What is known of others' libraries: faults, which of them apply, lists of releases, and findings. Needs no torch.

    from study.known import Flags, stack

    for each in stack("deepspeed==0.17.6", flags=Flags(stage=2, passes=4)):
        print(each.answer, each.fault.id, each.fault.sentence, each.do)

`stack()` takes releases, or files that list them, and what is known of the training. `examples/known.py` is a script.
`study.known.explained` has what is behind an id. A mistake raises `study.core.errors.Stop`, which says what to do.
"""

from study.known.faults import Fault
from study.known.stacks import Flags
from study.known.which_apply import Applies, OpenQuestion, stack
