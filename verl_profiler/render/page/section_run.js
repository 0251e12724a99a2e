// About the run and the recording: problems and launch.

import {about, heading, note} from './blocks.js';
import {DATA, several} from './data.js';
import {element} from './dom.js';
import {clean, number} from './format.js';

export function problemsSection() {
  const {problems} = DATA;
  /** @param {string[]} those */
  const list = (those) =>
    element(
      'ul',
      {class: 'problems'},
      those.map((problem) => element('li', {}, clean(problem))),
    );
  const more = element('summary', {}, `${number(problems.length - 12)} more`);
  return [
    about(
      problems.length
        ? 'Data-quality warnings: these numbers may be incomplete.'
        : 'No data-quality problems were found.',
    ),
    problems.length ? list(problems.slice(0, 12)) : null,
    problems.length > 12 ? element('details', {}, more, list(problems.slice(12))) : null,
  ];
}

/** @param {Fact[]} facts */
function factsList(facts) {
  const entries = facts.map(([key, value]) => [
    element('dt', {}, clean(key)),
    element('dd', {}, element('bdi', {}, clean(value))),
  ]);
  return element('dl', {class: 'facts-list'}, entries);
}

/** @param {Launch} launch */
function launchFacts(launch) {
  /** @type {[string, Fact[] | undefined][]} */
  const groups = [
    ['Training', launch.training],
    ['Versions', launch.versions],
    ['Profiler settings that differ from the defaults', launch.settings],
  ];
  return [
    several ? element('h3', {}, element('bdi', {}, clean(launch.run))) : null,
    ...(launch.facts.length || launch.training
      ? [
          factsList(launch.facts),
          element(
            'div',
            {class: 'columns'},
            groups.map(([title, facts]) =>
              facts?.length ? element('div', {}, heading(title), factsList(facts)) : null,
            ),
          ),
        ]
      : [note('run.json was not found.')]),
  ];
}

export function launchSection() {
  return DATA.about.launches.flatMap(launchFacts);
}
