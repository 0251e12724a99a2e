// The page: its sections, the step that they show, and its theme.

import {note} from './blocks.js';
import {drawIn} from './charts.js';
import {ALL, DATA, requests, shown, shownName, steps, trained} from './data.js';
import {byId, element} from './dom.js';
import {clean, plural} from './format.js';
import {capturesSection} from './section_captures.js';
import {devicesSection} from './section_devices.js';
import {poolsSection} from './section_pools.js';
import {
  applyFilter,
  filter,
  followStep,
  onFilter,
  onPicked,
  pickedRequest,
  pickRequest,
  redrawTimeline,
  requestsSection,
  startTimeline,
} from './section_requests.js';
import {rolloutSection, toolsSection, turnsSection, validationSection} from './section_rollout.js';
import {costSection, launchSection, problemsSection, stallsSection} from './section_run.js';
import {pathSection, stepsSection} from './section_steps.js';
import {viewBlocks} from './section_view.js';
import {redrawCharts} from './vega.js';
import {transfersSection, weightsSection, workersSection} from './section_workers.js';

const {sections} = DATA;

/** @type {Record<string, () => import('./dom.js').Child[]>} */
const MAKERS = {
  steps: () => stepsSection(choose),
  path: pathSection,
  devices: devicesSection,
  pools: poolsSection,
  rollout: rolloutSection,
  requests: () => requestsSection(choose),
  turns: turnsSection,
  tools: toolsSection,
  workers: workersSection,
  transfers: transfersSection,
  weights: weightsSection,
  captures: capturesSection,
  lags: stallsSection,
  validation: validationSection,
  problems: problemsSection,
  cost: costSection,
  launch: launchSection,
};

// Sections that are the same for every step.
const FIXED = ['requests', 'pools', 'validation', 'problems', 'launch'];

let started = false;
/** Whether a person has selected a request. */
let chosen = false;

const select = /** @type {HTMLSelectElement} */ (byId('step'));
const previous = /** @type {HTMLButtonElement} */ (byId('previous'));
const next = /** @type {HTMLButtonElement} */ (byId('next'));

/** @param {PageSection} section */
function fill({name, title, questions, views}) {
  const make = () => [...(MAKERS[name]?.() ?? []), ...viewBlocks(views)];
  const heading = element('h2', {title: questions.join(' ') || null}, title);
  byId(name).replaceChildren(heading, ...element('div', {}, make()).childNodes);
}

/**
 * Show a step everywhere; ALL shows all of them together.
 * @param {number} step
 * @param {boolean} [keepScene]
 */
function choose(step, keepScene = false) {
  const focused = document.activeElement;
  const section = focused?.closest('section');
  const label = focused?.getAttribute('aria-label');
  shown.step = step;
  select.value = String(step);
  const place = trained.findIndex((each) => each.s === step);
  previous.disabled = place < 0;
  next.disabled = place === trained.length - 1;
  for (const each of sections) if (!FIXED.includes(each.name)) fill(each);
  followStep(keepScene);
  byId('status').textContent = `Showing ${shownName()}`;
  remember();
  if (!section || !label) return;
  // What had the focus was made anew.
  drawIn(section);
  /** @type {NodeListOf<HTMLElement>} */
  const nodes = section.querySelectorAll('[aria-label]');
  const again = [...nodes].find((node) => node.getAttribute('aria-label') === label);
  again?.focus({preventScroll: true});
}

/** @param {number} by */
function move(by) {
  const place = trained.findIndex((step) => step.s === shown.step) + by;
  choose(place < 0 ? ALL : trained[Math.min(place, trained.length - 1)].s);
}

function startTheme() {
  const root = document.documentElement;
  const button = byId('theme');
  const system = window.matchMedia('(prefers-color-scheme: dark)');
  const dark = () => (root.dataset.theme ? root.dataset.theme === 'dark' : system.matches);
  /** @param {string | undefined} name The system's where undefined. */
  const set = (name) => {
    if (name === undefined) delete root.dataset.theme;
    else root.dataset.theme = name;
    update();
  };
  const update = () => {
    button.textContent = dark() ? 'Light' : 'Dark';
    redrawTimeline();
    redrawCharts();
  };
  button.addEventListener('click', () => set(dark() ? 'light' : 'dark'));
  system.addEventListener('change', update);
  /** @type {string | undefined} */
  let before;
  window.addEventListener('beforeprint', () => {
    before = root.dataset.theme;
    set('light');
  });
  window.addEventListener('afterprint', () => set(before));
  update();
}

