// Charts: the Vega-Lite specifications of the run's views, drawn by the bundled Vega in view.

import {byId, element, hideTip, showTip} from './dom.js';
import {clean} from './format.js';
import {plainText} from './unpack.js';

/** @typedef {Record<string, any>} Spec */

/** @type {Promise<(box: HTMLElement, spec: Spec, options: object) => Promise<any>> | undefined} */
let library;

function vega() {
  library ??= plainText(byId('vega').textContent ?? '').then(
    (text) =>
      new Promise((resolve) => {
        const ready = () => resolve(/** @type {any} */ (window).vegaEmbed);
        window.addEventListener('vega-ready', ready, {once: true});
        const script = element('script', {type: 'module'});
        script.textContent = text;
        document.head.append(script);
      }),
  );
  return library;
}

/** @type {(step: number) => void} */
let picked = () => {};

/**
 * Call a function with the step of what is clicked in a chart.
 * @param {(step: number) => void} call
 */
export function whenStepPicked(call) {
  picked = call;
}

/** @type {Map<Element, () => void>} */
const boxes = new Map();

const seen = new IntersectionObserver(
  (entries) => {
    for (const {isIntersecting, target} of entries) if (isIntersecting) boxes.get(target)?.();
  },
  {rootMargin: '400px'},
);

const sizes = new ResizeObserver((entries) => {
  for (const {target} of entries) if (target.firstChild) boxes.get(target)?.();
});

/** Draw what was drawn again, in the colors of the page. */
export function redrawCharts() {
  for (const [box, update] of boxes) if (box.firstChild) update();
}

/** Draw every chart, in view or not: nothing scrolls while the page is printed. */
export function drawCharts() {
  for (const update of boxes.values()) update();
}

// While it is loaded, no printer waits.
window.requestIdleCallback?.(() => boxes.size && vega());

/**
 * A chart with its title, its subtitle and its notes as text, which breaks where it has to.
 * @param {Spec} spec
 */
export function chart(spec) {
  const title = clean(spec.title.text.join(' '));
  const box = element('div', {class: 'vega', role: 'img', 'aria-label': title});
  box.style.minHeight = `${heightOf(spec)}px`;
  let state = '';
  boxes.set(box, () => {
    const width = Math.floor(box.clientWidth);
    const now = `${width} ${isDark()}`;
    if (!width || now === state) return;
    state = now;
    void draw(box, spec, width).then(() => (box.dataset.drawn = now));
  });
  seen.observe(box);
  sizes.observe(box);
  return element(
    'figure',
    {class: 'view'},
    element('h3', {}, title),
    element('p', {class: 'about'}, clean(spec.title.subtitle.join(' '))),
    box,
    ...spec.usermeta.notes.map((/** @type {string} */ text) =>
      element('p', {class: 'note'}, clean(text)),
    ),
  );
}

/**
 * About how high a chart is, so that the page does not move when it is drawn.
 * @param {Spec} spec
 * @returns {number}
 */
function heightOf(spec) {
  let height = spec.height ?? 0;
  for (const part of spec.vconcat ?? []) height += heightOf(part) + 60;
  return height;
}

/**
 * @param {HTMLElement} box
 * @param {Spec} spec
 * @param {number} width
 */
async function draw(box, spec, width) {
  const embed = await vega();
  const options = {
    mode: 'vega-lite',
    logLevel: 1,
    renderer: 'canvas',
    actions: false,
    // Expressions are interpreted: the page's policy forbids making functions of text.
    ast: true,
    defaultStyle: false,
    tooltip: showValues,
  };
  let wide = width;
  // The axes of several panels take room that only the drawn chart shows.
  for (const last of spec.vconcat ? [false, false, true] : [true]) {
    const {view} = await embed(box, fitted(spec, wide, width), options);
    view.addEventListener('click', (/** @type {Event} */ _event, /** @type {any} */ item) => {
      if (item?.datum?.step !== undefined) picked(item.datum.step);
    });
    const over = (box.querySelector('canvas')?.offsetWidth ?? 0) - width;
    if (last || over <= 0) break;
    wide -= over;
  }
  box.style.minHeight = '';
}

