// Filters the faults that Python wrote into the page, by the releases and check boxes that are chosen.
"use strict";

const faults = JSON.parse(document.getElementById("table").textContent);
const form = document.getElementById("stack");
const [sure, maybe, others] = ["faults", "maybe", "others"].map((id) => document.getElementById(id));
const say = (id, text) => (document.getElementById(id).textContent = text);

// What is chosen, by the names of fields: words of the command.
function chosen() {
  const said = {};
  for (const [name, value] of new FormData(form)) if (value && name !== "list") (said[name] ??= []).push(value);
  return said;
}

// Whether it depends on something that no field of this page says, such as what a script does.
const depends = (fault, said) => Object.entries(fault.needs).some(([name, { fits }]) => !fits.length && !said[name]);

// What is asked before a fault applies, which may be nothing; null if it does not.
function questions(fault, said) {
  const tested = fault.in[said[fault.package]?.[0]];
  const needs = Object.entries(fault.needs);
  const misfits = ([name, { fits }]) => said[name] && !fits.some((each) => said[name].includes(each));
  if (tested === undefined || needs.some(misfits)) return null;
  return [tested, ...needs.map(([name, { ask }]) => (said[name] ? "" : ask))].filter(Boolean);
}

function show() {
  const said = chosen();
  const found = faults.map((fault) => ({ ...fault, asked: questions(fault, said) })).filter((each) => each.asked);
  found.sort((a, b) => a.milder - b.milder || a.asked.length - b.asked.length);
  for (const { id } of faults) document.getElementById(id).hidden = true;
  for (const fault of found) {
    const card = document.getElementById(fault.id);
    card.hidden = false;
    card.querySelector("em").textContent = fault.asked.join(" ");
    if (!fault.asked.length) sure.append(card);
    else (depends(fault, said) ? others : maybe).append(card);
  }
  const shown = (list) => list.querySelectorAll("li:not([hidden])").length;
  for (const list of [sure, maybe, others]) list.parentElement.hidden = !shown(list);
  say("sentence", `Known faults that apply: ${shown(sure) || "none"}. What you have not said decides ${shown(maybe)} more.`);
  say("number", shown(others));
  const taken = [...form.querySelectorAll("input[checked]")].map((box) => box.value); // if nothing is said
  const words = Object.values(said).map((each) => each[0]).filter((word) => !taken.includes(word));
  say("command", ["study stack", ...words].join(" "));
}

// A pasted list chooses releases that are known here.
function read() {
  const words = form.elements.list.value.toLowerCase().split(/[\s+;]+/);
  const unknown = [];
  for (const select of form.querySelectorAll("select")) {
    const known = [...select.options].find((option) => words.includes(option.value.toLowerCase()));
    select.value = known?.value ?? "";
    if (!known) unknown.push(...words.filter((word) => word.startsWith(`${select.name.toLowerCase()}==`)));
  }
  say("unread", unknown.length ? `Not known here, but the command judges: ${unknown.join(", ")}.` : "");
}

form.addEventListener("input", (event) => {
  if (event.target.name === "list") read();
  show();
});
form.addEventListener("reset", () => setTimeout(show)); // once the fields are as at first
show();
