// The rollout of a step, the engine calls in it, its turns and tools; and validation.

import {about, estimates, heading, note, notesOf, nothing} from './blocks.js';
import {legend, partsBar} from './charts.js';
import {
  ALL,
  colorOf,
  labeled,
  shown,
  shownName,
  shownStep,
  steps,
  tableOf,
  trained,
  trainingRows,
} from './data.js';
import {element} from './dom.js';
import {clean, number, plural, quantile, seconds, share} from './format.js';
import {cdfChart, flightChart, turnsChart} from './rollout_charts.js';
import {table} from './table.js';

/** The step that is shown; of all steps, the one with the longest rollout. */
function drawnStep() {
  if (shown.step !== ALL) return shownStep();
  return trained.slice().sort((a, b) => (b.spread_s || 0) - (a.spread_s || 0))[0];
}

export function rolloutSection() {
  const [times] = trainingRows('request_times');
  if (!times) {
    const ever = tableOf('request_times').some((row) => !row.validate);
    return nothing('rollout', ever, 'training requests');
  }
  const step = /** @type {StepRow | undefined} */ (drawnStep());
  const unfinished = times.unfinished ? `, ${number(times.unfinished)} unfinished` : '';
  const failed = times.failed ? `, ${number(times.failed)} failed` : '';
  const counted = `${plural(times.requests, 'request')} in ${shownName()}${unfinished}${failed}.`;
  return [
    about([counted, ...(step ? tailOf(step) : [])].join(' ')),
    element('div', {class: 'columns'}, durations(times), step ? inFlight(step) : null),
    times.p50_s === null
      ? note('None of them finished, so there are no durations.')
      : table({
          caption: 'Percentiles of request durations',
          rows: [times],
          columns: [
            ['p50_s', 'P50', 'q'],
            ['p80_s', 'P80', 'q'],
            ['p90_s', 'P90', 'q'],
            ['p95_s', 'P95', 'q'],
            ['p99_s', 'P99', 'q'],
            ['p999_s', 'P99.9', 'q'],
            ['max_s', 'slowest', 'q'],
            ['mean_s', 'mean', 's'],
            ['mean_turns', 'turns, mean', 'n'],
            ['generated_tokens', 'generated tokens', 'n'],
            ['tool_tokens', 'tool tokens', 'n'],
          ],
        }),
    ...engineCalls(),
  ];
}

/** @param {StepRow} step */
function tailOf(step) {
  if (step.after_p80_s === null) return [];
  const p95 = step.after_p95_s !== null ? ` and ${seconds(step.after_p95_s)} after 95 %` : '';
  const found = [
    `In step ${clean(step.label)}, the last request ended ${seconds(step.after_p80_s)} after ` +
      `80 % of them${p95}.`,
  ];
  if (step.poll_s !== null) {
    found.push(
      `gen ended ${seconds(step.poll_s)} later ` +
        '(verl polls for finished samples, by default every 2 s).',
    );
  }
  return found;
}

/** @param {RequestTimesRow} times */
function durations(times) {
  const rows = tableOf('request_cdf').filter((row) => !row.validate);
  if (!rows.some((row) => row.s === shown.step)) return null;
  const gray = shown.step === ALL ? 'each step.' : 'the other steps.';
  return element(
    'div',
    {},
    heading(`Request durations, ${shownName()}`),
    cdfChart(rows, shown.step, times),
    rows.length > 2 ? note(`Cumulative share of requests by duration. Gray: ${gray}`) : null,
  );
}

/** @param {StepRow} step */
function inFlight(step) {
  const flight = tableOf('requests_in_flight').find((row) => row.s === step.s);
  if (!flight) return null;
  const longest = shown.step === ALL ? ' (the longest rollout)' : '';
  return element(
    'div',
    {},
    heading(`Requests in flight, step ${clean(step.label)}${longest}`),
    flightChart(flight, step),
    note(
      `Max concurrency ${number(flight.most)}, mean ${number(flight.mean)}: ` +
        `${share(1 - flight.mean / flight.most)} of slots idle (bubble ratio). ` +
        'Each point is the maximum in 1/160 of the time.',
    ),
  );
}

function engineCalls() {
  const [engine] = trainingRows('engine_times');
  if (!engine) return notesOf('engine');
  const {queue_s, prefill_s, decode_s, outside_s} = engine;
  const parts = Object.entries({queue: queue_s, prefill: prefill_s, decode: decode_s})
    .concat([['outside', outside_s]])
    .map(([name, value]) => ({name, value: value ?? 0}))
    .filter((part) => part.value > 0);
  if (parts.every((part) => part.name === 'outside') && outside_s !== null) {
    parts.unshift({name: 'engine', value: engine.total_s - outside_s});
  }
  const {engine_tokens_per_s: rate, cached_tokens: cached, prompt_tokens: prompt} = engine;
  const generated = rate === null ? '' : `; ${number(rate)} engine tokens/s`;
  const hits =
    cached === null || !prompt
      ? ''
      : `; ${share(cached / prompt)} of the prompt tokens were cached`;
  return [
    heading('Engine calls'),
    note(
      `${plural(engine.calls, 'call')}, P50 ${seconds(engine.p50_s)}, ` +
        `P95 ${quantile(engine.p95_s, engine)}, longest ${seconds(engine.max_s)}` +
        `${generated}${hits}.` +
        (outside_s
          ? ' “Outside” is the part of a call before and after the engine server: ' +
            'transport, and waiting for a busy event loop.'
          : ''),
    ),
    parts.length ? partsBar(parts) : null,
    parts.length ? legend(parts) : null,
    ...estimates([engine]),
    ...notesOf('engine'),
  ];
}

