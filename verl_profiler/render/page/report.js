// The sections of the report, filled for the chosen step or for all steps together.

const ALL = -1;
const steps = unpack(DATA.steps);
DATA.stepRows = steps;
const tables = {};
for (const [name, value] of Object.entries(DATA)) {
  if (value && Array.isArray(value.columns) && Array.isArray(value.rows)) tables[name] = unpack(value);
}
const drawings = DATA.timelines;
const {spans: requestSpans, calls: requestCalls, servers} = drawings.requests;
drawings.servers = servers;
drawings.requests = unpack(drawings.requests).map((request, place) => ({...request, spans: requestSpans[place],
  calls: requestCalls[place], hasCalls: request.tool_calls > 0}));

const FRACTIONS = DATA.fractions;
const several = DATA.about.runs.length > 1;
const trained = steps.filter((step) => step.finished || step.requests > 0 || step.step > 0);
let chosen = ALL;
let picked = null;
let timeline = null;

const byId = (id) => document.getElementById(id);
const of = (name, validate) => tables[name].filter((row) => row.s === chosen && (validate === undefined || row.validate === validate));
const chosenStep = () => steps.find((step) => step.s === chosen);
const chosenName = () => chosen === ALL ? 'all steps' : 'step ' + clean(chosenStep().label);
const detailed = new Set(DATA.detailed);

const SECTIONS = DATA.sections;
const FILL = {
  steps: stepsSection, path: pathSection, rollout: rolloutSection, requests: requestsSection, turns: turnsSection, tools: toolsSection,
  workers: workersSection, transfers: transfersSection, weights: weightsSection, captures: capturesSection, log: logSection, lags: lagsSection,
  validation: validationSection, problems: problemsSection, cost: costSection, launch: launchSection,
};
// Sections that do not change with the step.
const FIXED = new Set(['validation', 'problems', 'launch', 'requests']);

function about(text) { return element('p', {class: 'about'}, text); }
function note(text) { return element('p', {class: 'note'}, text); }
function notesOf(name) { return (DATA.notes[name] || []).map(note); }

// One line for a section with nothing in it: why nothing was recorded, or that this step has none.
function nothing(name, ever, what) {
  if (DATA.notes[name]) return DATA.notes[name].map(about);
  return [about('No ' + what + (ever ? ' in ' + chosenName() : ' were recorded') + '.'), ...notKept()];
}

function summaryOf(rows, key) { return rows.reduce((sum, row) => sum + (row[key] || 0), 0); }

function notKept() {
  return chosen !== ALL && !detailed.has(chosen)
    ? [note('The details of this step are not in this file: it keeps ' + number(detailed.size) + ' of ' + number(steps.length) +
      ' steps, the longest and every n-th. Write a report of this one with --steps ' + chosenStep().step + '.')] : [];
}

function stepsSection() {
  if (!trained.length) return nothing('steps', false, 'steps');
  const start = steps.find((step) => step.step === 0 && !step.finished);
  const columns = [
    {key: 'label', label: 'step', format: 'text'}, {key: 'duration_s', label: 'time', format: 's'},
    {key: 'gen_s', label: 'gen', format: 's', title: 'The rollout, as the trainer sees it'},
    {key: 'longest_phase', label: 'longest phase', format: 'text', swatch: true}, {key: 'longest_share', label: 'its share', format: 'share'},
    {key: 'unaccounted_s', label: 'unaccounted', format: 's', title: 'Time of the step that no timer of verl covers'},
    {key: 'requests', label: 'requests', format: 'n'}, {key: 'p50_s', label: 'P50', format: 's', title: 'Half of the requests took at most so long'},
    {key: 'p95_s', label: 'P95', format: 'q'}, {key: 'max_s', label: 'slowest', format: 's'},
    {key: 'after_p80_s', label: 'tail', format: 'q', title: 'From the end of 80 % of the requests to the last'},
    {key: 'poll_s', label: 'after last', format: 's', title: 'From the end of the last request to the end of gen'},
    {key: 'generated_tokens_per_s', label: 'generated tokens/s', format: 'n', title: 'Generated tokens of finished requests, by the length of the step'},
    {key: 'engine_tokens_per_s', label: 'engine tokens/s', format: 'n', title: 'Generated tokens of engine calls, by the time in which one was under way'},
  ];
  return [
    about('Each step by the timers of verl’s trainer. Choose one here, and everything below shows it.'),
    ...notesOf('steps'),
    stepsChart(trained.filter((step) => step.step !== 0 || step.finished), tables.step_phases.filter((row) => row.s !== ALL),
      (s) => choose(s === chosen ? ALL : s), chosen),
    table({caption: 'Steps', rows: trained, columns, limit: 20, onRow: (row) => choose(row.s), selected: (row) => row.s === chosen,
      label: (row) => 'Show step ' + row.label}),
    start && start.seen_s ? note('Before the first step: ' + seconds(start.seen_s) + ' of start-up' +
      (start.validation_requests ? ' and validation' : '') + '.') : null,
  ];
}

const REASONS = {late: 'began later', queued: 'queued', long: 'long', slow: 'slow per token', tool: 'tools', other: 'other'};

function pathSection() {
  const rows = of('critical_path');
  if (!rows.length) return [...nothing('steps', tables.critical_path.length > 0, 'steps with an end')];
  const colorOfOwner = (row) => colorOf('path:' + row.owner);
  const large = rows.filter((row) => row.share >= 0.005);
  const rest = rows.filter((row) => row.share < 0.005);
  const unexplained = rows.find((row) => row.owner === 'unexplained');
  const run = several ? [{key: 'run', label: 'run', format: 'text'}] : [];
  return [
    about('What ' + (chosen === ALL ? 'the steps' : chosenName()) + ' waited for, moment by moment: each second has one owner. Pale: the trainer’s phases. ' +
      (unexplained ? share(unexplained.share) + ' is explained by no event.' : '')),
    partsBar([...large.map((row) => ({name: row.owner, value: row.duration_s, color: colorOfOwner(row)})),
      ...(rest.length ? [{name: 'the others', value: summaryOf(rest, 'duration_s'), color: '#C9CED6'}] : [])]),
    table({caption: 'Critical path', rows, limit: 12, columns: [
      {key: 'owner', label: 'owner', format: 'text'}, {key: 'share', label: 'share', format: 'share'},
      {key: 'duration_s', label: chosen === ALL ? 'all steps together' : 'time', format: 's', bar: true, color: colorOfOwner}, {key: 'segments', label: 'stretches', format: 'n'},
      {key: 'longest_s', label: 'longest', format: 's'}, {key: 'longest_what', label: 'in', format: 'text'}]}),
    ...whatIf(run),
    ...waitingFor(run),
  ];
}

