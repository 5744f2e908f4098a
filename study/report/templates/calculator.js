// The page of the calculator: reads the form, asks the formulas, draws. Its state stands in the address.
"use strict";

const data = JSON.parse(document.getElementById("calculator-data").textContent);
const form = document.getElementById("calculator");
const OWN = "own numbers";
const SIZES = ["layers", "hidden", "heads", "kv_heads", "inner", "vocabulary"];
const MOST_ROWS = 4096; // that are tried
const MOST_SCALE = 2.5; // times a GPU's memory: longer bars are cut

// Text of bytes, with three significant digits: study/io/numbers.py.
function sizeWords(bytes) {
  for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (Math.abs(bytes) >= 0.9995 * factor) return `${Number((bytes / factor).toPrecision(3))} ${unit}`;
  return `${Math.round(bytes)} bytes`;
}
const secondsWords = (seconds) => (seconds >= 100 ? Math.round(seconds).toLocaleString("en") : Number(seconds.toPrecision(2)).toString());
const countWords = (number) => (number >= 1e9 ? `${Number((number / 1e9).toPrecision(3))} billion` : `${Number((number / 1e6).toPrecision(3))} million`);

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// --- the question -----------------------------------------------------------------------------------------------------

const numberIn = (name) => Number(form.elements[name].value);

// What is wrong with the numbers, in a sentence; nothing if they can be computed with.
function problemOf(model, question) {
  const names = [...form.elements].filter((field) => field.type === "number" && !field.checkValidity());
  if (names.length) return `${names[0].parentNode.firstChild.textContent.trim()} must be a whole number, at least 1.`;
  if (model.hidden % model.heads && model.family === "llama") return `Heads (${model.heads}) must divide the hidden size (${model.hidden}).`;
  if (model.heads % model.kv_heads) return `Key and value heads (${model.kv_heads}) must divide the heads (${model.heads}).`;
  if (model.layers > 1000) return "At most 1,000 layers.";
  if (model.positions && question.sequence > model.positions) return `This model reads at most ${model.positions} tokens per row.`;
  return "";
}

function asked() {
  const chosen = form.elements.model.value;
  const sizes = Object.fromEntries(SIZES.map((name) => [name, numberIn(name)]));
  const model = chosen === OWN ? decoder({ ...sizes, tied: form.elements.tied.checked }) : data.models[chosen];
  const question = { ranks: numberIn("gpus"), gpu: form.elements.gpu.value, precision: form.elements.precision.value, checkpointing: form.elements.checkpointing.checked };
  for (const name of ["microBatch", "sequence", "accumulation"]) question[name] = numberIn(name);
  return [model, question];
}

function answerOf(model, question, name) {
  const [gpu, arm] = [data.gpus[question.gpu], data.arms[name]];
  const setup = setupOf(model, arm, question);
  const result = { name, arm, setup, ...estimate(setup) };
  const headroom = gpu.memory_bytes - gpu.reserve_bytes - result.peakBytes;
  const local = Math.min(setup.ranks, 8);
  result.fits = headroom < 0 ? "no" : headroom < data.miss * result.peakBytes ? "just" : "yes";
  result.nodeBytes = result.hostBytes ? local * (result.hostBytes + data.host_process_bytes) : 0;
  result.moved = sum(Object.values(result.traffic));
  result.time = result.nvmeBytes ? null : stepTime(setup, gpu, data);
  result.tokensPerS = result.time && (setup.ranks * setup.tokens * setup.accumulation) / result.time.seconds;
  return result;
}

