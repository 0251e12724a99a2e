// A slice of the timeline in detail.

import {element} from './dom.js';
import {callOf, callsOf, requestLines, spanLines, spansOf} from './request.js';

/** Events that other slices of a request stand for. */
const HIDDEN = ['turn', 'server_acquire'];

/**
 * Places of the spans of a request that the timeline draws.
 * @param {RequestRow} request
 */
export function shownSpans(request) {
  return spansOf(request)
    .map(({event}, place) => ({event, place}))
    .filter(({event}) => !HIDDEN.includes(event))
    .filter(({event}) => event !== 'tool_execution' || !request.hasCalls)
    .map(({place}) => place);
}

/**
 * @param {RequestRow} request
 * @param {number} place Of the span.
 */
export function sliceLines(request, place) {
  const span = spansOf(request)[place];
  return spanLines(span, callOf(span, callsOf(request)));
}

/**
 * What was clicked in the timeline, in detail.
 * @param {Partial<import('./timeline_painter.js').Box>} box
 */
export function sliceDetails({request, span, lines, x = 0}) {
  const own = request
    ? span === undefined
      ? requestLines(request)
      : sliceLines(request, span)
    : (lines?.(x) ?? []);
  const [title, ...more] = own.filter((line) => line !== null);
  return {
    text: [title, ...more].join(', '),
    node: element(
      'div',
      {},
      element('h3', {}, title),
      element('p', {class: 'facts'}, more.join(' · ')),
    ),
  };
}
