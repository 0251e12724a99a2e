// Sortable tables.

import {element} from './dom.js';
import {clean, missing, number, quantile, seconds, share, size} from './format.js';

/** @typedef {'s' | 'q' | 'share' | 'n' | 'bytes' | 'text'} Format */

/** @typedef {[key: string, label: string, Format, title?: string]} Column */

/**
 * @template Row
 * @typedef {object} TableOptions
 * @property {string} caption
 * @property {Row[]} rows
 * @property {Column[]} columns
 * @property {number} [limit] Rows shown at first.
 * @property {[key: string, descending: boolean]} [sort]
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
  const heads = columns.map(([key, label, format, title = '']) => {
    const sort = () => {
      if (sortKey === key) descending = !descending;
      else [sortKey, descending] = [key, format !== 'text'];
      update();
    };
    const button = element('button', {type: 'button', title: title || null, onclick: sort}, label);
    return element('th', {scope: 'col', class: format === 'text' ? 'text' : null}, button);
  });

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
    const cells = columns.map((column, place) => cellOf(column, row, place === 0));
    const made = element('tr', {}, cells);
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
  const valueOf = (row) => /** @type {Record<string, any>} */ (row)[key];
  return rows.slice().sort((one, other) => {
    const a = valueOf(one);
    const b = valueOf(other);
    const without = Number(missing(a)) - Number(missing(b));
    if (without) return without;
    if (typeof a === 'string' || typeof b === 'string') {
      return factor * String(a).localeCompare(String(b), 'en', {numeric: true});
    }
    return factor * (Number(a > b) - Number(a < b));
  });
}

/**
 * @param {Column} column
 * @param {any} row
 * @param {boolean} first
 */
function cellOf([key, , format], row, first) {
  const isText = format === 'text';
  const shown = FORMATS[format](row[key], row);
  const long = shown.length > 24;
  const made = element(first ? 'th' : 'td', {
    scope: first ? 'row' : null,
    class: isText ? `text${long ? '' : ' short'}` : null,
    title: isText && long ? shown : null,
  });
  made.append(isText ? element('bdi', {}, shown) : shown);
  return made;
}

/**
 * The columns of a table that has any value in them.
 * @param {ShownColumn[]} columns
 * @param {Record<string, any>[]} rows
 * @returns {Column[]}
 */
export function columnsOf(columns, rows) {
  /** @param {string} key */
  const plain = (key) =>
    rows.some((row) => typeof row[key] === 'string' || Array.isArray(row[key])) ? 'text' : 'n';
  return columns
    .filter(([key]) => rows.some((row) => !missing(row[key]) && row[key] !== false))
    .map(([key, label, format, title]) => [key, label, format || plain(key), title]);
}