// The replays of the chosen step, or their means; a long run has them of every n-th step only.
function whatIf(run) {
  const means = tables.what_if;
  if (!means.length) return [];
  const abouts = new Map(means.map((row) => [row.what, row.about]));
  const own = chosen === ALL ? [] : of('step_replays').map((row) => ({...row, about: abouts.get(row.what), share: row.saved_s === null ? null : row.saved_s / row.duration_s,
    ...(row.least_s < row.most_s ? {low_s: row.least_s, high_s: row.most_s} : {low_s: null, high_s: null})}));
  const rows = own.length ? own : means;
  const unchanged = rows.find((row) => row.what === 'unchanged');
  const mean = 'Mean per step over ' + plural(means[0].steps, 'replayed step') + ' of ' + seconds(means[0].step_s) + '. Replayed unchanged, the median step';
  const off = share(Math.abs(unchanged.residual_share)) + (unchanged.tokens_share === null ? '' : '; with decoding predicted from tokens, by ' + share(Math.abs(unchanged.tokens_share)));
  const between = means.find((row) => row.between_runs_s !== null);
  const noise = between ? ' Two runs with the same settings differ by up to ' + seconds(between.between_runs_s) + ' per step, in nine of ten pairs: with one run each, smaller gains are not to be told from chance.' : '';
  return [
    element('h3', {}, 'What if'),
    note((own.length ? 'Step ' + clean(chosenStep().label) + ', ' + seconds(unchanged.duration_s) + '. Replayed unchanged, it' : (chosen === ALL ? '' : 'This step was not replayed. ') + mean) + ' is off by ' + off +
      '. “Earlier” is the gain without polling, which many steps come to on average; gains are not additive. Where loads were never seen, “from” supposes that replicas give no more tokens per second than they did, and “to” that more calls do not slow each other down.' + noise),
    table({caption: 'Replays', rows: rows.filter((row) => row.what !== 'unchanged'), limit: 20, columns: [...(own.length ? [] : run),
      {key: 'about', label: 'if', format: 'text'}, {key: 'saved_s', label: 'saved', format: 's', bar: true}, {key: 'share', label: 'of the step', format: 'share'},
      {key: 'earlier_s', label: 'earlier', format: 's'}, {key: 'low_s', label: 'from', format: 's', title: '90 % interval'}, {key: 'high_s', label: 'to', format: 's'}]}),
  ];
}

function waitingFor(run) {
  if (!tables.stragglers.length) return [];
  const requests = tables.straggler_requests.map((row) => ({...row, because: REASONS[row.because] || row.because}));
  return [
    element('h3', {}, 'Stragglers'),
    note('Whoever is done waits for the last of its kind. That waiting, charged to those that are not done yet; over all steps, whichever is chosen.'),
    table({caption: 'Stragglers', rows: tables.stragglers.map((row) => ({...row, who: row.kind === 'request' ? REASONS[row.who] || row.who : row.who})), limit: 12, columns: [...run,
      {key: 'kind', label: 'kind', format: 'text', title: 'A phase: its ranks'}, {key: 'who', label: 'who, or why', format: 'text'}, {key: 'blame_s', label: 'caused wait time', format: 's', bar: true},
      {key: 'share', label: 'of its kind', format: 'share'}, {key: 'per_step_s', label: 'per step', format: 's'}, {key: 'last', label: 'steps in which last', format: 'n'}, {key: 'of_steps', label: 'of', format: 'n'}]}),
    requests.length ? table({caption: 'Requests that others waited for', rows: requests, limit: 6, columns: [...run,
      {key: 'request_id', label: 'request', format: 'text', show: (value) => value === null ? '(no id)' : shorten(value, 16)}, {key: 'step', label: 'step', format: 'n'},
      {key: 'name', label: 'worker', format: 'text'}, {key: 'blame_s', label: 'caused wait time', format: 's', bar: true}, {key: 'behind_s', label: 'behind the median', format: 's'},
      {key: 'because', label: 'because', format: 'text'}, {key: 'late_s', label: 'later', format: 's'}, {key: 'queued_s', label: 'queued', format: 's'}, {key: 'long_s', label: 'long', format: 's'},
      {key: 'slow_s', label: 'slow', format: 's'}, {key: 'tool_s', label: 'tools', format: 's'}, {key: 'other_s', label: 'other', format: 's'}]}) : null,
  ];
}

function rolloutSection() {
  const times = of('request_times', false)[0];
  if (!times) return nothing('rollout', tables.request_times.some((row) => !row.validate), 'training requests');
  const step = chosen === ALL ? trained.slice().sort((a, b) => (b.spread_s || 0) - (a.spread_s || 0))[0] : chosenStep();
  const tail = [];
  if (step && step.after_p80_s !== null && step.after_p80_s !== undefined) {
    tail.push('In step ' + clean(step.label) + ', the last request ended ' + seconds(step.after_p80_s) + ' after 80 % of them' +
      (step.requests >= 40 ? ' and ' + seconds(step.after_p95_s) + ' after 95 %' : '') + '.');
    if (step.poll_s !== null) tail.push('gen ended ' + seconds(step.poll_s) + ' later (verl polls for finished samples, by default every 2 s).');
  }
  const flight = tables.requests_in_flight.find((row) => step && row.s === step.s);
  const rows = tables.request_cdf.filter((row) => !row.validate);
  const one = !rows.some((row) => row.s === chosen) ? null : element('div', {}, element('h3', {}, 'Request durations, ' + chosenName()), cdfChart(rows, chosen, FRACTIONS),
    rows.length > 2 ? note('Part of the requests that took at most so long. Gray: ' + (chosen === ALL ? 'each step.' : 'the other steps.')) : null);
  const other = flight ? element('div', {}, element('h3', {}, 'Requests in flight, step ' + clean(step.label) + (chosen === ALL ? ' (the longest rollout)' : '')),
    flightChart(flight, step),
    note('At most ' + number(flight.most) + ' at once, ' + number(flight.mean) + ' on average: ' +
      share(1 - flight.mean / flight.most) + ' of the room is empty (bubble ratio). Shown is the highest count in each 1/160 of the time.')) : null;
  const percentiles = [['p50_s', 'P50'], ['p80_s', 'P80'], ['p90_s', 'P90'], ['p95_s', 'P95'], ['p99_s', 'P99'], ['p999_s', 'P99.9'], ['max_s', 'slowest']];
  return [
    about([plural(times.requests, 'request') + ' in ' + chosenName() + (times.unfinished ? ', ' + number(times.unfinished) + ' without an end' : '') +
      (times.failed ? ', ' + number(times.failed) + ' failed' : '') + '.', ...tail].join(' ')),
    element('div', {class: 'columns'}, one, other),
    times.p50_s === null ? note('None of them has an end, so there are no durations.') : table({caption: 'Percentiles of request durations', rows: [times], columns: percentiles.map(([key, label]) => ({key, label, format: 'q'})).concat([
      {key: 'mean_s', label: 'mean', format: 's'}, {key: 'mean_turns', label: 'turns, mean', format: 'n'},
      {key: 'generated_tokens', label: 'generated tokens', format: 'n'}, {key: 'tool_tokens', label: 'tool tokens', format: 'n'}])}),
    ...engineParts(),
  ];
}

