// Sorting and filtering for the generated tables of results. Without JavaScript they are plain tables.
"use strict";

const MANY_ROWS = 8;

function readCell(row, index) {
  return row.cells[index].textContent.trim();
}

function readNumber(text) {
  const match = text.replace(/,/g, "").replace(/−/g, "-").match(/[+-]?\d+(\.\d+)?(e[+-]?\d+)?/i);
  return match ? parseFloat(match[0]) : NaN;
}

function compareCells(left, right, isNumeric) {
  if (!left || !right) return left ? -1 : right ? 1 : 0; // empty cells come last
  if (!isNumeric) return left.localeCompare(right, undefined, { numeric: true });
  const [a, b] = [readNumber(left), readNumber(right)];
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) ? (Number.isNaN(b) ? 0 : 1) : -1;
  return a - b;
}

function sortRows(table, index, header) {
  const isDescending = header.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
  const isNumeric = header.classList.contains("number");
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => {
    const [left, right] = [readCell(a, index), readCell(b, index)];
    const order = compareCells(left, right, isNumeric);
    return isDescending && left && right ? -order : order;
  });
  table.tBodies[0].append(...rows);
}

function addSorting(table) {
  [...table.tHead.rows[0].cells].forEach((header, index) => {
    if (!header.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sortRows(table, index, header));
    header.append(button);
  });
}

function makeLabel(text, control) {
  const label = document.createElement("label");
  label.append(text, control);
  return label;
}

function makeChoice(table, index, apply) {
  const select = document.createElement("select");
  const values = [...new Set([...table.tBodies[0].rows].map((row) => readCell(row, index)))].filter(Boolean).sort();
  for (const value of ["", ...values]) select.append(new Option(value || "all", value));
  select.addEventListener("change", apply);
  return select;
}

function addFilters(box, table) {
  const rows = [...table.tBodies[0].rows];
  const tools = document.createElement("div");
  tools.className = "results-tools";
  const count = document.createElement("p");
  count.className = "results-count";
  count.setAttribute("role", "status");
  const search = document.createElement("input");
  search.type = "search";
  const choices = table.dataset.choices.split(",").filter(Boolean).map(Number);
  const selects = choices.map((index) => [index, makeChoice(table, index, apply)]);
  function apply() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const matches =
        words.every((word) => text.includes(word)) &&
        selects.every(([index, select]) => !select.value || readCell(row, index) === select.value);
      row.hidden = !matches;
      shown += matches;
    }
    count.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`;
  }
  search.addEventListener("input", apply);
  tools.append(makeLabel("Filter", search));
  for (const [index, select] of selects) tools.append(makeLabel(table.tHead.rows[0].cells[index].textContent, select));
  tools.append(count);
  box.prepend(tools);
  apply();
}

function showScrolling(box) {
  const scroll = box.querySelector(".results-scroll");
  const hint = document.createElement("p");
  hint.className = "results-hint";
  hint.textContent = "The table scrolls sideways →";
  scroll.before(hint);
  const update = () => {
    hint.hidden = scroll.scrollWidth <= scroll.clientWidth + 1;
  };
  new ResizeObserver(update).observe(scroll);
  update();
}

function prepareTables() {
  for (const box of document.querySelectorAll(".results")) {
    const table = box.querySelector("table");
    if (table.tBodies[0].rows.length >= MANY_ROWS) addFilters(box, table);
    addSorting(table);
    showScrolling(box);
  }
}

// What the theme leaves out for keyboards and screen readers.
function nameParts() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((nav, index) => nav.setAttribute("aria-label", `Code ${index + 1}`));
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    new ResizeObserver(() => {
      if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
      else part.removeAttribute("tabindex");
    }).observe(part);
  }
}

addEventListener("load", nameParts);
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", prepareTables);
else prepareTables();
