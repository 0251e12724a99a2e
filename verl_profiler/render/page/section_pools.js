// Trainer, queue and replicas of an asynchronous run over the same time.

import {about, heading, note} from './blocks.js';
import {canvas, drawn, legend, rect, textAt, timeAxis} from './charts.js';
import {colorOf, DATA, tableOf} from './data.js';
import {svg, withTip} from './dom.js';
import {clean, seconds} from './format.js';

const SYNC = 'weight_sync';
const LANES = ['trainer', 'queue'];

export function poolsSection() {
  const rows = tableOf('pools_over_time');
  const runs = [...new Set(rows.map((row) => row.run ?? ''))];
  return [
    about(
      'The trainer’s phases, the prompts that are ready in its queue, and the generate calls of each ' +
        'pool of replicas, in the colors of their weight versions; lines are weight syncs.',
    ),
    ...runs.flatMap((run) => [
      runs.length > 1 ? heading(clean(run)) : null,
      ...lanes(rows.filter((row) => (row.run ?? '') === run)),
    ]),
    note('Means of equal parts of the time.'),
  ];
}

/** @param {PoolRow} row */
function fillOf(row) {
  if (row.lane === 'trainer') return colorOf(row.phase ?? '');
  if (row.lane === 'queue') return 'var(--bar)';
  return row.weight_version === null ? 'var(--bar)' : versionColor(row.weight_version);
}

/** @param {number} version */
function versionColor(version) {
  return DATA.versions[version % DATA.versions.length];
}

/** @param {PoolRow[]} rows */
function lanes(rows) {
  const syncs = rows.filter((row) => row.phase === SYNC);
  const drawnRows = rows.filter((row) => row.phase !== SYNC);
  const names = [...new Set(drawnRows.map((row) => row.lane))].sort(
    (a, b) => order(a) - order(b) || a.localeCompare(b),
  );
  const until = Math.max(...rows.map((row) => row.end_s));
  const phases = [
    ...new Set(drawnRows.filter((row) => row.lane === 'trainer').map((row) => row.phase ?? '')),
  ];
  const versions = [
    ...new Set(
      drawnRows.filter((row) => !LANES.includes(row.lane)).map((row) => row.weight_version),
    ),
  ];
  return [
    legend(phases.map((name) => ({name, color: colorOf(name)}))),
    versions.length > DATA.versions.length
      ? null
      : legend(
          versions.map((version) => ({
            name: version === null ? 'version unknown' : `version ${version}`,
            color: version === null ? 'var(--bar)' : versionColor(version),
          })),
        ),
    drawn(
      (width) => chart(width, names, drawnRows, syncs, until),
      `${names.join(', ')} over ${seconds(until)}, with ${syncs.length} weight syncs`,
    ),
  ];
}

/** @param {string} lane */
function order(lane) {
  const place = LANES.indexOf(lane);
  return place < 0 ? LANES.length : place;
}

/**
 * @param {number} width
 * @param {string[]} names
 * @param {PoolRow[]} rows
 * @param {PoolRow[]} syncs
 * @param {number} until
 */
function chart(width, names, rows, syncs, until) {
  const left = 96;
  const right = width - 14;
  const high = 56;
  const gap = 10;
  const bottom = names.length * (high + gap);
  const all = canvas(width, bottom + 26);
  const x = (/** @type {number} */ value) => left + ((right - left) * value) / (until || 1);
  timeAxis(all, x, until, {top: 0, bottom, right});
  names.forEach((name, place) => {
    const own = rows.filter((row) => row.lane === name);
    const base = place * (high + gap) + high;
    const sums = new Map();
    for (const row of own) sums.set(row.begin_s, (sums.get(row.begin_s) ?? 0) + (row.mean ?? 0));
    const most = Math.max(...sums.values()) || 1;
    const below = new Map();
    for (const row of own) {
      const share = row.mean === null ? 1 : row.mean / most;
      const from = below.get(row.begin_s) ?? 0;
      below.set(row.begin_s, from + share);
      const wide = x(row.end_s) - x(row.begin_s);
      const top = base - high * (from + share);
      const bar = rect(x(row.begin_s), top, wide, high * share, fillOf(row), {});
      all.append(withTip(bar, lines(row)));
    }
    all.append(textAt(left - 8, base - high / 2, clean(name), 'end', 'ink'));
    if (name !== 'trainer') {
      all.append(textAt(left - 8, base - high / 2 + 15, `up to ${most.toFixed(0)}`, 'end'));
    }
    for (const sync of syncs) {
      if (name !== 'trainer' && name !== sync.lane) continue;
      const at = x(sync.begin_s);
      const mark = svg('line', {x1: at, x2: at, y1: base - high, y2: base, class: 'mark'});
      all.append(withTip(mark, lines(sync)));
    }
  });
  return all;
}

/** @param {PoolRow} row */
function lines(row) {
  const when = `${seconds(row.begin_s)} to ${seconds(row.end_s)}`;
  const version = row.weight_version === null ? [] : [`weight version ${row.weight_version}`];
  if (row.phase) return [clean(row.phase), when, ...version];
  const what = row.lane === 'queue' ? 'prompts ready' : 'generate calls';
  return [`${(row.mean ?? 0).toFixed(1)} ${what}`, when, ...version];
}
