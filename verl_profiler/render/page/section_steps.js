// The steps.

import {about, note, notesOf, nothing} from './blocks.js';
import {shown, steps, trained} from './data.js';
import {NONE, quantile, seconds} from './format.js';
import {icicle} from './icicle.js';
import {table} from './table.js';

/**
 * The tail of a step; asynchronous training has no rollout of a step, and so no tail.
 * @param {StepRow} row
 */
function tail(row) {
  return row.spread_s === null ? NONE : quantile(row.after_p80_s, row);
}

/** @param {(step: number) => void} choose */
export function stepsSection(choose) {
  if (!trained.length) return nothing('steps', false, 'steps');
  const start = steps.find((step) => step.step === 0 && !step.finished);
  const validation = start?.validation_requests ? ' and validation' : '';
  return [
    about('Select a step, here or in a chart, to show it in the timeline and in all tables.'),
    ...notesOf('steps'),
    ...icicle(),
    table({
      caption: 'Steps',
      rows: trained,
      limit: 20,
      onRow: (row) => choose(row.s),
      selected: (row) => row.s === shown.step,
      label: (row) => `Show step ${row.label}`,
      columns: [
        ['label', 'step', 'text'],
        ['duration_s', 'time', 's'],
        ['gen_s', 'gen', 's', {title: 'The rollout, measured in the trainer'}],
        ['longest_phase', 'longest phase', 'text', {swatch: true}],
        ['longest_share', 'its share', 'share'],
        [
          'unaccounted_s',
          'unaccounted',
          's',
          {title: 'Time of the step that no timer of verl covers'},
        ],
        ['requests', 'requests', 'n'],
        ['p50_s', 'P50', 's', {title: 'Median request duration'}],
        ['p95_s', 'P95', 'q'],
        ['max_s', 'slowest', 's'],
        [
          'after_p80_s',
          'tail',
          's',
          {title: 'From the end of 80 % of the requests to the last', show: tail},
        ],
        [
          'poll_s',
          'after last',
          's',
          {title: 'From the end of the last request to the end of gen'},
        ],
        [
          'generated_tokens_per_s',
          'generated tokens/s',
          'n',
          {title: 'Generated tokens of finished requests, divided by the step duration'},
        ],
        [
          'engine_tokens_per_s',
          'engine tokens/s',
          'n',
          {
            title:
              'Generated tokens of engine calls, divided by the time with at least one in progress',
          },
        ],
      ],
    }),
    start?.seen_s
      ? note(`Before the first step: ${seconds(start.seen_s)} of start-up${validation}.`)
      : null,
  ];
}
