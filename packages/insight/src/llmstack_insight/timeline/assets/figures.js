// Figures, the table of requests, and the details of one.

const MAX_TABLE_ROWS = 64;
const rowOf = new Map(); // rows of the table by the id of their request

const milliseconds = (value) => (value === undefined || value === null ? "–"
  : value < 1000 ? `${value.toFixed(0)} ms` : `${(value / 1000).toFixed(1)} s`);
const orDash = (value) => (value === undefined || value === null ? "–" : String(value));
const times = (count, one, many) => (count === 1 ? `1 ${one}` : `${count} ${many}`);

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function median(values) {
  return values.length ? values.sort((a, b) => a - b)[values.length >> 1] : undefined;
}

// All that is not a drawing.
function describe() {
  for (const panel of panels) describePanel(panel);
  const panel = panels[view.engine];
  if (!panel) return;
  const { data } = panel;
  const end = panel.end();
  const slider = byId("position");
  slider.min = data.numForgotten;
  slider.max = Math.max(data.numForgotten, lastPlace(data));
  slider.value = end;
  const last = stepAt(data, end);
  if (!last) {
    fillTable([], null);
    return;
  }
  const lanes = lanesIn(data, end, width());
  for (const lane of lanes) lane.facts ??= factsOf(data, lane); // until the next part of the stream
  const sharing = last.used === null ? null : sharingAt(data, end, lanes);
  writeFacts(data, end, lanes, sharing);
  const first = stepAt(data, Math.max(data.numForgotten, end - width() + 1));
  write(byId("first-step"), `step ${first.number}`);
  write(byId("last-step"), `step ${last.number}`);
  slider.setAttribute("aria-valuetext", `step ${last.number}`);
  const newest = lanes.slice(-MAX_TABLE_ROWS).reverse();
  fillTable(newest, sharing);
  if (view.selected !== null) describeSelected(panel, sharing);
}

function describePanel(panel) {
  const { data } = panel;
  const last = stepAt(data, panel.end());
  panel.figure.classList.toggle("chosen", panels.length > 1 && panel.index === view.engine);
  const count = last ? lanesIn(data, panel.end(), width()).length : 0;
  const first = last && stepAt(data, Math.max(data.numForgotten, panel.end() - width() + 1));
  panel.canvas.setAttribute("aria-label", last ? `${count} requests over the steps ${first.number} to ${last.number}` : "No steps yet");
  const load = !last ? "no steps yet"
    : `${last.running} running${last.waiting === null ? "" : `, ${last.waiting} waiting`}${last.used === null ? "" : `, ${last.used} of ${last.blocks} KV blocks`}`;
  write(panel.caption, `Engine core ${panel.index}: ${load}`);
}

function writeFacts(data, end, lanes, sharing) {
  const last = stepAt(data, end);
  const begin = Math.max(0, end - data.numForgotten - width() + 1, search(data, "time", last.time - 10));
  let tokens = 0;
  for (let index = begin; index <= end - data.numForgotten; index += 1) tokens += data.steps[index].tokens;
  const seconds = last.time - data.steps[begin].time + last.ms / 1000;
  const known = (name) => lanes.map((lane) => lane.facts[name]).filter((value) => value !== undefined && value !== null);
  const predicted = median(known("predictedMs"));
  const shared = sharing && sharing.count ? `, ${sharing.count} shared` : "";
  const facts = {
    step: last.number,
    running: last.running,
    waiting: orDash(last.waiting),
    blocks: last.used === null ? "–" : `${last.used} of ${last.blocks}${shared}`,
    speed: seconds > 0 ? (tokens / seconds).toFixed(0) : "–",
    time: `${last.ms.toFixed(1)} ms`,
    ttft: milliseconds(median(known("ttftMs"))) + (predicted === undefined ? "" : `, predicted ${milliseconds(predicted)}`),
  };
  for (const [name, value] of Object.entries(facts)) write(byId(`fact-${name}`), String(value));
}

