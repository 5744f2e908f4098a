// Looks up what Python computed: reports/calculator.json, which tools/calculator_tables.py writes.
"use strict";

const { models, cards } = JSON.parse(document.getElementById("table").textContent);
const form = document.getElementById("calculator");
const say = (id, text) => (document.getElementById(id).textContent = text);
const gb = (bytes) => Number((bytes / 1e9).toPrecision(3));

function fits(bytes, card) {
  if (bytes > card.most_bytes) return "no";
  return bytes > card.roomy_bytes ? "just" : "yes";
}

// The arms of a row of the table, in the order of `study arms`.
function answers(model, gpus, card) {
  return Object.entries(models[model].gpus[gpus]).map(([name, [peak, host, disk]]) => (
    { name, peak, host, disk, fits: fits(peak, card), offloads: host + disk > 0 }));
}

// The first that fits with room, or else just; what offloads only if nothing else fits.
function simplest(found) {
  const fitting = found.filter((each) => each.fits !== "no");
  return fitting.sort((a, b) => a.offloads - b.offloads || (a.fits === "just") - (b.fits === "just"))[0];
}

function sentence(found, machine, card) {
  const arm = simplest(found);
  const least = found.reduce((a, b) => (b.peak < a.peak ? b : a));
  const size = `${gb((arm ?? least).peak)} of ${gb(card.memory_bytes)} GB`;
  if (!arm) return `Nothing fits on ${machine}: ${least.name} needs ${size}. Try more GPUs.`;
  const host = arm.host ? `, and ${gb(arm.host)} GB of a node's host memory` : "";
  const just = arm.fits === "just" ? " It fits only just." : "";
  return `On ${machine} use ${arm.name}: ${size}${host}.${just}`;
}

function show() {
  const { model, gpus, gpu } = Object.fromEntries(new FormData(form));
  const found = answers(model, gpus, cards[gpu]);
  say("sentence", sentence(found, `${gpus} x ${gpu}`, cards[gpu]));
  say("tokens", models[model].tokens.toLocaleString("en"));
  say("command", `study advise --model ${model} --gpus ${gpus} --gpu ${gpu} --precision bf16_cast --checkpointing`);
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
form.hidden = false;
document.getElementById("answer").hidden = false;
show();
