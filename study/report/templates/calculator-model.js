// A model's tensors, and what the activations of a microbatch take: study/predictor/architecture.py and activations.py, on
// a GPU. Names of a model's dimensions are those of Python, so that the data that Python writes fit. A test holds all
// of this to Python.
"use strict";

const FP32 = 4;
const WRITTEN_OUT = ["gpt2", "gptj"]; // families whose gelu has no kernel of its own
const AUTOCAST = ["bf16", "fp16"];

const sum = (values) => values.reduce((total, each) => total + each, 0);
const range = (count) => [...Array(count).keys()];

// --- tensors ----------------------------------------------------------------------------------------------------------

const linear = (name, out, into) => [[`${name}.weight`, [out, into]], [`${name}.bias`, [out]]];
const norm = (name, width) => [[`${name}.weight`, [width]], [`${name}.bias`, [width]]];

function gatedLayer(m, norms) {
  const [queries, keys] = [m.heads * m.head_width, m.kv_heads * m.head_width];
  const attention = { q: [queries, m.hidden], k: [keys, m.hidden], v: [keys, m.hidden], o: [m.hidden, queries] };
  const feed = { gate: [m.inner, m.hidden], up: [m.inner, m.hidden], down: [m.hidden, m.inner] };
  return [
    ...Object.entries(attention).map(([name, shape]) => [`self_attn.${name}_proj.weight`, shape]),
    ...Object.entries(feed).map(([name, shape]) => [`mlp.${name}_proj.weight`, shape]),
    ...norms.map((name) => [`${name}_layernorm.weight`, [m.hidden]]),
  ];
}

function neoxAttention(m) {
  const rows = [...linear("attention.query_key_value", 3 * m.hidden, m.hidden), ...linear("attention.dense", m.hidden, m.hidden)];
  return m.biases ? rows : rows.filter((_, place) => place % 2 === 0);
}

const LAYERS = {
  bert: (m) => [
    ...["query", "key", "value"].flatMap((name) => linear(`attention.self.${name}`, m.hidden, m.hidden)),
    ...linear("attention.output.dense", m.hidden, m.hidden),
    ...norm("attention.output.LayerNorm", m.hidden),
    ...linear("intermediate.dense", m.inner, m.hidden),
    ...linear("output.dense", m.hidden, m.inner),
    ...norm("output.LayerNorm", m.hidden),
  ],
  // GPT-2 stores its matrices inputs first.
  gpt2: (m) => [
    ...norm("ln_1", m.hidden),
    ...[["attn.c_attn.weight", [m.hidden, 3 * m.hidden]], ["attn.c_attn.bias", [3 * m.hidden]]],
    ...[["attn.c_proj.weight", [m.hidden, m.hidden]], ["attn.c_proj.bias", [m.hidden]]],
    ...norm("ln_2", m.hidden),
    ...[["mlp.c_fc.weight", [m.hidden, m.inner]], ["mlp.c_fc.bias", [m.inner]]],
    ...[["mlp.c_proj.weight", [m.inner, m.hidden]], ["mlp.c_proj.bias", [m.hidden]]],
  ],
  gptj: (m) => [
    ...norm("ln_1", m.hidden),
    ...["k", "v", "q", "out"].map((name) => [`attn.${name}_proj.weight`, [m.hidden, m.hidden]]),
    ...linear("mlp.fc_in", m.inner, m.hidden),
    ...linear("mlp.fc_out", m.hidden, m.inner),
  ],
  gpt_neox: (m) => [
    ...norm("input_layernorm", m.hidden),
    ...norm("post_attention_layernorm", m.hidden),
    ...neoxAttention(m),
    ...linear("mlp.dense_h_to_4h", m.inner, m.hidden),
    ...linear("mlp.dense_4h_to_h", m.hidden, m.inner),
  ],
  gemma2: (m) => gatedLayer(m, ["input", "post_attention", "pre_feedforward", "post_feedforward"]),
  llama: (m) => gatedLayer(m, ["input", "post_attention"]),
};
const PREFIXES = { bert: "bert.encoder.layer", gpt2: "transformer.h", gptj: "transformer.h", gpt_neox: "gpt_neox.layers" };
const ENDS = {
  gpt2: ["transformer.wte", "transformer.ln_f"],
  gptj: ["transformer.wte", "transformer.ln_f"],
  gpt_neox: ["gpt_neox.embed_in", "gpt_neox.final_layer_norm"],
  gemma2: ["model.embed_tokens", "model.norm"],
  llama: ["model.embed_tokens", "model.norm"],
};

