// The page of the calculator: reads the form, looks the answer up in the page's tables, draws it. Its state stands in
// the address. tools/calculator_tables.py writes the tables, and says what a polynomial is.
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

const placeOf = (part) => Object.keys(data.colours).indexOf(part);

// Return the bytes that a rank holds at the peak, by part.
function partsAtPeak(question, name) {
  const tables = data.models[question.model][question.precision][question.recomputes ? "recomputed" : "kept"];
  const single = question.rows === 1 ? 1 : 0;
  const ofArm = tables.arms[name][data.arms[name].alone ? 0 : data.gpus.indexOf(question.gpus)];
  const moments = (question.passes > 1 && ofArm[1]) || ofArm[0];
  const held = moments[single].map(([place, ...parts]) => {
    parts[placeOf("activations")] += evaluate(tables.activations[single][place], question);
    return parts;
  });
  const peak = held.reduce((a, b) => (sum(b) > sum(a) ? b : a));
  peak[placeOf("other")] += evaluate(tables.inputs[single], question);
  peak[placeOf("optimizer")] += moreStates(question, name)[0];
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
  const question = { recomputes: form.elements.recomputes.checked };
  for (const name of ["model", "gpu", "precision", "optimizer"]) question[name] = form.elements[name].value;
  for (const name of ["gpus", "rows", "tokens", "passes"]) question[name] = Number(form.elements[name].value);
  return question;
}

// What is wrong with the numbers, in a sentence; nothing if they can be computed with.
function problemOf({ model, tokens }) {
  const wrong = [...form.elements].find((field) => field.type === "number" && !field.checkValidity());
  if (wrong) return `${wrong.parentNode.firstChild.textContent.trim()} must be a whole number, at least ${wrong.min}.`;
  const { positions } = data.models[model];
  return positions && tokens > positions ? `This model reads at most ${positions} tokens per row.` : "";
}

// --- the answer in words ----------------------------------------------------------------------------------------------

// Text of bytes, with three significant digits: study/core/text.py.
function sizeWords(bytes) {
  for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (Math.abs(bytes) >= 0.9995 * factor) return `${Number((bytes / factor).toPrecision(3))} ${unit}`;
  return `${Math.round(bytes)} bytes`;
}

// The arm that `study advise` would prefer if all took as long: one that leaves room, that offloads nothing, and the
// first of these in `study arms`. One process uses one GPU, and ranks that share nothing are none.
function simplestOf(question, answers) {
  const offloads = (each) => each.hostBytes + each.diskBytes > 0;
  const fitting = answers.filter((each) => {
    const makesSense = data.arms[each.name].alone ? question.gpus === 1 : question.gpus > 1 || offloads(each);
    return makesSense && each.fits !== "no";
  });
  const roomy = fitting.filter((each) => each.fits === "yes");
  const leaveRoom = roomy.length ? roomy : fitting;
  return leaveRoom.find((each) => !offloads(each)) ?? leaveRoom[0];
}

function sentenceOf(question, answers) {
  const gpu = data.gpu_kinds[question.gpu];
  const machine = `${question.gpus} x ${question.gpu} (${sizeWords(gpu.memory_bytes)} each)`;
  const fitting = answers.filter((each) => each.fits !== "no");
  const simplest = simplestOf(question, answers);
  if (!simplest) {
    const least = answers.reduce((a, b) => (b.peakBytes < a.peakBytes ? b : a));
    return `Nothing fits on ${machine}: ${least.name} needs ${sizeWords(least.peakBytes)} of a GPU. Try more GPUs or fewer tokens.`;
  }
  const host = simplest.nodeBytes ? `, with ${sizeWords(simplest.nodeBytes)} of a node's host memory` : "";
  const needs = `${sizeWords(simplest.peakBytes)}${host}, and ${simplest.fits === "just" ? "fits only just" : "leaves room"}`;
  const computes = `To compute a step takes at least ${Number(simplest.leastS.toPrecision(2))} s under each.`; // the same products
  return `On ${machine}, ${fitting.length} of ${answers.length} arms fit. The simplest is ${simplest.name}, which needs ${needs}. ${computes} study advise also compares their times.`;
}

