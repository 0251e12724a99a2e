// One request in detail: its parts, its turns on a time axis, and its calls in a table.

const PARTS = ['engine', 'tool', 'prompt_build', 'tool_parsing', 'token_merge', 'postprocess', 'reward', 'other'];

function requestParts(request) {
  return PARTS.map((name) => ({name, value: request[name + '_s']}))
    .filter((part) => part.value > 0).sort((a, b) => b.value - a.value);
}

// The flat list of a request's spans as objects.
function spansOf(request) {
  const {names, unit_s: unit} = DATA.timelines;
  const spans = [];
  for (let place = 0; place < request.spans.length; place += 4) {
    const [event, tool, failed, color] = names[request.spans[place]];
    const turn = request.spans[place + 1];
    spans.push({event, tool, failed, color, turn: turn < 0 ? null : turn,
      begin: request.spans[place + 2] * unit, length: request.spans[place + 3] * unit});
  }
  return spans;
}

function callsOf(request) {
  const unit = DATA.timelines.unit_s;
  const time = (value) => value === null || value === undefined ? null : value * unit;
  return request.calls.map((call) => ({turn: call[0], begin: time(call[1]), length: time(call[2]),
    server: call[3] === null || call[3] === undefined ? null : DATA.timelines.servers[call[3]],
    engine_begin: time(call[4]), engine_length: time(call[5]), queue: time(call[6]), prefill: time(call[7]),
    decode: time(call[8]), prompt_tokens: call[9] ?? null, response_tokens: call[10] ?? null, cached_tokens: call[11] ?? null}));
}

function requestPanel(request) {
  const spans = spansOf(request), calls = callsOf(request);
  const facts = [
    'step ' + clean(DATA.stepRows[request.s].label) + (request.validate ? ', validation' : ''), clean(request.name),
    request.sample === null ? null : 'sample ' + clean(request.sample) + (request.session === null ? '' : ', session ' + clean(request.session)),
    request.turns === null ? null : plural(request.turns, 'turn'),
    request.prompt_tokens === null ? null : plural(request.prompt_tokens, 'prompt token'),
    request.generated_tokens === null ? null : plural(request.generated_tokens, 'generated token'),
    request.reward === null ? null : 'reward ' + number(request.reward),
    request.status === null ? null : 'status ' + clean(request.status) + (request.error === null ? '' : ' (' + clean(request.error) + ')'),
  ].filter((fact) => fact !== null);
  const parts = requestParts(request);
  const turns = turnRows(spans, calls);
  return element('div', {class: 'panel', id: 'panel'},
    element('h3', {}, element('bdi', {}, clean(request.request_id === null ? '(no request id)' : request.request_id)), ': ',
      request.duration_s === null ? 'did not end' : seconds(request.duration_s)),
    element('p', {class: 'facts'}, facts.join(' · ')),
    parts.length ? partsBar(parts) : null,
    spans.length ? breakdown(request, spans, calls) : element('p', {class: 'note'}, 'Nothing was recorded inside this request.'),
    turns.length ? table({caption: 'Turns of this request', rows: turns, limit: 12, columns: [
      {key: 'turn', label: 'turn', format: 'n'}, {key: 'length', label: 'time', format: 's'},
      {key: 'engine', label: 'engine call', format: 's'},
      ...['queue', 'prefill', 'decode', 'outside'].filter((key) => turns.some((row) => row[key] !== null))
        .map((key) => ({key, label: key, format: 's', title: key === 'outside' ? 'Part of the call outside the engine server' : null})),
      {key: 'tools', label: 'tools', format: 's'}, {key: 'tool_names', label: 'tool calls', format: 'text'},
      {key: 'prompt_tokens', label: 'prompt', format: 'n', title: 'Prompt tokens'}, {key: 'response_tokens', label: 'generated', format: 'n', title: 'Generated tokens'},
      ...(turns.some((row) => row.cached_tokens !== null) ? [{key: 'cached_tokens', label: 'cached', format: 'n', title: 'Prompt tokens that the engine had in its cache'}] : []),
      {key: 'rate', label: 'call tokens/s', format: 'n', title: 'Generated tokens by the time of the calls'}, {key: 'server', label: 'server', format: 'text'},
    ]}) : null,
    calls.length && !calls.some((call) => call.queue !== null || call.prefill !== null || call.decode !== null)
      ? element('p', {class: 'note'}, (DATA.notes.engine || ['Queue, prefill and decode times are not known.'])[0]) : null);
}

