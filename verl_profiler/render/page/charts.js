// Charts as SVG, drawn to the width that there is.

// Calls `draw(width)` now and whenever the width changes.
function drawn(draw, label) {
  const box = element('div', {class: 'figure'});
  let last = 0;
  const update = () => {
    const width = Math.round(box.clientWidth) || 1100;
    if (Math.abs(width - last) < 2) return;
    last = width;
    const chart = draw(width);
    chart.setAttribute('class', 'chart');
    if (label) {
      chart.setAttribute('role', 'img');
      chart.setAttribute('aria-label', label);
    }
    box.replaceChildren(chart);
  };
  // Not inside the observer's own turn: drawing changes the height, and the browser would complain.
  new ResizeObserver(() => requestAnimationFrame(update)).observe(box);
  return box;
}

function legend(names) {
  return element('ul', {class: 'legend'}, names.map(([name, color]) => {
    const swatch = element('span', {class: 'swatch'});
    swatch.style.background = color || colorOf(name);
    return element('li', {}, swatch, clean(name));
  }));
}

function rect(x, y, width, height, fill, more) {
  return svg('rect', {x, y, width: Math.max(0, width), height, fill, ...more});
}

function onClass(fill) {
  return inkOn(fill) === '#FFFFFF' ? 'on-dark' : 'on-light';
}

function textAt(x, y, text, anchor, more) {
  return svg('text', {x, y, 'text-anchor': anchor || 'start', ...more}, text);
}

// Time from left to right under a chart, with grid lines above it.
function timeAxis(chart, x, from, to, top, bottom, right) {
  const values = ticks(from, to, Math.max(2, Math.floor((x(to) - x(from)) / 110)));
  const step = values.length > 1 ? values[1] - values[0] : to - from || 1;
  for (const value of values) {
    if (x(value) > right + 1) continue;
    chart.append(svg('line', {x1: x(value), x2: x(value), y1: top, y2: bottom, class: 'grid'}));
    chart.append(textAt(x(value), bottom + 16, tickLabel(value, step), 'middle'));
  }
}