function ends(m) {
  if (m.family === "bert") {
    const sizes = { word: m.vocabulary, position: m.positions, token_type: 2 };
    const first = Object.entries(sizes).map(([name, size]) => [`bert.embeddings.${name}_embeddings.weight`, [size, m.hidden]]);
    const last = [...linear("bert.pooler.dense", m.hidden, m.hidden), ...linear("classifier", m.labels, m.hidden)];
    return [[...first, ...norm("bert.embeddings.LayerNorm", m.hidden)], last];
  }
  const [embedding, final] = ENDS[m.family];
  const first = [[`${embedding}.weight`, [m.vocabulary, m.hidden]]];
  if (m.family === "gpt2") first.push(["transformer.wpe.weight", [m.positions, m.hidden]]);
  const last = norm(final, m.hidden).slice(0, ["gemma2", "llama"].includes(m.family) ? 1 : 2);
  if (!m.tied) last.push(...linear("lm_head", m.vocabulary, m.hidden).slice(0, m.family === "gptj" ? 2 : 1));
  return [first, last];
}

// Every parameter tensor once, in the order of the model's modules. A model keeps its own.
function tensors(m) {
  if (!m.tensors) {
    const [first, last] = ends(m);
    const prefix = PREFIXES[m.family] || "model.layers";
    const layer = LAYERS[m.family](m);
    m.tensors = [
      ...first.map(([name, shape]) => [name, shape, "embeddings"]),
      ...range(m.layers).flatMap((i) => layer.map(([name, shape]) => [`${prefix}.${i}.${name}`, shape, `layer.${i}`])),
      ...last.map(([name, shape]) => [name, shape, "head"]),
    ].map(([name, shape, block]) => ({ name, shape, block, elements: shape.reduce((a, b) => a * b, 1), module: name.slice(0, name.lastIndexOf(".")) }));
  }
  return m.tensors;
}

const parameters = (m) => sum(tensors(m).map((tensor) => tensor.elements));
const matrixElements = (m) => sum(tensors(m).filter((t) => t.block === "layer.0" && t.shape.length === 2).map((t) => t.elements));
const readsOutByEmbeddings = (m) => m.tied && m.family !== "bert";

// A decoder of today from numbers alone: the width of a head is that of the hidden size, unless it is given.
function decoder(numbers) {
  return {
    family: "llama", positions: 0, rotary: 0, biases: false, parallel: false, labels: 2, activation: null,
    hidden_dropout: 0, attention_dropout: 0, embedding_dropout: 0, tied: false,
    head_width: Math.floor(numbers.hidden / numbers.heads), ...numbers,
  };
}

// --- a setup ----------------------------------------------------------------------------------------------------------

// What depends on the precision and the arm alone: study/predictor/setup.py.
function setupOf(model, arm, { ranks, precision, microBatch, accumulation, sequence, checkpointing }) {
  const half = precision === "bf16_cast" || precision === "bf16_pure";
  const gathersInHalf = arm.fsdp && AUTOCAST.includes(precision);
  return {
    model, arm, precision, microBatch, accumulation, sequence, checkpointing,
    ranks: arm.alone ? 1 : ranks,
    attention: model.family === "gptj" || model.family === "gemma2" ? "eager" : "sdpa", // as transformers has it
    tokens: microBatch * sequence,
    autocast: AUTOCAST.includes(precision) && !arm.fsdp,
    weightBytes: half || gathersInHalf ? 2 : 4, // of an element of the weights in a pass
    storedBytes: half ? 2 : 4, // of what the optimizer updates
    stateBytes: precision === "bf16_pure" ? 2 : 4,
    productBytes: precision === "fp32" ? 4 : 2,
  };
}

