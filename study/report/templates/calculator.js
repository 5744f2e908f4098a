// The page of the calculator: reads the form, looks the answer up in the page's tables, draws it. Its state stands in
// the address. study/report/calculator_tables.py writes the tables, and says what a polynomial is.
"use strict";

const LEAST_TOKENS = 2;
const MOST_ROWS = 65536; // that are tried
const MOST_SCALE = 2.5; // times a GPU's memory: longer bars are cut
const NODE_GPUS = 8;
const form = document.getElementById("calculator");
let data = null;

// --- the tables -------------------------------------------------------------------------------------------------------

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

// Evaluate a polynomial. For several rows it has six coefficients, and three for a single row.
function evaluate(polynomials, { rows, tokens }) {
  const beyond = tokens - LEAST_TOKENS;
  const terms = [1, beyond, (beyond * (beyond - 1)) / 2];
  const at = (coefficients) => sum(coefficients.map((each, place) => each * terms[place]));
  return rows === 1 ? at(polynomials) : at(polynomials.slice(0, 3)) + (rows - 2) * at(polynomials.slice(3));
}

// Return the bytes that a rank holds at the peak, by part.
function partsAtPeak(question, name) {
  const tables = data.models[question.model][question.precision][question.recomputes ? "recomputed" : "kept"];
  const single = question.rows === 1 ? 1 : 0;
  const ofArm = tables.arms[name][data.arms[name].alone ? 0 : data.gpus.indexOf(question.gpus)];
  const moments = (question.passes > 1 && ofArm[1]) || ofArm[0];
  const held = moments[single].map(([place, ...parts]) => {
    parts[data.activations] += evaluate(tables.activations[single][place], question);
    return parts;
  });
  const peak = held.reduce((a, b) => (sum(b) > sum(a) ? b : a));
  peak[data.other] += evaluate(tables.inputs[single], question);
  peak[data.optimizer] += moreStates(question, name)[0];
  return peak;
}

const movedOf = (question, name) =>
  data.models[question.model][question.precision].moved[name][data.arms[name].alone ? 0 : data.gpus.indexOf(question.gpus)];

// How many bytes more than AdamW an optimizer keeps on a GPU and on the host; null if a library refuses it.
function moreStates(question, name) {
  return question.optimizer === "adamw" ? [0, 0] : movedOf(question, name)[4][question.optimizer];
}

const armsOf = (question) => Object.keys(data.arms).filter((name) => moreStates(question, name) !== null);

function answerOf(question, name) {
  const [model, gpu, alone] = [data.models[question.model], data.gpu_kinds[question.gpu], data.arms[name].alone];
  const tables = model[question.precision];
  const ranks = alone ? 1 : question.gpus;
  const [host, hostOfMore, diskBytes, collectives] = movedOf(question, name);
  const parts = partsAtPeak(question, name);
  const peakBytes = sum(parts);
  const free = gpu.memory_bytes - gpu.reserve_bytes - peakBytes;
  const hostBytes = (question.passes > 1 ? hostOfMore : host) + moreStates(question, name)[1];
  const pass = tables[question.recomputes ? "recomputed" : "kept"];
  const flops = evaluate(pass.flops[name][question.rows === 1 ? 1 : 0], question) * question.passes;
  return {
    name,
    parts,
    peakBytes,
    fits: free < 0 ? "no" : free < data.miss * peakBytes ? "just" : "yes",
    hostBytes,
    nodeBytes: hostBytes ? Math.min(ranks, NODE_GPUS) * (hostBytes + data.host_process_bytes) : 0,
    diskBytes,
    traffic: Object.fromEntries(
      Object.entries(collectives).map(([kind, [fixed, each]]) => [kind, fixed + each * question.passes]),
    ),
    leastS: flops / (question.precision === "fp32" ? gpu.single_flops_per_s : gpu.half_flops_per_s),
  };
}

// The most rows per pass that fit, by doubling and then halving.
function mostRows(question, name) {
  const fits = (rows) => answerOf({ ...question, rows }, name).fits !== "no";
  if (!fits(1)) return 0;
  let [least, most] = [1, 2];
  while (most <= MOST_ROWS && fits(most)) [least, most] = [most, 2 * most];
  while (most - least > 1) {
    const middle = Math.floor((least + most) / 2);
    if (fits(middle)) least = middle;
    else most = middle;
  }
  return least;
}

// --- the question -----------------------------------------------------------------------------------------------------