function engineParts() {
  const engine = of('engine_times', false)[0];
  if (!engine) return notesOf('engine');
  const parts = ['queue', 'prefill', 'decode', 'outside'].map((name) => ({name, value: engine[name + '_s']})).filter((part) => part.value > 0);
  const known = parts.some((part) => part.name !== 'outside');
  if (!known && engine.engine_s === undefined && engine.outside_s !== null) {
    parts.unshift({name: 'engine', value: engine.total_s - engine.outside_s});
  }
  return [
    element('h3', {}, 'Engine calls'),
    note(plural(engine.calls, 'call') + ', P50 ' + seconds(engine.p50_s) + ', P95 ' + quantile(engine.p95_s, engine) + ', longest ' + seconds(engine.max_s) +
      (engine.engine_tokens_per_s === null ? '' : '; ' + number(engine.engine_tokens_per_s) + ' engine tokens/s') +
      (engine.cached_tokens === null || !engine.prompt_tokens ? '' : '; ' + share(engine.cached_tokens / engine.prompt_tokens) + ' of the prompt tokens were cached') + '.'),
    parts.length ? partsBar(parts) : null,
    parts.length ? legend(parts.map((part) => [part.name])) : null,
    ...notesOf('engine'),
  ];
}

function requestsSection() {
  if (!drawings.requests.length && !drawings.scenes.length) return nothing('requests', false, 'requests');
  const sampled = drawings.requests.length < drawings.of;
  const box = element('div', {id: 'timeline'});
  const scenes = element('select', {id: 'scene', onchange: () => {
    const scene = drawings.scenes[Number(scenes.value)];
    showScene(scene);
    if (!scene.validate && scene.s !== chosen) choose(scene.s, true);
  }}, drawings.scenes.map((scene, place) => element('option', {value: String(place)}, sceneName(scene))));
  const zoom = (label, text, action) => element('button', {type: 'button', 'aria-label': label, onclick: action}, text);
  const search = element('input', {type: 'search', id: 'search', placeholder: 'request id, sample, worker or agent', autocomplete: 'off', spellcheck: 'false',
    oninput: () => fillRequests()});
  return [
    about('One bar per request, in the row of the worker that ran it. ' + (sampled
      ? 'Drawn and listed are ' + number(drawings.requests.length) + ' of ' + number(drawings.of) + ' requests: the slowest, those that failed, and every n-th of the others. All other numbers are of all requests.'
      : 'All ' + number(drawings.of) + ' requests are drawn and listed.')),
    element('div', {id: 'parts-of-requests'}),
    element('h3', {}, 'Timeline'),
    element('div', {class: 'tools'}, element('label', {for: 'scene'}, 'of'), scenes,
      zoom('Zoom in', '+', () => timeline.zoom(0.5)), zoom('Zoom out', '−', () => timeline.zoom(2)), zoom('Show everything', 'Reset', () => timeline.reset()),
      element('span', {class: 'hint', id: 'timeline-keys'}, 'click, then scroll to zoom · drag to pan · keys + − ← → Home · ↑ ↓ select')),
    element('p', {class: 'note', id: 'scene-note'}),
    box,
    element('div', {id: 'timeline-legend'}),
    element('p', {class: 'picked', id: 'picked'}),
    element('h3', {}, 'Find a request'),
    element('div', {class: 'tools'}, element('label', {for: 'search'}, 'Search'), search, element('span', {id: 'found', class: 'hint', role: 'status'})),
    element('div', {id: 'request-table'}),
    element('div', {id: 'request-panel', 'aria-live': 'off'}),
  ];
}

function sceneName(scene) {
  const label = clean(steps[scene.s].label);
  if (!scene.validate) return 'step ' + label;
  return steps[scene.s].finished ? 'validation after step ' + label : 'validation before the steps (' + label + ')';
}

function showScene(scene) {
  if (!scene) return;
  byId('scene').value = String(drawings.scenes.indexOf(scene));
  timeline.show(scene);
  const used = new Set();
  for (const request of timeline.order) {
    for (let place = 0; place < request.spans.length; place += 4) used.add(drawings.names[request.spans[place]][0]);
  }
  const names = [];
  const add = (event, name, color) => { if (used.has(event) && !names.some((each) => each[0] === name)) names.push([name, color]); };
  for (const name of drawings.names) {
    const shown = {engine_call: 'engine', tool_call: 'tool', tool_execution: 'tool'}[name[0]] || name[0];
    if (!['turn', 'server_acquire'].includes(name[0])) add(name[0], shown, name[3]);
  }
  if (timeline.order.length) names.push(['other', colorOf('other')]);
  if (timeline.lanes.some((lane) => lane.lags && lane.lags.length)) names.push(['event loop stood still', 'var(--accent)']);
  byId('timeline-legend').replaceChildren(legend(names));
  const drawnHere = timeline.order.length;
  byId('scene-note').textContent = [
    drawnHere < scene.requests ? 'Drawn: ' + number(drawnHere) + ' of ' + number(scene.requests) + ' requests of ' + sceneName(scene) + '.' : '',
    chosen !== ALL && scene.s !== chosen && !scene.validate ? 'Step ' + clean(chosenStep().label) + ' is not drawn in this file (' +
      drawings.scenes.length + ' timelines are); --steps ' + chosenStep().step + ' draws it.' : '',
  ].filter(Boolean).join(' ');
  byId('scene-note').hidden = byId('scene-note').textContent === '';
}

function fillRequests() {
  const wanted = byId('search').value.trim().toLowerCase();
  const matches = (request) => [request.request_id, request.sample, request.name, request.agent, request.status]
    .some((value) => value !== null && String(value).toLowerCase().includes(wanted));
  let rows = drawings.requests;
  // A search looks everywhere; otherwise the table follows the step.
  if (wanted) rows = rows.filter(matches);
  else rows = rows.filter((request) => chosen === ALL ? !request.validate : request.s === chosen && !request.validate);
  byId('found').textContent = wanted ? plural(rows.length, 'match', 'matches') + ' in all steps' + (drawings.requests.length < drawings.of
    ? ', among the ' + number(drawings.requests.length) + ' listed' : '') : '';
  const anyReward = rows.some((row) => row.reward !== null);
  const columns = [
    {key: 'request_id', label: 'request', format: 'text', show: (value) => value === null ? '(no id)' : shorten(value, 40)},
    ...(chosen === ALL || wanted ? [{key: 's', label: 'step', format: 'n', show: (s, row) => clean(steps[s].label) + (row.validate ? ' val' : '')}] : []),
    {key: 'sample', label: 'sample', format: 'text', show: (value, row) => value === null ? NONE : shorten(value, 20) + (row.session === null ? '' : ' / ' + shorten(row.session, 8))},
    {key: 'name', label: 'worker', format: 'text', show: (value) => shorten(value, 24)},
    {key: 'duration_s', label: 'time', format: 's', bar: true},
    {key: 'engine_s', label: 'engine', format: 's'}, {key: 'tool_s', label: 'tools', format: 's'},
    {key: 'other_s', label: 'other', format: 's', title: 'What no event explains'},
    {key: 'turns', label: 'turns', format: 'n'}, {key: 'generated_tokens', label: 'tokens', format: 'n', title: 'Generated tokens'},
    ...(anyReward ? [{key: 'reward', label: 'reward', format: 'n'}] : []),
    ...(rows.some((row) => row.status !== null) ? [{key: 'status', label: 'status', format: 'text', show: (value) => value === null ? '' : clean(value)}] : []),
  ];
  byId('request-table').replaceChildren(rows.length ? table({caption: 'Requests of ' + (wanted ? 'the search' : chosenName()), rows, columns, limit: 12,
    sort: ['duration_s', true], onRow: (row) => pick(row, 'table'), selected: (row) => row === picked,
    label: (row) => 'Request ' + row.request_id + ', ' + seconds(row.duration_s)})
    : note(wanted ? 'No listed request matches.' : 'No requests of ' + chosenName() + ' are listed.'));
}

