// Markdown within a paragraph, as a tree of strings and nodes `{name, attributes, children}`. Linear in the text.

const MAX_INLINE_DEPTH = 16;
const MAX_URL = 2000;
// Where something other than text may begin.
const MARKS = /[\\`*_~[\]<$]|!\[|https?:\/\//g;
const ADDRESS = /https?:\/\/[^\s<>"`]{1,2000}/y;
const DESTINATION = /\(\s{0,9}(?:<([^<>\n]{0,2000})>|((?:[^\s()\\]|\\.|\([^\s()]{0,200}\)){0,2000}))(?:\s{1,9}(?:"[^"]{0,300}"|'[^']{0,300}'))?\s{0,9}\)/y;
const AUTOLINK = /<(https?:\/\/[^\s<>]{1,2000})>/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;

// The address if it is one of the web, else null. What a model writes may name any scheme.
function webAddress(text) {
  if (text.length > MAX_URL || !/^https?:\/\//i.test(text)) return null;
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

function inlineTree(text) {
  return new InlineParser(text).parse();
}

class InlineParser {
  constructor(text) {
    this.text = text;
    this.items = []; // strings, nodes, and delimiters `{mark, count, opens, closes}`
    this.brackets = []; // places in `items` of `[` that may begin a link
    this.absent = new Set(); // closing marks that do not come any more
  }

  parse() {
    let at = 0;
    for (;;) {
      MARKS.lastIndex = at;
      const found = MARKS.exec(this.text);
      this.addText(this.text.slice(at, found ? found.index : undefined));
      if (!found) return withEmphasis(this.items);
      at = this.take(found.index, found[0]);
    }
  }

  addText(text) {
    if (!text) return;
    if (typeof this.items.at(-1) === "string") this.items[this.items.length - 1] += text;
    else this.items.push(text);
  }

  // Takes what begins at a mark; where it ends.
  take(at, mark) {
    if (mark === "\\") return this.takeBackslash(at);
    if (mark === "`") return this.takeCode(at);
    if (mark === "$") return this.takeDollars(at);
    if (mark === "[" || mark === "![") return this.openBracket(at, mark);
    if (mark === "]") return this.closeBracket(at);
    if (mark === "<") return this.takeAddress(at, AUTOLINK, 1);
    if (mark.startsWith("http")) return this.takeAddress(at, ADDRESS, 0);
    return this.takeDelimiter(at, mark);
  }

  takeBackslash(at) {
    const next = this.text[at + 1] ?? "";
    if (next === "(" || next === "[") return this.takeUntil(at, 2, next === "(" ? "\\)" : "\\]", "math");
    const isEscape = /[!-/:-@[-`{-~]/.test(next);
    this.addText(isEscape ? next : "\\");
    return at + (isEscape ? 2 : 1);
  }

  // A span without markdown inside, marks included, up to `end`; text where that does not come.
  takeUntil(at, start, end, className) {
    const stop = this.absent.has(end) ? -1 : this.text.indexOf(end, at + start);
    if (stop < 0) {
      this.absent.add(end);
      this.addText(this.text.slice(at, at + start));
      return at + start;
    }
    this.items.push({ name: "span", attributes: { class: className }, children: [this.text.slice(at, stop + end.length)] });
    return stop + end.length;
  }

  takeCode(at) {
    const ticks = runAt(this.text, at, "`");
    let stop = this.absent.has(ticks) ? -1 : this.text.indexOf(ticks, at + ticks.length);
    while (stop >= 0) {
      const closing = runAt(this.text, stop, "`");
      if (closing.length === ticks.length) break;
      stop = this.text.indexOf(ticks, stop + closing.length);
    }
    if (stop < 0) {
      this.absent.add(ticks);
      this.addText(ticks);
      return at + ticks.length;
    }
    let content = this.text.slice(at + ticks.length, stop).replaceAll("\n", " ");
    if (/^ .*[^ ].* $/.test(content)) content = content.slice(1, -1);
    this.items.push({ name: "code", children: [content] });
    return stop + ticks.length;
  }

  // LaTeX stays text. A single dollar begins it only as pandoc has it: prices stay as they are.
  takeDollars(at) {
    if (this.text[at + 1] === "$") return this.takeUntil(at, 2, "$$", "math");
    const found = /\$[^\s$](?:[^$\n]{0,300}[^\s$\\])?\$(?!\d)/y;
    found.lastIndex = at;
    const formula = found.exec(this.text)?.[0] ?? "";
    if (!formula) this.addText("$");
    else this.items.push({ name: "span", attributes: { class: "math" }, children: [formula] });
    return at + (formula.length || 1);
  }

  takeAddress(at, pattern, group) {
    pattern.lastIndex = at;
    const found = pattern.exec(this.text);
    const shown = found && (group ? found[1] : withoutEnd(found[0]));
    const url = shown && webAddress(shown);
    if (!url || this.brackets.length) { // inside of a link's text an address is text
      this.addText(found && !group ? shown : this.text[at]);
      return at + (found && !group ? shown.length : 1);
    }
    this.items.push({ name: "a", attributes: { href: url }, children: [shown] });
    return at + (group ? found[0].length : shown.length);
  }

  openBracket(at, mark) {
    this.brackets.push({ place: this.items.length, mark });
    this.items.push({ mark, count: 1, opens: false, closes: false });
    return at + mark.length;
  }

  closeBracket(at) {
    const bracket = this.brackets.pop();
    DESTINATION.lastIndex = at + 1;
    const found = bracket && DESTINATION.exec(this.text);
    const url = found && webAddress((found[1] ?? found[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1"));
    if (!url) {
      this.addText("]");
      return at + 1;
    }
    const inside = withEmphasis(this.items.splice(bracket.place).slice(1));
    this.items.push({ name: "a", attributes: { href: url }, children: inside.length ? inside : [url] });
    this.brackets = []; // a link has no link around it
    return at + 1 + found[0].length;
  }

  takeDelimiter(at, mark) {
    const run = runAt(this.text, at, mark);
    const end = at + run.length;
    const [before, after] = [this.text[at - 1] ?? " ", this.text[end] ?? " "];
    const [opens, closes] = [isFlanking(before, after), isFlanking(after, before)];
    const isInWord = mark === "_" && opens && closes;
    this.items.push({
      mark,
      count: run.length,
      opens: opens && (!isInWord || PUNCTUATION.test(before)),
      closes: closes && (!isInWord || PUNCTUATION.test(after)),
    });
    return end;
  }
}

function runAt(text, at, mark) {
  let end = at;
  while (text[end] === mark) end += 1;
  return text.slice(at, end);
}

// Whether a run of marks with these neighbours may begin something at `inner`.
function isFlanking(outer, inner) {
  if (/\s/.test(inner)) return false;
  return !PUNCTUATION.test(inner) || /\s/.test(outer) || PUNCTUATION.test(outer);
}

// An address without what belongs to the sentence around it.
function withoutEnd(address) {
  let end = address.length;
  for (;;) {
    const last = address[end - 1];
    if (/[.,;:!?'*_~\]|]/.test(last)) end -= 1;
    else if (last === ")" && !address.slice(0, end).includes("(")) end -= 1;
    else return address.slice(0, end);
  }
}

// Items without delimiters: pairs become elements, the others text.
function withEmphasis(items) {
  const made = [];
  const openers = []; // places in `made` of delimiters that may begin something
  const living = { "*": 0, _: 0, "~": 0 };
  const drop = () => {
    living[made[openers.pop()].mark] -= 1;
  };
  for (const item of items) {
    if (item.count === undefined) {
      made.push(item);
      continue;
    }
    const closer = { ...item };
    while (closer.closes && closer.count && living[closer.mark]) {
      while (made[openers.at(-1)].mark !== closer.mark) drop();
      const place = openers.at(-1);
      if (!wrap(made, place, closer)) drop();
      else if (!made[place].count) {
        drop();
        made.splice(place, 1);
      }
    }
    if (closer.count && closer.opens) {
      living[closer.mark] += 1;
      openers.push(made.length);
    }
    if (closer.count) made.push(closer);
  }
  return made.reduce(joined, []);
}

// Wraps what follows the opener at `place`; false where the pair is none.
function wrap(made, place, closer) {
  const opener = made[place];
  const size = Math.min(2, opener.count, closer.count);
  if (closer.mark === "~" && size < 2) return false;
  let depth = 0;
  for (let at = place + 1; at < made.length; at += 1) depth = Math.max(depth, made[at].depth ?? 0);
  if (depth >= MAX_INLINE_DEPTH || made.length === place + 1) return false;
  const children = made.splice(place + 1).reduce(joined, []);
  const name = closer.mark === "~" ? "del" : size === 2 ? "strong" : "em";
  made.push({ name, children, depth: depth + 1 });
  opener.count -= size;
  closer.count -= size;
  return true;
}

function joined(items, item) {
  const text = typeof item === "string" ? item : item.count === undefined ? null : item.mark.repeat(item.count);
  if (text === null) items.push(item);
  else if (typeof items.at(-1) === "string") items[items.length - 1] += text;
  else items.push(text);
  return items;
}
