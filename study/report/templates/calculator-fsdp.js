// What a rank holds under FSDP2 as Accelerate prepares it: study/predictor/memory/fsdp_memory.py.
"use strict";

const [ROOT, EMBEDDINGS, TAIL] = ["root", "embeddings", "tail"];
const TOKENS = /(word_embeddings|wte|embed_in|embed_tokens|tok_embeddings|shared|patch_embeddings\.projection)\./;
const READS_OUT = /^(lm_head|embed_out|proj_out)\./;
const FINAL_NORM = /^(?!encoder|decoder)\w+\.(ln_f|final_layer_norm|norm|layernorm|final_norm)\./;

function shardingOf(setup) {
  const { ranks, weightBytes, storedBytes } = setup;
  const tied = readsOutByEmbeddings(setup.model);
  const unitOf = (tensor) => {
    if (tensor.block.startsWith("layer")) return tensor.block;
    if (READS_OUT.test(tensor.name) || FINAL_NORM.test(tensor.name)) return TAIL;
    return TOKENS.test(tensor.name) ? (tied ? TAIL : EMBEDDINGS) : ROOT;
  };
  const units = new Map([[ROOT, []], [tied ? TAIL : EMBEDDINGS, []]]);
  for (const tensor of tensors(setup.model)) units.set(unitOf(tensor), [...(units.get(unitOf(tensor)) || []), tensor]);
  for (const [unit, held] of units) if (!held.length && unit !== ROOT) units.delete(unit);
  // Of each tensor a rank keeps so many rows, the last ones padded.
  const rows = (tensor) => (Math.ceil(tensor.shape[0] / ranks) * tensor.elements) / tensor.shape[0];
  const sizes = new Map([...units].map(([unit, held]) => {
    const mine = sum(held.map(rows));
    return [unit, {
      whole: mine * ranks * weightBytes,
      buffer: ranks > 1 ? mine * ranks * weightBytes : 0,
      part: mine * storedBytes,
      elements: mine,
      last: held.length ? held[held.length - 1].elements * weightBytes : 0, // a loop's variable keeps it while it is reduced
    }];
  }));
  const stay = setup.arm.fsdp === "full_shard" ? [ROOT, TAIL] : [...units.keys()];
  const known = (names) => names.filter((unit) => units.has(unit));
  const sharding = { setup, units, sizes, unitOf, stay: new Set(known(stay)), late: known([ROOT, tied ? TAIL : EMBEDDINGS]) };
  sharding.order = [...units.keys()].filter((unit) => unit !== ROOT);
  sharding.place = new Map(sharding.order.map((unit, place) => [unit, place]));
  sharding.keepsWholeGradients = setup.accumulation > 1;
  sharding.elements = sum([...sizes.values()].map((each) => each.elements));
  sharding.gradients = sharding.elements * storedBytes; // the parts, as the optimizer takes them
  return sharding;
}

function wholeOf(sharding, unit) {
  return sharding.sizes.get(unit).whole;
}

const earlier = (sharding) => (sharding.keepsWholeGradients ? sum([...sharding.units.keys()].map((unit) => wholeOf(sharding, unit))) : 0);

// Gathered are the root, what was not given back, and a unit with the buffer that it was copied from.
function fsdpForward(sharding, profile) {
  const { units, sizes, late, stay, order } = sharding;
  const states = { gradients: earlier(sharding) };
  const used = (unit) => units.get(unit).filter((tensor) => tensor.name in profile.atUse).map((tensor) => profile.atUse[tensor.name]);
  const moments = [];
  let [whole, before] = [wholeOf(sharding, ROOT), ROOT];
  for (const unit of order) {
    const values = used(unit);
    const kept = values.length ? (late.includes(unit) ? Math.min : Math.max)(...values) : 0;
    const gathering = whole + sizes.get(before).buffer + sizes.get(unit).buffer;
    const running = whole + sizes.get(unit).buffer + sizes.get(unit).whole;
    moments.push({ ...states, activations: kept, gathered_weights: Math.max(gathering, running) });
    whole += stay.has(unit) ? sizes.get(unit).whole : 0;
    before = unit;
  }
  moments.push({ ...states, activations: Math.max(0, ...used(ROOT)), gathered_weights: whole + sizes.get(before).buffer });
  moments.push({ ...states, activations: profile.most[0], temporaries: profile.most[1], gathered_weights: whole });
  return moments;
}