function fillParts() {
  const parts = of('request_parts', false);
  const box = byId('parts-of-requests');
  if (!box) return;
  if (!parts.length) { box.replaceChildren(); return; }
  const visible = parts.filter((part) => part.total_s > 0);
  box.replaceChildren(
    element('h3', {}, 'What requests spend their time on, ' + chosenName()),
    partsBar(visible.map((part) => ({name: part.part, value: part.total_s}))) || '',
    table({caption: 'Parts of request time', rows: parts, limit: 12, columns: [
      {key: 'part', label: 'part', format: 'text', swatch: true}, {key: 'share', label: 'share', format: 'share'},
      {key: 'mean_s', label: 'mean per request', format: 's', bar: true, color: (row) => colorOf(row.part)}, {key: 'total_s', label: 'all requests together', format: 's'}]}),
    note('The parts add up to the time of the requests; other is what no event explains.'));
}

function pick(request, from) {
  picked = request;
  const scene = drawings.scenes[request.scene];
  if (timeline && scene && timeline.scene !== scene) showScene(scene);
  if (timeline && from !== 'timeline') timeline.select(request);
  byId('request-panel').replaceChildren(requestPanel(request));
  const line = byId('picked');
  line.replaceChildren(element('span', {}, timeline ? timeline.requestLines(request).filter(Boolean).join(' · ') : ''),
    element('button', {type: 'button', onclick: () => byId('panel').scrollIntoView({block: 'center', behavior: 'smooth'})}, 'Breakdown ↓'));
  if (from === 'timeline' || from === 'step') fillRequests();
  byId('status').textContent = 'Selected request ' + clean(request.request_id) + ', ' + seconds(request.duration_s);
}

function slowestOf(matches) {
  return drawings.requests.filter((request) => !request.validate && request.duration_s !== null && matches(request))
    .sort((a, b) => b.duration_s - a.duration_s)[0];
}

function turnsSection() {
  const turns = of('turn_times', false);
  if (!turns.length) return nothing('turns', tables.turn_times.length > 0, 'finished turns');
  const counts = of('turns_per_request', false);
  return [
    about('A turn is one engine call and the tool calls that it asks for; turns count from 0. ' + chosenName()[0].toUpperCase() + chosenName().slice(1) + '.'),
    element('div', {class: 'columns'},
      element('div', {}, element('h3', {}, 'Mean time by turn'), turnsChart(turns)),
      element('div', {}, element('h3', {}, 'How many turns requests took'), table({caption: 'Turns per request', rows: counts, limit: 9, columns: [
        {key: 'turns', label: 'turns', format: 'n'}, {key: 'requests', label: 'requests', format: 'n', bar: true},
        {key: 'share', label: 'share', format: 'share'}, {key: 'mean_s', label: 'mean time', format: 's'}]}))),
    table({caption: 'Turns by index', rows: turns, limit: 12, columns: [
      {key: 'turn', label: 'turn', format: 'n'}, {key: 'turns', label: 'turns', format: 'n'}, {key: 'share', label: 'share of time', format: 'share'},
      {key: 'p50_s', label: 'P50', format: 's'}, {key: 'p95_s', label: 'P95', format: 'q'}, {key: 'max_s', label: 'longest', format: 's'},
      {key: 'engine_s', label: 'engine, mean', format: 's'}, {key: 'tool_s', label: 'tools, mean', format: 's'},
      {key: 'prompt_tokens', label: 'prompt tokens, mean', format: 'n'}, {key: 'response_tokens', label: 'generated tokens, mean', format: 'n'}]}),
  ];
}

function toolsSection() {
  const tools = of('tool_times', false);
  if (!tools.length) return nothing('tools', tables.tool_times.length > 0, 'tool calls');
  const failed = summaryOf(tools, 'failed');
  return [
    about(plural(summaryOf(tools, 'calls'), 'tool call') + ' in ' + chosenName() + ', ' + seconds(summaryOf(tools, 'total_s')) + ' together' +
      (failed ? '; ' + plural(failed, 'call') + ' failed' : '') + '.'),
    table({caption: 'Tools', rows: tools, limit: 15, columns: [
      {key: 'tool', label: 'tool', format: 'text'}, {key: 'calls', label: 'calls', format: 'n'}, {key: 'failed', label: 'failed', format: 'n'},
      {key: 'share', label: 'share of tool time', format: 'share', bar: true, color: colorOf('tool')}, {key: 'total_s', label: 'all calls', format: 's'},
      {key: 'p50_s', label: 'P50', format: 's'}, {key: 'p95_s', label: 'P95', format: 'q'}, {key: 'p99_s', label: 'P99', format: 'q'}, {key: 'max_s', label: 'longest', format: 's'}]}),
  ];
}

