// Charts of the rollout: durations of requests, requests in flight, the time of turns.

import {
  canvas,
  drawn,
  EDGE,
  legend,
  rect,
  secondsAxis,
  textAt,
  timeAxis,
  valueAxis,
} from './charts.js';
import {colorOf, DATA} from './data.js';
import {element, svg, withTip} from './dom.js';
import {number, plural, seconds, ticks} from './format.js';

/**
 * Cumulative share of requests by duration.
 * @param {CdfRow[]} rows
 * @param {number} chosen
 * @param {{p50_s: Num, p80_s: Num, max_s: Num}} times
 */
export function cdfChart(rows, chosen, times) {
  const {fractions} = DATA;
  const main = /** @type {CdfRow} */ (rows.find((row) => row.s === chosen));
  const most = (times.max_s ?? 0) * 1.02 || 1;
  const label = 'Cumulative share of requests by duration; median ' + seconds(times.p50_s);
  return drawn((width) => {
    const left = 46;
    const right = width - 14;
    const top = 22;
    const height = 218;
    const bottom = height + top;
    const chart = canvas(width, bottom + 26);
    const x = (/** @type {number} */ value) => left + ((right - left) * value) / most;
    const y = (/** @type {number} */ value) => top + height * (1 - value);
    /** @param {number} part */
    const percent = (part) => `${(part * 100).toFixed(0)} %`;
    valueAxis(chart, y, [0, 0.25, 0.5, 0.75, 1], percent, {left, right});
    timeAxis(chart, x, most, {top, bottom, right});
    /** @param {CdfRow} row */
    const path = (row) =>
      row.quantiles_s
        .map((value, place) => {
          const at = `${x(value).toFixed(1)} ${y(fractions[place]).toFixed(1)}`;
          return (place ? 'L' : 'M') + at;
        })
        .join('');
    const room = {x: left, y: 0, width: right - left + 4, height: bottom + 4};
    chart.append(svg('defs', {}, svg('clipPath', {id: 'cdf-clip'}, svg('rect', room))));
    const curves = svg('g', {'clip-path': 'url(#cdf-clip)'});
    chart.append(curves);
    for (const row of rows.slice(0, 40)) {
      if (row !== main && row.s >= 0) curves.append(svg('path', {d: path(row), class: 'faint'}));
    }
    curves.append(svg('path', {d: path(main), class: 'line'}));
    /** @type {[number, string, Num][]} */
    const points = [
      [0.5, 'P50', times.p50_s],
      [0.8, 'P80', times.p80_s],
      [1, 'slowest', times.max_s],
    ];
    for (const [part, name, value] of points) {
      if (value === null) continue;
      const at = x(value);
      chart.append(svg('circle', {cx: at, cy: y(part), r: 3.5, fill: 'var(--series)'}));
      const text = `${name} ${seconds(value)}`;
      const anchor = at > width * 0.75 ? 'end' : 'start';
      if (part === 1) chart.append(textAt(right, y(1) - 8, text, 'end', 'ink'));
      else chart.append(textAt(at + 9, y(part) + 15, text, anchor, 'ink halo'));
    }
    return chart;
  }, label);
}

/**
 * How many requests are open at a time.
 * @param {FlightRow} row
 * @param {StepRow} step
 */
