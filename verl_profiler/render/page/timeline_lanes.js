// The lanes of a timeline: spans and requests put into rows in which nothing overlaps.

import {requests, timelines} from './data.js';
import {number, plural} from './format.js';

/** How many values a lane of counts has. */
export const COUNTS = 160;
export const LANE_GAP = 7;
const SPAN_ROW = 17;
const COUNT_ROW = 34;
/** From so many on, workers that end last and engines with the most requests at once come first. */
const MANY = 12;

/**
 * @typedef {object} Place Where a lane is, in pixels from the top, and how high its rows are.
 * @property {number} top
 * @property {number} height
 * @property {number} row
 * @property {string} second The second line of its label.
 *
 * @typedef {SpansLane & Place & {rows: PackedSpan[][]}} PlacedSpans
 * @typedef {RequestsLane & Place & {rows: RequestRow[][]}} PlacedRequests
 * @typedef {CountLane & Place & {values: number[]}} PlacedCounts
 * @typedef {PlacedSpans | PlacedRequests | PlacedCounts} PlacedLane
 */

/**
 * @param {Scene} scene
 * @returns {{lanes: PlacedLane[], height: number}}
 */
export function placeLanes(scene) {
  const drawn = requestsOf(scene);
  const place = {top: 0, height: 0, row: SPAN_ROW};
  /** @type {PlacedLane[]} */
  const all = scene.lanes.map((lane) => {
    const second = secondLine(lane);
    if (lane.kind === 'requests') {
      const own = drawn.filter((request) => request.name === lane.name);
      return {...lane, ...place, second, rows: rowsOfRequests(own)};
    }
    if (lane.kind === 'spans') return {...lane, ...place, second, rows: nested(lane.spans)};
    return {...lane, ...place, second, values: dense(lane.counts, COUNTS)};
  });
  const workers = all.filter(isWorker);
  const engines = all.filter(isEngine);
  if (workers.length > MANY) workers.sort((a, b) => b.last - a.last);
  if (engines.length > MANY) engines.sort((a, b) => b.most - a.most);
  // In the places that lanes of their kind have.
  const lanes = all.map((lane) =>
    isWorker(lane)
      ? /** @type {PlacedLane} */ (workers.shift())
      : isEngine(lane)
        ? /** @type {PlacedLane} */ (engines.shift())
        : lane,
  );
  let requestRows = 0;
  for (const lane of lanes) if (lane.kind === 'requests') requestRows += lane.rows.length;
  const requestRow = requestRows <= 40 ? 13 : requestRows <= 110 ? 9 : 6;
  let y = 4;
  for (const lane of lanes) {
    lane.top = y;
    if (lane.kind === 'requests') lane.row = requestRow;
    const height = lane.kind === 'count' ? COUNT_ROW : Math.max(1, lane.rows.length) * lane.row;
    // Room for one line of text beside each lane, or for two.
    lane.height = Math.max(height, lane.second ? 30 : 17);
    y += lane.height + LANE_GAP;
  }
  return {lanes, height: y};
}

/**
 * @param {PlacedLane} lane
 * @returns {lane is PlacedRequests}
 */
function isWorker(lane) {
  return lane.kind === 'requests';
}

/**
 * @param {PlacedLane} lane
 * @returns {lane is PlacedCounts}
 */
function isEngine(lane) {
  return lane.kind === 'count' && lane.role.startsWith('engine');
}

/**
 * The requests that are drawn in a timeline.
 * @param {Scene} scene
 */
export function requestsOf(scene) {
  const place = timelines.scenes.indexOf(scene);
  return requests.filter((request) => request.scene === place);
}

/**
 * Each request in the first row that is free when it begins.
 * @param {RequestRow[]} those
 */
function rowsOfRequests(those) {
  /** @type {RequestRow[][]} */
  const rows = [];
  /** @type {number[]} */
  const ends = [];
  for (const request of those.slice().sort((a, b) => a.begin - b.begin)) {
    let row = ends.findIndex((end) => end <= request.begin);
    if (row < 0) {
      row = rows.length;
      rows.push([]);
    }
    ends[row] = request.begin + request.length;
    rows[row].push(request);
  }
  return rows;
}

/**
 * Each span below the one that contains it, at most three deep.
 * @param {PackedSpan[]} spans
 */
function nested(spans) {
  /** @type {PackedSpan[][]} */
  const rows = [];
  /** @type {number[]} */
  const open = [];
  for (const span of spans.slice().sort((a, b) => a[1] - b[1] || b[2] - a[2])) {
    while (open.length && open[open.length - 1] <= span[1]) open.pop();
    const depth = Math.min(open.length, 3);
    open.push(span[1] + span[2]);
    if (!rows[depth]) rows[depth] = [];
    rows[depth].push(span);
  }
  return rows;
}

/** @param {Lane} lane */
function secondLine(lane) {
  const shown = lane.role_of
    ? `${number(lane.role_of[0])} of ${number(lane.role_of[1])} shown`
    : '';
  if (lane.kind === 'count') {
    const most = `up to ${number(lane.most)} at once`;
    return shown && lane.role.startsWith('engine') ? `${most}, ${shown}` : most;
  }
  if (lane.kind === 'requests') {
    return lane.drawn < lane.of
      ? `${number(lane.drawn)} of ${number(lane.of)} requests`
      : plural(lane.of, 'request');
  }
  if (lane.of > lane.spans.length) return `longest ${lane.spans.length} of ${number(lane.of)}`;
  return shown;
}

/**
 * The highest count of every part, from those in which something changed.
 * @param {Counts} counts
 * @param {number} parts
 */
function dense(counts, parts) {
  const values = new Array(parts).fill(0);
  let open = 0;
  let next = 0;
  for (let part = 0; part < parts; part++) {
    if (counts[next]?.[0] === part) {
      values[part] = Math.max(open, counts[next][1]);
      open = counts[next][2];
      next++;
    } else values[part] = open;
  }
  return /** @type {number[]} */ (values);
}
