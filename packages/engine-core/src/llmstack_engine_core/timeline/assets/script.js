// Draws requests as lanes over steps: live from the server, or from the steps in this document.
// Addresses are relative, so that they stay valid under the prefix of a proxy.

const MAX_TABLE_ROWS = 64;
const RECONNECT_MS = 1000;
const TOP = 46; // pixels for the blocks above the lanes

const byId = (id) => document.getElementById(id);
const view = { key: "", engine: 0, isPaused: false, isOfBefore: false, selected: null, isDrawn: false };

// ---- the drawing -------------------------------------------------------------------------------------------------

function range() {
  const width = Number(byId("width").value);
  const end = view.isPaused ? Number(byId("position").value) : data.steps.length - 1;
  return { start: Math.max(0, end - width + 1), end, width };
}

// The lanes that have something in the range of steps, oldest first.
function visibleLanes({ start, end }) {
  if (end < 0) return [];
  const first = data.steps[start].number;
  const last = data.steps[end].number;
  const lanes = [];
  for (const lane of data.lanes.values()) {
    const spans = spansOf(lane).filter((span) => span.to >= first && span.from <= last);
    if (spans.length) lanes.push({ lane, spans });
  }
  return lanes;
}

// Spans of steps: the runs, and the waits between them.
function spansOf(lane) {
  const spans = lane.runs.map(({ from, to, kind }) => ({ from, to, kind }));
  for (const [index, event] of lane.events.entries()) {
    const isLost = event.state === "preempted" || event.state === "swapped";
    if (!isLost && !event.state.startsWith("waiting")) continue;
    const at = data.steps[search("time", event.time)];
    if (!at) {
      if (index === lane.events.length - 1) spans.push({ from: data.lastStep, to: data.lastStep, kind: "w" });
      continue;
    }
    const next = lane.runs.find((run) => run.from >= at.number);
    const end = next ? next.from - 1 : isOver(lane) ? at.number : data.lastStep;
    if (end >= at.number) spans.push({ from: at.number, to: end, kind: isLost ? "x" : "w" });
  }
  return spans;
}