export function flightChart(row, step) {
  const counts = dense(row.counts, 160);
  const {spread_s: spread, most} = row;
  const label = `Requests in flight: at most ${most}, ${row.mean.toFixed(1)} on average`;
  return drawn((width) => {
    const left = 46;
    const right = width - 14;
    const top = 40;
    const height = 200;
    const bottom = height + top;
    const chart = canvas(width, bottom + 26);
    const until = step.gen_s !== null && step.poll_s !== null ? spread + step.poll_s : spread;
    const x = (/** @type {number} */ value) => left + ((right - left) * value) / (until || 1);
    const y = (/** @type {number} */ value) => top + height * (1 - value / (most * 1.05));
    valueAxis(chart, y, ticks(0, most, 4).filter(Number.isInteger), number, {left, right});
    timeAxis(chart, x, until, {top, bottom, right});
    const outline = area(counts, (place) => x((spread * place) / counts.length), y);
    chart.append(svg('path', {d: outline, fill: 'var(--bar)', stroke: 'none'}));
    /** @type {[number, string][]} */
    const marks = [];
    if (step.after_p80_s !== null) marks.push([spread - step.after_p80_s, '80 % done']);
    if (step.poll_s !== null) marks.push([spread, 'last done']);
    // The second label stands above the first, so that neither meets the other's line.
    marks.forEach(([at, name], place) => {
      const high = place === marks.length - 1;
      const y1 = high ? 4 : 22;
      chart.append(svg('line', {x1: x(at), x2: x(at), y1, y2: bottom, class: 'mark'}));
      chart.append(textAt(x(at) - 6, y1 + 10, name, 'end', 'ink halo'));
    });
    const title = `from ${seconds(row.begin_s)} after step start`;
    chart.append(svg('title', {}, title));
    return chart;
  }, label);
}

/**
 * The highest count of every part, from those in which something changed.
 * @param {Counts} counts
 * @param {number} parts
 */
export function dense(counts, parts) {
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

/**
 * The outline of a step function.
 * @param {number[]} values
 * @param {(place: number) => number} x
 * @param {(value: number) => number} y
 */
function area(values, x, y) {
  const steps = values.map((value, place) => `V${y(value).toFixed(1)}H${x(place + 1).toFixed(1)}`);
  return `M${x(0).toFixed(1)} ${y(0).toFixed(1)}${steps.join('')}V${y(0).toFixed(1)}Z`;
}

const TURN_PARTS = /** @type {const} */ ([
  {name: 'engine', key: 'engine_s'},
  {name: 'tool', key: 'tool_s'},
  {name: 'tool_parsing', key: 'tool_parsing_s'},
  {name: 'token_merge', key: 'token_merge_s'},
  {name: 'other', key: 'other_s'},
]);

/**
 * A standing bar per turn, cut into its parts.
 * @param {TurnTimesRow[]} rows
 */
export function turnsChart(rows) {
  const parts = TURN_PARTS.filter(({key}) => rows.some((row) => (row[key] ?? 0) > 0));
  const most = Math.max(...rows.map((row) => row.mean_s || 0), 1e-9);
  const chart = drawn((width) => {
    const left = 56;
    const height = 190;
    const room = Math.min(90, (width - left) / rows.length);
    const wide = room * 0.72;
    const made = canvas(width, height + 34);
    const y = (/** @type {number} */ value) => 8 + (height - 8) * (1 - value / most);
    secondsAxis(made, y, most, {left, right: width});
    const every = Math.ceil(30 / room);
    rows.forEach((row, place) => {
      const x = left + place * room + room * 0.14;
      const group = svg('g');
      let from = 0;
      for (const {name, key} of parts) {
        const value = row[key];
        if (value === null || value <= 0) continue;
        const top = y(from + value);
        group.append(rect(x, top, wide, y(from) - top, colorOf(name), EDGE));
        from += value;
      }
      if (from === 0 && row.mean_s) {
        group.append(rect(x, y(row.mean_s), wide, y(0) - y(row.mean_s), 'var(--line)'));
      }
      const lines = [
        `turn ${row.turn}`,
        `${plural(row.turns, 'turn')}, mean ${seconds(row.mean_s)}`,
        parts.map(({name, key}) => `${name} ${seconds(row[key])}`).join(', '),
      ];
      made.append(withTip(group, lines));
      if (place % every === 0) {
        made.append(textAt(x + wide / 2, height + 16, String(row.turn), 'middle'));
      }
    });
    made.append(textAt(left, height + 31, 'turn', 'start'));
    return made;
  }, 'Mean time of a turn by its index');
  return element('div', {}, legend(parts), chart);
}
