// The page: its sections, the step that they show, and its theme.

import {ALL, DATA, requests, several, shown, shownName, steps, timelines, trained} from './data.js';
import {byId, element, find} from './dom.js';
import {clean, number} from './format.js';
import {fillHead} from './head.js';
import {
  followStep,
  onPicked,
  pickedRequest,
  pickRequest,
  redrawTimeline,
  requestsSection,
  startTimeline,
} from './section_requests.js';
import {launchSection, problemsSection} from './section_run.js';
import {stepsSection} from './section_steps.js';
import {viewBlocks} from './section_view.js';
import {drawCharts, redrawCharts, whenStepPicked} from './vega.js';

const {sections} = DATA;

/** @type {Record<string, () => import('./dom.js').Child[]>} */
const MAKERS = {
  steps: () => stepsSection(choose),
  requests: () => requestsSection(choose),
  problems: problemsSection,
  launch: launchSection,
};

// Sections that are the same for every step.
const FIXED = ['requests', 'problems', 'launch'];

/** Whether the address follows what is shown. */
let following = false;
/** Whether a person has selected a request. */
let chosen = false;

const select = /** @type {HTMLSelectElement} */ (byId('step'));
const previous = /** @type {HTMLButtonElement} */ (byId('previous'));
const next = /** @type {HTMLButtonElement} */ (byId('next'));

/** Sections that were made: those of a folded topic are made when it is opened. */
const made = new Set();

/** @param {PageSection} section */
function fill({name, title, views, notes}) {
  made.add(name);
  const make = () => [...(MAKERS[name]?.() ?? []), ...viewBlocks(views, notes)];
  const heading = element('h2', {}, title);
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
  for (const each of sections) {
    const wanted = each.topic === null || made.has(each.name);
    if (wanted && !FIXED.includes(each.name)) fill(each);
  }
  followStep(keepScene);
  byId('status').textContent = `Showing ${shownName()}`;
  remember();
  if (!section || !label) return;
  // What had the focus was made anew.
  /** @type {NodeListOf<HTMLElement>} */
  const nodes = section.querySelectorAll('[aria-label]');
  const again = [...nodes].find((node) => node.getAttribute('aria-label') === label);
  again?.focus({preventScroll: true});
}

whenStepPicked((picked) => {
  const step = trained.find((each) => each.step === picked);
  if (step && !several) choose(step.s === shown.step ? ALL : step.s);
});

/** @param {number} by */
function move(by) {
  const place = trained.findIndex((step) => step.s === shown.step) + by;
  choose(place < 0 ? ALL : trained[Math.min(place, trained.length - 1)].s);
}

/** The system's theme, until the other one is chosen; paper is light. */
function startTheme() {
  const root = document.documentElement;
  const button = byId('theme');
  const system = window.matchMedia('(prefers-color-scheme: dark)');
  const isDark = () => root.dataset.theme === 'dark';
  /** @param {boolean} dark */
  const set = (dark) => {
    root.dataset.theme = dark ? 'dark' : 'light';
    button.textContent = dark ? 'Light' : 'Dark';
    redrawTimeline();
    redrawCharts();
  };
  button.addEventListener('click', () => set(!isDark()));
  system.addEventListener('change', () => set(system.matches));
  let before = false;
  window.addEventListener('beforeprint', () => {
    before = isDark();
    set(false);
  });
  window.addEventListener('afterprint', () => set(before));
  set(system.matches);
}

/** Keep what is shown in the address, so that a link leads to it. */
function remember() {
  if (!following) return;
  const words = addressWords();
  history.replaceState(null, '', words.length ? `#${words.join('&')}` : location.pathname);
}

function addressWords() {
  const words = [];
  if (shown.step !== ALL) words.push(`step=${encodeURIComponent(stepLabel(shown.step))}`);
  const id = pickedRequest()?.request_id;
  if (id && chosen) words.push(`request=${encodeURIComponent(id)}`);
  return words;
}

/** @param {number} step */
function stepLabel(step) {
  return clean(steps[step].label);
}

/**
 * Open the topic of a section, and bring the section into view.
 * @param {Element | string} target The section, or its name.
 */
function lead(target) {
  const place = typeof target === 'string' ? byId(target) : target;
  const topic = /** @type {HTMLDetailsElement | null} */ (place.closest('details.topic'));
  if (topic) unfold(topic);
  place.scrollIntoView();
}

/** @param {HTMLDetailsElement} topic */
function unfold(topic) {
  topic.open = true;
  for (const {id} of topic.querySelectorAll('section')) {
    if (!made.has(id)) fill(/** @type {PageSection} */ (sections.find(({name}) => name === id)));
  }
}

/**
 * Show what the address names: `#tools`, `#view=tool_latencies`, `#step=3&request=1f7a7a0f`; a request
 * by the start of its id.  What is not in the report is named.
 */
