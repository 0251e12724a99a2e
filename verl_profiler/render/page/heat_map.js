// Worker by step: how long after the median worker each one ended.

import {heading, note} from './blocks.js';
import {canvas, drawn, rect, textAt} from './charts.js';
import {DATA, steps} from './data.js';
import {withTip} from './dom.js';
import {clean, number, plural, seconds, shorten} from './format.js';

const ROW = 13;
const LEFT = 132;

/** @param {(step: number) => void} choose Shows a step. */
export function heatMap(choose) {
  const map = DATA.worker_heat;
  if (!map) return [];
  const {columns, cells, workers, others} = map;
  const most = Math.max(1e-9, ...cells.flat().map((cell) => cell?.[0] ?? 0));
  /** @param {number} place */
  const label = (place) => clean(steps[place].label);
  /** @param {number} row */
  const name = (row) => (row < workers.length ? clean(workers[row]) : `${number(others)} others`);
  const shared = columns.some(([first, last]) => first !== last);
  /** @param {number} width */
  const draw = (width) => {
    const room = (width - LEFT - 4) / columns.length;
    const chart = canvas(width, cells.length * ROW + 24);
    cells.forEach((line, row) => {
      chart.append(textAt(LEFT - 8, row * ROW + 10, shorten(name(row), 18), 'end', 'ink'));
      line.forEach((cell, column) => {
        if (!cell) return;
        const [behind_s, place] = cell;
        const box = rect(
          LEFT + column * room,
          row * ROW,
          Math.max(room - 0.5, 0.7),
          ROW - 1,
          color(behind_s / most),
        );
        const tip = [
          `${row < workers.length ? name(row) : `latest of ${name(row)}`}, step ${label(place)}`,
          behind_s > 0
            ? `${seconds(behind_s)} after the median worker`
            : `${seconds(-behind_s)} before the median worker`,
          shared
            ? `the latest of steps ${label(columns[column][0])} to ${label(columns[column][1])}`
            : null,
        ];
        box.addEventListener('click', () => choose(place));
        chart.append(withTip(box, tip));
      });
    });
    const every = Math.max(1, Math.ceil(56 / room));
    columns.forEach(([first], column) => {
      if (column % every) return;
      chart.append(
        textAt(LEFT + column * room, cells.length * ROW + 14, shorten(label(first), 8), 'start'),
      );
    });
    return chart;
  };
  const last = workers[0];
  const text =
    `Map of ${plural(workers.length + others, 'worker')} and ${plural(columns.length, 'column')} of steps; ` +
    `${clean(last)} ended last most often. The table “Last agent-loop worker by step” has the same.`;
  return [
    heading('Agent-loop workers by step'),
    drawn(draw, text),
    note(
      `Darker: up to ${seconds(most)} after the step’s median worker. From the worker that ends latest down` +
        (others ? `; the last row has the latest of the other ${number(others)}` : '') +
        (shared ? '; a column has the latest of its steps' : '') +
        '. A click shows the step.',
    ),
  ];
}

/** @param {number} part From 0 to 1; early workers are as pale as those in the middle. */
function color(part) {
  const strength = Math.round(8 + 92 * Math.sqrt(Math.max(0, part)));
  return `color-mix(in srgb, var(--accent) ${strength}%, var(--surface))`;
}