function workersSection() {
  const parts = [];
  const balance = tables.rollout_balance.filter((row) => row.s === chosen);
  const replicas = of('replica_balance'), ranks = of('rank_balance');
  if (chosen === ALL) {
    const last = new Map();
    for (const row of tables.rollout_balance) if (!last.has(row.s)) last.set(row.s, row);
    const rows = [...last.values()].map((row) => ({...row, label: steps[row.s].label}));
    if (rows.some((row) => row.behind_s > 0)) {
      const times = new Map();
      for (const row of rows) times.set(row.name, (times.get(row.name) || 0) + 1);
      const [name, count] = [...times].sort((a, b) => b[1] - a[1])[0];
      parts.push(about('The last agent-loop worker of each step; the others had nothing to do while it worked. ' +
        clean(name) + ' was the last in ' + count + ' of ' + plural(rows.length, 'step') + '.'));
      parts.push(table({caption: 'Last agent-loop worker by step', rows, limit: 12, columns: [
        {key: 'label', label: 'step', format: 'text'}, {key: 'name', label: 'last worker', format: 'text'}, {key: 'requests', label: 'its requests', format: 'n'},
        {key: 'busy_s', label: 'done after', format: 's', bar: true}, {key: 'behind_s', label: 'after the median worker', format: 's'}]}));
    }
  } else if (balance.length) {
    const [slowest] = balance;
    parts.push(about(balance.length > 1 ? clean(slowest.name) + ' was the last agent-loop worker: done ' + seconds(slowest.busy_s) +
      ' after the first request began, ' + seconds(slowest.behind_s) + ' after the median worker.' : 'One agent-loop worker.'));
    parts.push(table({caption: 'Agent-loop workers', rows: balance, limit: 16, columns: [
      {key: 'name', label: 'agent-loop worker', format: 'text'}, {key: 'requests', label: 'requests', format: 'n'},
      {key: 'busy_s', label: 'done after', format: 's', bar: true}, {key: 'behind_s', label: 'after the median worker', format: 's'},
      {key: 'mean_s', label: 'mean request', format: 's'}]}));
  }
  if (replicas.length) {
    parts.push(element('h3', {}, 'Replicas, ' + chosenName()), table({caption: 'Replicas', rows: replicas, limit: 16, columns: [
      {key: 'server', label: 'replica', format: 'text'}, {key: 'calls', label: 'calls', format: 'n'}, {key: 'total_s', label: 'call time', format: 's', bar: true},
      {key: 'p50_s', label: 'P50', format: 's'}, {key: 'p95_s', label: 'P95', format: 'q'}, {key: 'max_s', label: 'longest', format: 's'},
      {key: 'prompt_tokens', label: 'prompt tokens', format: 'n'}, {key: 'generated_tokens', label: 'generated tokens', format: 'n'},
      {key: 'engine_tokens_per_s', label: 'engine tokens/s', format: 'n'},
      ...(replicas.some((row) => row.queue_s !== null) ? [{key: 'queue_s', label: 'queue', format: 's'}] : [])]}));
  }
  parts.push(element('h3', {}, 'Ranks, ' + chosenName()));
  if (ranks.length) {
    parts.push(note('All ranks wait for the slowest where the work ends together; waiting is what they lose, all ranks added up.'),
      table({caption: 'Balance of ranks', rows: ranks, limit: 14, columns: [
        {key: 'event', label: 'work', format: 'text'}, {key: 'role', label: 'role', format: 'text'}, {key: 'ranks', label: 'ranks', format: 'n'},
        {key: 'slowest', label: 'slowest', format: 'text'}, {key: 'slowest_s', label: 'slowest', format: 's', bar: true},
        {key: 'median_s', label: 'median', format: 's'}, {key: 'fastest_s', label: 'fastest', format: 's'}, {key: 'waste_s', label: 'waiting', format: 's'}]}));
  } else parts.push(...(DATA.notes.ranks ? notesOf('ranks') : [note('No work of trainer workers in ' + chosenName() + '.')]), ...notKept());
  return parts;
}

function transfersSection() {
  const rows = of('transfer_totals');
  const functions = functionsOfTransferQueue();
  if (!rows.length) return [...nothing('transfers', tables.transfer_totals.length > 0, 'TransferQueue calls'), ...functions];
  const longest = rows.slice().sort((a, b) => b.max_s - a.max_s)[0];
  return [
    about(plural(summaryOf(rows, 'calls'), 'TransferQueue call') + ' in ' + chosenName() + ': ' + bytes(summaryOf(rows, 'size_bytes')) + ' moved, ' +
      seconds(summaryOf(rows, 'total_s')) + ' in all callers together; the longest, ' + longest.event + ' in ' + clean(longest.role) + ', took ' + seconds(longest.max_s) + '.'),
    table({caption: 'TransferQueue calls', rows, limit: 16, columns: [
      {key: 'event', label: 'call', format: 'text'}, {key: 'role', label: 'by', format: 'text'}, {key: 'calls', label: 'calls', format: 'n'}, {key: 'failed', label: 'failed', format: 'n'},
      {key: 'total_s', label: 'all calls', format: 's', bar: true}, {key: 'p95_s', label: 'P95', format: 'q'}, {key: 'max_s', label: 'longest', format: 's'},
      {key: 'size_bytes', label: 'moved', format: 'bytes'}, {key: 'rows', label: 'rows', format: 'n'}]}),
    ...functions,
  ];
}

// Traced functions, in all steps together; nothing where none was traced.
function functionsOfTransferQueue() {
  if (!tables.tq_functions.length) return [];
  const rows = tables.tq_functions.map((row) => ({...row, func: row.func + (row.waits ? ' (waits for others)' : '')}));
  return [
    element('h3', {}, 'Functions that TransferQueue feeds, all steps'),
    ...DATA.tq_findings.map(note),
    table({caption: 'Functions that TransferQueue feeds', rows, limit: 16, columns: [
      {key: 'func', label: 'function', format: 'text'}, {key: 'calls', label: 'calls', format: 'n'}, {key: 'failed', label: 'failed', format: 'n'},
      {key: 'total_s', label: 'all calls', format: 's'}, {key: 'mean_s', label: 'mean', format: 's'}, {key: 'p95_s', label: 'P95', format: 'q'},
      {key: 'get_share', label: 'get', format: 'share'}, {key: 'compute_share', label: 'compute', format: 'share'}, {key: 'put_share', label: 'put', format: 'share'},
      {key: 'overhead_share', label: 'get and put', format: 'share'}, {key: 'wall_share', label: 'on the clock', format: 'share'}]}),
    note('Calls of one process at the same time count each; on the clock, a moment counts once.'),
  ];
}

function weightsSection() {
  const sync = tables.weight_sync.filter((row) => chosen === ALL || row.s === chosen).map((row) => ({...row, label: steps[row.s].label}));
  const memory = of('memory_peaks');
  const parts = [];
  if (sync.length) {
    const slowest = sync.slice().sort((a, b) => (b.trainer_s || 0) - (a.trainer_s || 0))[0];
    parts.push(about('The weights go from the trainer into the engines once a step' + (slowest.trainer_s === null ? '.' :
      '; the longest sync took ' + seconds(slowest.trainer_s) + ' (step ' + clean(slowest.label) + ').')));
    parts.push(table({caption: 'Weight syncs', rows: sync, limit: 12, columns: [
      {key: 'label', label: 'step', format: 'text'}, {key: 'trainer_s', label: 'trainer’s timer', format: 's', bar: true},
      {key: 'slowest_rank_s', label: 'slowest rank', format: 's'}, {key: 'slowest_rank', label: 'which', format: 'text'}, {key: 'transfer_s', label: 'transfer', format: 's'},
      {key: 'release_s', label: 'memory released', format: 's'}, {key: 'resume_s', label: 'memory resumed', format: 's'}]}));
  } else parts.push(...nothing('weights', tables.weight_sync.length > 0, 'weight syncs'));
  parts.push(...releaseParts());
  parts.push(element('h3', {}, 'Device memory at its fullest'));
  if (memory.length) {
    parts.push(table({caption: 'Peaks of device memory', rows: memory, columns: [
      {key: 'role', label: 'role', format: 'text'}, {key: 'used_bytes', label: 'used', format: 'bytes', bar: true}, {key: 'total_bytes', label: 'of', format: 'bytes'},
      {key: 'allocated_bytes', label: 'allocated', format: 'bytes'}, {key: 'reserved_bytes', label: 'reserved', format: 'bytes'},
      {key: 'name', label: 'process', format: 'text'}, {key: 'at', label: 'when', format: 'text'}, {key: 'readings', label: 'readings', format: 'n'}]}));
  } else parts.push(...(DATA.notes.memory ? notesOf('memory') : [note('No readings in ' + chosenName() + '.')]));
  return parts;
}

