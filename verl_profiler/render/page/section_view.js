// The section of a view: its table, with a column per value.

import {about, notKept} from './blocks.js';
import {ALL, DATA, shown, shownName, steps, unpack} from './data.js';
import {missing} from './format.js';
import {table} from './table.js';

/** @typedef {Record<string, any>} Row */

/**
 * @param {PageView} view
 * @param {string} caption
 */
export function viewSection(view, caption) {
  const all = unpack(
    /** @type {Record<string, Frame<Row>>} */ (/** @type {any} */ (DATA))[view.table],
  );
  const stepped = all.some((row) => 's' in row);
  const rows = all
    .filter((row) => !stepped || shown.step === ALL || row.s === shown.step)
    .map((row) => (stepped ? {label: steps[row.s].label, ...row} : row));
  if (!rows.length) return [about(`Nothing in ${shownName()}.`), ...notKept()];
  /** @type {import('./table.js').Column<Row>[]} */
  const columns = Object.entries(view.columns)
    .filter(([key]) => rows.some((row) => !missing(row[key])))
    .map(([key, title]) => {
      const label = key.replace(/(?<!_per)_(s|bytes)$/, '').replaceAll('_', ' ');
      return [key, view.labels[key] ?? label, formatOf(key, rows), {title}];
    });
  if (stepped) columns.unshift(['label', 'step', 'text']);
  return [about(caption), table({caption, rows, limit: 12, columns})];
}

/**
 * @param {string} key
 * @param {Row[]} rows
 * @returns {import('./table.js').Format}
 */
function formatOf(key, rows) {
  if (key.startsWith('s_per_')) return 's';
  if (key.endsWith('_per_s')) return key.endsWith('bytes_per_s') ? 'bytes' : 'n';
  if (key.endsWith('_s')) return /^p\d+_s$/.test(key) ? 'q' : 's';
  if (key.endsWith('_bytes')) return 'bytes';
  if (key.endsWith('share') || key === 'mfu') return 'share';
  /** @param {Row} row */
  const texts = (row) => typeof row[key] === 'string' || Array.isArray(row[key]);
  return rows.some(texts) ? 'text' : 'n';
}
