// Looks up what Python computed: reports/calculator.json, which tools/calculator_tables.py writes.
"use strict";

const { models, cards, reserved } = JSON.parse(document.getElementById("table").textContent);
const form = document.getElementById("calculator");
const say = (id, text) => (document.getElementById(id).textContent = text);
const gb = (bytes) => Number(((bytes / 1e9) * (1 + 1e-12)).toPrecision(3)); // a half is rounded up, as study/core/text.py does

// `most` is the most that PyTorch may reserve.
function fits(peak, most, host, gpus, card) {
  if (peak > card.most_bytes || host > card.host_bytes[gpus]) return "no";
  if (peak > card.roomy_bytes) return "just";
  return most > card.reserved_bytes ? "perhaps" : "yes";
}

// A model has no sequences that are longer than its positions.
function offerSequences(model) {
  const chosen = form.sequence.value;
  form.sequence.replaceChildren(...Object.keys(models[model]).map((tokens) => new Option(tokens, tokens)));
  if (chosen in models[model]) form.sequence.value = chosen;
}

// What each arm needs that makes sense on so many GPUs, in the order of `study arms`. The table is in MB.
function answers(arms, gpus, card) {
  const sizes = form.micro_batch.options.length;
  const rows = form.micro_batch.selectedIndex;
  const needs = (name) => {
    const lines = arms[name][gpus][form.activations.selectedIndex];
    return (lines[form.accumulation.selectedIndex] ?? lines[0]).map((mb) => mb * 1e6);
  };
  const most = (name) => reserved[name] * needs(name)[rows];
  return Object.keys(arms).filter((name) => gpus in arms[name]).map((name) => {
    const peak = needs(name)[rows];
    const [host = 0, disk = 0] = needs(name).slice(sizes);
    const kept = name.replace(/_cpu|_nvme/, ""); // what offloads reserves no more than the same arm without
    const bound = gpus in (arms[kept] ?? {}) ? Math.min(most(name), most(kept)) : most(name);
    return { name, peak, host, disk, fits: fits(peak, bound, host, gpus, card) };
  });
}

// The first that fits: without a disk if it can be, with room rather than only just, without offloading, and surely.
function simplest(found) {
  const cost = ({ disk, fits, host }) => 8 * (disk > 0) + 4 * (fits === "just") + 2 * (host > 0) + (fits === "perhaps");
  return found.filter((each) => each.fits !== "no").sort((a, b) => cost(a) - cost(b))[0];
}

function sentence(found, machine, card) {
  const arm = simplest(found);
  if (!arm) return `Nothing fits on ${machine}: neither their memory nor the host's is enough. Try more GPUs.`;
  const verb = arm.fits === "perhaps" ? "Try" : "Use";
  const size = `${gb(arm.peak)} of ${gb(card.memory_bytes)} GB`;
  const beside = arm.host ? `${gb(arm.host)} GB of a node's host memory` : "no offloading";
  const disk = arm.disk ? ` It needs a disk: ${gb(arm.disk)} GB for each GPU.` : "";
  const before = found.slice(0, found.indexOf(arm));
  const simpler = before.find((each) => each.fits === "perhaps" && (arm.host || !each.host));
  const close = {
    just: " It fits only just.",
    perhaps: " Its tensors fit. PyTorch reserves more: study estimate says whether that fits.",
    yes: simpler ? ` It fits. ${simpler.name} is simpler, and perhaps fits: study estimate says it.` : " It fits.",
  };
  return `${verb} ${arm.name} on ${machine}: ${size} and ${beside}.${disk}${close[arm.fits]}`;
}

function show() {
  offerSequences(form.model.value);
  const { model, sequence, micro_batch, accumulation, activations, gpus, gpu } = Object.fromEntries(new FormData(form));
  const found = answers(models[model][sequence], gpus, cards[gpu]);
  say("sentence", sentence(found, `${gpus} x ${gpu}`, cards[gpu]));
  const recomputes = activations === "recomputed" ? "--checkpointing" : "--no-checkpointing";
  const words = `--model ${model} --sequence ${sequence} --gpus ${gpus} --gpu ${gpu} --precision bf16_cast ${recomputes}`;
  const step = `--micro-batch ${micro_batch} --accumulation ${accumulation}`;
  say("same", `study estimate ${words} ${step} --arm ${(simplest(found) || found[0]).name}`);
  say("command", `study advise ${words} --batch ${micro_batch * accumulation * gpus}`);
  for (const row of document.querySelectorAll("#arms tbody tr")) {
    const arm = found.find((each) => each.name === row.dataset.arm);
    row.hidden = !arm;
    if (!arm) continue;
    const texts = [arm.fits, gb(arm.peak), arm.host ? gb(arm.host) : "-", arm.disk ? gb(arm.disk) : "-"];
    texts.forEach((text, place) => (row.cells[place + 1].textContent = text));
    row.cells[1].className = `fits ${arm.fits}`;
  }
}

form.addEventListener("input", show);
form.addEventListener("reset", () => setTimeout(show)); // once the fields are as at first
show();