// --- activations ------------------------------------------------------------------------------------------------------

function attentionBytes(setup) {
  const { model: m, microBatch: rows, tokens, productBytes: c } = setup;
  const [q, scores] = [tokens * m.heads * m.head_width, rows * m.heads * setup.sequence ** 2];
  if (setup.attention === "sdpa") {
    let kept = 4 * q * c + tokens * m.heads * FP32;
    if (m.family === "llama") kept -= 2 * (m.heads - m.kv_heads) * m.head_width * tokens * c;
    if (m.family === "bert") kept += rows * setup.sequence ** 2 * c;
    if (m.family === "gpt_neox") kept += 3 * q * c;
    return kept;
  }
  let kept = 4 * q * c;
  if (m.family === "gptj") kept += 4 * setup.sequence * m.rotary * c + (setup.weightBytes === 2 ? 4 * q : 0);
  if (m.family === "gemma2") kept += scores * c; // the soft cap's tanh
  const fp32Softmax = ["gptj", "gpt_neox", "gemma2", "llama"].includes(m.family) || setup.autocast;
  kept += scores * (fp32Softmax ? FP32 : c);
  if (m.attention_dropout > 0) kept += scores * (c + 1);
  else if (fp32Softmax && c === 2) kept += scores * c;
  return kept;
}

const geluInFp32 = (setup) => WRITTEN_OUT.includes(setup.model.family) && setup.autocast;

function layerBytes(setup) {
  const { model: m, tokens, productBytes: c, weightBytes: s, autocast } = setup;
  const [h, f] = [tokens * m.hidden, tokens * m.inner];
  let kept = attentionBytes(setup);
  if (m.family === "gemma2") {
    kept += 4 * f * c + h * (s === 2 ? 36 : autocast ? 42 : 40) + 4 * (tokens + m.hidden) * FP32;
  } else if (m.family === "llama") {
    kept += 4 * f * c + h * (s === 2 ? 16 : autocast ? 26 : 24) + 2 * tokens * FP32;
  } else {
    const norms = m.family === "gptj" ? 1 : 2;
    const adds = m.family === "gptj" || (m.family === "gpt_neox" && m.parallel) ? 1 : 2;
    kept += geluInFp32(setup) ? 16 * f : f * c * (WRITTEN_OUT.includes(m.family) ? 5 : 2);
    kept += h * s * adds + 2 * norms * tokens * s;
    const copies = ["bert", "gptj"].includes(m.family) ? 4 : 2;
    kept += autocast ? h * 2 * copies : h * s * norms;
    if (m.hidden_dropout > 0) kept += 2 * h;
  }
  return kept + (autocast ? 2 * matrixElements(m) : 0);
}

// What the embeddings keep, what everything after the last layer keeps, and the logits' share of the latter.
function endsBytes(setup) {
  const { model: m, tokens, weightBytes: s, productBytes: c, autocast } = setup;
  const h = tokens * m.hidden;
  const mask = m.embedding_dropout > 0 ? h : 0;
  if (m.family === "bert") {
    const pooled = setup.microBatch * m.hidden;
    const head = pooled * c * (m.embedding_dropout > 0 ? 3 : 1) + (autocast ? 2 * m.hidden ** 2 + 2 * pooled : 0);
    return [h * s + 2 * tokens * s + mask + (autocast ? 0 : h * s), head, 0];
  }
  const logits = FP32 * tokens * m.vocabulary;
  let [embeddings, head] = [0, 0];
  if (m.family === "gemma2") {
    embeddings = 2 * setup.sequence * m.head_width * s;
    head = h * (setup.precision === "fp32" ? 12 : 10) + tokens * m.vocabulary * c;
  } else if (m.family === "llama") {
    embeddings = 2 * setup.sequence * m.head_width * s;
    head = h * (s === 2 ? 8 : autocast ? 10 : 12) + tokens * FP32;
  } else {
    embeddings = h * s + mask + (m.family === "gpt_neox" ? 2 * setup.sequence * m.rotary * s : 0);
    head = h * (autocast ? 2 : s) + 2 * tokens * s;
  }
  if (autocast) head += 2 * m.vocabulary * m.hidden;
  return [embeddings, head + logits, logits];
}