export function turnsSection() {
  const rows = trainingRows('turn_times');
  if (!rows.length) return nothing('turns', tableOf('turn_times').length > 0, 'finished turns');
  const name = shownName();
  return [
    about(
      'A turn is one engine call and the tool calls that it requests; turns are numbered from 0. ' +
        `${name[0].toUpperCase()}${name.slice(1)}.`,
    ),
    ...estimates(rows),
    element(
      'div',
      {class: 'columns'},
      element('div', {}, heading('Mean time by turn'), turnsChart(rows)),
      element(
        'div',
        {},
        heading('Turns per request'),
        table({
          caption: 'Turns per request',
          rows: trainingRows('turns_per_request'),
          limit: 9,
          columns: [
            ['turns', 'turns', 'n'],
            ['requests', 'requests', 'n', {bar: true}],
            ['share', 'share', 'share'],
            ['mean_s', 'mean time', 's'],
          ],
        }),
      ),
    ),
    table({
      caption: 'Turns by index',
      rows,
      limit: 12,
      columns: [
        ['turn', 'turn', 'n'],
        ['turns', 'turns', 'n'],
        ['share', 'share of time', 'share'],
        ['p50_s', 'P50', 's'],
        ['p95_s', 'P95', 'q'],
        ['max_s', 'longest', 's'],
        ['engine_s', 'engine, mean', 's'],
        ['tool_s', 'tools, mean', 's'],
        ['prompt_tokens', 'prompt tokens, mean', 'n'],
        ['response_tokens', 'generated tokens, mean', 'n'],
      ],
    }),
  ];
}

export function toolsSection() {
  const rows = trainingRows('tool_times');
  if (!rows.length) return nothing('tools', tableOf('tool_times').length > 0, 'tool calls');
  const calls = rows.reduce((sum, row) => sum + row.calls, 0);
  const failed = rows.reduce((sum, row) => sum + row.failed, 0);
  const total = rows.reduce((sum, row) => sum + row.total_s, 0);
  return [
    about(
      `${plural(calls, 'tool call')} in ${shownName()}, ${seconds(total)} in total` +
        `${failed ? `; ${plural(failed, 'call')} failed` : ''}.`,
    ),
    ...estimates(rows),
    table({
      caption: 'Tools',
      rows,
      limit: 15,
      columns: [
        ['tool', 'tool', 'text'],
        ['calls', 'calls', 'n'],
        ['failed', 'failed', 'n'],
        ['share', 'share of tool time', 'share', {bar: true, color: colorOf('tool')}],
        ['total_s', 'all calls', 's'],
        ['p50_s', 'P50', 's'],
        ['p95_s', 'P95', 'q'],
        ['p99_s', 'P99', 'q'],
        ['max_s', 'longest', 's'],
      ],
    }),
  ];
}

export function validationSection() {
  const rows = tableOf('request_times')
    .filter((row) => row.validate && row.s !== ALL)
    .map((row) => ({...labeled(row), testing_s: steps[row.s].testing_s}));
  if (!rows.length) return nothing('validation', false, 'validation requests');
  const tools = tableOf('tool_times').filter((row) => row.validate && row.s === ALL);
  return [
    about('Validation runs between steps and is not included in the numbers above.'),
    table({
      caption: 'Validation',
      rows,
      limit: 12,
      columns: [
        ['label', 'after step', 'text'],
        ['testing_s', 'time', 's', {bar: true}],
        ['requests', 'requests', 'n'],
        ['unfinished', 'unfinished', 'n'],
        ['p50_s', 'P50', 's'],
        ['p95_s', 'P95', 'q'],
        ['max_s', 'slowest', 's'],
        ['mean_turns', 'turns, mean', 'n'],
        ['generated_tokens', 'generated tokens', 'n'],
      ],
    }),
    tools.length
      ? table({
          caption: 'Tools in validation',
          rows: tools,
          columns: [
            ['tool', 'tool', 'text'],
            ['calls', 'calls', 'n'],
            ['failed', 'failed', 'n'],
            ['total_s', 'all calls', 's', {bar: true, color: colorOf('tool')}],
            ['p95_s', 'P95', 'q'],
            ['max_s', 'longest', 's'],
          ],
        })
      : null,
  ];
}
