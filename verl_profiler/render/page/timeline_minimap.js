// The whole step in small above its timeline, with the stretch that is shown, which can be dragged.

import {colorOf, timelines} from './data.js';
import {element} from './dom.js';

/** @typedef {import('./timeline_lanes.js').PlacedLane} PlacedLane */

const HEIGHT = 44;

export class Minimap {
  /** @param {(from: number, to: number) => void} onMove */
  constructor(onMove) {
    this.onMove = onMove;
    // Keys of the timeline do the same.
    this.canvas = element('canvas', {class: 'minimap', 'aria-hidden': 'true'});
    this.context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext('2d'));
    this.width = 0;
    this.gutter = 0;
    this.home = [0, 1];
    this.view = [0, 1];
    this.listen();
  }

  /**
   * @param {number} width
   * @param {number} gutter
   */
  resize(width, gutter) {
    this.width = width;
    this.gutter = gutter;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
    this.canvas.style.height = `${HEIGHT}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  get room() {
    return this.width - this.gutter - 8;
  }

  /** @param {number} time */
  x(time) {
    const [from, to] = this.home;
    return this.gutter + (this.room * (time - from)) / (to - from);
  }

  /**
   * @param {PlacedLane[]} lanes
   * @param {number[]} home
   * @param {number[]} view
   */
  draw(lanes, home, view) {
    this.home = home;
    this.view = view;
    const {context} = this;
    const style = getComputedStyle(document.documentElement);
    const read = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
    context.clearRect(0, 0, this.width, HEIGHT);
    const shown = lanes.filter((lane) => lane.kind !== 'count');
    const rows = shown.reduce((sum, lane) => sum + Math.max(1, lane.rows.length), 0);
    const row = (HEIGHT - 6) / Math.max(1, rows);
    let y = 3;
    /**
     * @param {number} begin
     * @param {number} length
     * @param {string} fill
     */
    const bar = (begin, length, fill) => {
      context.fillStyle = fill;
      const wide = Math.max(this.x(begin + length) - this.x(begin), 0.7);
      context.fillRect(this.x(begin), y, wide, Math.max(row - 0.4, 0.6));
    };
    context.globalAlpha = 0.8;
    for (const lane of shown) {
      if (lane.kind === 'spans') {
        for (const spans of lane.rows) {
          for (const [code, begin, length] of spans) bar(begin, length, timelines.names[code][3]);
          y += row;
        }
      } else {
        for (const those of lane.rows) {
          for (const {begin, length} of those) bar(begin, length, colorOf('engine'));
          y += row;
        }
      }
    }
    context.globalAlpha = 1;
    const [left, right] = view.map((time) => this.x(time));
    context.fillStyle = read('page');
    context.globalAlpha = 0.65;
    context.fillRect(this.gutter, 0, left - this.gutter, HEIGHT);
    context.fillRect(right, 0, this.width - right, HEIGHT);
    context.globalAlpha = 1;
    context.strokeStyle = read('link');
    context.lineWidth = 1.5;
    context.strokeRect(left, 1, Math.max(right - left, 2), HEIGHT - 2);
    context.fillStyle = read('muted');
    context.font = '12px system-ui, sans-serif';
    context.textBaseline = 'middle';
    context.fillText('whole step', 10, HEIGHT / 2);
  }

  /** @param {PointerEvent} event */
  timeUnder(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    const [from, to] = this.home;
    return from + ((x - this.gutter) / this.room) * (to - from);
  }

  listen() {
    const {canvas} = this;
    /** @type {number | null} Time between the begin of the stretch and the pointer. */
    let held = null;
    const move = (/** @type {PointerEvent} */ event) => {
      const [from, to] = this.view;
      const begin = this.timeUnder(event) - (held ?? 0);
      this.onMove(begin, begin + to - from);
    };
    canvas.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      const [from, to] = this.view;
      const time = this.timeUnder(event);
      // Beside the stretch, a press brings its middle there.
      held = time >= from && time <= to ? time - from : (to - from) / 2;
      canvas.setPointerCapture(event.pointerId);
      move(event);
    });
    canvas.addEventListener('pointermove', (event) => {
      if (held !== null) move(event);
    });
    for (const kind of /** @type {const} */ (['pointerup', 'pointercancel'])) {
      canvas.addEventListener(kind, () => {
        held = null;
      });
    }
  }
}
