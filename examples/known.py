"""Asks from Python which known faults apply to some releases in some training, and what would have to be known."""

import sys

from study.known import Flags, stack

releases = sys.argv[1:] or ["deepspeed==0.17.6", "torch==2.13.0"]
for each in stack(*releases, flags=Flags(stage=2, passes=4, precision="bf16"))[:5]:
    print(f"{each.answer}: {each.fault.sentence} [{each.fault.id}]")
    for question in each.why:  # of a fault that applies, none
        print(f"  {question.text}")
    print(f"  What to do: {each.do}")
