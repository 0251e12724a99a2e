// The timeline of a step: lanes of processes on a canvas, with zoom, pan and selection.

const GUTTER = 138;
const AXIS = 24;
const LANE_GAP = 7;
const SPAN_ROW = 17;
const COUNT_ROW = 34;

class Timeline {
  constructor(box, drawings, onPick) {
    this.drawings = drawings;
    this.onPick = onPick;
    this.axis = element('canvas', {'aria-hidden': 'true'});
    this.canvas = element('canvas', {class: 'lane-canvas', tabindex: '0', role: 'application',
      'aria-roledescription': 'timeline', 'aria-describedby': 'timeline-keys'});
    this.lanesBox = element('div', {class: 'lanes'}, this.canvas);
    box.append(element('div', {class: 'frame'}, this.axis, this.lanesBox));
    this.selected = null;
    this.boxes = [];
    this.listen();
    new ResizeObserver(() => requestAnimationFrame(() => this.layout())).observe(this.lanesBox);
  }

  show(scene) {
    this.scene = scene;
    this.unit = this.drawings.unit_s;
    const margin = Math.max(1, (scene.end - scene.begin) * 0.004);
    this.home = [scene.begin - margin, scene.end + margin];
    this.view = this.home.slice();
    this.prepare();
    this.lanesBox.scrollTop = 0;
    this.layout();
    this.describe();
  }

  describe() {
    const requests = this.order.length;
    this.canvas.setAttribute('aria-label', 'Timeline: ' + this.lanes.length + ' lanes, ' + requests +
      ' requests. Arrow left and right pan, plus and minus zoom, Home shows everything, arrow up and down select a request.');
  }

  // Puts spans and requests into rows in which nothing overlaps.
  prepare() {
    const scene = this.scene;
    const place = this.drawings.scenes.indexOf(scene);
    const byName = new Map();
    for (const request of this.drawings.requests) {
      if (request.scene !== place) continue;
      if (!byName.has(request.name)) byName.set(request.name, []);
      byName.get(request.name).push(request);
    }
    this.order = [];
    let requestRows = 0;
    this.lanes = scene.lanes.map((lane) => {
      const made = {...lane, rows: []};
      if (lane.kind === 'requests') {
        const requests = (byName.get(lane.name) || []).slice().sort((a, b) => a.begin - b.begin);
        const ends = [];
        for (const request of requests) {
          let row = ends.findIndex((end) => end <= request.begin);
          if (row < 0) row = ends.push(0) - 1;
          ends[row] = request.begin + request.length;
          (made.rows[row] = made.rows[row] || []).push(request);
          this.order.push(request);
        }
        requestRows += made.rows.length;
      } else if (lane.kind === 'spans') {
        const open = [];
        const spans = lane.spans.slice().sort((a, b) => a[1] - b[1] || b[2] - a[2]);
        for (const span of spans) {
          while (open.length && open[open.length - 1] <= span[1]) open.pop();
          const depth = Math.min(open.length, 3);
          open.push(span[1] + span[2]);
          (made.rows[depth] = made.rows[depth] || []).push(span);
        }
        made.rows = made.rows.map((row) => row || []);
      } else made.values = dense(lane.counts, 160);
      return made;
    });
    this.requestRow = requestRows <= 40 ? 13 : requestRows <= 110 ? 9 : 6;
    let y = 4;
    for (const lane of this.lanes) {
      lane.top = y;
      lane.row = lane.kind === 'requests' ? this.requestRow : SPAN_ROW;
      lane.height = lane.kind === 'count' ? COUNT_ROW : Math.max(1, lane.rows.length) * lane.row;
      // Two lines of text beside each lane with a second one.
      lane.height = Math.max(lane.height, this.secondLine(lane) ? 30 : 17);
      y += lane.height + LANE_GAP;
    }
    this.height = y;
  }

