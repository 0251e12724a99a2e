// What the sections are made of besides tables and charts: headings, sentences, notes.

import {ALL, DATA, shown, shownName, shownStep, steps} from './data.js';
import {element} from './dom.js';
import {number} from './format.js';

/** @param {string} text */
export function about(text) {
  return element('p', {class: 'about'}, text);
}

/** @param {string} text */
export function note(text) {
  return element('p', {class: 'note'}, text);
}

/** @param {string} text */
export function heading(text) {
  return element('h3', {}, text);
}

/** @param {string} name */
export function notesOf(name) {
  return (DATA.notes[name] || []).map(note);
}

/**
 * For a section with nothing in it: why nothing was recorded, or that this step has none.
 * @param {string} name
 * @param {boolean} ever Whether another step has some.
 * @param {string} what
 */
export function nothing(name, ever, what) {
  if (DATA.notes[name]) return DATA.notes[name].map(about);
  return [about(`No ${what}${ever ? ` in ${shownName()}` : ' were recorded'}.`), ...notKept()];
}

const detailed = new Set(DATA.detailed);

export function notKept() {
  if (shown.step === ALL || detailed.has(shown.step)) return [];
  return [
    note(
      `The details of this step are not in this file: it keeps ${number(detailed.size)} of ` +
        `${number(steps.length)} steps, the longest and every n-th. Write a report of this one ` +
        `with --steps ${shownStep().step}.`,
    ),
  ];
}
