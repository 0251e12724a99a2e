// What the charts are made of: SVG drawn to the width that there is, axes, legends, bars.

import {colorOf} from './data.js';
import {element, inkOn, svg, withTip} from './dom.js';
import {clean, seconds, share, tickLabel, ticks} from './format.js';

/** @typedef {(value: number) => number} Scale */

/** @type {WeakMap<Element, () => void>} */
const updates = new WeakMap();

/**
 * Draw the charts inside an element at once, not in the next frame.
 * @param {Element} root
 */
export function drawIn(root) {
  for (const box of root.querySelectorAll('.figure')) updates.get(box)?.();
}

/**
 * Call `draw` now and whenever the width changes.
 * @param {(width: number) => SVGElement} draw
 * @param {string} [label] What a screen reader reads in place of the chart.
 */
export function drawn(draw, label) {
  const box = element('div', {class: 'figure'});
  let last = 0;
  const update = () => {
    const width = Math.round(box.clientWidth) || 1100;
    if (Math.abs(width - last) < 2) return;
    last = width;
    const chart = draw(width);
    chart.setAttribute('class', 'chart');
    if (label) {
      chart.setAttribute('role', 'img');
      chart.setAttribute('aria-label', label);
    }
    box.replaceChildren(chart);
  };
  updates.set(box, update);
  // Not inside the observer's own turn: drawing changes the height, and the browser would complain.
  new ResizeObserver(() => requestAnimationFrame(update)).observe(box);
  return box;
}

/** @param {{name: string, color?: string}[]} names */
export function legend(names) {
  const items = names.map(({name, color}) => {
    const swatch = element('span', {class: 'swatch'});
    swatch.style.background = color || colorOf(name);
    return element('li', {}, swatch, clean(name));
  });
  return element('ul', {class: 'legend'}, items);
}

/**
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 * @param {string} fill
 * @param {Record<string, string | number>} [more]
 */
export function rect(x, y, width, height, fill, more) {
  return svg('rect', {x, y, width: Math.max(0, width), height, fill, ...more});
}

/** The edge of a bar's part, seen where the page is dark. */
export const EDGE = {stroke: 'var(--edge)', 'stroke-width': 0.5};

/** @param {string} fill */
export function onClass(fill) {
  return inkOn(fill) === '#FFFFFF' ? 'on-dark' : 'on-light';
}

/**
 * @param {number} x
 * @param {number} y
 * @param {string} text
 * @param {'start' | 'middle' | 'end'} anchor
 * @param {string | null} [style] Its class.
 */
export function textAt(x, y, text, anchor, style = null) {
  return svg('text', {x, y, 'text-anchor': anchor, class: style}, text);
}

/**
 * Of several texts the first that fits into a width; null where none does.
 * @param {string[]} texts
 * @param {number} width
 */
export function fitting(texts, width) {
  return texts.find((text) => text.length * 6.6 < width) ?? null;
}

/**
 * @param {number} width
 * @param {number} height
 */
export function canvas(width, height) {
  return svg('svg', {viewBox: `0 0 ${width} ${height}`});
}

/**
 * Time from left to right under a chart, with grid lines above it.
 * @param {SVGElement} chart
 * @param {Scale} x
 * @param {number} to Seconds, from 0.
 * @param {{top: number, bottom: number, right: number}} box
 */
export function timeAxis(chart, x, to, {top, bottom, right}) {
  const values = ticks(0, to, Math.max(2, Math.floor((x(to) - x(0)) / 110)));
  const step = values.length > 1 ? values[1] - values[0] : to || 1;
  for (const value of values) {
    const at = x(value);
    if (at > right + 1) continue;
    chart.append(svg('line', {x1: at, x2: at, y1: top, y2: bottom, class: 'grid'}));
    chart.append(textAt(at, bottom + 16, tickLabel(value, step), 'middle'));
  }
}

/**
 * One bar, cut into parts that add up to the whole.
 * @param {{name: string, value: number, color?: string}[]} parts
 */
export function partsBar(parts) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  if (!(total > 0)) return null;
  const label = parts.map((part) => `${part.name} ${share(part.value / total)}`).join(', ');
  return drawn((width) => {
    const chart = canvas(width, 30);
    let from = 0;
    for (const {name, value, color} of parts) {
      const begin = (width * from) / total;
      const wide = (width * value) / total;
      from += value;
      const fill = color || colorOf(name);
      const group = svg('g', {}, rect(begin, 0, wide, 26, fill, EDGE));
      const percent = share(value / total);
      const text = fitting([`${clean(name)} ${percent}`, percent], wide - 12);
      if (text) group.append(textAt(begin + 7, 17, text, 'start', onClass(fill)));
      chart.append(withTip(group, [clean(name), `${percent} · ${seconds(value)}`]));
    }
    return chart;
  }, label);
}