  secondLine(lane) {
    if (lane.kind === 'requests') {
      return lane.drawn < lane.of ? number(lane.drawn) + ' of ' + number(lane.of) + ' requests' : plural(lane.of, 'request');
    }
    if (lane.kind === 'count') return 'at most ' + number(lane.most) + ' at once';
    if (lane.of > lane.spans.length) return 'longest ' + lane.spans.length + ' of ' + number(lane.of);
    return lane.role_of ? lane.role_of[0] + ' of ' + lane.role_of[1] + ' shown' : '';
  }

  layout() {
    if (!this.scene) return;
    this.width = Math.max(320, this.lanesBox.clientWidth);
    this.gutter = this.width < 560 ? 92 : GUTTER;
    const ratio = window.devicePixelRatio || 1;
    for (const [canvas, height] of [[this.canvas, this.height], [this.axis, AXIS]]) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + 'px';
      canvas.style.width = this.width + 'px';
      canvas.getContext('2d').setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.draw();
  }

  x(time) {
    return this.gutter + (this.width - this.gutter - 8) * (time - this.view[0]) / (this.view[1] - this.view[0]);
  }

  timeAt(x) {
    return this.view[0] + (x - this.gutter) / (this.width - this.gutter - 8) * (this.view[1] - this.view[0]);
  }

