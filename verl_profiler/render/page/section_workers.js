// Workers, replicas and ranks; what moves between them: TransferQueue calls and weights; memory.

import {about, heading, note, notesOf, nothing, notKept} from './blocks.js';
import {ALL, DATA, labeledRows, shown, shownName, shownRows, tableOf} from './data.js';
import {clean, plural, seconds, size} from './format.js';
import {table} from './table.js';

export function workersSection() {
  return [
    ...(shown.step === ALL ? lastWorkers() : stepWorkers()),
    ...replicas(),
    heading(`Ranks, ${shownName()}`),
    ...ranks(),
  ];
}

/** Who was the last in each step. */
function lastWorkers() {
  /** @type {Map<number, ReturnType<typeof labeledRows<'rollout_balance'>>[number]>} */
  const last = new Map();
  for (const row of labeledRows('rollout_balance')) if (!last.has(row.s)) last.set(row.s, row);
  const rows = [...last.values()];
  if (!rows.some((row) => row.behind_s > 0)) return [];
  /** @type {Map<string, number>} */
  const times = new Map();
  for (const row of rows) times.set(row.name, (times.get(row.name) || 0) + 1);
  const [[name, count]] = [...times].sort((a, b) => b[1] - a[1]);
  return [
    about(
      'The last agent-loop worker of each step; the others were idle at that time. ' +
        `${clean(name)} was the last in ${count} of ${plural(rows.length, 'step')}.`,
    ),
    table({
      caption: 'Last agent-loop worker by step',
      rows,
      limit: 12,
      columns: [
        ['label', 'step', 'text'],
        ['name', 'last worker', 'text'],
        ['requests', 'its requests', 'n'],
        ['busy_s', 'done after', 's', {bar: true}],
        ['behind_s', 'after the median worker', 's'],
      ],
    }),
  ];
}

function stepWorkers() {
  const rows = shownRows('rollout_balance');
  if (!rows.length) return [];
  const [slowest] = rows;
  return [
    about(
      rows.length > 1
        ? `${clean(slowest.name)} was the last agent-loop worker: done ` +
            `${seconds(slowest.busy_s)} after the first request started, ` +
            `${seconds(slowest.behind_s)} after the median worker.`
        : 'One agent-loop worker.',
    ),
    table({
      caption: 'Agent-loop workers',
      rows,
      limit: 16,
      columns: [
        ['name', 'agent-loop worker', 'text'],
        ['requests', 'requests', 'n'],
        ['busy_s', 'done after', 's', {bar: true}],
        ['behind_s', 'after the median worker', 's'],
        ['mean_s', 'mean request', 's'],
      ],
    }),
  ];
}

function replicas() {
  const rows = shownRows('replica_balance');
  if (!rows.length) return [];
  /** @type {import('./table.js').Column<ReplicaRow>[]} */
  const queue = rows.some((row) => row.queue_s !== null) ? [['queue_s', 'queue', 's']] : [];
  return [
    heading(`Replicas, ${shownName()}`),
    table({
      caption: 'Replicas',
      rows,
      limit: 16,
      columns: [
        ['server', 'replica', 'text'],
        ['calls', 'calls', 'n'],
        ['total_s', 'call time', 's', {bar: true}],
        ['p50_s', 'P50', 's'],
        ['p95_s', 'P95', 'q'],
        ['max_s', 'longest', 's'],
        ['prompt_tokens', 'prompt tokens', 'n'],
        ['generated_tokens', 'generated tokens', 'n'],
        ['engine_tokens_per_s', 'engine tokens/s', 'n'],
        ...queue,
      ],
    }),
  ];
}