function refusedWords(question) {
  const refused = Object.keys(data.arms).filter((name) => moreStates(question, name) === null);
  return refused.length ? ` ${question.optimizer} does not go with ${refused.join(", ")}: study estimate says why.` : "";
}

// The command for zero3, or for another arm where the optimizer does not go with it.
function commandOf({ model, gpus, gpu, precision, optimizer, rows, tokens, passes, recomputes }, answers) {
  const { name } = answers.find((each) => each.name === "zero3") ?? answers[0];
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

function drawBars(answers, gpu) {
  const most = Math.max(gpu.memory_bytes, ...answers.map((each) => each.peakBytes));
  const scale = Math.min(most, MOST_SCALE * gpu.memory_bytes);
  const share = (bytes) => `${(100 * bytes) / scale}%`;
  const parts = Object.entries(data.colours);
  const bars = answers.map((each) => {
    const styles = parts.map(([, colour], place) => `width: ${share(each.parts[place])}; background: ${colour}`);
    const pieces = styles.map((style) => element("i", { style }));
    const words = parts.map(([part], place) => `${part} ${sizeWords(each.parts[place])}`).join(", ");
    const limit = element("u", { style: `left: ${share(gpu.memory_bytes)}` });
    const shown = { class: each.peakBytes > scale ? "track cut" : "track", role: "img", "aria-label": `${each.name}: ${words}` };
    const arm = element("i", { class: "arm", style: `background: ${data.arms[each.name].colour}` });
    const name = element("span", { class: "name" }, arm, each.name);
    const total = element("b", {}, sizeWords(each.peakBytes));
    return element("div", { class: `stack ${each.fits}` }, name, element("span", shown, ...pieces, limit), total);
  });
  const keys = parts.flatMap(([part, colour]) => [element("span", { class: "key", style: `--tone: ${colour}` }, part), " "]);
  const size = `a GPU's ${sizeWords(gpu.memory_bytes)}`;
  const limit = element("span", { class: "key" }, element("i", { class: "limit" }), size);
  const caption = element("figcaption", {}, ...keys, limit, " What does not fit is faint.");
  const label = { class: "stacks", "aria-label": "Memory at the peak by arm" };
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
    ];
    const [name, fits] = [element("th", { scope: "row" }, each.name), element("td", { class: `fits ${each.fits}` }, each.fits)];
    const numbers = cells.map((text) => element("td", { class: "number" }, text));
    return element("tr", { "data-arm": each.name }, name, fits, ...numbers, element("td", { class: "moved" }, sent.join(",\n") || "none"));
  });
  document.querySelector("#arms tbody").replaceChildren(...rows);
}

function answer() {
  const question = asked();
  const problem = problemOf(question);
  document.getElementById("problem").textContent = problem;
  document.getElementById("problem").hidden = !problem;
  document.getElementById("answer").hidden = Boolean(problem);
  if (problem) return;
  const answers = armsOf(question).map((name) => answerOf(question, name));
  document.getElementById("sentence").textContent = sentenceOf(question, answers) + refusedWords(question);
  drawBars(answers, data.gpu_kinds[question.gpu]);
  drawTable(question, answers);
  document.getElementById("command").textContent = commandOf(question, answers);
  document.getElementById("rest").hidden = false;
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
  form.elements.recomputes.checked = values.has("recomputes");
  for (const [name, value] of values) {
    const field = form.elements[name];
    if (field && field.type !== "checkbox") field.value = value;
  }
  for (const field of form.querySelectorAll("select")) if (field.selectedIndex < 0) field.selectedIndex = 0;
}

function changed() {
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
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => setTimeout(changed, 0, event));
  readAddress();
  offerPrecisions();
  form.hidden = false;
  answer();
}

start();
