// The table of requests: those of the step that is shown, or those that the search finds.

import {note} from './blocks.js';
import {ALL, requests, shown, shownName, steps, timelines} from './data.js';
import {byId} from './dom.js';
import {clean, NONE, number, plural, seconds, shorten} from './format.js';
import {spansOf} from './request.js';
import {table} from './table.js';

/**
 * Names of the tools that a request called.
 * @param {RequestRow} request
 */
function toolsOf(request) {
  return spansOf(request)
    .filter(({event}) => event === 'tool_call')
    .map(({tool}) => tool ?? '');
}

/**
 * Fill the table: with what a search finds in all steps, or with the step that is shown; without
 * what the filter leaves out.
 * @param {import('./timeline_filter.js').Filter} filter
 * @param {(row: RequestRow) => boolean} selected
 * @param {(row: RequestRow) => void} onRow
 * @returns {RequestRow[]} The rows that are left.
 */
export function listRequests(filter, selected, onRow) {
  const search = /** @type {HTMLInputElement} */ (byId('search'));
  const wanted = search.value.trim().toLowerCase();
  /** @param {RequestRow} request */
  const matches = (request) =>
    [request.request_id, request.sample, request.name, request.agent, request.status].some(
      (value) => value?.toLowerCase().includes(wanted),
    ) || toolsOf(request).some((tool) => tool.toLowerCase().includes(wanted));
  const all = shown.step === ALL;
  const found = requests.filter((request) =>
    wanted ? matches(request) : !request.validate && (all || request.s === shown.step),
  );
  const rows = filter.narrows() ? found.filter((request) => filter.keeps(request)) : found;
  const left = found.length - rows.length;
  const listed =
    requests.length < timelines.of ? `, among the ${number(requests.length)} listed` : '';
  byId('found').textContent = wanted
    ? `${plural(rows.length, 'match', 'matches')} in all steps${listed}` +
      (left ? `; the filter hides ${number(left)} more` : '')
    : '';
  const name = (wanted ? 'the search' : shownName()) + (filter.narrows() ? ', filtered' : '');
  byId('request-table').replaceChildren(
    rows.length
      ? requestTable(rows, name, all || wanted !== '', {selected, onRow})
      : note(withoutRequests(wanted !== '', left > 0)),
  );
  return rows;
}

/**
 * @param {boolean} searched
 * @param {boolean} filtered
 */
function withoutRequests(searched, filtered) {
  if (searched) return `No listed request matches${filtered ? ' the search and the filter' : ''}.`;
  return filtered
    ? `No listed request of ${shownName()} matches the filter.`
    : `No requests of ${shownName()} are listed.`;
}

/**
 * @param {RequestRow[]} rows
 * @param {string} name
 * @param {boolean} ofSteps Whether they are of several steps.
 * @param {Pick<import('./table.js').TableOptions<RequestRow>, 'selected' | 'onRow'>} choice
 */
function requestTable(rows, name, ofSteps, choice) {
  /** @typedef {import('./table.js').Column<RequestRow>} Column */
  /** @param {RequestRow} row */
  const step = (row) => clean(steps[row.s].label) + (row.validate ? ' val' : '');
  /** @param {RequestRow} row */
  const sample = (row) => {
    if (row.sample === null) return NONE;
    return shorten(row.sample, 20) + (row.session === null ? '' : ` / ${shorten(row.session, 8)}`);
  };
  /** @type {Column[]} */
  const stepColumns = ofSteps ? [['s', 'step', 'n', {show: step}]] : [];
  /** @type {Column[]} */
  const rewards = rows.some((row) => row.reward !== null) ? [['reward', 'reward', 'n']] : [];
  /** @type {Column[]} */
  const statuses = rows.some((row) => row.status !== null)
    ? [['status', 'status', 'text', {show: (row) => clean(row.status ?? '')}]]
    : [];
  return table({
    caption: `Requests of ${name}`,
    rows,
    limit: 12,
    sort: ['duration_s', true],
    ...choice,
    label: (row) => `Request ${row.request_id}, ${seconds(row.duration_s)}`,
    columns: [
      ['request_id', 'request', 'text', {show: (row) => shorten(row.request_id ?? '(no id)', 40)}],
      ...stepColumns,
      ['sample', 'sample', 'text', {show: sample}],
      ['name', 'worker', 'text', {show: (row) => shorten(row.name, 24)}],
      ['duration_s', 'time', 's', {bar: true}],
      ['engine_s', 'engine', 's'],
      ['tool_s', 'tools', 's'],
      ['other_s', 'other', 's', {title: 'Unattributed time'}],
      ['turns', 'turns', 'n'],
      ['generated_tokens', 'tokens', 'n', {title: 'Generated tokens'}],
      ...rewards,
      ...statuses,
    ],
  });
}
