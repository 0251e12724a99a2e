// The timeline of a step: lanes of processes, with zoom, pan and selection.

import {timelines} from './data.js';
import {element, hideTip, showTip} from './dom.js';
import {seconds} from './format.js';
import {requestLines} from './request.js';
import {shownSpans, sliceLines} from './slice.js';
import {listenToKeys} from './timeline_keys.js';
import {placeLanes} from './timeline_lanes.js';
import {Painter} from './timeline_painter.js';

/**
 * @typedef {{
 *   x: number, y: number, view: number[], top: number, moved: boolean, measure: boolean,
 * }} Drag
 * @typedef {import('./timeline_painter.js').Box} Box
 * @typedef {import('./timeline_lanes.js').LaneFilter} LaneFilter
 */

export class Timeline {
  /**
   * @param {HTMLElement} box
   * @param {Scene} scene
   * @param {(box: Partial<Box>) => void} onPick Called with the slice that a person selects.
   * @param {LaneFilter} filter
   */
  constructor(box, scene, onPick, filter) {
    this.onPick = onPick;
    this.filter = filter;
    const axis = element('canvas', {'aria-hidden': 'true'});
    this.canvas = element('canvas', {
      class: 'lane-canvas',
      tabindex: '0',
      role: 'application',
      'aria-roledescription': 'timeline',
      'aria-describedby': 'timeline-keys',
    });
    this.ruler = element('div', {class: 'ruler', hidden: ''});
    this.lanesBox = element('div', {class: 'lanes'}, this.canvas, this.ruler);
    box.append(element('div', {class: 'frame'}, axis, this.lanesBox));
    this.painter = new Painter(axis, this.canvas);
    /** @type {RequestRow | null} */
    this.selected = null;
    /** @type {number | null} Of the selected request. */
    this.span = null;
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
    listenToKeys(this);
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

  /** Place the lanes and requests that the filter leaves. */
  place() {
    const {lanes, height} = placeLanes(this.scene, this.filter);
    this.lanes = lanes;
    this.height = height;
    this.order = lanes.flatMap((lane) =>
      lane.kind === 'requests' ? lane.rows.flat().sort((a, b) => a.begin - b.begin) : [],
    );
    this.layout();
    const label =
      `Timeline: ${lanes.length} lanes, ${this.order.length} requests. Arrow left and right pan, ` +
      'plus and minus zoom, Home shows everything, arrow up and down select a request, ' +
      'comma and period a slice of it.';
    this.canvas.setAttribute('aria-label', label);
  }

  layout() {
    const width = Math.max(320, this.lanesBox.clientWidth);
    this.painter.resize(width, this.height, this.lanes);
    this.draw();
  }

  draw() {
    this.painter.draw(this.scene, this.lanes, this.view, this.selected, this.span);
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
    this.pick({request: this.order[next]});
  }

  /**
   * Select the next slice of the selected request, or the one before.
   * @param {number} by
   */
  moveSlice(by) {
    if (!this.selected) return;
    const places = shownSpans(this.selected);
    if (!places.length) return;
    const at = this.span === null ? -1 : places.indexOf(this.span);
    const next = at < 0 ? 0 : Math.max(0, Math.min(places.length - 1, at + by));
    this.pick({request: this.selected, span: places[next]});
  }

  /** @param {Partial<Box>} box */
  pick(box) {
    if (box.request) this.select(box.request, box.span ?? null);
    this.onPick(box);
  }

  /**
   * Mark a request, or a slice of it, and bring it into view.
   * @param {RequestRow} request
   * @param {number | null} [span]
   */
  select(request, span = null) {
    this.selected = request;
    this.span = span;
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

  /** @param {PointerEvent} event */
  boxAt(event) {
    const frame = this.canvas.getBoundingClientRect();
    return this.painter.hit(event.clientX - frame.left, event.clientY - frame.top);
  }

  /**
   * Time under the pointer.
   * @param {MouseEvent} event
   */
  timeUnder(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    return this.painter.timeAt(Math.max(x, this.painter.gutter));
  }

  /** @param {PointerEvent} event */
  hover(event) {
    const frame = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    const box = this.painter.hit(x, y);
    this.canvas.style.cursor = box ? 'pointer' : '';
    if (!box) {
      hideTip();
      return;
    }
    const {request, span} = box;
    const stalls = this.painter.hits(x, y).filter((each) => each.stall && each !== box);
    const lines = stalls.flatMap((each) => (each.lines?.(x) ?? []).slice(0, 1));
    if (!request) lines.push(...(box.lines?.(x) ?? []));
    else if (span === undefined) lines.push(...requestLines(request));
    else lines.push(...sliceLines(request, span), ...requestLines(request).slice(0, 2));
    showTip(event, lines);
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
    if (drag.measure) {
      this.measure(event, drag);
      return;
    }
    this.canvas.classList.add('dragged');
    const [from, to] = drag.view;
    const scale = (to - from) / this.painter.room;
    this.look(from - by * scale, to - by * scale);
    if (event.pointerType === 'mouse') this.lanesBox.scrollTop = drag.top - down;
  }

  /**
   * Both ends of what is measured, in time.
   * @param {MouseEvent} event
   * @param {Drag} drag
   */
  measured(event, drag) {
    const left = this.canvas.getBoundingClientRect().left;
    const at = [drag.x, event.clientX].sort((a, b) => a - b);
    return at.map((x) => this.painter.timeAt(Math.max(x - left, this.painter.gutter)));
  }

  /**
   * Show the length of the stretch between where the drag began and the pointer.
   * @param {MouseEvent} event
   * @param {Drag} drag
   */
  measure(event, drag) {
    const [from, to] = this.measured(event, drag);
    const left = this.canvas.getBoundingClientRect().left;
    const [first, last] = [drag.x, event.clientX].sort((a, b) => a - b);
    const begin = Math.max(first - left, this.painter.gutter);
    this.ruler.hidden = false;
    this.ruler.textContent = seconds((to - from) * timelines.unit_s);
    this.ruler.style.left = `${begin}px`;
    this.ruler.style.width = `${Math.max(last - left - begin, 0)}px`;
    this.ruler.style.height = `${this.height}px`;
  }

  /**
   * @param {MouseEvent} event
   * @param {Drag} drag
   */
  lookAtMeasured(event, drag) {
    this.ruler.hidden = true;
    const [from, to] = this.measured(event, drag);
    if (drag.moved && to > from) this.look(from, to);
  }

  listenToPointer() {
    const {canvas} = this;
    /** @type {Drag | null} */
    let drag = null;
    canvas.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      const {clientX: x, clientY: y} = event;
      const measure = event.shiftKey;
      drag = {x, y, view: this.view, top: this.lanesBox.scrollTop, moved: false, measure};
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointermove', (event) => {
      this.pointer = drag ? null : event;
      if (drag) this.drag(event, drag);
      else this.hover(event);
    });
    canvas.addEventListener('pointerup', (event) => {
      canvas.classList.remove('dragged');
      if (drag?.measure) this.lookAtMeasured(event, drag);
      const box = drag && !drag.moved ? this.boxAt(event) : undefined;
      if (box) this.pick(box);
      drag = null;
    });
    canvas.addEventListener('pointercancel', () => {
      this.ruler.hidden = true;
      drag = null;
    });
    canvas.addEventListener('pointerleave', () => {
      this.pointer = null;
      hideTip();
    });
    canvas.addEventListener('dblclick', (event) => this.zoom(0.4, this.timeUnder(event)));
    canvas.addEventListener('wheel', (event) => this.wheel(event), {passive: false});
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
