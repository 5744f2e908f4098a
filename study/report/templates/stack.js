// Which known faults apply to releases, in a training? The rules are the data of study/conform/faults.toml; here they are
// evaluated as study/conform/stack.py and study/watch/lists.py do it. test_browser.py compares both.
"use strict";

const table = JSON.parse(document.getElementById("table").textContent);
const form = document.getElementById("stack");
const ANY = []; // release: a range without conditions

// --- releases ---------------------------------------------------------------------------------------------------------

const RANKS = { dev: -4, a: -3, b: -2, rc: -1, post: 1 };

// A release as numbers, without zeros at the end, and what comes before or after it; null if it is none.
function version(text) {
  const found = /^(\d+(?:\.\d+)*)(?:[._-]?(dev|a|b|rc|post)(\d*))?$/.exec(text);
  if (!found) return null;
  const numbers = found[1].split(".").map(Number);
  while (numbers.at(-1) === 0) numbers.pop();
  return { text, numbers, rank: [RANKS[found[2]] ?? 0, Number(found[3] || 0)] };
}

function compare(a, b) {
  for (let place = 0; place < Math.max(a.numbers.length, b.numbers.length); place++) {
    const difference = (a.numbers[place] ?? 0) - (b.numbers[place] ?? 0);
    if (difference) return difference;
  }
  return a.rank[0] - b.rank[0] || a.rank[1] - b.rank[1];
}

// A release, or a range as a list of conditions.
function releaseOf(said) {
  if (/^\d/.test(said) && !said.includes("*")) return version(said) ?? ANY;
  const signed = said.replace(/^(?=\d)/, "==").replace(/[~^]0\.\d+(?![.\d])/g, "$&.0").replace(/~(?!=)|\^(?=0)/g, "~=").replace("^", ">=");
  const parts = signed.split(",").map((part) => /^\s*(~=|==|!=|<=|>=|<|>)\s*([\w.]+?)(\.\*)?\s*$/.exec(part));
  if (!said || parts.some((part) => !part || !version(part[2]) || (part[1] === "~=" && !part[2].includes(".")))) return ANY;
  return parts.map(([, sign, text, star]) => ({ sign, than: version(text), same: star ? text.split(".") : text.split(".").slice(0, -1), star }));
}

function begins(release, numbers) {
  return numbers.every((number, place) => (release.numbers[place] ?? 0) === Number(number));
}

function within(release, range) {
  return range.every(({ sign, than, same, star }) => {
    const order = compare(release, than);
    if (sign === "~=") return order >= 0 && begins(release, same);
    if (sign === "==") return star ? begins(release, same) : order === 0;
    if (sign === "!=") return star ? !begins(release, same) : order !== 0;
    return sign === "<" ? order < 0 : sign === ">" ? order > 0 : sign === "<=" ? order <= 0 : order >= 0;
  });
}

// The releases that a text names, by package. Where it names several of one, it is not known which is used.
function listed(text) {
  const { comment, locked, listed } = table.patterns;
  const plain = text.toLowerCase().replace(new RegExp(comment, "g"), "");
  const inLock = [...plain.matchAll(new RegExp(locked, "g"))];
  const found = {};
  for (const [, name, said = ""] of inLock.length ? inLock : plain.matchAll(new RegExp(listed, "g"))) {
    const names = (found[table.packages[name]] ??= new Map());
    const release = releaseOf(said);
    const key = JSON.stringify(release.numbers ? [release.numbers, release.rank] : release); // 2.6 is 2.6.0
    if (release.length !== 0 && !names.has(key)) names.set(key, release);
  }
  return Object.fromEntries(Object.entries(found).map(([name, several]) => [name, several.size === 1 ? [...several.values()][0] : ANY]));
}

// --- faults -----------------------------------------------------------------------------------------------------------

// Whether a release has a fault. null: it was not asked, and the one before or after it has.
function has(fault, release) {
  const [since, until] = [version(fault.since), version(fault.until)];
  const contains = (each) => compare(since, each) <= 0 && compare(each, until) <= 0;
  const tried = (fault.asked.length ? fault.asked : table.asked[fault.package]).map(version).sort(compare);
  if (Array.isArray(release)) {
    const tested = [...tried, ...(table.asked[fault.package] ?? []).map(version)].filter((each) => within(each, release));
    const ends = release.map(({ than }) => than).filter((each) => within(each, release));
    // A range between two that were tested is judged as a release there is.
    const inside = new Set(tested.length ? [...tested, ...ends].map(contains) : ends.map((each) => has(fault, each)));
    return inside.size === 1 && release.length ? [...inside][0] : null;
  }
  const before = tried.filter((each) => compare(each, release) <= 0).slice(-1);
  const beside = [...before, ...tried.filter((each) => compare(each, release) >= 0).slice(0, 1)];
  if (!beside.some(contains)) return false;
  return beside.some((each) => compare(each, release) === 0) ? true : null;
}

