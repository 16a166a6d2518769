// What has happened: steps, and requests as lanes over them.

const MAX_STEPS = 5000; // kept; older ones are forgotten
const MAX_PREDICTIONS = 4096;
const SAME_S = 0.001; // no request enters a state twice within so many seconds

let data = emptyData();

function emptyData() {
  return { steps: [], lanes: new Map(), predictions: new Map(), lastStep: 0, core: "" };
}

// The number of old steps that are forgotten for it.
function add(part) {
  for (const [number, time, ms, running, waiting, used, blocks, preemptions, tokens] of part.steps) {
    if (number <= data.lastStep) continue;
    data.steps.push({ number, time, ms, running, waiting, used, blocks, preemptions, tokens });
    data.lastStep = number;
  }
  for (const [id, from, to, kind, tokens, drafts, blocks] of part.runs) {
    const runs = laneOf(id).runs;
    const last = runs[runs.length - 1];
    if (last && last.kind === kind && last.to === from - 1) {
      last.to = to;
      last.tokens += tokens;
      last.drafts += drafts;
      last.blocks += blocks;
    } else if (!last || from > last.to) {
      runs.push({ from, to, kind, tokens, drafts, blocks });
    }
  }
  for (const [id, time, state] of part.events) {
    const events = laneOf(id).events;
    const last = events[events.length - 1];
    // Events of a little before come again; another API process has another clock, by microseconds.
    const isNew = !last || (last.state === state ? time - last.time > SAME_S : time >= last.time);
    if (isNew) events.push({ time, state });
  }
  for (const [id, predicted, real] of part.predictions || []) data.predictions.set(id, { predicted, real });
  for (const id of data.predictions.keys()) {
    if (data.predictions.size <= MAX_PREDICTIONS) break;
    data.predictions.delete(id);
  }
  const excess = Math.max(0, data.steps.length - MAX_STEPS);
  if (excess) forget(excess);
  return excess;
}

function laneOf(id) {
  let lane = data.lanes.get(id);
  if (!lane) data.lanes.set(id, (lane = { id, runs: [], events: [] }));
  return lane;
}

function forget(count) {
  data.steps.splice(0, count);
  const first = data.steps[0];
  for (const [id, lane] of data.lanes) {
    const last = lane.runs[lane.runs.length - 1];
    const event = lane.events[lane.events.length - 1];
    if ((!last || last.to < first.number) && (!event || event.time < first.time)) data.lanes.delete(id);
  }
}

// The index of the first step that begins at or after a time, or has at least a number.
function search(property, value) {
  let low = 0;
  let high = data.steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.steps[middle][property] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function isOver(lane) {
  const last = lane.events[lane.events.length - 1];
  return last !== undefined && last.state.startsWith("finished");
}

// What is known of a request: times in milliseconds, undefined where the steps do not tell.
function factsOf(lane) {
  const arrival = lane.events.find((event) => event.state.startsWith("waiting"));
  const first = lane.runs[0];
  const beginning = first && data.steps[search("number", first.from)];
  const decode = lane.runs.findIndex((run) => run.kind === "d");
  const firstTokenAt = decode > 0 ? lane.runs[decode - 1].to : decode === 0 ? first.from : null;
  const step = firstTokenAt === null ? undefined : data.steps[search("number", firstTokenAt)];
  const prefills = lane.runs.filter((run) => run.kind === "p");
  const sum = (runs, name) => runs.reduce((total, run) => total + run[name], 0);
  const end = lane.events[lane.events.length - 1];
  // Several answers of one request have its id after their index, and its prediction.
  const known = data.predictions.get(lane.id) || data.predictions.get(lane.id.replace(/^\d+_/, "")) || {};
  const steppedMs = arrival && step ? Math.max(0, 1000 * (step.time - arrival.time) + step.ms) : undefined;
  return {
    state: end ? end.state.replaceAll("_", " ") : "running",
    queueMs: arrival && beginning ? Math.max(0, 1000 * (beginning.time - arrival.time)) : undefined,
    ttftMs: known.real ?? steppedMs,
    predictedMs: known.predicted,
    chunks: prefills.reduce((total, run) => total + run.to - run.from + 1, 0),
    prefilled: sum(prefills, "tokens"),
    decoded: sum(lane.runs.filter((run) => run.kind === "d"), "tokens"),
    drafted: sum(lane.runs, "drafts"),
    preempted: lane.events.filter((event) => event.state === "preempted" || event.state === "swapped").length,
    first: first && first.from,
    last: lane.runs.length ? lane.runs[lane.runs.length - 1].to : undefined,
  };
}