function capturesSection() {
  const inStep = (name) => tables[name].filter((row) => chosen === ALL || row.s === chosen).map((row) => ({...row, label: steps[row.s].label}));
  const captures = inStep('captures');
  if (!captures.length) return [about('Nothing was captured in ' + chosenName() + '.')];
  const step = {key: 'label', label: 'step', format: 'text'};
  const process = {key: 'name', label: 'process', format: 'text'};
  const [idle, kernels, ranges] = ['gpu_idle', 'top_kernels', 'range_times'].map(inStep);
  const gathered = captures.filter((row) => row.file && !row.problem).length;
  const busiest = idle.slice().sort((a, b) => b.busy_s - a.busy_s)[0];
  const optional = (rows, key, column) => rows.some((row) => row[key]) ? [{key, ...column}] : [];
  let said = 'No export has work of a GPU.';
  if (!ranges.length && !kernels.length) said = 'Their contents are read after verl-profiler collect --export.';
  if (busiest) {
    said = 'GPU ' + clean(busiest.gpu) + ' of ' + clean(busiest.host || 'its host') + ' was idle for ' + share(busiest.idle_share) +
      ' of step ' + clean(busiest.label) + ', as far as captured processes used it.';
  }
  return [
    about(number(gathered) + ' of ' + plural(captures.length, 'capture') + ' gathered in ' + chosenName() + '. ' + said),
    table({caption: 'Captures', rows: captures, limit: 12, columns: [step, process,
      ...optional(captures, 'task', {label: 'task', format: 'text'}), {key: 'tool', label: 'tool', format: 'text'}, {key: 'duration_s', label: 'captured', format: 's'},
      {key: 'file', label: 'file in nsight/', format: 'text'}, {key: 'size_bytes', label: 'size', format: 'bytes'},
      ...optional(captures, 'problem', {label: 'problem', format: 'text'})]}),
    ...(idle.length ? [element('h3', {}, 'Idle GPUs'), note('A GPU that a process without a capture used looks idle here.'),
      table({caption: 'Idle GPUs', rows: idle, limit: 12, columns: [step, {key: 'host', label: 'host', format: 'text'}, {key: 'gpu', label: 'GPU', format: 'text'},
        {key: 'processes', label: 'captured processes', format: 'text'}, {key: 'captured_s', label: 'captured', format: 's'}, {key: 'busy_s', label: 'busy', format: 's', bar: true},
        {key: 'idle_share', label: 'idle', format: 'share'}, {key: 'gen_idle_share', label: 'idle in gen', format: 'share'}]})] : []),
    ...(kernels.length ? [element('h3', {}, 'Kernels'), table({caption: 'Kernels', rows: kernels, limit: 12, columns: [step, process,
      {key: 'kernel', label: 'kernel', format: 'text'}, {key: 'launches', label: 'launches', format: 'n'}, {key: 'total_s', label: 'all', format: 's', bar: true},
      {key: 'max_s', label: 'longest', format: 's'}, {key: 'share', label: 'of its GPU work', format: 'share'}]})] : []),
    ...(ranges.length ? [element('h3', {}, 'Ranges'), note('GPU work counts where it was launched, also when it ran later. Ranges of coroutines overlap.'),
      table({caption: 'Ranges', rows: ranges, limit: 16, columns: [step, process, {key: 'domain', label: 'domain', format: 'text'}, {key: 'event', label: 'range', format: 'text'},
        {key: 'ranges', label: 'ranges', format: 'n'}, {key: 'total_s', label: 'all', format: 's', bar: true}, {key: 'max_s', label: 'longest', format: 's'},
        ...optional(ranges, 'launches', {label: 'launches', format: 'n'}), ...optional(ranges, 'gpu_s', {label: 'GPU time', format: 's'})]})] : []),
  ];
}

// What the engines' memory saver did, and memory by phase of the trainer.
function releaseParts() {
  const effects = tables.release_effects.filter((row) => row.source === 'call' || !tables.release_effects.some((other) => other.source === 'call'));
  const asleep = tables.sleep_times.filter((row) => chosen === ALL || row.s === chosen).map((row) => ({...row, label: steps[row.s].label}));
  const phases = of('memory_timeline');
  const onDevice = phases.some((row) => row.used_bytes !== null);
  if (!effects.length && !phases.length) return [];
  const size = (key, label, title) => ({key, label, format: 'bytes', title});
  const parts = [element('h3', {}, 'Release and resume'), ...notesOf('memory_saver')];
  if (effects.length) parts.push(table({caption: 'What release and resume did, all steps', rows: effects, limit: 12, columns: [
    {key: 'event', label: 'what', format: 'text'}, {key: 'tags', label: 'tags', format: 'text'}, {key: 'role', label: 'in', format: 'text'},
    {key: 'calls', label: 'calls', format: 'n'}, {key: 'p50_s', label: 'median', format: 's'}, {key: 'max_s', label: 'longest', format: 's', bar: true},
    size('moved_bytes', 'moved', 'Freed on the device by a release, taken by a resume; the median'),
    size('used_before_bytes', 'used before'), size('used_after_bytes', 'used after')]}));
  if (asleep.length) parts.push(element('h3', {}, 'Time in sleep and wake, in the slowest process'), table({caption: 'Time in sleep and wake, in the slowest process', rows: asleep, limit: 12, columns: [
    {key: 'label', label: 'step', format: 'text'}, {key: 'release_s', label: 'released', format: 's'}, {key: 'resume_s', label: 'resumed', format: 's'},
    {key: 'share', label: 'of the step', format: 'share'}, {key: 'slowest', label: 'slowest', format: 'text'}]}));
  if (phases.length) parts.push(element('h3', {}, 'Memory by phase'), table({caption: 'Peaks of memory by phase of the trainer', rows: phases, limit: 16, columns: [
    {key: 'phase', label: 'phase', format: 'text', swatch: true}, {key: 'role', label: 'in', format: 'text'},
    ...(onDevice ? [{...size('used_bytes', 'device'), bar: true}, size('lowest_used_bytes', 'lowest'), {key: 'used_share', label: 'of it', format: 'share'}] : []),
    size('rss_bytes', 'process', 'Resident in host memory, the largest process'), size('host_used_bytes', 'machine', 'In use on the host'),
    {key: 'readings', label: 'readings', format: 'n'}]}));
  return parts;
}

