// Tables sort by a click on a column's name, and are filtered by a search field; on paper everything is unfolded.
"use strict";

function key(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === typeof b) return a.localeCompare(b, "en", { numeric: true });
  return typeof a === "number" ? -1 : 1; // what is not known comes last
}

function sortBy(table, head) {
  const descending = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map((row) => [key(row, head.cellIndex), row]);
  rows.sort((a, b) => compare(a[0], b[0]) * (descending ? -1 : 1));
  table.tBodies[0].append(...rows.map((pair) => pair[1]));
}

for (const table of document.querySelectorAll("table")) {
  if (!table.tHead) continue;
  for (const head of table.tHead.rows[0].cells) {
    if (head.classList.contains("nosort")) continue;
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sortBy(table, head));
  }
}

for (const field of document.querySelectorAll("[data-filter]")) {
  const rows = [...document.getElementById(field.dataset.filter).tBodies[0].rows];
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
}

addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details:not(.code)")) fold.open = true;
});
