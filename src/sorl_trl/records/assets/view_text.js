"use strict";
/* Text from runs becomes text nodes here. Nothing of it is ever parsed as HTML. */

/** An element with children: texts, nodes, lists of both, or null for none. */
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  // One by one: a list of a million nodes is too long for the arguments of one call.
  for (const child of children.flat(Infinity)) if (child !== null) element.append(child);
  return element;
}

const ARTICLES = new Set(["a", "an", "the"]);

/** Finds golden answers as whole words, whatever stands between the words; null if there is nothing to find. */
function goldPattern(goldenAnswers) {
  const between = "[^\\p{L}\\p{M}\\p{N}]+";
  const alternatives = goldenAnswers
    .map((gold) => gold.match(/[\p{L}\p{M}\p{N}]+/gu) ?? [])
    .map((words) => (words.some(isNoArticle) ? words.filter(isNoArticle) : words))
    .filter((words) => words.length)
    .map((words) => words.join(between));
  if (!alternatives.length) return null;
  alternatives.sort((one, other) => other.length - one.length);
  return new RegExp(`((?<![\\p{L}\\p{M}\\p{N}])(?:${alternatives.join("|")})(?![\\p{L}\\p{M}\\p{N}]))`, "iu");
}

function isNoArticle(word) {
  return !ARTICLES.has(word.toLowerCase());
}

/** Nodes of a text in which what the pattern finds is marked. */
function marked(text, pattern) {
  if (!pattern) return [text];
  return text.split(pattern).map((piece, i) => (i % 2 ? make("mark", "", piece) : piece));
}

/** The ranges in which a pattern finds something, whatever elements within the block hold it. */
function rangesIn(block, pattern) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  return [...block.textContent.matchAll(pattern)].map(({ 0: found, index }) => {
    const range = new Range();
    range.setStart(...placeIn(nodes, index));
    range.setEnd(...placeIn(nodes, index + found.length));
    return range;
  });
}

/** The node that holds a character of the text of all, and its place there. */
function placeIn(nodes, index) {
  for (const node of nodes) {
    if (index <= node.length) return [node, index];
    index -= node.length;
  }
}

const TAG = /(<\/?(?:think|search|answer)>)/;

/** The parts of a turn: `role` is "think", "search" or "answer" between these tags, "tag", or "text". */
function turnParts(text) {
  const parts = [];
  let role = "text";
  text.split(TAG).forEach((piece, i) => {
    if (i % 2) {
      parts.push({ role: "tag", text: piece });
      role = piece.startsWith("</") ? "text" : piece.slice(1, -1);
    } else if (piece) {
      parts.push({ role, text: piece });
    }
  });
  return parts;
}

const DIGITS = 3; // of figures that are compared

/** A number to be read: null is a dash, and what is no number stands for itself. */
function format(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const text = Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

/** A ratio: close to 1 it is the distance from 1 that counts. */
function formatRatio(value, digits = 4) {
  const ratio = Number(value);
  if (!Number.isFinite(ratio)) return String(value);
  return ratio !== 1 && Math.abs(ratio - 1) < 0.01 ? ratio.toFixed(digits + 1) : format(ratio, digits);
}

function plural(count, one, many = one + "s") {
  return `${format(count)} ${count === 1 ? one : many}`;
}