/** The line of facts below the findings, and the warning where the recording has gaps. */
function fillHead() {
  const {about, problems} = DATA;
  const training = new Map(about.launches[0]?.training ?? []);
  const {requests: count, validation_requests: validated, missed} = about;
  const devices = training.has('n_gpus_per_node')
    ? `${training.get('nnodes')} × ${training.get('n_gpus_per_node')} devices`
    : null;
  const facts = [
    training.get('model'),
    training.get('rollout'),
    devices,
    count == null ? 'requests not recorded' : plural(count, 'request'),
    validated ? plural(validated, 'validation request') : null,
    plural(about.events, 'event'),
  ];
  byId('facts').textContent = facts.filter(Boolean).map(clean).join(' · ');
  byId('facts').after(...about.notes.map((text) => note(clean(text))));
  const gaps = [];
  if (problems.length === 1) gaps.push(`Data quality: ${clean(problems[0])}`);
  else if (problems.length) gaps.push(plural(problems.length, 'data-quality warning'));
  if (missed.length) gaps.push(`${plural(missed.length, 'probe')} not installed`);
  if (!gaps.length) return;
  const link = element('a', {href: '#problems'}, 'details');
  byId('warning').append(`${gaps.join(', ')}: `, link);
  byId('warning').hidden = false;
}

/** Keep the step and the request in the address, so that a link leads to them. */
function remember() {
  if (!started) return;
  const words = [];
  if (shown.step !== ALL) words.push(`step=${encodeURIComponent(stepLabel(shown.step))}`);
  const id = pickedRequest()?.request_id;
  if (id && chosen) words.push(`request=${encodeURIComponent(id)}`);
  words.push(...filter.words());
  history.replaceState(null, '', words.length ? `#${words.join('&')}` : location.pathname);
}

/** @param {number} step */
function stepLabel(step) {
  return clean(steps[step].label);
}

/**
 * Show what the address names: `#step=3&request=1f7a7a0f`; a request by the start of its id.  What is
 * not in the report is named.
 */
function follow() {
  const words = new URLSearchParams(location.hash.slice(1));
  const label = words.get('step');
  const id = words.get('request');
  const step = trained.find((each) => clean(each.label) === label);
  const request = id
    ? requests.find(
        (each) => each.request_id?.startsWith(id) && (label === null || each.s === step?.s),
      )
    : undefined;
  filter.read(words);
  applyFilter();
  if (step) choose(step.s);
  const absent = [
    label !== null && !step ? `step ${clean(label)}` : '',
    id && !request ? `request ${clean(id)}` : '',
  ].filter(Boolean);
  byId('absent').hidden = !absent.length;
  byId('absent').textContent = absent.length
    ? `This report does not have ${absent.join(' or ')}. Showing ${shownName()}.`
    : '';
  if (request) {
    pickRequest(request);
    byId('requests').scrollIntoView();
  }
}

function start() {
  fillHead();
  byId('main').replaceChildren(
    ...sections.map(({name, title}) => element('section', {id: name, 'aria-label': title})),
  );
  byId('links').append(
    ...sections.map(({name, link}) => element('li', {}, element('a', {href: `#${name}`}, link))),
  );
  select.append(
    element('option', {value: String(ALL)}, 'all'),
    ...trained.map((step) => element('option', {value: String(step.s)}, clean(step.label))),
  );
  select.addEventListener('change', () => choose(Number(select.value)));
  previous.addEventListener('click', () => move(-1));
  next.addEventListener('click', () => move(1));
  for (const each of sections) if (FIXED.includes(each.name)) fill(each);
  startTimeline();
  choose(ALL);
  startTheme();
  follow();
  started = true;
  onFilter(remember);
  onPicked(() => {
    chosen = true;
    remember();
  });
  window.addEventListener('hashchange', follow);
  document.documentElement.dataset.ready = 'true';
}

start();
