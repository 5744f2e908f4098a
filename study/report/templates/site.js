// Tables sort by a click on a column's name; on paper everything is unfolded.
"use strict";

const UNITS = { bytes: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
const LONG = 60; // characters from which a text may wrap
const FEW = 3; // columns that stay a table on a phone, whatever they say

// The value of a cell: a number where it is one, with or without a unit; null where it is not known.
function value(cell) {
  const text = cell.textContent.trim();
  const [number, unit] = text.split(" ");
  if (text === "-" || text === "") return null;
  return isNaN(number) || (unit && !UNITS[unit]) ? text : Number(number) * (UNITS[unit] || 1);
}

// Unknown values come last in both directions.
function compare(a, b, way) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return way * (a - b);
  return way * String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortBy(table, head) {
  const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
  for (const body of table.tBodies) {
    const rows = [...body.rows].map((row) => [value(row.cells[head.cellIndex]), row]);
    rows.sort((a, b) => compare(a[0], b[0], way));
    body.append(...rows.map((pair) => pair[1]));
  }
}

for (const table of document.querySelectorAll("table")) {
  if (!table.tHead || !table.tHead.rows.length) continue;
  for (const head of table.tHead.rows[0].cells) {
    const cells = [...table.tBodies].flatMap((body) => [...body.rows]).map((row) => row.cells[head.cellIndex]);
    const known = cells.map(value).filter((each) => each !== null);
    const numeric = cells.length > 0 && known.every((each) => typeof each === "number");
    for (const cell of [head, ...cells]) cell.classList.toggle("number", numeric);
    for (const cell of cells) {
      cell.classList.toggle("text", cell.textContent.length > LONG);
      cell.classList.toggle("name", !/\s/.test(cell.textContent.trim()));
      cell.classList.toggle("unknown", ["-", ""].includes(cell.textContent.trim()));
      cell.dataset.label = head.textContent;
      const content = document.createElement("div"); // beside its label, where a row is a card
      content.append(...cell.childNodes);
      cell.append(content);
    }
    if (!head.textContent.trim()) continue; // a column of names
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sortBy(table, head));
  }
  table.classList.toggle("wordy", table.tHead.rows[0].cells.length > FEW && table.querySelector("td.text") !== null);
}

// A link into folds opens them, or the one of a card.
function openTarget() {
  const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let fold = place?.querySelector("details") ?? place; fold; fold = fold.parentElement.closest("details")) fold.open = true;
  place?.scrollIntoView();
}
addEventListener("hashchange", openTarget);

addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
});

// Cards: only those of a document, with a verdict, with a certainty, of a topic, with a word.
const filter = document.getElementById("filter");
function chooseCards() {
  const chosen = Object.fromEntries(new FormData(filter));
  const word = chosen.word.trim().toLowerCase();
  let [shown, all] = [0, 0];
  for (const section of document.querySelectorAll("[data-document]")) {
    const cards = [...section.querySelectorAll(".claims > li")];
    for (const card of cards) {
      const fits = section.dataset.document.startsWith(chosen.document ?? "")
        && ["verdict", "certainty", "topic"].every((name) => !chosen[name] || chosen[name] === card.dataset[name])
        && card.textContent.toLowerCase().includes(word);
      card.hidden = !fits;
      shown += fits;
    }
    all += cards.length;
    section.hidden = cards.every((card) => card.hidden);
    if (word) section.open = true;
  }
  document.getElementById("shown").textContent = `${shown} of ${all}`;
}
if (filter) {
  filter.addEventListener("input", chooseCards);
  filter.addEventListener("reset", () => setTimeout(chooseCards)); // once the fields are empty
  addEventListener("hashchange", () => filter.reset()); // a link leads to its card in any case
  chooseCards();
}
openTarget();