const isVersion = (value) => value.numbers !== undefined; // and not a range
const isRelease = (value) => value !== null && typeof value === "object";

function fits(seen, wanted) {
  if (isRelease(seen)) return within(seen, releaseOf(wanted));
  if (Array.isArray(wanted)) return wanted.map(String).includes(String(seen).toLowerCase());
  return typeof wanted === "number" ? seen >= wanted : seen === wanted;
}

const filled = (text, ...words) => words.reduce((rest, word) => rest.replace("{}", word), text);

// What has to be known for a fault to apply, besides the release; null if it does not.
function questions(fault, versions, known) {
  if (!fault.when || !(fault.package in versions)) return null;
  const asked = [];
  const facts = { ...known, ...versions };
  const used = versions[facts.trainer];
  const forced = fault.forced[facts.trainer];
  if (forced) facts.reentrant = used && isVersion(used) && within(used, releaseOf(forced)) || facts.reentrant || undefined;
  for (const [name, wanted] of Object.entries(fault.when)) {
    const between = facts[name]?.rank?.[0] < 0 && compare({ ...facts[name], rank: [0, 0] }, releaseOf(wanted)[0].than) === 0;
    if (facts[name] === undefined || Array.isArray(facts[name]) || between) asked.push(fault.asks[name]);
    else if (!fits(facts[name], wanted)) return null;
  }
  return asked;
}

// A release or range in words.
function words(release) {
  if (isVersion(release)) return release.text;
  return release.map(({ sign, than, star }) => `${sign}${than.text}${star ?? ""}`).sort().join(",") || "(release not said)";
}

// The faults that apply or may, to a list of releases and what flags say.
function answered(list, flags) {
  let versions = listed(list); // in the order of the list, and then those that a trainer or a stage needs
  const known = { offload: "none", ranks: 2, cuda: true }; // cuda: the command has --no-cuda
  for (const trainer of table.trainers) if (trainer in versions) known.trainer = trainer;
  Object.assign(known, flags);
  Object.assign(known, table.defaults[known.trainer], { ...known });
  if (flags.fsdp2) known.stage = "FSDP2"; // as the command's flag
  if ((known.trainer ?? "own") !== "own") versions = { ...versions, transformers: versions.transformers ?? ANY, accelerate: versions.accelerate ?? ANY }; // it stands on these
  const optimizer = table.optimizers.findLast((name) => String(known.optimizer).toLowerCase().includes(name));
  if (optimizer) known.optimizer = optimizer;
  if ("stage" in known) versions[typeof known.stage === "number" ? "deepspeed" : "torch"] ??= ANY;
  const met = {}; // by package: faults of which all is so, but perhaps the release
  const rows = [];
  for (const fault of table.fault) {
    const asked = questions(fault, versions, known);
    if (!asked) continue;
    if (!asked.length) (met[fault.package] ??= []).push(fault);
    const release = versions[fault.package];
    const state = has(fault, release);
    if (state === null) asked.unshift(filled(table.questions[isVersion(release) ? "release" : "range"], fault.package, release.text));
    // A release between two that have the fault most likely has it, too: that it was not asked leaves nothing open.
    const untried = state === null && isVersion(release);
    const isInside = untried && compare(version(fault.since), release) <= 0 && compare(release, version(fault.until)) <= 0;
    const isSilent = table.silent.some((word) => fault.symptom.startsWith(word));
    const open = asked.filter((question) => question.includes("?")).length;
    const said = Object.keys(fault.when).length - open;
    const order = [asked.length > 0, untried && !isInside, !(isSilent && said >= open), -said, open];
    if (state !== false) rows.push({ fault, asked, untried, order });
  }
  rows.sort((a, b) => a.order.map((one, place) => one - b.order[place]).find(Boolean) ?? 0);
  const answers = rows.map(({ fault, asked }) => ({
    id: fault.id,
    answer: asked.length ? "applies if" : "applies",
    question: asked.join(" "),
    do: fault.do_with[known.trainer ?? ""] ?? fault.do,
    fault,
  }));
  const hit = [...new Set(rows.filter((row) => !row.asked.length).map((row) => row.fault.package))];
  const isFree = (name, each) => met[name].every((fault) => has(fault, version(each)) === false);
  const free = hit.map((name) => [name, table.asked[name].filter((each) => isFree(name, each)).reverse()]);
  const wasTested = (name, release) => isVersion(release) && (table.asked[name] ?? []).some((each) => compare(version(each), release) === 0);
  const unknown = Object.entries(versions).filter(([name, release]) => !wasTested(name, release));
  return { versions, answers, free: Object.fromEntries(free), not_asked: unknown.map(([name, release]) => `${name} ${words(release)}`) };
}

