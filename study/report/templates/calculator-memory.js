// What a rank holds at each moment of a step under DeepSpeed, DDP or alone, and the peak over all moments:
// study/predictor/memory/engine.py, fetches.py, deepspeed_memory.py and estimate.py, on a GPU. They name the DeepSpeed files.
"use strict";

const NORM_BYTES = 8;
const SWAPPED_FROM_BYTES = 2 ** 20;
const SUB_GROUP_ELEMENTS = 1e9;
const SWAP_BUFFERS = 4;
const OPTIMIZER_ROLES = ["master", "moments", "swap", "host_gradients", "host_staging"];

const padded = (elements, ranks) => Math.ceil(elements / (2 * ranks)) * 2 * ranks;
const part = (tensor, ranks) => Math.ceil(tensor.elements / ranks);

// What decides how a rank's memory changes: the arm's config as Python resolved it, over a model.
function engineOf(setup) {
  const { model, arm, ranks, weightBytes, stateBytes, accumulation } = setup;
  const all = tensors(model);
  const elements = sum(all.map((tensor) => tensor.elements));
  const engine = { ...arm, model, ranks, weightBytes, stateBytes, accumulation, tensors: all, elements };
  engine.part = arm.stage === 3 ? sum(all.map((tensor) => part(tensor, ranks))) : padded(elements, ranks) / ranks;
  engine.master = setup.precision === "bf16_cast";
  engine.persistent = all.filter((tensor) => tensor.elements <= arm.persistent_elements);
  engine.gathers = ranks > 1 || arm.weights_home !== "none";
  return engine;
}

function firstPart(engine) {
  const owned = new Map();
  let left = engine.part;
  for (const tensor of engine.tensors) {
    if (left > 0) owned.set(tensor.name, Math.min(left, tensor.elements));
    left -= tensor.elements;
  }
  return owned;
}

const ownedWhole = (engine) => {
  const owned = firstPart(engine);
  return sum(engine.tensors.filter((tensor) => owned.has(tensor.name)).map((tensor) => tensor.elements));
};
const staysGathered = (engine) => (engine.gathers ? sum(engine.persistent.map((tensor) => tensor.elements)) * engine.weightBytes : 0);

// --- the states -------------------------------------------------------------------------------------------------------

function standing(engine) {
  const { weightBytes: w, stateBytes: b, part: mine, elements } = engine;
  if (engine.stage === 0) return { weights: elements * w, master: engine.master ? b * elements : 0, moments: 2 * b * elements };
  const states = { master: b * mine, moments: 2 * b * mine };
  if (engine.stage < 3) {
    states.weights = padded(elements, engine.ranks) * w;
    if (engine.offloads) {
      const largest = Math.max(...engine.tensors.map((tensor) => tensor.elements));
      states.host_staging = (mine + largest) * w;
      states.staging = largest * w;
      states.host_gradients = b * mine + (engine.accumulation > 1 ? ownedWhole(engine) * w : 0);
    }
    return states;
  }
  Object.assign(states, { weights: mine * w, buckets: engine.bucket_elements * w });
  states[engine.offloads ? "host_gradients" : "gradients"] = mine * w;
  if (engine.optimizer_home === "cpu") states.host_gradients += b * mine;
  if (engine.optimizer_home === "nvme" && 4 * mine >= SWAPPED_FROM_BYTES) {
    const buffer = Math.ceil((4 * Math.min(mine, SUB_GROUP_ELEMENTS)) / 1024) * 1024;
    Object.assign(states, { master: 0, moments: 0, swap: SWAP_BUFFERS * buffer });
  }
  return states;
}

function constants(m) {
  if (m.family === "bert") return 2 * 8 * m.positions;
  return m.family === "gptj" ? 4 * m.layers * m.positions * m.rotary : 0;
}

// --- the backward pass ------------------------------------------------------------------------------------------------

function backward(engine, profile) {
  const start = { activations: profile.most[0], temporaries: profile.most[1], ...atStart(engine) };
  return [start, ...[keep, bucket, bucket, scatter][engine.stage](engine, profile)];
}

function atStart(engine) {
  const { weightBytes: w, elements } = engine;
  const accumulates = engine.accumulation > 1;
  if (engine.stage === 3) return { gathered_weights: gathered(engine) };
  if (engine.stage === 0 && engine.ranks > 1) return { gradients: elements * w * (accumulates ? 2 : 1) };
  if (engine.stage < 2 && accumulates) return { gradients: elements * w };
  if (engine.stage === 2 && accumulates && !engine.offloads) return { gradients: ownedWhole(engine) * w };
  return {};
}

