// Seconds of a step: the kernels of each block at the pace of a GPU, replayed on streams. study/predictor/timing/work.py, pace.py,
// schedule.py and steptime.py; their constants, with their origins, come with the data.
"use strict";

const GROUPED = ["llama", "gemma2"];
const TILE = [128, 64];
const NORM = 4;
const MOST_PASSES = 3;
const DDP_BUCKET_BYTES = 25 * 2 ** 20;

// --- what a block does ------------------------------------------------------------------------------------------------

function features(model, rows, sequence, block) {
  const tokens = rows * sequence;
  if (block !== "layer") return [tokens * model.vocabulary, tokens * model.hidden, model.vocabulary * model.hidden, rows * sequence ** 2];
  const widths = [model.hidden, model.inner];
  if (GROUPED.includes(model.family)) widths.push(model.heads * model.head_width, model.kv_heads * model.head_width);
  return [...widths.map((width) => tokens * width), rows * model.heads * sequence ** 2, matrixElements(model)];
}

function matrices(model, kind) {
  if (kind === "embeddings") return [];
  if (kind === "head" && readsOutByEmbeddings(model)) return [tensors(model).find((tensor) => tensor.block === "embeddings")];
  const block = kind === "layer" ? "layer.0" : kind;
  return tensors(model).filter((tensor) => tensor.block === block && tensor.shape.length === 2);
}

// A product is [count, m, n, k]: `count` products of an m x k with a k x n matrix.
function productOf(setup, tensor) {
  const { model } = setup;
  let [out, into] = tensor.shape;
  if (model.family === "gpt2" && tensor.block.startsWith("layer")) [out, into] = [into, out];
  return [1, model.family === "bert" && tensor.block === "head" ? setup.microBatch : setup.tokens, out, into];
}

function workOf(setup, kind, data) {
  const { model, microBatch: rows, sequence, attention } = setup;
  const products = matrices(model, kind).map((tensor) => productOf(setup, tensor));
  const back = products.flatMap(([count, m, n, k]) => [[count, m, k, n], [count, k, n, m]]);
  const heads = rows * model.heads;
  let fused = 0;
  if (kind === "layer" && attention === "eager") {
    const scores = [[heads, sequence, sequence, model.head_width], [heads, sequence, model.head_width, sequence]];
    back.push(...scores.flatMap((product) => [product, product]));
    products.push(...scores);
  } else if (kind === "layer") fused = 4 * heads * sequence ** 2 * model.head_width;
  const values = features(model, rows, sequence, kind);
  const family = model.activation ? `${model.family} ${model.activation}` : model.family;
  const precision = { fp16: "bf16", bf16_pure: "bf16_cast" }[setup.precision] || setup.precision;
  const pass = (phase, ofPhase, flops) => {
    const [kernels, ...line] = data.kernels[`${family} ${precision} ${attention} ${kind} ${phase}`];
    const moved = Math.max(0, sum(line.map((each, place) => each * values[place])));
    return { products: ofPhase, attention: flops, moved, kernels: ofPhase.length + (flops ? 1 : 0) + kernels };
  };
  const forward = pass("forward", products, fused);
  const backward = pass("backward", back, 2.5 * fused);
  if (!(setup.checkpointing && kind === "layer")) return [forward, backward];
  return [forward, {
    products: [...forward.products, ...backward.products], attention: forward.attention + backward.attention,
    moved: forward.moved + backward.moved, kernels: forward.kernels + backward.kernels,
  }];
}

// The share of a GPU's processors that compute something, over all waves of tiles.
function filled([count, m, n], processors) {
  const tiles = count * Math.ceil(m / TILE[0]) * Math.ceil(n / TILE[1]);
  const padding = (m * n * count) / (tiles * TILE[0] * TILE[1]);
  return (padding * tiles) / (Math.ceil(tiles / processors) * processors);
}

function secondsOf(work, gpu, whole, pace) {
  const peak = whole ? gpu.single_flops_per_s : gpu.half_flops_per_s;
  const [flopsPerS, elementBytes, movingShare] = [peak * gpu.products_ceiling, whole ? 4 : 2, gpu.moving_share || pace.moving_share];
  const products = work.products.map((product) => {
    const [count, m, n, k] = product;
    const flops = 2 * count * m * n * k;
    const bytes = count * (m * k + k * n + m * n) * elementBytes;
    const flopsS = flops / filled(product, gpu.multiprocessors) / flopsPerS;
    return Math.max(flopsS / pace.product_share, bytes / gpu.memory_bytes_per_s / movingShare);
  });
  const attention = work.attention / (peak * gpu.attention_ceiling) / pace.attention_share;
  const working = sum(products) + attention + work.moved / gpu.memory_bytes_per_s / movingShare;
  const launching = work.kernels * pace.kernel_s;
  return { launching, onGpu: (working ** NORM + launching ** NORM) ** (1 / NORM) };
}

