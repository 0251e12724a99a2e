// Numbers and texts as people read them; the same words as the terminal's.

const DATA = JSON.parse(document.getElementById('data').textContent);

const NONE = '–';

function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 5e-7) return '0 s';
  if (value < 0) return '-' + seconds(-value);
  if (value < 0.001) return (value * 1e6).toFixed(0) + ' µs';
  if (value < 0.0095) return (value * 1e3).toFixed(1) + ' ms';
  if (value < 0.9995) return (value * 1e3).toFixed(0) + ' ms';
  if (value < 9.995) return value.toFixed(2) + ' s';
  if (value < 119.95) return value.toFixed(1) + ' s';
  const whole = Math.round(value);
  if (whole < 7200) return Math.floor(whole / 60) + ' min ' + (whole % 60) + ' s';
  return Math.floor(whole / 3600) + ' h ' + Math.floor((whole % 3600) / 60) + ' min';
}

// A quantile of lengths of time; the row's maximum shows whether there are any values.
function quantile(value, row) {
  const none = value === null || value === undefined;
  return none && row.max_s !== null && row.max_s !== undefined ? 'too few' : seconds(value);
}

function share(value) {
  if (value === null || value === undefined) return NONE;
  const percent = value * 100;
  if (percent > 0 && percent < 0.05) return '<0.1 %';
  return (percent >= 9.95 || percent === 0 ? percent.toFixed(0) : percent.toFixed(1)) + ' %';
}

function bytes(value) {
  if (value === null || value === undefined) return NONE;
  for (const unit of ['B', 'kB', 'MB', 'GB']) {
    if (value < 999.5) {
      return (unit === 'B' || value >= 9.95 ? value.toFixed(0) : value.toFixed(1)) + ' ' + unit;
    }
    value /= 1000;
  }
  return value.toFixed(1) + ' TB';
}

function number(value) {
  if (value === null || value === undefined) return NONE;
  const digits = Number.isInteger(value) || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString('en-US', {minimumFractionDigits: digits, maximumFractionDigits: digits});
}

function plural(count, word, words) {
  return number(count) + ' ' + (count === 1 ? word : words || word + 's');
}

// Control characters are shown as their pictures, and what would turn the text around by its code.
function clean(value) {
  if (value === null || value === undefined) return NONE;
  return String(value)
    .replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g,
      (c) => '\\u' + c.charCodeAt(0).toString(16).padStart(4, '0'));
}

function shorten(text, limit) {
  const cleaned = clean(text);
  return cleaned.length > limit ? cleaned.slice(0, limit - 1) + '…' : cleaned;
}

// Rows of a table as objects.
function unpack(table) {
  return table.rows.map((row) => {
    const object = {};
    table.columns.forEach((column, place) => { object[column] = row[place]; });
    return object;
  });
}

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith('on')) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, '');
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) made.append(child);
  }
  return made;
}

function svg(name, attributes, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) made.append(child);
  }
  return made;
}

function colorOf(name) {
  return DATA.colors[name] || '#8FA3BF';
}

// Whether dark or light text can be read on a color.
function inkOn(color) {
  const value = parseInt(color.slice(1), 16);
  const light = 0.299 * (value >> 16) + 0.587 * ((value >> 8) & 255) + 0.114 * (value & 255);
  return light > 140 ? '#1F2328' : '#FFFFFF';
}

// Round values for an axis: about `count` of them from 0 (or `from`) to `to`.
function ticks(from, to, count) {
  const rough = (to - from) / count;
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const values = [];
  for (let place = Math.ceil(from / step - 1e-9); place * step <= to + step * 1e-9; place++) {
    values.push(place * step + 0);
  }
  return values;
}

// The label of a tick: as many digits as the distance between ticks needs.
function tickLabel(value, step) {
  const absolute = Math.max(Math.abs(value), step);
  if (absolute < 0.001) return (value * 1e6).toFixed(step < 1e-6 ? 1 : 0) + ' µs';
  if (absolute < 1 && step < 0.1) {
    return (value * 1e3).toFixed(step >= 0.001 ? 0 : step >= 1e-4 ? 1 : 2) + ' ms';
  }
  return value.toFixed(step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step) - 1e-9))) + ' s';
}

const tip = document.getElementById('tip');

// Shows lines of text beside the pointer; the first one stands out.
function showTip(event, lines) {
  tip.replaceChildren(...lines.filter(Boolean).map((line) => element('div', {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - box.width - 8);
  let top = event.clientY + 16;
  if (top + box.height > window.innerHeight - 8) top = event.clientY - box.height - 12;
  tip.style.left = Math.max(4, left) + 'px';
  tip.style.top = Math.max(4, top) + 'px';
}

function hideTip() {
  tip.hidden = true;
}

function withTip(node, lines) {
  node.addEventListener('pointermove', (event) => showTip(event, lines));
  node.addEventListener('pointerleave', hideTip);
  return node;
}