/**
 * The specification in the page's width, font and colors, without what the page writes itself.
 * @param {Spec} spec
 * @param {number} wide Of the panels.
 * @param {number} width Of the box.
 */
function fitted(spec, wide, width) {
  /** @type {Spec} */
  const made = colored({...spec, title: undefined}, isDark());
  made.config.background = 'transparent';
  made.config.font = getComputedStyle(document.body).fontFamily;
  made.config.padding = 0;
  for (const part of ['axis', 'legend']) made.config[part].labelFontSize = 12;
  if (width < 500) made.config.axis.labelLimit = width * 0.45;
  if (!made.vconcat) {
    made.width = wide;
    made.autosize = {type: 'fit-x', contains: 'padding'};
  } else {
    for (const each of made.vconcat) each.width = Math.max(120, wide - 60);
  }
  // The axis takes some of the width from the legend.
  narrowed(made, width < 760 ? (width - 130) / 760 : 1);
  return made;
}

/**
 * Give legends fewer columns, titles more lines and texts beside bars more room on a narrow page.
 * @param {any} value
 * @param {number} by
 */
function narrowed(value, by) {
  if (!value || typeof value !== 'object') return;
  if (value.legend?.columns) {
    value.legend.columns = Math.max(1, Math.floor(value.legend.columns * by));
  }
  if (value.layer && typeof value.title === 'string') {
    value.title = linesOf(value.title, Math.max(24, Math.floor(110 * by)));
  }
  if (by < 0.5 && value.layer?.some((/** @type {Spec} */ each) => each.mark?.dx === 6)) {
    for (const {encoding} of value.layer) {
      if (encoding?.x?.scale?.domainMax) encoding.x.scale.domainMax *= 1.5;
    }
  }
  for (const each of Object.values(value)) narrowed(each, by);
}

/**
 * @param {string} text
 * @param {number} most Characters in a line.
 */
function linesOf(text, most) {
  /** @type {string[]} */
  const lines = [''];
  for (const word of text.split(' ')) {
    const last = `${lines[lines.length - 1]} ${word}`.trim();
    if (last.length > most) lines.push(word);
    else lines[lines.length - 1] = last;
  }
  return lines;
}

function isDark() {
  return getComputedStyle(document.documentElement).colorScheme === 'dark';
}

/** @type {Record<string, string>} */
const DARK = {'#1F2328': '#e6e9ed', '#59636E': '#9aa4af', '#DDE1E6': '#3a424c', white: '#14171b'};

/**
 * A copy, in which dark colors are light where the page is dark.
 * @param {any} value
 * @param {boolean} dark
 * @returns {any}
 */
function colored(value, dark) {
  if (typeof value === 'string') return dark ? (DARK[value] ?? lightened(value)) : value;
  if (Array.isArray(value)) return value.map((each) => colored(each, dark));
  if (!value || typeof value !== 'object') return value;
  const copy = {...value};
  for (const key of Object.keys(copy)) {
    // Data has no colors, and shades of a ramp keep their order.
    const kept = key === 'data' || (key === 'scale' && copy[key]?.interpolate);
    copy[key] = kept ? structuredClone(copy[key]) : colored(copy[key], dark);
  }
  return copy;
}

/** @param {string} text */
function lightened(text) {
  if (!/^#[0-9A-Fa-f]{6}(66)?$/.test(text)) return text;
  const parts = [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  if (0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2] > 70) return text;
  const light = parts.map((part) => Math.round(part * 0.5 + 255 * 0.5));
  return `#${light.map((part) => part.toString(16).padStart(2, '0')).join('')}${text.slice(7)}`;
}

/**
 * @param {unknown} _handler
 * @param {MouseEvent} event
 * @param {unknown} _item
 * @param {Record<string, string> | string | null} values
 */
function showValues(_handler, event, _item, values) {
  if (!values || typeof values !== 'object') hideTip();
  else {
    showTip(
      event,
      Object.entries(values).map(([key, text]) => `${key}: ${clean(String(text))}`),
    );
  }
}
