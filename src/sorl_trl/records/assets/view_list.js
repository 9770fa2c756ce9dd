"use strict";
/* The list with its filters, the address, the keys. The address names the trajectory that is shown. */

const data = JSON.parse(document.getElementById("data").textContent);
const entries = data.trajectories;
const isTraining = data.kind === "training";
const MARKS = { right: "✓", wrong: "✗", unscored: "–" };
const VERDICTS = {
  right: "right",
  wrong: "wrong",
  rewarded: "reward above 0",
  unrewarded: "reward 0 or below",
  unscored: "not scored",
};
const SCORE = isTraining || entries.some(({ measures }) => "reward" in measures) ? "reward" : "score";
const FILTERS = ["part", "verdict", "stop_reason"];
const parts = new Set(entries.map(({ part }) => part)).size;
const scoreOf = (entry) => (entry.score === null ? NaN : Number(entry.score));
const tokensOf = (entry) => entry.token_count;
const ORDERS = [
  { label: "as recorded" },
  { label: `highest ${SCORE} first`, of: scoreOf, sign: -1 },
  { label: `lowest ${SCORE} first`, of: scoreOf, sign: 1 },
  { label: "longest first", of: tokensOf, sign: -1 },
  { label: "shortest first", of: tokensOf, sign: 1 },
];

const scales = Object.fromEntries(QUANTITIES.map((each) => [each.name, scaleOf(entries, each)]));

const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");
const groupOf = new Map(groupsOf(entries).flatMap((members) => members.map((entry) => [entry, members])));
const texts = new Map(); // of trajectories, once they are searched
const rows = new Map(entries.map((entry) => [entry, row(entry)]));
let listed = entries;
let current = null;
let quantity = QUANTITIES[0];

function row(entry) {
  const mark = make("span", `mark ${entry.verdict}`, scored(entry));
  mark.title = VERDICTS[entry.verdict];
  const small = make("small", "", counts(entry).map((count) => make("span", "", count)));
  const link = make("a", "", mark, make("span", "", block("span", "question", questionOf(entry)), small));
  link.href = address(entry);
  return make("li", "", link);
}

function scored(entry) {
  return withMark(entry, entry.score === null ? "" : format(entry.score, DIGITS));
}

/** A reward has no mark: a small one may be worse than those of its group. */
function withMark({ verdict }, text) {
  return `${MARKS[verdict] ?? ""} ${text}`.trim();
}

/** What is to be seen at a glance, beside the score. */
function counts(entry) {
  const [advantage, agents] = [advantageOf(entry), agentsOf(entry)];
  const contexts = contextCount(entry);
  const summaries = summariesOf(entry).length;
  return [
    advantage === null ? null : `advantage ${advantage}`,
    plural(turnCount(entry), "turn"),
    plural(entry.token_count, "token"),
    parts > 1 ? entry.part : null,
    entry.stop_reason === "answered" || entry.stop_reason === null ? null : spaced(entry.stop_reason),
    agents.length ? agents.join(", ") : null,
    contexts > 1 ? plural(contexts, "context") : null,
    summaries ? plural(summaries, "summary", "summaries") : null,
  ].filter((count) => count !== null);
}

function address(entry) {
  return "#" + encodeURIComponent(entry.key).replaceAll("%2F", "/");
}

function passes(entry, pattern) {
  const isChosen = (name) => ["", String(entry[name])].includes(byId(name).value);
  return FILTERS.every(isChosen) && (pattern === null || wholeText(entry).search(pattern) >= 0);
}

/** Everything that was asked, read and written. */
function wholeText(entry) {
  if (!texts.has(entry)) {
    const { question, answer, golden_answers: gold, prompt, segments } = entry;
    const passages = segments.flatMap((segment) => segment.passages ?? []).flatMap(({ title, text }) => [title, text]);
    const agents = agentsOf(entry);
    texts.set(entry, [question, answer, ...gold, prompt, ...segments.map(textOf), ...passages, ...agents].join("\n"));
  }
  return texts.get(entry);
}

/** A pattern of the words in the search field, which stand for themselves; null if there are none. */
function sought() {
  const words = byId("text").value.trim().replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
  return words ? new RegExp(words.replace(/\s+/g, "\\s+"), "giu") : null;
}

function ordered(chosen) {
  const { of, sign } = ORDERS[byId("order").selectedIndex];
  if (!of) return chosen;
  const missing = (entry) => Number(Number.isNaN(of(entry))); // what has no number is last
  return chosen.sort((one, other) => missing(one) - missing(other) || sign * (of(one) - of(other)));
}

/** A group comes where its first trajectory does. */
function refresh() {
  const pattern = sought();
  const chosen = ordered(entries.filter((entry) => passes(entry, pattern)));
  const groups = byId("by-group").checked ? groupsOf(chosen) : chosen.map((entry) => [entry]);
  listed = groups.flat();
  byId("count").textContent = `${format(listed.length)} of ${format(entries.length)} trajectories`;
  byId("list").replaceChildren(...groups.map(groupNode));
  const { sentence, distributions } = overview(listed);
  byId("summary").textContent = sentence;
  byId("distributions").replaceChildren(...distributions);
  markFound();
}

function groupNode(members) {
  if (members.length === 1) return rows.get(members[0]);
  const facts = groupFacts(groupOf.get(members[0]), members).map((each) => make("span", "", each));
  const head = make("div", "head", block("p", "question", questionOf(members[0])), make("small", "", facts));
  return make("li", "group", head, make("ol", "", members.map((entry) => rows.get(entry))));
}

/** The group of a trajectory as its update sees it, with a link to each that is on the page. */
function groupBox(entry) {
  const members = groupOf.get(entry);
  if (rewardsOf(members).length < 2) return null;
  const links = members.map((each) => {
    const advantage = advantageOf(each);
    const below = advantage === null ? null : make("span", "", advantage);
    const link = make("a", "", make("b", each.verdict, scored(each)), below);
    link.href = address(each);
    link.title = counts(each).join(", ");
    if (each === entry) link.setAttribute("aria-current", "true");
    return make("li", "", link);
  });
  return make("section", "siblings", make("p", "", groupFacts(members).join(", ")), make("ol", "", links));
}

/** Mark what is sought in the trajectory on the page, and open the folds that hold it. */
function markFound() {
  const pattern = sought();
  const blocks = pattern ? [...main.querySelectorAll(".question, .value, .body, summary .title")] : [];
  const ranges = blocks.flatMap((each) => rangesIn(each, pattern));
  for (const range of ranges) {
    const fold = range.startContainer.parentElement.closest("details");
    if (fold) fold.open = true;
  }
  CSS.highlights?.set("found", new Highlight(...ranges));
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
  main.replaceChildren(...(isTraining ? [toolbar()] : []), trajectoryView(entry));
  if (isTraining) paint();
  markFound();
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
  const isTyped = event.ctrlKey || event.altKey || event.metaKey || event.target.closest("[type=search], select");
  if (step && !isTyped) go(step);
}

function start() {
  document.body.className = data.kind;
  byId("part-name").textContent = isTraining ? "Step" : "Dataset";
  byId("notes").append(...data.notes.map((note) => make("p", "note", note)));
  FILTERS.forEach(fillOptions);
  byId("order").append(...ORDERS.map(({ label }) => new Option(label)));
  byId("filters").addEventListener("input", refresh);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", follow);
  refresh();
  follow();
}

start();