function follow() {
  const address = location.hash.slice(1);
  const words = new URLSearchParams(address);
  const plain = !address.includes('=');
  const [label, id] = [words.get('step'), words.get('request')];
  const view = plain ? address || null : words.get('view');
  const place = view === null ? null : (find(view)?.closest('section, header, details') ?? null);
  const step = trained.find((each) => clean(each.label) === label);
  const request = id
    ? requests.find(
        (each) => each.request_id?.startsWith(id) && (label === null || each.s === step?.s),
      )
    : undefined;
  following = false;
  if (step && step.s !== shown.step) choose(step.s);
  const absent = [
    label !== null && !step ? `step ${clean(label)}` : '',
    id && !request ? absentRequest(id) : '',
    view !== null && !place ? `view ${clean(view)}` : '',
  ].filter(Boolean);
  byId('absent').hidden = !absent.length;
  byId('absent').textContent = absent.length
    ? `This report does not have ${absent.join(' or ')}. Showing ${shownName()}.`
    : '';
  if (request) {
    pickRequest(request);
    chosen = true;
  }
  following = true;
  if (place) lead(place);
  else if (request) lead('requests');
}

/**
 * A request that is not listed may have been recorded nevertheless.
 * @param {string} id
 */
function absentRequest(id) {
  const {of} = timelines;
  const some = `${number(requests.length)} of ${number(of)} requests are listed`;
  return `request ${clean(id)}${requests.length < of ? ` (${some})` : ''}`;
}

/**
 * @param {string} topic
 * @param {PageSection[]} own
 */
function topicOf(topic, own) {
  const links = own.map(({link}) => link).join(', ');
  const heading = element('summary', {}, element('h2', {}, topic), element('span', {}, links));
  const fold = element('details', {class: 'topic', id: slug(topic)}, heading, own.map(frameOf));
  fold.addEventListener('toggle', () => fold.open && unfold(fold));
  return fold;
}

/** @param {PageSection} section */
function frameOf({name, title}) {
  return element('section', {id: name, 'aria-label': title});
}

/** @param {string} topic */
function slug(topic) {
  return `topic-${topic.toLowerCase().replaceAll(' ', '-')}`;
}

/** @param {Pick<PageSection, 'name' | 'link'>} section */
function linkTo({name, link}) {
  return element('li', {}, element('a', {href: `#${name}`}, link));
}

/** Sections by topic; those without one are shown at once. */
function startSections() {
  /** @type {Map<string | null, PageSection[]>} */
  const topics = new Map([[null, []]]);
  for (const each of sections) {
    topics.set(each.topic, [...(topics.get(each.topic) ?? []), each]);
  }
  const links = byId('links');
  links.append(linkTo({name: 'top', link: 'Overview'}));
  if (find('difference')) links.append(linkTo({name: 'difference', link: 'Difference'}));
  for (const [topic, own] of topics) {
    byId('main').append(...(topic === null ? own.map(frameOf) : [topicOf(topic, own)]));
    const shownLinks = topic === null ? own : [{name: slug(topic), link: topic}];
    links.append(...shownLinks.map(linkTo));
  }
  for (const each of topics.get(null) ?? []) if (FIXED.includes(each.name)) fill(each);
}

/** The menu is always open where there is room beside the page. */
function startMenu() {
  const menu = /** @type {HTMLDetailsElement} */ (byId('menu'));
  const wide = window.matchMedia('(min-width: 1000px)');
  const update = () => (menu.open = wide.matches);
  wide.addEventListener('change', update);
  update();
  document.addEventListener('click', (event) => {
    const link = /** @type {Element} */ (event.target).closest('a[href^="#"]');
    const name = link?.getAttribute('href')?.slice(1) ?? '';
    const place = find(name);
    if (!place) return;
    event.preventDefault();
    update();
    // The address keeps the step beside the section.
    const words = [...addressWords(), `view=${name}`];
    history.pushState(null, '', `#${words.length > 1 ? words.join('&') : name}`);
    lead(place);
    place.tabIndex = -1;
    place.focus({preventScroll: true});
  });
}

function startPrint() {
  /** @type {HTMLDetailsElement[]} */
  let opened = [];
  window.addEventListener('beforeprint', () => {
    opened = [...document.querySelectorAll('details.topic:not([open])')].map(
      (each) => /** @type {HTMLDetailsElement} */ (each),
    );
    opened.forEach(unfold);
    drawCharts();
  });
  window.addEventListener('afterprint', () => opened.forEach((each) => (each.open = false)));
}

function start() {
  fillHead();
  startSections();
  select.append(
    element('option', {value: String(ALL)}, 'all'),
    ...trained.map((step) => element('option', {value: String(step.s)}, clean(step.label))),
  );
  select.addEventListener('change', () => choose(Number(select.value)));
  previous.addEventListener('click', () => move(-1));
  next.addEventListener('click', () => move(1));
  startTimeline();
  choose(ALL);
  startTheme();
  startMenu();
  startPrint();
  follow();
  onPicked(() => {
    chosen = true;
    remember();
  });
  window.addEventListener('hashchange', follow);
  document.documentElement.dataset.ready = 'true';
}

start();
