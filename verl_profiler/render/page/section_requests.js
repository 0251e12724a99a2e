// Requests: what they spend their time on, the timeline, the search, one of them in detail.

import {about, heading} from './blocks.js';
import {legend} from './charts.js';
import {ALL, colorOf, requests, shown, shownStep, steps, timelines} from './data.js';
import {byId, element, find, scrollTo} from './dom.js';
import {clean, number, seconds} from './format.js';
import {requestLines, slowestOf} from './request.js';
import {requestPanel} from './request_panel.js';
import {listRequests} from './request_table.js';
import {Timeline} from './timeline.js';
import {requestsOf} from './timeline_lanes.js';

const {scenes} = timelines;

/** @type {Timeline | null} */
let timeline = null;
/** @type {RequestRow | null} */
let picked = null;

/** @param {(step: number, keepScene: boolean) => void} choose */
export function requestsSection(choose) {
  if (!requests.length && !scenes.length) return [about('No requests were recorded.')];
  /** @type {HTMLSelectElement} */
  const select = element(
    'select',
    {
      id: 'scene',
      onchange: () => {
        const scene = scenes[Number(select.value)];
        showScene(scene);
        if (!scene.validate && scene.s !== shown.step) choose(scene.s, true);
      },
    },
    scenes.map((scene, place) => element('option', {value: String(place)}, sceneName(scene))),
  );
  /**
   * @param {string} label
   * @param {string} text
   * @param {() => void} onclick
   */
  const button = (label, text, onclick) =>
    element('button', {type: 'button', 'aria-label': label, onclick}, text);
  const search = element('input', {
    type: 'search',
    id: 'search',
    placeholder: 'id, sample, worker, agent, tool',
    autocomplete: 'off',
    spellcheck: 'false',
    oninput: findRequest,
  });
  search.addEventListener('keydown', ({key}) => {
    if (key === 'Enter') openFirst();
  });
  const all = number(timelines.of);
  const found = [
    element('label', {for: 'search'}, 'Find a request ', search),
    element('span', {id: 'found', role: 'status'}),
  ];
  const listed = [heading('Requests'), element('div', {id: 'request-table'})];
  const some = requests.length > 0;
  return [
    about(
      !some
        ? 'No requests were recorded; the other processes are drawn.'
        : 'One bar per request, in the row of the worker that ran it. ' +
            (requests.length < timelines.of
              ? `${number(requests.length)} of ${all} requests are drawn and listed: the slowest, ` +
                'failed ones, and every n-th of the others. ' +
                'All other numbers cover all requests.'
              : `All ${all} requests are drawn and listed.`),
    ),
    element(
      'div',
      {class: 'tools'},
      element('label', {for: 'scene'}, 'Timeline of'),
      select,
      button('Zoom in', '+', () => timeline?.zoom(0.5)),
      button('Zoom out', '−', () => timeline?.zoom(2)),
      button('Reset the zoom', 'Reset', () => timeline?.reset()),
      some ? found : null,
      element(
        'span',
        {class: 'hint', id: 'timeline-keys'},
        'W S zoom at the pointer · A D or drag pan · click, then scroll zooms · Home · ↑ ↓ request',
      ),
    ),
    element('p', {class: 'note', id: 'scene-note'}),
    element('div', {id: 'timeline'}),
    element('div', {id: 'timeline-legend'}),
    element('p', {class: 'picked', id: 'picked'}),
    some ? listed : null,
    element('div', {id: 'request-panel', 'aria-live': 'off'}),
  ];
}

/** @type {() => void} */
let onPickedByPerson = () => {};

/** @param {() => void} action What to do when a person selects a request. */
export function onPicked(action) {
  onPickedByPerson = action;
}

export function pickedRequest() {
  return picked;
}

/** @param {RequestRow} request */
export function pickRequest(request) {
  pick(request, 'link');
}

/** Draw the timeline of the slowest request, once the section is in the page. */
export function startTimeline() {
  if (!scenes.length) return;
  const slowest = slowestOf((request) => request.scene !== null);
  const scene = scenes[slowest?.scene ?? -1] ?? scenes.find((each) => !each.validate) ?? scenes[0];
  timeline = new Timeline(byId('timeline'), scene, (request) => pick(request, 'timeline'));
  showScene(scene);
  if (slowest) pick(slowest, 'start');
}

export function redrawTimeline() {
  timeline?.draw();
}