function draw() {
  view.isDrawn = true;
  const canvas = byId("lanes");
  const scale = window.devicePixelRatio || 1;
  const { clientWidth, clientHeight } = canvas;
  if (canvas.width !== Math.round(clientWidth * scale) || canvas.height !== Math.round(clientHeight * scale)) {
    canvas.width = Math.round(clientWidth * scale);
    canvas.height = Math.round(clientHeight * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, clientWidth, clientHeight);
  const shown = range();
  const lanes = visibleLanes(shown);
  view.rows = { lanes, top: TOP, height: Math.max(2, Math.min(18, (clientHeight - TOP) / Math.max(1, lanes.length))) };
  if (shown.end >= 0) {
    drawBlocks(context, shown, clientWidth);
    drawLanes(context, shown, clientWidth);
  }
  canvas.setAttribute("aria-label", shown.end < 0 ? "No steps yet"
    : `${lanes.length} requests over the steps ${data.steps[shown.start].number} to ${data.steps[shown.end].number}`);
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function drawBlocks(context, { start, end, width }, pixels) {
  if (data.steps[end].used === null) return;
  context.fillStyle = color("blocks");
  const column = pixels / width;
  for (let index = start; index <= end; index += 1) {
    const { used, blocks } = data.steps[index];
    const height = blocks ? (TOP - 6) * (used / blocks) : 0;
    context.fillRect((index - start) * column, TOP - 4 - height, Math.ceil(column), height);
  }
}

function drawLanes(context, { start, width }, pixels) {
  const { lanes, top, height } = view.rows;
  const first = data.steps[start].number;
  const column = pixels / width;
  const colors = { p: color("prefill"), d: color("decode"), w: color("waiting"), x: color("preempted") };
  const ink = color("ink");
  for (const [row, { lane, spans }] of lanes.entries()) {
    const y = top + row * height;
    for (const { from, to, kind } of spans) {
      const x = (from - first) * column;
      const length = Math.max(1, (to - from + 1) * column - (column > 4 ? 1 : 0));
      const thickness = kind === "p" ? 0.85 * height : kind === "d" ? 0.55 * height : Math.max(1, 0.12 * height);
      context.fillStyle = colors[kind];
      if (kind === "x") {
        for (let dash = 0; dash < length; dash += 8) {
          context.fillRect(x + dash, y + (height - thickness) / 2, Math.min(5, length - dash), Math.max(2, thickness));
        }
      } else {
        context.fillRect(x, y + (height - thickness) / 2, length, thickness);
      }
    }
    if (lane.id === view.selected) {
      context.strokeStyle = ink;
      context.strokeRect(0.5, y + 0.5, pixels - 1, Math.max(2, height - 1));
    }
  }
}

function plan() {
  if (!view.isDrawn) return;
  view.isDrawn = false;
  requestAnimationFrame(draw);
}

// ---- figures, table and details ----------------------------------------------------------------------------------

const milliseconds = (value) => (value === undefined ? "–" : value < 1000 ? `${value.toFixed(0)} ms` : `${(value / 1000).toFixed(1)} s`);

function median(values) {
  return values.length ? values.sort((a, b) => a - b)[values.length >> 1] : undefined;
}

function describe() {
  const shown = range();
  byId("position").max = Math.max(0, data.steps.length - 1);
  if (!view.isPaused) byId("position").value = shown.end;
  if (shown.end < 0) return;
  const last = data.steps[shown.end];
  const begin = data.steps[Math.max(shown.start, search("time", last.time - 10))];
  let tokens = 0;
  for (let index = search("time", begin.time); index <= shown.end; index += 1) tokens += data.steps[index].tokens;
  const seconds = last.time - begin.time + last.ms / 1000;
  const lanes = visibleLanes(shown).map(({ lane }) => ({ lane, facts: factsOf(lane) }));
  const times = lanes.map(({ facts }) => facts.ttftMs).filter((value) => value !== undefined);
  const expected = lanes.map(({ facts }) => facts.predictedMs).filter((value) => value !== undefined);
  const facts = {
    step: last.number,
    running: last.running,
    waiting: last.waiting,
    blocks: last.used === null ? "–" : `${last.used} of ${last.blocks}`,
    speed: seconds > 0 ? (tokens / seconds).toFixed(0) : "–",
    time: `${last.ms.toFixed(1)} ms`,
    ttft: milliseconds(median(times)) + (expected.length ? `, predicted ${milliseconds(median(expected))}` : ""),
  };
  for (const [name, value] of Object.entries(facts)) byId(`fact-${name}`).textContent = value;
  fillTable(lanes.slice(-MAX_TABLE_ROWS).reverse());
  if (view.selected !== null) describeSelected();
}

function cell(text) {
  const made = document.createElement("td");
  made.textContent = text;
  return made;
}

function fillTable(lanes) {
  const body = byId("requests");
  const focused = document.activeElement && body.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  body.replaceChildren(...lanes.map(({ lane, facts }) => {
    const row = document.createElement("tr");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = lane.id.length > 28 ? `${lane.id.slice(0, 27)}…` : lane.id;
    button.dataset.id = lane.id;
    button.addEventListener("click", () => select(lane.id));
    const name = document.createElement("td");
    name.append(button);
    row.append(name, cell(facts.state), cell(milliseconds(facts.queueMs)), cell(milliseconds(facts.ttftMs)),
      cell(milliseconds(facts.predictedMs)),
      cell(`${facts.prefilled} in ${facts.chunks}`), cell(facts.decoded), cell(facts.preempted));
    return row;
  }));
  const again = [...body.querySelectorAll("button")].find((button) => button.dataset.id === focused);
  if (again) again.focus();
}

function select(id) {
  view.selected = id;
  byId("explanation").hidden = true;
  byId("details").hidden = false;
  byId("explain").hidden = isFile;
  describeSelected();
  plan();
}

function describeSelected() {
  const lane = data.lanes.get(view.selected);
  if (!lane) return;
  const facts = factsOf(lane);
  const sentences = [`State: ${facts.state}.`];
  if (facts.queueMs !== undefined) sentences.push(`It waited ${milliseconds(facts.queueMs)} for its first step.`);
  if (facts.chunks) sentences.push(`${facts.prefilled} tokens of its prompt were computed in ${facts.chunks} steps.`);
  if (facts.ttftMs !== undefined) sentences.push(`The first token came after ${milliseconds(facts.ttftMs)}.`);
  if (facts.predictedMs !== undefined) sentences.push(`It was predicted after ${milliseconds(facts.predictedMs)}.`);
  if (facts.decoded) sentences.push(`${facts.decoded} tokens were decoded${facts.drafted ? `, ${facts.drafted} of them drafted` : ""}.`);
  if (facts.preempted) sentences.push(`It was preempted ${facts.preempted} times.`);
  if (facts.first !== undefined) sentences.push(`Its steps are ${facts.first} to ${facts.last}.`);
  byId("details-title").textContent = lane.id;
  byId("details-text").textContent = sentences.join(" ");
}

async function explain() {
  const shown = byId("explanation");
  shown.hidden = false;
  try {
    const found = await (await call(`v1/requests/${encodeURIComponent(view.selected)}/explanation`)).json();
    shown.textContent = Array.isArray(found.sentences) ? found.sentences.join("\n") : JSON.stringify(found, null, 2);
  } catch (error) {
    shown.textContent = error.message;
  }
}

// ---- the server --------------------------------------------------------------------------------------------------

async function call(path) {
  const headers = view.key ? { authorization: `Bearer ${view.key}` } : {};
  const answer = await fetch(path, { headers, credentials: "omit" });
  if (answer.ok) return answer;
  if (answer.status === 401 && !byId("key-dialog").open) byId("key-dialog").showModal();
  let message = `The server answers with HTTP ${answer.status}.`;
  try {
    message = (await answer.json()).error.message || message;
  } catch {
    // Not an error of this server, such as one of a proxy.
  }
  throw new Error(message);
}

async function follow() {
  for (;;) {
    const engine = view.engine;
    try {
      const answer = await call(`live/events?engine=${engine}&after=${data.lastStep}&core=${data.core}`);
      byId("status").textContent = "";
      await read(answer, () => engine === view.engine);
    } catch (error) {
      byId("status").textContent = error.message;
    }
    if (view.isOfBefore) await new Promise((resolve) => byId("pause").addEventListener("click", resolve, { once: true }));
    view.isOfBefore = false;
    if (byId("key-dialog").open) await new Promise((resolve) => byId("key-dialog").addEventListener("close", resolve, { once: true }));
    else await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
  }
}

async function read(answer, isWanted) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done || !isWanted()) return void reader.cancel();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const part = JSON.parse(line.slice(5));
      if (part.error) throw new Error(part.error.message);
      offerEngines(part.num_engines);
      showWeights(part.weights);
      if (data.core && part.core !== data.core) { // after a crash or a reload the steps begin again
        if (view.isPaused) {
          view.isOfBefore = true;
          byId("status").textContent = "There is another engine core. Its steps are shown when you go on.";
          return void reader.cancel();
        }
        data = emptyData();
        byId("status").textContent = "There is another engine core. Its steps begin here.";
      }
      data.core = part.core;
      if (part.gap && part.gap.reason === "steps_forgotten") {
        byId("status").textContent = `The steps ${part.gap.after + 1} to ${part.gap.next - 1} are missing: the server keeps only later ones.`;
      }
      const forgotten = add(part);
      if (view.isPaused) byId("position").value -= forgotten;
      showShadow(part.shadow);
      show();
    }
  }
}