function ranks() {
  const rows = shownRows('rank_balance');
  if (!rows.length) {
    const none = [note(`No work of trainer workers in ${shownName()}.`)];
    return [...(DATA.notes.ranks ? notesOf('ranks') : none), ...notKept()];
  }
  return [
    note('All ranks wait for the slowest; waiting is the idle time of all ranks together.'),
    table({
      caption: 'Balance of ranks',
      rows,
      limit: 14,
      columns: [
        ['event', 'work', 'text'],
        ['role', 'role', 'text'],
        ['ranks', 'ranks', 'n'],
        ['slowest', 'slowest', 'text'],
        ['slowest_s', 'slowest', 's', {bar: true}],
        ['median_s', 'median', 's'],
        ['fastest_s', 'fastest', 's'],
        ['waste_s', 'waiting', 's'],
      ],
    }),
  ];
}

export function transfersSection() {
  const rows = shownRows('transfer_totals');
  if (!rows.length) {
    const ever = tableOf('transfer_totals').length > 0;
    return [...nothing('transfers', ever, 'TransferQueue calls'), ...tracedFunctions()];
  }
  const longest = rows.reduce((worst, row) => (row.max_s > worst.max_s ? row : worst));
  const calls = rows.reduce((sum, row) => sum + row.calls, 0);
  const moved = rows.reduce((sum, row) => sum + (row.size_bytes ?? 0), 0);
  const total = rows.reduce((sum, row) => sum + row.total_s, 0);
  return [
    about(
      `${plural(calls, 'TransferQueue call')} in ${shownName()}: ${size(moved)} moved, ` +
        `${seconds(total)} in all callers together; the longest, ${longest.event} in ` +
        `${clean(longest.role)}, took ${seconds(longest.max_s)}.`,
    ),
    table({
      caption: 'TransferQueue calls',
      rows,
      limit: 16,
      columns: [
        ['event', 'call', 'text'],
        ['role', 'by', 'text'],
        ['calls', 'calls', 'n'],
        ['failed', 'failed', 'n'],
        ['total_s', 'all calls', 's', {bar: true}],
        ['p95_s', 'P95', 'q'],
        ['max_s', 'longest', 's'],
        ['size_bytes', 'moved', 'bytes'],
        ['rows', 'rows', 'n'],
      ],
    }),
    ...tracedFunctions(),
  ];
}

/** Traced functions, in all steps together. */
function tracedFunctions() {
  const rows = tableOf('tq_functions').map((row) => ({
    ...row,
    func: row.func + (row.waits ? ' (waits for others)' : ''),
  }));
  if (!rows.length) return [];
  return [
    heading('Functions that use TransferQueue, all steps'),
    ...DATA.tq_findings.map(note),
    table({
      caption: 'Functions that use TransferQueue',
      rows,
      limit: 16,
      columns: [
        ['func', 'function', 'text'],
        ['calls', 'calls', 'n'],
        ['failed', 'failed', 'n'],
        ['total_s', 'all calls', 's'],
        ['mean_s', 'mean', 's'],
        ['p95_s', 'P95', 'q'],
        ['get_share', 'get', 'share'],
        ['compute_share', 'compute', 'share'],
        ['put_share', 'put', 'share'],
        ['overhead_share', 'get and put', 'share'],
        ['wall_share', 'wall clock', 'share'],
      ],
    }),
    note('Concurrent calls of a process count separately; wall-clock time counts once.'),
  ];
}

export function weightsSection() {
  return [...weightSyncs(), ...releases(), ...memoryByPhase(), ...memoryPeaks()];
}

function weightSyncs() {
  const rows = labeledRows('weight_sync');
  if (!rows.length) {
    return nothing('weights', tableOf('weight_sync').length > 0, 'weight syncs');
  }
  const slowest = rows.reduce((worst, row) =>
    (row.trainer_s || 0) > (worst.trainer_s || 0) ? row : worst,
  );
  const longest =
    `; the longest sync took ${seconds(slowest.trainer_s)} ` + `(step ${clean(slowest.label)})`;
  return [
    about(
      'Weights are synced from the trainer to the engines once per step' +
        `${slowest.trainer_s === null ? '' : longest}.`,
    ),
    table({
      caption: 'Weight syncs',
      rows,
      limit: 12,
      columns: [
        ['label', 'step', 'text'],
        ['trainer_s', 'trainer’s timer', 's', {bar: true}],
        ['slowest_rank_s', 'slowest rank', 's'],
        ['slowest_rank', 'which', 'text'],
        ['transfer_s', 'transfer', 's'],
        ['release_s', 'memory released', 's'],
        ['resume_s', 'memory resumed', 's'],
      ],
    }),
  ];
}

