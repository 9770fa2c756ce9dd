"use strict";
/* The list with its filters, the address, the keys. The address names the trajectory that is shown. */

const data = JSON.parse(document.getElementById("data").textContent);
const entries = data.trajectories;
const isTraining = data.kind === "training";
const MARKS = { right: "✓", wrong: "✗", unscored: "–" };
const VERDICTS = isTraining
  ? { right: "reward above 0", wrong: "reward 0 or below", unscored: "no reward" }
  : { right: "right", wrong: "wrong", unscored: "not scored" };
const FILTERS = ["group", "verdict", "stop_reason", "searches"];
const NOTHING = "\0"; // stands for null among the values of a filter
const ORDERS = {
  order: { label: "order", key: null },
  searches: { label: "searches", key: (entry) => entry.searches },
  tokens: { label: isTraining ? "trained tokens" : "generated tokens", key: (entry) => entry.token_count },
  score: { label: isTraining ? "reward" : "right or wrong", key: (entry) => entry.score },
  ...(isTraining && { extreme: { label: "extreme ratio", key: (entry) => distanceFrom1(entry.extreme_ratio) } }),
};

const scales = Object.fromEntries(QUANTITIES.map((each) => [each.name, scaleOf(entries, each)]));

const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");
const byKey = new Map(entries.map((entry) => [entry.key, entry]));
const haystacks = new Map(entries.map((entry) => [entry, haystack(entry)]));
const rows = new Map(entries.map((entry) => [entry, row(entry)]));
let listed = entries;
let current = null;
let ascending = true;
let quantity = QUANTITIES[0];

function distanceFrom1(ratio) {
  if (ratio === null) return null;
  const distance = Math.abs(Math.log(Number(ratio)));
  return Number.isNaN(distance) ? Infinity : distance;
}

function haystack(entry) {
  return [questionOf(entry), entry.answer ?? "", ...entry.golden_answers].join("\n").toLowerCase();
}

function row(entry) {
  const mark = make("span", `mark ${entry.verdict}`, MARKS[entry.verdict]);
  mark.title = VERDICTS[entry.verdict];
  const small = make("small", "", counts(entry).map((count) => make("span", "", visible(count))));
  const link = make("a", "", mark, make("span", "", block("span", "question", visible(questionOf(entry))), small));
  link.href = address(entry);
  return make("li", "", link);
}

function counts(entry) {
  return [
    entry.group,
    entry.searches === null ? null : plural(entry.searches, "search", "searches"),
    size(entry),
    isTraining ? `reward ${format(entry.score)}` : null,
    entry.extreme_ratio === null ? null : `extreme ratio ${formatRatio(entry.extreme_ratio)}`,
    entry.stop_reason === "answered" || entry.stop_reason === null ? null : spaced(entry.stop_reason),
  ].filter((count) => count !== null);
}

function size(entry) {
  if (!isTraining) return plural(entry.token_count, "token");
  return entry.token_count ? plural(entry.token_count, "trained token") : "not trained on";
}

function address(entry) {
  return "#" + encodeURIComponent(entry.key).replaceAll("%2F", "/");
}

/** Whether an entry passes all filters, but for one perhaps: that one's counts say what it would let through. */
function passes(entry, but = "") {
  const words = byId("text").value.toLowerCase();
  const chosen = FILTERS.every((name) => {
    const value = byId(name).value;
    return name === but || value === "" || value === String(entry[name] ?? NOTHING);
  });
  return chosen && haystacks.get(entry).includes(words);
}

function refresh() {
  FILTERS.forEach(countOptions);
  listed = entries.filter((entry) => passes(entry));
  const { key } = ORDERS[byId("order").value];
  if (key) listed.sort((one, other) => compare(key(one), key(other)));
  else if (!ascending) listed.reverse();
  byId("direction").textContent = ascending ? "↑ ascending" : "↓ descending";
  byId("count").textContent = `${format(listed.length)} of ${format(entries.length)} trajectories`;
  const shown = document.createDocumentFragment();
  for (const entry of listed) shown.append(rows.get(entry));
  byId("list").replaceChildren(shown);
}

/** Whoever has no value comes last, in either direction. */
function compare(one, other) {
  if (one === null || other === null) return (one === null) - (other === null);
  const [a, b] = [Number(one), Number(other)];
  return a === b ? 0 : a < b === ascending ? -1 : 1;
}

function fillOptions(name) {
  const values = [...new Set(entries.map((entry) => entry[name]))];
  if (name === "searches") values.sort((one, other) => (one ?? Infinity) - (other ?? Infinity));
  const options = values.map((value) => new Option("", String(value ?? NOTHING)));
  byId(name).append(new Option("", ""), ...options);
  byId(name).disabled = values.length < 2;
}

function countOptions(name) {
  const counts = new Map();
  for (const entry of entries.filter((entry) => passes(entry, name))) {
    const value = String(entry[name] ?? NOTHING);
    counts.set(value, (counts.get(value) ?? 0) + 1);
    counts.set("", (counts.get("") ?? 0) + 1);
  }
  for (const option of byId(name).options) {
    option.textContent = `${optionLabel(name, option.value)} (${format(counts.get(option.value) ?? 0)})`;
  }
}

