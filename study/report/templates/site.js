// Tables sort by a click on a column's name, and the list of claims is filtered; on paper everything is unfolded.
"use strict";

const UNITS = { bytes: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
const LONG = 60; // characters from which a text may wrap

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
    const rows = rowsOf(body).map((row) => [value(row.cells[head.cellIndex]), row]);
    rows.sort((a, b) => compare(a[0], b[0], way));
    body.append(...rows.map((pair) => pair[1]));
  }
}

// The rows to sort: without the row that names a group, which stays on top.
function rowsOf(body) {
  return [...body.rows].filter((row) => !row.classList.contains("group"));
}

for (const table of document.querySelectorAll("table")) {
  if (!table.tHead || !table.tHead.rows.length) continue;
  for (const head of table.tHead.rows[0].cells) {
    const cells = [...table.tBodies].flatMap(rowsOf).map((row) => row.cells[head.cellIndex]);
    const known = cells.map(value).filter((each) => each !== null);
    const numeric = cells.length > 0 && known.every((each) => typeof each === "number");
    for (const cell of [head, ...cells]) cell.classList.toggle("number", numeric);
    for (const cell of cells) {
      cell.classList.toggle("text", cell.textContent.length > LONG);
      cell.classList.toggle("unknown", ["-", ""].includes(cell.textContent.trim()));
      cell.dataset.label = head.textContent;
    }
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sortBy(table, head));
  }
  table.classList.toggle("wordy", table.querySelector("td.text") !== null);
}

// A list whose entries have data attributes: a field of the form chooses by the attribute of its name, `words` by words.
// What is chosen stands in the address, so that it can be sent to somebody.
for (const form of document.querySelectorAll("[data-list]")) {
  const list = document.getElementById(form.dataset.list);
  const entries = [...list.querySelectorAll("li")].map((entry) => [entry, entry.textContent.toLowerCase()]);
  const choose = () => {
    const wanted = Object.fromEntries([...new FormData(form)].filter((pair) => pair[1]));
    const words = (wanted.words || "").toLowerCase().split(/[\s,]+/).filter(Boolean);
    const named = Object.entries(wanted).filter((pair) => pair[0] !== "words");
    for (const [entry, text] of entries)
      entry.hidden = !(named.every(([name, value]) => entry.dataset[name] === value) && words.every((word) => text.includes(word)));
    for (const section of list.children) section.hidden = !section.querySelector("li:not([hidden])");
    form.querySelector("output").textContent = `${entries.filter((pair) => !pair[0].hidden).length} of ${entries.length} claims`;
    const query = new URLSearchParams(wanted).toString();
    history.replaceState(null, "", (query ? `?${query}` : location.pathname) + location.hash);
  };
  for (const [name, value] of new URLSearchParams(location.search)) if (form.elements[name]) form.elements[name].value = value;
  form.hidden = false;
  for (const kind of ["input", "change"]) form.addEventListener(kind, choose);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(choose));
  choose();
}

// A link into a fold opens it.
function openTarget() {
  const fold = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (fold && fold.tagName === "DETAILS") fold.open = true;
}
addEventListener("hashchange", openTarget);
openTarget();

addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details:not(.code)")) fold.open = true;
});
