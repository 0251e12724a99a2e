// The time of a step as an icicle: phases, components of requests, tools; what lies below a bar
// adds up to it.

import {note} from './blocks.js';
import {block} from './charts.js';
import {colorOf, DATA, shown, shownName, unpack} from './data.js';
import {element, withTip} from './dom.js';
import {clean, seconds, share, shorten} from './format.js';

/** @typedef {TreeRow & {depth: number, name: string, begin: number, end: number}} Block */

const ROW = 27;
const LEVELS = ['step', 'phase', 'request component', 'tool'];

/**
 * Rows come in preorder: each begins where what lies before it, on its level, has ended.
 * @param {TreeRow[]} rows
 * @returns {Block[]}
 */
function blocksOf(rows) {
  const ends = [0, 0, 0, 0];
  return rows.map((row) => {
    const depth = row.phase === null ? 0 : row.component === null ? 1 : row.tool === null ? 2 : 3;
    const begin = ends[depth];
    const end = begin + row.duration_s;
    ends[depth] = end;
    for (let below = depth + 1; below < ends.length; below++) ends[below] = begin;
    const name = row.tool ?? row.component ?? row.phase ?? shownName();
    return {...row, depth, name, begin, end};
  });
}

/** @param {Block} block */
function colorOfBlock({depth, name}) {
  if (!depth) return '#8FA3BF';
  if (name === 'idle slots' || name === 'unaccounted') return '#C9CED4';
  return colorOf(depth === 3 && name !== 'other' ? 'tool' : name);
}

/** The icicle of what is shown; nothing where no step has finished. */
export function icicle() {
  const rows = unpack(DATA.time_tree).filter((row) => row.s === shown.step);
  if (!rows.length) return [];
  const blocks = blocksOf(rows);
  const whole = blocks[0].duration_s;
  const chart = element('div', {
    class: 'track',
    id: 'icicle',
    role: 'group',
    'aria-label': 'Icicle',
  });
  const wide = blocks.filter((each) => each.duration_s > whole / 2_000);
  chart.append(...wide.map((each) => bar(each, whole)));
  chart.style.height = `${(Math.max(...blocks.map((each) => each.depth)) + 1) * ROW}px`;
  return [
    element('h3', {}, `Step time by phase, component and tool, ${shownName()}`),
    chart,
    note(
      'The bars below a bar add up to it. Requests run concurrently: a component is its request time ' +
        'divided by the max concurrency of the step; idle slots are the rest of gen.',
    ),
  ];
}

/**
 * @param {Block} of
 * @param {number} whole
 */
function bar(of, whole) {
  const {begin, depth, duration_s, phase, component, tool} = of;
  const [name, time, part] = [clean(of.name), seconds(duration_s), share(duration_s / whole)];
  const words = [shorten(of.name, 60), time];
  const made = block({begin, length: duration_s, whole, fill: colorOfBlock(of), words});
  made.role = 'img';
  made.ariaLabel = `${name} ${time}, ${LEVELS[depth]}, ${part}`;
  made.style.top = `${depth * ROW}px`;
  const path = [phase, component, tool].filter((each) => each !== null).join(' › ');
  return withTip(made, [clean(path) || name, `${time} · ${part}`]);
}