function activations(setup) {
  const { model: m, tokens, weightBytes: s } = setup;
  const whole = layerBytes(setup);
  let [embeddings, head, logits] = endsBytes(setup);
  let layer = whole;
  if (setup.checkpointing) {
    layer = tokens * m.hidden * s; // only its input stays, and the mask that all layers share
    if (setup.attention === "eager") embeddings += setup.sequence ** 2 * s * (m.family === "bert" ? setup.microBatch : 1);
  }
  const feed = ["bert", "gpt_neox"].includes(m.family) ? 1 : 2;
  let extra = feed * tokens * m.inner * (geluInFp32(setup) ? FP32 : setup.productBytes);
  if (m.family !== "bert") extra += tokens * m.hidden * s;
  else if (!setup.autocast && !setup.checkpointing) extra -= tokens * m.hidden * s;
  const gradient = m.family === "bert" ? 0 : FP32 * tokens * m.vocabulary;
  return {
    embeddings, layer, head, logits, kept: embeddings + m.layers * layer + head,
    recomputed: setup.checkpointing ? whole : 0,
    lossTemporaries: 2 * gradient, layerTemporaries: extra,
    gradientOfLogits: Math.floor((gradient * setup.productBytes) / FP32),
  };
}

// The activations from moment to moment: {kept, most, atUse: name -> bytes, gradients: [{tensor, most, complete}]}, where a
// moment is [kept from the forward pass, made by the backward pass].
function profile(setup) {
  const [a, rows] = [activations(setup), tensors(setup.model)];
  const tied = readsOutByEmbeddings(setup.model) ? rows[0] : null;
  const waits = tied ? tied.elements * setup.weightBytes : 0;
  const starts = [[a.kept, a.lossTemporaries], [a.kept - a.logits, a.gradientOfLogits + waits]].slice(0, tied ? 2 : 1);
  const [sizes, done, left] = [{}, {}, { head: a.kept - a.logits, embeddings: a.embeddings }];
  for (const tensor of rows) sizes[tensor.block] = (sizes[tensor.block] || 0) + tensor.elements;
  for (const i of range(setup.model.layers)) left[`layer.${i}`] = a.embeddings + (i + 1) * a.layer;
  const inUse = { head: tied ? 0 : a.gradientOfLogits, embeddings: 0 };
  const gradients = [];
  for (const tensor of rows.slice().reverse()) {
    const [block, isLayer] = [tensor.block, tensor.block.startsWith("layer")];
    const share = (done[block] || 0) / sizes[block];
    let kept = left[block] - (isLayer ? a.recomputed || a.layer : 0) * share;
    if (a.recomputed && isLayer) kept += a.recomputed;
    const needed = Math.trunc(isLayer ? a.layerTemporaries : inUse[block]);
    const [waiting, both] = tensor === tied ? [0, 2 * waits] : [waits, waits];
    gradients.push({ tensor, most: [kept, needed + both], complete: [kept, needed + waiting] });
    done[block] = (done[block] || 0) + tensor.elements;
  }
  const atUse = Object.fromEntries(rows.map((tensor) => [tensor.name, tensor.block === "head" ? a.kept : left[tensor.block]]));
  return { kept: a.kept, most: starts.reduce((x, y) => (y[0] + y[1] > x[0] + x[1] ? y : x)), atUse, gradients };
}