// One bar per step, cut into phases: lying when there are few steps, standing when there are many.
function stepsChart(steps, phases, onStep, chosen) {
  const byStep = new Map(steps.map((step) => [step.s, []]));
  for (const phase of phases) if (byStep.has(phase.s)) byStep.get(phase.s).push(phase);
  const order = phaseOrder(phases.filter((phase) => byStep.has(phase.s)));
  for (const list of byStep.values()) {
    list.sort((a, b) => order.indexOf(a.phase) - order.indexOf(b.phase));
  }
  const most = Math.max(...steps.map((step) => step.duration_s || step.seen_s || 0), 1e-9);
  const draw = steps.length <= 20 ? lying : standing;
  return element('div', {},
    legend(order.map((name) => [name])),
    drawn((width) => draw(width), null));

  function pick(step, children) {
    const group = svg('g', {class: 'pick', tabindex: '0', role: 'button', 'aria-pressed': String(chosen === step.s),
      'aria-label': 'Step ' + step.label + ', ' + seconds(step.duration_s)}, children);
    group.addEventListener('click', () => onStep(step.s));
    group.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); onStep(step.s); }
    });
    return group;
  }

  function tipOf(step, phase) {
    return [phase.phase === 'unaccounted' ? 'unaccounted: no timer of verl covers it' : clean(phase.phase),
      seconds(phase.duration_s) + ' · ' + share(phase.share) + ' of step ' + clean(step.label)];
  }

  function lying(width) {
    const left = Math.min(150, 30 + 8 * Math.max(...steps.map((step) => step.label.length + 5)));
    const right = 62, row = 30;
    const chart = svg('svg', {viewBox: `0 0 ${width} ${steps.length * row + 26}`});
    const x = (value) => left + (width - left - right) * value / most;
    timeAxis(chart, x, 0, most, 0, steps.length * row, width - 10);
    steps.forEach((step, place) => {
      const y = place * row + 4;
      const parts = [rect(0, y - 3, width, row - 2, 'transparent', {class: 'ring', rx: 4})];
      parts.push(textAt(left - 10, y + 15, 'step ' + shorten(step.label, 16), 'end', {class: 'ink'}));
      let from = 0;
      for (const phase of byStep.get(step.s)) {
        const begin = x(from), end = x(from + phase.duration_s);
        from += phase.duration_s;
        const fill = colorOf(phase.phase);
        const part = svg('g', {}, rect(begin, y, end - begin, row - 9, fill, {stroke: 'var(--edge)', 'stroke-width': 0.5}));
        const label = phase.phase + ' ' + seconds(phase.duration_s);
        const short = seconds(phase.duration_s);
        const fits = [label, short].find((text) => text.length * 6.6 + 10 < end - begin);
        if (fits) part.append(textAt(begin + 6, y + 15, clean(fits), 'start', {class: onClass(fill)}));
        parts.push(withTip(part, tipOf(step, phase)));
      }
      if (step.duration_s === null) {
        parts.push(textAt(x(0) + 6, y + 15, 'no end; ' + seconds(step.seen_s) + ' seen'));
      } else {
        parts.push(textAt(x(step.duration_s) + 7, y + 15, seconds(step.duration_s), 'start', {class: 'ink'}));
      }
      chart.append(pick(step, parts));
    });
    return chart;
  }

  function standing(width) {
    const left = 52, height = 220, room = (width - left - 8) / steps.length;
    const chart = svg('svg', {viewBox: `0 0 ${width} ${height + 30}`});
    const y = (value) => 8 + (height - 8) * (1 - value / most);
    const values = ticks(0, most, 4);
    for (const value of values) {
      chart.append(svg('line', {x1: left, x2: width, y1: y(value), y2: y(value), class: 'grid'}));
      chart.append(textAt(left - 8, y(value) + 4, tickLabel(value, values[1] - values[0] || 1), 'end'));
    }
    const every = Math.ceil(46 / room);
    steps.forEach((step, place) => {
      const x = left + place * room, wide = Math.max(room - (room > 4 ? 1.5 : 0), 0.6);
      const parts = [];
      let from = 0;
      for (const phase of byStep.get(step.s)) {
        const top = y(from + phase.duration_s), bottom = y(from);
        from += phase.duration_s;
        parts.push(withTip(rect(x, top, wide, bottom - top, colorOf(phase.phase)), tipOf(step, phase)));
      }
      if (!parts.length) {
        parts.push(withTip(rect(x, y(step.seen_s || 0), wide, height - y(step.seen_s || 0), 'var(--line)'),
          ['step ' + clean(step.label), step.duration_s === null ? 'no end; ' + seconds(step.seen_s) + ' seen'
            : seconds(step.duration_s) + '; its phases are not in this file']));
      }
      parts.push(rect(x - 0.5, 4, wide + 1, height - 3, 'transparent', {class: 'ring', 'pointer-events': 'none'}));
      chart.append(pick(step, parts));
      if (place % every === 0) chart.append(textAt(x + wide / 2, height + 16, shorten(step.label, 8), 'middle'));
    });
    return chart;
  }
}

// Phases from the first to the last of a step, as the run had them; the rest that no timer covers ends it.
function phaseOrder(phases) {
  const known = Object.keys(DATA.colors);
  const names = [...new Set(phases.map((phase) => phase.phase))];
  const place = (name) => name === 'unaccounted' ? 1e6 : known.includes(name) ? known.indexOf(name) : 1e5;
  return names.sort((a, b) => place(a) - place(b));
}

