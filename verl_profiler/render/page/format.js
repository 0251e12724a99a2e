// Numbers and texts as people read them; the same words as the terminal's.

export const NONE = '–';

/** @param {unknown} value */
export function missing(value) {
  return value === null || value === undefined;
}

/**
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 5e-7) return '0 s';
  if (value < 0) return `-${seconds(-value)}`;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.0095) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 0.9995) return `${(value * 1e3).toFixed(0)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 119.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/**
 * A quantile of durations; the row's maximum shows whether there are any values.
 * @param {number | null | undefined} value
 * @param {{max_s?: Num}} row
 */
export function quantile(value, row) {
  return missing(value) && !missing(row.max_s) ? 'too few' : seconds(value);
}

/** @param {number | null | undefined} value */
export function share(value) {
  if (value === null || value === undefined) return NONE;
  const percent = value * 100;
  if (percent > 0 && percent < 0.05) return '<0.1 %';
  return `${percent.toFixed(percent >= 9.95 || percent === 0 ? 0 : 1)} %`;
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  let scaled = value;
  for (const unit of ['B', 'kB', 'MB', 'GB']) {
    if (scaled < 999.5) return `${scaled.toFixed(unit === 'B' || scaled >= 9.95 ? 0 : 1)} ${unit}`;
    scaled /= 1000;
  }
  return `${scaled.toFixed(1)} TB`;
}

/** @param {number | null | undefined} value */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  const digits = Number.isInteger(value) || size >= 100 ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString('en-US', {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
}

/**
 * @param {Num} count
 * @param {string} word
 */
export function plural(count, word, words = `${word}s`) {
  return `${number(count)} ${count === 1 ? word : words}`;
}

/**
 * Control characters become their pictures, and what would reverse the text becomes its code.
 * @param {unknown} value
 */
export function clean(value) {
  if (missing(value)) return NONE;
  return String(value)
    .replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(
      /[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g,
      (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`,
    );
}

/**
 * @param {unknown} text
 * @param {number} limit
 */
export function shorten(text, limit) {
  const cleaned = clean(text);
  return cleaned.length > limit ? `${cleaned.slice(0, limit - 1)}…` : cleaned;
}

/**
 * Round values for an axis: about `count` of them between two values.
 * @param {number} from
 * @param {number} to
 * @param {number} count
 */
export function ticks(from, to, count) {
  const rough = (to - from) / count;
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = [1, 2, 5, 10].map((factor) => factor * power);
  const step = steps.find((each) => each >= rough) ?? 10 * power;
  const values = [];
  for (let place = Math.ceil(from / step - 1e-9); place * step <= to + step * 1e-9; place++) {
    values.push(place * step + 0);
  }
  return values;
}

/**
 * The label of a tick: as many digits as the distance between ticks needs.
 * @param {number} value
 * @param {number} step
 */
export function tickLabel(value, step) {
  const size = Math.max(Math.abs(value), step);
  if (size < 0.001) return `${(value * 1e6).toFixed(step < 1e-6 ? 1 : 0)} µs`;
  if (size < 1 && step < 0.1) {
    return `${(value * 1e3).toFixed(step >= 0.001 ? 0 : step >= 1e-4 ? 1 : 2)} ms`;
  }
  const digits = step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step) - 1e-9));
  return `${value.toFixed(digits)} s`;
}
