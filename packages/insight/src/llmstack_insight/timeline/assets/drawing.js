// The drawing of one engine core on a canvas. A frame reads no layout and no style: both are kept.

const TOP = 56; // pixels for the blocks above the lanes
const GAP = 10; // between both
const MAX_ROW = 22;
const COLORS = ["waiting", "prefill", "decode", "preempted", "blocks", "blocks-line", "ink", "accent"];
const KINDS = { p: "prefill", d: "decode", w: "waiting", x: "preempted" };

let colors = {};

function readColors() {
  const style = getComputedStyle(document.documentElement);
  colors = Object.fromEntries(COLORS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

class Drawing {
  // `onResize` is called when a frame is needed.
  constructor(canvas, onResize) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: true });
    this.width = 0;
    this.height = 0;
    this.rows = { top: TOP + GAP, height: MAX_ROW };
    new ResizeObserver(([entry]) => {
      this.scale = window.devicePixelRatio || 1;
      this.width = entry.contentRect.width;
      this.height = entry.contentRect.height;
      canvas.width = Math.round(this.width * this.scale);
      canvas.height = Math.round(this.height * this.scale);
      onResize();
    }).observe(canvas);
  }

  // `end`: the place at the right edge, with a fraction while it moves; `lanes`: those in view; `marked`: by id.
  draw(data, { end, width }, lanes, selected, marked) {
    const context = this.context;
    context.setTransform(this.scale || 1, 0, 0, this.scale || 1, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    this.column = this.width / width;
    this.left = end - width + 1;
    const numRows = lanes.reduce((most, lane) => Math.max(most, lane.slot + 1), 1);
    this.rows.height = Math.min(MAX_ROW, (this.height - this.rows.top) / numRows);
    this.drawBlocks(data, end);
    for (const kind of "wxpd") this.drawSpans(lanes, kind);
    for (const lane of lanes) {
      if (lane.id === selected) this.mark(lane, colors.ink, 1.5);
      else if (marked && marked.has(lane.id)) this.mark(lane, colors.accent, 1);
    }
  }

  // Blocks in use as an area with a line on it.
  drawBlocks(data, end) {
    const first = Math.max(data.numForgotten, Math.floor(this.left));
    const last = Math.min(lastPlace(data), Math.ceil(end));
    if (last < first || stepAt(data, last).used === null) return;
    const context = this.context;
    const area = new Path2D();
    const line = new Path2D();
    area.moveTo((first - this.left) * this.column, TOP);
    for (let place = first; place <= last; place += 1) {
      const { used, blocks } = stepAt(data, place);
      const y = TOP - (blocks ? (TOP - 8) * (used / blocks) : 0);
      const x = (place - this.left) * this.column;
      area.lineTo(x, y);
      area.lineTo(x + this.column, y);
      line.lineTo(x, y);
      line.lineTo(x + this.column, y);
    }
    area.lineTo((last + 1 - this.left) * this.column, TOP);
    context.fillStyle = colors.blocks;
    context.fill(area);
    context.strokeStyle = colors["blocks-line"];
    context.lineWidth = 1;
    context.stroke(line);
  }

  // The spans of one kind: one path, filled once.
  drawSpans(lanes, kind) {
    const { column, left, width, context } = this;
    const { top, height } = this.rows;
    const share = kind === "p" ? 0.86 : kind === "d" ? 0.56 : kind === "x" ? 0.2 : 0.12;
    const thickness = Math.max(kind === "w" || kind === "x" ? 1 : 1.2, share * height);
    const space = column > 3 ? 1 : 0;
    context.fillStyle = colors[KINDS[kind]];
    for (const lane of lanes) {
      const y = top + lane.slot * height + (height - thickness) / 2;
      for (const span of lane.spans) {
        if (span.kind !== kind) continue;
        const x = Math.max(-8, (span.from - left) * column);
        const stop = Math.min(width, (span.to + 1 - left) * column - space);
        if (stop <= x && (stop < 0 || x > width)) continue;
        if (kind !== "x") context.fillRect(x, y, Math.max(1, stop - x), thickness);
        else for (let dash = x; dash < stop; dash += 8) context.fillRect(dash, y, Math.min(5, stop - dash), thickness);
      }
    }
  }

  mark(lane, color, width) {
    const { top, height } = this.rows;
    const x = Math.max(1, (lane.first - this.left) * this.column - 2);
    const stop = Math.min(this.width - 1, (lane.last + 1 - this.left) * this.column + 2);
    this.context.strokeStyle = color;
    this.context.lineWidth = width;
    this.context.strokeRect(x, top + lane.slot * height + 0.5, Math.max(3, stop - x), Math.max(2, height - 1));
  }

  // The lane at a point of the canvas.
  laneAt(lanes, x, y) {
    const slot = Math.floor((y - this.rows.top) / this.rows.height);
    const place = Math.floor(x / this.column + this.left);
    const near = lanes.filter((lane) => lane.slot === slot);
    return near.find((lane) => lane.first <= place && place <= lane.last) || near[0];
  }
}