function blocksOf(setup, data, gpu) {
  const [byName, costs] = [new Map(), {}];
  for (const tensor of tensors(setup.model)) byName.set(tensor.block, [...(byName.get(tensor.block) || []), tensor]);
  return [...byName].map(([name, held]) => {
    const kind = name.split(".")[0];
    costs[kind] ||= workOf(setup, kind, data).map((work) => secondsOf(work, gpu, setup.precision === "fp32", data.pace));
    return {
      name, seconds: { forward: costs[kind][0], backward: costs[kind][1] },
      elements: sum(held.map((tensor) => tensor.elements)),
      modulesAbove: (limit) => new Set(held.filter((tensor) => tensor.elements > limit).map((tensor) => tensor.module)).size,
    };
  });
}

// --- links ------------------------------------------------------------------------------------------------------------

function collectiveS(kind, size, links, pace) {
  const { ranks, perNode, link, network } = links;
  if (ranks === 1) return 0;
  const [rounds, nodes, pcie] = [kind === "all_reduce" ? 2 : 1, Math.ceil(ranks / perNode), link.name.startsWith("pcie")];
  let bandwidth = link.bytes_per_s * (pcie ? pace.pcie_share : pace.link_share);
  if (nodes > 1) bandwidth = Math.min(bandwidth, network.bytes_per_s * Math.min(ranks, perNode) * pace.network_share);
  const hopS = pcie ? pace.pcie_latency_s : pace.link_latency_s;
  const latencyS = pace.base_latency_s + rounds * ((ranks - 1 - (nodes - 1)) * hopS + (nodes - 1) * pace.network_latency_s);
  return latencyS + (rounds * size * (ranks - 1)) / ranks / bandwidth;
}

// --- the schedule -----------------------------------------------------------------------------------------------------

function sharingOf(setup) {
  const { arm, weightBytes: w } = setup;
  if (arm.fsdp) {
    const bytes = setup.productBytes;
    return { stage: 3, again: arm.fsdp === "full_shard" ? 1 : 0, eachPass: false, overlaps: true, reduce: "reduce_scatter", reduced: bytes, gathered: bytes, bucket: Infinity, hooksAbove: null };
  }
  if (arm.stage === 0) {
    return { stage: 0, again: 0, eachPass: false, overlaps: true, reduce: "all_reduce", reduced: w, gathered: w, bucket: DDP_BUCKET_BYTES, hooksAbove: null };
  }
  const bucket = arm.bucket_elements * w;
  if (arm.stage < 3) {
    const reduce = arm.reduces_by_all_reduce ? "all_reduce" : "reduce";
    return { stage: arm.stage, again: 0, eachPass: arm.stage === 2, overlaps: arm.overlap, reduce, reduced: w, gathered: w, bucket, hooksAbove: null };
  }
  const engine = engineOf(setup);
  const again = Math.min(1, refetched(engine) / Math.max(1, engine.part * engine.ranks));
  return { stage: 3, again, eachPass: true, overlaps: arm.overlap, reduce: "reduce_scatter", reduced: w, gathered: w, bucket, hooksAbove: arm.persistent_elements };
}

function hostOf(setup, gpu, links, data) {
  const { arm } = setup;
  const shared = arm.stage || arm.fsdp;
  const owned = parameters(setup.model) / (shared ? setup.ranks : 1);
  const offloads = arm.optimizer_home !== "none" || Boolean(arm.fsdp_offload);
  const local = Math.min(setup.ranks, links.perNode);
  const updateS = offloads
    ? ((owned * local) / 1e9) * data.cpu_adam_s_per_billion
    : (data.update_bytes[setup.precision] * owned) / gpu.memory_bytes_per_s;
  return {
    onHost: offloads, weightsOnHost: arm.weights_home !== "none" || Boolean(arm.fsdp_offload), owned, updateS,
    elementBytes: setup.weightBytes, bytesPerS: gpu.host_link_bytes_per_s * data.pace.host_link_share, ranks: shared ? setup.ranks : 1,
  };
}

// A timeline: each task as early as its stream, what it waits for and the host that launches it allow.
class Timeline {
  constructor() {
    this.free = {};
    this.spans = [];
  }

  add(stream, seconds, after, launchedBy = null) {
    let start = this.free[stream] || 0;
    for (const place of after) if (place !== null) start = Math.max(start, this.spans[place].end);
    let end = start + seconds;
    if (launchedBy !== null) {
      const launch = this.spans[launchedBy];
      start = Math.max(start, launch.start);
      end = Math.max(start + seconds, launch.end);
    }
    this.free[stream] = end;
    return this.spans.push({ stream, start, end }) - 1;
  }

  get lengthS() {
    return Math.max(0, ...Object.values(this.free));
  }
}

