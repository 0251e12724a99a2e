// Event-loop stalls: bands over the lane of the process in which nothing else went on.

import {DATA, timelines} from './data.js';
import {clean, seconds} from './format.js';

/**
 * Bands over a lane while the event loop of its process stands still; of trainer workers, which compute
 * inside their loops, only a line below it.
 * @param {import('./timeline_painter.js').Painter} painter
 * @param {import('./timeline_lanes.js').PlacedLane} lane
 */
export function drawStalls(painter, lane) {
  const {context, paint} = painter;
  const expected = DATA.computing.includes(lane.role);
  for (const [begin, length, during] of lane.lags || []) {
    const left = Math.max(painter.x(begin), painter.gutter);
    const right = Math.min(painter.x(begin + length), painter.width);
    if (right < painter.gutter || left > painter.width) continue;
    const height = expected ? 4 : lane.height + 4;
    const y = lane.top + lane.height + 4 - height;
    const width = Math.max(right - left, 1);
    const call = during ? ` in ${clean(during)}` : '';
    const time = seconds(length * timelines.unit_s);
    context.fillStyle = expected ? paint.muted : paint.accent;
    context.fillRect(left, y + height - 3, width, 3);
    const texts = [
      `event loop stalled ${time}${call}`,
      `event loop stalled ${time}`,
      `stalled ${time}`,
    ];
    if (!expected) drawBand(painter, [left, y, width, height - 3], texts);
    const lines = [
      `Event loop stalled for ${time}${call}`,
      expected ? 'It computes inside its loop: expected' : 'Nothing else in this process went on',
      clean(lane.name),
    ];
    const wide = Math.max(width, 3);
    painter.boxes.push({x: left, width: wide, y, height, lines: () => lines, stall: true});
  }
}

/**
 * @param {import('./timeline_painter.js').Painter} painter
 * @param {[left: number, top: number, width: number, height: number]} box
 * @param {string[]} texts Of which the first that fits is written into it.
 */
function drawBand({context, paint}, [left, top, width, height], texts) {
  context.globalAlpha = 0.35;
  context.fillRect(left, top, width, height);
  context.globalAlpha = 1;
  const text = texts.find((each) => context.measureText(each).width < width - 14);
  if (!text) return;
  context.fillStyle = paint.page;
  context.fillRect(left + 3, top + 1, context.measureText(text).width + 8, 14);
  context.textAlign = 'left';
  context.fillStyle = paint.ink;
  context.fillText(text, left + 7, top + 8.5);
}
