// One request as objects: its parts, its spans, its engine calls and its turns.

import {requests, timelines} from './data.js';
import {clean, plural, seconds, shorten} from './format.js';

const PARTS = /** @type {const} */ ([
  'engine',
  'tool',
  'prompt_build',
  'tool_parsing',
  'token_merge',
  'postprocess',
  'reward',
  'other',
]);

/** The parts of an engine call that the engine accounts for. */
export const ENGINE_PARTS = /** @type {const} */ (['queue', 'prefill', 'decode']);

/**
 * Times are in seconds after the begin of the request.
 * @typedef {object} Span
 * @property {string} event
 * @property {MaybeText} tool
 * @property {boolean} failed
 * @property {string} color
 * @property {Num} turn
 * @property {number} begin
 * @property {number} length
 *
 * @typedef {ReturnType<typeof callsOf>[number]} Call
 */

/** @param {RequestRow} request */
export function requestParts(request) {
  return PARTS.map((name) => ({name, value: request[`${name}_s`] ?? 0}))
    .filter((part) => part.value > 0)
    .sort((a, b) => b.value - a.value);
}

/**
 * A request in a few lines, for the tip and above its breakdown.
 * @param {RequestRow} request
 */
export function requestLines(request) {
  const parts = requestParts(request).slice(0, 3);
  return [
    shorten(request.request_id ?? '(no request id)', 48),
    request.duration_s === null
      ? 'did not end'
      : `${seconds(request.duration_s)}, ${plural(request.turns || 0, 'turn')}`,
    parts.map((part) => `${part.name} ${seconds(part.value)}`).join(', '),
    request.status ? `status: ${clean(request.status)}` : null,
  ];
}

/**
 * The slowest finished training request of those wanted.
 * @param {(request: RequestRow) => boolean} wanted
 * @returns {RequestRow | undefined}
 */
export function slowestOf(wanted) {
  return requests
    .filter((request) => !request.validate && request.duration_s !== null && wanted(request))
    .sort((a, b) => (b.duration_s ?? 0) - (a.duration_s ?? 0))[0];
}

/**
 * @param {RequestRow} request
 * @returns {Span[]}
 */
export function spansOf({spans}) {
  const unit = timelines.unit_s;
  const found = [];
  for (let place = 0; place < spans.length; place += 4) {
    const [code, turn, begin, length] = spans.slice(place, place + 4);
    const [event, tool, failed, color] = timelines.names[code];
    found.push({
      event,
      tool,
      failed: Boolean(failed),
      color,
      turn: turn < 0 ? null : turn,
      begin: begin * unit,
      length: length * unit,
    });
  }
  return found;
}

/** @param {RequestRow} request */
export function callsOf(request) {
  /** @param {number | null | undefined} value */
  const time = (value) => (value == null ? null : value * timelines.unit_s);
  return request.calls.map((call) => ({
    turn: call[0] ?? null,
    begin: time(call[1]) ?? 0,
    length: time(call[2]) ?? 0,
    server: call[3] == null ? null : timelines.requests.servers[call[3]],
    engine_begin: time(call[4]),
    engine_length: time(call[5]),
    queue: time(call[6]),
    prefill: time(call[7]),
    decode: time(call[8]),
    prompt_tokens: call[9] ?? null,
    response_tokens: call[10] ?? null,
    cached_tokens: call[11] ?? null,
  }));
}

/**
 * The engine call that a span stands for.
 * @param {Span} span
 * @param {Call[]} calls
 */
export function callOf(span, calls) {
  const near = 2 * timelines.unit_s;
  return calls.find((call) => call.turn === span.turn && Math.abs(call.begin - span.begin) < near);
}

/**
 * A span of a request by its place, in a few lines.
 * @param {RequestRow} request
 * @param {number} place
 */
export function sliceLines(request, place) {
  const span = spansOf(request)[place];
  return spanLines(span, callOf(span, callsOf(request)));
}

/**
 * A span's own begin, duration, tokens and status in a few lines.
 * @param {Span} span
 * @param {Call | undefined} call
 */
export function spanLines(span, call) {
  const turn = span.turn === null ? '' : ` · turn ${span.turn}`;
  const lines = [
    span.tool ? `tool ${shorten(span.tool, 120)}` : span.event,
    `${seconds(span.length)}, from ${seconds(span.begin)}${turn}`,
  ];
  if (call) {
    const times = ENGINE_PARTS.filter((key) => call[key] !== null);
    if (times.length) lines.push(times.map((key) => `${key} ${seconds(call[key])}`).join(', '));
    if (call.engine_length !== null) {
      lines.push(`outside the engine ${seconds(call.length - call.engine_length)}`);
    }
    const tokens = [];
    if (call.prompt_tokens !== null) tokens.push(plural(call.prompt_tokens, 'prompt token'));
    if (call.response_tokens !== null) {
      tokens.push(plural(call.response_tokens, 'generated token'));
    }
    if (tokens.length) lines.push(tokens.join(', '));
    if (call.server !== null) lines.push(shorten(call.server, 60));
  }
  if (span.failed) lines.push('did not return');
  return lines;
}