// Follow the gradients. A unit's are reduced when the last of them is complete, those of late units at the end.
function fsdpBackward(sharding, profile) {
  const { setup, sizes, late, stay, order, place, keepsWholeGradients: keepsWhole } = sharding;
  const alive = new Set(stay);
  const gradients = new Map([...sharding.units.keys()].map((unit) => [unit, keepsWhole ? wholeOf(sharding, unit) : 0]));
  const moments = [];
  let [parts, reducing] = [0, 0];
  let [aliveBytes, gradientBytes] = [sum([...alive].map((unit) => wholeOf(sharding, unit))), sum([...gradients.values()])];
  const moment = (held, extra, ahead) =>
    moments.push({
      activations: held[0], temporaries: held[1] + extra, gathered_weights: aliveBytes + ahead, buckets: reducing,
      gradients: (setup.arm.fsdp_offload ? 0 : parts) + gradientBytes,
    });
  // Bytes of the unit that is gathered while this one's backward pass runs: the one before it.
  const aheadOf = (unit) => {
    const before = !late.includes(unit) && place.get(unit) ? order[place.get(unit) - 1] : null;
    return before && !stay.has(before) ? sizes.get(before).buffer : 0;
  };
  const reduced = (unit, held, ahead) => {
    const { whole, part, last } = sizes.get(unit);
    if (alive.delete(unit)) aliveBytes -= whole;
    reducing = 0;
    moment(held, whole, ahead);
    gradientBytes -= gradients.get(unit);
    gradients.set(unit, 0);
    reducing = whole;
    const arrived = Math.floor((part * setup.weightBytes) / setup.storedBytes);
    moment(held, arrived + (setup.weightBytes === setup.storedBytes ? 0 : part) + last, ahead);
    parts += part;
  };
  let [unit, held] = [ROOT, profile.most];
  for (const gradient of [...profile.gradients, null]) {
    const next = gradient && sharding.unitOf(gradient.tensor);
    if (!late.includes(unit) && next !== unit) {
      reduced(unit, held, aheadOf(unit));
      unit = ROOT;
    }
    if (!gradient) break;
    if (!alive.has(next)) {
      alive.add(next);
      aliveBytes += wholeOf(sharding, next);
      moment(held, 0, sizes.get(next).buffer);
    }
    unit = next;
    const size = gradient.tensor.elements * setup.weightBytes;
    const ahead = aheadOf(unit);
    moment(gradient.most, size, gradient === profile.gradients[0] && unit === TAIL ? 0 : ahead);
    if (!keepsWhole) {
      gradients.set(unit, gradients.get(unit) + size);
      gradientBytes += size;
    }
    held = gradient.complete;
    moment(held, keepsWhole ? size : 0, ahead);
  }
  for (const each of [ROOT, ...late.filter((name) => name !== ROOT)]) reduced(each, held, 0);
  return moments;
}

function shardedEstimate(setup) {
  const sharding = shardingOf(setup);
  const { elements } = sharding;
  const isCast = setup.precision === "bf16_cast";
  const states = {
    constants: constants(setup.model),
    weights: elements * setup.storedBytes,
    master: isCast ? setup.stateBytes * elements : 0,
    moments: 2 * setup.stateBytes * elements,
  };
  const kept = profile(setup);
  const moments = [...fsdpForward(sharding, kept), ...fsdpBackward(sharding, kept)];
  // Of offloaded states the update is the host's.
  if (!setup.arm.fsdp_offload) moments.push({ gradients: sharding.gradients, temporaries: isCast ? 4 * elements : 0 });
  const away = setup.arm.fsdp_offload ? ["weights", ...OPTIMIZER_ROLES] : [];
  const result = estimateOf(setup, states, away, moments, { nvmeBytes: 0, traffic: shardedTraffic(sharding) });
  if (result.hostBytes) result.hostBytes += sharding.gradients;
  return result;
}

function shardedTraffic(sharding) {
  if (sharding.setup.ranks === 1) return {};
  const units = [...sharding.units.keys()];
  const gathered = sum(units.map((unit) => wholeOf(sharding, unit) * (sharding.stay.has(unit) ? 1 : 2)));
  return { reduce_scatter: sum(units.map((unit) => wholeOf(sharding, unit))), all_gather: gathered * sharding.setup.accumulation };
}
