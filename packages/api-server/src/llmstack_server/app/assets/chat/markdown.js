// Markdown of a model as a tree of blocks: nodes `{name, attributes, children}` with the inline nodes of inline.js.
// HTML is text. An image is a link.

const MAX_BLOCK_DEPTH = 8;
const MAX_COLUMNS = 64;
const FENCE = /^( {0,3})(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*)|)$/;
const CELL = /^ *:?-+:? *$/;
const MATH_ENDS = { "$$": "$$", "\\[": "\\]" };

function markdownTree(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n").map((line) => line.replaceAll("\t", "    "));
  return blocksOf(lines, 0);
}

function node(name, children, attributes) {
  return attributes ? { name, attributes, children } : { name, children };
}

function blocksOf(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = blockAt(lines, at, depth);
    blocks.push(block);
    at = next;
  }
  return blocks;
}

// The block that begins at a line, and the line after it.
function blockAt(lines, at, depth) {
  const line = lines[at];
  const heading = HEADING.exec(line);
  if (FENCE.test(line)) return fenceAt(lines, at);
  if (line.startsWith("    ")) return indentedAt(lines, at);
  if (heading) return [headingOf(heading[1].length, heading[2] ?? ""), at + 1];
  if (RULE.test(line)) return [node("hr", []), at + 1];
  if (MATH_ENDS[line.trim()]) return mathAt(lines, at);
  if (isTable(lines, at)) return tableAt(lines, at);
  if (depth < MAX_BLOCK_DEPTH && QUOTE.test(line)) return quoteAt(lines, at, depth);
  if (depth < MAX_BLOCK_DEPTH && ITEM.test(line)) return listAt(lines, at, depth);
  return paragraphAt(lines, at);
}

function beginsBlock(lines, at) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || MATH_ENDS[line.trim()]) return true;
  const item = ITEM.exec(line); // a number other than 1 may be the end of a sentence
  return (item && Boolean(item[4]) && (!/\d/.test(item[2]) || /^1[.)]$/.test(item[2]))) || isTable(lines, at);
}

function paragraphAt(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim()) {
    const underline = /^ {0,3}(=+|-+) *$/.exec(lines[end]);
    if (underline) {
      return [headingOf(underline[1][0] === "=" ? 1 : 2, lines.slice(at, end).join(" ")), end + 1];
    }
    if (beginsBlock(lines, end)) break;
    end += 1;
  }
  const text = lines.slice(at, end).map((line) => line.trim().replace(/\\$/, "")).join("\n");
  return [node("p", inlineTree(text)), end];
}

// One level of headings: those of a model come in any order, and the page has its own above them.
function headingOf(level, text) {
  return node("h3", inlineTree(text.replace(/[ \t]+#+[ \t]*$/, "").trim()), { class: `level${level}` });
}

function codeBlock(text, language) {
  return node("pre", [node("code", [text])], language ? { language } : undefined);
}

function fenceAt(lines, at) {
  const [, indent, marks, info] = FENCE.exec(lines[at]);
  const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},} *$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const spaces = new RegExp(`^ {0,${indent.length}}`);
  const code = lines.slice(at + 1, end).map((line) => line.replace(spaces, ""));
  return [codeBlock(code.join("\n"), info.trim().split(" ")[0].slice(0, 40)), end + 1];
}

function indentedAt(lines, at) {
  let end = at;
  while (end < lines.length && (lines[end].startsWith("    ") || !lines[end].trim())) end += 1;
  while (!lines[end - 1].trim()) end -= 1;
  return [codeBlock(lines.slice(at, end).map((line) => line.slice(4)).join("\n")), end];
}

function mathAt(lines, at) {
  const closing = MATH_ENDS[lines[at].trim()];
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== closing) end += 1;
  return [node("p", [lines.slice(at, end + 1).join("\n")], { class: "math" }), end + 1];
}

// Lines of a quote, and those that go on with its last paragraph without the mark.
function quoteAt(lines, at, depth) {
  const inside = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    if (QUOTE.test(lines[end])) inside.push(lines[end].replace(QUOTE, ""));
    else if (lines[end].trim() && inside.at(-1).trim() && !beginsBlock(lines, end)) inside.push(lines[end]);
    else break;
  }
  return [node("blockquote", blocksOf(inside, depth + 1)), end];
}

const indentOf = (line) => line.length - line.trimStart().length;

function listAt(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const isNumbered = /\d/.test(first[2]);
  const items = [];
  let isLoose = false;
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || /\d/.test(found[2]) !== isNumbered || found[1].length > first[1].length + 3 || RULE.test(lines[end])) break;
    const [inside, next, isSpaced] = itemAt(lines, end, found);
    items.push(inside);
    isLoose ||= isSpaced;
    end = next;
    let after = end;
    while (after < lines.length && !lines[after].trim()) after += 1;
    if (after > end && after < lines.length && ITEM.test(lines[after])) end = after;
  }
  const number = isNumbered ? Number.parseInt(first[2], 10) : 1;
  const children = items.map((inside) => node("li", itemChildren(inside, isLoose, depth)));
  return [node(isNumbered ? "ol" : "ul", children, number === 1 ? undefined : { start: number }), end];
}

// The lines of an item, the line after it, and whether blank lines are between its parts.
function itemAt(lines, at, found) {
  const marker = found[1].length + found[2].length;
  const spaces = (found[3] ?? " ").length;
  const content = marker + (spaces > 4 ? 1 : spaces);
  const least = Math.min(content, found[1].length + 2); // models indent by two where markdown asks for three
  const inside = [lines[at].slice(content)];
  let isSpaced = false;
  let end = at + 1;
  while (end < lines.length) {
    let next = end;
    while (next < lines.length && !lines[next].trim()) next += 1;
    if (next === lines.length) break;
    const isInside = indentOf(lines[next]) >= least;
    const goesOn = next === end && !beginsBlock(lines, next) && !ITEM.test(lines[next]) && inside.at(-1).trim();
    if (!isInside && !goesOn) break;
    for (let blank = end; blank < next; blank += 1) inside.push("");
    isSpaced ||= next > end && !ITEM.test(lines[next]);
    inside.push(lines[next].slice(Math.min(indentOf(lines[next]), content)));
    end = next + 1;
  }
  return [inside, end, isSpaced];
}

function itemChildren(inside, isLoose, depth) {
  const task = /^\[([ xX])\] +/.exec(inside[0]);
  if (task) inside[0] = inside[0].slice(task[0].length);
  const blocks = blocksOf(inside, depth + 1);
  const children = isLoose ? blocks : blocks.flatMap((block) => (block.name === "p" && !block.attributes ? block.children : [block]));
  return task ? [task[1] === " " ? "☐ " : "☑ ", ...children] : children;
}

function cellsOf(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  const cells = inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  return cells.slice(0, MAX_COLUMNS);
}

function isTable(lines, at) {
  const [head, rule] = [lines[at], lines[at + 1]];
  if (!head.includes("|") || !rule || !/^[ |:-]+$/.test(rule) || !rule.includes("-")) return false;
  const cells = cellsOf(rule);
  return cells.every((cell) => CELL.test(cell)) && cells.length === cellsOf(head).length;
}

function tableAt(lines, at) {
  const aligned = cellsOf(lines[at + 1]).map((cell) => {
    const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
    return right ? (left ? "center" : "right") : undefined;
  });
  const row = (line, name) => {
    const cells = cellsOf(line);
    return node("tr", aligned.map((side, index) => node(name, inlineTree(cells[index] ?? ""), side && { class: side })));
  };
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  return [node("table", [node("thead", [row(lines[at], "th")]), node("tbody", body)]), end];
}