function optionLabel(name, value) {
  if (value === "") return "all";
  if (value === NOTHING) return "unknown";
  if (name === "verdict") return VERDICTS[value];
  return name === "stop_reason" ? spaced(value) : value;
}

/** Show what the address names; without a name, the first of the list. */
function follow() {
  const name = keyOf(location.hash);
  const entry = name ? byKey.get(name) : listed[0];
  const wasInList = byId("list").contains(document.activeElement);
  rows.get(current)?.firstChild.removeAttribute("aria-current");
  current = entry ?? null;
  if (!entry) {
    const unknown = make("bdi", "", visible(name));
    main.replaceChildren(make("p", "", "There is no trajectory ", unknown, " on this page."));
    return;
  }
  main.replaceChildren(...(isTraining ? [toolbar()] : []), trajectoryView(entry, data));
  if (isTraining) paint();
  const link = rows.get(entry).firstChild;
  link.setAttribute("aria-current", "true");
  if (wasInList) link.focus();
  link.scrollIntoView({ block: "nearest" });
  if (name) main.scrollIntoView(); // beneath the list, where the window is narrow
}

function keyOf(hash) {
  try {
    return decodeURIComponent(hash.slice(1));
  } catch {
    return hash.slice(1);
  }
}

/** Step through the list. Replaces the address, so that Back leaves the page and not each trajectory of it. */
function go(step) {
  const index = listed.indexOf(current);
  const next = index < 0 ? 0 : Math.max(0, Math.min(listed.length - 1, index + step));
  if (listed.length) location.replace(address(listed[next]));
}

function toolbar() {
  const choice = make("select", "", QUANTITIES.map(({ name, label }) => new Option(label, name)));
  choice.id = "quantity";
  choice.addEventListener("change", () => color(QUANTITIES[choice.selectedIndex]));
  const numbers = make("p", "numbers", "Point at a token, or move to one with Tab and ← →, for its numbers.");
  numbers.id = "numbers";
  return make("div", "toolbar", make("label", "", "Tokens coloured by ", choice), make("p", "legend"), numbers);
}

function color(chosen) {
  quantity = chosen;
  paint();
}

function paint() {
  byId("quantity").value = quantity.name;
  main.querySelector(".legend").replaceChildren(...legend(quantity, scales));
  for (const node of main.querySelectorAll(".token")) {
    const kept = Array.from(node.classList).filter((name) => ["token", "break", "blank"].includes(name));
    node.className = [...kept, shade(quantity, tokenOf.get(node), scales)].join(" ").trim();
  }
}

function showNumbers(event) {
  const place = tokenOf.get(event.target.closest(".token"));
  if (place) byId("numbers").replaceChildren(...tokenNumbers(place).flat(Infinity));
}

function stepQuantity(step) {
  if (!isTraining || !current) return;
  color(QUANTITIES[(QUANTITIES.indexOf(quantity) + step + QUANTITIES.length) % QUANTITIES.length]);
}

/** From token to token, over the borders of the parts of a turn. */
function moveToToken(step) {
  const token = document.activeElement.closest(".token");
  if (!token) return false;
  const all = Array.from(token.closest(".body").querySelectorAll(".token"));
  all[all.indexOf(token) + step]?.focus();
  return true;
}

function toggleFolds() {
  const folds = Array.from(main.querySelectorAll("details"));
  const open = folds.some((each) => !each.open);
  for (const each of folds) each.open = open;
}

function backToList() {
  rows.get(listed.includes(current) ? current : listed[0])?.firstChild.focus();
}

const KEYS = {
  j: () => go(1),
  ArrowDown: () => go(1),
  k: () => go(-1),
  ArrowUp: () => go(-1),
  ArrowRight: () => moveToToken(1),
  ArrowLeft: () => moveToToken(-1),
  "/": () => byId("text").select(),
  "[": () => stepQuantity(-1),
  "]": () => stepQuantity(1),
  o: toggleFolds,
  "?": () => byId("keys").showModal(),
};

function onKey(event) {
  if (byId("keys").open || event.isComposing || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Escape") {
    event.preventDefault(); // or the browser empties the text filter
    backToList();
  } else if (event.target.closest("input, select") || !Object.hasOwn(KEYS, event.key)) {
    return;
  } else if (KEYS[event.key]() !== false) {
    event.preventDefault();
  }
}

function start() {
  byId("group-name").textContent = isTraining ? "Step" : "Dataset";
  byId("notes").append(...data.notes.map((note) => make("p", "note", visible(note))));
  if (!isTraining) document.querySelectorAll(".training").forEach((each) => each.remove());
  FILTERS.forEach(fillOptions);
  byId("order").append(...Object.entries(ORDERS).map(([name, { label }]) => new Option(label, name)));
  byId("filters").addEventListener("input", refresh);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("direction").addEventListener("click", () => {
    ascending = !ascending;
    refresh();
  });
  byId("help").addEventListener("click", KEYS["?"]);
  for (const kind of ["mouseover", "focusin"]) main.addEventListener(kind, showNumbers);
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", follow);
  refresh();
  follow();
}

start();
