// Markdown of a model as elements of the page. Text becomes text nodes only: no HTML, no image and no link is made.

function inlineNodes(text) {
  const nodes = [];
  const pattern = /(`+)([^`]+)\1|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/;
  let rest = text;
  for (let found = pattern.exec(rest); found; found = pattern.exec(rest)) {
    if (found.index) nodes.push(document.createTextNode(rest.slice(0, found.index)));
    const [name, content] = found[2] ? ["code", found[2]] : found[3] ? ["strong", found[3]] : ["em", found[4]];
    nodes.push(element(name, content));
    rest = rest.slice(found.index + found[0].length);
  }
  if (rest) nodes.push(document.createTextNode(rest));
  return nodes;
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function block(name, text) {
  const made = document.createElement(name);
  made.append(...inlineNodes(text));
  return made;
}

// Blocks of a whole text, one pass over its lines.
function markdownNodes(text) {
  const nodes = [];
  const lines = text.split("\n");
  let paragraph = [];
  const endParagraph = () => {
    if (paragraph.length) nodes.push(block("p", paragraph.join("\n")));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at];
    const heading = /^#{1,6} +(.*)$/.exec(line);
    const item = /^ *(?:([-*+])|\d{1,9}[.)]) +(.*)$/.exec(line);
    if (/^ *```/.test(line)) {
      endParagraph();
      const code = [];
      for (at += 1; at < lines.length && !/^ *``` *$/.test(lines[at]); at += 1) code.push(lines[at]);
      const pre = document.createElement("pre");
      pre.tabIndex = 0;
      pre.append(element("code", code.join("\n")));
      nodes.push(pre);
    } else if (heading) {
      endParagraph();
      nodes.push(block("h3", heading[1]));
    } else if (item) {
      endParagraph();
      const kind = item[1] ? "UL" : "OL";
      const last = nodes.at(-1);
      const list = last && last.tagName === kind ? last : document.createElement(kind);
      if (list !== last) nodes.push(list);
      list.append(block("li", item[2]));
    } else if (line.trim()) {
      paragraph.push(line);
    } else {
      endParagraph();
    }
  }
  endParagraph();
  return nodes;
}
