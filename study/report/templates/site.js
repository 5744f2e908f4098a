// Tables sort by a click on a column's name; on paper everything is unfolded.
"use strict";

const UNITS = { bytes: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
const LONG = 60; // characters from which a text may wrap
const UNBROKEN = 14; // characters up to which a name is never broken: that of an arm
const FEW = 3; // columns that stay a table on a phone, whatever they say

// The value of a cell: a number where it is one, with or without a unit, or where it begins one (1.25 to 1.49); null
// where it is not known.
function value(cell) {
  const text = cell.textContent.trim();
  if (text === "-" || text === "") return null;
  const [, digits, unit] = text.match(/^([-+]?[\d.,]+(?:e[-+]?\d+)?)(?: ([^\s\d]+))?(?: to .+)?$/) ?? [];
  const number = Number(digits?.replaceAll(",", ""));
  return isNaN(number) ? text : number * (UNITS[unit] || 1);
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
      cell.classList.toggle("unbroken", cell.textContent.trim().length <= UNBROKEN);
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

// On a phone the sections of a long page fold, from the one on that is for later.
const long = matchMedia("(max-width: 40rem)").matches && document.querySelector("[data-later]");
let isLater = false;
for (const heading of long ? long.querySelectorAll("h2") : []) {
  isLater ||= heading.id === long.dataset.later;
  if (!isLater) continue;
  const fold = document.createElement("details");
  const summary = document.createElement("summary");
  heading.before(fold);
  while (fold.nextElementSibling && (fold.nextElementSibling === heading || fold.nextElementSibling.tagName !== "H2")) {
    fold.append(fold.nextElementSibling);
  }
  summary.append(heading);
  fold.prepend(summary);
}

// Of the words on the first page, only those with what is typed: in the word, or in its meaning.
document.getElementById("find-word")?.addEventListener("input", (event) => {
  const typed = event.target.value.trim().toLowerCase();
  let found = 0;
  for (const word of document.querySelectorAll("#words dt")) {
    const meaning = word.nextElementSibling;
    const has = `${word.textContent} ${meaning.textContent}`.toLowerCase().includes(typed);
    word.hidden = meaning.hidden = !has;
    found += has;
  }
  document.getElementById("no-word").textContent = found ? "" : "No word, and no meaning, has this.";
});

// A link into folds opens them, or the one of a card, as people type its id: #p1-28 is P1-28.
function openTarget() {
  const id = decodeURIComponent(location.hash.slice(1));
  const place = document.getElementById(id) ?? document.getElementById(id.toUpperCase());
  for (let fold = place?.querySelector("details") ?? place; fold; fold = fold.parentElement.closest("details")) fold.open = true;
  place?.scrollIntoView();
}

addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
});

// Where a hyphen or a space may be, and the name of a part of a card: as in study/ledger/search.py.
// The ending that the last word loses, and other words for some, come from there.
const BETWEEN = /(?<=\p{L})[ -]+|[ -]+(?=\p{L})|(?<=[\p{L}\p{N}])(?=\p{L})/u;
const TEXT = ["head", "text", "about"];
const WHOLE = [...TEXT, "rest"];
const filter = document.getElementById("filter");
const ENDING = new RegExp(filter?.dataset.ending ?? "$^", "i");
const spellings = JSON.parse(filter?.dataset.spellings ?? "[]");
const VERDICTS = JSON.parse(filter?.dataset.verdicts ?? "{}");
// What is typed: each word, and a phrase in quotes as one.
const wordsOf = (typed) => [...typed.matchAll(/["“”]([^"“”]+)["“”]|[^\s"“”]+/g)].map((each) => each[1] ?? each[0]);

