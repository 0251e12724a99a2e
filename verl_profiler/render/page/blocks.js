// What the sections are made of besides tables and charts: headings, sentences, notes.

import {ALL, DATA, shown, shownStep, steps} from './data.js';
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
