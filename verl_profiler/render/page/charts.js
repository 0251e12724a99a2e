// Bars of time: blocks on a track, with as many of their words as they have room for.

import {colorOf} from './data.js';
import {element, inkOn, withTip} from './dom.js';
import {clean, seconds, share} from './format.js';

/** @param {{name: string, color?: string}[]} names */
export function legend(names) {
  return element(
    'ul',
    {class: 'legend'},
    names.map(({name, color}) => element('li', {}, swatch(color || colorOf(name)), clean(name))),
  );
}

/** @param {string} color */
export function swatch(color) {
  const made = element('span', {class: 'swatch', 'aria-hidden': 'true'});
  made.style.background = color;
  return made;
}

/**
 * A block of a track; words that it has no room for are hidden.
 * @param {{begin: number, length: number, whole: number, fill: string, words?: string[]}} part
 */
export function block({begin, length, whole, fill, words = []}) {
  const made = element('span', {class: 'block'});
  // Read aloud, they are words of their own.
  made.append(...words.flatMap((word) => [element('span', {}, word), ' ']));
  made.style.left = `${(100 * begin) / whole}%`;
  made.style.width = `${(100 * length) / whole}%`;
  made.style.background = fill;
  made.style.color = inkOn(fill);
  return made;
}

/**
 * One bar, cut into parts that add up to the whole.
 * @param {{name: string, value: number, color?: string, about?: string}[]} parts
 */
export function partsBar(parts) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0);
  if (!(whole > 0)) return null;
  const label = parts.map((part) => `${clean(part.name)} ${share(part.value / whole)}`).join(', ');
  const track = element('div', {class: 'track', role: 'img', 'aria-label': label});
  let begin = 0;
  for (const {name, value, color, about} of parts) {
    const percent = share(value / whole);
    const fill = color || colorOf(name);
    const made = block({begin, length: value, whole, fill, words: [clean(name), percent]});
    track.append(withTip(made, [clean(name), `${percent} · ${seconds(value)}`, about ?? '']));
    begin += value;
  }
  return track;
}
