"use strict";
/* Figures: of all trajectories, of a group, and of one trajectory at a glance. */

const MOST_BARS = 6; // more distinct numbers share bars
const COMPARED = 60; // characters that tell whether a context repeats an observation

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** As GRPO computes it: for a sample. */
function std(values) {
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}

/** What is a number: no null, and no word for what is not finite. */
function finite(values) {
  return values.filter((value) => value !== null).map(Number).filter(Number.isFinite);
}

/** The trajectories of each group, in their order. */
function groupsOf(entries) {
  const groups = new Map();
  for (const entry of entries) {
    const name = `${entry.group}\n${entry.prompt}`;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(entry);
  }
  return [...groups.values()];
}

/** The rewards of a whole group: training may have recorded only a part of its trajectories. */
function rewardsOf(members) {
  const recorded = members[0].group_rewards;
  return recorded.length ? recorded : members.map((entry) => entry.score);
}

/** A group in words. `listed` are those of its `members` that the list shows. */
function groupFacts(members, listed = members) {
  const rewards = rewardsOf(members);
  const known = finite(rewards);
  return [
    `Group of ${rewards.length}`,
    listed.length === rewards.length ? null : plural(listed.length, "entry", "entries"),
    known.length ? `mean ${SCORE} ${format(mean(known), DIGITS)}` : null,
    known.length > 1 ? `std ${format(std(known), DIGITS)}` : null,
  ].filter((each) => each !== null);
}

function turnCount(entry) {
  return entry.measures.turns ?? entry.segments.filter(({ kind }) => kind === "turn").length;
}

/** The advantage of a trajectory's tokens, in words, or their range; null if it has none. */
function advantageOf(entry) {
  const values = finite(entry.segments.flatMap(({ tokens }) => tokens?.advantages ?? []));
  if (!values.length) return null;
  values.sort((one, other) => one - other);
  return [...new Set([values[0], values.at(-1)].map((value) => format(value, DIGITS)))].join(" to ");
}

function contextCount(entry) {
  return new Set(entry.segments.map(({ context }) => context)).size;
}

function agentsOf(entry) {
  return [...new Set(entry.segments.map(({ agent }) => agent ?? "").filter(Boolean))];
}

/** Turns that end their context, and that the next, new context reads without the observation before them. */
function summariesOf(entry) {
  const { segments } = entry;
  if (contextCount(entry) === 1) return [];
  return segments.filter((turn, i) => {
    const later = segments.slice(i + 1);
    const next = later.findIndex(({ kind }) => kind === "turn");
    if (turn.kind !== "turn" || next < 0 || later.some(({ context }) => context === turn.context)) return false;
    const before = segments.slice(0, i).filter(({ context }) => context === turn.context);
    const seen = before.findLast(({ kind }) => kind === "observation");
    if (!seen || segments.slice(0, i).some(({ context }) => context === later[next].context)) return false;
    const opening = wordsOf(later.slice(0, next));
    const said = wordsOf([turn]);
    return said !== "" && opening.includes(said) && !opening.includes(wordsOf([seen]).slice(0, COMPARED));
  });
}

/** The text of segments, without thoughts and control tokens, whatever space is between words. */
function wordsOf(segments) {
  const text = segments.map(textOf).join(" ");
  return text.replace(/<think>.*?<\/think>|<\|[^|]*\|>|<\/?s>|\[EOS\]/gsu, " ").split(/\s+/).filter(Boolean).join(" ");
}

function textOf(segment) {
  return segment.text ?? segment.tokens.text.join("");
}

/** The number of values by name: of each number or, if there are many, of ranges of equal width. */
function countsOf(values) {
  const known = finite(values).sort((one, other) => one - other);
  let starts = [...new Set(known)];
  let nameOf = (start) => format(start, DIGITS);
  if (starts.length > MOST_BARS) {
    const [least, most] = [known[0], known.at(-1)];
    const step = known.every(Number.isInteger) ? 1 : 0;
    const width = step ? Math.ceil((most - least + step) / MOST_BARS) : (most - least) / MOST_BARS;
    starts = Array.from({ length: MOST_BARS }, (_, i) => least + i * width).filter((start) => start <= most);
    nameOf = (start) => `${format(start, DIGITS)} to ${format(start + width - step, DIGITS)}`;
  }
  const counts = starts.map((start, i) => {
    const isInside = (value) => value >= start && !(value >= starts[i + 1]);
    return [nameOf(start), known.filter(isInside).length];
  });
  const missing = values.length - known.length;
  return missing ? [...counts, ["none", missing]] : counts;
}

/** Bars, one for each name with its count. */
function distribution(title, counts) {
  const most = Math.max(...counts.map(([, count]) => count));
  const bars = counts.map(([name, count]) => {
    const bar = make("i", "");
    bar.style.width = `${(100 * count) / most}%`;
    return make("tr", "", make("th", "", name), make("td", "bar", bar), make("td", "", format(count)));
  });
  return make("table", "", make("caption", "", title), make("tbody", "", bars));
}

/** The header's sentence on these trajectories, and its distributions. */
function overview(entries) {
  const groups = groupsOf(entries).map(([first]) => finite(rewardsOf(groupOf.get(first))));
  const compared = groups.filter((rewards) => rewards.length > 1);
  const equal = compared.filter((rewards) => new Set(rewards).size === 1).length;
  const scores = finite(entries.map((entry) => entry.score));
  const sentence = [
    `${plural(entries.length, "trajectory", "trajectories")} of ${plural(groups.length, "group")}`,
    scores.length ? `mean ${SCORE} ${format(mean(scores), DIGITS)}` : null,
    compared.length ? `${format(equal)} of ${plural(compared.length, "group")} with equal ${SCORE}s` : null,
  ];
  const reasons = new Map();
  for (const { stop_reason: reason } of entries) {
    const name = spaced(reason ?? "not recorded");
    reasons.set(name, (reasons.get(name) ?? 0) + 1);
  }
  return {
    sentence: sentence.filter((part) => part !== null).join(", "),
    distributions: [
      distribution(SCORE, countsOf(entries.map((entry) => entry.score))),
      distribution("turns", countsOf(entries.map(turnCount))),
      distribution("stop reason", [...reasons].sort(([, one], [, other]) => other - one)),
    ],
  };
}
