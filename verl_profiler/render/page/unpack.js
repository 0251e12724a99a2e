// The data block of a large page is compressed, and is unpacked before the page is drawn.

import {byId} from './dom.js';

/**
 * Draws the page, at once or as soon as its data is unpacked.
 * @param {() => void} draw
 */
export function whenUnpacked(draw) {
  const block = byId('data');
  if (block.dataset.packed === undefined) {
    draw();
    return;
  }
  plainText(block.textContent ?? '').then((text) => {
    block.textContent = text;
    draw();
  }, refuse);
}

/**
 * @param {string} packed
 * @returns {Promise<string>}
 */
export async function plainText(packed) {
  const bytes = Uint8Array.from(atob(packed), (each) => each.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return await new Response(plain).text();
}

function refuse() {
  const warning = byId('warning');
  warning.textContent =
    'This browser cannot unpack the data of this report: it needs a Chrome or Edge of 2020, a ' +
    'Firefox or Safari of 2023, or later; or the file is damaged.';
  warning.hidden = false;
  document.documentElement.dataset.ready = 'true';
}