function asked() {
  const fields = form.elements;
  const question = { recomputes: fields.recomputes.checked };
  for (const name of ["model", "gpu", "precision", "optimizer"]) question[name] = fields[name].value;
  for (const name of ["gpus", "rows", "tokens", "passes", "batch"]) question[name] = Number(fields[name].value);
  return question;
}

// What is wrong with the numbers, in a sentence; nothing if they can be computed with.
function problemOf({ model, tokens, rows, gpus, batch }) {
  const wrong = [...form.elements].find((field) => field.type === "number" && !field.checkValidity());
  if (wrong) return `${wrong.parentNode.firstChild.textContent.trim()} must be a whole number, at least ${wrong.min}.`;
  const { positions } = data.models[model];
  if (positions && tokens > positions) return `This model reads at most ${positions} tokens per row.`;
  return batch % (rows * gpus)
    ? `A step of ${batch} rows does not divide into passes of ${rows} rows on ${gpus} GPUs: give a multiple of ${rows * gpus}.`
    : "";
}

// --- a pasted config.json ---------------------------------------------------------------------------------------------

const DIMENSIONS = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"];
// What changes no tensor of a step, and what would if it had another value.
const WITHOUT_EFFECT = `model_type architectures _name_or_path transformers_version torch_dtype dtype use_cache bos_token_id
  eos_token_id pad_token_id initializer_range rms_norm_eps rope_theta max_window_layers head_dim tie_word_embeddings
  max_position_embeddings`.split(/\s+/);
const ONLY = { attention_bias: false, mlp_bias: false, attention_dropout: 0, hidden_act: "silu", pretraining_tp: 1, use_sliding_window: false };
const ROTATIONS = ["default", "llama3"]; // both are computed when the model is built

// The sizes of a model, with transformers' defaults.
function sizesOf(config) {
  const heads = config.num_attention_heads;
  const sizes = Object.fromEntries(DIMENSIONS.map((name) => [name, config[name]]));
  sizes.num_key_value_heads ??= config.model_type === "llama" ? heads : undefined;
  sizes.head_dim = config.head_dim ?? (config.model_type === "qwen3" ? 128 : config.hidden_size / heads);
  return sizes;
}

function parametersOf(config) {
  const [hidden, layers, heads, groups, inner, vocabulary, width] = Object.values(sizesOf(config));
  const biases = config.model_type === "qwen2" ? (heads + 2 * groups) * width : 0;
  const norms = 2 * hidden + (config.model_type === "qwen3" ? 2 * width : 0);
  const layer = 2 * hidden * width * (heads + groups) + 3 * hidden * inner + biases + norms;
  return layers * layer + hidden + vocabulary * hidden * (config.tie_word_embeddings ? 1 : 2);
}

// Whether a setting changes no tensor.
function isPlain(config, name) {
  if (DIMENSIONS.includes(name) || WITHOUT_EFFECT.includes(name)) return true;
  if (name === "sliding_window") return config.model_type !== "mistral" ? !config.use_sliding_window : config[name] === null;
  if (name === "rope_scaling" || name === "rope_parameters") return !config[name] || ROTATIONS.includes(config[name].rope_type);
  if (name === "layer_types") return config[name].every?.((each) => each === "full_attention");
  return name in ONLY && config[name] === ONLY[name];
}

// What the page cannot read of a config, in a sentence; nothing if it can read all of it.
function lackOf(config) {
  const families = [...new Set(Object.values(data.configs).map((each) => each.model_type))];
  const family = config?.model_type;
  if (!families.includes(family)) return `This page reads configs of ${families.join(", ")}, and the model_type here is ${family ?? "not given"}.`;
  const sizes = sizesOf(config);
  const lacking = Object.keys(sizes).filter((name) => !Number.isInteger(sizes[name]) || sizes[name] < 1);
  if (lacking.length) return `${lacking.join(", ")} must be a whole number, at least 1.`;
  if (family === "mistral" && config.sliding_window === undefined) return "sliding_window is not given: a mistral then has one of 4096.";
  const unread = Object.keys(config).filter((name) => !isPlain(config, name));
  return unread.length ? `This page does not know what ${unread.join(", ")} changes.` : "";
}

