// What is wrong with the page that is open, in words. Used by test_browser.py.
const problems = [];
const width = document.documentElement.clientWidth;
const name = (node) => `<${node.tagName.toLowerCase()}> “${node.textContent.trim().slice(0, 40)}”`;

if (document.documentElement.scrollWidth > width) problems.push(`the page is wider than the window: ${document.documentElement.scrollWidth}`);
for (const node of document.body.querySelectorAll("*")) {
  if (node.closest(".scroll, .output_html, .text_cell_render table, pre, svg, details:not([open])")) continue;
  const box = node.getBoundingClientRect();
  if (box.width && (box.right > width + 1 || box.left < -1)) problems.push(`${name(node)} reaches from ${box.left} to ${box.right} of ${width}`);
}

// A screen reader says what a button is, and a keyboard scrolls what is too wide.
for (const button of document.querySelectorAll("button")) if (!button.textContent.trim()) problems.push("a button has no name");
for (const node of document.querySelectorAll("pre, .scroll"))
  if (node.scrollWidth > node.clientWidth + 1 && node.tabIndex < 0) problems.push(`${name(node)} scrolls, and a keyboard cannot reach it`);

// What is cut off at the side says so: by a shadow, or in words.
for (const node of document.querySelectorAll("pre, .scroll, .text_cell_render table, .output_html, figure"))
  if (node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).backgroundImage === "none" && getComputedStyle(node, "::before").content === "none")
    problems.push(`${name(node)} scrolls to the side, and nothing shows it`);

// Figures: whole, apart from each other, and with no text cut off, upon another, or too small to read.
const channels = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
const figures = [...document.querySelectorAll("figure svg")].filter((svg) => svg.getBoundingClientRect().width);
const apart = (a, b, slack) => a.right - slack <= b.left || b.right - slack <= a.left || a.bottom - slack <= b.top || b.bottom - slack <= a.top;
figures.forEach((svg, number) => {
  const frame = svg.getBoundingClientRect();
  for (const other of figures.slice(number + 1)) if (!apart(frame, other.getBoundingClientRect(), 0)) problems.push(`figures ${number} and another lie on each other`);
  const scale = frame.width / svg.viewBox.baseVal.width;
  const texts = [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim());
  if (!texts.length) problems.push(`figure ${number} has no text`);
  const boxes = texts.map((text) => text.getBoundingClientRect());
  texts.forEach((text, i) => {
    const box = boxes[i];
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      problems.push(`${svg.getAttribute("aria-label")}: “${text.textContent.trim()}” is cut off`);
    for (let j = i + 1; j < texts.length; j++) {
      const gap = Math.max(boxes[j].left - box.right, box.left - boxes[j].right) / scale;
      const sameLine = Math.abs(box.top - boxes[j].top) < 2 && Math.abs(box.bottom - boxes[j].bottom) < 2;
      if (sameLine && gap > -2.5 && gap < 2) problems.push(`${svg.getAttribute("aria-label")}: “${text.textContent.trim()}” runs into “${texts[j].textContent.trim()}”`);
      if (!apart(box, boxes[j], 2.5 * scale)) problems.push(`${svg.getAttribute("aria-label")}: “${text.textContent.trim()}” lies on “${texts[j].textContent.trim()}”`);
    }
    const size = parseFloat(getComputedStyle(text).fontSize) * scale;
    if (size < 11) problems.push(`${svg.getAttribute("aria-label")}: “${text.textContent.trim()}” is ${size.toFixed(1)} px high`);
  });
});

// Rows of figures: no half of a row is empty where two figures have room.
for (const figure of width > 1000 ? document.querySelectorAll(".output > :has(figure)") : []) {
  const [box, whole] = [figure, figure.parentElement].map((node) => node.getBoundingClientRect());
  const row = [...figure.parentElement.children].map((node) => node.getBoundingClientRect()).filter((other) => other.top < box.top + 40 && other.bottom > box.top + 40);
  if (Math.max(...row.map((other) => other.right)) - whole.left < 0.6 * whole.width) problems.push(`${name(figure)}: half of its row is empty`);
}

// Tables: on a desk, all columns are in view.
for (const scroll of width > 1000 ? document.querySelectorAll(".scroll") : [])
  if (scroll.scrollWidth > scroll.clientWidth + 1) problems.push(`a table of ${scroll.scrollWidth} in ${scroll.clientWidth}: ${name(scroll)}`);

// Tables: no column is narrower than a word. Code and links, such as the name of a run, may take several lines.
for (const cell of document.querySelectorAll("td, th")) {
  const words = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    if (words.currentNode.parentElement.closest("code, a")) continue;
    for (const found of words.currentNode.textContent.matchAll(/(?<=^|\s)\p{L}{3,}(?=[\s,.;:]|$)/gu)) {
      const range = document.createRange();
      range.setStart(words.currentNode, found.index);
      range.setEnd(words.currentNode, found.index + found[0].length);
      if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) problems.push(`“${found[0]}” is broken in ${name(cell)}`);
    }
  }
}

// Contrast: every text against what is behind it.
const luminance = (rgb) => rgb.slice(0, 3).map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const colour = channels(getComputedStyle(at).backgroundColor);
    if (colour.length === 3 || colour[3] > 0.99) return colour;
  }
  return [255, 255, 255];
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const told = new Set();
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !node.getClientRects().length || node.closest("script, style")) continue;
  const ink = channels(getComputedStyle(node)[node.closest("svg") ? "fill" : "color"]);
  if (node.closest("svg") && (ink.every((c) => c === 254) || ink.every((c) => c === 17))) continue; // on a bar: test_figures knows the bars
  const [a, b] = [luminance(ink), luminance(behind(node))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5 && !told.has(node.className)) {
    told.add(node.className);
    problems.push(`${name(node)}: contrast ${contrast.toFixed(1)}`);
  }
}
return problems;