// The most rows per pass that fit, by doubling and then halving.
function mostRows(model, question, name) {
  const gpu = data.gpus[question.gpu];
  const fits = (microBatch) => estimate(setupOf(model, data.arms[name], { ...question, microBatch })).peakBytes <= gpu.memory_bytes - gpu.reserve_bytes;
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

// --- the answer in words ----------------------------------------------------------------------------------------------

const timeWords = ({ seconds, low, high }) => `${secondsWords(seconds)} s (${secondsWords(low)} to ${secondsWords(high)})`;

function sentenceOf(model, question, answers) {
  const [fitting, gpu] = [answers.filter((each) => each.fits !== "no"), data.gpus[question.gpu]];
  const machine = `${question.ranks} x ${question.gpu} (${sizeWords(gpu.memory_bytes)} each)`;
  const who = `a model of ${countWords(answers[0].parameters)} parameters`;
  const least = answers.reduce((a, b) => (b.peakBytes < a.peakBytes ? b : a));
  if (!fitting.length) return `Nothing fits: on ${machine}, ${who} needs at least ${sizeWords(least.peakBytes)} of a GPU, under ${least.name}. Try more GPUs, fewer tokens per row, or recomputing activations.`;
  const timed = fitting.filter((each) => each.time);
  const fast = timed.length ? timed.reduce((a, b) => (b.tokensPerS > a.tokensPerS ? b : a)) : null;
  const small = fitting.reduce((a, b) => (b.peakBytes < a.peakBytes ? b : a));
  const speed = fast ? ` ${fast.name} is the fastest in tokens per second, at ${timeWords(fast.time)} per step.` : "";
  return `On ${machine}, ${fitting.length} of ${answers.length} arms fit for ${who}. ${small.name} needs the least memory, ${sizeWords(small.peakBytes)}.${speed} All of this is predicted.`;
}

function conditionsOf({ ranks, gpu, precision, microBatch, sequence, accumulation, checkpointing }) {
  const passes = `${accumulation} ${accumulation === 1 ? "pass" : "passes"} per step`;
  const kept = checkpointing ? "activations are recomputed" : "activations are kept";
  const lacks = precision.startsWith("bf16") && !data.gpus[gpu].has_bf16 ? ` ${gpu} has no bf16: fp16 takes as many bytes.` : "";
  return `${ranks} x ${gpu}, ${data.precisions[precision]}, ${microBatch} x ${sequence} tokens per pass and GPU, ${passes}, ${kept}. Predicted.${lacks}`;
}

function commandOf(model, question, name) {
  const chosen = form.elements.model.value;
  const { parameters } = estimate(setupOf(model, data.arms[name], question));
  const numbers = `--params ${parameters} --layers ${model.layers} --hidden ${model.hidden} --ffn ${model.inner} --heads ${model.heads} --kv-heads ${model.kv_heads} --vocabulary ${model.vocabulary}`;
  const which = model.family === "llama" ? numbers : `--model ${chosen}`;
  const training = `--precision ${question.precision} --micro-batch ${question.microBatch} --sequence ${question.sequence} --accumulation ${question.accumulation}`;
  return `study estimate ${which} --arm ${name} --ranks ${question.ranks} --gpu ${question.gpu} ${training}${question.checkpointing ? " --checkpointing" : ""}`;
}

// --- drawing ----------------------------------------------------------------------------------------------------------

function partsOf(components) {
  const parts = Object.fromEntries(Object.keys(data.colours).map((part) => [part, 0]));
  for (const [role, bytes] of Object.entries(components)) parts[data.part_of[role] || "other"] += bytes;
  return Object.entries(parts).filter((pair) => pair[1]);
}

function drawBars(answers, gpu) {
  const scale = Math.min(Math.max(gpu.memory_bytes, ...answers.map((each) => each.peakBytes)), MOST_SCALE * gpu.memory_bytes);
  const place = (100 * gpu.memory_bytes) / scale;
  const rows = answers.map((each) => {
    const parts = partsOf(each.atPeak);
    const words = parts.map(([part, bytes]) => `${part} ${sizeWords(bytes)}`).join(", ");
    const pieces = parts.map(([part, bytes]) => element("i", { style: `width: ${(100 * bytes) / scale}%; background: ${data.colours[part]}`, title: `${part}: ${sizeWords(bytes)}` }));
    const track = element("span", { class: `track${each.peakBytes > scale ? " cut" : ""}`, role: "img", "aria-label": `${each.name}: ${words}` }, ...pieces, element("u", { style: `left: ${place}%` }));
    const name = element("span", { class: "name" }, element("i", { class: "arm", style: `background: ${each.arm.colour}` }), each.name);
    return element("div", { class: `stack ${each.fits}`, "data-arm": each.name }, name, track, element("b", {}, sizeWords(each.peakBytes)));
  });
  const present = new Set(answers.flatMap((each) => partsOf(each.atPeak).map((pair) => pair[0])));
  const keys = Object.entries(data.colours).filter((pair) => present.has(pair[0])).map(([part, colour]) => element("span", { class: "key" }, element("i", { style: `background: ${colour}` }), part));
  const caption = element("figcaption", {}, ...keys.flatMap((key) => [key, " "]), element("span", { class: "key" }, element("i", { class: "limit" }), `a GPU's ${sizeWords(gpu.memory_bytes)}`), " Point at a part for its size. What does not fit is faint.");
  document.getElementById("bars").replaceChildren(element("figure", { class: "stacks", role: "group", "aria-label": "Memory at the peak by arm" }, ...rows, caption));
}

function drawTable(answers) {
  const cells = (each) => [
    each.fits, sizeWords(each.peakBytes), "…", each.nodeBytes ? sizeWords(each.nodeBytes) : "-", each.nvmeBytes ? sizeWords(each.nvmeBytes) : "-",
    each.time ? timeWords(each.time) : "depends on the disk", each.tokensPerS ? Number(each.tokensPerS.toPrecision(2)).toLocaleString("en") : "-",
    Object.entries(each.traffic).map(([kind, bytes]) => `${kind.replace("_", "-")} ${sizeWords(bytes)}`).join(",\n") || "none",
  ];
  const rows = answers.map((each) => element("tr", { "data-arm": each.name }, element("th", { scope: "row" }, each.name), ...cells(each).map((text, place) => element("td", { class: place === 0 ? `fits ${text}` : place === 7 ? "moved" : "number" }, text))));
  document.querySelector("#arms tbody").replaceChildren(...rows);
  const roles = [...new Set(answers.flatMap((each) => Object.keys(each.atPeak)))];
  document.querySelector("#components thead").replaceChildren(element("tr", {}, ...["arm", ...roles].map((role) => element("th", { scope: "col" }, role.replace("_", " ")))));
  document.querySelector("#components tbody").replaceChildren(...answers.map((each) => element("tr", {}, element("th", { scope: "row" }, each.name), ...roles.map((role) => element("td", { class: "number" }, each.atPeak[role] ? sizeWords(each.atPeak[role]) : "-")))));
}

let latest = 0;

// How many rows fit takes a dozen estimates an arm: they come one arm after the other, so that the page stays quick.
function drawRows(model, question, answers) {
  const mine = ++latest;
  const next = (place) => {
    if (mine !== latest || place >= answers.length) return;
    const rows = mostRows(model, question, answers[place].name);
    document.querySelector("#arms tbody").rows[place].cells[3].textContent = rows > MOST_ROWS ? `over ${MOST_ROWS}` : rows || "none";
    setTimeout(next, 0, place + 1);
  };
  setTimeout(next, 0, 0);
}

function answer() {
  const [model, question] = asked();
  const problem = problemOf(model, question);
  document.getElementById("problem").textContent = problem;
  document.getElementById("problem").hidden = !problem;
  document.getElementById("answer").hidden = Boolean(problem);
  if (problem) return;
  const answers = Object.keys(data.arms).map((name) => answerOf(model, question, name));
  document.getElementById("sentence").textContent = sentenceOf(model, question, answers);
  document.getElementById("conditions").textContent = conditionsOf(question);
  drawBars(answers, data.gpus[question.gpu]);
  drawTable(answers);
  drawRows(model, question, answers);
  document.getElementById("command").textContent = commandOf(model, question, document.getElementById("command-arm").value);
  document.getElementById("rest").hidden = false;
}

// --- the form ---------------------------------------------------------------------------------------------------------

// A model of the list fills the numbers in; a number that is changed makes it one's own.
function showSizes() {
  const model = data.models[form.elements.model.value];
  if (!model) return;
  for (const name of SIZES) form.elements[name].value = model[name];
  form.elements.tied.checked = model.tied;
}

function keepInAddress() {
  const values = new URLSearchParams([...new FormData(form)].filter(([name]) => form.elements.model.value === OWN || !(SIZES.includes(name) || name === "tied")));
  history.replaceState(null, "", `?${values}${location.hash}`);
}

function readAddress() {
  const values = new URLSearchParams(location.search);
  if (![...values].length) return;
  for (const box of ["tied", "checkpointing"]) form.elements[box].checked = values.has(box);
  for (const [name, value] of values) if (form.elements[name] && form.elements[name].type !== "checkbox") form.elements[name].value = value;
  for (const field of form.querySelectorAll("select")) if (field.selectedIndex < 0) field.selectedIndex = 0;
}

form.addEventListener("input", (event) => {
  if (event.target.name === "model") showSizes();
  else if (SIZES.includes(event.target.name) || event.target.name === "tied") form.elements.model.value = OWN;
  answer();
  keepInAddress();
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(() => (showSizes(), answer(), keepInAddress())));
const commandArm = document.getElementById("command-arm");
commandArm.append(...Object.keys(data.arms).map((name) => element("option", name === "zero3" ? { selected: "" } : {}, name)));
commandArm.addEventListener("input", answer);
readAddress();
showSizes();
form.hidden = false;
answer();
