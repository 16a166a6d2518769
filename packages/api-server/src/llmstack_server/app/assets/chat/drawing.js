// A tree of markdown as elements. What is not in these tables is not made, whatever the tree says.

const DRAWN = new Set([
  "p", "h3", "ul", "ol", "li", "blockquote", "pre", "code", "strong", "em", "del", "a", "span", "table", "thead", "tbody",
  "tr", "th", "td", "hr",
]);
const CLASSES = new Set(["math", "center", "right", "level1", "level2", "level3", "level4", "level5", "level6"]);

function drawn(item) {
  if (typeof item === "string") return document.createTextNode(item);
  if (!DRAWN.has(item.name)) throw new Error(`no element of markdown: ${item.name}`);
  if (item.name === "pre") return drawnCode(item);
  const made = element(item.name);
  const { class: className, start, href } = item.attributes ?? {};
  if (CLASSES.has(className)) made.className = className;
  if (item.name === "ol" && Number.isInteger(start)) made.start = start;
  made.append(...item.children.map(drawn));
  if (item.name === "a") return drawnLink(made, href);
  return item.name === "table" ? scrolled(made, "Table") : made;
}

// The target stands beside a text that says something else.
function drawnLink(link, href) {
  const url = webAddress(href);
  if (!url) return document.createTextNode(link.textContent);
  link.href = url;
  link.rel = "noopener noreferrer";
  link.target = "_blank";
  if ([url, href].some((shown) => shown.replace(/\/$/, "") === link.textContent.replace(/\/$/, ""))) return link;
  link.append(element("span", ` (${url})`, "target"));
  return link;
}

function drawnCode({ attributes, children }) {
  const pre = element("pre");
  pre.append(...children.map(drawn));
  const head = element("div", undefined, "code-head");
  head.append(element("span", attributes?.language ?? "text"), copyButton(() => pre.textContent));
  const made = element("div", undefined, "code");
  made.append(head, pre);
  pre.tabIndex = 0;
  return made;
}

function scrolled(inside, label) {
  const made = element("div", undefined, "scroll");
  made.tabIndex = 0;
  made.setAttribute("role", "region");
  made.setAttribute("aria-label", label);
  made.append(inside);
  return made;
}

function markdownNodes(text) {
  return markdownTree(text).map(drawn);
}

// Draws a text that grows: blocks that are the same stay, with what is selected in them.
function drawMarkdown(container, text) {
  const blocks = markdownTree(text);
  const keys = blocks.map((block) => JSON.stringify(block));
  const before = container.keys ?? [];
  let same = 0;
  while (same < keys.length && keys[same] === before[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map(drawn));
  container.keys = keys;
}
