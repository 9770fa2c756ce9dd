"use strict";
/* One trajectory, as the right half of the page shows it. */

const STEPS = 4; // shades on either side of the middle
const CLIP_STATES = {
  i: { name: "inside", meaning: "inside the clip range" },
  o: { name: "outside", meaning: "outside, with a gradient" },
  c: { name: "clipped", meaning: "outside, no gradient" },
};
const QUANTITIES = [
  { name: "ratios", label: "Ratio in the loss", isRatio: true },
  { name: "token_ratios", label: "Ratio of the token", isRatio: true },
  { name: "advantages", label: "Advantage", isRatio: false },
  { name: "clipped", label: "Clip state" },
  { name: "none", label: "No colours" },
];

const SPEAKERS = { user: "User", tool: "Environment" };

const QUANTILE = 0.98; // where the colours end: beyond is what would make all other tokens look alike

/** Where the colours of a quantity end, the same for all trajectories: |ln ratio| or |advantage|. 0 if all are 0. */
function scaleOf(entries, { name, isRatio }) {
  const values = entries.flatMap((entry) => entry.segments.flatMap((segment) => segment.tokens?.[name] ?? []));
  const distances = values.map((value) => Math.abs(isRatio ? Math.log(Number(value)) : Number(value)));
  const finite = distances.filter(Number.isFinite).sort((one, other) => one - other);
  return finite[Math.round(QUANTILE * (finite.length - 1))] || (finite.at(-1) ?? 1);
}

/** The data of each token on the page: span -> {index, tokens}. */
const tokenOf = new WeakMap();

function trajectoryView(entry) {
  const pattern = goldPattern(entry.golden_answers);
  const figures = measures({ ...entry.measures, advantage: advantageOf(entry) });
  const head = [heading(entry), verdictBox(entry, pattern), groupBox(entry), figures, promptFold(entry.prompt)];
  const view = make("article", "", head);
  const summaries = summariesOf(entry);
  let [turn, context] = [0, 0];
  for (const segment of entry.segments) {
    if (segment.context !== context) view.append(make("p", "context", `Context ${segment.context}`));
    context = segment.context;
    if (segment.kind === "turn") view.append(turnCard(segment, ++turn, pattern, summaries.includes(segment)));
    else view.append(observationCard(segment, speakerOf(segment, entry), pattern));
  }
  return view;
}

/** Whose tokens these are. A complete trajectory that was trained on ends with a token that the trainer adds. */
function speakerOf(segment, { segments }) {
  const isEnd = segment === segments.at(-1) && segment.token_count === 1;
  return SPEAKERS[segment.role] ?? (isEnd ? "End, added by the trainer" : "Not trained on");
}

function heading(entry) {
  const facts = Object.entries(entry.facts).map(([name, value]) => fact(name, value));
  return make("header", "", block("h2", "question", questionOf(entry)), make("dl", "facts", facts));
}

function questionOf(entry) {
  return entry.question ?? entry.prompt.trim().slice(-200);
}

function fact(name, value) {
  return make("div", "", make("dt", "", name.replaceAll("_", " ")), make("dd", "", make("bdi", "", value)));
}

/** A block of foreign text: it takes its own direction and leaves that of its surroundings alone. */
function block(tag, className, nodes) {
  const element = make(tag, className, nodes);
  element.dir = "auto";
  return element;
}

function verdictBox(entry, pattern) {
  const answer = entry.answer === null ? make("em", "", "none") : make("bdi", "", marked(entry.answer, pattern));
  const isAsked = entry.answer !== null || entry.verdict in MARKS; // else the answer, if any, is the agent's own
  const gold = entry.golden_answers.map((text) => make("li", "", make("bdi", "", text)));
  const options = entry.options.map(([letter, text]) => option(letter, text, entry.golden_answers));
  return make(
    "section",
    `verdict ${entry.verdict}`,
    make("p", "stamp", make("b", "", withMark(entry, VERDICTS[entry.verdict])), stopped(entry)),
    isAsked ? make("p", "given", make("span", "label", "Answer"), make("span", "value", answer)) : null,
    gold.length ? make("div", "given", make("span", "label", "Gold"), make("ul", "value", gold)) : null,
    options.length ? make("div", "given", make("span", "label", "Options"), make("ul", "value", options)) : null,
  );
}

function stopped(entry) {
  return entry.stop_reason === null ? null : make("span", "", ` stopped: ${spaced(entry.stop_reason)}`);
}

function spaced(name) {
  return name.replaceAll("_", " ");
}

function option(letter, text, goldenAnswers) {
  const isRight = goldenAnswers.includes(text);
  return make("li", isRight ? "right" : "", `${letter}. `, make("bdi", "", text), isRight ? " ✓" : null);
}

function measures(values) {
  const shown = Object.entries(values).filter(([, value]) => value !== null);
  return make("dl", "measures", shown.map(([name, value]) => fact(name, format(value))));
}

function promptFold(prompt) {
  const size = plural(Array.from(prompt).length, "character");
  return fold("prompt", [`Prompt, ${size}`], block("div", "body", prompt));
}

function fold(className, summary, ...content) {
  return make("details", className, make("summary", "", summary), content);
}