function alike(words) {
  for (const [typed, meant] of spellings) {
    const other = words.match(new RegExp(typed, "iu"));
    if (!other) continue;
    const after = other.index + other[0].length;
    return alike(words.slice(0, other.index)) + meant.replace("\\1", other[1]) + alike(words.slice(after));
  }
  const more = /\p{L}{3}$/u.test(words) ? "\\p{L}*" : "";
  const pieces = words.replace(ENDING, "").split(BETWEEN);
  return pieces.map((piece) => piece.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&")).join("[ -]*") + more;
}

// A word from its beginning, and a whole number.
const pattern = (words) => new RegExp(`(?<![\\p{L}\\p{N}_])(?<!\\d[.,])${alike(words)}(?![\\p{L}\\p{N}_])`, "iu");

function textOf(card, parts) {
  const about = card.closest("[data-document]").dataset;
  const fields = [...card.querySelectorAll("[data-in]")].filter((field) => parts.includes(field.dataset.in));
  const of = card.closest(".asides") ? about.document : `${card.id}\n${parts.includes("about") ? about.about ?? "" : ""}`;
  return [of, ...fields.map((field) => field.textContent)].join("\n");
}

function having(cards, wanted, parts) {
  const patterns = wanted.map(pattern);
  return cards.filter((card) => patterns.every((each) => each.test(textOf(card, parts))));
}

// The verdicts among words, and the other words. Beside a word that claims have next to it, "holds" is no verdict.
function verdictsApart(cards, words) {
  const verdicts = [];
  const others = [];
  for (let place = 0, several; place < words.length; place += several || 1) {
    several = words.length - place;
    const typed = () => words.slice(place, place + several).join(" ").toLowerCase();
    while (several && !VERDICTS[typed()]) several -= 1;
    const beside = [[others.at(-1), "holds"], ["holds", words[place + several]]].filter((each) => each.every(Boolean));
    if (typed() === "holds" && beside.some((each) => having(cards, [each.join(" ")], TEXT).length)) several = 0;
    if (several) verdicts.push(VERDICTS[typed()]);
    else others.push(words[place]);
  }
  return [verdicts, others];
}

// Those that `study claims` finds by these words.
function found(cards, words, byHead) {
  const phrase = [words.join(" ")];
  if (!words.length) return cards;
  const name = phrase[0].toLowerCase().replace(/^the /, "");
  const named = / (paper|article)$/.test(name) ? cards.filter((card) => {
    const { called } = card.closest("[data-document]").dataset;
    return called && called.match(pattern(name))?.[0] === called;
  }) : [];
  if (named.length) return named.filter((card) => !card.closest(".asides"));
  const titled = words.length > 2 ? having(cards, phrase, ["about"]) : [];
  if (titled.length) return titled;
  const about = byHead && words.length > 1 ? having(cards, phrase, ["head"]) : [];
  if (about.some((card) => card.dataset.verdict)) return about;
  for (const [wanted, parts] of [[phrase, TEXT], [words, TEXT], [phrase, WHOLE], [words, WHOLE]]) {
    const several = having(cards, wanted, parts);
    if (several.length) return several;
  }
  return [];
}

// Cards: only those of a document, with a verdict, with a certainty, of a topic, with a word.
function chooseCards() {
  const { word, document: of, ...kinds } = Object.fromEntries(new FormData(filter));
  const isOf = (section) => section.dataset.document.startsWith(of ?? "");
  const [all, asides] = [".claims > li", ".asides > li"].map((which) => [...document.querySelectorAll(`[data-document] ${which}`)]);
  const [verdicts, words] = verdictsApart(all, wordsOf(word));
  const narrows = Boolean(of) || verdicts.length > 0 || Object.values(kinds).some(Boolean);
  const fits = (card) => isOf(card.closest("[data-document]"))
    && verdicts.every((verdict) => verdict === card.dataset.verdict)
    && Object.entries(kinds).every(([name, kind]) => !kind || kind === card.dataset[name]);
  const shown = new Set(found(all.filter(fits), words, !narrows));
  const told = words.length ? found(asides.filter(fits), words, false) : [];
  for (const card of all) card.hidden = !shown.has(card);
  for (const section of document.querySelectorAll("[data-document]")) {
    const source = section.querySelector(".source");
    section.hidden = ![...shown, ...told].some((card) => section.contains(card));
    if (source && told.some((aside) => section.contains(aside))) source.open = true;
    if (word) section.open = true;
  }
  const counted = (cards) => cards.filter((card) => card.dataset.verdict || !document.querySelector("[data-verdict]")).length;
  document.getElementById("shown").textContent = `${counted([...shown])} of ${counted(all)}`;
}
if (filter) {
  filter.addEventListener("input", chooseCards);
  filter.addEventListener("reset", () => setTimeout(chooseCards)); // once the fields are empty
  chooseCards();
}
// A link leads to its card in any case: what is chosen is undone first, and then the page scrolls.
addEventListener("hashchange", () => {
  filter?.reset();
  if (filter) chooseCards();
  openTarget();
});
openTarget();
