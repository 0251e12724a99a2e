// The timeline of a step: lanes of processes, with zoom, pan and selection.

import {timelines} from './data.js';
import {element, hideTip, showTip} from './dom.js';
import {requestLines, sliceLines} from './request.js';
import {placeLanes} from './timeline_lanes.js';
import {Painter} from './timeline_painter.js';

/**
 * @typedef {{x: number, y: number, view: number[], top: number, moved: boolean}} Drag
 */

export class Timeline {
  /**
   * @param {HTMLElement} box
   * @param {Scene} scene
   * @param {(request: RequestRow) => void} onPick Called with the request that a person selects.
   */
  constructor(box, scene, onPick) {
    this.onPick = onPick;
    const axis = element('canvas', {'aria-hidden': 'true'});
    this.canvas = element('canvas', {
      class: 'lane-canvas',
      tabindex: '0',
      role: 'application',
      'aria-roledescription': 'timeline',
      'aria-describedby': 'timeline-keys',
    });
    this.lanesBox = element('div', {class: 'lanes'}, this.canvas);
    box.append(element('div', {class: 'frame'}, axis, this.lanesBox));
    this.painter = new Painter(axis, this.canvas);
    /** @type {RequestRow | null} */
    this.selected = null;
    this.scene = scene;
    /** @type {import('./timeline_lanes.js').PlacedLane[]} */
    this.lanes = [];
    /** Of the lanes, in pixels. */
    this.height = 0;
    /** @type {RequestRow[]} From the top to the bottom. */
    this.order = [];
    /** First and last time, of everything and of what is shown. */
    this.home = [0, 1];
    this.view = [0, 1];
    /** @type {PointerEvent | null} Where it last was over the lanes. */
    this.pointer = null;
    this.listenToPointer();
    this.listenToKeys();
    const redraw = () => requestAnimationFrame(() => this.layout());
    new ResizeObserver(redraw).observe(this.lanesBox);
    this.show(scene);
  }

  /** @param {Scene} scene */
  show(scene) {
    this.scene = scene;
    const margin = Math.max(1, (scene.end - scene.begin) * 0.004);
    this.home = [scene.begin - margin, scene.end + margin];
    this.view = this.home;
    this.lanesBox.scrollTop = 0;
    this.place();
  }

  /** Place the lanes and their requests. */
  place() {
    const {lanes, height} = placeLanes(this.scene);
    this.lanes = lanes;
    this.height = height;
    this.order = lanes.flatMap((lane) =>
      lane.kind === 'requests' ? lane.rows.flat().sort((a, b) => a.begin - b.begin) : [],
    );
    this.layout();
    const label =
      `Timeline: ${lanes.length} lanes, ${this.order.length} requests. Arrow left and right pan, ` +
      'plus and minus zoom, Home shows everything, arrow up and down select a request.';
    this.canvas.setAttribute('aria-label', label);
  }

  layout() {
    const width = Math.max(320, this.lanesBox.clientWidth);
    this.painter.resize(width, this.height, this.lanes);
    this.draw();
  }

  draw() {
    this.painter.draw(this.scene, this.lanes, this.view, this.selected);
    const [from, to] = this.view.map((time) => time * timelines.unit_s);
    this.canvas.dataset.from = String(from);
    this.canvas.dataset.to = String(to);
    this.canvas.dataset.gutter = String(this.painter.gutter);
    // What is under the pointer has changed.
    if (this.pointer) this.hover(this.pointer);
  }

  /**
   * Show a stretch of time; never further out than everything, nor closer than 100 us.
   * @param {number} from
   * @param {number} to
   */
  look(from, to) {
    const [first, last] = this.home;
    const whole = last - first;
    const least = Math.min(whole, 1e-4 / timelines.unit_s);
    const length = Math.max(Math.min(to - from, whole), least);
    const begin = Math.max(first, Math.min(from, last - length));
    this.view = [begin, begin + length];
    this.draw();
  }

  /**
   * @param {number} factor
   * @param {number} [around]
   */
  zoom(factor, around) {
    const [from, to] = this.view;
    const center = around ?? (from + to) / 2;
    this.look(center - (center - from) * factor, center + (to - center) * factor);
  }

  /** @param {number} part Of what is shown. */
  pan(part) {
    const [from, to] = this.view;
    const by = (to - from) * part;
    this.look(from + by, to + by);
  }

  reset() {
    this.look(this.home[0], this.home[1]);
  }

  /**
   * Select the next request, or the one before.
   * @param {number} by
   */
  move(by) {
    if (!this.order.length) return;
    const place = this.selected ? this.order.indexOf(this.selected) : -1;
    const next = place < 0 ? 0 : Math.max(0, Math.min(this.order.length - 1, place + by));
    this.onPick(this.order[next]);
  }

  /**
   * Mark a request, and bring it into view.
   * @param {RequestRow} request
   */
  select(request) {
    this.selected = request;
    for (const lane of this.lanes) {
      if (lane.kind !== 'requests') continue;
      const row = lane.rows.findIndex((requests) => requests.includes(request));
      if (row >= 0) this.scrollTo(lane.top + row * lane.row, request);
    }
    this.draw();
  }

