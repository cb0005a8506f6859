/**
 * Renders the Markdown that models write: headings, lists, quotes, tables, code, emphasis and links.
 *
 * Every element is made by name and every text is a text node, so markup in a model's answer stays text. Links lead to
 * web and mail addresses only, and no image is loaded. Incomplete Markdown of a running stream is rendered too.
 */

import { element } from "./dom.js";

/** Longest text that is rendered; a longer one is shown as it is. */
const MAX_CHARS = 200_000;
/** Limit on quotes and lists inside one another; what is deeper is shown as text. */
const MAX_DEPTH = 8;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const SAFE_URL = /^(https?:|mailto:)/i;
const LINK = /\[([^[\]]{1,2000})\]\(<?([^\s()<>]{1,2000})>?(?:\s+"[^"]{0,200}")?\)/y;
const BARE_URL = /https?:\/\/[^\s<>"'`)\]]{0,2000}[^\s<>"'`)\].,;:!?*_~]/y;
const SPECIAL = /[\\`*_~[!h]/g;

/** Return the elements that show a text. @param {string} text @returns {HTMLElement[]} */
export function renderMarkdown(text, depth = 0) {
  if (text.length > MAX_CHARS) return [element("p", { textContent: text })];
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const { block, next } = readBlock(lines, at, depth);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

/** Read the block that begins at a line. Return it, or null for an empty line, and the line after it. */
function readBlock(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return { block: null, next: at + 1 };
  if (FENCE.test(line)) return readCode(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return { block: element(`h${Math.min(6, heading[1].length + 4)}`, {}, ...inline(heading[2])), next: at + 1 };
  if (RULE.test(line)) return { block: element("hr"), next: at + 1 };
  if (QUOTE.test(line) && depth < MAX_DEPTH) return readQuote(lines, at, depth);
  if (ITEM.test(line) && depth < MAX_DEPTH) return readList(lines, at, depth);
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) return readTable(lines, at);
  return readParagraph(lines, at);
}

function readCode(lines, at) {
  const [, fence] = FENCE.exec(lines[at]);
  const isEnd = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  let next = at + 1;
  while (next < lines.length && !isEnd(lines[next])) next++;
  const code = element("code", { textContent: lines.slice(at + 1, next).join("\n") });
  return { block: element("pre", { tabIndex: 0 }, code), next: next + 1 };
}

function readQuote(lines, at, depth) {
  let next = at;
  while (next < lines.length && QUOTE.test(lines[next])) next++;
  const inner = lines.slice(at, next).map((line) => line.replace(QUOTE, ""));
  return { block: element("blockquote", {}, ...renderMarkdown(inner.join("\n"), depth + 1)), next };
}

function readList(lines, at, depth) {
  const isOrdered = /\d/.test(ITEM.exec(lines[at])[2]);
  const list = element(isOrdered ? "ol" : "ul");
  if (isOrdered) list.start = Number.parseInt(ITEM.exec(lines[at])[2], 10);
  let next = at;
  while (next < lines.length) {
    const marker = ITEM.exec(lines[next]);
    if (!marker || /\d/.test(marker[2]) !== isOrdered || RULE.test(lines[next])) break;
    const begin = next++;
    while (next < lines.length && continuesItem(lines, next)) next++;
    const inner = lines.slice(begin, next);
    inner[0] = inner[0].slice(marker[0].length);
    list.append(element("li", {}, ...renderMarkdown(inner.map((line) => line.replace(/^ {1,4}/, "")).join("\n"), depth + 1)));
  }
  return { block: list, next };
}

/** Return whether a line belongs to the list item above it: it is indented, goes on with its text, or parts two of them. */
function continuesItem(lines, at) {
  if (!lines[at].trim()) return /^ {2,}\S/.test(lines[at + 1] ?? "") || ITEM.test(lines[at + 1] ?? "");
  return /^ {2,}/.test(lines[at]) || !(ITEM.test(lines[at]) || startsBlock(lines[at]) || !lines[at - 1].trim());
}

function readTable(lines, at) {
  let next = at + 2;
  while (next < lines.length && lines[next].includes("|")) next++;
  const [head, ...rows] = [lines[at], ...lines.slice(at + 2, next)].map(cellsOf);
  const row = (name, cells) => element("tr", {}, ...cells.map((cell) => element(name, {}, ...inline(cell))));
  const body = element("tbody", {}, ...rows.map((cells) => row("td", cells)));
  return { block: element("table", {}, element("thead", {}, row("th", head)), body), next };
}

function cellsOf(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function readParagraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && !startsBlock(lines[next])) next++;
  return { block: element("p", {}, ...inline(lines.slice(at, next).join("\n"))), next };
}

function startsBlock(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Return the nodes of a text inside a block. Each mark without an end is looked for once, so long texts stay fast. */
function inline(text, depth = 0) {
  const nodes = [];
  const endless = new Set();
  let begin = 0;
  const add = (at, node, end) => {
    if (at > begin) nodes.push(text.slice(begin, at));
    nodes.push(node);
    begin = end;
    SPECIAL.lastIndex = end;
  };
  SPECIAL.lastIndex = 0;
  for (let found = SPECIAL.exec(text); found; found = SPECIAL.exec(text)) {
    const at = found.index;
    const piece = codeAt(text, at, endless) ?? markAt(text, at, endless, depth) ?? linkAt(text, at) ?? escapeAt(text, at);
    SPECIAL.lastIndex = at + 1;
    if (piece) add(at, piece.node, piece.end);
  }
  if (begin < text.length) nodes.push(text.slice(begin));
  return nodes;
}

function escapeAt(text, at) {
  const isEscape = text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "");
  return isEscape ? { node: text[at + 1], end: at + 2 } : null;
}

function codeAt(text, at, endless) {
  if (text[at] !== "`") return null;
  let length = 1;
  while (text[at + length] === "`") length++;
  const ticks = "`".repeat(length);
  const end = endOf(text, ticks, at + length, endless);
  if (end < 0) return { node: ticks, end: at + length };
  return { node: element("code", { textContent: text.slice(at + length, end) }), end: end + length };
}

function markAt(text, at, endless, depth) {
  if (depth >= MAX_DEPTH) return null;
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const start = at + mark.length;
    const isInWord = mark.includes("_") && /\w/.test(text[at - 1] ?? "");
    if (isInWord || /\s|^$/.test(text[start] ?? "")) continue;
    const end = endOf(text, mark, start, endless);
    if (end <= start || /\s/.test(text[end - 1])) continue;
    return { node: element(name, {}, ...inline(text.slice(start, end), depth + 1)), end: end + mark.length };
  }
  return null;
}

function endOf(text, mark, start, endless) {
  if (endless.has(mark)) return -1;
  const end = text.indexOf(mark, start);
  if (end < 0) endless.add(mark);
  return end;
}

function linkAt(text, at) {
  BARE_URL.lastIndex = at;
  const bare = text[at] === "h" && BARE_URL.exec(text);
  if (bare) return { node: linkTo(bare[0], bare[0]), end: at + bare[0].length };
  LINK.lastIndex = text[at] === "!" ? at + 1 : at;
  const link = (text[at] === "[" || text[at] === "!") && LINK.exec(text);
  return link ? { node: linkTo(link[2], link[1]), end: LINK.lastIndex } : null;
}

/** Return a link, or the words alone if it leads elsewhere than to a web or mail address. */
function linkTo(url, words) {
  if (!SAFE_URL.test(url)) return words;
  return element("a", { href: url, target: "_blank", rel: "noopener noreferrer", textContent: words });
}
