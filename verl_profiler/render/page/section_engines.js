// The calls of each engine in lanes, and below them its batch, queue and KV cache, over the same time.

import {about, heading, nothing, notesOf} from './blocks.js';
import {canvas, drawn, legend, rect, textAt, timeAxis} from './charts.js';
import {colorOf, DATA, tableOf} from './data.js';
import {svg, withTip} from './dom.js';
import {clean, plural, seconds, share} from './format.js';

const LEFT = 96;
const LOAD = 84;
const GAP = 14;

/** @typedef {{key: 'running_requests' | 'waiting_requests', color: string}} Curve */

export function enginesSection() {
  const lanes = tableOf('engine_lanes');
  if (!lanes.length) return nothing('engine_lanes', false, 'generate calls inside an engine');
  const readings = tableOf('engine_load_over_time');
  const parts = Object.keys(DATA.call_parts).filter((part) =>
    lanes.some((row) => lengthOf(row, part) > 0),
  );
  const until = Math.max(
    ...lanes.map((row) => endOf(row, parts)),
    ...readings.map((row) => row.at_s),
  );
  const names = [...new Set(lanes.map((row) => row.name))].sort((a, b) =>
    a.localeCompare(b, 'en', {numeric: true}),
  );
  return [
    about(
      'What each engine served: a line per generate call, in the lowest free lane, from its arrival. ' +
        'Below: requests in the batch and in the queue, shaded: KV cache in use, triangles: retracted calls.',
    ),
    legend([
      ...parts.map((part) => ({name: DATA.call_parts[part], color: colorOf(`call:${part}`)})),
      ...CURVES.map(({key, color}) => ({name: key.replace('_', ' '), color})),
      {name: 'KV cache in use', color: 'var(--line)'},
    ]),
    ...names.flatMap((name) => {
      const calls = lanes.filter((row) => row.name === name);
      const own = readings.filter((row) => row.name === name);
      return [
        heading(clean(name)),
        drawn(
          (width) => chart(width, calls, own, parts, until),
          `${plural(calls.length, 'generate call')} and ${plural(own.length, 'reading')} of ${clean(name)}`,
        ),
      ];
    }),
    ...notesOf('engine_lanes'),
  ];
}

/** @type {Curve[]} */
const CURVES = [
  {key: 'running_requests', color: colorOf('decode')},
  {key: 'waiting_requests', color: colorOf('queue')},
];

/**
 * @param {LaneRow} row
 * @param {string} part
 */
function lengthOf(row, part) {
  return /** @type {Record<string, number>} */ (/** @type {any} */ (row))[`${part}_s`] ?? 0;
}

/**
 * @param {LaneRow} row
 * @param {string[]} parts
 */
function endOf(row, parts) {
  return parts.reduce((sum, part) => sum + lengthOf(row, part), row.begin_s);
}

/**
 * @param {number} width
 * @param {LaneRow[]} calls
 * @param {ReadingRow[]} readings
 * @param {string[]} parts
 * @param {number} until
 */
function chart(width, calls, readings, parts, until) {
  const right = width - 14;
  const many = Math.max(...calls.map((row) => row.lane)) + 1;
  const high = Math.max(2, Math.min(12, 220 / many));
  const top = many * high + GAP;
  const bottom = top + LOAD;
  const all = canvas(width, bottom + 26);
  const x = (/** @type {number} */ value) => LEFT + ((right - LEFT) * value) / (until || 1);
  timeAxis(all, x, until, {top: 0, bottom, right});
  all.append(textAt(LEFT - 8, (many * high) / 2 + 4, plural(many, 'lane'), 'end', 'ink'));
  for (const row of calls) {
    const group = svg('g', {});
    let from = row.begin_s;
    for (const part of parts) {
      const length = lengthOf(row, part);
      const wide = x(from + length) - x(from);
      const color = colorOf(`call:${part}`);
      if (length > 0) group.append(rect(x(from), row.lane * high, wide, high * 0.85, color, {}));
      from += length;
    }
    all.append(withTip(group, lines(row, parts)));
  }
  drawLoad(all, x, readings, until, {top, bottom});
  for (const row of calls) {
    if (!row.retractions) continue;
    const at = x(row.begin_s);
    const points = `${at - 4},${bottom} ${at + 4},${bottom} ${at},${bottom - 8}`;
    const mark = svg('polygon', {points, fill: colorOf('call:recomputed')});
    all.append(withTip(mark, lines(row, parts)));
  }
  return all;
}

/**
 * @param {SVGElement} all
 * @param {import('./charts.js').Scale} x
 * @param {ReadingRow[]} readings
 * @param {number} until
 * @param {{top: number, bottom: number}} box
 */
function drawLoad(all, x, readings, until, {top, bottom}) {
  if (!readings.length) {
    const how = 'no readings: profiler.events.engine_state=true';
    all.append(textAt(LEFT, (top + bottom) / 2, how, 'start'));
    return;
  }
  const most = Math.max(
    1,
    ...readings.flatMap((row) => [row.running_requests ?? 0, row.waiting_requests ?? 0]),
  );
  const y = (/** @type {number} */ part) => bottom - (bottom - top) * part;
  all.append(textAt(LEFT - 8, top + 10, `up to ${most}`, 'end'));
  all.append(textAt(LEFT - 8, (top + bottom) / 2 + 4, 'requests', 'end', 'ink'));
  for (const rank of new Set(readings.map((row) => row.dp_rank))) {
    const own = readings.filter((row) => row.dp_rank === rank);
    const ends = own.map((row, place) => own[place + 1]?.at_s ?? Math.max(until, row.at_s));
    own.forEach((row, place) => {
      if (!row.kv_share) return;
      const wide = x(ends[place]) - x(row.at_s);
      const tall = bottom - y(row.kv_share);
      const area = rect(x(row.at_s), y(row.kv_share), wide, tall, 'var(--line)', {});
      all.append(withTip(area, [`KV cache ${share(row.kv_share)}`, seconds(row.at_s)]));
    });
    for (const {key, color} of CURVES) {
      const points = own.flatMap((row, place) => {
        const value = row[key];
        if (value === null) return [];
        const at = y(value / most);
        return [`${x(row.at_s)},${at}`, `${x(ends[place])},${at}`];
      });
      all.append(
        svg('polyline', {
          points: points.join(' '),
          fill: 'none',
          stroke: color,
          'stroke-width': 1.5,
        }),
      );
    }
  }
}

/**
 * @param {LaneRow} row
 * @param {string[]} parts
 */
function lines(row, parts) {
  return [
    `request ${clean(row.request_id ?? '')}, turn ${row.turn ?? ''}`,
    ...parts
      .filter((part) => lengthOf(row, part) > 0)
      .map((part) => `${seconds(lengthOf(row, part))} ${DATA.call_parts[part]}`),
    ...(row.retractions ? [`retracted ${plural(row.retractions, 'time')}`] : []),
  ];
}
