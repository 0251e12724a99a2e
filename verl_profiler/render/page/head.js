// The first screen: facts about the run, where a mean step goes, and the fixes of findings to copy.

import {note} from './blocks.js';
import {partsBar, swatch} from './charts.js';
import {DATA, several} from './data.js';
import {byId, element, withTip} from './dom.js';
import {clean, plural, seconds, share} from './format.js';

/** Parts below this share are one part of the bar. */
const SMALL = 0.015;

/** The line of facts below the title, where a mean step goes, and what the recording lacks. */
export function fillHead() {
  const {about, problems} = DATA;
  byId('facts').textContent = about.line.map(clean).join(' · ');
  byId('warning').before(...about.notes.map((text) => note(clean(text))));
  const bars = about.runs.flatMap((run) => DATA.mean_step.filter((each) => each.run === run));
  byId('mean-step').append(...bars.flatMap(meanStep));
  for (const button of document.querySelectorAll('button.copy')) {
    button.addEventListener('click', () => copy(/** @type {HTMLButtonElement} */ (button)));
  }
  const gaps = [];
  if (problems.length === 1) gaps.push(`Data quality: ${clean(problems[0])}`);
  else if (problems.length) gaps.push(plural(problems.length, 'data-quality warning'));
  if (!gaps.length) return;
  byId('warning').append(`${gaps.join(', ')}: `, element('a', {href: '#problems'}, 'details'));
  byId('warning').hidden = false;
}

/**
 * One bar whose parts add up to a step, and below it each part with its seconds and share.
 * @param {MeanStep} step
 */
function meanStep({run, whole_s, parts}) {
  const large = parts.filter(([, length]) => length >= SMALL * whole_s);
  const small = parts.slice(large.length);
  const rest = small.reduce((sum, [, length]) => sum + length, 0);
  /** @type {MeanStep['parts']} */
  const others = [['others', rest, small.map(([name]) => clean(name)).join(', '), '#C9CED6']];
  const shown = small.length > 1 ? [...large, ...others] : parts;
  const list = element('ul', {class: 'legend'});
  for (const [name, length, about, color] of shown) {
    const figures = element('strong', {}, seconds(length));
    const part = ` ${share(length / whole_s)}`;
    const item = element('li', {}, swatch(color), `${clean(name)} `, figures, part);
    list.append(withTip(item, [clean(name), `${seconds(length)},${part}`, about]));
  }
  const of = several ? ` of ${clean(run)}` : '';
  return [
    element(
      'h2',
      {},
      `Where a mean step${of} goes: ${seconds(whole_s)} from its start to the next`,
    ),
    partsBar(shown.map(([name, value, about, color]) => ({name, value, about, color}))) ?? '',
    list,
  ];
}

/** @param {HTMLButtonElement} button Its fix is beside it. */
async function copy(button) {
  const fix = button.dataset.copy ?? '';
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(fix);
    button.textContent = 'Copied';
    byId('status').textContent = `Copied: ${fix}`;
  } catch {
    // Without a clipboard, the text is selected where it stands.
    const code = button.closest('li')?.querySelector('code');
    const details = code?.closest('details');
    if (details) details.open = true;
    if (code) getSelection()?.selectAllChildren(code);
    button.textContent = 'Selected: Ctrl+C copies';
  }
  button.addEventListener('blur', () => (button.textContent = label), {once: true});
}
