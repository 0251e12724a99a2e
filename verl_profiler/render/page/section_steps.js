// The steps, and what they waited for.

import {about, heading, note, notesOf, nothing} from './blocks.js';
import {partsBar} from './charts.js';
import {
  ALL,
  colorOf,
  several,
  shown,
  shownName,
  shownRows,
  shownStep,
  steps,
  tableOf,
  trained,
} from './data.js';
import {clean, NONE, plural, quantile, seconds, share, shorten} from './format.js';
import {heatMap} from './heat_map.js';
import {icicle} from './icicle.js';
import {stepChart} from './step_chart.js';
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
  const charted = trained.filter((step) => step.step !== 0 || step.finished);
  const phases = tableOf('step_phases').filter((row) => row.s !== ALL);
  const validation = start?.validation_requests ? ' and validation' : '';
  return [
    about(
      'Step times by the timers of verl’s trainer. Select a step to show it in all sections below.',
    ),
    ...notesOf('steps'),
    stepChart(charted, phases, shown.step, (step) => choose(step === shown.step ? ALL : step)),
    ...icicle(),
    ...(shown.step === ALL ? heatMap(choose) : []),
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

/** @type {Record<string, string>} */
const REASONS = {
  late: 'started late',
  queued: 'queued',
  parked: 'engine paused',
  cold: 'prefix cache lost',
  prefill: 'prefill',
  recomputed: 'retracted or aborted',
  undivided: 'in the engine, not divided',
  long: 'long',
  slow: 'slow per token',
  tool: 'tools',
  other: 'other',
};

export function pathSection() {
  const rows = shownRows('critical_path');
  if (!rows.length && shownRows('bubble_ledger').length) {
    return [
      about(
        'Steps here do not wait for their own requests, as in asynchronous training, so there is no ' +
          'critical path. Device time shows where the time is spent.',
      ),
      ...stragglers(),
    ];
  }
  if (!rows.length) {
    return nothing('steps', tableOf('critical_path').length > 0, 'finished steps');
  }
  const whole = shown.step === ALL;
  /** @param {PathRow} row */
  const color = (row) => colorOf(`path:${row.category}`);
  const parts = rows
    .filter((row) => row.share >= 0.005)
    .map((row) => ({name: row.category, value: row.duration_s, color: color(row)}));
  const rest = rows.filter((row) => row.share < 0.005);
  if (rest.length) {
    const value = rest.reduce((sum, row) => sum + row.duration_s, 0);
    parts.push({name: 'others', value, color: '#C9CED6'});
  }
  const unexplained = rows.find((row) => row.category === 'unexplained');
  return [
    about(
      `What ${whole ? 'the steps' : shownName()} waited for, with every second attributed ` +
        'to one cause. Pale: phases of the trainer. ' +
        (unexplained ? `${share(unexplained.share)} unattributed.` : ''),
    ),
    partsBar(parts),
    table({
      caption: 'Critical path',
      rows,
      limit: 12,
      columns: [
        ['category', 'cause', 'text'],
        ['share', 'share', 'share'],
        ['duration_s', whole ? 'all steps together' : 'time', 's', {bar: true, color}],
        ['segments', 'segments', 'n'],
        ['longest_s', 'longest', 's'],
        ['longest_what', 'in', 'text'],
      ],
    }),
    ...whatIf(),
    ...stragglers(),
  ];
}

/**
 * The replays of the step that is shown, or their means; a long run has them of some steps only.
 */
function whatIf() {
  const means = tableOf('what_if');
  if (!means.length) return [];
  const abouts = new Map(means.map((row) => [row.what, row.about]));
  const own =
    shown.step === ALL
      ? []
      : shownRows('step_replays').map((row) => ({
          ...row,
          about: abouts.get(row.what) ?? row.what,
          share: row.saved_s === null ? null : row.saved_s / row.duration_s,
          low_s: row.least_s < row.most_s ? row.least_s : null,
          high_s: row.least_s < row.most_s ? row.most_s : null,
        }));
  const polling = 'the trainer polls for samples, so a step saves a whole poll interval or nothing';
  const sense = own.length
    ? `“Without polling”: ${polling}; many steps save that on average.`
    : `“Saved” is the mean over many steps; “in these steps”: ${polling}.`;
  return [
    heading('What if'),
    note(
      `${replayed(own)} ${sense} Gains are not additive. For loads not observed, “from” ` +
        'assumes that replicas are already saturated, and “to” that ' +
        `additional calls cause no slowdown.${undivided()}${noise(means)}`,
    ),
    own.length ? replaysOfStep(own) : meanReplays(means),
  ];
}

/** @param {(StepReplayRow & {about: string, share: Num, low_s: Num, high_s: Num})[]} own */
function replaysOfStep(own) {
  return table({
    caption: 'Replays',
    rows: own.filter((row) => row.what !== 'unchanged'),
    limit: 12,
    sort: ['earlier_s', true],
    columns: [
      ['about', 'if', 'text'],
      ['saved_s', 'saved', 's', {bar: true}],
      ['share', 'of the step', 'share'],
      ['earlier_s', 'without polling', 's'],
      ['low_s', 'from', 's', {title: '90 % interval'}],
      ['high_s', 'to', 's'],
    ],
  });
}

/** @param {WhatIfRow[]} means */
function meanReplays(means) {
  return table({
    caption: 'Replays',
    rows: means.filter((row) => row.what !== 'unchanged'),
    limit: 12,
    sort: ['expected_s', true],
    columns: [
      ...runColumn,
      ['about', 'if', 'text'],
      ['expected_s', 'saved', 's', {bar: true}],
      ['share', 'of the step', 'share'],
      ['saved_s', 'in these steps', 's'],
      ['low_s', 'from', 's', {title: '90 % interval'}],
      ['high_s', 'to', 's'],
    ],
  });
}

/**
 * How well the steps are replayed unchanged.
 * @param {StepReplayRow[]} own
 */
function replayed(own) {
  const means = tableOf('what_if');
  const unchanged = (own.length ? own : means).find((row) => row.what === 'unchanged');
  const off = (/** @type {Num | undefined} */ value) => share(Math.abs(value ?? 0));
  const error =
    `replay error ${off(unchanged?.residual_share)}` +
    (unchanged?.tokens_share == null
      ? ''
      : `, with decoding predicted from tokens ${off(unchanged.tokens_share)}`);
  if (own.length) {
    const step = `Step ${clean(shownStep().label)}, ${seconds(own[0].duration_s)}`;
    return `${step}; ${error}.`;
  }
  const [{steps: count, step_s}] = means;
  return (
    (shown.step === ALL ? '' : 'This step was not replayed. ') +
    `Mean per step over ${plural(count, 'replayed step')} of ${seconds(step_s)}; ` +
    `of the median step: ${error}.`
  );
}

function undivided() {
  const categories = new Set(tableOf('critical_path').map((row) => row.category));
  return categories.has('engine') && !categories.has('decode')
    ? ' Time in the engines is replayed as decoding: queue and prefill times were not recorded ' +
        '(profiler.events.engine_timing=true).'
    : '';
}

/** @param {WhatIfRow[]} means */
function noise(means) {
  const between = means.find((row) => row.between_runs_s !== null);
  if (!between) return '';
  return (
    ` Two runs with the same settings differ by up to ${seconds(between.between_runs_s)} per ` +
    'step, in nine of ten pairs: with one run each, smaller gains cannot be distinguished from noise.'
  );
}

/** @type {import('./table.js').Column<{run?: string}>[]} */
const runColumn = several ? [['run', 'run', 'text']] : [];

function stragglers() {
  const rows = tableOf('stragglers').map((row) => ({
    ...row,
    who: row.kind === 'request' ? REASONS[row.who] || row.who : row.who,
  }));
  if (!rows.length) return [];
  const requests = tableOf('straggler_requests').map((row) => ({
    ...row,
    because: REASONS[row.because] || row.because,
  }));
  /** @typedef {import('./table.js').Column<(typeof requests)[number]>} RequestColumn */
  /** @type {RequestColumn[]} */
  const reasons = [
    ['parked_s', 'engine paused', 's'],
    ['cold_s', 'prefix cache lost', 's'],
    ['prefill_s', 'prefill', 's'],
    ['recomputed_s', 'retracted or aborted', 's'],
    ['undivided_s', 'in the engine, not divided', 's'],
  ];
  const rare = reasons.filter(([key]) => requests.some((row) => row[key]));
  /** @type {RequestColumn[]} */
  const batch = requests.some((row) => row.batch !== null)
    ? [
        [
          'batch',
          'batch',
          'n',
          {title: 'Mean number of requests in its replica during its decoding'},
        ],
        ['typical_batch', 'of the median request', 'n'],
      ]
    : [];
  return [
    heading('Stragglers'),
    note(
      'Wait time caused for finished requests, workers or ranks by those of the same kind ' +
        'that were still running, over all steps.',
    ),
    table({
      caption: 'Stragglers',
      rows,
      limit: 12,
      columns: [
        ...runColumn,
        ['kind', 'kind', 'text', {title: 'A phase: its ranks'}],
        ['who', 'who, or why', 'text'],
        ['caused_wait_s', 'caused wait time', 's', {bar: true}],
        ['share', 'of its kind', 'share'],
        ['per_step_s', 'per step', 's'],
        ['last', 'steps as the last', 'n'],
        ['of_steps', 'of', 'n'],
      ],
    }),
    requests.length
      ? table({
          caption: 'Straggler requests',
          rows: requests,
          limit: 6,
          columns: [
            ...runColumn,
            [
              'request_id',
              'request',
              'text',
              {show: (row) => shorten(row.request_id ?? '(no id)', 16)},
            ],
            ['step', 'step', 'n'],
            ['name', 'worker', 'text'],
            ['caused_wait_s', 'caused wait time', 's', {bar: true}],
            ['behind_s', 'behind the median', 's'],
            ['because', 'because', 'text'],
            ['late_s', 'later', 's'],
            ['queued_s', 'queued', 's'],
            ...rare,
            ['long_s', 'long', 's'],
            ['slow_s', 'slow', 's'],
            ['tool_s', 'tools', 's'],
            ['other_s', 'other', 's'],
            ...batch,
          ],
        })
      : null,
  ];
}