function configWords(text) {
  let config;
  try {
    config = JSON.parse(text);
  } catch (error) {
    return `This is not JSON: ${error.message}.`;
  }
  const shown = `Below is still ${form.elements.model.value}. For this config: study estimate --model FOLDER, the folder with the config.json.`;
  const lack = lackOf(config);
  if (lack) return `${lack} ${shown}`;
  const identity = (each) => JSON.stringify([each.model_type, sizesOf(each), Boolean(each.tie_word_embeddings)]);
  const [name, known] = Object.entries(data.configs).find(([, each]) => identity(each) === identity(config)) ?? [];
  if (!name) {
    const parameters = parametersOf(config);
    const states = `Weights, gradients and AdamW take 16 bytes each, ${sizeWords(16 * parameters)}, before activations.`;
    return `A ${config.model_type} with ${parameters.toLocaleString("en")} parameters: the page has no table for it. ${states} ${shown}`;
  }
  form.elements.model.value = name;
  changed();
  const [most, least] = [config.max_position_embeddings ?? known.max_position_embeddings, known.max_position_embeddings];
  return `This model has the dimensions of ${name}, which is now chosen.` + (most > least ? ` It is answered up to ${least} tokens per row.` : "");
}

function readConfig(event) {
  event.stopPropagation(); // no part of the question
  const place = document.getElementById("config-answer");
  place.textContent = event.target.value.trim() && configWords(event.target.value);
  place.hidden = !place.textContent;
}

// --- the answer in words ----------------------------------------------------------------------------------------------

// Text of bytes, with three significant digits: study/io/numbers.py.
function sizeWords(bytes) {
  for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (Math.abs(bytes) >= 0.9995 * factor) return `${Number((bytes / factor).toPrecision(3))} ${unit}`;
  return `${Math.round(bytes)} bytes`;
}

const secondsWords = (seconds) => `${Number(seconds.toPrecision(2))} s`;

function sentenceOf(question, answers) {
  const gpu = data.gpu_kinds[question.gpu];
  const machine = `${question.gpus} x ${question.gpu} (${sizeWords(gpu.memory_bytes)} each)`;
  const fitting = answers.filter((each) => each.fits !== "no");
  const least = (fitting.length ? fitting : answers).reduce((a, b) => (b.peakBytes < a.peakBytes ? b : a));
  const size = sizeWords(least.peakBytes);
  if (!fitting.length)
    return `Nothing fits on ${machine}: ${least.name} needs ${size} of a GPU. Try more GPUs or fewer tokens.`;
  const count = `${fitting.length} of ${answers.length} arms fit`;
  return `On ${machine}, ${count}. ${least.name} needs the least memory, ${size}.`;
}

// The rule of `study advise`, as far as memory alone can say it: study/predictor/advice/advise.py.
function choiceOf({ gpus }, answers) {
  const known = (each) => data.arms[each.name];
  let fitting = answers.filter((each) => each.fits !== "no" && (gpus === 1 || !known(each).alone));
  if (gpus === 1 && fitting.some((each) => known(each).alone)) // it shares nothing: only offloading can help
    fitting = fitting.filter((each) => known(each).alone || known(each).offloads);
  const drawbacks = (each) => known(each).offloads + 2 * (each.fits === "just");
  const order = (each) => 100 * drawbacks(each) + known(each).place;
  return fitting.reduce((a, b) => (a && order(a) < order(b) ? a : b), null);
}

// What `study advise` says of this model on these GPUs, if that is kept. It assumes a batch, and knows times.
const adviceOf = ({ model, gpus, gpu }) => data.advice[model]?.[`${gpus} ${gpu}`];
const adviseCommand = ({ model, gpus, gpu }) => `study advise --model ${model} --gpus ${gpus} --gpu ${gpu}`;

function choiceWords(question, answers) {
  const choice = choiceOf(question, answers);
  const lacking = Object.keys(data.arms).filter((name) => !answers.some((each) => each.name === name));
  const refused = lacking.length ? ` ${question.optimizer} does not go with ${lacking.join(", ")}: study estimate says why.` : "";
  if (!choice) return refused.trim();
  const room = choice.fits === "yes" ? "fits with room to spare" : "only just fits";
  const home = data.arms[choice.name].offloads ? ", offloads to the host" : "";
  const why = "of the arms with as few drawbacks (little room, offloading) it is the simplest";
  const other = adviceOf(question)
    ? "The answer above also knows the time of a step, the host's memory, other rows and recomputation."
    : `${adviseCommand(question)} also knows the time of a step, the host's memory, rows per pass and recomputation, and may choose another.`;
  return `With these rows and by memory alone, ${choice.name}: it ${room}${home}, and ${why}. ${other}${refused}`;
}

