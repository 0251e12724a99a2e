// Which requests and lanes of a timeline are shown: by tool, replica, worker, time and role.

import {steps, tableOf} from './data.js';
import {element} from './dom.js';
import {clean, number, seconds, shorten} from './format.js';
import {callsOf, spansOf} from './request.js';
import {requestsOf} from './timeline_lanes.js';

/** @typedef {'tool' | 'replica' | 'worker'} Choice */

const CHOICES = /** @type {const} */ (['tool', 'replica', 'worker']);

/**
 * What a request has of each thing that can be chosen.
 * @type {Record<Choice, (request: RequestRow) => (string | null)[]>}
 */
const VALUES = {
  tool: (request) =>
    spansOf(request)
      .filter(({event}) => event === 'tool_call')
      .map(({tool}) => tool),
  replica: (request) => callsOf(request).map(({server}) => server),
  worker: (request) => [request.name],
};

/**
 * P95 of all requests of a step, of which not all may be drawn; of its validation apart.
 * @param {Scene | RequestRow} of
 * @returns {Num}
 */
function p95({s, validate}) {
  if (!validate) return steps[s].p95_s ?? null;
  return tableOf('request_times').find((row) => row.s === s && row.validate)?.p95_s ?? null;
}

export class Filter {
  /** @param {() => void} onChange */
  constructor(onChange) {
    this.onChange = onChange;
    /** @type {Scene | null} */
    this.scene = null;
    /** @type {Partial<Record<Choice, string>>} */
    this.chosen = {};
    this.slow = false;
    /** @type {Set<string>} Roles whose lanes are hidden. */
    this.hidden = new Set();
    this.box = element('div', {class: 'tools filter', role: 'group', 'aria-label': 'Filter'});
    this.count = element('span', {id: 'filter-count', role: 'status'});
  }

  narrows() {
    return this.slow || CHOICES.some((key) => this.chosen[key]);
  }

  /** @param {RequestRow} request */
  keeps(request) {
    for (const key of CHOICES) {
      const wanted = this.chosen[key];
      if (wanted && !VALUES[key](request).includes(wanted)) return false;
    }
    if (!this.slow) return true;
    const bound = p95(request);
    return bound !== null && (request.duration_s ?? 0) > bound;
  }

  /** @param {Lane} lane */
  shows(lane) {
    return !this.hidden.has(lane.role);
  }

  /**
   * Offer what the requests of a timeline have.
   * @param {Scene} scene
   */
  offer(scene) {
    this.scene = scene;
    const drawn = requestsOf(scene);
    /** @type {HTMLElement[][]} */
    const fields = CHOICES.map((key) => this.select(key, drawn));
    const bound = p95(scene);
    const slow = element('input', {
      type: 'checkbox',
      id: 'filter-slow',
      disabled: bound === null,
      onchange: () => this.change(() => (this.slow = slow.checked)),
    });
    slow.checked = this.slow;
    const over = bound === null ? 'too few requests for P95' : `over P95, ${seconds(bound)}`;
    fields.push([slow, element('label', {for: 'filter-slow'}, `slow (${over})`)]);
    const roles = [...new Set(scene.lanes.map((lane) => lane.role))];
    const lanes = element(
      'details',
      {class: 'roles'},
      element('summary', {}, 'Lanes'),
      element(
        'div',
        {},
        roles.map((role) => this.role(role)),
      ),
    );
    lanes.open = this.box.querySelector('details')?.open ?? false;
    const clear = element('button', {type: 'button', onclick: () => this.clear()}, 'Clear filter');
    this.box.replaceChildren(
      ...fields.map((field) => element('span', {class: 'field'}, field)),
      lanes,
      this.count,
      clear,
    );
    const hidden = scene.lanes.filter((lane) => !this.shows(lane)).length;
    const kept = drawn.filter((request) => this.keeps(request)).length;
    const of = drawn.length < scene.requests ? `drawn (${number(scene.requests)} in all)` : 'shown';
    const lanesHidden = hidden ? `, ${hidden} of ${scene.lanes.length} lanes hidden` : '';
    clear.hidden = !hidden && !this.narrows();
    this.count.textContent = clear.hidden
      ? ''
      : `${number(kept)} of ${number(drawn.length)} requests ${of}${lanesHidden}`;
    this.box.classList.toggle('narrows', !clear.hidden);
  }

  /**
   * @param {Choice} key
   * @param {RequestRow[]} drawn
   */
  select(key, drawn) {
    const values = [...new Set(drawn.flatMap(VALUES[key]))].filter((value) => value !== null);
    const current = this.chosen[key];
    // What a link names stays visible where this timeline has none of it.
    if (current && !values.includes(current)) values.push(current);
    values.sort((a, b) => a.localeCompare(b, 'en', {numeric: true}));
    const made = element(
      'select',
      {
        id: `filter-${key}`,
        disabled: !values.length,
        onchange: () => this.change(() => (this.chosen[key] = made.value || undefined)),
      },
      element('option', {value: ''}, 'all'),
      values.map((value) => element('option', {value}, shorten(value, 40))),
    );
    made.value = current ?? '';
    return [element('label', {for: `filter-${key}`}, key), made];
  }

  /** @param {string} role */
  role(role) {
    const id = `filter-role-${role}`;
    const made = element('input', {
      type: 'checkbox',
      id,
      onchange: () =>
        this.change(() => (made.checked ? this.hidden.delete(role) : this.hidden.add(role))),
    });
    made.checked = !this.hidden.has(role);
    return element('span', {class: 'field'}, made, element('label', {for: id}, clean(role)));
  }

  clear() {
    this.change(() => this.read(new URLSearchParams()));
    this.box.querySelector('select')?.focus();
  }

  /** @param {() => void} set */
  change(set) {
    const focused = document.activeElement?.id;
    set();
    if (this.scene) this.offer(this.scene);
    if (focused) document.getElementById(focused)?.focus();
    this.onChange();
  }

  /**
   * The filter as words of the address.
   * @returns {string[]}
   */
  words() {
    /** @type {[string, string][]} */
    const pairs = [];
    for (const key of CHOICES) pairs.push([key, this.chosen[key] ?? '']);
    pairs.push(['slow', this.slow ? '1' : '']);
    pairs.push(['hide', [...this.hidden].join(',')]);
    return pairs
      .filter(([, value]) => value)
      .map(([key, value]) => `${key}=${encodeURIComponent(value)}`);
  }

  /**
   * Take the filter from words of the address.
   * @param {URLSearchParams} words
   */
  read(words) {
    for (const key of CHOICES) this.chosen[key] = words.get(key) || undefined;
    this.slow = words.get('slow') === '1';
    this.hidden = new Set((words.get('hide') ?? '').split(',').filter(Boolean));
  }
}
