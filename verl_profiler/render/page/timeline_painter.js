// Draws the lanes of a timeline on its canvas, and remembers where it drew what.

import {colorOf, timelines} from './data.js';
import {inkOn} from './dom.js';
import {clean, plural, seconds, shorten, tickLabel, ticks} from './format.js';
import {COUNTS, LANE_GAP} from './timeline_lanes.js';
import {drawStalls} from './timeline_stalls.js';

/** @typedef {import('./timeline_lanes.js').PlacedLane} PlacedLane */
/** @typedef {import('./timeline_lanes.js').PlacedSpans} PlacedSpans */
/** @typedef {import('./timeline_lanes.js').PlacedRequests} PlacedRequests */
/** @typedef {import('./timeline_lanes.js').PlacedCounts} PlacedCounts */

/**
 * @typedef {object} Box What was drawn somewhere: a slice of a request, or lines for the tip.
 * @property {number} x
 * @property {number} y
 * @property {number} width
 * @property {number} height
 * @property {RequestRow} [request]
 * @property {number} [span] Place of the slice in the request's spans; none: the request itself.
 * @property {(x: number) => MaybeText[]} [lines]
 * @property {boolean} [stall] Whether it is a band over the bars of what an event-loop stall stopped.
 */

const AXIS = 24;
const FONT = '12px system-ui, sans-serif';
const UNIT = timelines.unit_s;
/** Events that other bars of a request stand for. */
const HIDDEN = ['turn', 'server_acquire'];

/** @param {HTMLCanvasElement} canvas */
function contextOf(canvas) {
  return /** @type {CanvasRenderingContext2D} */ (canvas.getContext('2d'));
}

export class Painter {
  /**
   * @param {HTMLCanvasElement} axis
   * @param {HTMLCanvasElement} canvas
   */
  constructor(axis, canvas) {
    this.axis = axis;
    this.canvas = canvas;
    this.context = contextOf(canvas);
    this.width = 0;
    this.height = 0;
    this.gutter = 0;
    /** First and last time shown. */
    this.view = [0, 1];
    /** @type {Box[]} */
    this.boxes = [];
    this.paint = colors();
  }

