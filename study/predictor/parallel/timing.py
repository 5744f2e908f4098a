"""The seconds of a step of a layout: each stage's part of the traced work, replayed as a schedule.

What ranks of a layer send, the layer waits for. Keys and values that go around are hidden behind attention. Gradients
are reduced, and weights gathered, when the last pass is over, as without Megatron's --overlap-grad-reduce.
"""

import functools
from dataclasses import dataclass, replace

from study.predictor.parallel import pipeline
from study.predictor.parallel.layout import Layout
from study.predictor.parallel.memory import exchanges, hidden_bytes, states, whole_pass
from study.predictor.setup import Setup
from study.predictor.timing.machine import Links, collective_s
from study.predictor.timing.pace import OfBlocks, Pace, total
from study.predictor.timing.replay import Span, length_s, replay
from study.predictor.timing.work import Block, Product, Work

MOST_ROUNDS = 4  # of a pipeline that are replayed: further passes take as long as the slowest rank's


def divided(blocks: tuple[Block, ...], setup: Setup, layout: Layout) -> tuple[Block, ...]:
    """Return a rank's part of the work of each block. Ranks divide the longer side of a weight."""
    tokens = whole_pass(setup).tokens

    def product(each: Product) -> Product:
        sides = {name: size for name in "nkm" if (size := getattr(each, name)) != tokens}
        longest = max(sides, key=sides.__getitem__, default="n")
        return replace(each, **{longest: -(-getattr(each, longest) // layout.tensor)})

    @functools.cache
    def part(work: Work) -> Work:
        products = tuple(map(product, work.products))
        names = ("attention_flops", "moved_bytes", "lasting_bytes")
        return replace(work, products=products, **{name: getattr(work, name) / layout.tensor for name in names})

    return tuple(each.with_work(part) for each in blocks)


@dataclass(frozen=True)
class Division:
    """A training whose ranks divide the model, and their links."""

    setup: Setup
    layout: Layout
    links: Links
    constants: Pace

    def group(self, name: str) -> Links:
        """Return the links of a rank's group."""
        stage_ranks = self.links.ranks // self.layout.pipeline
        if name == "tensor":
            return self.links.within(self.layout.tensor)
        if name == "pipeline":
            return self.links.between(stage_ranks).within(2) if stage_ranks > 1 else self.links.within(2)
        outside = self.links.within(stage_ranks).between(self.layout.tensor)
        return outside.within({"context": self.layout.context, "expert": self.layout.expert}.get(name))

    def sent_s(self, kind: str, size_bytes: float, links: Links) -> float:
        """Return the seconds of a collective. What is sent to a neighbour is half of what two ranks gather."""
        if kind == "send":
            return collective_s("all_gather", 2 * size_bytes, links.within(2), self.constants)
        return collective_s(kind, size_bytes, links, self.constants)

    def hop_s(self) -> float:
        """Return the seconds in which a stage sends to the next one."""
        if self.layout.pipeline == 1:
            return 0.0
        return self.sent_s("send", hidden_bytes(self.setup) / self.layout.tensor, self.group("pipeline"))

    def layer_s(self, phase: str, attention_s: float) -> float:
        """Return the seconds for which a pass over a layer waits for others."""
        total_s = 0.0
        for kind, group, calls, size_bytes in exchanges(self.setup, self.layout, phase):
            sent = calls * self.sent_s(kind, size_bytes, self.group(group))
            total_s += max(0.0, sent - attention_s) if group == "context" else sent
        return total_s

    def shared_s(self) -> float:
        """Return the seconds in which replicas reduce gradients and gather weights."""
        replicas = self.group("data")
        stages = [states(self.setup, self.layout, place) for place in range(self.layout.pipeline)]
        if not self.setup.stage:
            return max(self.sent_s("all_reduce", each["gradients"], replicas) for each in stages)
        gathering = replicas.within(self.setup.group)
        return max(
            self.sent_s("reduce_scatter", each["gradients"], replicas)
            + self.sent_s("all_gather", each["weights"], gathering)
            for each in stages
        )

    def stage_s(self, names: list[str], work: OfBlocks) -> dict[str, tuple[float, float]]:
        """Return for each phase the seconds of a pass over a stage, and those of them that are for what is sent."""
        seconds = {}
        for place, phase in enumerate(("forward", "backward")):
            mine = {name: work[name][place] for name in names}
            layers = [each for name, each in mine.items() if name.startswith("layer.")]
            sent_s = self.hop_s() + sum(self.layer_s(phase, each.attention) for each in layers)
            seconds[phase] = (sent_s + sum(each.on_gpu for each in mine.values()), sent_s)
        return seconds

    def step(self, work: OfBlocks, update_s: float) -> tuple[float, dict[str, float], list[Span]]:
        """Return the seconds of a step, the busy seconds of its slowest rank by resource, and the schedule's spans."""
        passes = self.setup.accumulation
        pipeline_ranks = self.layout.pipeline
        stages = self.layout.blocks(self.setup.model)
        of_stages = [self.stage_s(names, work) for names in stages]
        both = [each["forward"][0] + each["backward"][0] for each in of_stages]
        ranks_s = [sum(both[place::pipeline_ranks]) for place in range(pipeline_ranks)]
        slowest = ranks_s.index(max(ranks_s))
        replayed = min(passes, MOST_ROUNDS * pipeline_ranks)
        phases = {phase: [each[phase][0] for each in of_stages] for phase in ("forward", "backward")}
        spans = replay(pipeline.tasks(self.layout, replayed, phases))
        working_s = length_s(spans) + (passes - replayed) * max(ranks_s)
        shared_s = self.shared_s()
        busy = total([each for names in stages[slowest::pipeline_ranks] for name in names for each in work[name]])
        sent_s = sum(sent for each in of_stages[slowest::pipeline_ranks] for _, sent in each.values())
        parts = {name: passes * busy_s for name, busy_s in (busy | {"link": sent_s}).items()}
        parts["link"] += shared_s
        parts |= {"update": update_s, "bubble": working_s - passes * max(ranks_s)}
        return working_s + shared_s + update_s, parts, spans
