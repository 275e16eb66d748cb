// Occupancy: tokens resident and cold after every event, with the limits that the session had.

function occupancy(stage, data, title, describedby) {
  const figure = { byEvent: true };
  let session = null;

  // For every pixel the lowest and the highest value of its columns, a faint area, and their mean, a line: nothing
  // between pixels is lost, and curves that lie over each other can be told apart.
  function curve(frame, name, values, more = {}) {
    const [low, high] = frame.window.x;
    const a = Math.max(0, Math.floor(low) - 1), b = Math.min(values.length, Math.ceil(high) + 1);
    const tops = [], bottoms = [], means = [];
    let pixel = null, least = 0, most = 0, sum = 0, n = 0;
    const put = () => { tops.push([pixel, most]); bottoms.push([pixel, least]); means.push([pixel, sum / n]); };
    for (let i = a; i < b; i++) {
      if (Number.isNaN(values[i])) continue;
      const x = Math.round(frame.px(i + 0.5) * 2) / 2;
      if (x !== pixel) {
        if (pixel !== null) put();
        pixel = x;
        least = most = values[i];
        sum = n = 0;
      }
      sum += values[i];
      n += 1;
      if (values[i] < least) least = values[i];
      if (values[i] > most) most = values[i];
    }
    if (pixel === null) return [];
    put();
    const point = ([x, v]) => `${x.toFixed(1)},${frame.py(v).toFixed(1)}`;
    const line = (points) => points.map(point).join("L");
    return [
      drawn("path", { d: `M${line(tops)}L${line(bottoms.reverse())}Z`, fill: `var(--${name})`, "fill-opacity": 0.3 }),
      drawn("path", { d: `M${line(means)}`, fill: "none", stroke: `var(--${name})`, "stroke-width": 1.5, "stroke-linejoin": "round", ...more }),
    ];
  }

  // A limit of every column: that of the last plan until then. NaN, before the first one, is drawn nowhere.
  function everyColumn(points) {
    const values = new Float64Array(session.about.columns).fill(NaN);
    points.forEach(([x, v], i) => values.fill(v, Math.floor(x), i + 1 < points.length ? Math.floor(points[i + 1][0]) : values.length));
    return values;
  }

  // Dashes as long as there is room for them; plans that share pixels are a curve like the others.
  function limit(frame, name, points) {
    const [low, high] = frame.window.x;
    const dashed = { "stroke-width": 2, "stroke-dasharray": "6 4" };
    const seen = points.filter(([x]) => x >= low && x <= high).length;
    if (seen > frame.width / 6) return curve(frame, name, everyColumn(points), dashed);
    return [drawn("path", { d: level(frame, points), fill: "none", stroke: `var(--${name})`, ...dashed })];
  }

  function level(frame, points) {
    const ends = points.map(([x, v], i) => [x, v, i + 1 < points.length ? points[i + 1][0] : session.about.columns]);
    return "M" + ends.map(([x, v, to]) => `${frame.px(x)},${frame.py(v)}L${frame.px(to)},${frame.py(v)}`).join("L");
  }

  function limits() {
    const { about } = session;
    const column = (seq) => seq / about.every;
    const found = [];
    if (about.context !== null) found.push(["effective context", "s1", [[0, about.context]]]);
    if (about.plans.length) found.push(["budget of the plans", "s3", about.plans.map(([seq, v]) => [column(seq), v])]);
    else if (about.budget !== null) found.push(["budget of the policy", "s3", [[0, about.budget]]]);
    return found;
  }

  function paint(frame) {
    const clip = `${describedby}-clip`;
    const { left, top, width, height } = frame;
    frame.marks.append(drawn("clipPath", { id: clip }, drawn("rect", { x: left, y: top - 1, width, height: height + 2 })));
    const inside = drawn("g", { "clip-path": `url(#${clip})` });
    if (session.events.cold.some((v) => v > 0)) inside.append(...curve(frame, "cold", session.events.cold));
    inside.append(...curve(frame, "resident", session.events.resident));
    for (const [, name, points] of limits().reverse()) inside.append(...limit(frame, name, points));
    frame.marks.append(inside);
  }

  function read(frame, x) {
    const i = Math.min(session.about.columns - 1, Math.max(0, Math.floor(x)));
    const { events, about } = session;
    const stated = limits().map(([name, , points]) => {
      const now = points.filter(([from]) => from <= i).at(-1);
      return now ? `, ${name} ${grouped(now[1])}` : "";
    });
    return `${eventsText(about, i, i + 1)}: ${grouped(events.resident[i])} tokens resident, ${grouped(events.cold[i])} cold${stated.join("")}\n${happened(session, i)}`;
  }

  const legend = element("ul", { class: "legend", "aria-label": "Curves" });
  const eventNumber = (v) => grouped(v * session.about.every);
  figure.show = (next) => {
    session = next;
    const high = Math.max(1, next.about.context || 0, ...next.about.plans.map((p) => p[1]), ...[next.events.resident, next.events.cold].map((c) => c.reduce((m, v) => Math.max(m, v), 0)));
    const x = [0, next.about.columns], y = [0, high * 1.05];
    if (figure.frame) figure.frame.rehome(x, y);
    else {
      figure.frame = new Frame(stage, {
        title, describedby, height: 300, zoomY: true, paint, read,
        x: { text: "event (seq)", low: x[0], high: x[1], whole: true, least: 4, format: eventNumber },
        y: { text: "tokens", low: y[0], high: y[1], whole: true, least: 4 },
        looked: (w) => sessions.looked(figure, w),
        hint: "Point at the curve, or focus it and use the arrow keys.",
      });
      stage.append(legend);
    }
    const entries = [["resident", "resident"], ["cold", "cold"]].concat(limits().map(([name, c]) => [c, `${name} (dashed)`]));
    legend.replaceChildren(...entries.map(([c, name]) => element("li", {}, swatch(c), name)));
  };
  return sessions.join(stage, title, figure, data.summaries, describedby);
}