function fillTable(lanes, sharing) {
  const body = byId("requests");
  const focused = body.contains(document.activeElement) ? document.activeElement : null;
  const wanted = lanes.map((lane) => {
    const row = rowOf.get(lane.id) || makeRow(lane.id);
    const { facts } = lane;
    const values = [facts.state, milliseconds(facts.queueMs), milliseconds(facts.ttftMs), milliseconds(facts.predictedMs),
      orDash(facts.cached), facts.prefilled, facts.generated, facts.preempted, sharing ? sharing.shares.get(lane.id) || 0 : "–"];
    for (const [index, value] of values.entries()) write(row.children[index + 1], String(value));
    row.className = facts.isOver ? "over" : lane.id === view.selected ? "chosen" : "";
    return row;
  });
  for (const [index, row] of wanted.entries()) if (body.children[index] !== row) body.insertBefore(row, body.children[index] || null);
  while (body.children.length > wanted.length) body.lastElementChild.remove();
  const ids = new Set(lanes.map((lane) => lane.id));
  for (const id of rowOf.keys()) if (!ids.has(id)) rowOf.delete(id);
  if (focused && focused !== document.activeElement && body.contains(focused)) focused.focus();
}

function makeRow(id) {
  const row = document.createElement("tr");
  const name = document.createElement("th");
  name.scope = "row";
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = button.title = id;
  button.dataset.id = id;
  button.addEventListener("click", () => select(id));
  name.append(button);
  row.append(name, ...Array.from({ length: 9 }, () => document.createElement("td")));
  rowOf.set(id, row);
  return row;
}

function select(id) {
  view.selected = id;
  byId("explanation").hidden = true;
  byId("explanation").textContent = "";
  byId("details").hidden = false;
  byId("explain").hidden = isFile;
  show();
}

function describeSelected(panel, sharing) {
  const lane = panel.data.lanes.get(view.selected);
  if (!lane) return;
  const facts = factsOf(panel.data, lane);
  const sentences = [`State: ${facts.state}.`];
  if (facts.queueMs !== undefined) sentences.push(`It waited ${milliseconds(facts.queueMs)} for its first step.`);
  if (facts.cached) sentences.push(`${times(facts.cached, "token", "tokens")} of its prompt came from the prefix cache.`);
  if (facts.chunks) sentences.push(`${times(facts.prefilled, "token", "tokens")} of its prompt were computed in ${times(facts.chunks, "step", "steps")}.`);
  if (facts.ttftMs !== undefined) sentences.push(`The first token came after ${milliseconds(facts.ttftMs)}.`);
  if (facts.predictedMs !== undefined) sentences.push(`It was predicted after ${milliseconds(facts.predictedMs)}.`);
  if (facts.generated) sentences.push(`${times(facts.generated, "token", "tokens")} came${facts.drafted ? `, ${facts.drafted} of them drafted` : ""}.`);
  if (facts.preempted) sentences.push(`It was preempted ${times(facts.preempted, "time", "times")}.`);
  if (facts.first !== undefined) sentences.push(`Its steps are ${facts.first} to ${facts.last}.`);
  sentences.push(...sharersOf(panel, lane, sharing));
  write(byId("details-title"), lane.id);
  write(byId("details-text"), sentences.join(" "));
}

// Who shares blocks with a request at the last step shown; they are marked in the drawing.
function sharersOf(panel, lane, sharing) {
  view.marked = null;
  if (!sharing || !sharing.shares.has(lane.id)) return [];
  const counts = new Map();
  for (const ids of sharing.owners.values()) {
    if (ids.length < 2 || !ids.includes(lane.id)) continue;
    for (const id of ids) if (id !== lane.id) counts.set(id, (counts.get(id) || 0) + 1);
  }
  view.marked = new Set(counts.keys());
  const most = [...counts].sort((a, b) => b[1] - a[1]);
  const named = most.slice(0, 4).map(([id, count]) => `${count} with ${id}`).join(", ");
  const others = most.length > 4 ? `, and some with ${most.length - 4} more` : "";
  return [`At step ${stepAt(panel.data, panel.end()).number} it shares KV blocks: ${named}${others}.`];
}

// What another scheduler would have done with the same requests, in the server's sentences.
function showShadow(shadow) {
  byId("shadow").hidden = !shadow;
  if (!shadow) return;
  write(byId("shadow-title"), `Shadow scheduler ${shadow.name}`);
  const list = byId("shadow-sentences");
  while (list.children.length > shadow.sentences.length) list.lastElementChild.remove();
  while (list.children.length < shadow.sentences.length) list.append(document.createElement("li"));
  for (const [index, sentence] of shadow.sentences.entries()) write(list.children[index], sentence);
}

// The weights that answer new requests, where a reload can change them.
function showWeights(weights) {
  byId("weights").hidden = !weights;
  if (!weights) return;
  const before = weights.num_finishing ? `, ${weights.num_finishing} requests finish with those before` : "";
  write(byId("fact-weights"), weights.name + before);
}
