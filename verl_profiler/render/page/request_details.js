// All requests of a step, from a script beside the page that is loaded when someone wants them.

import {DATA, requests, timelines, unpack} from './data.js';
import {plainText} from './unpack.js';

/** @typedef {{key: string, s: number, packed: string}} Details */

/** @type {Map<number, 'loading' | 'there'>} */
const states = new Map();

/** @param {number} step Its place. */
export function hasDetails(step) {
  return Boolean(DATA.details && DATA.details.files[step]) && !states.has(step);
}

/**
 * Load the requests of a step.
 * @param {number} step Its place.
 * @returns {Promise<string>} What went wrong; an empty text where nothing did.
 */
export async function loadDetails(step) {
  const {details} = DATA;
  if (!details) return '';
  states.set(step, 'loading');
  const file = `${details.folder}/${details.files[step]}`;
  /** @type {Details | undefined} */
  let given;
  Object.assign(window, {
    verlProfilerDetails: (/** @type {Details} */ content) => {
      given = content;
    },
  });
  const script = document.createElement('script');
  script.src = file;
  const came = await new Promise((resolve) => {
    script.addEventListener('load', () => resolve(true));
    script.addEventListener('error', () => resolve(false));
    document.body.append(script);
  });
  script.remove();
  if (!came || !given) {
    states.delete(step);
    return `${decodeURIComponent(file)} cannot be loaded. Keep the folder beside the report.`;
  }
  if (given.key !== details.key || given.s !== step) {
    states.delete(step);
    return `${decodeURIComponent(file)} belongs to another report. Write the report again with --details.`;
  }
  add(step, JSON.parse(await plainText(given.packed)));
  states.set(step, 'there');
  return '';
}

/**
 * @param {number} step
 * @param {Pick<Timelines, 'names' | 'requests'>} content
 */
function add(step, content) {
  const known = new Map(timelines.names.map((name, place) => [JSON.stringify(name), place]));
  const codes = content.names.map((name) => {
    const text = JSON.stringify(name);
    const place = known.get(text) ?? timelines.names.push(name) - 1;
    known.set(text, place);
    return place;
  });
  const {servers} = timelines.requests;
  const places = content.requests.servers.map((server) => {
    const place = servers.indexOf(server);
    return place < 0 ? servers.push(server) - 1 : place;
  });
  /** @param {DrawnRequest} row */
  const identity = (row) => JSON.stringify([row.name, row.request_id, row.sample, row.session]);
  const there = new Set(requests.filter((row) => row.s === step && !row.validate).map(identity));
  unpack(content.requests).forEach((request, place) => {
    if (there.has(identity(request))) return;
    const spans = content.requests.spans[place];
    for (let at = 0; at < spans.length; at += 4) spans[at] = codes[spans[at]];
    const calls = content.requests.calls[place];
    for (const call of calls) if (typeof call[3] === 'number') call[3] = places[call[3]];
    requests.push({...request, spans, calls, hasCalls: request.tool_calls > 0});
  });
  for (const scene of timelines.scenes) {
    if (scene.s !== step || scene.validate) continue;
    for (const lane of scene.lanes) if (lane.kind === 'requests') lane.drawn = lane.of;
  }
}
