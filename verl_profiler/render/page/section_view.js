// The views of a section: of each its chart, and its table of the step that is shown.

import {note, notKept} from './blocks.js';
import {ALL, DATA, shown, shownName, steps, unpack} from './data.js';
import {element} from './dom.js';
import {clean} from './format.js';
import {columnsOf, table} from './table.js';
import {chart} from './vega.js';

/** @type {Map<string, HTMLElement[]>} */
const charts = new Map();

/**
 * @param {string[]} names Of the section's views.
 * @param {string[]} notes What was not recorded, and how to record it.
 * @returns {import('./dom.js').Child[]}
 */
export function viewBlocks(names, notes) {
  const said = notes.map((text) => note(clean(text)));
  const shownViews = names.map((name) => {
    const view = DATA.views[name];
    // A chart shows all steps: it is made once, and stays.
    if (!charts.has(name)) charts.set(name, view.charts.map(chart));
    const drawn = charts.get(name) ?? [];
    return [...drawn, ...view.missing.map((text) => note(clean(text))), tableOfView(view)];
  });
  return [...said, ...shownViews];
}

/** @param {PageView} view */
function tableOfView(view) {
  const all = unpack(view.table);
  if (!all.length) return null;
  const stepped = 's' in all[0];
  const whole = shown.step === ALL;
  const rows = all
    .filter((row) => !stepped || whole || row.s === shown.step)
    .map((row) => (stepped ? {label: steps[row.s].label, ...row} : row));
  if (!rows.length) return [note(`${view.question} Nothing in ${shownName()}.`), ...notKept()];
  const columns = columnsOf(view.columns, rows);
  if (whole && stepped) columns.unshift(['label', 'step', 'text']);
  const made = table({caption: view.question, rows, limit: 12, columns});
  if (!view.charts.length) return made;
  const summary = element('summary', {}, 'Table');
  return element('details', {class: 'numbers'}, summary, made);
}
