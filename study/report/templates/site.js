// Tables sort by a click on a column's name, and are filtered by a search field; on paper everything is unfolded.
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

// The text of a row, without the links below its name, which are the same in every row.
function said(row) {
  const nodes = [...row.cells].flatMap((cell) => [...cell.childNodes]).filter((node) => node.nodeName !== "SMALL");
  return nodes.map((node) => node.textContent).join(" ").toLowerCase();
}

for (const field of document.querySelectorAll("[data-filter]")) {
  const rows = [...document.getElementById(field.dataset.filter).tBodies[0].rows];
  const count = document.querySelector(`[data-count="${field.dataset.filter}"]`);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => said(row).includes(word));
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  });
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

// Figures: the value of a mark under the pointer or a finger, and a click on the name of an arm hides its marks.
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
const valueOf = (node) => node.closest?.("figure svg [data-arm]")?.querySelector("title, desc");
document.addEventListener("pointerover", (event) => {
  const words = valueOf(event.target);
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words.textContent;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
});
for (const title of document.querySelectorAll("figure svg [data-arm] > title")) {
  const words = document.createElementNS(title.namespaceURI, "desc"); // else the browser shows its own hint as well
  words.textContent = title.textContent;
  title.replaceWith(words);
}
for (const key of document.querySelectorAll("figure svg [data-key]")) {
  const marks = [...key.closest("svg").querySelectorAll(`[data-arm="${CSS.escape(key.dataset.arm)}"]:not([data-key])`)];
  if (!marks.length) continue;
  for (const [name, value] of Object.entries({ role: "button", tabindex: "0", "aria-pressed": "false" })) key.setAttribute(name, value);
  const toggle = () => {
    const hide = key.getAttribute("aria-pressed") === "false";
    key.setAttribute("aria-pressed", hide);
    for (const mark of marks) mark.classList.toggle("hidden", hide);
  };
  key.addEventListener("click", toggle);
  key.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    toggle();
  });
}

// Small charts: a mark at every so many points of a line shows its value under the pointer.
for (const line of document.querySelectorAll(".chart polyline")) {
  const points = line.getAttribute("points").split(" ");
  const values = line.dataset.values.split(",");
  values.reverse().forEach((words, place) => {
    const [x, y] = points[points.length - 1 - place * line.dataset.every].split(",");
    const mark = document.createElementNS(line.namespaceURI, "circle");
    for (const [name, value] of Object.entries({ cx: x, cy: y, r: values.length < 3 ? 5 : 2.4 })) mark.setAttribute(name, value);
    mark.append(document.createElementNS(line.namespaceURI, "title"));
    mark.firstChild.textContent = `step ${words.replace(" ", ": ")}`;
    line.after(mark);
  });
}

// The figure above a button, as a file of its own.
for (const button of document.querySelectorAll("[data-save]")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    const drawn = new XMLSerializer().serializeToString(button.closest("figure").querySelector("svg"));
    const text = drawn.replace(/var\(--\w+, ?(#\w+)\)/g, "$1"); // the colours of the page stay with the page
    const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    Object.assign(document.createElement("a"), { href: address, download: `${button.dataset.save}.svg` }).click();
  });
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
