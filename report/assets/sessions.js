// The sessions of the page: which one is chosen (in all figures together), its columns, its window of events.

const sessions = {
  about: null,
  at: 0,
  loaded: new Map(),
  figures: [],

  async columns(i) {
    if (!this.loaded.has(i)) {
      const s = this.about.sessions[i];
      const events = unpacked(s.events, s.columns, ["op", "text", "start", "stop", "at", "elapsed", "resident", "cold"]);
      const shapes = unpacked(s.states, s.rectangles, ["since", "span", "start", "length", "state"]);
      this.loaded.set(i, Promise.all([events, shapes]).then(([e, r]) => {
        for (const name of ["at", "elapsed"]) e[name] = e[name].map((v) => (name === "elapsed" && v < 0 ? v : v * s.tick_ns));
        return { about: s, events: e, shapes: r };
      }));
    }
    return this.loaded.get(i);
  },

  async choose(i) {
    this.at = i;
    const session = await this.columns(i);
    if (this.at !== i) return; // another one was chosen while this one was unpacked
    for (const f of this.figures) {
      if (f.select) f.select.value = String(i);
      f.summary.textContent = f.summaries[i];
      f.show(session);
    }
  },

  // `figure.show(session)` is called now and whenever another session is chosen, whose summary is then shown;
  // `figure.frame` moves with the others that have events on their x axis.
  async join(stage, title, figure, summaries, describedby) {
    this.about ||= dataOf("sessions");
    Object.assign(figure, { summaries, summary: document.getElementById(describedby) });
    this.figures.push(figure);
    if (this.about.sessions.length > 1) {
      const id = `session-${this.figures.length}`;
      figure.select = element("select", { id });
      this.about.sessions.forEach((s, i) => figure.select.append(element("option", { value: String(i) }, s.label)));
      figure.select.addEventListener("change", () => this.choose(Number(figure.select.value)));
      const label = element("label", { for: id }, "Session ", element("span", { class: "hidden" }, `of ${title}`));
      stage.append(element("div", { class: "controls" }, label, figure.select));
    }
    figure.show(await this.columns(this.at));
  },

  looked(from, x) {
    for (const f of this.figures) if (f !== from && f.byEvent && f.frame) f.frame.look({ x }, true);
  },
};

// "event 12" or "events 12 to 19" of columns `[a, b)`.
function eventsText(about, a, b) {
  const first = a * about.every, last = Math.min(b * about.every, about.n_events) - 1;
  return first === last ? `Event ${grouped(first)}` : `Events ${grouped(first)} to ${grouped(last)}`;
}

// What happened in one column: the operation, its range and its reason.
function happened({ about, events }, i) {
  const op = sessions.about.ops[events.op[i]];
  const range = events.start[i] >= 0 && events.stop[i] >= 0 ? ` [${events.start[i]}, ${events.stop[i]})` : "";
  const why = about.texts[events.text[i]];
  const took = events.elapsed[i] >= 0 ? `, ${duration(events.elapsed[i])}` : "";
  return `${op}${range}${why ? `, reason: ${why}` : ""}${took}`;
}

// Of several columns: how many of each operation, and the last one that is no decode.
function happenings(session, a, b) {
  if (b - a === 1) return happened(session, a);
  const { events } = session;
  const counts = new Map();
  let telling = -1;
  for (let i = a; i < b; i++) {
    const op = sessions.about.ops[events.op[i]];
    counts.set(op, (counts.get(op) || 0) + 1);
    if (op !== "decode" && op !== "plan" && op !== "score") telling = i;
  }
  const parts = [...counts].sort((p, q) => q[1] - p[1]).map(([op, n]) => `${grouped(n)} ${op}`);
  const last = telling < 0 ? "" : `; last: ${eventsText(session.about, telling, telling + 1).toLowerCase()}, ${happened(session, telling)}`;
  return parts.join(", ") + last;
}
