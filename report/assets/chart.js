// Charts of series over two axes: lines, points, bars on each other, intervals.

function chart(stage, data, title, describedby) {
  const { series } = data;
  const xs = series.flatMap((s) => s.x), bars = series.some((s) => s.mark === "bars");
  const tops = new Map();
  const stacked = series.map((s) => s.x.map((x, i) => {
    if (s.mark !== "bars") return [0, s.y[i]];
    const from = tops.get(x) || 0;
    tops.set(x, from + s.y[i]);
    return [from, from + s.y[i]];
  }));
  const ys = stacked.flatMap((pairs) => pairs.map((p) => p[1])).concat(series.flatMap((s) => [...s.low, ...s.high]));
  const range = (values, axis, zero) => {
    if (axis.names.length) return [-0.5, axis.names.length - 0.5];
    let low = values.reduce((m, v) => Math.min(m, v), Infinity), high = values.reduce((m, v) => Math.max(m, v), -Infinity);
    if (!(low <= high)) [low, high] = axis.log ? [1, 10] : [0, 1];
    if (axis.log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
    if (zero && low >= 0) low = 0;
    const span = high - low || Math.abs(high) || 1;
    return [low === 0 ? 0 : low - span * 0.04, high + span * 0.04];
  };
  let [xLow, xHigh] = range(xs, data.x, false);
  if (bars && !data.x.names.length) [xLow, xHigh] = [xLow - 0.6, xHigh + 0.6];
  const [yLow, yHigh] = range(ys, data.y, true);
  const tint = (i) => `var(--s${i % 8})`;
  const shown = series.map(() => true);

  function path(frame, s) {
    return s.x.map((x, i) => `${i ? "L" : "M"}${frame.px(x)},${frame.py(s.y[i])}`).join("");
  }

  function shape(k, cx, cy, fill) {
    if (k % 4 === 0) return drawn("circle", { cx, cy, r: 4, fill });
    const d = [, "M-4,-4H4V4H-4Z", "M0,-5L5,4H-5Z", "M0,-5L5,0L0,5L-5,0Z"][k % 4];
    return drawn("path", { d, transform: `translate(${cx},${cy})`, fill });
  }

  // Of bounds and limits the line is what counts: marks would hide those of what they are bounds of. One point has no
  // line, and stands as a ring.
  function mark(k, cx, cy) {
    const s = series[k];
    if (s.mark === "dashed") return s.x.length > 1 ? "" : drawn("circle", { cx, cy, r: 8, fill: "none", stroke: tint(k), "stroke-width": 2 });
    return s.mark === "points" || (s.mark !== "bars" && s.x.length <= 40) ? shape(k, cx, cy, tint(k)) : "";
  }

  const stroke = (k) => ({ fill: "none", stroke: tint(k), "stroke-width": 2, "stroke-dasharray": series[k].mark === "dashed" ? "7 4" : "none" });

  // As the series is drawn.
  function key(k) {
    const { mark: kind, x } = series[k], made = drawn("svg", { class: "key", "aria-hidden": "true", width: 28, height: 12, viewBox: "0 -6 28 12" });
    if (kind === "bars") made.append(drawn("rect", { x: 8, y: -6, width: 12, height: 12, fill: tint(k) }));
    else if (kind !== "points" && x.length > 1) made.append(drawn("path", { d: "M1,0H27", ...stroke(k) }));
    const found = kind === "dashed" && x.length < 2 ? drawn("circle", { cx: 14, cy: 0, r: 5, fill: "none", stroke: tint(k), "stroke-width": 2 }) : mark(k, 14, 0);
    if (found) made.append(found);
    return made;
  }

  const clip = `${describedby}-clip`;
  function paint(frame) {
    const { left, top, width, height } = frame;
    frame.marks.append(drawn("clipPath", { id: clip }, drawn("rect", { x: left - 5, y: top - 5, width: width + 10, height: height + 6 })));
    const inside = drawn("g", { "clip-path": `url(#${clip})` });
    const wide = Math.max(1, Math.min(60, 0.8 * (frame.px(1) - frame.px(0))));
    series.forEach((s, k) => {
      if (!shown[k]) return;
      s.x.forEach((x, i) => {
        if (s.low.length) {
          const [at, a, b] = [frame.px(x), frame.py(s.low[i]), frame.py(s.high[i])];
          inside.append(drawn("path", { d: `M${at},${a}V${b}M${at - 4},${a}h8M${at - 4},${b}h8`, stroke: tint(k), "stroke-width": 1.5, fill: "none" }));
        }
      });
      if (s.mark === "bars") {
        s.x.forEach((x, i) => {
          const [from, to] = stacked[k][i].map((v) => frame.py(v));
          inside.append(drawn("rect", { x: frame.px(x) - wide / 2, y: to, width: wide, height: Math.max(0, from - to), fill: tint(k), stroke: "var(--paper)", "stroke-width": wide > 3 ? 1 : 0 }));
        });
      } else if (s.mark !== "points") {
        inside.append(drawn("path", { d: path(frame, s), ...stroke(k) }));
      }
      s.x.forEach((x, i) => inside.append(mark(k, frame.px(x), frame.py(s.y[i]))));
    });
    frame.marks.append(inside);
  }

  // The mark nearest to the pointer; of bars the one under it.
  function read(frame, x, y) {
    let best = null, gap = Infinity;
    const [px, py] = [frame.px(x), frame.py(y)];
    series.forEach((s, k) => {
      if (!shown[k]) return;
      s.x.forEach((v, i) => {
        const [low, high] = stacked[k][i];
        const dy = s.mark === "bars" ? Math.max(0, py - frame.py(low), frame.py(high) - py) : py - frame.py(high);
        const away = Math.hypot(frame.px(v) - px, dy);
        if (away < gap) [best, gap] = [[s, i], away];
      });
    });
    if (!best) return "";
    const [s, i] = best;
    const interval = s.low.length ? ` (${short(s.low[i])} to ${short(s.high[i])})` : "";
    const note = s.texts.length && s.texts[i] ? `\n${s.texts[i]}` : "";
    return `${s.name}: ${data.x.text} ${frame.label("x", s.x[i])}, ${data.y.text} ${frame.label("y", s.y[i])}${interval}${note}`;
  }

  const frame = new Frame(stage, {
    title, describedby, height: 320, zoomY: true, paint, read,
    x: { ...data.x, low: xLow, high: xHigh, least: bars ? 2 : undefined },
    y: { ...data.y, low: yLow, high: yHigh },
    hint: "Point at a mark, or focus the figure and use the arrow keys.",
  });
  const legend = element("div", { class: "legend", role: "group", "aria-label": `Series of ${title}` });
  series.forEach((s, k) => {
    const button = element("button", { type: "button", "aria-pressed": "true" }, key(k), s.name + (s.mark === "dashed" && s.x.length > 1 ? " (dashed)" : ""));
    button.addEventListener("click", () => {
      shown[k] = !shown[k];
      button.setAttribute("aria-pressed", String(shown[k]));
      frame.draw();
    });
    legend.append(button);
  });
  stage.append(legend);
}
