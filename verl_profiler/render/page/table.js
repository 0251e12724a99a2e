// Sortable tables.

import {colorOf} from './data.js';
import {element} from './dom.js';
import {clean, missing, NONE, number, quantile, seconds, share, size} from './format.js';

/**
 * Of a column: `bar` draws the value beside it, `swatch` the color of the name, `show` writes the
 * cell in place of the format.
 * @template Row
 * @typedef {object} ColumnOptions
 * @property {string} [title]
 * @property {boolean} [bar]
 * @property {boolean} [swatch]
 * @property {string | ((row: Row) => string)} [color] Of the bar.
 * @property {(row: Row) => string} [show]
 */

/** @typedef {'s' | 'q' | 'share' | 'n' | 'bytes' | 'text'} Format */

/**
 * @template Row
 * @typedef {[Extract<keyof Row, string>, label: string, Format, ColumnOptions<Row>?]} Column
 */

/**
 * @template Row
 * @typedef {object} TableOptions
 * @property {string} caption
 * @property {Row[]} rows
 * @property {Column<NoInfer<Row>>[]} columns
 * @property {number} [limit] Rows shown at first.
 * @property {[key: Extract<keyof NoInfer<Row>, string>, descending: boolean]} [sort]
 * @property {(row: NoInfer<Row>) => void} [onRow]
 * @property {(row: NoInfer<Row>) => boolean} [selected]
 * @property {(row: NoInfer<Row>) => string} [label] Read out for a row that can be chosen.
 */

/** @type {Record<Format, (value: any, row: object) => string>} */
const FORMATS = {s: seconds, q: quantile, share, n: number, bytes: size, text: clean};

/**
 * @template {object} Row
 * @param {TableOptions<Row>} options
 */
export function table(options) {
  const {columns, rows, limit = 25} = options;
  /** @type {[string | null, boolean]} */
  let [sortKey, descending] = options.sort || [null, false];
  let everything = false;
  const body = element('tbody');
  const more = element('button', {
    type: 'button',
    class: 'more',
    onclick: () => {
      everything = !everything;
      update();
    },
  });
  const heads = columns.map(([key, label, format, {title = null} = {}]) => {
    const sort = () => {
      if (sortKey === key) descending = !descending;
      else [sortKey, descending] = [key, format !== 'text'];
      update();
    };
    const button = element('button', {type: 'button', title, onclick: sort}, label);
    return element('th', {scope: 'col', class: format === 'text' ? 'text' : null}, button);
  });
  const cells = columns.map((column, place) => cellMaker(column, rows, place === 0));

  function update() {
    heads.forEach((head, place) => {
      const order = descending ? 'descending' : 'ascending';
      if (columns[place][0] === sortKey) head.setAttribute('aria-sort', order);
      else head.removeAttribute('aria-sort');
    });
    const ordered = sortKey === null ? rows : sorted(rows, sortKey, descending);
    const first = everything ? ordered : ordered.slice(0, limit);
    body.replaceChildren(...first.map(line));
    more.hidden = rows.length <= limit;
    more.textContent = everything ? 'Show fewer' : `Show all ${number(rows.length)}`;
  }

  /** @param {Row} row */
  function line(row) {
    const made = element('tr', {}, ...cells.map((cell) => cell(row)));
    if (options.onRow) choosable(made, row, options);
    return made;
  }

  const head = element('thead', {}, element('tr', {}, heads));
  const made = element('table', {}, element('caption', {}, options.caption), head, body);
  update();
  const scroll = {class: 'scroll', role: 'region', 'aria-label': `Table: ${options.caption}`};
  return element('div', {class: 'table'}, element('div', scroll, made), more);
}

/**
 * Let a click on a row choose it; for the keyboard, its name is a button.
 * @template Row
 * @param {HTMLTableRowElement} made
 * @param {Row} row
 * @param {TableOptions<Row>} options
 */
function choosable(made, row, {onRow, label, selected}) {
  const [name] = made.cells;
  const button = element('button', {
    type: 'button',
    class: 'name',
    'aria-label': label?.(row) ?? null,
  });
  button.append(...name.childNodes);
  name.append(button);
  made.classList.add('choice');
  made.ariaCurrent = String(selected?.(row) ?? false);
  made.addEventListener('click', () => {
    onRow?.(row);
    for (const each of made.parentElement?.children ?? []) each.ariaCurrent = String(each === made);
  });
}

/**
 * Missing values last, numbers inside texts by their size.
 * @template {object} Row
 * @param {Row[]} rows
 * @param {string} key
 * @param {boolean} descending
 */
function sorted(rows, key, descending) {
  const factor = descending ? -1 : 1;
  /** @param {Row} row */
  const cellOf = (row) => /** @type {Record<string, any>} */ (row)[key];
  return rows.slice().sort((one, other) => {
    const a = cellOf(one);
    const b = cellOf(other);
    const without = Number(missing(a)) - Number(missing(b));
    if (without) return without;
    if (typeof a === 'string' || typeof b === 'string') {
      return factor * String(a).localeCompare(String(b), 'en', {numeric: true});
    }
    return factor * (Number(a > b) - Number(a < b));
  });
}

/**
 * @template {object} Row
 * @param {Column<Row>} column
 * @param {Row[]} rows
 * @param {boolean} first
 */
function cellMaker([key, , format, {bar, swatch, color, show} = {}], rows, first) {
  const isText = format === 'text';
  /** @param {Row} row */
  const cellOf = (row) => /** @type {any} */ (row[key]);
  const most = bar ? Math.max(...rows.map((row) => cellOf(row) || 0), 1e-12) : 0;

  return (/** @type {Row} */ row) => {
    const shown = show ? show(row) : FORMATS[format](cellOf(row), row);
    const made = element(first ? 'th' : 'td', {
      scope: first ? 'row' : null,
      class: isText ? 'text' : null,
    });
    if (bar && shown !== NONE) {
      const filled = element('span');
      filled.style.width = `${(100 * Math.max(0, cellOf(row) || 0)) / most}%`;
      if (color) filled.style.background = typeof color === 'function' ? color(row) : color;
      const drawn = element('span', {class: 'bar', 'aria-hidden': 'true'}, filled);
      made.append(element('span', {class: 'barred'}, element('span', {}, shown), drawn));
      return made;
    }
    if (bar) made.className = 'no-bar';
    if (swatch) {
      const square = element('span', {class: 'swatch', 'aria-hidden': 'true'});
      square.style.background = colorOf(cellOf(row));
      made.append(square);
    }
    if (isText && shown.length > 24) made.title = shown;
    made.append(isText ? element('bdi', {}, shown) : shown);
    return made;
  };
}
