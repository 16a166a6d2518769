// What has happened on one engine core: steps, and requests as lanes over them.
// A place is the index of a step since the page began: it stays the same when old steps are forgotten.

const MAX_STEPS = 5000; // kept; older ones are forgotten
const MAX_PREDICTIONS = 4096;
const MAX_SHARED_BLOCKS = 200000; // more take too long to compare between two frames
const WORDS = { finished_length_capped: "length limit", finished_stopped: "stopped", finished_repetition: "repetition" };
const SAME_S = 0.001; // no request enters a state twice within so many seconds

function emptyData() {
  return { steps: [], numForgotten: 0, lanes: new Map(), slots: [], predictions: new Map(), lastStep: 0, core: "" };
}

function add(data, part) {
  const touched = new Set();
  for (const [number, time, ms, running, waiting, used, blocks, preemptions, tokens] of part.steps) {
    if (number <= data.lastStep) continue;
    data.steps.push({ number, time, ms, running, waiting, used, blocks, preemptions, tokens });
    data.lastStep = number;
  }
  for (const run of part.runs) addRun(laneOf(data, run[0], touched), run);
  for (const [id, time, state] of part.events) {
    const events = laneOf(data, id, touched).events;
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
  const excess = data.steps.length - MAX_STEPS;
  if (excess > 0) forget(data, excess);
  place(data, touched);
}

function addRun(lane, [, from, to, kind, tokens, drafts, computed, blocks]) {
  const runs = lane.runs;
  const last = runs[runs.length - 1];
  if (last && last.kind === kind && last.to === from - 1) {
    last.to = to;
    last.tokens += tokens;
    last.drafts += drafts;
    last.blocks.push(...blocks);
  } else if (!last || from > last.to) {
    runs.push({ from, to, kind, tokens, drafts, computed, blocks: [...blocks] });
  }
}

function laneOf(data, id, touched) {
  let lane = data.lanes.get(id);
  if (!lane) data.lanes.set(id, (lane = { id, runs: [], events: [], spans: [], first: 0, last: -1, slot: -1 }));
  touched.add(lane);
  return lane;
}

function forget(data, count) {
  data.steps.splice(0, count);
  data.numForgotten += count;
  for (const [id, lane] of data.lanes) if (lane.slot >= 0 && isOver(lane) && lane.last < data.numForgotten) data.lanes.delete(id);
}

// The index of the first step that begins at or after a time, or has at least a number.
function search(data, property, value) {
  let low = 0;
  let high = data.steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.steps[middle][property] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

const lastPlace = (data) => data.numForgotten + data.steps.length - 1;
const placeAt = (data, property, value) => data.numForgotten + search(data, property, value);
const stepAt = (data, place) => data.steps[place - data.numForgotten];

function isOver(lane) {
  const last = lane.events[lane.events.length - 1];
  return last !== undefined && last.state.startsWith("finished");
}

const isLoss = (state) => state === "preempted" || state === "swapped" || state === "yielded";

// The spans of lanes that changed or go on, and a row of the drawing for each new lane.
function place(data, touched) {
  const fresh = [];
  for (const lane of data.lanes.values()) {
    lane.facts = undefined; // predictions come for requests that are over, too
    if (!touched.has(lane) && isOver(lane)) continue;
    lane.spans = spansOf(data, lane);
    if (lane.spans.length) {
      lane.first = Math.min(...lane.spans.map((span) => span.from));
      lane.last = Math.max(...lane.spans.map((span) => span.to));
    }
    if (lane.slot >= 0) data.slots[lane.slot] = lane;
    else if (lane.spans.length) fresh.push(lane);
  }
  fresh.sort((a, b) => a.first - b.first);
  for (const lane of fresh) {
    const free = data.slots.findIndex((before) => isGone(data, before) && before.last < lane.first);
    lane.slot = free < 0 ? data.slots.length : free;
    data.slots[lane.slot] = lane;
  }
}

// Whether a lane takes no more steps. Where steps are missing, the end of some is not known.
function isGone(data, lane) {
  return isOver(lane) || lane.last < lastPlace(data) - MAX_STEPS / 10;
}

// Spans of places: the runs, and the waits between them.
function spansOf(data, lane) {
  const spans = [];
  for (const { from, to, kind } of lane.runs) {
    if (!data.steps.length || to < data.steps[0].number) continue;
    const begin = placeAt(data, "number", from);
    spans.push({ from: begin, to: placeAt(data, "number", to), kind });
  }
  const last = lastPlace(data);
  for (const [index, event] of lane.events.entries()) {
    if (!isLoss(event.state) && !event.state.startsWith("waiting")) continue;
    const kind = isLoss(event.state) ? "x" : "w";
    const begin = placeAt(data, "time", event.time);
    if (begin > last) {
      if (index === lane.events.length - 1 && last >= 0) spans.push({ from: last, to: last, kind });
      continue;
    }
    const next = lane.runs.find((run) => run.to >= stepAt(data, begin).number);
    const end = next ? placeAt(data, "number", next.from) - 1 : isOver(lane) ? begin : last;
    if (end >= begin && begin > data.numForgotten) spans.push({ from: begin, to: end, kind });
  }
  return spans;
}

// The blocks that a request has at a place.
function blocksOf(data, lane, place) {
  const end = stepAt(data, place);
  if (!end || place > lane.last || place < lane.first) return [];
  let lostAt = 0;
  for (const event of lane.events) if (isLoss(event.state) && event.time <= end.time) lostAt = event.time;
  const since = lostAt ? data.steps[search(data, "time", lostAt)]?.number ?? Infinity : 0;
  return lane.runs.filter((run) => run.from >= since && run.from <= end.number).flatMap((run) => run.blocks);
}

// Blocks that several requests have at a place: how many, and those by the id of their requests. Null if it is too much.
function sharingAt(data, place, lanes) {
  const owners = new Map();
  const shares = new Map();
  let total = 0;
  for (const lane of lanes) {
    for (const block of new Set(blocksOf(data, lane, place))) {
      if ((total += 1) > MAX_SHARED_BLOCKS) return null;
      const owned = owners.get(block);
      if (owned) owned.push(lane.id);
      else owners.set(block, [lane.id]);
    }
  }
  let count = 0;
  for (const ids of owners.values()) {
    if (ids.length < 2) continue;
    count += 1;
    for (const id of ids) shares.set(id, (shares.get(id) || 0) + 1);
  }
  return { count, shares, owners };
}

// Tokens that a request has got: one a decode, drafts beside it, and one at the end of a prompt.
function generatedBy(lane) {
  const { runs } = lane;
  const end = lane.events[lane.events.length - 1];
  const hasAll = end !== undefined && end.state === "finished_length_capped"; // its only token; vectors end by "stopped"
  const isEnd = (run, index) => run.kind === "p" && (index + 1 < runs.length ? runs[index + 1].kind === "d" : hasAll);
  return runs.reduce((total, run, index) => total + (run.kind === "d" ? run.tokens : Number(isEnd(run, index))), 0);
}

// What is known of a request: times in milliseconds, undefined where the steps do not tell.
function factsOf(data, lane) {
  const arrival = lane.events.find((event) => event.state.startsWith("waiting"));
  const first = lane.runs[0];
  const place = first && search(data, "number", first.from);
  const beginning = first && data.steps[place];
  // States are kept for longer than steps: its first step may be gone. A step may be scheduled during the one before.
  const begun = lane.events.find((event) => event.state === "running");
  const isWhole = beginning && !(begun && begun.time < data.steps[Math.max(0, place - 1)].time);
  const begunAt = begun ? begun.time : beginning && beginning.time;
  const decode = lane.runs.findIndex((run) => run.kind === "d");
  const firstTokenAt = decode > 0 ? lane.runs[decode - 1].to : decode === 0 ? first.from : null;
  const step = firstTokenAt === null ? undefined : data.steps[search(data, "number", firstTokenAt)];
  const prefills = lane.runs.filter((run) => run.kind === "p");
  const sum = (runs, name) => runs.reduce((total, run) => total + run[name], 0);
  const end = lane.events[lane.events.length - 1];
  // Several answers of one request have its id after their index, and its prediction.
  const known = data.predictions.get(lane.id) || data.predictions.get(lane.id.replace(/^\d+_/, "")) || {};
  const steppedMs = arrival && step && isWhole ? Math.max(0, 1000 * (step.time - arrival.time) + step.ms) : undefined;
  return {
    state: end ? WORDS[end.state] || end.state.replace("finished_", "").replaceAll("_", " ") : "running",
    isOver: isOver(lane),
    queueMs: arrival && begunAt ? Math.max(0, 1000 * (begunAt - arrival.time)) : undefined,
    ttftMs: known.real ?? steppedMs,
    predictedMs: known.predicted,
    cached: arrival && first && isWhole ? first.computed : undefined,
    chunks: prefills.reduce((total, run) => total + run.to - run.from + 1, 0),
    prefilled: sum(prefills, "tokens"),
    generated: generatedBy(lane),
    drafted: sum(lane.runs, "drafts"),
    preempted: lane.events.filter((event) => isLoss(event.state)).length,
    first: first && first.from,
    last: lane.runs.length ? lane.runs[lane.runs.length - 1].to : undefined,
  };
}
