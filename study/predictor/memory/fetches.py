"""Which weights stage 3 holds whole, and when: DeepSpeed's coordinator, followed through both passes.

Read in DeepSpeed 0.19.8 (partitioned_param_coordinator.py).
"""

import functools
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import accumulate

from study.predictor.architecture import Architecture, tensors
from study.predictor.tracing.transformer import Transformer


@dataclass(frozen=True)
class Fetches:
    """Elements of whole weights in stage 3, including the small ones that always stay whole."""

    at_turn: int  # at the end of the forward pass
    backward: dict[str, int]  # when the backward pass comes to a tensor
    released_at_turn: int  # of weights released until then, even if they are whole again
    released: dict[str, int]
    fetched: int  # gathered in both passes, without those that always stay whole


@functools.cache  # ranks and rows change nothing here
def fetches(
    model: Architecture | Transformer, persistent_elements: int, prefetch_elements: int, live_elements: int, reuse: int
) -> Fetches:
    """Follow DeepSpeed's coordinator through both passes, module by module.

    Each module fetches its own tensors. Then it fetches ahead in the order of use, forward and back, at least as much
    as the prefetch bucket holds, as long as fewer elements are whole than may live. A module releases its tensors,
    unless they are used again within the reuse distance, or their next use was already fetched ahead. Modules without
    tensors of their own fetch ahead as well. Modules that appear in no tensor's name are unknown here.
    """
    size = {tensor.name: tensor.elements for tensor in tensors(model)}
    stay = {name for name, elements in size.items() if elements <= persistent_elements}
    forward, without = _modules(model), _without_backward(model)
    order = forward + [names for names in forward[::-1] if not names or not without.issuperset(names)]
    queue = deque((name, step) for step, names in enumerate(order) for name in names)
    uses = defaultdict(list)  # the steps in which a tensor is used
    for name, step in queue:
        uses[name].append(step)
    before = [0, *accumulate(sum(size[name] for name in names) for names in order)]  # elements used before a step
    # last_fetched: the latest step for which each tensor was fetched; whole: the tensors that are whole now
    last_fetched, whole = dict.fromkeys(size, -1), set(stay)
    always = alive = sum(size[name] for name in stay)
    at_turn, backward, fetched = alive, {}, 0
    released_once, released_at_turn, released_by = set(), 0, {}
    for step, names in enumerate(order):
        fetching = {name for name in names if name not in whole}
        unseen = {name for name in names if last_fetched[name] < step}
        while queue and unseen:
            name, last_fetched[name] = queue.popleft()
            unseen.discard(name)
        own = sum(size[name] for name in fetching)
        room, more = min(live_elements - (alive - always) - own, prefetch_elements), 0
        while queue and more < room:
            name, last = queue.popleft()
            last_fetched[name] = max(last_fetched[name], last)
            if name not in whole and name not in fetching:
                fetching.add(name)
                more += size[name]
        whole |= fetching
        alive, fetched = alive + own + more, fetched + own + more
        if step == len(forward) - 1:
            at_turn, released_at_turn = alive, sum(size[name] for name in released_once)
        elif step >= len(forward):
            backward |= dict.fromkeys(names, alive)
            released_by |= dict.fromkeys(names, sum(size[name] for name in released_once))
        released = {name for name in names if name not in stay and last_fetched[name] <= step + 1}
        for name in list(released):
            again = next((use for use in uses[name] if use > step), None)
            if again is not None and before[again] - before[step + 1] < reuse:
                released.remove(name)
        whole -= released
        released_once |= released
        alive -= sum(size[name] for name in released)
    return Fetches(at_turn, backward, released_at_turn, released_by, fetched)


def _without_backward(model: Architecture | Transformer) -> set[str]:
    """Frozen tables besides the input embeddings: no gradient comes through them.

    One does come through frozen input embeddings, because checkpointed layers need it (enable_input_require_grads).
    """
    beside = (tensor for tensor in tensors(model)[1:] if tensor.block == "embeddings" and len(tensor.shape) == 2)
    return {tensor.name for tensor in beside if not tensor.trains}


def _modules(model: Architecture | Transformer) -> list[list[str]]:
    """The tensors of each module in the order of the forward pass. Empty for a module that only contains modules."""
    modules: dict[str, list[str]] = {}
    for tensor in tensors(model):
        parts = tensor.name.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:depth]), [])
        modules[".".join(parts)].append(tensor.name)
    return [*modules.values(), *([[tensors(model)[0].name]] if reads_out_by_embeddings(model) else [])]


def reads_out_by_embeddings(model: Architecture | Transformer) -> bool:
    """Whether the forward pass ends with the tensor that it begins with, as it does with tied embeddings."""
    if isinstance(model, Architecture):
        return model.tied and model.family != "bert"
    has_logits, all_tensors = model.look.kind in ("decoder", "seq2seq", "speech"), tensors(model)
    return has_logits and not any(t.block == "head" and t.shape == all_tensors[0].shape for t in all_tensors)
