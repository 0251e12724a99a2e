// Nsight and torch captures: which there are, and what exports of them hold.

import {about, heading, note} from './blocks.js';
import {labeledRows, shownName} from './data.js';
import {clean, number, plural, share} from './format.js';
import {table} from './table.js';

/** @typedef {import('./table.js').Column<{label: string, name: string}>} Column */
/** @type {Column} */
const STEP = ['label', 'step', 'text'];
/** @type {Column} */
const PROCESS = ['name', 'process', 'text'];

/**
 * A column that is there only with values in it.
 * @template Row
 * @param {Row[]} rows
 * @param {import('./table.js').Column<Row>} column
 */
function optional(rows, column) {
  return rows.some((row) => row[column[0]]) ? [column] : [];
}

export function capturesSection() {
  const rows = labeledRows('captures');
  if (!rows.length) return [about(`Nothing was captured in ${shownName()}.`)];
  const gathered = rows.filter((row) => row.file && !row.problem).length;
  return [
    about(
      `${number(gathered)} of ${plural(rows.length, 'capture')} gathered in ${shownName()}. ` +
        contents(),
    ),
    table({
      caption: 'Captures',
      rows,
      limit: 12,
      columns: [
        STEP,
        PROCESS,
        ...optional(rows, ['task', 'task', 'text']),
        ['tool', 'tool', 'text'],
        ['duration_s', 'captured', 's'],
        ['file', 'file in nsight/', 'text'],
        ['size_bytes', 'size', 'bytes'],
        ...optional(rows, ['problem', 'problem', 'text']),
      ],
    }),
    ...idleGpus(),
    ...kernels(),
    ...ranges(),
  ];
}

function contents() {
  const idle = labeledRows('gpu_idle');
  if (!idle.length) {
    return labeledRows('range_times').length || labeledRows('top_kernels').length
      ? 'No export contains GPU work.'
      : 'Run verl-profiler collect --export to read their contents.';
  }
  const busiest = idle.reduce((most, row) => (row.busy_s > most.busy_s ? row : most));
  return (
    `GPU ${clean(busiest.gpu)} of ${clean(busiest.host || 'its host')} was idle for ` +
    `${share(busiest.idle_share)} of step ${clean(busiest.label)}, as far as captured processes ` +
    'used it.'
  );
}

function idleGpus() {
  const rows = labeledRows('gpu_idle');
  if (!rows.length) return [];
  return [
    heading('Idle GPUs'),
    note('A GPU used by a process without a capture appears idle here.'),
    table({
      caption: 'Idle GPUs',
      rows,
      limit: 12,
      columns: [
        ['label', 'step', 'text'],
        ['host', 'host', 'text'],
        ['gpu', 'GPU', 'text'],
        ['processes', 'captured processes', 'text'],
        ['captured_s', 'captured', 's'],
        ['busy_s', 'busy', 's', {bar: true}],
        ['idle_share', 'idle', 'share'],
        ['gen_idle_share', 'idle in gen', 'share'],
      ],
    }),
  ];
}

function kernels() {
  const rows = labeledRows('top_kernels');
  if (!rows.length) return [];
  return [
    heading('Kernels'),
    table({
      caption: 'Kernels',
      rows,
      limit: 12,
      columns: [
        STEP,
        PROCESS,
        ['kernel', 'kernel', 'text'],
        ['launches', 'launches', 'n'],
        ['total_s', 'all', 's', {bar: true}],
        ['max_s', 'longest', 's'],
        ['share', 'of its GPU work', 'share'],
      ],
    }),
  ];
}

function ranges() {
  const rows = labeledRows('range_times');
  if (!rows.length) return [];
  return [
    heading('Ranges'),
    note(
      'GPU work is attributed to the range that launched it, even if it ran later. ' +
        'Ranges of coroutines overlap.',
    ),
    table({
      caption: 'Ranges',
      rows,
      limit: 16,
      columns: [
        STEP,
        PROCESS,
        ['domain', 'domain', 'text'],
        ['event', 'range', 'text'],
        ['ranges', 'ranges', 'n'],
        ['total_s', 'all', 's', {bar: true}],
        ['max_s', 'longest', 's'],
        ...optional(rows, ['launches', 'launches', 'n']),
        ...optional(rows, ['gpu_s', 'GPU time', 's']),
      ],
    }),
  ];
}