function offerEngines(count) {
  const list = byId("engine");
  if (list.options.length === count) return;
  list.replaceChildren(...Array.from({ length: count }, (_, index) => new Option(index, index)));
  byId("engine-field").hidden = count < 2;
}

// The weights that answer new requests, where a reload can change them.
function showWeights(weights) {
  byId("weights").hidden = !weights;
  if (!weights) return;
  const before = weights.num_finishing ? `, ${weights.num_finishing} requests finish with those before` : "";
  byId("fact-weights").textContent = weights.name + before;
}

// What another scheduler would have done with the same requests, in the server's sentences.
function showShadow(shadow) {
  byId("shadow").hidden = !shadow;
  if (!shadow) return;
  byId("shadow-title").textContent = `Shadow scheduler ${shadow.name}`;
  byId("shadow-sentences").replaceChildren(...shadow.sentences.map((sentence) => {
    const item = document.createElement("li");
    item.textContent = sentence;
    return item;
  }));
}

// A file that shows the same without a server.
function save() {
  const part = {
    steps: data.steps.map((step) => [step.number, step.time, step.ms, step.running, step.waiting, step.used, step.blocks,
      step.preemptions, step.tokens]),
    runs: [...data.lanes.values()].flatMap((lane) => lane.runs.map((run) => [lane.id, run.from, run.to, run.kind,
      run.tokens, run.drafts, run.blocks])),
    events: [...data.lanes.values()].flatMap((lane) => lane.events.map((event) => [lane.id, event.time, event.state])),
    predictions: [...data.predictions].map(([id, { predicted, real }]) => [id, predicted, real]),
  };
  const copy = document.documentElement.cloneNode(true);
  copy.querySelector("#timeline").textContent = JSON.stringify(part).replaceAll("<", "\\u003c");
  for (const id of ["requests", "engine"]) copy.querySelector(`#${id}`).replaceChildren();
  for (const id of ["details", "explanation"]) copy.querySelector(`#${id}`).hidden = true;
  copy.querySelector("#key-dialog").removeAttribute("open");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`<!doctype html>\n${copy.outerHTML}`], { type: "text/html" }));
  link.download = "llmstack-steps.html";
  link.click();
  URL.revokeObjectURL(link.href);
}

function show() {
  if (view.isPaused) byId("position").max = Math.max(0, data.steps.length - 1);
  else describe();
  plan();
}

function setPaused(isPaused) {
  view.isPaused = isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  describe();
  plan();
}

byId("pause").addEventListener("click", () => setPaused(!view.isPaused));
byId("position").addEventListener("input", () => {
  if (!view.isPaused) setPaused(true);
  describe();
  plan();
});
byId("width").addEventListener("change", () => {
  describe();
  plan();
});
byId("engine").addEventListener("change", () => {
  view.engine = Number(byId("engine").value);
  view.selected = null;
  data = emptyData();
});
byId("lanes").addEventListener("click", (event) => {
  const found = view.rows && view.rows.lanes[Math.floor((event.offsetY - view.rows.top) / view.rows.height)];
  if (found) select(found.lane.id);
});
byId("explain").addEventListener("click", explain);
byId("save").addEventListener("click", save);
byId("key-form").addEventListener("submit", () => {
  view.key = byId("key").value.trim();
  byId("key").value = "";
});
window.addEventListener("resize", plan);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", plan);

const held = JSON.parse(byId("timeline").textContent);
const isFile = held !== null;
byId("engine-field").hidden = true;
draw();
if (isFile) {
  byId("save").hidden = true;
  add(held);
  setPaused(true);
  byId("position").value = data.steps.length - 1;
  describe();
  plan();
} else {
  follow();
}
