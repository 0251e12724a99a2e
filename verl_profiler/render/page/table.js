// Sortable tables.

const FORMATS = {s: seconds, q: quantile, share, n: number, bytes, text: clean};

// options: caption, columns ({key, label, format, title, bar, color}), rows, sort ([key, descending]),
// limit, onRow(row), selected(row), label(row).
function table(options) {
  const {columns, rows, limit = 25, onRow} = options;
  let [sortKey, descending] = options.sort || [null, false];
  let everything = false;
  const most = {};
  for (const column of columns) {
    if (column.bar) most[column.key] = Math.max(...rows.map((row) => row[column.key] || 0), 1e-12);
  }
  const body = element('tbody');
  const more = element('button', {type: 'button', class: 'more', onclick: () => { everything = !everything; fill(); }});
  const heads = columns.map((column) => {
    const button = element('button', {type: 'button', title: column.title || null,
      onclick: () => {
        if (sortKey === column.key) descending = !descending;
        else [sortKey, descending] = [column.key, !isText(column)];
        fill();
      }}, column.label);
    return element('th', {scope: 'col', class: isText(column) ? 'text' : null}, button);
  });

  function isText(column) { return column.format === 'text'; }

  function sorted() {
    if (sortKey === null) return rows;
    const factor = descending ? -1 : 1;
    return rows.slice().sort((one, other) => {
      const a = one[sortKey], b = other[sortKey];
      const missing = (a === null || a === undefined) - (b === null || b === undefined);
      if (missing) return missing;
      if (typeof a === 'string' || typeof b === 'string') {
        return factor * String(a).localeCompare(String(b), 'en', {numeric: true});
      }
      return factor * ((a > b) - (a < b));
    });
  }

  function cell(row, column, first) {
    const format = column.show || FORMATS[column.format || 'text'];
    const shown = format(row[column.key], row);
    const made = element(first ? 'th' : 'td', {scope: first ? 'row' : null, class: isText(column) ? 'text' : null});
    if (column.bar && shown === NONE) made.className = 'no-bar';
    if (column.bar && shown !== NONE) {
      const bar = element('span', {class: 'bar', 'aria-hidden': 'true'});
      const fill = element('span');
      fill.style.width = 100 * Math.max(0, row[column.key] || 0) / most[column.key] + '%';
      if (column.color) fill.style.background = typeof column.color === 'function' ? column.color(row) : column.color;
      bar.append(fill);
      made.append(element('span', {class: 'barred'}, element('span', {}, shown), bar));
      return made;
    }
    if (column.swatch) {
      const swatch = element('span', {class: 'swatch', 'aria-hidden': 'true'});
      swatch.style.background = colorOf(row[column.key]);
      made.append(swatch);
    }
    const content = isText(column) ? element('bdi', {}, shown) : shown;
    if (isText(column) && String(shown).length > 24) made.title = shown;
    made.append(content);
    return made;
  }

  function fill() {
    heads.forEach((head, place) => {
      const chosen = columns[place].key === sortKey;
      if (chosen) head.setAttribute('aria-sort', descending ? 'descending' : 'ascending');
      else head.removeAttribute('aria-sort');
    });
    const shown = everything ? sorted() : sorted().slice(0, limit);
    body.replaceChildren(...shown.map((row) => {
      const made = element('tr', {}, columns.map((column, place) => cell(row, column, place === 0)));
      if (onRow) {
        made.classList.add('choice');
        made.tabIndex = 0;
        if (options.label) made.setAttribute('aria-label', options.label(row));
        if (options.selected && options.selected(row)) made.setAttribute('aria-selected', 'true');
        const choose = (event) => {
          if (event.type === 'keydown' && event.key !== 'Enter' && event.key !== ' ') return;
          event.preventDefault();
          onRow(row);
          for (const each of body.children) each.removeAttribute('aria-selected');
          made.setAttribute('aria-selected', 'true');
        };
        made.addEventListener('click', choose);
        made.addEventListener('keydown', choose);
      }
      return made;
    }));
    more.hidden = rows.length <= limit;
    more.textContent = everything ? 'Show fewer' : 'Show all ' + number(rows.length);
  }

  fill();
  const made = element('table', {}, element('caption', {}, options.caption),
    element('thead', {}, element('tr', {}, heads)), body);
  return element('div', {class: 'table'}, element('div', {class: 'scroll', tabindex: '0', role: 'region',
    'aria-label': options.caption}, made), more);
}
