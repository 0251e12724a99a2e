// One bar per step, cut into phases.

import {
  canvas,
  drawn,
  EDGE,
  fitting,
  legend,
  onClass,
  rect,
  secondsAxis,
  textAt,
  timeAxis,
} from './charts.js';
import {colorOf, DATA} from './data.js';
import {element, rove, svg, withTip} from './dom.js';
import {clean, seconds, share, shorten} from './format.js';

/**
 * Bars lie when there are few steps, and stand when there are many.
 * @param {StepRow[]} steps
 * @param {PhaseRow[]} phases
 * @param {number} chosen
 * @param {(step: number) => void} onStep
 */
export function stepChart(steps, phases, chosen, onStep) {
  /** @type {Map<number, PhaseRow[]>} */
  const byStep = new Map(steps.map((step) => [step.s, []]));
  for (const phase of phases) byStep.get(phase.s)?.push(phase);
  const order = phaseOrder(phases.filter((phase) => byStep.has(phase.s)));
  for (const list of byStep.values()) {
    list.sort((a, b) => order.indexOf(a.phase) - order.indexOf(b.phase));
  }
  const most = Math.max(...steps.map((step) => step.duration_s || step.seen_s || 0), 1e-9);
  const form = steps.length <= 20 ? lying : standing;
  const first = steps.findIndex((step) => step.s === chosen);
  /** @param {number} width */
  const draw = (width) => {
    const chart = form(width);
    rove([.../** @type {NodeListOf<SVGElement>} */ (chart.querySelectorAll('.pick'))], first);
    chart.setAttribute('role', 'group');
    chart.setAttribute('aria-label', 'Steps; arrow keys move, Enter shows a step');
    return chart;
  };
  return element('div', {}, legend(order.map((name) => ({name}))), drawn(draw));

  /**
   * @param {StepRow} step
   * @param {SVGElement[]} children
   */
  function bar(step, children) {
    const written = children.flatMap((child) => [...child.querySelectorAll('text'), child]);
    const texts = written.filter((each) => each.tagName === 'text').map((each) => each.textContent);
    const attributes = {
      class: 'pick',
      role: 'button',
      'aria-pressed': String(chosen === step.s),
      // What is written in the bar is part of its name.
      'aria-label': texts.length
        ? texts.join(' ')
        : `step ${step.label}, ${seconds(step.duration_s)}`,
    };
    const spaced = children.flatMap((child) => [child, ' ']);
    const group = svg('g', attributes, spaced);
    group.addEventListener('click', () => onStep(step.s));
    group.addEventListener('keydown', (event) => {
      if (event.key !== 'Enter' && event.key !== ' ') return;
      event.preventDefault();
      onStep(step.s);
    });
    return group;
  }

  /** @param {number} width */
  function lying(width) {
    const left = Math.min(150, 30 + 8 * Math.max(...steps.map((step) => step.label.length + 5)));
    const right = 62;
    const row = 30;
    const bottom = steps.length * row;
    const chart = canvas(width, bottom + 26);
    const x = (/** @type {number} */ value) => left + ((width - left - right) * value) / most;
    timeAxis(chart, x, most, {top: 0, bottom, right: width - 10});
    steps.forEach((step, place) => {
      const y = place * row + 4;
      const name = `step ${shorten(step.label, 16)}`;
      /** @type {SVGElement[]} */
      const parts = [
        rect(0, y - 3, width, row - 2, 'transparent', {class: 'ring', rx: 4}),
        textAt(left - 10, y + 15, name, 'end', 'ink'),
      ];
      let from = 0;
      for (const phase of byStep.get(step.s) ?? []) {
        const begin = x(from);
        from += phase.duration_s;
        const wide = x(from) - begin;
        const fill = colorOf(phase.phase);
        const part = svg('g', {}, rect(begin, y, wide, row - 9, fill, EDGE));
        const time = seconds(phase.duration_s);
        const text = fitting([`${phase.phase} ${time}`, time], wide - 10);
        if (text) part.append(textAt(begin + 6, y + 15, clean(text), 'start', onClass(fill)));
        parts.push(withTip(part, tipOf(step, phase)));
      }
      if (step.duration_s === null) {
        parts.push(
          textAt(x(0) + 6, y + 15, `unfinished; ${seconds(step.seen_s)} recorded`, 'start'),
        );
      } else {
        const end = x(step.duration_s) + 7;
        parts.push(textAt(end, y + 15, seconds(step.duration_s), 'start', 'ink'));
      }
      chart.append(bar(step, parts));
    });
    return chart;
  }

  /** @param {number} width */
  function standing(width) {
    const left = 52;
    const height = 220;
    const room = (width - left - 8) / steps.length;
    const chart = canvas(width, height + 30);
    const y = (/** @type {number} */ value) => 8 + (height - 8) * (1 - value / most);
    secondsAxis(chart, y, most, {left, right: width});
    const every = Math.ceil(46 / room);
    const wide = Math.max(room - (room > 4 ? 1.5 : 0), 0.6);
    steps.forEach((step, place) => {
      const x = left + place * room;
      /** @type {SVGElement[]} */
      const parts = [];
      let from = 0;
      for (const phase of byStep.get(step.s) ?? []) {
        const bottom = y(from);
        from += phase.duration_s;
        const part = rect(x, y(from), wide, bottom - y(from), colorOf(phase.phase));
        parts.push(withTip(part, tipOf(step, phase)));
      }
      if (!parts.length) {
        const top = y(step.seen_s || 0);
        parts.push(withTip(rect(x, top, wide, height - top, 'var(--line)'), tipWithout(step)));
      }
      const ring = {class: 'ring', 'pointer-events': 'none'};
      parts.push(rect(x - 0.5, 4, wide + 1, height - 3, 'transparent', ring));
      chart.append(bar(step, parts));
      if (place % every === 0) {
        chart.append(textAt(x + wide / 2, height + 16, shorten(step.label, 8), 'middle'));
      }
    });
    return chart;
  }
}

/**
 * @param {StepRow} step
 * @param {PhaseRow} phase
 */
function tipOf(step, phase) {
  return [
    phase.phase === 'unaccounted'
      ? 'unaccounted: not covered by any verl timer'
      : clean(phase.phase),
    `${seconds(phase.duration_s)} · ${share(phase.share)} of step ${clean(step.label)}`,
  ];
}

/** @param {StepRow} step */
function tipWithout(step) {
  return [
    `step ${clean(step.label)}`,
    step.duration_s === null
      ? `unfinished; ${seconds(step.seen_s)} recorded`
      : `${seconds(step.duration_s)}; its phases are not in this file`,
  ];
}

/**
 * Phases as a step has them, first to last; what no timer covers comes at the end.
 * @param {PhaseRow[]} phases
 */
function phaseOrder(phases) {
  const known = Object.keys(DATA.colors);
  const names = [...new Set(phases.map((phase) => phase.phase))];
  /** @param {string} name */
  const place = (name) => {
    if (name === 'unaccounted') return 1e6;
    return known.includes(name) ? known.indexOf(name) : 1e5;
  };
  return names.sort((a, b) => place(a) - place(b));
}
