// About the run and the recording: event-loop stalls, problems, cost, launch.

import {about, heading, note, nothing} from './blocks.js';
import {
  DATA,
  labeledRows,
  several,
  shownName,
  shownRows,
  tableOf,
  trained,
  unpack,
} from './data.js';
import {element} from './dom.js';
import {clean, NONE, number, seconds, share} from './format.js';
import {table} from './table.js';

/** In processes with these roles, a stall is a wait of requests. */
const SERVING = ['agent_loop', 'engine', 'reward', 'trainer'];

export function stallsSection() {
  const rows = shownRows('loop_lags');
  if (!rows.length) return nothing('lags', tableOf('loop_lags').length > 0, 'event-loop stalls');
  // Trainer workers compute inside their loops.
  const computing = new Set(DATA.computing);
  const serving = (/** @type {StallsRow} */ row) => Number(SERVING.includes(row.role));
  const others = rows
    .filter((row) => !computing.has(row.role))
    .sort((a, b) => serving(b) - serving(a) || b.max_s - a.max_s);
  const workers = rows.filter((row) => computing.has(row.role));
  /** @type {import('./table.js').Column<StallsRow>[]} */
  const columns = [
    ['name', 'process', 'text'],
    ['loop', 'loop', 'text'],
    ['lags', 'stalls', 'n'],
    ['max_s', 'longest', 's', {bar: true}],
    ['total_s', 'all', 's'],
  ];
  const title =
    `Trainer workers (${workers.length}): ` +
    'they compute inside their event loops, which is expected';
  const caption = 'Event-loop stalls of trainer workers';
  return [
    about(
      'While an event loop is stalled, everything awaiting on it looks slow. ' +
        (others.length ? worstStall(others[0]) : `No stalls in ${shownName()}.`),
    ),
    others.length
      ? table({
          caption: 'Event-loop stalls by process',
          rows: others,
          limit: 12,
          sort: ['max_s', true],
          columns,
        })
      : null,
    ...longestStalls(),
    workers.length
      ? element(
          'details',
          {},
          element('summary', {}, title),
          table({caption, rows: workers, limit: 12, columns}),
        )
      : null,
  ];
}

/**
 * Name the longest stall during a step; before the first one, no training request waits.
 * @param {StallsRow} longest Of all.
 */
function worstStall(longest) {
  const worst = labeledRows('longest_lags').find(
    (row) =>
      SERVING.includes(row.role) && row.at_s >= 0 && trained.some((step) => step.s === row.s),
  );
  return worst
    ? `Longest during a step: ${clean(worst.name)}, ${seconds(worst.duration_s)} in step ${clean(worst.label)}.`
    : `Longest: ${clean(longest.name)}, ${seconds(longest.max_s)}.`;
}

function longestStalls() {
  const rows = labeledRows('longest_lags');
  if (!rows.length) return [];
  const title = 'The call that blocked the loop, where known';
  /** @type {import('./table.js').Column<LongestStallRow>[]} */
  const during = [['during', 'in', 'text', {title}]];
  return [
    heading('Longest stalls'),
    table({
      caption: 'Longest event-loop stalls',
      rows,
      limit: 8,
      columns: [
        ['label', 'step', 'text'],
        ['name', 'process', 'text'],
        ['duration_s', 'stall', 's', {bar: true}],
        ...(rows.some((row) => row.during !== null) ? during : []),
        ['at_s', 'after step start', 's'],
      ],
    }),
  ];
}

export function problemsSection() {
  const {
    problems,
    about: {missed},
  } = DATA;
  /** @param {string[]} those */
  const list = (those) =>
    element(
      'ul',
      {class: 'problems'},
      those.map((problem) => element('li', {}, clean(problem))),
    );
  const more = element('summary', {}, `${number(problems.length - 12)} more`);
  return [
    about(
      problems.length
        ? 'Data-quality warnings: these numbers may be incomplete.'
        : 'No data-quality problems were found.',
    ),
    problems.length ? list(problems.slice(0, 12)) : null,
    problems.length > 12 ? element('details', {}, more, list(problems.slice(12))) : null,
    missed.length ? heading('Probes not installed') : null,
    missed.length
      ? table({
          caption: 'Probes not installed',
          limit: 10,
          rows: missed.map(([probe, reason, where]) => ({probe, reason, where})),
          columns: [
            ['probe', 'probe', 'text'],
            ['reason', 'why', 'text'],
            ['where', 'processes', 'text'],
          ],
        })
      : null,
  ];
}

export function costSection() {
  const rows = labeledRows('profiler_cost');
  if (!rows.length) {
    const ever = tableOf('profiler_cost').length > 0;
    return nothing('cost', ever, 'accounts of the profiler');
  }
  const [worst] = rows
    .filter((row) => row.share !== null)
    .sort((a, b) => (b.share ?? 0) - (a.share ?? 0));
  return [
    about(
      (worst
        ? `At most ${share(worst.share)} of a step: ${seconds(worst.costliest_s)} of ` +
          `${clean(worst.costliest)}’s time in step ${clean(worst.label)}. `
        : '') + `${number(DATA.about.events)} events in total. A background thread writes them.`,
    ),
    table({
      caption: 'Profiler cost',
      rows,
      limit: 8,
      columns: [
        ['label', 'step', 'text'],
        ['share', '% of step (costliest process)', 'share'],
        ['costliest', 'process', 'text'],
        ['costliest_s', 'its wrappers', 's'],
        ['wrapper_s', 'all wrappers', 's'],
        ['writer_s', 'all writers', 's'],
        ['events', 'events', 'n'],
        ['size_bytes', 'written', 'bytes'],
        ['dropped', 'dropped', 'n'],
      ],
    }),
  ];
}

/** @param {Fact[]} facts */
function factsList(facts) {
  const entries = facts.map(([key, value]) => [
    element('dt', {}, clean(key)),
    element('dd', {}, element('bdi', {}, clean(value))),
  ]);
  return element('dl', {class: 'facts-list'}, entries);
}

/** @param {Launch} launch */
function launchFacts(launch) {
  /** @type {[string, Fact[] | undefined][]} */
  const groups = [
    ['Training', launch.training],
    ['Versions', launch.versions],
    ['Profiler settings that differ from the defaults', launch.settings],
  ];
  return [
    several ? element('h3', {}, element('bdi', {}, clean(launch.run))) : null,
    ...(launch.facts.length || launch.training
      ? [
          factsList(launch.facts),
          element(
            'div',
            {class: 'columns'},
            groups.map(([title, facts]) =>
              facts?.length ? element('div', {}, heading(title), factsList(facts)) : null,
            ),
          ),
        ]
      : [note('run.json was not found.')]),
  ];
}

export function launchSection() {
  const processes = unpack(DATA.about.processes);
  return [
    ...DATA.about.launches.flatMap(launchFacts),
    processes.length ? heading('Processes') : null,
    processes.length
      ? table({
          caption: 'Processes',
          rows: processes,
          limit: 16,
          columns: [
            ['name', 'process', 'text'],
            ['role', 'role', 'text'],
            ['host', 'host', 'text'],
            ['pid', 'pid', 'n', {show: (row) => (row.pid === null ? NONE : String(row.pid))}],
            ['recorded_events', 'events', 'n'],
            ['size_bytes', 'written', 'bytes'],
            ['dropped', 'dropped', 'n'],
            ['write_errors', 'write errors', 'n'],
            ['end_reason', 'ended', 'text'],
          ],
        })
      : null,
  ];
}
