// The time line: a lane for each kind of work; a pixel is as high as the share of its time that the work took.

const LANES = [
  ["prefill", "s0", ["prefill"]],
  ["decode", "s2", ["decode"]],
  ["put back", "s4", ["admit", "recompute", "restore"]],
  ["give up", "s1", ["evict", "shift", "truncate", "trim"]],
  ["other", "s6", null],
];

function timeline(stage, data, title, describedby) {
  const figure = {};
  let session = null, laneOf = null;

  function lanesOf(ops) {
    return ops.map((op) => {
      const at = LANES.findIndex(([, , names]) => names && names.includes(op));
      return at < 0 ? LANES.length - 1 : at;
    });
  }

  function paint(frame) {
    const { events } = session;
    const [low, high] = frame.window.x;
    const pixels = Math.max(1, Math.round(frame.width));
    const perPixel = (high - low) / pixels;
    const busy = LANES.map(() => new Float64Array(pixels)), seen = LANES.map(() => new Uint8Array(pixels));
    for (let i = 0; i < events.at.length; i++) {
      const a = events.at[i], b = a + Math.max(0, events.elapsed[i]);
      if (b < low || a > high) continue;
      const lane = laneOf[events.op[i]];
      const first = Math.min(pixels - 1, Math.max(0, Math.floor((a - low) / perPixel)));
      const last = Math.min(pixels - 1, Math.max(0, Math.floor((b - low) / perPixel)));
      seen[lane][first] = 1;
      for (let p = first; p <= last; p++) {
        const from = low + p * perPixel;
        busy[lane][p] += Math.max(0, Math.min(b, from + perPixel) - Math.max(a, from));
      }
    }
    const pen = frame.canvas.getContext("2d");
    pen.scale(frame.ratio, frame.ratio);
    const tall = frame.height / LANES.length;
    LANES.forEach(([, name], lane) => {
      const floor = frame.top + (lane + 1) * tall - 4;
      pen.fillStyle = colour(name);
      for (let p = 0; p < pixels; p++) {
        const share = Math.min(1, busy[lane][p] / perPixel);
        const h = share > 0 || seen[lane][p] ? Math.max(2, share * (tall - 8)) : 0;
        if (h) pen.fillRect(frame.left + p, floor - h, 1, h);
      }
    });
  }

  function read(frame, x, y) {
    const { events, about } = session;
    const lane = Math.min(LANES.length - 1, Math.max(0, Math.floor(LANES.length - 0.5 - y)));
    const near = (frame.window.x[1] - frame.window.x[0]) / Math.max(1, frame.width) * 4;
    let best = -1, gap = Infinity, n = 0, sum = 0;
    for (let i = 0; i < events.at.length; i++) {
      if (laneOf[events.op[i]] !== lane) continue;
      const a = events.at[i], b = a + Math.max(0, events.elapsed[i]);
      const away = x < a ? a - x : x > b ? x - b : 0;
      if (away <= near) { n += 1; sum += Math.max(0, events.elapsed[i]); }
      if (away < gap) { gap = away; best = i; }
    }
    if (best < 0) return `${LANES[lane][0]}: nothing in this session`;
    const tokens = events.stop[best] - events.start[best];
    const each = tokens > 0 && events.elapsed[best] > 0 && events.start[best] >= 0 ? `, ${duration(events.elapsed[best] / tokens)} a token` : "";
    const more = n > 1 ? `\n${grouped(n)} events around here took ${duration(sum)}` : "";
    return `${duration(x)} after the beginning, ${LANES[lane][0]}: ${eventsText(about, best, best + 1).toLowerCase()} at ${duration(events.at[best])}, ${happened(session, best)}${each}${more}`;
  }

  figure.show = (next) => {
    session = next;
    laneOf = lanesOf(sessions.about.ops);
    let end = 1;
    for (let i = 0; i < next.events.at.length; i++) end = Math.max(end, next.events.at[i] + Math.max(0, next.events.elapsed[i]));
    const x = [0, end], y = [-0.5, LANES.length - 0.5];
    const names = LANES.map(([name]) => name).reverse();
    if (figure.frame) return figure.frame.rehome(x, y);
    figure.frame = new Frame(stage, {
      title, describedby, height: 260, raster: true, paint, read,
      x: { text: "time since the session opened", low: x[0], high: x[1], format: duration, least: 10 },
      y: { text: "", low: y[0], high: y[1], names },
      hint: "Point at a lane, or focus the figure and use the arrow keys.",
    });
  };
  return sessions.join(stage, title, figure, data.summaries, describedby);
}