function turnRows(spans, calls) {
  const rows = new Map();
  const sum = (row, key, value) => { if (value !== null) row[key] = (row[key] || 0) + value; };
  const rowOf = (turn) => {
    if (!rows.has(turn)) {
      rows.set(turn, {turn, length: null, engine: null, queue: null, prefill: null, decode: null, outside: null, tools: null,
        names: [], prompt_tokens: null, response_tokens: null, cached_tokens: null, server: null});
    }
    return rows.get(turn);
  };
  for (const span of spans) {
    if (span.turn === null) continue;
    const row = rowOf(span.turn);
    if (span.event === 'turn') row.length = span.length;
    if (span.event === 'tool_execution') row.execution = (row.execution || 0) + span.length;
    if (span.event === 'tool_call') { sum(row, 'tools', span.length); row.names.push(span.tool); }
  }
  for (const call of calls) {
    if (call.turn === null) continue;
    const row = rowOf(call.turn);
    sum(row, 'engine', call.length);
    for (const key of ['queue', 'prefill', 'decode', 'prompt_tokens', 'response_tokens', 'cached_tokens']) sum(row, key, call[key]);
    if (call.engine_length !== null) sum(row, 'outside', call.length - call.engine_length);
    row.server = call.server;
  }
  return [...rows.values()].sort((a, b) => a.turn - b.turn).map((row) => {
    const counts = new Map();
    for (const name of row.names) counts.set(name, (counts.get(name) || 0) + 1);
    row.tool_names = [...counts].map(([name, count]) => clean(name) + (count > 1 ? ' ×' + count : '')).join(', ') || null;
    row.tools = row.execution === undefined ? row.tools : row.execution;
    row.rate = row.response_tokens !== null && row.engine > 0 ? row.response_tokens / row.engine : null;
    return row;
  });
}

