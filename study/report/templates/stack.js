// Filters the faults that Python wrote into the page, by the releases and check boxes that are chosen.
"use strict";

const { faults, means } = JSON.parse(document.getElementById("table").textContent);
const form = document.getElementById("stack");
const [sure, likely, maybe, others] = ["faults", "likely", "maybe", "others"].map((id) => document.getElementById(id));
const say = (id, text) => (document.getElementById(id).textContent = text);

// What is chosen, by the names of fields: words of the command.
function chosen() {
  const said = {};
  for (const [name, value] of new FormData(form)) if (value && name !== "list") (said[name] ??= []).push(value);
  return said;
}

// With what a trainer means that is checked, or of which a release is.
function withTrainer(said) {
  const [listed] = Object.keys(means.listed).filter((name) => said[name]);
  const trainer = said.trainer ?? (listed && [means.listed[listed]]);
  const whole = { ...said, ...(trainer && { trainer }) };
  for (const [name, word] of Object.entries(means.implied[trainer] ?? {})) whole[name] ??= [word];
  return whole;
}

// With what a trainer forces, whatever is said.
function forced(fault, said) {
  const forcing = fault.forced[said.trainer];
  if (!forcing) return said;
  const yes = "--reentrant";
  const isSo = Object.values(said).flat().some((word) => forcing.includes(word)) || said.reentrant?.includes(yes);
  return { ...said, reentrant: isSo ? [yes] : undefined };
}

// Whether it depends on something that no field of this page says, such as what a script does.
const depends = (fault, said) => Object.entries(fault.needs).some(([name, { fits }]) => !fits.length && !said[name]);

// What is asked before a fault applies, which may be nothing, and the list in which it is; null if it does not.
function answer(fault, given) {
  const said = forced(fault, given);
  const release = said[fault.package]?.[0];
  const tested = fault.in[release];
  const needs = Object.entries(fault.needs);
  const misfits = ([name, { fits }]) => said[name] && !fits.some((each) => said[name].includes(each));
  if (tested === undefined || needs.some(misfits)) return null;
  const open = ([name, { still }]) => !said[name] || said[name].some((each) => still.includes(each));
  const asked = [tested, ...needs.filter(open).map(([, { ask }]) => ask)].filter(Boolean);
  if (!asked.length) return { asked, list: sure };
  if (!needs.some(open) && fault.between.includes(release)) return { asked, list: likely };
  return { asked, list: depends(fault, said) ? others : maybe };
}

function show() {
  const chose = chosen();
  const said = withTrainer(chose);
  const found = faults.map((fault) => ({ ...fault, ...answer(fault, said) })).filter((each) => each.asked);
  found.sort((a, b) => a.milder - b.milder || a.asked.length - b.asked.length);
  for (const { id } of faults) document.getElementById(id).hidden = true;
  for (const fault of found) {
    const card = document.getElementById(fault.id);
    card.hidden = false;
    card.querySelector("em").textContent = fault.asked.join(" ");
    fault.list.append(card);
  }
  const shown = (list) => list.querySelectorAll("li:not([hidden])").length;
  for (const list of [sure, likely, maybe, others]) list.parentElement.hidden = !shown(list);
  const unknown = notHere();
  const none = unknown.length ? "not known" : "none";
  const between = shown(likely) ? ` ${shown(likely)} more likely do.` : "";
  say("sentence", `Known faults that apply: ${shown(sure) || none}.${between} What you have not said decides ${shown(maybe)} more.`);
  say("unread", unknown.length ? `Not known here, but the command judges: ${unknown.join(", ")}.` : "");
  say("number", shown(others));
  const taken = [...form.querySelectorAll("input[checked]")].map((box) => box.value); // if nothing is said
  const words = Object.values(chose).map((each) => each[0]).filter((word) => !taken.includes(word));
  const typed = words.filter((word) => /--|==/.test(word)); // what a script says has no flag
  say("command", ["study stack", ...unknown, ...typed].join(" "));
}

const pasted = () => form.elements.list.value.toLowerCase().split(/[\s+;]+/);

// Pasted releases that this page does not have, of packages for which none is chosen.
const notHere = () =>
  [...form.querySelectorAll("select")]
    .filter((select) => !select.value)
    .flatMap(({ name }) => pasted().filter((word) => word.startsWith(`${name.toLowerCase()}==`)));

// A pasted list chooses releases that are known here.
function read() {
  for (const select of form.querySelectorAll("select"))
    select.value = [...select.options].find(({ value }) => pasted().includes(value.toLowerCase()))?.value ?? "";
}

form.addEventListener("input", (event) => {
  if (event.target.name === "list") read();
  show();
});
form.addEventListener("reset", () => setTimeout(show)); // once the fields are as at first
show();