// Without DeepSpeed: gradients pile up, or are in DDP's buckets from the start.
function keep(engine, profile) {
  const { weightBytes: w, elements } = engine;
  let [ready, inBuckets] = [0, (atStart(engine).gradients || 0) / w];
  return profile.gradients.map(({ tensor, most: [kept, inUse] }) => {
    ready = inBuckets ? Math.max(elements, inBuckets - tensor.elements) : ready + tensor.elements;
    inBuckets = inBuckets ? ready : 0;
    return { activations: kept, gradients: ready * w, temporaries: inUse + (inBuckets ? tensor.elements * w : 0) };
  });
}

// The ranks in whose parts a tensor's first and last elements are.
function owners(engine) {
  let end = 0;
  return new Map(engine.tensors.map((tensor) => {
    end += tensor.elements;
    return [tensor.name, [Math.floor((end - tensor.elements) / engine.part), Math.floor((end - 1) / engine.part)]];
  }));
}

const LAST = { tensor: null, most: [0, 0], complete: [0, 0] };

// Stages 1 and 2.
function bucket(engine, profile) {
  const { weightBytes: w, bucket_elements: limit } = engine;
  const [owned, ofRanks, mine] = [firstPart(engine), owners(engine), ownedWhole(engine)];
  const accumulated = atStart(engine).gradients || 0;
  let waits = engine.stage === 1 ? accumulated : 0;
  let [held, large, inBucket, filled] = [accumulated - waits, 0, [], 0];
  const buckets = (engine.overlap ? 2 : 1) * limit * w;
  const moments = [];
  for (const { tensor, most, complete } of [...profile.gradients, LAST]) {
    const elements = tensor ? tensor.elements : 0;
    const moment = ([kept, inUse], extra) => {
      const now = { buckets, gradients: Math.max(0, waits) + held + large * w };
      // When autograd is done, records count what is allocated as activations.
      moments.push(tensor ? { ...now, activations: kept, temporaries: inUse + extra } : { ...now, activations: kept + inUse + extra });
    };
    if (tensor && inBucket.length) moment(most, elements * w);
    if (inBucket.length && (!tensor || filled + elements > limit)) {
      const cut = new Set(inBucket.flatMap((each) => ofRanks.get(each.name))).size > 1;
      moment(complete, ((cut ? filled : 0) + elements) * w);
      const hasMine = inBucket.some((each) => owned.has(each.name));
      if (hasMine && engine.offloads) {
        moment(complete, elements * w + NORM_BYTES * Math.max(...inBucket.map((each) => owned.get(each.name) || 0)));
      } else if (hasMine && held < mine * w + (engine.stage === 2 ? accumulated : 0)) {
        held += mine * w;
        moment(complete, elements * w);
      }
      if (engine.stage === 2 || hasMine) large = 0;
      [inBucket, filled] = [[], 0];
    }
    if (!tensor) break;
    moment(complete, elements * w);
    if (waits) waits -= elements * w;
    inBucket.push(tensor);
    filled += elements;
    if (elements > limit) large += elements;
  }
  return moments;
}

// Stage 3.
function scatter(engine, profile) {
  const { weightBytes: w, bucket_elements: limit, ranks } = engine;
  const stay = new Set(engine.persistent.map((tensor) => tensor.name));
  const stayBytes = staysGathered(engine);
  let alive = gathered(engine);
  let [inBucket, filled, large] = [[], 0, 0];
  const allStay = fetches(engine).atTurn === engine.elements && refetched(engine) === 0;
  const moments = lastFetches(engine).map(([last, flat]) => ({ activations: profile.atUse[last.name], gathered_weights: alive, temporaries: flat * w }));
  const moment = ([kept, inUse], extra) =>
    moments.push({ activations: kept, gathered_weights: alive, gradients: large * w, temporaries: inUse + extra });
  for (const { tensor, most, complete } of [...profile.gradients, LAST]) {
    const elements = tensor ? tensor.elements : 0;
    if (inBucket.length && (!tensor || filled + elements > limit)) {
      const alone = inBucket.length === 1 && inBucket[0].elements % ranks === 0;
      let norms = engine.offloads ? NORM_BYTES * Math.max(...inBucket.map((each) => part(each, ranks))) : 0;
      if (engine.optimizer_home === "nvme" && w === 2) norms = Math.max(norms, 4 * Math.ceil(filled / ranks));
      moment(complete, (alone ? 0 : filled * w) + norms + elements * w);
      [inBucket, filled, large] = [[], 0, 0];
    }
    if (!tensor) break;
    if (!stay.has(tensor.name) && !allStay && engine.gathers) alive = fetches(engine).backward.get(tensor.name) * w;
    moment(most, elements * w);
    inBucket.push(tensor);
    filled += elements;
    if (elements > limit) large += elements;
    if (!stay.has(tensor.name) && allStay && tensor.block !== "embeddings") alive = Math.max(alive - elements * w, stayBytes);
  }
  return moments;
}