/** @param {boolean} keepScene Whether the timeline stays where it is. */
export function followStep(keepScene) {
  if (find('search')) fillRequests();
  const {step} = shown;
  if (timeline && !keepScene) {
    const scene = scenes.find((each) => each.s === step && !each.validate);
    showScene(scene ?? timeline.scene);
  }
  if (step !== ALL && (!picked || picked.s !== step || picked.validate)) {
    const slowest = slowestOf((request) => request.s === step);
    if (slowest) pick(slowest, 'step');
  }
}

/** @param {Scene} scene */
function sceneName(scene) {
  const step = steps[scene.s];
  const label = clean(step.label);
  if (!scene.validate) return `step ${label}`;
  return step.finished
    ? `validation after step ${label}`
    : `validation before the steps (${label})`;
}

/** @param {Scene} scene */
function showScene(scene) {
  if (!timeline) return;
  const select = /** @type {HTMLSelectElement} */ (byId('scene'));
  select.value = String(scenes.indexOf(scene));
  timeline.show(scene);
  byId('timeline-legend').replaceChildren(sceneLegend(timeline));
  const drawn = requestsOf(scene).length;
  const notes = [];
  if (drawn < scene.requests) {
    notes.push(
      `Drawn: ${number(drawn)} of ${number(scene.requests)} requests of ${sceneName(scene)}.`,
    );
  }
  if (shown.step !== ALL && scene.s !== shown.step && !scene.validate) {
    const {label, step} = shownStep();
    notes.push(
      `Step ${clean(label)} is not drawn in this file (${scenes.length} timelines are); ` +
        `--steps ${step} draws it.`,
    );
  }
  const line = byId('scene-note');
  line.textContent = notes.join(' ');
  line.hidden = !notes.length;
}

/** @param {Timeline} drawn */
function sceneLegend({order, lanes}) {
  const used = new Set();
  for (const {spans} of order) {
    for (let place = 0; place < spans.length; place += 4) {
      used.add(timelines.names[spans[place]][0]);
    }
  }
  /** @type {Record<string, string>} */
  const short = {engine_call: 'engine', tool_call: 'tool', tool_execution: 'tool'};
  /** @type {Map<string, string>} */
  const names = new Map();
  for (const [event, , , color] of timelines.names) {
    const name = short[event] || event;
    const hidden = event === 'turn' || event === 'server_acquire';
    if (used.has(event) && !hidden && !names.has(name)) names.set(name, color);
  }
  if (order.length) names.set('other', colorOf('other'));
  if (lanes.some((lane) => lane.lags?.length)) names.set('event-loop stall', 'var(--accent)');
  return legend([...names].map(([name, color]) => ({name, color})));
}

/** Fill the table with the requests that the search leaves. */
function fillRequests() {
  return listRequests(
    (row) => row === picked,
    (row) => pick(row, 'table'),
  );
}

/** Fill the table with what was searched, and show a request that is the only match. */
function findRequest() {
  const rows = fillRequests();
  if (rows.length === 1 && rows[0] !== picked) pick(rows[0], 'link');
}

/** Open the first request of the table, its slowest unless it was sorted. */
function openFirst() {
  const row = /** @type {HTMLElement | null} */ (
    byId('request-table').querySelector('tbody button')
  );
  row?.click();
  if (row) scrollTo(byId('panel'));
}

/**
 * Show a request in detail, and mark it in the timeline and in the table.
 * @param {RequestRow} request
 * @param {'start' | 'step' | 'table' | 'timeline' | 'link'} from
 */
function pick(request, from) {
  picked = request;
  const scene = request.scene === null ? undefined : scenes[request.scene];
  if (timeline && scene && timeline.scene !== scene) showScene(scene);
  timeline?.select(request);
  byId('request-panel').replaceChildren(requestPanel(request));
  const scroll = () => scrollTo(byId('panel'));
  const lines = timeline ? requestLines(request).filter(Boolean) : [];
  byId('picked').replaceChildren(
    element('span', {}, lines.join(' · ')),
    element('button', {type: 'button', onclick: scroll}, 'Breakdown ↓'),
  );
  if (from === 'timeline' || from === 'step' || from === 'link') fillRequests();
  const id = clean(request.request_id);
  byId('status').textContent = `Selected request ${id}, ${seconds(request.duration_s)}`;
  if (from !== 'start' && from !== 'step') onPickedByPerson();
}