// Rows: what comes before the turns, the turns, what comes after them.
function breakdown(request, spans, calls) {
  const unit = DATA.timelines.unit_s;
  const length = request.length * unit || 1e-6;
  const rows = [];
  const turns = [...new Set(spans.map((span) => span.turn).filter((turn) => turn !== null))].sort((a, b) => a - b);
  const hasCalls = new Set(spans.filter((span) => span.event === 'tool_call').map((span) => span.turn));
  const hidden = (span) => span.event === 'turn' || span.event === 'tool_execution' && hasCalls.has(span.turn);
  const before = spans.filter((span) => span.event === 'prompt_build');
  const after = spans.filter((span) => span.event === 'postprocess' || span.event === 'reward');
  const loose = spans.filter((span) => span.turn === null && !hidden(span) && !before.includes(span) && !after.includes(span));
  if (before.length) rows.push({label: 'prompt', spans: before});
  for (const turn of turns) rows.push({label: 'turn ' + turn, turn, spans: spans.filter((span) => span.turn === turn && !hidden(span))});
  if (loose.length) rows.push({label: 'no turn', spans: loose});
  if (after.length) rows.push({label: 'end', spans: after});
  for (const row of rows) pack(row);
  const names = [];
  const note = (name, color) => { if (!names.some((each) => each[0] === name)) names.push([name, color]); };
  const inside = ['queue', 'prefill', 'decode'].filter((key) => calls.some((call) => call[key] > 0));
  for (const row of rows) {
    for (const span of row.spans) {
      // Where the engine's parts are known, they stand for the call.
      if (span.event === 'engine_call' && inside.length) for (const key of [...inside, 'outside']) note(key, colorOf(key));
      else if (span.event !== 'server_acquire') note(nameOf(span), span.color);
    }
  }

  function nameOf(span) {
    return {engine_call: 'engine', tool_call: 'tool', tool_execution: 'tool'}[span.event] || span.event;
  }

  const chart = drawn((width) => {
    const left = 62, right = 12, high = rows.length > 24 ? 13 : 20;
    const total = rows.reduce((sum, row) => sum + row.lines * high + 5, 0);
    const made = svg('svg', {viewBox: `0 0 ${width} ${total + 26}`});
    const x = (value) => left + (width - left - right) * value / length;
    timeAxis(made, x, 0, length, 0, total, width - right);
    let y = 2;
    for (const row of rows) {
      made.append(textAt(left - 8, y + high * 0.68, row.label, 'end', {class: 'ink'}));
      for (const span of row.spans) {
        if (span.event === 'server_acquire') continue;
        const top = y + span.line * high, height = high - 3;
        const begin = x(span.begin), wide = Math.max(x(span.begin + span.length) - begin, 1);
        const group = svg('g', {}, rect(begin, top, wide, height, span.color, {stroke: 'var(--edge)', 'stroke-width': 0.5}));
        // The label says the widest part where the engine's parts are known.
        const name = span.tool ? clean(span.tool) : span.event === 'engine_call' ? 'engine' : span.event;
        let label = {name, length: span.length, fill: span.color, begin, wide};
        if (span.event === 'engine_call') label = engineParts(group, span, x, top, height) || label;
        const text = [label.name + ' ' + seconds(label.length), seconds(label.length)].find((each) => each.length * 6.6 + 10 < label.wide);
        if (text && high > 15) group.append(textAt(label.begin + 5, top + height * 0.72, text, 'start', {class: onClass(label.fill)}));
        if (span.failed) group.append(rect(begin + wide - 2, top, 2, height, 'var(--accent)'));
        made.append(withTip(group, tipLines(span)));
      }
      y += row.lines * high + 5;
    }
    return made;
  }, 'Time line of the request; the table below has the same numbers');
  return element('div', {}, legend(names), chart);

  function callOf(span) {
    return calls.find((call) => call.turn === span.turn && Math.abs(call.begin - span.begin) < 2 * unit);
  }

  // Inside a call: what the engine accounts for, and the rest of the call outside the engine.
  function engineParts(group, span, x, top, height) {
    const call = callOf(span);
    if (!call || call.engine_begin === null) return null;
    const known = ['queue', 'prefill', 'decode'].filter((key) => call[key] > 0);
    if (!known.length) return null;
    group.append(rect(x(span.begin), top, x(span.begin + span.length) - x(span.begin), height, colorOf('outside')));
    let at = call.engine_begin;
    const until = Math.min(call.engine_begin + call.engine_length, span.begin + span.length);
    let widest = null;
    for (const key of known) {
      const end = Math.min(at + call[key], until);
      const part = {name: key, length: call[key], fill: colorOf(key), begin: x(at), wide: x(end) - x(at)};
      group.append(rect(part.begin, top, part.wide, height, part.fill));
      if (!widest || part.wide > widest.wide) widest = part;
      at = end;
    }
    return widest;
  }

  function tipLines(span) {
    const lines = [span.tool ? 'tool ' + shorten(span.tool, 120) : span.event,
      seconds(span.length) + ', from ' + seconds(span.begin) + (span.turn === null ? '' : ' · turn ' + span.turn)];
    const call = span.event === 'engine_call' ? callOf(span) : null;
    if (call) {
      const times = ['queue', 'prefill', 'decode'].filter((key) => call[key] !== null).map((key) => key + ' ' + seconds(call[key]));
      if (times.length) lines.push(times.join(', '));
      if (call.engine_length !== null) lines.push('outside the engine ' + seconds(call.length - call.engine_length));
      const tokens = [call.prompt_tokens === null ? null : plural(call.prompt_tokens, 'prompt token'),
        call.response_tokens === null ? null : plural(call.response_tokens, 'generated token')].filter(Boolean);
      if (tokens.length) lines.push(tokens.join(', '));
      if (call.server !== null) lines.push(shorten(call.server, 60));
    }
    if (span.failed) lines.push('did not return');
    return lines;
  }
}

// Gives overlapping spans (tools that run at the same time) lines of their own; what lies inside another stays on top of it.
function pack(row) {
  const ends = [];
  for (const span of row.spans) {
    if (span.event === 'reward' || span.event === 'server_acquire') { span.line = 0; continue; }
    let line = ends.findIndex((end) => end <= span.begin + 2e-5);
    if (line < 0) line = ends.push(0) - 1;
    ends[line] = span.begin + span.length;
    span.line = Math.min(line, 7);
  }
  row.spans.sort((a, b) => (a.event === 'reward') - (b.event === 'reward'));
  row.lines = Math.max(1, Math.min(ends.length, 8));
}