  /**
   * @param {number} y
   * @param {RequestRow} request
   */
  scrollTo(y, request) {
    const {scrollTop, clientHeight} = this.lanesBox;
    if (y < scrollTop || y > scrollTop + clientHeight - 20) {
      this.lanesBox.scrollTop = y - clientHeight / 2;
    }
    const [from, to] = this.view;
    if (request.begin > to || request.begin + request.length < from) {
      const half = (to - from) / 2;
      const center = request.begin + request.length / 2;
      this.look(center - half, center + half);
    }
  }

  /**
   * Time under the pointer.
   * @param {MouseEvent} event
   */
  timeUnder(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    return this.painter.timeAt(Math.max(x, this.painter.gutter));
  }

  /**
   * Name what is under the pointer.
   * @param {PointerEvent} event
   */
  hover(event) {
    const frame = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    const box = this.painter.hit(x, y);
    this.canvas.style.cursor = box ? 'pointer' : '';
    if (!box) {
      hideTip();
      return box;
    }
    const {request, span} = box;
    const stalls = this.painter.hits(x, y).filter((each) => each.stall && each !== box);
    const lines = stalls.flatMap((each) => (each.lines?.(x) ?? []).slice(0, 1));
    if (!request) lines.push(...(box.lines?.(x) ?? []));
    else if (span === undefined) lines.push(...requestLines(request));
    else lines.push(...sliceLines(request, span), ...requestLines(request).slice(0, 2));
    showTip(event, lines);
    return box;
  }

  /**
   * @param {PointerEvent} event
   * @param {Drag} drag
   */
  drag(event, drag) {
    const by = event.clientX - drag.x;
    const down = event.clientY - drag.y;
    if (Math.abs(by) + Math.abs(down) > 3) drag.moved = true;
    if (!drag.moved) return;
    hideTip();
    this.canvas.classList.add('dragged');
    const [from, to] = drag.view;
    const scale = (to - from) / this.painter.room;
    this.look(from - by * scale, to - by * scale);
    if (event.pointerType === 'mouse') this.lanesBox.scrollTop = drag.top - down;
  }

  listenToPointer() {
    const {canvas} = this;
    /** @type {Drag | null} */
    let drag = null;
    canvas.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      const {clientX: x, clientY: y} = event;
      drag = {x, y, view: this.view, top: this.lanesBox.scrollTop, moved: false};
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointermove', (event) => {
      this.pointer = drag ? null : event;
      if (drag) this.drag(event, drag);
      else this.hover(event);
    });
    canvas.addEventListener('pointerup', (event) => {
      canvas.classList.remove('dragged');
      this.pointer = event;
      const request = drag && !drag.moved ? this.hover(event)?.request : undefined;
      if (request) this.onPick(request);
      drag = null;
    });
    canvas.addEventListener('pointercancel', () => (drag = null));
    canvas.addEventListener('pointerleave', ({pointerType}) => {
      this.pointer = null;
      // A finger leaves where it taps; what it tapped stays named.
      if (pointerType === 'mouse') hideTip();
    });
    canvas.addEventListener('dblclick', (event) => this.zoom(0.4, this.timeUnder(event)));
    canvas.addEventListener('wheel', (event) => this.wheel(event), {passive: false});
  }

  /** Letters are those of other trace viewers. */
  listenToKeys() {
    // At the pointer where it is over the lanes, else at the middle.
    /** @param {number} factor */
    const zoom = (factor) =>
      this.zoom(factor, this.pointer ? this.timeUnder(this.pointer) : undefined);
    /** @type {Record<string, () => void>} */
    const keys = {
      '+': () => zoom(0.6),
      '=': () => zoom(0.6),
      '-': () => zoom(1 / 0.6),
      _: () => zoom(1 / 0.6),
      w: () => zoom(0.6),
      s: () => zoom(1 / 0.6),
      a: () => this.pan(-0.15),
      d: () => this.pan(0.15),
      ArrowLeft: () => this.pan(-0.15),
      ArrowRight: () => this.pan(0.15),
      Home: () => this.reset(),
      ArrowUp: () => this.move(-1),
      ArrowDown: () => this.move(1),
    };
    // Letters act without a click too, while the pointer is over the lanes and nobody is typing.
    window.addEventListener('keydown', (event) => {
      const target = /** @type {Element} */ (event.target);
      const letter = event.key.toLowerCase();
      const over = 'wasd'.includes(letter) && this.pointer && !target.closest('input, select');
      const action = target === this.canvas || over ? (keys[event.key] ?? keys[letter]) : undefined;
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      action();
    });
  }

  /** @param {WheelEvent} event */
  wheel(event) {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const focused = document.activeElement === this.canvas;
    if (!focused && !event.ctrlKey && !event.metaKey && !sideways) return;
    event.preventDefault();
    if (sideways) {
      this.pan((event.deltaX || event.deltaY) / 600);
      return;
    }
    const by = Math.max(-300, Math.min(300, event.deltaY));
    this.zoom(1.0015 ** by, this.timeUnder(event));
  }
}
