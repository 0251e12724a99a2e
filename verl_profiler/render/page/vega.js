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
  // A label at the end of an axis is half of it beyond the end.
  made.config.padding = {left: 0, top: 0, right: 14, bottom: 5};
  for (const part of ['axis', 'legend']) made.config[part].labelFontSize = 12;
  if (width < 500) made.config.axis.labelLimit = width * 0.45;
  if (!made.vconcat) {
    made.width = wide;
    made.autosize = {type: 'fit-x', contains: 'padding'};
  } else {
    for (const each of made.vconcat) each.width = Math.max(120, wide - 60);
  }
  arranged(made, width, made.vconcat ? width - 110 : width - 20);
  return made;
}

// Pixels of a line of text, of a bar below its name, and of the shortest bars.
const LINE = 15;
const BAR = 10;
const SHORTEST = 130;

/**
 * Give legends as many columns, titles as many lines, and bars as much room as there is.
 * @param {any} value
 * @param {number} width
 * @param {number} line Of a text in a panel.
 */
function arranged(value, width, line) {
  if (!value || typeof value !== 'object') return;
  if (value.legend?.columns && value.scale?.domain) {
    const column = longest(value.scale.domain) + 44;
    value.legend.columns = Math.max(1, Math.floor((width - 100) / column));
  }
  if (value.layer && typeof value.title === 'string') {
    value.title = linesOf(value.title, line);
  }
  if (value.layer?.[0].encoding?.y?.type === 'nominal') arrangeNames(value, width, line);
  for (const each of Object.values(value)) arranged(each, width, line);
}

const pen = element('canvas').getContext('2d');

/** @param {string} text */
function pixels(text) {
  if (!pen) return 6 * text.length;
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

/** @param {string[]} texts */
function longest(texts) {
  return Math.max(0, ...texts.map(pixels));
}

/**
 * Make room behind bars for their texts; where there is none, names and texts are above the bars.
 * @param {Spec} panel
 * @param {number} width
 * @param {number} line
 */
function arrangeNames(panel, width, line) {
  /** @type {Spec[]} */
  const layers = panel.layer;
  if (layers.some(({mark}) => mark === 'rect')) return;
  /** @type {string[]} */
  const order = layers[0].encoding.y.scale.domain;
  const texts = layers.find(({mark}) => mark.dx === 6);
  /** @type {Spec[]} */
  const written = texts ? texts.data.values : [];
  const room = width - longest(order) - 30;
  const left = room - longest(written.map(({text}) => text)) - 16;
  if (left >= SHORTEST) {
    const top = (Math.max(0, ...written.map(({high}) => high)) * room) / left;
    if (top) for (const {encoding} of layers) encoding.x.scale.domainMax = top;
    return;
  }
  const above = order.map((name) => {
    const text = written.find(({at}) => at === name)?.text;
    return {at: name, text: linesOf(text ? `${name}: ${text}` : name, line)};
  });
  const lines = Math.max(...above.map(({text}) => text.length));
  const high = LINE * lines;
  // Fewer lines are next to their bar, too.
  for (const each of above) each.text.unshift(...Array(lines - each.text.length).fill(''));
  panel.height = order.length * (high + BAR + 8);
  panel.layer = layers.filter((each) => each !== texts);
  for (const {encoding, mark} of panel.layer) {
    if (texts) delete encoding.x.scale.domainMax;
    if (encoding.y) encoding.y.axis.labels = false;
    if (mark.type === 'bar') mark.height = BAR;
    if (encoding.y) mark.yOffset = high / 2;
  }
  panel.layer.push({
    data: {values: above},
    mark: {
      type: 'text',
      align: 'left',
      baseline: 'top',
      lineHeight: LINE,
      dy: -(high + BAR + 6) / 2,
    },
    encoding: {x: {value: 0}, y: layers[0].encoding.y, text: {field: 'text'}},
  });
}

/**
 * @param {string} text
 * @param {number} width
 */
function linesOf(text, width) {
  const lines = [];
  let rest = text;
  while (pixels(rest) > width) {
    let end = rest.length;
    while (end > 1 && pixels(rest.slice(0, end)) > width) end -= 1;
    // Between words, unless much of the line would be empty.
    const word = 1 + rest.slice(0, end).search(/[ .:/_][^ .:/_]*$/);
    if (word > end * 0.6) end = word;
    lines.push(rest.slice(0, end));
    rest = rest.slice(end).trimStart();
  }
  return [...lines, rest];
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
  if (typeof value === 'string') return dark ? lightened(value) : value;
  if (Array.isArray(value)) return value.map((each) => colored(each, dark));
  if (!value || typeof value !== 'object') return value;
  const copy = {...value};
  for (const key of Object.keys(copy)) {
    // Data has no colors.
    if (key === 'data') copy[key] = structuredClone(copy[key]);
    else if (key === 'range' && isRamp(copy[key])) copy[key] = rampOf(copy[key], dark);
    else copy[key] = colored(copy[key], dark);
  }
  return copy;
}

/** @param {string} code */
function partsOf(code) {
  return [1, 3, 5].map((at) => parseInt(code.slice(at, at + 2), 16));
}

/** @param {string} code */
function lightness(code) {
  const [red, green, blue] = partsOf(code);
  return 0.299 * red + 0.587 * green + 0.114 * blue;
}

/**
 * @param {string} code
 * @param {number} share Of white.
 */
function mixed(code, share) {
  const parts = partsOf(code).map((part) => Math.round(part * (1 - share) + 255 * share));
  return `#${parts.map((part) => part.toString(16).padStart(2, '0')).join('')}${code.slice(7)}`;
}

/** The first shade of a few; any two blues may be colors of parts. */
const LIGHTEST = '#D6E6F2';

/**
 * Whether colors are shades of blue, from light to dark.
 * @param {any} range
 */
function isRamp(range) {
  return (
    Array.isArray(range) &&
    (range.length > 2 || range[0] === LIGHTEST) &&
    range.every((code, at) => {
      const [red, green, blue] = partsOf(String(code));
      return red <= green && green <= blue && (!at || lightness(code) < lightness(range[at - 1]));
    })
  );
}

/**
 * The most is what stands out from the page.
 * @param {string[]} range
 * @param {boolean} dark
 */
function rampOf(range, dark) {
  return dark ? range.toReversed().map((code) => mixed(code, 0.3)) : [...range];
}

/** @param {string} text */
function lightened(text) {
  if (text === 'white') return DARK[text];
  if (!/^#[0-9A-Fa-f]{6}(66)?$/.test(text)) return text;
  const own = DARK[text.slice(0, 7)];
  if (own) return own + text.slice(7);
  return lightness(text) > 70 ? text : mixed(text, 0.5);
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