// --- stage 3's gathered weights ---------------------------------------------------------------------------------------

const gathered = (engine) => (engine.gathers ? fetches(engine).atTurn * engine.weightBytes : 0);

function modules(model) {
  const known = new Map();
  for (const tensor of tensors(model)) {
    const parts = tensor.module.split(".");
    for (const depth of range(parts.length)) {
      const name = parts.slice(0, depth + 1).join(".");
      if (!known.has(name)) known.set(name, []);
    }
    known.get(tensor.module).push(tensor.name);
  }
  return [...known.values(), ...(readsOutByEmbeddings(model) ? [[tensors(model)[0].name]] : [])];
}

// Follow DeepSpeed's coordinator through both passes. Ranks and rows change nothing here, so a model keeps the answer.
function fetches(engine) {
  const { model, persistent_elements: limit, prefetch_elements: prefetch, live_elements: live, reuse_elements: reuse } = engine;
  const key = [limit, prefetch, live, reuse].join();
  model.fetches ||= {};
  return (model.fetches[key] ||= followed(model, limit, prefetch, live, reuse));
}

function followed(model, limit, prefetch, live, reuse) {
  const size = new Map(tensors(model).map((tensor) => [tensor.name, tensor.elements]));
  const stay = new Set([...size.keys()].filter((name) => size.get(name) <= limit));
  const total = (names) => sum([...names].map((name) => size.get(name)));
  const forward = modules(model);
  const order = [...forward, ...forward.slice().reverse()];
  const queue = order.flatMap((names, step) => names.map((name) => [name, step]));
  const [uses, before] = [new Map(), [0]];
  for (const [name, step] of queue) uses.set(name, [...(uses.get(name) || []), step]);
  for (const names of order) before.push(before[before.length - 1] + total(names));
  const [ahead, whole] = [new Map([...size.keys()].map((name) => [name, -1])), new Set(stay)];
  const always = total(stay);
  let [alive, atTurn, fetched, next] = [always, always, 0, 0];
  const backward = new Map();
  order.forEach((names, step) => {
    const fetching = new Set(names.filter((name) => !whole.has(name)));
    const unseen = new Set(names.filter((name) => ahead.get(name) < step));
    while (next < queue.length && unseen.size) {
      const [name, last] = queue[next++];
      ahead.set(name, last);
      unseen.delete(name);
    }
    const own = total(fetching);
    const room = Math.min(live - (alive - always) - own, prefetch);
    let more = 0;
    while (next < queue.length && more < room) {
      const [name, last] = queue[next++];
      ahead.set(name, Math.max(ahead.get(name), last));
      if (!whole.has(name) && !fetching.has(name)) {
        fetching.add(name);
        more += size.get(name);
      }
    }
    for (const name of fetching) whole.add(name);
    alive += own + more;
    fetched += own + more;
    if (step === forward.length - 1) atTurn = alive;
    else if (step >= forward.length) for (const name of names) backward.set(name, alive);
    for (const name of new Set(names)) {
      if (stay.has(name) || ahead.get(name) > step + 1) continue;
      const again = uses.get(name).find((use) => use > step);
      if (again !== undefined && before[again] - before[step + 1] < reuse) continue;
      whole.delete(name);
      alive -= size.get(name);
    }
  });
  return { atTurn, backward, fetched };
}

// The last all-gathers of a forward pass: the last tensor in each, and the elements of each.
function lastFetches(engine) {
  if (!engine.gathers) return [];
  let queue = engine.tensors.filter((tensor) => tensor.elements > engine.persistent_elements);
  queue = queue.filter((tensor) => tensor.module !== queue[0].module);
  const batches = [];
  while (queue.length && engine.prefetch_elements) {
    const batch = [];
    while (queue.length && sum(batch.map((tensor) => tensor.elements)) < engine.prefetch_elements) batch.push(queue.shift());
    batches.push(batch);
  }
  return batches.slice(-2).filter((batch) => batch.length > 1).map((batch) => [batch[batch.length - 1], sum(batch.map((tensor) => tensor.elements))]);
}

function refetched(engine) {
  return engine.gathers ? fetches(engine).fetched - (engine.elements - sum(engine.persistent.map((tensor) => tensor.elements))) : 0;
}

// --- the update -------------------------------------------------------------------------------------------------------

