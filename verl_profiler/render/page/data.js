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
}));

/** @type {Map<keyof Tables, unknown[]>} */
const unpacked = new Map();

/**
 * All rows of a table.
 * @template {keyof Tables} Name
 * @param {Name} name
 * @returns {Tables[Name][]}
 */
export function tableOf(name) {
  if (!unpacked.has(name)) unpacked.set(name, unpack(/** @type {Frame<object>} */ (DATA[name])));
  return /** @type {Tables[Name][]} */ (unpacked.get(name));
}

/** The step that is shown, by its place in `steps`. */
export const shown = {step: ALL};

// Names of the tables whose rows name their step.
/**
 * @typedef {{
 *   [Name in keyof Tables]: Tables[Name] extends OfStep ? Name : never
 * }[keyof Tables]} Stepped
 */

/**
 * The rows of the step that is shown, or those of all steps together.
 * @template {Stepped} Name
 * @param {Name} name
 * @returns {Tables[Name][]}
 */
export function shownRows(name) {
  return tableOf(name).filter((row) => row.s === shown.step);
}

/**
 * The same, of training requests alone.
 * @template {Stepped} Name
 * @param {Tables[Name] extends Validated ? Name : never} name
 * @returns {Tables[Name][]}
 */
export function trainingRows(name) {
  return shownRows(/** @type {Name} */ (name)).filter(
    (row) => !('validate' in row && row.validate),
  );
}

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
