// Panels, one for each engine core, and the frames that move them.

const MS_OF_PART = 500; // the server sends so often what is new
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const byId = (id) => document.getElementById(id);
const view = { key: "", engine: 0, isPaused: false, end: -1, selected: null, marked: null };
const panels = [];
let frameAsked = false;
let lastFrame = 0;

class Panel {
  constructor(index) {
    this.index = index;
    this.data = emptyData();
    this.head = -1; // the place at the right edge, which follows the last step without jumps
    this.speed = 0; // places per millisecond
    this.lanes = [];
    this.shadow = null;
    this.isOfBefore = false;
    const copy = byId("panel").content.cloneNode(true);
    this.figure = copy.querySelector("figure");
    this.caption = copy.querySelector("figcaption");
    this.canvas = copy.querySelector("canvas");
    byId("panels").append(copy);
    this.drawing = new Drawing(this.canvas, askForFrame);
    this.canvas.addEventListener("click", (event) => {
      const found = this.drawing.laneAt(this.lanes, event.offsetX, event.offsetY);
      choose(this.index);
      if (found) select(found.id);
    });
  }

  add(part) {
    add(this.data, part);
    const ahead = lastPlace(this.data) - this.head;
    if (this.head < this.data.numForgotten || ahead > width() || calm.matches) this.head = lastPlace(this.data);
    else this.speed = Math.max(0, ahead) / MS_OF_PART;
  }

  restart() {
    this.data = emptyData();
    this.head = -1;
  }

  // The last place that figures are about: of a paused page the chosen one, or of other panels that of the same time.
  end() {
    const last = lastPlace(this.data);
    if (!view.isPaused) return last;
    const chosen = panels[view.engine];
    if (this === chosen) return Math.max(this.data.numForgotten, Math.min(last, view.end));
    const step = stepAt(chosen.data, chosen.end());
    return step ? Math.max(this.data.numForgotten, Math.min(last, placeAt(this.data, "time", step.time))) : last;
  }

  // Whether it has to move on.
  draw(elapsed) {
    const end = this.end();
    this.head = view.isPaused ? end : Math.min(end, this.head + this.speed * elapsed);
    this.lanes = lanesIn(this.data, this.head, width());
    this.drawing.draw(this.data, { end: this.head, width: width() }, this.lanes, view.selected, view.marked);
    return this.head < end;
  }
}

const width = () => view.width;

function lanesIn(data, end, count) {
  const begin = end - count + 1;
  const found = [];
  for (const lane of data.lanes.values()) {
    if (lane.slot >= 0 && lane.last + 1 > begin && lane.first <= end) found.push(lane);
  }
  return found;
}

function frame(now) {
  frameAsked = false;
  const elapsed = Math.min(100, now - lastFrame);
  lastFrame = now;
  let isMoving = false;
  for (const panel of panels) isMoving = panel.draw(elapsed) || isMoving;
  if (isMoving) askForFrame();
}

function askForFrame() {
  if (frameAsked) return;
  frameAsked = true;
  requestAnimationFrame(frame);
}

// There are so many engine cores.
function offerEngines(count) {
  if (panels.length >= count) return;
  while (panels.length < count) panels.push(new Panel(panels.length));
  byId("engine").replaceChildren(...panels.map(({ index }) => new Option(index, index)));
  byId("engine").value = view.engine;
  byId("engine-field").hidden = count < 2;
  for (const { caption } of panels) caption.hidden = count < 2;
}

function choose(index) {
  if (view.engine === index) return;
  const time = view.isPaused ? panels[index].end() : 0;
  view.engine = index;
  view.end = time;
  view.selected = view.marked = null;
  byId("engine").value = index;
  byId("details").hidden = true;
  show();
}
