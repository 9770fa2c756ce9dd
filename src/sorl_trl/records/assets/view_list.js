"use strict";
/* The list with its filters, the address, the keys. The address names the trajectory that is shown. */

const data = JSON.parse(document.getElementById("data").textContent);
const entries = data.trajectories;
const isTraining = data.kind === "training";
const MARKS = { right: "✓", wrong: "✗", unscored: "–" };
const VERDICTS = isTraining
  ? { right: "reward above 0", wrong: "reward 0 or below", unscored: "no reward" }
  : { right: "right", wrong: "wrong", unscored: "not scored" };
const FILTERS = ["group", "verdict", "stop_reason"];

const scales = Object.fromEntries(QUANTITIES.map((each) => [each.name, scaleOf(entries, each)]));

const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");
const rows = new Map(entries.map((entry) => [entry, row(entry)]));
let listed = entries;
let current = null;
let quantity = QUANTITIES[0];

function row(entry) {
  const mark = make("span", `mark ${entry.verdict}`, MARKS[entry.verdict]);
  mark.title = VERDICTS[entry.verdict];
  const small = make("small", "", counts(entry).map((count) => make("span", "", count)));
  const link = make("a", "", mark, make("span", "", block("span", "question", questionOf(entry)), small));
  link.href = address(entry);
  return make("li", "", link);
}

function counts(entry) {
  return [
    entry.group,
    plural(entry.token_count, isTraining ? "trained token" : "token"),
    isTraining ? `reward ${format(entry.score)}` : null,
    entry.stop_reason === "answered" || entry.stop_reason === null ? null : spaced(entry.stop_reason),
  ].filter((count) => count !== null);
}

function address(entry) {
  return "#" + encodeURIComponent(entry.key).replaceAll("%2F", "/");
}

function passes(entry) {
  const text = [questionOf(entry), entry.answer ?? "", ...entry.golden_answers].join("\n").toLowerCase();
  const isChosen = (name) => ["", String(entry[name])].includes(byId(name).value);
  return FILTERS.every(isChosen) && text.includes(byId("text").value.toLowerCase());
}

function refresh() {
  listed = entries.filter(passes);
  byId("count").textContent = `${format(listed.length)} of ${format(entries.length)} trajectories`;
  byId("list").replaceChildren(...listed.map((entry) => rows.get(entry)));
}

function fillOptions(name) {
  const values = [...new Set(entries.map((entry) => String(entry[name])))];
  const options = values.map((value) => new Option(name === "verdict" ? VERDICTS[value] : spaced(value), value));
  byId(name).append(new Option("all", ""), ...options);
}

/** Show what the address names; without a name, the first of the list. */
function follow() {
  const entry = entries.find((each) => address(each) === location.hash) ?? listed[0] ?? entries[0];
  rows.get(current)?.firstChild.removeAttribute("aria-current");
  current = entry;
  main.replaceChildren(...(isTraining ? [toolbar()] : []), trajectoryView(entry, data));
  if (isTraining) paint();
  const link = rows.get(entry).firstChild;
  link.setAttribute("aria-current", "true");
  link.scrollIntoView({ block: "nearest" });
}

/** Step through the list. Replaces the address, so that Back leaves the page and not each trajectory of it. */
function go(step) {
  const next = listed[Math.max(0, Math.min(listed.length - 1, listed.indexOf(current) + step))];
  if (next) location.replace(address(next));
}

function toolbar() {
  const choice = make("select", "", QUANTITIES.map(({ name, label }) => new Option(label, name)));
  choice.value = quantity.name;
  choice.addEventListener("change", () => {
    quantity = QUANTITIES[choice.selectedIndex];
    paint();
  });
  return make("div", "toolbar", make("label", "", "Tokens coloured by ", choice), make("p", "legend"));
}

function paint() {
  main.querySelector(".legend").replaceChildren(...legend(quantity, scales));
  for (const node of main.querySelectorAll(".token")) {
    node.className = `token ${shade(quantity, tokenOf.get(node), scales)}`;
  }
}

function onKey(event) {
  const step = { j: 1, k: -1 }[event.key];
  if (step && !event.ctrlKey && !event.altKey && !event.metaKey && !event.target.closest("input, select")) go(step);
}

function start() {
  byId("group-name").textContent = isTraining ? "Step" : "Dataset";
  byId("notes").append(...data.notes.map((note) => make("p", "note", note)));
  FILTERS.forEach(fillOptions);
  byId("filters").addEventListener("input", refresh);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", follow);
  refresh();
  follow();
}

start();