// The part of requests that took at most so long.
function cdfChart(rows, chosen, fractions) {
  const main = rows.find((row) => row.s === chosen);
  const most = main.quantiles_s[main.quantiles_s.length - 1] * 1.02 || 1;
  const label = 'Part of the requests that took at most so long; half took at most ' +
    seconds(main.quantiles_s[fractions.indexOf(0.5)]);
  return drawn((width) => {
    const left = 46, right = 14, top = 22, height = 218, bottom = height + top;
    const chart = svg('svg', {viewBox: `0 0 ${width} ${bottom + 26}`});
    const x = (value) => left + (width - left - right) * value / most;
    const y = (value) => top + height * (1 - value);
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      chart.append(svg('line', {x1: left, x2: width - right, y1: y(part), y2: y(part), class: 'grid'}));
      chart.append(textAt(left - 8, y(part) + 4, (part * 100).toFixed(0) + ' %', 'end'));
    }
    timeAxis(chart, x, 0, most, top, bottom, width - right);
    const path = (row) => {
      let text = '';
      row.quantiles_s.forEach((value, place) => {
        text += (place ? 'L' : 'M') + x(value).toFixed(1) + ' ' + y(fractions[place]).toFixed(1);
      });
      return text;
    };
    const clip = svg('clipPath', {id: 'cdf-clip'}, svg('rect', {x: left, y: 0, width: width - left - right + 4, height: bottom + 4}));
    chart.append(svg('defs', {}, clip));
    const curves = svg('g', {'clip-path': 'url(#cdf-clip)'});
    chart.append(curves);
    for (const row of rows.slice(0, 40)) if (row !== main && row.s >= 0) curves.append(svg('path', {d: path(row), class: 'faint'}));
    curves.append(svg('path', {d: path(main), class: 'line'}));
    for (const [part, name] of [[0.5, 'P50'], [0.8, 'P80'], [1, 'slowest']]) {
      const value = main.quantiles_s[fractions.indexOf(part)];
      const at = x(value);
      chart.append(svg('circle', {cx: at, cy: y(part), r: 3.5, fill: 'var(--series)'}));
      const shown = name + ' ' + seconds(value);
      if (part === 1) chart.append(textAt(width - right, y(1) - 8, shown, 'end', {class: 'ink'}));
      else chart.append(textAt(at + 9, y(part) + 15, shown, at > width * 0.75 ? 'end' : 'start', {class: 'ink halo'}));
    }
    return chart;
  }, label);
}

// How many requests are open at a time.
function flightChart(row, step) {
  const counts = dense(row.counts, 160);
  const label = 'Requests in flight: at most ' + row.most + ', ' + row.mean.toFixed(1) + ' on average';
  return drawn((width) => {
    const left = 46, right = 14, top = 40, height = 200, bottom = height + top;
    const chart = svg('svg', {viewBox: `0 0 ${width} ${bottom + 26}`});
    const from = row.begin_s, spread = row.spread_s;
    const until = step.gen_s !== null && step.poll_s !== null ? spread + step.poll_s : spread;
    const x = (value) => left + (width - left - right) * value / (until || 1);
    const y = (value) => top + height * (1 - value / (row.most * 1.05));
    for (const value of ticks(0, row.most, 4)) {
      if (!Number.isInteger(value)) continue;
      chart.append(svg('line', {x1: left, x2: width - right, y1: y(value), y2: y(value), class: 'grid'}));
      chart.append(textAt(left - 8, y(value) + 4, number(value), 'end'));
    }
    timeAxis(chart, x, 0, until, top, bottom, width - right);
    chart.append(svg('path', {d: area(counts, (place) => x(spread * place / counts.length), y), fill: 'var(--bar)', stroke: 'none'}));
    const marks = [];
    if (step.after_p80_s !== null) marks.push([spread - step.after_p80_s, '80 % done']);
    if (step.poll_s !== null) marks.push([spread, 'last done']);
    // The second label stands above the first, so that neither meets the other's line.
    marks.forEach(([at, name], place) => {
      const high = place === marks.length - 1;
      chart.append(svg('line', {x1: x(at), x2: x(at), y1: high ? 4 : 22, y2: bottom, class: 'mark'}));
      chart.append(textAt(x(at) - 6, high ? 14 : 32, name, 'end', {class: 'ink halo'}));
    });
    chart.append(svg('title', {}, 'from ' + seconds(from) + ' after the begin of the step'));
    return chart;
  }, label);
}

