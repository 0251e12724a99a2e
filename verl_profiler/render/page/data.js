// The page's document, unpacked, and the step that is shown of it.

import {byId} from './dom.js';
import {clean} from './format.js';

/** @type {PageDocument} */
export const DATA = JSON.parse(byId('data').textContent ?? '');

/**
 * Rows of a table as objects.
 * @template {object} Row
 * @param {Frame<Row>} table
 * @returns {Row[]}
 */
export function unpack(table) {
  return table.rows.map(
    (row) =>
      /** @type {Row} */ (
        Object.fromEntries(table.columns.map((column, place) => [column, row[place]]))
      ),
  );
}

/** Stands for all steps together. */
export const ALL = -1;
export const steps = unpack(DATA.steps);
export const trained = steps.filter((step) => step.finished || step.requests > 0 || step.step > 0);
export const several = DATA.about.runs.length > 1;
export const timelines = DATA.timelines;

/** @type {RequestRow[]} */
export const requests = unpack(timelines.requests).map((request, place) => ({
  ...request,
  spans: timelines.requests.spans[place],
  calls: timelines.requests.calls[place],
  hasCalls: request.tool_calls > 0,
  step: `${steps[request.s]?.label}${request.validate ? ' val' : ''}`,
}));

/** The step that is shown, by its place in `steps`. */
export const shown = {step: ALL};

/** The step that is shown; none where all are. */
export function shownStep() {
  return steps[shown.step];
}

export function shownName() {
  return shown.step === ALL ? 'all steps' : `step ${clean(shownStep().label)}`;
}

/** @param {string} name */
export function colorOf(name) {
  return DATA.colors[name] || '#8FA3BF';
}