function turnCard(segment, number, pattern, isSummary) {
  const className = segment.tokens ? "body tokens" : "body";
  const body = block("div", className, segment.tokens ? tokenNodes(segment.tokens) : textNodes(segment.text, pattern));
  const agent = segment.agent ? make("bdi", "", segment.agent) : null;
  const action = segment.action ? make("span", `action ${segment.action}`, segment.action) : null;
  const summary = isSummary ? make("span", "badge", "summary") : null;
  const size = make("span", "", plural(segment.token_count, "token"));
  const reward = segment.reward === undefined ? null : make("span", "", `reward ${format(segment.reward)}`);
  const header = make("header", "", make("h3", "", `Turn ${number}`), agent, action, summary, size, reward);
  return make("section", "turn", header, body);
}

function textNodes(text, pattern) {
  return turnParts(text).map(({ role, text }) => {
    return make("span", role, role === "answer" ? marked(text, pattern) : text);
  });
}

/** A span per token, within a span per part of the turn. A token belongs where its first character does, but space. */
function tokenNodes(tokens) {
  const parts = turnParts(tokens.text.join(""));
  const holders = parts.map(({ role }) => make("span", role));
  if (!parts.length) return [];
  let [part, end, offset] = [0, parts[0].text.length, 0];
  tokens.text.forEach((text, index) => {
    const first = offset + Math.max(0, text.search(/\S/));
    while (first >= end && part < parts.length - 1) end += parts[++part].text.length;
    holders[part].append(tokenNode(text, { index, tokens }));
    offset += text.length;
  });
  return holders;
}

function tokenNode(text, place) {
  const node = make("span", "token", text);
  node.title = tokenNumbers(place);
  tokenOf.set(node, place);
  return node;
}

function observationCard(segment, name, pattern) {
  const badges = [
    segment.truncated ? make("span", "badge", "truncated") : null,
    segment.neutralized ? make("span", "badge", `${format(segment.neutralized)} neutralized`) : null,
  ];
  const size = make("span", "", plural(segment.token_count, "token"));
  const header = make("header", "", make("h3", "", name), size, badges);
  const read = block("div", "body", marked(segment.text.trim(), pattern)); // a protocol puts blank lines around
  if (segment.repeats) return make("section", "observation", fold("read", ["Read again, ", size], read));
  if (!segment.passages.length) return make("section", "observation", header, read);
  const passages = segment.passages.map((passage, i) => passageFold(passage, i + 1, pattern));
  return make("section", "observation", header, passages, fold("read", ["As the policy read it"], read));
}

function passageFold(passage, rank, pattern) {
  const holdsGold = pattern !== null && pattern.test(passage.text + "\n" + passage.title);
  const summary = [
    `${rank}. `,
    make("bdi", "title", marked(passage.title || passage.id, pattern)),
    passage.score === null ? null : make("span", "score", `score ${format(passage.score)}`),
    holdsGold ? make("mark", "badge", "gold") : null,
  ];
  return fold("passage", summary, block("div", "body", marked(passage.text, pattern)));
}

/** The class that colours a token by a quantity. */
function shade(quantity, { tokens, index }, scales) {
  if (quantity.name === "none") return "";
  if (quantity.name === "clipped") return CLIP_STATES[tokens.clipped[index]]?.name ?? "";
  const value = Number(tokens[quantity.name][index]);
  const distance = quantity.isRatio ? Math.log(value) : value;
  if (Number.isNaN(distance)) return "not-a-number";
  const step = Math.max(-STEPS, Math.min(STEPS, Math.round((STEPS * distance) / scales[quantity.name])));
  return step < 0 ? `below-${-step}` : step > 0 ? `above-${step}` : "middle";
}

function legend(quantity, scales) {
  if (quantity.name === "none") return [];
  if (quantity.name === "clipped") {
    return Object.values(CLIP_STATES).map(({ name, meaning }) => make("span", `swatch ${name}`, meaning));
  }
  if (scales[quantity.name] === 0) {
    const nothing = quantity.isRatio ? "no movement yet: every ratio is 1" : "every advantage is 0";
    return [make("span", "swatch middle", nothing)];
  }
  const swatches = [];
  for (let step = -STEPS; step <= STEPS; step++) {
    const distance = (scales[quantity.name] * step) / STEPS;
    const label = quantity.isRatio ? formatRatio(Math.exp(distance), DIGITS) : format(distance, DIGITS);
    const sign = step === -STEPS ? "≤ " : step === STEPS ? "≥ " : "";
    const className = step < 0 ? `below-${-step}` : step > 0 ? `above-${step}` : "middle";
    swatches.push(make("span", `swatch ${className}`, sign + label));
  }
  return swatches;
}

/** All numbers of a token, in words. */
function tokenNumbers({ index, tokens }) {
  const [ratio, own] = [tokens.ratios[index], tokens.token_ratios[index]].map((value) => formatRatio(value));
  const state = CLIP_STATES[tokens.clipped[index]]?.meaning ?? "not trained on";
  return `ratio in the loss ${ratio}, of the token ${own}, advantage ${format(tokens.advantages[index])}, ${state}`;
}
