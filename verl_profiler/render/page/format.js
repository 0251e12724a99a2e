// Numbers and texts as people read them. What has units follows verl_profiler/units.py.

const NONE = '-';

/** @param {unknown} value */
export function missing(value) {
  return value === null || value === undefined;
}

/**
 * A number that is not negative, with this many decimals; a tie is rounded up.
 * @param {number} value
 * @param {number} digits
 */
function fixed(value, digits) {
  const scale = 10 ** digits;
  return (Math.floor(value * scale + 0.5) / scale).toFixed(digits);
}

/**
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (Math.abs(value) < 5e-7) return '0 s';
  if (value < 0) return `-${seconds(-value)}`;
  if (value < 0.001) return `${fixed(value * 1e6, 0)} µs`;
  if (value < 0.0095) return `${fixed(value * 1e3, 1)} ms`;
  if (value < 0.9995) return `${fixed(value * 1e3, 0)} ms`;
  if (value < 119.95) return `${fixed(value, value < 9.995 ? 2 : 1)} s`;
  const whole = Math.floor(value + 0.5);
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

/**
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function share(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const percent = value * 100;
  if (percent !== 0 && Math.abs(percent) < 0.05) return percent > 0 ? '<0.1 %' : '>-0.1 %';
  if (percent < 0) return `-${share(-value)}`;
  return `${fixed(percent, percent > 0 && percent < 9.95 ? 1 : 0)} %`;
}

/**
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function size(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value < 0) return `-${size(-value)}`;
  if (value < 1023.5) return `${fixed(value, 0)} B`;
  let scaled = value / 1024;
  for (const unit of ['KiB', 'MiB', 'GiB']) {
    if (scaled < 1023.5) return `${fixed(scaled, scaled < 99.95 ? 1 : 0)} ${unit}`;
    scaled /= 1024;
  }
  return `${fixed(scaled, 1)} TiB`;
}

/** @param {number | null | undefined} value */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  const magnitude = Math.abs(value);
  const digits = Number.isInteger(value) || magnitude >= 100 ? 0 : magnitude >= 10 ? 1 : 2;
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
  const magnitude = Math.max(Math.abs(value), step);
  if (magnitude < 0.001) return `${(value * 1e6).toFixed(step < 1e-6 ? 1 : 0)} µs`;
  if (magnitude < 1 && step < 0.1) {
    return `${(value * 1e3).toFixed(step >= 0.001 ? 0 : step >= 1e-4 ? 1 : 2)} ms`;
  }
  const digits = step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step) - 1e-9));
  return `${value.toFixed(digits)} s`;
}