function lagsSection() {
  const rows = of('loop_lags');
  if (!rows.length) {
    return nothing('lags', tables.loop_lags.length > 0, 'event-loop lags');
  }
  // Trainer workers compute inside their loops.
  const computing = new Set(DATA.computing);
  // A stall where requests wait matters most.
  const waits = (row) => Number(['agent_loop', 'engine', 'reward', 'trainer'].includes(row.role));
  const others = rows.filter((row) => !computing.has(row.role)).sort((a, b) => waits(b) - waits(a) || b.max_s - a.max_s);
  const workers = rows.filter((row) => computing.has(row.role));
  const longest = tables.longest_lags.filter((row) => chosen === ALL || row.s === chosen).map((row) => ({...row, label: steps[row.s].label}));
  const columns = [
    {key: 'name', label: 'process', format: 'text'}, {key: 'loop', label: 'loop', format: 'text'}, {key: 'lags', label: 'lags', format: 'n'},
    {key: 'max_s', label: 'longest', format: 's', bar: true}, {key: 'total_s', label: 'all', format: 's'}];
  return [
    about('While an event loop stands still, everything that awaits in it looks slow, and is not. ' + (others.length
      ? 'Worst: ' + clean(others[0].name) + ', ' + seconds(others[0].max_s) + ' at once.' : 'None did in ' + chosenName() + '.')),
    others.length ? table({caption: 'Event-loop lags by process', rows: others, limit: 12, sort: ['max_s', true], columns}) : null,
    longest.length ? element('h3', {}, 'The longest') : null,
    longest.length ? table({caption: 'The longest event-loop lags', rows: longest, limit: 8, columns: [
      {key: 'label', label: 'step', format: 'text'}, {key: 'name', label: 'process', format: 'text'}, {key: 'duration_s', label: 'stood still', format: 's', bar: true},
      ...(longest.some((row) => row.during !== null) ? [{key: 'during', label: 'in', format: 'text', title: 'The call that held the loop, where it is known'}] : []),
      {key: 'at_s', label: 'after the begin of the step', format: 's'}]}) : null,
    workers.length ? element('details', {}, element('summary', {}, 'Trainer workers (' + workers.length + '): they compute inside their loops, which is no fault'),
      table({caption: 'Event-loop lags of trainer workers', rows: workers, limit: 12, columns})) : null,
  ];
}

function validationSection() {
  const rows = tables.request_times.filter((row) => row.validate && row.s !== ALL).map((row) => ({...row, label: steps[row.s].label, testing_s: steps[row.s].testing_s}));
  if (!rows.length) return nothing('validation', false, 'validation requests');
  const tools = tables.tool_times.filter((row) => row.validate && row.s === ALL);
  return [
    about('Validation runs between the steps and is in none of the numbers above.'),
    table({caption: 'Validation', rows, limit: 12, columns: [
      {key: 'label', label: 'after step', format: 'text'}, {key: 'testing_s', label: 'time', format: 's', bar: true}, {key: 'requests', label: 'requests', format: 'n'},
      {key: 'unfinished', label: 'without an end', format: 'n'}, {key: 'p50_s', label: 'P50', format: 's'}, {key: 'p95_s', label: 'P95', format: 'q'}, {key: 'max_s', label: 'slowest', format: 's'},
      {key: 'mean_turns', label: 'turns, mean', format: 'n'}, {key: 'generated_tokens', label: 'generated tokens', format: 'n'}]}),
    tools.length ? table({caption: 'Tools in validation', rows: tools, columns: [
      {key: 'tool', label: 'tool', format: 'text'}, {key: 'calls', label: 'calls', format: 'n'}, {key: 'failed', label: 'failed', format: 'n'},
      {key: 'total_s', label: 'all calls', format: 's', bar: true, color: colorOf('tool')}, {key: 'p95_s', label: 'P95', format: 'q'}, {key: 'max_s', label: 'longest', format: 's'}]}) : null,
  ];
}

function logSection() {
  const log = DATA.log;
  const rows = unpack(log.differences).filter((row) => row.s === chosen);
  const open = rows.filter((row) => !row.explained).length;
  return [
    about('What verl printed (' + clean(log.label) + ') beside the spans that were recorded, ' + chosenName() + '. ' +
      (rows.length ? (open ? plural(open, 'difference') + ' without a known reason.' : 'Every difference has a known reason.') : 'The log and the recording have nothing in common here.')),
    rows.length ? table({caption: 'Logged and recorded timers', rows, columns: [
      {key: 'timer', label: 'timer', format: 'text', swatch: true}, {key: 'logged_s', label: 'log', format: 's'}, {key: 'recorded_s', label: 'recorded', format: 's', bar: true},
      {key: 'difference_s', label: 'recorded − log', format: 's'}, {key: 'reason', label: 'why', format: 'text'}]}) : null,
    element('h3', {}, 'The timers of the log, all steps'),
    table({caption: 'Statistics of the log’s timers', rows: unpack(log.timers), limit: 16, columns: [
      {key: 'timer', label: 'timer', format: 'text', swatch: true}, {key: 'steps', label: 'steps', format: 'n'}, {key: 'mean', label: 'mean', format: 's', bar: true},
      {key: 'median', label: 'median', format: 's'}, {key: 'std', label: 'std', format: 's'}, {key: 'min', label: 'min', format: 's'}, {key: 'max', label: 'max', format: 's'}]}),
    ...[...log.facts, ...log.problems].map((text) => note(clean(text))),
  ];
}

function problemsSection() {
  const parts = [];
  if (DATA.problems.length) {
    const list = (problems) => element('ul', {class: 'problems'}, problems.map((problem) => element('li', {}, clean(problem))));
    parts.push(about('What makes these numbers less than the truth.'), list(DATA.problems.slice(0, 12)));
    if (DATA.problems.length > 12) {
      parts.push(element('details', {}, element('summary', {}, number(DATA.problems.length - 12) + ' more'), list(DATA.problems.slice(12))));
    }
  } else parts.push(about('None were found in the files.'));
  if (DATA.about.missed.length) {
    parts.push(element('h3', {}, 'Probes that were not placed'), table({caption: 'Probes that were not placed', limit: 10,
      rows: DATA.about.missed.map(([probe, reason, where]) => ({probe, reason, where})), columns: [
        {key: 'probe', label: 'probe', format: 'text'}, {key: 'reason', label: 'why', format: 'text'}, {key: 'where', label: 'processes', format: 'text'}]}));
  }
  return parts;
}

function costSection() {
  const rows = tables.profiler_cost.filter((row) => chosen === ALL || row.s === chosen).map((row) => ({...row, label: steps[row.s].label}));
  if (!rows.length) return nothing('cost', tables.profiler_cost.length > 0, 'accounts of the profiler');
  const worst = rows.filter((row) => row.share !== null).sort((a, b) => b.share - a.share)[0];
  return [
    about((worst ? 'At most ' + share(worst.share) + ' of a step: ' + seconds(worst.dearest_s) + ' of ' + clean(worst.dearest) + '’s time in step ' + clean(worst.label) + '. ' : '') +
      number(DATA.about.events) + ' events in all. Writing runs in a thread of its own.'),
    table({caption: 'Profiler cost', rows, limit: 8, columns: [
      {key: 'label', label: 'step', format: 'text'}, {key: 'share', label: '% of step (costliest process)', format: 'share'}, {key: 'dearest', label: 'process', format: 'text'},
      {key: 'dearest_s', label: 'its wrappers', format: 's'}, {key: 'wrapper_s', label: 'all wrappers', format: 's'}, {key: 'writer_s', label: 'all writers', format: 's'},
      {key: 'events', label: 'events', format: 'n'}, {key: 'size_bytes', label: 'written', format: 'bytes'}, {key: 'dropped', label: 'dropped', format: 'n'}]}),
  ];
}

