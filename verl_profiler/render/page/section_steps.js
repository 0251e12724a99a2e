// The steps.

import {about, note} from './blocks.js';
import {DATA, shown, steps, trained} from './data.js';
import {seconds} from './format.js';
import {icicle} from './icicle.js';
import {columnsOf, table} from './table.js';

/** @param {(step: number) => void} choose */
export function stepsSection(choose) {
  if (!trained.length) return [about('No steps were recorded.')];
  const start = steps.find((step) => step.step === 0 && !step.finished);
  const validation = start?.validation_requests ? ' and validation' : '';
  return [
    about('Select a step, here or in a chart, to show it in the timeline and in all tables.'),
    ...icicle(),
    table({
      caption: 'Steps',
      rows: trained,
      limit: 20,
      onRow: (row) => choose(row.s),
      selected: (row) => row.s === shown.step,
      label: (row) => `Show step ${row.label}`,
      columns: [['label', 'step', 'text'], ...columnsOf(DATA.columns.steps, trained)],
    }),
    start?.seen_s
      ? note(`Before the first step: ${seconds(start.seen_s)} of start-up${validation}.`)
      : null,
  ];
}
