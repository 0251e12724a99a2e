// Elements of the page, and the tip beside the pointer.

/** @typedef {Node | string | null | undefined | Child[]} Child */

/** @param {string} id */
export function find(id) {
  return document.getElementById(id);
}

/**
 * An element that is there, whatever the run.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  return /** @type {HTMLElement} */ (find(id));
}

/**
 * @param {Element} made
 * @param {Child[]} children
 */
function fill(made, children) {
  for (const child of children) {
    if (Array.isArray(child)) fill(made, child);
    else if (child !== null && child !== undefined) made.append(child);
  }
}

/**
 * Make an element; attributes that begin with "on" are listeners, null ones are left out.
 * @template {keyof HTMLElementTagNameMap} Name
 * @param {Name} name
 * @param {Record<string, string | boolean | null | (() => void)>} [attributes]
 * @param {Child[]} children
 * @returns {HTMLElementTagNameMap[Name]}
 */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === 'function') made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, '');
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  fill(made, children);
  return made;
}

/**
 * Black or white, whichever has the greater contrast to a color.
 * @param {string} color #RRGGBB
 */
export function inkOn(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const part = parseInt(color.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const light = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return light > 0.179 ? '#000000' : '#FFFFFF';
}

/**
 * Bring an element into the middle of the window, at once where motion is not wanted.
 * @param {Element} target
 */
export function scrollTo(target) {
  const still = window.matchMedia('(prefers-reduced-motion: reduce)').matches;
  target.scrollIntoView({block: 'center', behavior: still ? 'auto' : 'smooth'});
}

const tip = byId('tip');

/**
 * Show lines of text beside the pointer; the first one stands out.
 * @param {MouseEvent} event
 * @param {MaybeText[]} lines
 */
export function showTip(event, lines) {
  tip.replaceChildren(...lines.filter(Boolean).map((line) => element('div', {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - box.width - 8);
  let top = event.clientY + 16;
  if (top + box.height > window.innerHeight - 8) top = event.clientY - box.height - 12;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

export function hideTip() {
  tip.hidden = true;
}

// What moves away from the pointer, or is made anew, takes its tip with it.
for (const kind of ['scroll', 'keydown', 'pointerdown', 'resize', 'hashchange']) {
  window.addEventListener(kind, hideTip, {capture: true, passive: true});
}

/**
 * @template {HTMLElement} Kind
 * @param {Kind} node
 * @param {MaybeText[]} lines
 */
export function withTip(node, lines) {
  node.addEventListener('pointermove', (event) =>
    showTip(/** @type {PointerEvent} */ (event), lines),
  );
  node.addEventListener('pointerleave', hideTip);
  return node;
}
