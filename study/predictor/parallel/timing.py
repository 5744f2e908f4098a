"""The seconds of a step of a layout: each stage's part of the traced work, replayed as a schedule.

What ranks of a layer send, the layer waits for. Keys and values that go around are hidden behind attention. Gradients
are reduced, and weights gathered, when the last pass is over, as without Megatron's --overlap-grad-reduce.
"""

from dataclasses import replace

from study.predictor.parallel import pipeline
from study.predictor.parallel.layout import Layout
from study.predictor.parallel.memory import exchanges, hidden_bytes, states, whole_pass
from study.predictor.setup import Setup
from study.predictor.timing.pace import Links, Pace, Seconds, collective_s
from study.predictor.timing.replay import Span, length_s, replay
from study.predictor.timing.work import Block, Product, Work

MOST_ROUNDS = 4  # of a pipeline that are replayed: further passes take as long as the slowest rank's


def divided(blocks: tuple[Block, ...], setup: Setup, layout: Layout) -> tuple[Block, ...]:
    """Return a rank's part of the work of each block. Ranks divide the longer side of a weight."""
    tokens = whole_pass(setup).tokens
    same: dict[Work, Work] = {}

    def product(each: Product) -> Product:
        sides = {name: size for name in "nkm" if (size := getattr(each, name)) != tokens}
        longest = max(sides, key=sides.__getitem__, default="n")
        return replace(each, **{longest: -(-getattr(each, longest) // layout.tensor)})

    def part(work: Work) -> Work:
        if work not in same:
            products = tuple(map(product, work.products))
            flops, moved = work.attention_flops / layout.tensor, work.moved_bytes / layout.tensor
            same[work] = replace(work, products=products, attention_flops=flops, moved_bytes=moved)
        return same[work]

    return tuple(replace(each, forward=part(each.forward), backward=part(each.backward)) for each in blocks)


def group_links(links: Links, layout: Layout, group: str) -> Links:
    """Return the links of a rank's group."""
    stage_ranks = links.ranks // layout.pipeline
    if group == "tensor":
        return links.within(layout.tensor)
    if group == "pipeline":
        return links.between(stage_ranks).within(2) if stage_ranks > 1 else links.within(2)
    outside = links.within(stage_ranks).between(layout.tensor)
    return outside.within({"context": layout.context, "expert": layout.expert}.get(group))


def sent_s(kind: str, size_bytes: float, links: Links, constants: Pace) -> float:
    """Seconds of a collective. What is sent to a neighbour is half of what two ranks gather."""
    if kind == "send":
        return collective_s("all_gather", 2 * size_bytes, links.within(2), constants)
    return collective_s(kind, size_bytes, links, constants)


def step(
    setup: Setup,
    layout: Layout,
    links: Links,
    constants: Pace,
    work: dict[str, tuple[Seconds, Seconds]],
    update_s: float,
) -> tuple[float, dict[str, float], list[Span]]:
    """Return the seconds of a step, the busy seconds of its slowest rank by resource, and the spans of the schedule.

    `work` is the seconds of a rank's part of each block's passes.
    """
    stages = layout.blocks(setup.model)
    hop_s = 0.0
    if layout.pipeline > 1:
        between = group_links(links, layout, "pipeline")
        hop_s = sent_s("send", hidden_bytes(setup) / layout.tensor, between, constants)
    passes: dict[str, list[float]] = {}
    sent: dict[str, list[float]] = {}
    for phase in ("forward", "backward"):
        of_blocks = {name: pair[phase == "backward"] for name, pair in work.items()}
        layer_s = dict.fromkeys(of_blocks, 0.0)
        for name in of_blocks:
            if name.startswith("layer."):
                layer_s[name] = _sent_s(setup, layout, links, constants, phase, of_blocks[name].attention)
        sent[phase] = [sum(layer_s[name] for name in stage) + hop_s for stage in stages]
        passes[phase] = [sum(of_blocks[name].on_gpu + layer_s[name] for name in stage) + hop_s for stage in stages]
    replayed = min(setup.accumulation, MOST_ROUNDS * layout.pipeline)
    spans = replay(pipeline.tasks(layout, replayed, passes))
    both = [forward + backward for forward, backward in zip(passes["forward"], passes["backward"], strict=True)]
    ranks = [sum(both[place :: layout.pipeline]) for place in range(layout.pipeline)]
    slowest = ranks.index(max(ranks))
    working_s = length_s(spans) + (setup.accumulation - replayed) * max(ranks)
    shared_s = _shared_s(setup, layout, links, constants)
    mine = [each for stage in stages[slowest :: layout.pipeline] for name in stage for each in work[name]]
    link_s = sum(sum(of_phase[slowest :: layout.pipeline]) for of_phase in sent.values())
    parts = {
        "products": setup.accumulation * sum(each.products for each in mine),
        "attention": setup.accumulation * sum(each.attention for each in mine),
        "memory traffic": setup.accumulation * sum(each.moving for each in mine),
        "launching": setup.accumulation * sum(each.launching for each in mine),
        "link": setup.accumulation * link_s + shared_s,
        "update": update_s,
        "bubble": working_s - setup.accumulation * max(ranks),
    }
    return working_s + shared_s + update_s, parts, spans


def _sent_s(setup: Setup, layout: Layout, links: Links, constants: Pace, phase: str, attention_s: float) -> float:
    """Return the seconds for which a pass over a layer waits for others."""
    total_s = 0.0
    for kind, group, calls, size_bytes in exchanges(setup, layout, phase):
        sent = calls * sent_s(kind, size_bytes, group_links(links, layout, group), constants)
        total_s += max(0.0, sent - attention_s) if group == "context" else sent
    return total_s


def _shared_s(setup: Setup, layout: Layout, links: Links, constants: Pace) -> float:
    """Return the seconds in which replicas reduce gradients and gather weights."""
    replicas = group_links(links, layout, "data")
    stage_states = [states(setup, layout, place) for place in range(layout.pipeline)]
    if not setup.stage:
        return max(sent_s("all_reduce", each["gradients"], replicas, constants) for each in stage_states)
    gathering = replicas.within(setup.group)
    return max(
        sent_s("reduce_scatter", each["gradients"], replicas, constants)
        + sent_s("all_gather", each["weights"], gathering, constants)
        for each in stage_states
    )