function update(engine) {
  const { weightBytes: w, stateBytes: b, part: mine, elements } = engine;
  const copied = w === b ? 0 : b;
  if (engine.stage === 0) return [{ gradients: elements * (w + (engine.master ? 4 : 0)) }];
  if (engine.offloads) return [];
  if (engine.stage === 3) {
    const [stay, group] = [afterStep(engine), Math.min(mine, SUB_GROUP_ELEMENTS)];
    const norms = NORM_BYTES * Math.max(...engine.tensors.map((tensor) => part(tensor, engine.ranks)));
    return [norms, group * (w + copied), b * group].map((temporaries) => ({ ...stay, temporaries }));
  }
  const owned = firstPart(engine);
  const gradients = ownedWhole(engine) * w;
  return [
    { gradients, activations: NORM_BYTES * Math.max(...owned.values()) },
    { gradients, activations: (owned.size > 1 ? mine * w : 0) + copied * mine },
    { activations: b * mine },
  ];
}

function afterStep(engine) {
  if (engine.stage === 3) return { gathered_weights: staysGathered(engine) };
  return engine.stage === 0 && engine.ranks > 1 ? { gradients: engine.elements * engine.weightBytes } : {};
}

// --- host, disk and collectives ---------------------------------------------------------------------------------------

// Pinned memory is in pieces of powers of two, and so is what it takes beyond its content.
function rounding(size) {
  let power = 1;
  while (power < size) power *= 2;
  return size ? power - size : 0;
}

function pinnedPadding(engine) {
  const { weightBytes: w, part: mine } = engine;
  if (engine.stage < 3) {
    const largest = Math.max(...engine.tensors.map((tensor) => tensor.elements));
    return sum([4 * mine, 4 * mine, mine * w, largest * w].map(rounding));
  }
  const pieces = [mine * w];
  if (engine.weights_home !== "none") pieces.push(mine * w);
  if (engine.optimizer_home === "cpu") {
    pieces.push(...Array(Math.floor(mine / SUB_GROUP_ELEMENTS)).fill(4 * SUB_GROUP_ELEMENTS), 4 * (mine % SUB_GROUP_ELEMENTS));
  }
  const copied = engine.pins_parts ? engine.tensors.map((tensor) => part(tensor, engine.ranks) * w) : [];
  return sum(copied.map((size) => size + rounding(size))) + sum(pieces.map(rounding));
}

function diskBytes(engine) {
  const mine = 4 * engine.part;
  return engine.optimizer_home === "nvme" && mine >= SWAPPED_FROM_BYTES ? 3 * mine : 0;
}

function traffic(engine) {
  const { weightBytes: w, accumulation: steps, elements, ranks } = engine;
  if (engine.stage === 0) return ranks === 1 ? {} : { all_reduce: elements * w };
  if (engine.stage < 3) {
    const kind = engine.reduces_by_all_reduce ? "all_reduce" : "reduce";
    return { [kind]: elements * w * (engine.stage === 2 ? steps : 1), all_gather: padded(elements, ranks) * w };
  }
  const whole = engine.part * ranks;
  if (ranks === 1) return { reduce_scatter: whole * w * steps };
  const stay = sum(engine.persistent.map((tensor) => part(tensor, ranks) * ranks));
  return { reduce_scatter: whole * w * steps, all_gather: ((whole - stay + refetched(engine)) * steps + stay) * w };
}

// --- the estimate -----------------------------------------------------------------------------------------------------

// Components under the names that records have, without empty ones.
function summed(states, now) {
  const sizes = {};
  for (const [role, size] of [...Object.entries(states), ...Object.entries(now)]) {
    const name = role.replace(/^host_/, "");
    sizes[name] = (sizes[name] || 0) + Math.trunc(size);
  }
  return Object.fromEntries(Object.entries(sizes).filter((pair) => pair[1]));
}

const inTotal = (components) => sum(Object.values(components).map(Math.trunc));
const inputsBytes = (setup) => setup.tokens * 8 * (setup.model.family === "bert" ? 2 : 1);

// The states that are on the device, the moment that holds most, and what is on the host.
function estimateOf(setup, states, away, moments, more) {
  let hostBytes = 0;
  for (const role of away) {
    hostBytes += states[role] || 0;
    delete states[role];
  }
  states.other = inputsBytes(setup);
  const now = moments.reduce((most, each) => (inTotal(each) > inTotal(most) ? each : most));
  const atPeak = summed(states, now);
  return { parameters: parameters(setup.model), atPeak, peakBytes: inTotal(atPeak), hostBytes, ...more };
}

function estimate(setup) {
  if (setup.arm.fsdp) return shardedEstimate(setup);
  const engine = engineOf(setup);
  const away = engine.offloads ? [...OPTIMIZER_ROLES] : [];
  if (engine.weights_home !== "none") away.push("weights");
  const states = { constants: constants(setup.model), ...standing(engine) };
  const moments = [...backward(engine, profile(setup)), ...update(engine)];
  const result = estimateOf(setup, states, away, moments, { nvmeBytes: diskBytes(engine), traffic: traffic(engine) });
  if (result.hostBytes) result.hostBytes += pinnedPadding(engine);
  return result;
}