function replayed(setup, blocks, links, sharing, host, pace, passes) {
  const line = new Timeline();
  let [slowedS, reducing] = [0, false];
  const compute = (block, phase, ...after) => {
    const seconds = block.seconds[phase];
    const times = phase === "backward" && setup.checkpointing && block.name.startsWith("layer") ? 2 : 1;
    const hooksS = sharing.hooksAbove === null ? 0 : block.modulesAbove(sharing.hooksAbove) * pace.module_s * times;
    const launch = line.add("launch", seconds.launching + hooksS, []);
    const slowed = slowedS;
    slowedS = 0;
    return line.add("compute", seconds.onGpu + slowed, after, launch);
  };
  const calledS = (kind, size) => {
    const calls = Math.max(1, size / sharing.bucket);
    return calls * collectiveS(kind, size / calls, links, pace);
  };
  const collective = (kind, size, ...after) => {
    const seconds = calledS(kind, size);
    slowedS += seconds * pace.contention;
    return line.add("communication", seconds, after);
  };
  const reduce = (block, computed) => {
    const done = links.ranks > 1 ? collective(sharing.reduce, block.elements * sharing.reduced, computed) : computed;
    if (!host.onHost) return done;
    const size = ((setup.accumulation === 1 ? 1 : 2) * block.elements * host.elementBytes) / host.ranks;
    return line.add("host link", size / host.bytesPerS, [done]);
  };
  const pass = (order, phase, share, last) => {
    const [end, waits] = [new Map(), new Map()];
    const fetch = (place) => {
      if (place >= order.length || sharing.stage < 3 || share === 0 || !order[place].elements) return;
      const block = order[place];
      const before = place >= 2 ? end.get(order[place - 2].name) : last;
      const up = host.weightsOnHost ? line.add("host link", (block.elements * host.elementBytes) / host.ranks / host.bytesPerS, [before]) : null;
      waits.set(block.name, collective("all_gather", block.elements * sharing.gathered * share, before, up));
    };
    fetch(0);
    order.forEach((block, place) => {
      fetch(place + 1);
      last = compute(block, phase, waits.has(block.name) ? waits.get(block.name) : null, last);
      end.set(block.name, last);
      if (phase === "backward" && reducing) {
        const reduced = reduce(block, last);
        if (!sharing.overlaps) last = reduced;
      }
    });
    return end.get(order[order.length - 1].name);
  };
  let last = null;
  for (const number of range(passes)) {
    reducing = number === passes - 1 || sharing.eachPass;
    last = pass(blocks, "forward", 1, last);
    last = pass(blocks.slice().reverse(), "backward", sharing.again, last);
  }
  const places = {};
  line.spans.forEach((span, place) => (places[span.stream] = place));
  let done = line.add(host.onHost ? "host" : "compute", host.updateS, Object.values(places));
  if (host.onHost && !host.weightsOnHost) done = line.add("host link", (host.owned * host.elementBytes) / host.bytesPerS, [line.spans.length - 1, done]);
  if ([1, 2].includes(sharing.stage) && links.ranks > 1) {
    line.add("communication", calledS("all_gather", sum(blocks.map((block) => block.elements)) * sharing.gathered), [done]);
  }
  return line.lengthS;
}

// --- the answer -------------------------------------------------------------------------------------------------------

// Seconds of a step on GPUs of a kind, eight in a node, and an interval that is meant to hold 80 % of measurements.
function stepTime(setup, gpu, data) {
  const links = { ranks: setup.ranks, perNode: 8, link: gpu.peer_link, network: gpu.network };
  const [blocks, sharing, host] = [blocksOf(setup, data, gpu), sharingOf(setup), hostOf(setup, gpu, links, data)];
  const of = (pace) => {
    const passes = Math.min(setup.accumulation, MOST_PASSES);
    const seconds = replayed(setup, blocks, links, sharing, host, pace, passes);
    const more = setup.accumulation - passes;
    return more ? seconds + more * (seconds - replayed(setup, blocks, links, sharing, host, pace, passes - 1)) : seconds;
  };
  const seconds = of(data.pace);
  // What a host needs for a module is known least.
  const least = sharing.hooksAbove === null ? seconds : of({ ...data.pace, module_s: data.pace.module_least_s });
  const factor = data.interval[parameters(setup.model) >= data.large ? "large" : "small"];
  const peakS = operations(setup) / (setup.precision === "fp32" ? gpu.single_flops_per_s : gpu.half_flops_per_s);
  return { seconds, low: Math.max(peakS, least / factor), high: seconds * factor };
}

// Of matrix products, in a step, with those that checkpointing repeats: nothing is faster than they at the peak.
function operations(setup) {
  const { model, microBatch: rows, sequence } = setup;
  const of = (kind) => sum(matrices(model, kind).map((tensor) => productOf(setup, tensor)).map(([count, m, n, k]) => 2 * count * m * n * k));
  const attention = 4 * rows * model.heads * sequence ** 2 * model.head_width;
  const once = 3 * (model.layers * (of("layer") + attention) + of("head")) * setup.accumulation;
  return setup.checkpointing ? (once * 4) / 3 : once;
}
