// Shows requests as lanes over steps: live from the server, or from the steps in this document.
// Addresses are relative, so that they stay valid under the prefix of a proxy.

const RECONNECT_MS = [1000, 2000, 4000, 8000];

// ---- the server --------------------------------------------------------------------------------------------------

async function call(path) {
  const headers = view.key ? { authorization: `Bearer ${view.key}` } : {};
  let answer;
  try {
    answer = await fetch(path, { headers, credentials: "omit" });
  } catch {
    throw new Error("The server does not answer. The page tries again.");
  }
  if (answer.ok) return answer;
  if (answer.status === 401) askForKey();
  let message = `The server answers with HTTP ${answer.status}.`;
  try {
    message = (await answer.json()).error.message || message;
  } catch {
    // Not an error of this server, such as one of a proxy.
  }
  throw new Error(message);
}

function askForKey() {
  byId("give-key").hidden = false;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

const once = (id, name) => new Promise((resolve) => byId(id).addEventListener(name, resolve, { once: true }));

async function follow() {
  for (let failures = 0; ; ) {
    try {
      const known = panels.map(({ data }) => data);
      const query = `after=${known.map((data) => data.lastStep).join(",")}&core=${known.map((data) => data.core).join(",")}`;
      const answer = await call(`live/events?${query}`);
      say("");
      failures = 0;
      if (await read(answer)) say("The server ended the stream. The page tries again.");
    } catch (error) {
      say(error.message);
    }
    if (panels.some((panel) => panel.isOfBefore)) await once("pause", "click");
    for (const panel of panels) panel.isOfBefore = false;
    if (byId("key-dialog").open || (!byId("give-key").hidden && !view.key)) {
      await once("key-form", "submit");
    } else {
      await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS[Math.min(failures, RECONNECT_MS.length - 1)]));
      failures += 1;
    }
  }
}

// Whether the server ended the stream.
async function read(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return true;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const part = JSON.parse(line.slice(5));
      if (part.error) throw new Error(part.error.message);
      if (take(part)) continue;
      void reader.cancel();
      return false;
    }
  }
}

// Takes a part of the stream; false where the page is paused and the part is of another engine core.
function take(part) {
  offerEngines(part.num_engines);
  const panel = panels[part.engine];
  const { data } = panel;
  showWeights(part.weights);
  if (data.core && part.core !== data.core) { // after a crash or a reload the steps begin again
    if (view.isPaused) {
      panel.isOfBefore = true;
      say("There is another engine core. Its steps are shown when you go on.");
      return false;
    }
    panel.restart();
    say("There is another engine core. Its steps begin here.");
  }
  panel.data.core = part.core;
  if (part.gap && part.gap.reason === "steps_forgotten") {
    say(part.gap.next ? `The steps ${part.gap.after + 1} to ${part.gap.next - 1} are missing: the server keeps only later ones.`
      : `Steps after ${part.gap.after} are missing: the server keeps only later ones.`);
  }
  panel.add(part);
  panel.shadow = part.shadow;
  if (panel.index === view.engine) showShadow(part.shadow);
  show();
  return true;
}

function say(text) {
  byId("status").textContent = text;
}

async function explain() {
  const shown = byId("explanation");
  shown.hidden = false;
  shown.textContent = "…";
  try {
    const found = await (await call(`v1/requests/${encodeURIComponent(view.selected)}/explanation`)).json();
    shown.textContent = Array.isArray(found.sentences) ? found.sentences.join("\n") : JSON.stringify(found, null, 2);
  } catch (error) {
    shown.textContent = error.message;
  }
}

// ---- a file that shows the same without a server -----------------------------------------------------------------

function partOf({ data, index }) {
  const lanes = [...data.lanes.values()];
  return {
    engine: index,
    steps: data.steps.map((step) => [step.number, step.time, step.ms, step.running, step.waiting, step.used, step.blocks,
      step.preemptions, step.tokens]),
    runs: lanes.flatMap((lane) => lane.runs.map((run) => [lane.id, run.from, run.to, run.kind, run.tokens, run.drafts,
      run.computed, run.blocks])),
    events: lanes.flatMap((lane) => lane.events.map((event) => [lane.id, event.time, event.state])),
    predictions: [...data.predictions].map(([id, { predicted, real }]) => [id, predicted, real]),
  };
}

function save() {
  const copy = document.documentElement.cloneNode(true);
  const inCopy = (id) => copy.querySelector(`#${id}`);
  inCopy("timeline").textContent = JSON.stringify(panels.map(partOf)).replaceAll("<", "\\u003c");
  // Explanations may have text of prompts, which stays here.
  for (const id of ["requests", "engine", "panels", "explanation", "details-text", "status"]) inCopy(id).replaceChildren();
  for (const id of ["details", "explanation", "give-key"]) inCopy(id).hidden = true;
  inCopy("key-dialog").removeAttribute("open");
  copy.querySelector(".pages")?.remove(); // of the server, which a file does not have
  const policy = copy.querySelector("meta[http-equiv]");
  policy.content = policy.content.replace("connect-src 'self'", "connect-src 'none'");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`<!doctype html>\n${copy.outerHTML}`], { type: "text/html" }));
  link.download = "llmstack-steps.html";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// ---- controls ----------------------------------------------------------------------------------------------------

function show() {
  describe();
  askForFrame();
}

function setPaused(isPaused) {
  if (isPaused && panels.length) view.end = panels[view.engine].end();
  view.isPaused = isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  show();
}

function readWidth() {
  view.width = Number(byId("width").value);
}

byId("pause").addEventListener("click", () => setPaused(!view.isPaused));
byId("position").addEventListener("input", () => {
  const place = Number(byId("position").value);
  if (!view.isPaused) setPaused(true);
  view.end = place;
  show();
});
byId("width").addEventListener("change", () => {
  readWidth();
  show();
});
byId("engine").addEventListener("change", () => {
  choose(Number(byId("engine").value));
  showShadow(panels[view.engine].shadow);
});
byId("explain").addEventListener("click", explain);
byId("save").addEventListener("click", save);
byId("give-key").addEventListener("click", askForKey);
byId("key-form").addEventListener("submit", () => {
  view.key = byId("key").value.trim();
  byId("key").value = "";
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColors();
  askForFrame();
});

const held = JSON.parse(byId("timeline").textContent);
const isFile = held !== null;
readWidth();
readColors();
offerEngines(1);
if (isFile) {
  const parts = Array.isArray(held) ? held : [held];
  byId("save").hidden = true;
  offerEngines(parts.length);
  for (const [index, part] of parts.entries()) panels[index].add(part);
  setPaused(true);
} else {
  show();
  follow();
}
