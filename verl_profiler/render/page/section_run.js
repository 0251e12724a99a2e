// About the run and the recording: console log, event-loop stalls, problems, cost, launch.

import {about, heading, note, nothing} from './blocks.js';
import {DATA, labeledRows, several, shown, shownName, shownRows, tableOf, unpack} from './data.js';
import {element} from './dom.js';
import {clean, NONE, number, plural, seconds, share} from './format.js';
import {table} from './table.js';

/** @param {Log} log */
export function logSection(log) {
  const rows = unpack(log.differences).filter((row) => row.s === shown.step);
  const open = rows.filter((row) => !row.explained).length;
  let found = 'The log and the recording have nothing in common here.';
  if (open) found = `${plural(open, 'difference')} without a known reason.`;
  else if (rows.length) found = 'Every difference has a known reason.';
  return [
    about(
      `What verl printed (${clean(log.label)}) beside the spans that were recorded, ` +
        `${shownName()}. ${found}`,
    ),
    rows.length
      ? table({
          caption: 'Logged and recorded timers',
          rows,
          columns: [
            ['timer', 'timer', 'text', {swatch: true}],
            ['logged_s', 'log', 's'],
            ['recorded_s', 'recorded', 's', {bar: true}],
            ['difference_s', 'recorded − log', 's'],
            ['reason', 'why', 'text'],
          ],
        })
      : null,
    heading('The timers of the log, all steps'),
    table({
      caption: 'Statistics of the log’s timers',
      rows: unpack(log.timers),
      limit: 16,
      columns: [
        ['timer', 'timer', 'text', {swatch: true}],
        ['steps', 'steps', 'n'],
        ['mean', 'mean', 's', {bar: true}],
        ['median', 'median', 's'],
        ['std', 'std', 's'],
        ['min', 'min', 's'],
        ['max', 'max', 's'],
      ],
    }),
    ...[...log.facts, ...log.problems].map((text) => note(clean(text))),
  ];
}

/** In processes with these roles, a stall is a wait of requests. */
const SERVING = ['agent_loop', 'engine', 'reward', 'trainer'];

export function stallsSection() {
  const rows = shownRows('loop_lags');
  if (!rows.length) return nothing('lags', tableOf('loop_lags').length > 0, 'event-loop lags');
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
    ['lags', 'lags', 'n'],
    ['max_s', 'longest', 's', {bar: true}],
    ['total_s', 'all', 's'],
  ];
  const title =
    `Trainer workers (${workers.length}): ` + 'they compute inside their loops, which is no fault';
  const caption = 'Event-loop lags of trainer workers';
  return [
    about(
      'While an event loop stands still, everything that awaits in it looks slow, and is not. ' +
        (others.length
          ? `Worst: ${clean(others[0].name)}, ${seconds(others[0].max_s)} at once.`
          : `None did in ${shownName()}.`),
    ),
    others.length
      ? table({
          caption: 'Event-loop lags by process',
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

function longestStalls() {
  const rows = labeledRows('longest_lags');
  if (!rows.length) return [];
  const title = 'The call that held the loop, where it is known';
  /** @type {import('./table.js').Column<LongestStallRow>[]} */
  const during = [['during', 'in', 'text', {title}]];
  return [
    heading('The longest'),
    table({
      caption: 'The longest event-loop lags',
      rows,
      limit: 8,
      columns: [
        ['label', 'step', 'text'],
        ['name', 'process', 'text'],
        ['duration_s', 'stood still', 's', {bar: true}],
        ...(rows.some((row) => row.during !== null) ? during : []),
        ['at_s', 'after the begin of the step', 's'],
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
        ? 'What makes these numbers less than the truth.'
        : 'None were found in the files.',
    ),
    problems.length ? list(problems.slice(0, 12)) : null,
    problems.length > 12 ? element('details', {}, more, list(problems.slice(12))) : null,
    missed.length ? heading('Probes that were not placed') : null,
    missed.length
      ? table({
          caption: 'Probes that were not placed',
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
        ? `At most ${share(worst.share)} of a step: ${seconds(worst.dearest_s)} of ` +
          `${clean(worst.dearest)}’s time in step ${clean(worst.label)}. `
        : '') + `${number(DATA.about.events)} events in all. Writing runs in a thread of its own.`,
    ),
    table({
      caption: 'Profiler cost',
      rows,
      limit: 8,
      columns: [
        ['label', 'step', 'text'],
        ['share', '% of step (costliest process)', 'share'],
        ['dearest', 'process', 'text'],
        ['dearest_s', 'its wrappers', 's'],
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
    ['Settings of the profiler', launch.settings],
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