  /**
   * @param {number} width
   * @param {number} height
   * @param {PlacedLane[]} lanes Their labels have the room that they need, up to a third of the width.
   */
  resize(width, height, lanes) {
    this.width = width;
    this.height = height;
    this.context.font = FONT;
    const labels = lanes.flatMap((lane) => [clean(lane.name), lane.second]);
    const widest = Math.max(...labels.map((label) => this.context.measureText(label).width), 0);
    this.gutter = Math.ceil(Math.min(Math.max(widest + 18, 92), Math.max(92, width / 3)));
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.axis]) {
      const high = canvas === this.axis ? AXIS : height;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(high * ratio);
      canvas.style.height = `${high}px`;
      canvas.style.width = `${width}px`;
      contextOf(canvas).setTransform(ratio, 0, 0, ratio, 0, 0);
    }
  }

  /** Pixels between the labels and the right edge. */
  get room() {
    return this.width - this.gutter - 8;
  }

  /** @param {number} time */
  x(time) {
    const [from, to] = this.view;
    return this.gutter + (this.room * (time - from)) / (to - from);
  }

  /** @param {number} x */
  timeAt(x) {
    const [from, to] = this.view;
    return from + ((x - this.gutter) / this.room) * (to - from);
  }

  /**
   * @param {Scene} scene
   * @param {PlacedLane[]} lanes
   * @param {number[]} view
   * @param {RequestRow | null} selected
   */
  draw(scene, lanes, view, selected) {
    const {context} = this;
    this.view = view;
    this.paint = colors();
    this.boxes = [];
    context.clearRect(0, 0, this.width, this.height);
    context.font = FONT;
    context.textBaseline = 'middle';
    const marks = this.drawAxis();
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.width - this.gutter, this.height);
    context.clip();
    context.strokeStyle = this.paint.line;
    context.lineWidth = 1;
    for (const mark of marks) {
      const x = Math.round(this.x(mark)) + 0.5;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, this.height);
      context.stroke();
    }
    for (const lane of lanes) {
      if (lane.kind === 'requests') this.drawRequests(lane, selected);
      else if (lane.kind === 'spans') this.drawSpans(lane);
      else this.drawCounts(lane, scene);
      drawStalls(this, lane);
    }
    context.restore();
    for (const lane of lanes) this.drawLabel(lane);
  }

  /** Draws the times at the top; returns them. */
  drawAxis() {
    const context = contextOf(this.axis);
    context.clearRect(0, 0, this.width, AXIS);
    context.font = FONT;
    context.textBaseline = 'middle';
    context.textAlign = 'center';
    context.fillStyle = this.paint.muted;
    const [from, to] = this.view.map((value) => value * UNIT);
    const values = ticks(from, to, Math.max(4, Math.floor((this.width - this.gutter) / 95)));
    const step = values.length > 1 ? values[1] - values[0] : to - from;
    for (const value of values) {
      const x = this.x(value / UNIT);
      const clear = x > this.gutter + 10 && x < this.width - 22;
      if (clear) context.fillText(tickLabel(value, step), x, AXIS / 2);
    }
    context.fillStyle = this.paint.strong;
    context.fillRect(0, AXIS - 1, this.width, 1);
    return values.map((value) => value / UNIT);
  }

  /** @param {PlacedLane} lane */
  drawLabel(lane) {
    const {context} = this;
    context.textAlign = 'left';
    context.fillStyle = this.paint.ink;
    context.fillText(this.fitting(clean(lane.name)), 10, lane.top + 8);
    if (lane.second) {
      context.fillStyle = this.paint.muted;
      context.font = '11px system-ui, sans-serif';
      context.fillText(this.fitting(lane.second), 10, lane.top + 22);
      context.font = FONT;
    }
    context.fillStyle = this.paint.line;
    context.fillRect(0, lane.top + lane.height + Math.floor(LANE_GAP / 2), this.width, 1);
  }

  /**
   * A label, cut in its middle to the width that labels have: its end tells processes apart.
   * @param {string} text
   */
  fitting(text) {
    const width = this.gutter - 16;
    let cut = text;
    for (let kept = text.length; kept > 2 && this.context.measureText(cut).width > width; kept--) {
      cut = `${text.slice(0, kept >> 1)}…${text.slice(text.length - ((kept - 1) >> 1))}`;
    }
    return cut;
  }

  /**
   * Draws a bar; returns its left edge and width, null where it is out of view.
   * @param {number} begin
   * @param {number} length
   * @param {number} y
   * @param {number} height
   * @param {string} fill
   * @param {boolean} [pale]
   * @returns {[left: number, width: number] | null}
   */
  block(begin, length, y, height, fill, pale = false) {
    const {context} = this;
    const left = Math.max(this.x(begin), this.gutter - 4);
    const right = Math.min(this.x(begin + length), this.width + 4);
    if (right < this.gutter || left > this.width) return null;
    const wide = Math.max(right - left, 0.7);
    context.fillStyle = fill;
    context.globalAlpha = pale ? 0.45 : 1;
    context.fillRect(left, y, wide, height);
    context.globalAlpha = 1;
    if (wide > 3 && this.paint.edge !== 'transparent') {
      context.strokeStyle = this.paint.edge;
      context.lineWidth = 0.5;
      context.strokeRect(left + 0.25, y + 0.25, wide - 0.5, height - 0.5);
    }
    return [left, wide];
  }

  /**
   * Writes into a bar where there is room.
   * @param {string} text
   * @param {[left: number, width: number]} box
   * @param {number} y
   * @param {number} height
   * @param {string} ink
   */
  write(text, [begin, wide], y, height, ink) {
    const left = Math.max(begin, this.gutter);
    const room = begin + wide - left - 10;
    if (room < 24 || this.context.measureText(text).width > room) return;
    this.context.textAlign = 'left';
    this.context.fillStyle = ink;
    this.context.fillText(text, left + 5, y + height / 2 + 0.5);
  }

  /** @param {PlacedSpans} lane */
  drawSpans(lane) {
    lane.rows.forEach((spans, depth) => {
      const y = lane.top + depth * lane.row;
      const height = lane.row - 2;
      for (const [code, begin, length] of spans) {
        const [event, , failed, fill] = timelines.names[code];
        const box = this.block(begin, length, y, height, fill, depth > 0);
        if (!box) continue;
        const ink = depth ? this.paint.ink : inkOn(fill);
        if (!depth || box[1] > 60) this.write(shorten(event, 40), box, y, height, ink);
        const lines = [
          clean(event) + (failed ? ' (did not return)' : ''),
          `${seconds(length * UNIT)}, from ${seconds(begin * UNIT)}`,
          clean(lane.name),
        ];
        this.boxes.push({x: box[0], width: box[1], y, height, lines: () => lines});
      }
    });
  }

  /**
   * @param {PlacedRequests} lane
   * @param {RequestRow | null} selected
   */
  drawRequests(lane, selected) {
    const {context} = this;
    lane.rows.forEach((requests, row) => {
      const y = lane.top + row * lane.row;
      const height = lane.row - (lane.row > 8 ? 3 : 1.5);
      for (const request of requests) {
        const unfinished = request.status === 'unfinished';
        const {begin, length} = request;
        const box = this.block(begin, length, y, height, colorOf('other'), unfinished);
        if (!box) continue;
        const [left, wide] = box;
        this.boxes.push({x: left, width: Math.max(wide, 3), y, height: height + 1, request});
        // What comes after the request's turns contains its reward, and lies below it.
        this.drawParts(request, y, height, (event) => event === 'postprocess');
        this.drawParts(request, y, height, (event) => event !== 'postprocess');
        if (request.status && !unfinished) {
          context.fillStyle = this.paint.accent;
          context.fillRect(left + wide - 2, y, 2, height);
        }
        if (request === selected) {
          context.strokeStyle = this.paint.ink;
          context.lineWidth = 2;
          context.strokeRect(left - 1, y - 1, wide + 2, height + 2);
        }
      }
    });
  }

  /**
   * @param {RequestRow} request
   * @param {number} y
   * @param {number} height
   * @param {(event: string) => boolean} wanted
   */
  drawParts(request, y, height, wanted) {
    const {context} = this;
    const {spans, begin, hasCalls} = request;
    for (let place = 0; place < spans.length; place += 4) {
      const [code, turn, from, length] = spans.slice(place, place + 4);
      const [event, tool, , fill] = timelines.names[code];
      if (HIDDEN.includes(event) || (event === 'tool_execution' && hasCalls)) continue;
      if (!wanted(event)) continue;
      const box = this.block(begin + from, length, y, height, fill);
      if (!box) continue;
      const [x, width] = box;
      this.boxes.push({x, width, y, height: height + 1, request, span: place / 4});
      if (event === 'postprocess' || height < 10 || width <= 40) continue;
      context.font = '10px system-ui, sans-serif';
      const text = event === 'engine_call' ? `turn ${turn}` : event;
      this.write(tool ? shorten(tool, 30) : text, box, y, height, inkOn(fill));
      context.font = FONT;
    }
  }

  /**
   * @param {PlacedCounts} lane
   * @param {Scene} scene
   */
  drawCounts(lane, scene) {
    const {context} = this;
    const span = scene.end - scene.begin;
    const bottom = lane.top + lane.height;
    context.fillStyle = timelines.names[lane.code][3];
    context.globalAlpha = 0.75;
    context.beginPath();
    context.moveTo(this.x(scene.begin), bottom);
    lane.values.forEach((value, place) => {
      const y = bottom - ((lane.height - 2) * value) / Math.max(lane.most, 1);
      context.lineTo(this.x(scene.begin + (span * place) / COUNTS), y);
      context.lineTo(this.x(scene.begin + (span * (place + 1)) / COUNTS), y);
    });
    context.lineTo(this.x(scene.end), bottom);
    context.fill();
    context.globalAlpha = 1;
    /** @param {number} x */
    const lines = (x) => {
      const place = Math.floor(((this.timeAt(x) - scene.begin) / span) * COUNTS);
      const value = lane.values[Math.max(0, Math.min(COUNTS - 1, place))];
      const time = seconds(this.timeAt(x) * UNIT);
      return [clean(lane.name), `${plural(value, 'open call')} at most`, `around ${time}`];
    };
    const {top: y, height} = lane;
    this.boxes.push({x: this.gutter, width: this.width, y, height, lines});
  }

  /**
   * What is drawn at a place of the canvas, the last first: bands of stalls, and what lies below them.
   * @param {number} x
   * @param {number} y
   */
  hits(x, y) {
    if (x < this.gutter) return [];
    return this.boxes
      .filter(
        (box) =>
          x >= box.x - 1 && x <= box.x + box.width + 1 && y >= box.y && y <= box.y + box.height,
      )
      .reverse();
  }

  /**
   * What a click selects there: a bar rather than the band over it.
   * @param {number} x
   * @param {number} y
   */
  hit(x, y) {
    const hits = this.hits(x, y);
    return hits.find((box) => !box.stall) ?? hits[0];
  }
}

/** The page's colors, which change with its theme. */
function colors() {
  const style = getComputedStyle(document.documentElement);
  /** @param {string} name */
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    page: read('page'),
    ink: read('ink'),
    muted: read('muted'),
    line: read('line'),
    accent: read('accent'),
    strong: read('strong-line'),
    edge: read('edge'),
  };
}