function launchSection() {
  const list = (facts) => element('dl', {class: 'facts-list'}, facts.map(([key, value]) => [element('dt', {}, clean(key)), element('dd', {}, element('bdi', {}, clean(value)))]));
  const parts = [];
  for (const launch of DATA.about.launches) {
    if (several) parts.push(element('h3', {}, element('bdi', {}, clean(launch.run))));
    if (!launch.facts.length && !launch.training) { parts.push(note('run.json was not found.')); continue; }
    parts.push(list(launch.facts));
    const groups = [['training', 'Training'], ['versions', 'Versions'], ['settings', 'Settings of the profiler']]
      .filter(([key]) => launch[key] && launch[key].length);
    parts.push(element('div', {class: 'columns'}, groups.map(([key, title]) => element('div', {}, element('h3', {}, title), list(launch[key])))));
  }
  const processes = unpack(DATA.about.processes);
  if (processes.length) {
    parts.push(element('h3', {}, 'Processes'), table({caption: 'Processes', rows: processes, limit: 16, columns: [
      {key: 'name', label: 'process', format: 'text'}, {key: 'role', label: 'role', format: 'text'}, {key: 'host', label: 'host', format: 'text'},
      {key: 'pid', label: 'pid', format: 'n', show: (value) => value === null ? NONE : String(value)}, {key: 'recorded_events', label: 'events', format: 'n'}, {key: 'size_bytes', label: 'written', format: 'bytes'},
      {key: 'dropped', label: 'dropped', format: 'n'}, {key: 'write_errors', label: 'write errors', format: 'n'}, {key: 'end_reason', label: 'ended', format: 'text'}]}));
  }
  return parts;
}

// A section that shows the table of one view, with the columns as they are.
function viewSection({view, questions}) {
  const known = tables[view.table];
  const stepped = known.some((row) => 's' in row);
  const rows = known.filter((row) => !stepped || chosen === ALL || row.s === chosen)
    .map((row) => stepped ? {label: steps[row.s].label, ...row} : row);
  if (!rows.length) return [about('Nothing in ' + chosenName() + '.'), ...notKept()];
  const columns = Object.entries(view.columns).filter(([key]) => key in rows[0])
    .map(([key, title]) => ({key, title, label: key.replace(/_(s|bytes)$/, '').replaceAll('_', ' '), format: formatOf(key, rows)}));
  if (stepped) columns.unshift({key: 'label', label: 'step', format: 'text'});
  return [about(questions.join(' ')), table({caption: questions.join(' '), rows, limit: 12, columns})];
}

function formatOf(key, rows) {
  if (key.endsWith('_s')) return /^p\d+_s$/.test(key) ? 'q' : 's';
  if (key.endsWith('_bytes')) return 'bytes';
  if (key.endsWith('share')) return 'share';
  return rows.some((row) => typeof row[key] === 'string') ? 'text' : 'n';
}

function fill(name) {
  const section = SECTIONS.find((each) => each.name === name);
  const content = (FILL[name] ? FILL[name]() : viewSection(section)).flat().filter(Boolean);
  byId(name).replaceChildren(element('h2', {title: section.questions.join(' ') || null}, section.title), ...content);
}

// Shows a step everywhere; ALL shows all of them together.
function choose(s, keepScene) {
  const focused = document.activeElement && document.activeElement.closest('section');
  const label = document.activeElement && document.activeElement.getAttribute('aria-label');
  chosen = s;
  byId('step').value = String(s);
  const place = trained.findIndex((step) => step.s === s);
  byId('previous').disabled = place < 0;
  byId('next').disabled = place === trained.length - 1;
  for (const {name} of SECTIONS) if (!FIXED.has(name)) fill(name);
  fillParts();
  if (byId('search')) fillRequests();
  if (timeline && !keepScene) {
    const scene = drawings.scenes.find((each) => each.s === s && !each.validate);
    showScene(s !== ALL && scene ? scene : timeline.scene);
  }
  if (s !== ALL && (!picked || picked.s !== s || picked.validate)) {
    const slowest = slowestOf((request) => request.s === s);
    if (slowest) pick(slowest, 'step');
  }
  byId('status').textContent = 'Showing ' + chosenName();
  if (focused && label) {
    const again = [...document.querySelectorAll('#' + focused.id + ' [aria-label]')].find((node) => node.getAttribute('aria-label') === label);
    if (again) again.focus({preventScroll: true});
  }
}

function theme() {
  const root = document.documentElement;
  const button = byId('theme');
  const system = window.matchMedia('(prefers-color-scheme: dark)');
  const dark = () => root.dataset.theme ? root.dataset.theme === 'dark' : system.matches;
  const update = () => {
    button.textContent = dark() ? 'Light' : 'Dark';
    if (timeline && timeline.scene) timeline.draw();
  };
  button.addEventListener('click', () => { root.dataset.theme = dark() ? 'light' : 'dark'; update(); });
  system.addEventListener('change', update);
  let before = null;
  window.addEventListener('beforeprint', () => { before = root.dataset.theme; root.dataset.theme = 'light'; update(); });
  window.addEventListener('afterprint', () => { if (before === undefined) delete root.dataset.theme; else root.dataset.theme = before; update(); });
  update();
}

function start() {
  const {about: facts, problems} = DATA;
  const training = new Map(((facts.launches[0] || {}).training) || []);
  const gpus = training.has('n_gpus_per_node') ? training.get('nnodes') + ' × ' + training.get('n_gpus_per_node') + ' devices' : null;
  byId('facts').textContent = [training.get('model'), training.get('rollout'), gpus, plural(facts.requests, 'request'),
    facts.validation_requests ? plural(facts.validation_requests, 'validation request') : null, plural(facts.events, 'event')]
    .filter(Boolean).map(clean).join(' · ');
  const odd = problems.length + facts.missed.length;
  if (odd) {
    const warning = byId('warning');
    warning.hidden = false;
    warning.append([problems.length ? plural(problems.length, 'problem') + ' found while reading' : null,
      facts.missed.length ? plural(facts.missed.length, 'probe') + ' not placed' : null].filter(Boolean).join(', ') + ': ',
      element('a', {href: '#problems'}, 'what that means for these numbers'));
  }
  byId('main').replaceChildren(...SECTIONS.map(({name, title}) => element('section', {id: name, 'aria-label': title})));
  byId('links').append(...SECTIONS.map(({name, link}) => element('li', {}, element('a', {href: '#' + name}, link))));
  const select = byId('step');
  select.append(element('option', {value: String(ALL)}, 'all'), ...trained.map((step) => element('option', {value: String(step.s)}, clean(step.label))));
  select.addEventListener('change', () => choose(Number(select.value)));
  const move = (by) => {
    const place = trained.findIndex((step) => step.s === chosen) + by;
    choose(place < 0 ? ALL : trained[Math.min(place, trained.length - 1)].s);
  };
  byId('previous').addEventListener('click', () => move(-1));
  byId('next').addEventListener('click', () => move(1));
  for (const name of FIXED) fill(name);
  if (drawings.scenes.length) {
    timeline = new Timeline(byId('timeline'), drawings, (request) => pick(request, 'timeline'));
    const slowest = slowestOf((request) => request.scene !== null);
    showScene(slowest ? drawings.scenes[slowest.scene] : drawings.scenes.find((scene) => !scene.validate) || drawings.scenes[0]);
    if (slowest) pick(slowest, 'start');
  }
  choose(ALL);
  theme();
  document.documentElement.dataset.ready = 'true';
}

start();
