"""What a rank holds at each moment of a training step, as DeepSpeed 0.19.8 and DDP do it.

The backward pass is followed tensor by tensor, last first. Each moment is a dict from component to bytes; the
components are those of a record. Comments name the DeepSpeed file that a step follows; sizes were seen in runs.
"""

import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from study.theory import moments
from study.theory.architecture import Architecture, tensors
from study.theory.moments import Piece
from study.theory.profile import Gradient, Held, Profile, Tensor
from study.theory.setup import Setup
from study.theory.tensor import tensors_of_a_rank
from study.theory.transformer import Transformer

NORM_BYTES = 8  # DeepSpeed takes norms in fp64, one tensor at a time (zero/utils.py, get_norm_dtype)


class Engine:
    """What decides how a rank's memory changes, with DeepSpeed's defaults where a config is silent (zero/config.py).

    Stage 0 is one process or DDP.
    """

    def __init__(self, setup: Setup):
        zero = (setup.deepspeed or {}).get("zero_optimization", {})
        # Of ranks that divide layers, those with the same part share its states.
        self.model, self.stage, self.ranks = setup.model, setup.stage, setup.sharing_ranks // setup.tensor_ranks
        self.divides_layers = setup.tensor_ranks > 1
        if self.divides_layers:
            self.all_tensors = tensors_of_a_rank(setup.model, setup.tensor_ranks)
        else:
            self.all_tensors = tensors(setup.model)
        self.tensors = tuple(tensor for tensor in self.all_tensors if tensor.trains)
        self.elements = sum(tensor.elements for tensor in self.tensors)
        frozen = [tensor.elements for tensor in self.all_tensors if not tensor.trains]
        # A rank's part: of the flat weights, or, in stage 3, of each tensor by itself. Frozen weights have no optimizer
        # state and no gradient; only stage 3 takes them apart.
        self.part, self.frozen_part = padded(self.elements, self.ranks) // self.ranks, sum(frozen)
        if self.stage == 3:
            self.part = sum(ceil(tensor.elements / self.ranks) for tensor in self.tensors)
            self.frozen_part = sum(ceil(elements / self.ranks) for elements in frozen)
        self.second_ranks = setup.second_partition
        self.weight_bytes = setup.weight_bytes  # of an element of the weights, and of the gradients as they are reduced
        self.state_bytes, self.frozen_bytes = setup.state_bytes, setup.frozen_bytes
        self.master = setup.precision == "bf16_cast"  # without DeepSpeed: the optimizer keeps an fp32 copy
        self.optimizer, self.on_gpu = setup.optimizer, setup.on_gpu
        self.accumulation = setup.accumulation
        self.bucket_elements = int(zero.get("reduce_bucket_size", 5e8))
        overlap = zero.get("overlap_comm")
        self.overlap = self.stage == 3 if overlap is None else bool(overlap)
        self.reduces_by_all_reduce = zero.get("use_multi_rank_bucket_allreduce", True)  # stages 1 and 2
        # ZeRO++: bytes of an element as it is sent, in 8 and in 4 bits. Its scales are left out.
        self.gathered_bytes = 1 if zero.get("zero_quantized_weights") else self.weight_bytes
        self.quantizes_gradients = bool(zero.get("zero_quantized_gradients"))
        self.prefetch_elements = int(zero.get("stage3_prefetch_bucket_size", 5e7))
        self.persistent_elements = int(zero.get("stage3_param_persistence_threshold", 1e5))
        self.persistent = [tensor for tensor in self.all_tensors if tensor.elements <= self.persistent_elements]
        reuse = (zero.get("stage3_max_reuse_distance", 1e9), zero.get("stage3_max_live_parameters", 1e9))
        self.reuse_elements = min(map(int, reuse))
        self.live_elements = int(zero.get("stage3_max_live_parameters", 1e9))
        homes = [(zero.get(f"offload_{part}") or {}).get("device") or "none" for part in ("optimizer", "param")]
        if self.stage < 3:  # stages 1 and 2 take nvme for cpu
            homes = ["cpu" if home == "nvme" else home for home in homes]
        self.optimizer_home, self.weights_home = homes
        self.offloads = self.optimizer_home != "none"
        # Stage 3 pins each parameter's part by itself before all are copied into one piece: the default.
        self.pins_parts = self.weights_home == "cpu" and bool(zero["offload_param"].get("pin_memory", True))
        # Stage 3 makes whole weights of the parts; a single rank that holds them on its device does not.
        self.gathers = self.ranks > 1 or (setup.on_gpu and self.weights_home != "none")

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """The tensors as the optimizer has them: with a stage, one vector of this rank's parts; two under Muon."""
        if self.stage == 0:
            return [moments.piece(tensor) for tensor in self.tensors]
        halves = [self.tensors]
        if self.optimizer == "muon":
            halves = [[t for t in self.tensors if moments.is_for_muon(t) is of_muon] for of_muon in (True, False)]
        return [Piece((self._part(half),), of_muon) for half, of_muon in zip(halves, (True, False), strict=False)]

    def _part(self, group: Sequence[Tensor]) -> int:
        """Elements of the first rank's part of tensors that are one group of the optimizer."""
        if self.stage == 3:
            return sum(ceil(tensor.elements / self.ranks) for tensor in group)
        return padded(sum(tensor.elements for tensor in group), self.ranks) // self.ranks

    @property
    def moments_bytes(self) -> int:
        if self.optimizer == "muon" and self.stage:
            rest = [piece for piece in self.pieces if not piece.of_muon]
            return moments.held_bytes("fused", rest, self.state_bytes) + self.momentum_bytes
        return moments.held_bytes(self.optimizer, self.pieces, self.state_bytes)

    @property
    def momentum_bytes(self) -> int:
        """Muon's, in DeepSpeed.

        It has the type of the gradients. Stages 1 and 2 keep it for the whole of a tensor of which the rank owns
        something (_muon_momentum_buffer).
        """
        part = self._part(self.matrices)
        if self.stage == 3:
            return self.weight_bytes * part
        by_shape = sorted(self.matrices, key=lambda tensor: tensor.shape, reverse=True)  # as MuonWithAuxAdam does
        return self.weight_bytes * owned_of(by_shape, part)

    @property
    def muon_buffers_bytes(self) -> int:
        """What DeepSpeed keeps for Muon beside its momentum from step to step.

        Stages 1 and 2: the momentum again, for steps that are skipped (_muon_staging_momentum). Stage 3: parts of
        gradients as they are sent, and whole ones as they come (_partitioned_buffers_all_gather), a bucket at most.
        """
        if self.optimizer != "muon" or self.stage == 0:
            return 0
        if self.stage < 3:
            return self.momentum_bytes
        sent = [self._part(group) for group in self._bounded(self.matrices)]
        return self.weight_bytes * (self.ranks + 1) * sum(dict.fromkeys(sent))

    @property
    def gathered_for_muon(self) -> int:
        """Elements that stage 3 gathers for an update beside the weights: gradients and momenta, as whole matrices, and
        again once each rank has multiplied one of each round (_muon_update_sub_group)."""
        if self.optimizer != "muon":
            return 0
        gathered = 0
        for group in self._bounded(self.matrices):
            sizes = [tensor.elements for tensor in group]
            rounds = [sizes[i : i + self.ranks] for i in range(0, len(sizes), self.ranks)]
            gathered += self.ranks * (self._part(group) + sum(map(max, rounds)))
        return 2 * gathered

    @property
    def made_for_muon(self) -> int:
        """Bytes that stage 3 makes at most before an update, outside its buffers (_muon_update_sub_group).

        Whole gradients and momenta of a bucket, copies of this rank's parts, and of matrices that are not alike, both
        again as they are sent and come. These and its update stay while the next matrix is multiplied.
        """
        if self.optimizer != "muon" or self.stage != 3:
            return 0
        most = 0
        for group in self._bounded(self.matrices):
            held = self.weight_bytes * (2 * sum(tensor.elements for tensor in group) + self._part(group))
            left = 0  # of the round before
            for i in range(0, len(group), self.ranks):
                each = group[i : i + self.ranks]
                unlike = len(each) < self.ranks or len({tensor.shape for tensor in each}) > 1
                sent = max(tensor.elements for tensor in each) * 2 * (1 + self.ranks) * unlike
                most = max(most, held + left + moments.multiplied_bytes(each[0], self.on_gpu))
                left = self.weight_bytes * (sent + each[0].elements)
                most = max(most, held + left)
        return most

    @property
    def updated(self) -> set[str]:
        """The matrices that Muon multiplies on the first rank in stages 1 and 2: those of which it owns something."""
        by_shape = sorted(self.matrices, key=lambda tensor: tensor.shape, reverse=True)  # as MuonWithAuxAdam does
        begins, part = accumulate((tensor.elements for tensor in by_shape), initial=0), self._part(by_shape)
        return {tensor.name for tensor, begin in zip(by_shape, begins, strict=False) if begin < part}

    @property
    def matrices(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if moments.is_for_muon(tensor)]

    def _bounded(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Tensors in their order, as many at a time as a bucket takes."""
        groups: list[list[Tensor]] = []
        for tensor in tensors:
            if not groups or sum(each.elements for each in groups[-1]) + tensor.elements > self.bucket_elements:
                groups.append([])
            groups[-1].append(tensor)
        return groups

    @property
    def made_bytes(self) -> int:
        """What an update makes beside what there is."""
        return moments.made_bytes(self.optimizer, self.pieces, self.state_bytes)

    @functools.cached_property
    def fetches(self) -> "Fetches":
        limits = (self.persistent_elements, self.prefetch_elements, self.live_elements, self.reuse_elements)
        return fetches(self.model, *limits)


def reads_out_by_embeddings(model: Architecture | Transformer) -> bool:
    """Whether the forward pass ends with the tensor that it begins with: logits from tied embeddings."""
    if isinstance(model, Architecture):
        return model.tied and model.family != "bert"
    has_logits, all_tensors = model.look.kind in ("decoder", "seq2seq", "speech"), tensors(model)
    return has_logits and not any(t.block == "head" and t.shape == all_tensors[0].shape for t in all_tensors)


# --- partitions ----------------------------------------------------------------------------------------------------


def padded(elements: int, ranks: int) -> int:
    """Stages 1 and 2 pad the flat weights to a multiple of 2 N, so that parts start at 4 bytes (stage_1_and_2.py)."""
    return ceil(elements / (2 * ranks)) * 2 * ranks


def everything(engine: Engine) -> int:
    """Elements of all weights, whether they train or not."""
    return sum(tensor.elements for tensor in engine.all_tensors)


def first_part(engine: Engine) -> dict[str, int]:
    """Elements of each tensor that the first rank owns in stages 1 and 2."""
    left, owned = engine.part, {}
    for tensor in engine.tensors:
        if left > 0:
            owned[tensor.name] = min(left, tensor.elements)
            left -= tensor.elements
    return owned


def owned_whole(engine: Engine) -> int:
    """Elements of the tensors, each counted whole, of which the first rank owns something."""
    owned = first_part(engine)
    return sum(tensor.elements for tensor in engine.tensors if tensor.name in owned)


def second_copy(engine: Engine, released: int) -> dict[str, int]:
    """hpZ's second copy of so many elements: made when a weight is released, and gone after the update.

    What an earlier pass of the step has released has it in the last one as well (stage3.py, _post_step).
    """
    if not engine.second_ranks:
        return {}
    elements = everything(engine) if engine.accumulation > 1 else released
    return {"weights": ceil(elements / engine.second_ranks) * engine.weight_bytes}


def owned_of(tensors: Sequence[Tensor], part: int) -> int:
    """The same of tensors that are flattened by themselves, of which the rank owns the first so many elements."""
    begins = accumulate((tensor.elements for tensor in tensors), initial=0)
    return sum(tensor.elements for tensor, begin in zip(tensors, begins, strict=False) if begin < part)


def stays_gathered(engine: Engine) -> int:
    """Bytes of the small weights that stay whole from step to step."""
    return sum(tensor.elements for tensor in engine.persistent) * engine.weight_bytes * engine.gathers


def owners(engine: Engine) -> dict[str, set[int]]:
    """The ranks in whose parts a tensor's first and last elements are.

    DeepSpeed flattens a bucket a second time before it reduces it if its gradients belong to several ranks.
    """
    part, ends = engine.part, accumulate(tensor.elements for tensor in engine.tensors)
    return {
        tensor.name: {(end - tensor.elements) // part, (end - 1) // part}
        for tensor, end in zip(engine.tensors, ends, strict=True)
    }


# --- the backward pass ---------------------------------------------------------------------------------------------


def backward(engine: Engine, profile: Profile) -> Iterator[dict]:
    """The moments of the last backward pass of a step."""
    kept, in_use = profile.most
    yield {"activations": kept, "temporaries": in_use} | _at_start(engine)
    yield from {0: _keep, 1: _bucket, 2: _bucket, 3: _scatter}[engine.stage](engine, profile)


def _at_start(engine: Engine) -> dict:
    w, everything, accumulates = engine.weight_bytes, engine.elements, engine.accumulation > 1
    if engine.stage == 3:
        second = second_copy(engine, engine.fetches.released_at_turn)
        return second | {"gathered_weights": gathered(engine)}
    if engine.stage == 0 and engine.ranks > 1:
        # DDP's buckets, in which the gradients are; those of earlier microbatches are not in them yet.
        return {"gradients": everything * w * (2 if accumulates else 1)}
    if engine.stage < 2 and accumulates:
        return {"gradients": everything * w}  # this is not the first microbatch of its step
    if engine.stage == 2 and accumulates and not engine.offloads:
        return {"gradients": owned_whole(engine) * w}
    return {}


def _keep(engine: Engine, profile: Profile) -> Iterator[dict]:
    """Without DeepSpeed: gradients pile up, or are in DDP's buckets from the start."""
    w = engine.weight_bytes
    ready, everything = 0, engine.elements
    in_buckets = _at_start(engine).get("gradients", 0) // w
    for tensor, (kept, in_use), _ in profile.gradients:
        ready = max(everything, in_buckets - tensor.elements) if in_buckets else ready + tensor.elements
        in_buckets = ready if in_buckets else 0
        new = tensor.elements * w if in_buckets else 0
        yield {"activations": kept, "gradients": ready * w, "temporaries": in_use + new}


def _bucket(engine: Engine, profile: Profile) -> Iterator[dict]:
    """Stages 1 and 2 (stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads, reduce_ipg_grads)."""
    w, limit = engine.weight_bytes, engine.bucket_elements
    owned, of_ranks = first_part(engine), owners(engine)
    mine = owned_whole(engine)
    accumulated = _at_start(engine).get("gradients", 0)
    waits = accumulated if engine.stage == 1 else 0  # stage 1 collects whole gradients until the last microbatch
    held, large, bucket, filled = accumulated - waits, 0, [], 0
    buckets = (2 if engine.overlap else 1) * limit * w

    def moment(activations: Held, extra: float) -> dict:
        now = {"buckets": buckets, "gradients": max(0, waits) + held + large * w}
        if tensor is None:  # autograd is done, and records count what is allocated then as activations
            return now | {"activations": activations.total + extra}
        return now | {"activations": activations.kept, "temporaries": activations.in_use + extra}

    nothing = Held(0, 0)
    if engine.optimizer == "muon" and not engine.offloads:  # at the end of the pass the buckets are still there
        multiplied = [moments.multiplied_bytes(t, engine.on_gpu) for t in engine.tensors if t.name in engine.updated]
        yield {"buckets": buckets, "gradients": engine.part * w, "activations": max(multiplied, default=0)}
    for tensor, most, complete in [*profile.gradients, Gradient(None, nothing, nothing)]:
        elements = tensor.elements if tensor else 0
        if tensor and bucket:  # the buckets are made with the first gradient
            yield moment(most, elements * w)
        if bucket and (tensor is None or filled + elements > limit):
            cut = len(set().union(*(of_ranks[t.name] for t in bucket))) > 1
            yield moment(complete, ((filled if cut else 0) + elements) * w)
            has_mine = any(t.name in owned for t in bucket)
            if has_mine and engine.offloads:
                yield moment(complete, elements * w + NORM_BYTES * max(owned.get(t.name, 0) for t in bucket))
            elif has_mine and held < mine * w + (accumulated if engine.stage == 2 else 0):
                held += mine * w
                yield moment(complete, elements * w)
            if engine.stage == 2 or has_mine:
                large = 0
            bucket, filled = [], 0
        if tensor is None:
            break
        yield moment(complete, elements * w)
        waits -= elements * w if waits else 0
        bucket, filled = [*bucket, tensor], filled + elements
        large += elements if elements > limit else 0


def _scatter(engine: Engine, profile: Profile) -> Iterator[dict]:
    """Stage 3 (stage3.py, __add_grad_to_ipg_bucket, __avg_scatter_grads; coalesced_collectives.py)."""
    w, limit = engine.weight_bytes, engine.bucket_elements
    alive = gathered(engine)
    stay, stay_bytes = {tensor.name for tensor in engine.persistent}, stays_gathered(engine)
    bucket, filled, large, released = [], 0, 0, engine.fetches.released_at_turn
    all_stay = engine.fetches.at_turn == everything(engine) and refetched(engine) == 0
    for last, flat in last_fetches(engine):
        states = {"activations": profile.at_use[last.name], "gathered_weights": alive, "temporaries": flat * w}
        yield states | second_copy(engine, released)

    def moment(activations: Held, extra: int) -> dict:
        states = {"activations": activations.kept, "gathered_weights": alive, "gradients": large * w}
        return states | {"temporaries": activations.in_use + extra} | second_copy(engine, released)

    nothing = Held(0, 0)
    for tensor, most, complete in [*profile.gradients, Gradient(None, nothing, nothing)]:
        elements = tensor.elements if tensor else 0
        if bucket and (tensor is None or filled + elements > limit):
            alone = len(bucket) == 1 and bucket[0].elements % engine.ranks == 0
            norm = NORM_BYTES * max(ceil(t.elements / engine.ranks) for t in bucket) * engine.offloads
            if engine.optimizer_home == "nvme" and w == 2:  # on their way to the disk, in fp32
                norm = max(norm, 4 * ceil(filled / engine.ranks))
            yield moment(complete, filled * (not alone) * w + norm + elements * w)
            bucket, filled, large = [], 0, 0
        if tensor is None:
            break
        if tensor.name not in stay and not all_stay and engine.gathers:
            alive, released = engine.fetches.backward[tensor.name] * w, engine.fetches.released[tensor.name]
        yield moment(most, elements * w)
        bucket, filled = [*bucket, tensor], filled + elements
        large += elements if elements > limit else 0
        if (
            tensor.name not in stay and all_stay and tensor.block != "embeddings"
        ):  # whose backward hook comes after the last reduce
            alive, released = max(alive - elements * w, stay_bytes), released + elements


# --- stage 3's gathered weights ------------------------------------------------------------------------------------


def gathered(engine: Engine) -> int:
    """Bytes of whole weights at the end of a forward pass, those on their way included."""
    return engine.fetches.at_turn * engine.weight_bytes if engine.gathers else 0


@dataclass(frozen=True)
class Fetches:
    """Elements of whole weights in stage 3, small ones that always stay included."""

    at_turn: int  # at the end of the forward pass
    backward: dict[str, int]  # when the backward pass comes to a tensor
    released_at_turn: int  # of weights that were released until then, whether they are whole again or not
    released: dict[str, int]
    fetched: int  # gathered in both passes, without those that always stay


@functools.cache  # ranks and rows change nothing here
def fetches(
    model: Architecture | Transformer, persistent_elements: int, prefetch_elements: int, live_elements: int, reuse: int
) -> Fetches:
    """Follow DeepSpeed's coordinator through both passes (partitioned_param_coordinator.py), module by module.

    Each module fetches its own tensors. Then it fetches ahead in the order of use, forward and back, at least as much
    as the prefetch bucket holds, as long as fewer elements are whole than may live. A module releases its tensors,
    unless they are used again within the reuse distance, or the fetching ahead has come past their next use. Modules
    without tensors of their own fetch ahead as well; those that no tensor's name tells of are left out here.
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
    ahead, whole = dict.fromkeys(size, -1), set(stay)
    always = alive = sum(size[name] for name in stay)
    at_turn, backward, fetched = alive, {}, 0
    released_once, released_at_turn, released_by = set(), 0, {}
    for step, names in enumerate(order):
        fetching = {name for name in names if name not in whole}
        unseen = {name for name in names if ahead[name] < step}
        while queue and unseen:
            name, last = queue.popleft()
            ahead[name] = last
            unseen.discard(name)
        own = sum(size[name] for name in fetching)
        room, more = min(live_elements - (alive - always) - own, prefetch_elements), 0
        while queue and more < room:
            name, last = queue.popleft()
            ahead[name] = max(ahead[name], last)
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
        released = {name for name in names if name not in stay and ahead[name] <= step + 1}
        for name in list(released):
            again = next((use for use in uses[name] if use > step), None)
            if again is not None and before[again] - before[step + 1] < reuse:
                released.remove(name)
        whole -= released
        released_once |= released
        alive -= sum(size[name] for name in released)
    return Fetches(at_turn, backward, released_at_turn, released_by, fetched)


def _without_backward(model: Architecture | Transformer) -> set[str]:
    """Frozen tables beside the input embeddings: no gradient comes through them. Through the input embeddings one does,
    because checkpointed layers need it (enable_input_require_grads)."""
    beside = (tensor for tensor in tensors(model)[1:] if tensor.block == "embeddings" and len(tensor.shape) == 2)
    return {tensor.name for tensor in beside if not tensor.trains}


def _modules(model: Architecture | Transformer) -> list[list[str]]:
    """The tensors of each module, in the order in which a forward pass comes to them; none for one of modules alone."""
    modules: dict[str, list[str]] = {}
    for tensor in tensors(model):
        parts = tensor.name.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:depth]), [])
        modules[".".join(parts)].append(tensor.name)
    return [*modules.values(), *([[tensors(model)[0].name]] if reads_out_by_embeddings(model) else [])]


def last_fetches(engine: Engine) -> list[tuple[Tensor, int]]:
    """The last all-gathers of a forward pass: the last tensor in each, and the elements of each.

    The flat buffer stays beside the weights made from it until the last of them is used (AllGatherCoalescedHandle).
    The first module is fetched when it is needed; from then on at least as much as the prefetch bucket holds is fetched
    ahead (fetch_sub_module). A single tensor is gathered in place.
    """
    if not engine.gathers:
        return []
    queue = [tensor for tensor in engine.all_tensors if tensor.elements > engine.persistent_elements]
    module = queue[0].name.rpartition(".")[0] if queue else ""
    queue = [tensor for tensor in queue if tensor.name.rpartition(".")[0] != module]
    batches = []
    while queue and engine.prefetch_elements:
        batch = []
        while queue and sum(tensor.elements for tensor in batch) < engine.prefetch_elements:
            batch.append(queue.pop(0))
        batches.append(batch)
    return [(batch[-1], sum(tensor.elements for tensor in batch)) for batch in batches[-2:] if len(batch) > 1]


def refetched(engine: Engine) -> int:
    """Elements that are gathered again for the backward pass, because they were released after the forward pass."""
    always = sum(tensor.elements for tensor in engine.persistent)
    return engine.fetches.fetched - (everything(engine) - always) if engine.gathers else 0
