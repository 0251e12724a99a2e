// Hands a trace to the Perfetto UI: opens it, sends PING until PONG comes, then posts the bytes.

/** @typedef {{ui: string, title: string}} Info The UI's address, and the trace's name there. */

const state = /** @type {HTMLElement} */ (document.getElementById('state'));
const button = /** @type {HTMLButtonElement} */ (document.getElementById('open'));

async function load() {
  /** @type {Info} */
  const info = await (await fetch('info')).json();
  const buffer = await (await fetch('trace')).arrayBuffer();
  button.onclick = () => openUi(info, buffer);
  openUi(info, buffer);
}

/**
 * @param {Info} info
 * @param {ArrayBuffer} buffer
 */
function openUi(info, buffer) {
  const {origin} = new URL(info.ui);
  const ui = window.open(info.ui);
  if (!ui) {
    state.textContent = 'The browser blocked the new tab.';
    button.hidden = false;
    return;
  }
  state.textContent = 'Waiting for the Perfetto UI …';
  const timer = setInterval(() => ui.postMessage('PING', origin), 100);
  /** @param {MessageEvent} event */
  const answered = async (event) => {
    if (event.source !== ui || event.origin !== origin || event.data !== 'PONG') return;
    clearInterval(timer);
    window.removeEventListener('message', answered);
    ui.postMessage({perfetto: {buffer, title: info.title}}, origin);
    await fetch('taken', {method: 'POST'});
    button.hidden = true;
    state.textContent = 'The timeline is open in the Perfetto UI. This page can be closed.';
  };
  window.addEventListener('message', answered);
}

load().catch((error) => {
  state.textContent = `The timeline cannot be loaded: ${error}`;
});

export {};
