// A slice of the timeline in detail, and the command that prints the events behind it.

import {DATA, several, steps, timelines} from './data.js';
import {element} from './dom.js';
import {clean} from './format.js';
import {callOf, callsOf, requestLines, spanLines, spansOf} from './request.js';

/**
 * @typedef {object} Origin Which events are behind what is drawn in a lane.
 * @property {string} event
 * @property {string} name Of the process.
 * @property {string} role
 * @property {number} [length] Of one span, in units of the timeline.
 */

/** Events that other slices of a request stand for. */
const HIDDEN = ['turn', 'server_acquire'];

/**
 * Places of the spans of a request that the timeline draws.
 * @param {RequestRow} request
 */
export function shownSpans(request) {
  return spansOf(request)
    .map(({event}, place) => ({event, place}))
    .filter(({event}) => !HIDDEN.includes(event))
    .filter(({event}) => event !== 'tool_execution' || !request.hasCalls)
    .map(({place}) => place);
}

/**
 * @param {RequestRow} request
 * @param {number} place Of the span.
 */
export function sliceLines(request, place) {
  const span = spansOf(request)[place];
  return spanLines(span, callOf(span, callsOf(request)));
}

/**
 * A word of a shell command.
 * @param {string} word
 */
function quoted(word) {
  return /^[\w./*=-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

/** @param {string | null} text A value that the page shortened is not the recorded one. */
function whole(text) {
  return text !== null && !/\(\d+ characters\)$/.test(text);
}

/**
 * The command that prints events; durations in the timeline are cut to its unit.
 * @param {number} s The step, by its place.
 * @param {string} name Of the process.
 * @param {[path: string, value: string | number | null][]} equal
 * @param {number} [length]
 */
function command(s, name, equal, length) {
  const {step} = steps[s];
  // What engines and ranks record may lie in the folder of the step before or after.
  const folder = name.startsWith('worker') || name.startsWith('trainer') ? String(step) : '*';
  return commandFor(folder, whole(name) ? name : '*', equal, length);
}

/**
 * The command that prints the events of files in a step's folder.
 * @param {string} step Or a star.
 * @param {string} file Without its suffix.
 * @param {[path: string, value: string | number | null][]} equal
 * @param {number} [length]
 */
export function commandFor(step, file, equal, length) {
  const known = equal.filter(([, value]) => typeof value === 'number' || whole(value));
  const conditions = known.map(([path, value]) => `${path} == ${JSON.stringify(value)}`);
  if (length !== undefined) {
    const [least, most] = [length, length + 1].map((n) => (n * timelines.unit_s).toFixed(5));
    conditions.push(`.duration_sec >= ${least}`, `.duration_sec < ${most}`);
  }
  const filter = quoted(`select(${conditions.join(' and ')})`);
  return `jq -c ${filter} step_${step}/${quoted(file)}.jsonl`;
}

/**
 * The events behind a slice of a request, or behind the whole request.
 * @param {RequestRow} request
 * @param {number} [place]
 */
function eventsOf(request, place) {
  const span = place === undefined ? null : spansOf(request)[place];
  /** @type {[string, string | number | null][]} */
  const equal = span ? [['.event', span.event]] : [];
  equal.push(['.extra.request_id', request.request_id]);
  if (span?.turn != null) equal.push(['.extra.turn', span.turn]);
  if (span?.tool && span.tool !== '(no name)') equal.push(['.extra.tool', span.tool]);
  const length = place === undefined ? undefined : request.spans[place * 4 + 3];
  return command(request.s, request.name, equal, length);
}

/**
 * The events behind what a lane draws.
 * @param {number} s
 * @param {Origin} origin
 */
function eventsOfLane(s, {event, name, role, length}) {
  if (role === 'reward_score') return command(s, '*', [['.event', event]], length);
  if (role === 'tq_get') {
    return `jq -c 'select(.event | startswith("tq_"))' step_*/*.jsonl`;
  }
  if (role === 'engine_call') {
    /** @type {[string, string][]} */
    const server = name === 'engine' ? [] : [['.extra.server', name]];
    return command(s, '*', [['.event', event], ...server], length);
  }
  return command(s, name, [['.event', event]], length);
}

/**
 * What was clicked in the timeline: its own details, and the events behind it.
 * @param {Scene} scene
 * @param {Partial<import('./timeline_painter.js').Box>} box
 */
export function sliceDetails(scene, {request, span, origin, lines}) {
  /** @type {MaybeText[]} */
  let own = [];
  let print = '';
  if (request) {
    own = span === undefined ? requestLines(request) : sliceLines(request, span);
    print = eventsOf(request, span);
  } else if (origin) {
    own = (lines?.(0) ?? []).slice(0, origin.length === undefined ? 1 : undefined);
    print = eventsOfLane(scene.s, origin);
  }
  const run = several ? ' of the run' : ` ${clean(DATA.about.runs[0])}`;
  const events = span === undefined && request ? 'all events of this request' : 'this event';
  const which = origin && origin.length === undefined ? 'the events of this lane' : events;
  const [title, ...more] = own.filter((line) => line !== null);
  return {
    text: [title, ...more].join(', '),
    node: element(
      'div',
      {},
      element('h3', {}, title),
      element('p', {class: 'facts'}, more.join(' · ')),
      element('p', {class: 'note'}, `Prints ${which}, in the directory${run}:`),
      element('pre', {tabindex: '0', 'aria-label': 'Command'}, element('code', {}, print)),
    ),
  };
}