// [part, most, last] where something changed → the highest count of every part.
function dense(counts, parts) {
  const values = new Array(parts).fill(0);
  let open = 0, next = 0;
  for (let part = 0; part < parts; part++) {
    if (next < counts.length && counts[next][0] === part) {
      values[part] = Math.max(open, counts[next][1]);
      open = counts[next][2];
      next++;
    } else values[part] = open;
  }
  return values;
}

function area(values, x, y) {
  let text = `M${x(0).toFixed(1)} ${y(0).toFixed(1)}`;
  values.forEach((value, place) => {
    text += `V${y(value).toFixed(1)}H${x(place + 1).toFixed(1)}`;
  });
  return text + `V${y(0).toFixed(1)}Z`;
}

// One bar, cut into parts that add up to the whole.
function partsBar(parts) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  if (!(total > 0)) return null;
  return drawn((width) => {
    const chart = svg('svg', {viewBox: `0 0 ${width} 30`});
    let from = 0;
    for (const part of parts) {
      const begin = width * from / total, wide = width * part.value / total;
      from += part.value;
      const fill = part.color || colorOf(part.name);
      const group = svg('g', {}, rect(begin, 0, wide, 26, fill, {stroke: 'var(--edge)', 'stroke-width': 0.5}));
      const text = [clean(part.name) + ' ' + share(part.value / total), share(part.value / total)]
        .find((each) => each.length * 6.6 + 12 < wide);
      if (text) group.append(textAt(begin + 7, 17, text, 'start', {class: onClass(fill)}));
      chart.append(withTip(group, [clean(part.name), share(part.value / total) + ' · ' + seconds(part.value)]));
    }
    return chart;
  }, parts.map((part) => part.name + ' ' + share(part.value / total)).join(', '));
}

// A standing bar per turn, cut into its parts.
function turnsChart(rows) {
  const parts = ['engine', 'tool', 'tool_parsing', 'token_merge', 'other'].map((name) => [name, name + '_s'])
    .filter(([, key]) => rows.some((row) => row[key] > 0));
  const most = Math.max(...rows.map((row) => row.mean_s || 0), 1e-9);
  return element('div', {}, legend(parts.map(([name]) => [name])), drawn((width) => {
    const left = 56, height = 190, room = Math.min(90, (width - left) / rows.length);
    const chart = svg('svg', {viewBox: `0 0 ${width} ${height + 34}`});
    const y = (value) => 8 + (height - 8) * (1 - value / most);
    const values = ticks(0, most, 4);
    for (const value of values) {
      chart.append(svg('line', {x1: left, x2: width, y1: y(value), y2: y(value), class: 'grid'}));
      chart.append(textAt(left - 8, y(value) + 4, tickLabel(value, values[1] - values[0] || 1), 'end'));
    }
    const every = Math.ceil(30 / room);
    rows.forEach((row, place) => {
      const x = left + place * room + room * 0.14, wide = room * 0.72;
      let from = 0;
      const group = svg('g');
      for (const [name, key] of parts) {
        const value = row[key];
        if (value === null || value <= 0) continue;
        group.append(rect(x, y(from + value), wide, y(from) - y(from + value), colorOf(name), {stroke: 'var(--edge)', 'stroke-width': 0.5}));
        from += value;
      }
      if (from === 0 && row.mean_s) group.append(rect(x, y(row.mean_s), wide, y(0) - y(row.mean_s), 'var(--line)'));
      chart.append(withTip(group, ['turn ' + row.turn, plural(row.turns, 'turn') + ', mean ' + seconds(row.mean_s),
        parts.map(([name, key]) => name + ' ' + seconds(row[key])).join(', ')]));
      if (place % every === 0) chart.append(textAt(x + wide / 2, height + 16, String(row.turn), 'middle'));
    });
    chart.append(textAt(left, height + 31, 'turn', 'start'));
    return chart;
  }, 'Mean time of a turn by its index'));
}