/** What the engines' memory saver did. */
function releases() {
  const all = tableOf('release_effects');
  const calls = all.filter((row) => row.source === 'call');
  const rows = calls.length ? calls : all;
  const asleep = labeledRows('sleep_times');
  if (!rows.length && !shownRows('memory_timeline').length) return [];
  const moved = 'Device memory freed by a release or taken by a resume; median';
  /** @type {import('./table.js').Column<ReleaseRow>[]} */
  const device = [
    ['moved_bytes', 'moved', 'bytes', {title: moved}],
    ['used_before_bytes', 'used before', 'bytes'],
    ['used_after_bytes', 'used after', 'bytes'],
  ];
  const sleep = 'Time in sleep and wake, in the slowest process';
  return [
    heading('Release and resume'),
    ...notesOf('memory_saver'),
    rows.length
      ? table({
          caption: 'Effect of release and resume, all steps',
          rows,
          limit: 12,
          columns: [
            ['event', 'what', 'text'],
            ['tags', 'tags', 'text'],
            ['role', 'in', 'text'],
            ['calls', 'calls', 'n'],
            ['p50_s', 'median', 's'],
            ['max_s', 'longest', 's', {bar: true}],
            ...(rows.some((row) => row.moved_bytes !== null) ? device : []),
          ],
        })
      : null,
    asleep.length ? heading(sleep) : null,
    asleep.length
      ? table({
          caption: sleep,
          rows: asleep,
          limit: 12,
          columns: [
            ['label', 'step', 'text'],
            ['release_s', 'released', 's'],
            ['resume_s', 'resumed', 's'],
            ['share', 'of the step', 'share'],
            ['slowest', 'slowest', 'text'],
          ],
        })
      : null,
  ];
}

function memoryByPhase() {
  const rows = shownRows('memory_timeline');
  if (!rows.length) return [];
  /** @type {import('./table.js').Column<MemoryPhaseRow>[]} */
  const device = [
    ['used_bytes', 'device', 'bytes', {bar: true}],
    ['lowest_used_bytes', 'lowest', 'bytes'],
    ['used_share', 'of it', 'share'],
  ];
  const process = 'Resident in host memory, the largest process';
  return [
    heading('Memory by phase'),
    table({
      caption: 'Peaks of memory by phase of the trainer',
      rows,
      limit: 16,
      columns: [
        ['phase', 'phase', 'text', {swatch: true}],
        ['role', 'in', 'text'],
        ...(rows.some((row) => row.used_bytes !== null) ? device : []),
        ['rss_bytes', 'process', 'bytes', {title: process}],
        ['host_used_bytes', 'machine', 'bytes', {title: 'In use on the host'}],
        ['readings', 'readings', 'n'],
      ],
    }),
  ];
}

function memoryPeaks() {
  const rows = shownRows('memory_peaks');
  const title = heading('Peak device memory');
  if (!rows.length) {
    const none = [note(`No samples in ${shownName()}.`)];
    return [title, ...(DATA.notes.memory ? notesOf('memory') : none)];
  }
  return [
    title,
    table({
      caption: 'Peaks of device memory',
      rows,
      columns: [
        ['role', 'role', 'text'],
        ['used_bytes', 'used', 'bytes', {bar: true}],
        ['total_bytes', 'of', 'bytes'],
        ['allocated_bytes', 'allocated', 'bytes'],
        ['reserved_bytes', 'reserved', 'bytes'],
        ['name', 'process', 'text'],
        ['at', 'when', 'text'],
        ['readings', 'readings', 'n'],
      ],
    }),
  ];
}
