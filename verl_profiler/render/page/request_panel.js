// One request in detail: its parts, its turns on a time axis, and its turns in a table.

import {note} from './blocks.js';
import {
  canvas,
  drawn,
  EDGE,
  fitting,
  legend,
  onClass,
  partsBar,
  rect,
  textAt,
  timeAxis,
} from './charts.js';
import {colorOf, DATA, steps, timelines} from './data.js';
import {element, svg, withTip} from './dom.js';
import {clean, number, plural, seconds} from './format.js';
import {
  callOf,
  callsOf,
  ENGINE_PARTS,
  requestParts,
  spanLines,
  spansOf,
  turnRows,
} from './request.js';
import {table} from './table.js';

/** @typedef {import('./request.js').Span} Span */
/** @typedef {import('./request.js').Call} Call */
/** @typedef {import('./request.js').Turn} Turn */

/** @param {RequestRow} request */
export function requestPanel(request) {
  const spans = spansOf(request);
  const calls = callsOf(request);
  const parts = requestParts(request);
  const turns = turnRows(spans, calls);
  const id = element('bdi', {}, clean(request.request_id ?? '(no request id)'));
  const time = request.duration_s === null ? 'did not end' : seconds(request.duration_s);
  const timed = calls.some((call) => ENGINE_PARTS.some((key) => call[key] !== null));
  const untimed = (DATA.notes.engine || ['Queue, prefill and decode times are unknown.'])[0];
  return element(
    'div',
    {class: 'panel', id: 'panel'},
    element('h3', {}, id, ': ', time),
    element('p', {class: 'facts'}, factsOf(request).join(' · ')),
    parts.length ? partsBar(parts) : null,
    spans.length
      ? breakdown(request, spans, calls)
      : note('Nothing was recorded inside this request.'),
    turns.length ? turnsTable(turns) : null,
    calls.length && !timed ? note(untimed) : null,
  );
}

/** @param {RequestRow} request */
function factsOf(request) {
  const {sample, session, status, error} = request;
  const facts = [`step ${clean(steps[request.s].label)}${request.validate ? ', validation' : ''}`];
  facts.push(clean(request.name));
  if (sample !== null) {
    facts.push(`sample ${clean(sample)}${session === null ? '' : `, session ${clean(session)}`}`);
  }
  if (request.turns !== null) facts.push(plural(request.turns, 'turn'));
  if (request.prompt_tokens !== null) facts.push(plural(request.prompt_tokens, 'prompt token'));
  if (request.generated_tokens !== null) {
    facts.push(plural(request.generated_tokens, 'generated token'));
  }
  if (request.reward !== null) facts.push(`reward ${number(request.reward)}`);
  if (status !== null) {
    facts.push(`status ${clean(status)}${error === null ? '' : ` (${clean(error)})`}`);
  }
  return facts;
}

/** @param {Turn[]} rows */
function turnsTable(rows) {
  const outside = 'Part of the call outside the engine server';
  const cached = 'Prompt tokens found in the engine’s cache';
  /** @type {import('./table.js').Column<Turn>[]} */
  const columns = [
    ['turn', 'turn', 'n'],
    ['length', 'time', 's'],
    ['engine', 'engine call', 's'],
    ['queue', 'queue', 's'],
    ['prefill', 'prefill', 's'],
    ['decode', 'decode', 's'],
    ['outside', 'outside', 's', {title: outside}],
    ['tools', 'tools', 's'],
    ['tool_names', 'tool calls', 'text'],
    ['prompt_tokens', 'prompt', 'n', {title: 'Prompt tokens'}],
    ['response_tokens', 'generated', 'n', {title: 'Generated tokens'}],
    ['cached_tokens', 'cached', 'n', {title: cached}],
    ['rate', 'call tokens/s', 'n', {title: 'Generated tokens divided by the time of the calls'}],
    ['server', 'server', 'text'],
  ];
  /** Columns that are there only with values in them. */
  const optional = [...ENGINE_PARTS, 'outside', 'cached_tokens'];
  return table({
    caption: 'Turns of this request',
    rows,
    limit: 12,
    columns: columns.filter(
      ([key]) => !optional.includes(key) || rows.some((row) => row[key] !== null),
    ),
  });
}

/**
 * A row of the breakdown; each of its spans on a line on which no other overlaps it.
 * @typedef {{label: string, spans: Span[], lines: Map<Span, number>, height: number}} BreakdownRow
 */

/**
 * What comes before the turns, the turns, what comes after them.
 * @param {Span[]} spans
 * @returns {BreakdownRow[]}
 */
function rowsOf(spans) {
  const turns = new Set(spans.map((span) => span.turn));
  const withCalls = new Set(
    spans.filter((span) => span.event === 'tool_call').map((span) => span.turn),
  );
  const visible = spans.filter(
    ({event, turn}) => event !== 'turn' && !(event === 'tool_execution' && withCalls.has(turn)),
  );
  /** @param {Span} span */
  const before = (span) => span.event === 'prompt_build';
  /** @param {Span} span */
  const after = (span) => span.event === 'postprocess' || span.event === 'reward';
  /** @type {[label: string, spans: Span[], always: boolean][]} */
  const rows = [['prompt', visible.filter(before), false]];
  const numbered = [...turns].filter((turn) => turn !== null).sort((a, b) => a - b);
  for (const turn of numbered) {
    rows.push([`turn ${turn}`, visible.filter((span) => span.turn === turn), true]);
  }
  const loose = visible.filter((span) => span.turn === null && !before(span) && !after(span));
  rows.push(['no turn', loose, false], ['end', visible.filter(after), false]);
  return rows
    .filter(([, own, always]) => own.length || always)
    .map(([label, own]) => ({label, ...packed(own)}));
}

