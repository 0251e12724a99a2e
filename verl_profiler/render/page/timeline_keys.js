// The keys of a timeline: those of other trace viewers, and arrows.

/** @param {import('./timeline.js').Timeline} timeline */
export function listenToKeys(timeline) {
  // At the pointer where it is over the lanes, else at the middle.
  /** @param {number} factor */
  const zoom = (factor) =>
    timeline.zoom(factor, timeline.pointer ? timeline.timeUnder(timeline.pointer) : undefined);
  /** @type {Record<string, () => void>} */
  const keys = {
    '+': () => zoom(0.6),
    '=': () => zoom(0.6),
    '-': () => zoom(1 / 0.6),
    _: () => zoom(1 / 0.6),
    w: () => zoom(0.6),
    s: () => zoom(1 / 0.6),
    a: () => timeline.pan(-0.15),
    d: () => timeline.pan(0.15),
    ArrowLeft: () => timeline.pan(-0.15),
    ArrowRight: () => timeline.pan(0.15),
    Home: () => timeline.reset(),
    ArrowUp: () => timeline.move(-1),
    ArrowDown: () => timeline.move(1),
    ',': () => timeline.moveSlice(-1),
    '.': () => timeline.moveSlice(1),
  };
  /** @param {KeyboardEvent} event */
  const act = (event) => {
    const action = keys[event.key] ?? keys[event.key.toLowerCase()];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  };
  timeline.canvas.addEventListener('keydown', act);
  // Without a click too, while the pointer is over the lanes and nobody is typing.
  window.addEventListener('keydown', (event) => {
    const target = /** @type {Element} */ (event.target);
    const letter = 'wasd'.includes(event.key.toLowerCase());
    const elsewhere = target === timeline.canvas || target.closest('input, select');
    if (letter && timeline.pointer && !elsewhere) act(event);
  });
}