// --- the form ---------------------------------------------------------------------------------------------------------

const NUMBERS = ["passes", "ranks"];
const PACKAGES = Object.keys(table.asked);

function asked() {
  const values = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
  const list = values.list ?? PACKAGES.filter((name) => values[name]).map((name) => `${name}==${values[name]}`).join("\n");
  const flags = {};
  for (const [name, value] of Object.entries(values)) {
    if (name === "list" || PACKAGES.includes(name)) continue;
    flags[name] = value === "true" ? true : value === "false" ? false : NUMBERS.includes(name) || /^\d$/.test(value) ? Number(value) : value;
  }
  return [list, flags];
}

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function card({ fault, question, do: remedy }) {
  const range = element("span", { class: "tag" }, `${fault.package} ${fault.releases}`);
  const title = element("p", {}, element("strong", {}, `${fault.sentence.replace(/\.$/, "")}. `), range);
  const parts = [title];
  if (question) parts.push(element("p", {}, element("em", {}, question)));
  if (fault.who) parts.push(element("p", {}, `Who is hit: ${fault.who}.`));
  parts.push(element("p", {}, `What to do: ${remedy}.`));
  const source = element("p", { class: "source" }, `Rests on: ${fault.rests_on}. `, fault.script ? `Shown by reproductions/${fault.script}.py. ` : "");
  if (fault.upstream) source.append(element("a", { href: fault.upstream }, fault.upstream.replace("https://github.com/", "")));
  return element("li", { id: fault.id }, ...parts, source);
}

function show() {
  const [list, flags] = asked();
  const { versions, answers, free, not_asked } = answered(list, flags);
  const [sure, maybe] = ["applies", "applies if"].map((word) => answers.filter((each) => each.answer === word));
  const named = Object.keys(versions).join(", ");
  const known = table.fault.filter((fault) => fault.when).length;
  const untested = not_asked.length ? `; in no test of ours: ${not_asked.join(", ")}` : "";
  const text = `Of ${known} known faults ${sure.length} ${sure.length === 1 ? "applies" : "apply"}, and ${maybe.length} may${untested}.`;
  const ways = Object.entries(free).map(([name, releases]) => releases.length ? ` With ${name} ${releases.slice(0, 4).join(" or ")} none of ${name} surely applies, but others may.` : ` Each release of ${name} that was tested has one.`);
  document.getElementById("sentence").textContent = named ? text + ways.join("") : "The list names none of the packages of this page.";
  document.getElementById("faults").replaceChildren(...sure.map(card));
  const fold = document.getElementById("maybe");
  fold.hidden = !maybe.length;
  fold.querySelector("summary").textContent = `${maybe.length} apply if something is so that was not said`;
  fold.querySelector("ol").replaceChildren(...maybe.map(card));
}

// The faults of each package, against the releases that were asked, the newest first.
function matrix() {
  const tables = PACKAGES.map((name) => {
    const releases = [...table.asked[name]].reverse();
    const head = element("tr", {}, element("th", { scope: "col" }, `fault of ${name}`), ...releases.map((release) => element("th", { scope: "col" }, release)));
    const rows = table.fault.filter((fault) => fault.package === name).map((fault) => {
      const cells = releases.map((release) => {
        const state = has(fault, version(release));
        return element("td", { class: state ? "fits no" : "" }, state === null ? "?" : state ? "●" : "·");
      });
      return element("tr", {}, element("td", { class: "text" }, fault.sentence), ...cells);
    });
    return element("div", { class: "scroll", tabindex: "0" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  });
  document.getElementById("tables").replaceChildren(...tables.flatMap((each) => [each, element("p", {})]));
}

function changed() {
  show();
  const said = [...new FormData(form)].filter(([name, value]) => value && name !== "list"); // a list is nobody's business
  history.replaceState(null, "", `?${new URLSearchParams(said)}${location.hash}`);
}

form.addEventListener("input", changed);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(changed));
for (const [name, value] of new URLSearchParams(location.search)) if (form.elements[name]) form.elements[name].value = value;
form.hidden = false;
matrix();
show();