  colors() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue('--' + name).trim();
    return {page: read('page'), ink: read('ink'), muted: read('muted'), line: read('line'), bar: read('bar'),
      accent: read('accent'), strong: read('strong-line'), surface: read('surface'), edge: read('edge')};
  }

  draw() {
    const context = this.canvas.getContext('2d');
    const paint = this.colors();
    this.paint = paint;
    this.boxes = [];
    context.clearRect(0, 0, this.width, this.height);
    context.font = '12px system-ui, sans-serif';
    context.textBaseline = 'middle';
    this.drawAxis(paint);
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.width - this.gutter, this.height);
    context.clip();
    context.strokeStyle = paint.line;
    context.lineWidth = 1;
    for (const value of this.marks) {
      const x = Math.round(this.x(value)) + 0.5;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, this.height);
      context.stroke();
    }
    for (const lane of this.lanes) {
      if (lane.kind === 'requests') this.drawRequests(context, lane);
      else if (lane.kind === 'spans') this.drawSpans(context, lane);
      else this.drawCounts(context, lane);
      this.drawLags(context, lane);
    }
    context.restore();
    for (const lane of this.lanes) this.drawLabel(context, lane, paint);
    this.canvas.dataset.from = this.view[0] * this.unit;
    this.canvas.dataset.to = this.view[1] * this.unit;
  }

  drawAxis(paint) {
    const context = this.axis.getContext('2d');
    context.clearRect(0, 0, this.width, AXIS);
    context.font = '12px system-ui, sans-serif';
    context.textBaseline = 'middle';
    context.textAlign = 'center';
    context.fillStyle = paint.muted;
    const [from, to] = this.view.map((value) => value * this.unit);
    const values = ticks(from, to, Math.max(2, Math.floor((this.width - this.gutter) / 95)));
    const step = values.length > 1 ? values[1] - values[0] : to - from;
    this.marks = values.map((value) => value / this.unit);
    for (const value of values) {
      const x = this.x(value / this.unit);
      if (x > this.gutter + 10 && x < this.width - 22) context.fillText(tickLabel(value, step), x, AXIS / 2);
    }
    context.fillStyle = paint.strong;
    context.fillRect(0, AXIS - 1, this.width, 1);
  }

  drawLabel(context, lane, paint) {
    context.textAlign = 'left';
    context.fillStyle = paint.ink;
    context.fillText(this.fitting(context, clean(lane.name), this.gutter - 16), 10, lane.top + 8);
    const second = this.secondLine(lane);
    if (second) {
      context.fillStyle = paint.muted;
      context.font = '11px system-ui, sans-serif';
      context.fillText(this.fitting(context, second, this.gutter - 16), 10, lane.top + 22);
      context.font = '12px system-ui, sans-serif';
    }
    context.fillStyle = paint.line;
    context.fillRect(0, lane.top + lane.height + Math.floor(LANE_GAP / 2), this.width, 1);
  }

  fitting(context, text, width) {
    if (context.measureText(text).width <= width) return text;
    while (text.length > 1 && context.measureText(text + '…').width > width) text = text.slice(0, -1);
    return text + '…';
  }

  block(context, begin, length, y, height, fill, hatched) {
    const left = Math.max(this.x(begin), this.gutter - 4);
    const right = Math.min(this.x(begin + length), this.width + 4);
    if (right < this.gutter || left > this.width) return null;
    const wide = Math.max(right - left, 0.7);
    context.fillStyle = fill;
    context.globalAlpha = hatched ? 0.45 : 1;
    context.fillRect(left, y, wide, height);
    context.globalAlpha = 1;
    if (wide > 3 && this.paint.edge !== 'transparent') {
      context.strokeStyle = this.paint.edge;
      context.lineWidth = 0.5;
      context.strokeRect(left + 0.25, y + 0.25, wide - 0.5, height - 0.5);
    }
    return [left, wide];
  }

  write(context, text, box, y, height, fill) {
    const left = Math.max(box[0], this.gutter);
    const room = box[0] + box[1] - left - 10;
    if (room < 24 || context.measureText(text).width > room) return;
    context.textAlign = 'left';
    context.fillStyle = inkOn(fill);
    context.fillText(text, left + 5, y + height / 2 + 0.5);
  }

  drawSpans(context, lane) {
    lane.rows.forEach((spans, depth) => {
      const y = lane.top + depth * lane.row, height = lane.row - 2;
      for (const [code, begin, length] of spans) {
        const [event, , failed, fill] = this.drawings.names[code];
        const box = this.block(context, begin, length, y, height, fill, depth > 0);
        if (!box) continue;
        if (depth === 0) this.write(context, shorten(event, 40), box, y, height, fill);
        else if (box[1] > 60) {
          context.textAlign = 'left';
          const left = Math.max(box[0], this.gutter);
          if (context.measureText(shorten(event, 40)).width < box[0] + box[1] - left - 10) {
            context.fillStyle = this.paint.ink;
            context.fillText(shorten(event, 40), left + 5, y + height / 2 + 0.5);
          }
        }
        this.boxes.push({x: box[0], width: box[1], y, height, lines: [clean(event) + (failed ? ' (did not return)' : ''),
          seconds(length * this.unit) + ', from ' + seconds(begin * this.unit), clean(lane.name)]});
      }
    });
  }

  drawRequests(context, lane) {
    lane.rows.forEach((requests, row) => {
      const y = lane.top + row * lane.row, height = lane.row - (lane.row > 8 ? 3 : 1.5);
      for (const request of requests) {
        const odd = request.status === 'unfinished';
        const box = this.block(context, request.begin, request.length, y, height, colorOf('other'), odd);
        if (!box) continue;
        const spans = request.spans;
        for (let place = 0; place < spans.length; place += 4) {
          const event = this.drawings.names[spans[place]][0];
          if (event === 'turn' || event === 'server_acquire' || event === 'tool_execution' && request.hasCalls) continue;
          if (event === 'postprocess') {
            this.block(context, request.begin + spans[place + 2], spans[place + 3], y, height, this.drawings.names[spans[place]][3]);
          }
        }
        for (let place = 0; place < spans.length; place += 4) {
          const [event, , , fill] = this.drawings.names[spans[place]];
          if (event === 'turn' || event === 'server_acquire' || event === 'postprocess' || event === 'tool_execution' && request.hasCalls) continue;
          const part = this.block(context, request.begin + spans[place + 2], spans[place + 3], y, height, fill);
          if (part && height >= 10 && part[1] > 40) {
            context.font = '10px system-ui, sans-serif';
            const [, tool] = this.drawings.names[spans[place]];
            this.write(context, tool ? shorten(tool, 30) : event === 'engine_call' ? 'turn ' + spans[place + 1] : event, part, y, height, fill);
            context.font = '12px system-ui, sans-serif';
          }
        }
        if (request.status && request.status !== 'unfinished') {
          context.fillStyle = this.paint.accent;
          context.fillRect(box[0] + box[1] - 2, y, 2, height);
        }
        if (request === this.selected) {
          context.strokeStyle = this.paint.ink;
          context.lineWidth = 2;
          context.strokeRect(box[0] - 1, y - 1, box[1] + 2, height + 2);
        }
        this.boxes.push({x: box[0], width: Math.max(box[1], 3), y, height: height + 1, request});
      }
    });
  }

  drawCounts(context, lane) {
    const fill = this.drawings.names[lane.code][3];
    const span = this.scene.end - this.scene.begin;
    const bottom = lane.top + lane.height;
    const room = lane.height - 2;
    context.fillStyle = fill;
    context.globalAlpha = 0.75;
    context.beginPath();
    context.moveTo(this.x(this.scene.begin), bottom);
    lane.values.forEach((value, place) => {
      const y = bottom - room * value / Math.max(lane.most, 1);
      context.lineTo(this.x(this.scene.begin + span * place / 160), y);
      context.lineTo(this.x(this.scene.begin + span * (place + 1) / 160), y);
    });
    context.lineTo(this.x(this.scene.end), bottom);
    context.fill();
    context.globalAlpha = 1;
    this.boxes.push({x: this.gutter, width: this.width, y: lane.top, height: lane.height, at: (x) => {
      const place = Math.floor((this.timeAt(x) - this.scene.begin) / span * 160);
      const value = lane.values[Math.max(0, Math.min(159, place))];
      return [clean(lane.name), plural(value, 'call') + ' open at most', 'around ' + seconds(this.timeAt(x) * this.unit)];
    }});
  }

  drawLags(context, lane) {
    for (const [begin, length, during] of lane.lags || []) {
      const left = Math.max(this.x(begin), this.gutter), right = Math.min(this.x(begin + length), this.width);
      if (right < this.gutter || left > this.width) continue;
      const y = lane.top + lane.height + 1;
      context.fillStyle = this.paint.accent;
      context.fillRect(left, y, Math.max(right - left, 1), 3);
      this.boxes.push({x: left, width: Math.max(right - left, 3), y: y - 1, height: 6, lines: [
        'The event loop stood still ' + seconds(length * this.unit), during ? 'in ' + clean(during) : null, clean(lane.name)]});
    }
  }

  requestLines(request) {
    return [shorten(request.request_id === null ? '(no request id)' : request.request_id, 48),
      request.duration_s === null ? 'did not end' : seconds(request.duration_s) + ', ' + plural(request.turns || 0, 'turn'),
      requestParts(request).slice(0, 3).map((part) => part.name + ' ' + seconds(part.value)).join(', '),
      request.status ? 'status: ' + clean(request.status) : null];
  }

  hit(event) {
    const frame = this.canvas.getBoundingClientRect();
    const x = event.clientX - frame.left, y = event.clientY - frame.top;
    if (x < this.gutter) return null;
    for (let place = this.boxes.length - 1; place >= 0; place--) {
      const box = this.boxes[place];
      if (x >= box.x - 1 && x <= box.x + box.width + 1 && y >= box.y && y <= box.y + box.height) return {...box, at: box.at && box.at(x)};
    }
    return null;
  }

  listen() {
    let drag = null;
    const canvas = this.canvas;
    canvas.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      drag = {x: event.clientX, y: event.clientY, view: this.view.slice(), top: this.lanesBox.scrollTop, moved: false};
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointermove', (event) => {
      if (drag) {
        const by = event.clientX - drag.x;
        if (Math.abs(by) + Math.abs(event.clientY - drag.y) > 3) drag.moved = true;
        if (drag.moved) {
          canvas.classList.add('dragged');
          hideTip();
          const scale = (drag.view[1] - drag.view[0]) / (this.width - this.gutter - 8);
          this.look(drag.view[0] - by * scale, drag.view[1] - by * scale);
          if (event.pointerType === 'mouse') this.lanesBox.scrollTop = drag.top - (event.clientY - drag.y);
        }
        return;
      }
      const box = this.hit(event);
      if (!box) hideTip();
      else showTip(event, box.request ? this.requestLines(box.request) : box.at || box.lines);
      canvas.style.cursor = box && box.request ? 'pointer' : '';
    });
    const end = (event) => {
      canvas.classList.remove('dragged');
      if (drag && !drag.moved) {
        const box = this.hit(event);
        if (box && box.request) this.pick(box.request);
      }
      drag = null;
    };
    canvas.addEventListener('pointerup', end);
    canvas.addEventListener('pointercancel', () => { drag = null; });
    canvas.addEventListener('pointerleave', hideTip);
    canvas.addEventListener('dblclick', (event) => {
      const frame = canvas.getBoundingClientRect();
      this.zoom(0.4, this.timeAt(event.clientX - frame.left));
    });
    canvas.addEventListener('wheel', (event) => {
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey && !sideways) return;
      event.preventDefault();
      hideTip();
      if (sideways) {
        this.pan((event.deltaX || event.deltaY) / 600);
        return;
      }
      const frame = canvas.getBoundingClientRect();
      this.zoom(1.0015 ** Math.max(-300, Math.min(300, event.deltaY)), this.timeAt(Math.max(event.clientX - frame.left, this.gutter)));
    }, {passive: false});
    canvas.addEventListener('keydown', (event) => {
      const keys = {
        '+': () => this.zoom(0.6), '=': () => this.zoom(0.6), '-': () => this.zoom(1 / 0.6), '_': () => this.zoom(1 / 0.6),
        ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), Home: () => this.reset(),
        ArrowUp: () => this.move(-1), ArrowDown: () => this.move(1),
      };
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
  }

  // Looks at a stretch of time; never further out than everything, nor closer than 100 us.
  look(from, to) {
    const whole = this.home[1] - this.home[0];
    const length = Math.max(Math.min(to - from, whole), Math.min(whole, 1e-4 / this.unit));
    from = Math.max(this.home[0], Math.min(from, this.home[1] - length));
    this.view = [from, from + length];
    this.draw();
  }

  zoom(factor, around) {
    const center = around === undefined ? (this.view[0] + this.view[1]) / 2 : around;
    const [from, to] = this.view;
    this.look(center - (center - from) * factor, center + (to - center) * factor);
  }

  pan(part) {
    const by = (this.view[1] - this.view[0]) * part;
    this.look(this.view[0] + by, this.view[1] + by);
  }

  reset() {
    this.look(...this.home);
  }

  move(by) {
    if (!this.order.length) return;
    const place = this.order.indexOf(this.selected);
    this.pick(this.order[place < 0 ? 0 : Math.max(0, Math.min(this.order.length - 1, place + by))]);
  }

  pick(request) {
    this.select(request);
    this.onPick(request);
  }

  // Marks a request and brings it into view.
  select(request) {
    this.selected = request;
    for (const lane of this.lanes || []) {
      if (lane.kind !== 'requests') continue;
      lane.rows.forEach((row, place) => {
        if (!row.includes(request)) return;
        const y = lane.top + place * lane.row;
        if (y < this.lanesBox.scrollTop || y > this.lanesBox.scrollTop + this.lanesBox.clientHeight - 20) {
          this.lanesBox.scrollTop = y - this.lanesBox.clientHeight / 2;
        }
        const [from, to] = this.view;
        if (request.begin > to || request.begin + request.length < from) {
          const half = (to - from) / 2, center = request.begin + request.length / 2;
          this.look(center - half, center + half);
        }
      });
    }
    this.draw();
  }
}
