// One request in detail: its parts, its turns on a time axis, and its events in a table.

import {note} from './blocks.js';
import {block, legend, partsBar} from './charts.js';
import {colorOf, DATA, steps, timelines} from './data.js';
import {element, withTip} from './dom.js';
import {clean, number, plural, seconds, tickLabel, ticks} from './format.js';
import {callOf, callsOf, ENGINE_PARTS, requestParts, spanLines, spansOf} from './request.js';
import {columnsOf, table} from './table.js';

/** @typedef {import('./request.js').Span} Span */
/** @typedef {import('./request.js').Call} Call */

/** @param {RequestRow} request */
export function requestPanel(request) {
  const spans = spansOf(request);
  const calls = callsOf(request);
  const parts = requestParts(request);
  const id = element('bdi', {}, clean(request.request_id ?? '(no request id)'));
  const time = request.duration_s === null ? 'did not end' : seconds(request.duration_s);
  const timed = calls.some((call) => ENGINE_PARTS.some((key) => call[key] !== null));
  const untimed = DATA.notes.Rollout?.[0] ?? 'Queue, prefill and decode times are unknown.';
  return element(
    'div',
    {class: 'panel', id: 'panel'},
    element('h3', {}, id, ': ', time),
    element('p', {class: 'facts'}, factsOf(request).join(' · ')),
    parts.length ? partsBar(parts) : null,
    spans.length
      ? breakdown(request, spans, calls)
      : note('Nothing was recorded inside this request.'),
    spans.length ? eventsTable(spans, calls) : null,
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

/**
 * Every event of a request, and of an engine call what the engine reported.
 * @param {Span[]} spans
 * @param {Call[]} calls
 */
function eventsTable(spans, calls) {
  const rows = spans.map((span) => {
    const call = span.event === 'engine_call' ? callOf(span, calls) : undefined;
    const rest = call?.engine_length == null ? null : call.length - call.engine_length;
    return {...call, ...span, outside: rest};
  });
  /** @type {ShownColumn[]} */
  const columns = [
    ['event', 'event', '', ''],
    ['tool', 'tool', '', ''],
    ['turn', 'turn', '', ''],
    ['begin', 'begin', 's', ''],
    ['length', 'duration', 's', ''],
    ['queue', 'queue', 's', ''],
    ['prefill', 'prefill', 's', ''],
    ['decode', 'decode', 's', ''],
    ['outside', 'outside', 's', 'Part of the call outside the engine server'],
    ['prompt_tokens', 'prompt', '', 'Prompt tokens'],
    ['response_tokens', 'generated', '', 'Generated tokens'],
    ['cached_tokens', 'cached', '', 'Prompt tokens found in the engine’s cache'],
    ['server', 'server', '', ''],
  ];
  const caption = 'Events of this request';
  return table({caption, rows, limit: 12, columns: columnsOf(columns, rows)});
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
  const drawn = rows.map((row) => {
    const track = element('div', {class: 'track'});
    track.style.height = `${row.height * high + 5}px`;
    for (const span of row.spans) {
      if (span.event === 'server_acquire') continue;
      const call = span.event === 'engine_call' ? callOf(span, calls) : undefined;
      const made = bar(span, call, length);
      made.style.top = `${(row.lines.get(span) ?? 0) * high + 2}px`;
      made.style.height = `${high - 3}px`;
      track.append(withTip(made, spanLines(span, call)));
    }
    return [element('span', {}, row.label), track];
  });
  const label = 'Timeline of the request; the table below has the same numbers';
  const chart = element(
    'div',
    {class: 'rows', role: 'img', 'aria-label': label},
    drawn,
    axis(length),
  );
  return element('div', {}, legend([...names].map(([name, color]) => ({name, color}))), chart);
}

/** @param {number} length */
function axis(length) {
  const values = ticks(0, length, 6);
  const marks = values.map((value) => {
    const mark = element('span', {}, tickLabel(value, values[1] ?? length));
    mark.style.left = `${(100 * value) / length}%`;
    return mark;
  });
  return [element('span'), element('div', {class: 'track axis'}, marks)];
}

/**
 * @param {Span} span
 * @param {Call | undefined} call
 * @param {number} whole
 */
function bar(span, call, whole) {
  const {begin, length, color: fill, tool, event, failed} = span;
  const parts = call ? engineParts(span, call) : [];
  const name = tool ? clean(tool) : event === 'engine_call' ? 'engine' : event;
  const words = parts.length ? [] : [name, seconds(length)];
  const made = block({begin, length, whole, fill: parts.length ? colorOf('outside') : fill, words});
  // The label names the widest part where the engine's parts are known.
  const widest = Math.max(...parts.map((part) => part.length));
  for (const part of parts) {
    const own = part.length === widest ? [part.name, seconds(part.length)] : [];
    made.append(block({...part, begin: part.begin - begin, whole: length, words: own}));
  }
  if (failed) made.classList.add('failed');
  return made;
}

/**
 * What the engine accounts for inside a call: the last of it, as its times end when the request does. What
 * is before in the engine's server (tokenizing, a busy scheduler) is outside of them, as is the transport.
 * @param {Span} span
 * @param {Call} call
 */
function engineParts(span, call) {
  const known = ENGINE_PARTS.filter((key) => (call[key] ?? 0) > 0);
  if (call.engine_begin === null) return [];
  const until = Math.min(call.engine_begin + (call.engine_length ?? 0), span.begin + span.length);
  const sum = known.reduce((total, key) => total + (call[key] ?? 0), 0);
  let at = Math.max(call.engine_begin, until - sum);
  return known.map((name) => {
    const begin = at;
    at = Math.min(at + (call[name] ?? 0), until);
    return {name, begin, length: Math.max(at - begin, 0), fill: colorOf(name)};
  });
}
