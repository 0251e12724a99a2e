// The time of a step as an icicle: phases, components of requests, tools; what lies below a bar
// adds up to it.

import {note} from './blocks.js';
import {canvas, drawn, EDGE, fitting, onClass, rect, textAt} from './charts.js';
import {ALL, colorOf, shown, shownName, shownRows, shownStep} from './data.js';
import {element, rove, svg, withTip} from './dom.js';
import {clean, seconds, share, shorten} from './format.js';
import {commandFor} from './slice.js';
import {table} from './table.js';

/** @typedef {TreeRow & {depth: number, name: string, begin: number, end: number}} Block */

const ROW = 27;
/** What no event covers. */
const LEFT = ['unaccounted', 'idle slots', 'other'];
const LEVELS = ['step', 'phase', 'request component', 'tool'];
/** @type {Record<string, string>} */
const EVENTS = {engine: 'engine_call', tool: 'tool_call'};

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

/**
 * The command that prints the events behind a block; null where no event is.
 * @param {Block} block
 */
function eventsOf({phase, component, tool, depth, name}) {
  if (LEFT.includes(name)) return null;
  const step = shown.step === ALL ? '*' : String(shownStep().step);
  if (!depth) return commandFor(step, 'trainer_*', [['.event', 'step']]);
  if (component === null) return commandFor(step, 'trainer_*', [['.event', phase]]);
  /** @type {[string, string | null][]} */
  const equal = [['.event', EVENTS[component] ?? component]];
  if (tool !== null && tool !== '(no name)') equal.push(['.extra.tool', tool]);
  return commandFor(step, 'worker_*', equal);
}

/** The icicle of what is shown; nothing where no step has finished. */
export function icicle() {
  const rows = shownRows('time_tree');
  if (!rows.length) return [];
  const blocks = blocksOf(rows);
  const whole = blocks[0].duration_s;
  const details = element('div', {id: 'icicle-events', 'aria-live': 'polite'});
  const chart = drawn((width) => {
    const depths = Math.max(...blocks.map((block) => block.depth)) + 1;
    const made = canvas(width, depths * ROW);
    const x = (/** @type {number} */ time) => (width * time) / whole;
    /** @type {SVGElement[]} */
    const items = [];
    for (const block of blocks) {
      const wide = x(block.end) - x(block.begin);
      if (wide < 0.5) continue;
      const item = bar(block, x(block.begin), wide, whole, details);
      items.push(item);
      made.append(item);
    }
    rove(items, 0);
    made.setAttribute('role', 'group');
    made.setAttribute('aria-label', 'Icicle; arrow keys move, Enter shows the events');
    return made;
  });
  const caption = 'Step time by phase, component and tool';
  return [
    element('h3', {}, `${caption}, ${shownName()}`),
    element('div', {class: 'icicle', id: 'icicle'}, chart),
    details,
    note(
      'The bars below a bar add up to it. Requests run concurrently: a component is its request time ' +
        'divided by the max concurrency of the step; idle slots are the rest of gen.',
    ),
    element(
      'details',
      {},
      element('summary', {}, 'As a table'),
      table({
        caption,
        rows: blocks.map((block) => ({...block, level: LEVELS[block.depth]})),
        limit: 40,
        columns: [
          ['name', 'name', 'text'],
          ['level', 'level', 'text'],
          ['duration_s', 'time', 's', {bar: true}],
        ],
      }),
    ),
  ];
}

/**
 * @param {Block} block
 * @param {number} left
 * @param {number} wide
 * @param {number} whole
 * @param {HTMLElement} details
 */
function bar(block, left, wide, whole, details) {
  const fill = colorOfBlock(block);
  const time = seconds(block.duration_s);
  const name = clean(block.name);
  const group = svg('g', {
    class: 'pick',
    role: 'button',
    'aria-label': `${name} ${time}, ${LEVELS[block.depth]}, ${share(block.duration_s / whole)}`,
  });
  const top = block.depth * ROW;
  group.append(rect(left, top, Math.max(wide - 1, 0.5), ROW - 3, fill, EDGE));
  const text = fitting([`${shorten(name, 60)} ${time}`, shorten(name, 60)], wide - 10);
  if (text) group.append(textAt(left + 5, top + 16, text, 'start', onClass(fill)));
  const show = () => {
    const command = eventsOf(block);
    details.replaceChildren(
      element('p', {class: 'facts'}, `${name}: ${time}, ${share(block.duration_s / whole)} of all`),
      command
        ? element('pre', {tabindex: '0', 'aria-label': 'Command'}, command)
        : note('No event covers this time; it is the remainder.'),
    );
  };
  group.addEventListener('click', show);
  group.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' && event.key !== ' ') return;
    event.preventDefault();
    show();
  });
  const of = [block.phase, block.component, block.tool].filter((part) => part !== null);
  const lines = [of.join(' › ') || name, `${time} · ${share(block.duration_s / whole)}`];
  return withTip(group, lines.map(clean));
}
