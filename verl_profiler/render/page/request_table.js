// The table of requests: those of the step that is shown, or those that the search finds.

import {note} from './blocks.js';
import {ALL, DATA, requests, shown, shownName, timelines} from './data.js';
import {byId} from './dom.js';
import {number, plural, seconds} from './format.js';
import {spansOf} from './request.js';
import {columnsOf, table} from './table.js';

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
 * Fill the table: with what a search finds in all steps, or with the step that is shown.
 * @param {(row: RequestRow) => boolean} selected
 * @param {(row: RequestRow) => void} onRow
 * @returns {RequestRow[]} The rows that are left.
 */
export function listRequests(selected, onRow) {
  const search = /** @type {HTMLInputElement} */ (byId('search'));
  const wanted = search.value.trim().toLowerCase();
  /** @param {RequestRow} request */
  const matches = (request) =>
    [request.request_id, request.sample, request.name, request.agent, request.status].some(
      (value) => value?.toLowerCase().includes(wanted),
    ) || toolsOf(request).some((tool) => tool.toLowerCase().includes(wanted));
  const all = shown.step === ALL;
  const rows = requests.filter((request) =>
    wanted ? matches(request) : !request.validate && (all || request.s === shown.step),
  );
  const listed =
    requests.length < timelines.of ? `, among the ${number(requests.length)} listed` : '';
  byId('found').textContent = wanted
    ? `${plural(rows.length, 'match', 'matches')} in all steps${listed}`
    : '';
  const name = wanted ? 'the search' : shownName();
  byId('request-table').replaceChildren(
    rows.length
      ? requestTable(rows, name, all || wanted !== '', {selected, onRow})
      : note(wanted ? 'No listed request matches.' : `No requests of ${name} are listed.`),
  );
  return rows;
}

/**
 * @param {RequestRow[]} rows
 * @param {string} name
 * @param {boolean} ofSteps Whether they are of several steps.
 * @param {Pick<import('./table.js').TableOptions<RequestRow>, 'selected' | 'onRow'>} choice
 */
function requestTable(rows, name, ofSteps, choice) {
  return table({
    caption: `Requests of ${name}`,
    rows,
    limit: 12,
    sort: ['duration_s', true],
    ...choice,
    label: (row) => `Request ${row.request_id}, ${seconds(row.duration_s)}`,
    columns: columnsOf(DATA.columns.requests, rows).filter(([key]) => ofSteps || key !== 'step'),
  });
}