/**
 * Give overlapping spans (tools that run at the same time) lines of their own; what lies inside
 * another stays on top of it.
 * @param {Span[]} spans
 */
function packed(spans) {
  /** @param {Span} span */
  const inside = ({event}) => event === 'reward' || event === 'server_acquire';
  /** @type {number[]} */
  const ends = [];
  /** @type {Map<Span, number>} */
  const lines = new Map();
  for (const span of spans) {
    if (inside(span)) continue;
    const free = ends.findIndex((end) => end <= span.begin + 2e-5);
    const line = free < 0 ? ends.length : free;
    ends[line] = span.begin + span.length;
    lines.set(span, Math.min(line, 7));
  }
  /** @param {Span} span */
  const last = (span) => Number(span.event === 'reward');
  return {
    spans: spans.slice().sort((a, b) => last(a) - last(b)),
    lines,
    height: Math.max(1, Math.min(ends.length, 8)),
  };
}

/** @param {Span} span */
function shownName({event}) {
  if (event === 'engine_call') return 'engine';
  return event === 'tool_call' || event === 'tool_execution' ? 'tool' : event;
}

/**
 * @param {RequestRow} request
 * @param {Span[]} spans
 * @param {Call[]} calls
 */
function breakdown(request, spans, calls) {
  const length = request.length * timelines.unit_s || 1e-6;
  const rows = rowsOf(spans);
  const known = ENGINE_PARTS.filter((key) => calls.some((call) => (call[key] ?? 0) > 0));
  /** @type {Map<string, string>} */
  const names = new Map();
  for (const span of rows.flatMap((row) => row.spans)) {
    // Where the engine's parts are known, they stand for the call.
    if (span.event === 'engine_call' && known.length) {
      for (const key of [...known, 'outside']) names.set(key, names.get(key) ?? colorOf(key));
    } else if (span.event !== 'server_acquire') {
      const name = shownName(span);
      names.set(name, names.get(name) ?? span.color);
    }
  }
  const high = rows.length > 24 ? 13 : 20;
  const bottom = rows.reduce((sum, row) => sum + row.height * high + 5, 0);
  const chart = drawn((width) => {
    const left = 62;
    const right = width - 12;
    const made = canvas(width, bottom + 26);
    const x = (/** @type {number} */ value) => left + ((right - left) * value) / length;
    timeAxis(made, x, length, {top: 0, bottom, right});
    let y = 2;
    for (const row of rows) {
      made.append(textAt(left - 8, y + high * 0.68, row.label, 'end', 'ink'));
      for (const span of row.spans) {
        if (span.event === 'server_acquire') continue;
        const top = y + (row.lines.get(span) ?? 0) * high;
        const call = span.event === 'engine_call' ? callOf(span, calls) : undefined;
        made.append(withTip(bar(span, call, x, top, high - 3), spanLines(span, call)));
      }
      y += row.height * high + 5;
    }
    return made;
  }, 'Timeline of the request; the table below has the same numbers');
  return element('div', {}, legend([...names].map(([name, color]) => ({name, color}))), chart);
}

/**
 * @param {Span} span
 * @param {Call | undefined} call
 * @param {(value: number) => number} x
 * @param {number} top
 * @param {number} height
 */
function bar(span, call, x, top, height) {
  const begin = x(span.begin);
  const wide = Math.max(x(span.begin + span.length) - begin, 1);
  const group = svg('g', {}, rect(begin, top, wide, height, span.color, EDGE));
  // The label names the widest part where the engine's parts are known.
  const event = span.event === 'engine_call' ? 'engine' : span.event;
  const name = span.tool ? clean(span.tool) : event;
  const own = {name, length: span.length, fill: span.color, begin, wide};
  const label = (call && engineParts(group, span, call, x, top, height)) ?? own;
  const time = seconds(label.length);
  const text = height > 12 ? fitting([`${label.name} ${time}`, time], label.wide - 10) : null;
  if (text) {
    const baseline = top + height * 0.72;
    group.append(textAt(label.begin + 5, baseline, text, 'start', onClass(label.fill)));
  }
  if (span.failed) group.append(rect(begin + wide - 2, top, 2, height, 'var(--accent)'));
  return group;
}

/**
 * Draw inside a call what the engine accounts for, and the rest of the call outside the engine;
 * return the widest part.
 * @param {SVGElement} group
 * @param {Span} span
 * @param {Call} call
 * @param {(value: number) => number} x
 * @param {number} top
 * @param {number} height
 */
function engineParts(group, span, call, x, top, height) {
  const known = ENGINE_PARTS.filter((key) => (call[key] ?? 0) > 0);
  if (call.engine_begin === null || !known.length) return null;
  const end = span.begin + span.length;
  group.append(rect(x(span.begin), top, x(end) - x(span.begin), height, colorOf('outside')));
  const until = Math.min(call.engine_begin + (call.engine_length ?? 0), end);
  let at = call.engine_begin;
  const parts = known.map((name) => {
    const begin = x(at);
    const length = call[name] ?? 0;
    at = Math.min(at + length, until);
    return {name, length, fill: colorOf(name), begin, wide: x(at) - begin};
  });
  for (const part of parts) group.append(rect(part.begin, top, part.wide, height, part.fill));
  return parts.reduce((widest, part) => (part.wide > widest.wide ? part : widest));
}