function drawAdvice(question) {
  const kept = adviceOf(question);
  const place = document.getElementById("advice");
  place.hidden = !kept;
  if (!kept) return;
  const [answer, ...others] = kept.words;
  place.querySelector(".sentence").textContent = answer;
  place.querySelector(".alternative").textContent = [...others, `So says ${adviseCommand(question)}.`].join(" ");
  const isHere = kept.settings?.recomputes < 2 && kept.settings.precision in data.models[question.model]; // of all layers
  const isShown = isHere && Object.entries(kept.settings).every(([name, value]) => question[name] == value); // true == 1
  place.querySelector("button").hidden = !isHere || isShown;
}

function showAdvice() {
  const kept = adviceOf(asked());
  for (const [name, value] of Object.entries(kept.settings)) {
    const field = form.elements[name];
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
  document.getElementById("command-arm").value = kept.arm;
  changed();
}

function conditionsOf({ gpus, gpu, precision, optimizer, rows, tokens, passes, recomputes }) {
  const lacks = precision.startsWith("bf16") && !data.gpu_kinds[gpu].has_bf16;
  return [
    `${gpus} x ${gpu}, ${data.precisions[precision]}, ${data.optimizers[optimizer]}, ${rows} x ${tokens} tokens per pass and GPU`,
    `${passes} ${passes === 1 ? "pass" : "passes"} per step, activations are ${recomputes ? "recomputed" : "kept"}. Predicted.`,
  ].join(", ") + (lacks ? ` ${gpu} has no bf16: fp16 takes as many bytes.` : "");
}

function commandOf({ model, gpus, gpu, precision, optimizer, rows, tokens, passes, recomputes }, name) {
  const training = `--precision ${precision} --micro-batch ${rows} --sequence ${tokens} --accumulation ${passes}`;
  const machine = `--arm ${name} --ranks ${gpus} --gpu ${gpu}`;
  const buckets = data.arms[name].buckets ? ` --buckets ${data.bucket_elements}` : "";
  const states = optimizer === "adamw" ? "" : ` --optimizer ${optimizer}`;
  return `study estimate --model ${model} ${machine} ${training}${buckets}${states}${recomputes ? " --checkpointing" : ""}`;
}

// --- drawing ----------------------------------------------------------------------------------------------------------

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function keyOf(colour, text) {
  return element("span", { class: "key", style: `--tone: ${colour}` }, text);
}

function drawBars(answers, gpu) {
  const most = Math.max(gpu.memory_bytes, ...answers.map((each) => each.peakBytes));
  const scale = Math.min(most, MOST_SCALE * gpu.memory_bytes);
  const share = (bytes) => `${(100 * bytes) / scale}%`;
  const parts = Object.entries(data.colours);
  const bars = answers.map((each) => {
    const pieces = parts.map(([part, colour], place) => {
      const style = `width: ${share(each.parts[place])}; background: ${colour}`;
      return element("i", { style, title: `${part}: ${sizeWords(each.parts[place])}` });
    });
    const words = parts.map(([part], place) => `${part} ${sizeWords(each.parts[place])}`).join(", ");
    const limit = element("u", { style: `left: ${share(gpu.memory_bytes)}` });
    const kind = each.peakBytes > scale ? "track cut" : "track";
    const shown = { class: kind, role: "img", "aria-label": `${each.name}: ${words}` };
    const arm = element("i", { class: "arm", style: `background: ${data.arms[each.name].colour}` });
    const name = element("span", { class: "name" }, arm, each.name);
    const total = element("b", {}, sizeWords(each.peakBytes));
    return element("div", { class: `stack ${each.fits}` }, name, element("span", shown, ...pieces, limit), total);
  });
  const keys = parts.flatMap(([part, colour]) => [keyOf(colour, part), " "]);
  const size = `a GPU's ${sizeWords(gpu.memory_bytes)}`;
  const limit = element("span", { class: "key" }, element("i", { class: "limit" }), size);
  const hint = " Point at a part for its size. What does not fit is faint.";
  const caption = element("figcaption", {}, ...keys, limit, hint);
  const label = { class: "stacks", role: "group", "aria-label": "Memory at the peak by arm" };
  document.getElementById("bars").replaceChildren(element("figure", label, ...bars, caption));
}

function drawTable(question, answers) {
  const rows = answers.map((each) => {
    const most = mostRows(question, each.name);
    const collectives = Object.entries(each.traffic);
    const sent = collectives.map(([kind, bytes]) => `${kind.replaceAll("_", "-")} ${sizeWords(bytes)}`);
    const cells = [
      sizeWords(each.peakBytes),
      most > MOST_ROWS ? `over ${MOST_ROWS}` : most || "none",
      each.nodeBytes ? sizeWords(each.nodeBytes) : "-",
      each.diskBytes ? sizeWords(each.diskBytes) : "-",
      secondsWords(each.leastS),
    ];
    return element(
      "tr",
      { "data-arm": each.name },
      element("th", { scope: "row" }, each.name),
      element("td", { class: `fits ${each.fits}` }, each.fits),
      ...cells.map((text) => element("td", { class: "number" }, text)),
      element("td", { class: "moved" }, sent.join(",\n") || "none"),
    );
  });
  document.querySelector("#arms tbody").replaceChildren(...rows);
}

function answer() {
  const question = asked();
  const problem = problemOf(question);
  drawAdvice(question);
  document.getElementById("problem").textContent = problem;
  document.getElementById("problem").hidden = !problem;
  document.getElementById("answer").hidden = Boolean(problem);
  if (problem) return;
  const answers = armsOf(question).map((name) => answerOf(question, name));
  const places = ["yes", "just", "no"];
  if (form.elements.order.value === "fit")
    answers.sort((a, b) => places.indexOf(a.fits) - places.indexOf(b.fits) || a.peakBytes - b.peakBytes);
  document.getElementById("sentence").textContent = sentenceOf(question, answers);
  document.getElementById("choice").textContent = choiceWords(question, answers);
  document.getElementById("conditions").textContent = conditionsOf(question);
  drawBars(answers, data.gpu_kinds[question.gpu]);
  drawTable(question, answers);
  document.getElementById("command").textContent = commandOf(question, offeredArm(answers));
  document.getElementById("rest").hidden = false;
}

// The arm of the command that is shown: one that the optimizer goes with.
function offeredArm(answers) {
  const field = document.getElementById("command-arm");
  for (const option of field.options) option.disabled = !answers.some((each) => each.name === option.value);
  if (field.selectedOptions[0].disabled) field.value = answers[0].name;
  return field.value;
}

// --- the form ---------------------------------------------------------------------------------------------------------

// Some models have tables for one precision only.
function offerPrecisions() {
  const { model, precision } = form.elements;
  for (const option of precision.options) option.disabled = !(option.value in data.models[model.value]);
  const offered = [...precision.options].filter((option) => !option.disabled);
  if (!offered.some((option) => option.selected)) precision.value = offered[0].value;
}

function readAddress() {
  const values = new URLSearchParams(location.search);
  if (values.size === 0) return;
  form.elements.recomputes.checked = values.has("recomputes");
  for (const [name, value] of values) {
    const field = form.elements[name];
    if (field && field.type !== "checkbox") field.value = value;
  }
  for (const field of form.querySelectorAll("select")) if (field.selectedIndex < 0) field.selectedIndex = 0;
}

// The rows of a step are rows per pass x GPUs x passes. Who types them asks for the passes.
function balance(typed) {
  const { batch, passes, rows, gpus } = form.elements;
  const each = rows.value * gpus.value;
  if (typed !== batch) batch.value = each * passes.value;
  else if (batch.value >= each && batch.value % each === 0) passes.value = batch.value / each;
}

function changed(event) {
  balance(event?.target);
  if (event) document.getElementById("config-answer").hidden = true;
  offerPrecisions();
  answer();
  history.replaceState(null, "", `?${new URLSearchParams(new FormData(form))}${location.hash}`);
}

// The page has its tables compressed, as text.
async function start() {
  const text = document.getElementById("calculator-data").textContent.trim();
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  data = Object.assign(await new Response(stream).json(), JSON.parse(document.getElementById("machines").textContent));
  const commandArm = document.getElementById("command-arm");
  commandArm.append(...Object.keys(data.arms).map((name) => element("option", {}, name)));
  commandArm.value = "zero3";
  commandArm.addEventListener("input", answer);
  document.querySelector("#advice button").addEventListener("click", showAdvice);
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => setTimeout(changed, 0, event));
  document.getElementById("config").addEventListener("input", readConfig);
  readAddress();
  balance();
  offerPrecisions();
  form.hidden = false;
  answer();
}

start();
