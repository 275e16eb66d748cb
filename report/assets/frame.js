// The frame of a drawing: axes, a window that can be moved and zoomed by wheel, box, keys and buttons, a readout.
//
// `spec`: {title, describedby, height, x: axis, y: axis, zoomY, paint(frame), read(frame, x, y), hint}. An axis is
// {text, low, high, log, names, whole, format}. Callers draw in `paint` between `frame.left/top/width/height`.

class Frame {
  constructor(stage, spec) {
    Object.assign(this, { stage, spec, left: 64, top: 10, bottom: 40, right: 30 });
    this.home = { x: [spec.x.low, spec.x.high], y: [spec.y.low, spec.y.high] };
    this.window = { x: [...this.home.x], y: [...this.home.y] };
    this.pointer = null;
    this.build();
    redraws.add(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  build() {
    const { spec } = this;
    this.box = element("div", {
      class: "drawing", tabindex: "0", role: "application", "aria-roledescription": "zoomable figure",
      "aria-label": spec.title, "aria-describedby": spec.describedby,
    });
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.svg = drawn("svg", { "aria-hidden": "true", style: "position:absolute;inset:0;height:100%" });
    this.box.append(this.canvas, this.svg);
    const act = (label, text, todo) => {
      const made = element("button", { type: "button", "aria-label": `${label}: ${spec.title}` }, text);
      made.addEventListener("click", todo);
      return made;
    };
    this.controls = element("div", { class: "controls", role: "group", "aria-label": `View of ${spec.title}` },
      act("Zoom in", "Zoom in", () => this.zoom(0.5)),
      act("Zoom out", "Zoom out", () => this.zoom(2)),
      act("Move left", "←", () => this.move(-0.25, 0)),
      act("Move right", "→", () => this.move(0.25, 0)),
      ...(spec.zoomY ? [act("Move up", "↑", () => this.move(0, 0.25)), act("Move down", "↓", () => this.move(0, -0.25))] : []),
      act("Whole figure", "Reset", () => this.reset()));
    this.readout = element("p", { class: "readout", "aria-live": "polite" }, spec.hint || "");
    this.stage.append(this.controls, this.box, this.readout);
    this.listen();
  }

  listen() {
    const { box } = this;
    box.addEventListener("wheel", (e) => {
      const at = this.inside(e);
      if (!at || !(e.ctrlKey || document.activeElement === box || this.entered)) return;
      e.preventDefault();
      this.zoom(e.deltaY > 0 ? 1.25 : 0.8, at, e.shiftKey ? "x" : "xy");
    }, { passive: false });
    box.addEventListener("pointerdown", (e) => {
      const at = this.inside(e);
      if (!at || e.button !== 0) return;
      this.entered = true;
      this.from = at;
      box.setPointerCapture(e.pointerId);
    });
    box.addEventListener("pointermove", (e) => {
      const at = this.inside(e);
      if (!at && !this.from) return this.leave();
      this.pointer = at || this.pointer;
      this.overlay();
    });
    box.addEventListener("pointerup", (e) => {
      const from = this.from, at = this.inside(e) || this.pointer;
      this.from = null;
      if (from && at && Math.abs(at.px - from.px) > 5) this.zoomTo(from, at);
      else this.overlay();
    });
    box.addEventListener("pointerleave", () => { this.entered = false; if (!this.from) this.leave(); });
    box.addEventListener("dblclick", () => this.reset());
    box.addEventListener("keydown", (e) => this.key(e));
    box.addEventListener("blur", () => this.leave());
  }

  // Arrows move a cross over the figure and read out what is there; with Shift they move the window.
  key(e) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[e.key];
    if (step && e.shiftKey) this.move(step[0] / 4, step[1] / 4);
    else if (step) this.cross(step);
    else if (e.key === "+" || e.key === "=") this.zoom(0.5, this.pointer);
    else if (e.key === "-") this.zoom(2, this.pointer);
    else if (e.key === "0" || e.key === "Home") this.reset();
    else if (e.key === "Escape") this.leave();
    else return;
    e.preventDefault();
  }

  cross([dx, dy]) {
    const at = this.pointer || { px: this.left + this.width / 2, py: this.top + this.height / 2 };
    const clamp = (v, low, high) => Math.min(high, Math.max(low, v));
    const px = clamp(at.px + dx * Math.max(4, this.width / 100), this.left, this.left + this.width - 1);
    const py = clamp(at.py - dy * Math.max(4, this.height / 50), this.top, this.top + this.height - 1);
    this.pointer = { px, py, x: this.toX(px), y: this.toY(py) };
    this.overlay();
  }

  leave() {
    this.pointer = null;
    this.overlay();
  }

  inside(e) {
    const r = this.box.getBoundingClientRect();
    const px = e.clientX - r.left - this.box.clientLeft, py = e.clientY - r.top - this.box.clientTop;
    if (px < this.left || px > this.left + this.width || py < this.top || py > this.top + this.height) return null;
    return { px, py, x: this.toX(px), y: this.toY(py) };
  }

  scale(axis, v) { return this.spec[axis].log ? Math.log10(v) : v; }
  unscale(axis, v) { return this.spec[axis].log ? 10 ** v : v; }
  ends(axis) { return this.window[axis].map((v) => this.scale(axis, v)); }
  px(x) { const [a, b] = this.ends("x"); return this.left + ((this.scale("x", x) - a) / (b - a)) * this.width; }
  py(y) { const [a, b] = this.ends("y"); return this.top + this.height - ((this.scale("y", y) - a) / (b - a)) * this.height; }
  toX(px) { const [a, b] = this.ends("x"); return this.unscale("x", a + ((px - this.left) / this.width) * (b - a)); }
  toY(py) { const [a, b] = this.ends("y"); return this.unscale("y", a + ((this.top + this.height - py) / this.height) * (b - a)); }

  // Set the window; it stays inside the whole figure and no smaller than the axis' least span. Unless it is done in
  // quiet, the figures beside it follow, and it is told what is shown.
  look(next, quiet) {
    for (const axis of this.spec.zoomY ? ["x", "y"] : ["x"]) {
      if (!next[axis]) continue;
      const [low, high] = this.home[axis].map((v) => this.scale(axis, v));
      let [a, b] = next[axis].map((v) => this.scale(axis, v));
      const least = Math.min(high - low, this.spec[axis].least || (high - low) / 1e5);
      if (b - a < least) { const mid = (a + b) / 2; a = mid - least / 2; b = mid + least / 2; }
      if (b - a > high - low) { a = low; b = high; }
      if (a < low) { b += low - a; a = low; }
      if (b > high) { a -= b - high; b = high; }
      this.window[axis] = [this.unscale(axis, a), this.unscale(axis, b)];
    }
    this.pointer = null;
    this.draw();
    if (quiet) return;
    if (this.spec.looked) this.spec.looked(this.window.x);
    this.tell();
  }

  zoom(factor, at, axes = "xy") {
    const next = {};
    for (const axis of axes) {
      const [a, b] = this.ends(axis);
      const mid = at ? this.scale(axis, at[axis]) : (a + b) / 2;
      next[axis] = [mid - (mid - a) * factor, mid + (b - mid) * factor].map((v) => this.unscale(axis, v));
    }
    this.look(next);
  }

  move(dx, dy) {
    const next = {};
    for (const [axis, d] of [["x", dx], ["y", dy]]) {
      const [a, b] = this.ends(axis);
      next[axis] = [a + d * (b - a), b + d * (b - a)].map((v) => this.unscale(axis, v));
    }
    this.look(next);
  }

  zoomTo(from, at) {
    const next = { x: [from.x, at.x].sort((a, b) => a - b) };
    if (Math.abs(at.py - from.py) > 12) next.y = [from.y, at.y].sort((a, b) => a - b);
    this.look(next);
  }

  reset() {
    this.look({ x: this.home.x, y: this.home.y });
  }

  rehome(x, y) {
    this.home = { x, y };
    this.window = { x: [...x], y: [...y] };
    this.pointer = null;
    this.draw();
  }

  label(axis, v) {
    const a = this.spec[axis];
    return a.names && a.names.length ? a.names[v] ?? "" : a.format ? a.format(v) : short(v);
  }

  tell() {
    const part = (axis) => this.window[axis].map((v) => this.label(axis, this.spec[axis].whole ? Math.round(v) : v)).join(" to ");
    const named = (axis) => `${this.spec[axis].text} ${part(axis)}`;
    this.readout.textContent = "Shown: " + named("x") + (this.spec.zoomY ? "; " + named("y") : "");
  }

  draw() {
    const full = this.box.clientWidth, height = this.spec.height;
    if (!full) return;
    // Room for the longest number on the y axis, and for the axis' name beside it.
    const digits = Math.max(...this.ticksOf("y", Math.max(2, (height - this.top - this.bottom) / 40)).map((v) => this.label("y", v).length), 1);
    this.left = Math.round(28 + 7 * digits);
    this.width = full - this.left - this.right;
    this.height = height - this.top - this.bottom;
    this.ratio = Math.min(2, window.devicePixelRatio || 1);
    this.canvas.width = Math.round(full * this.ratio);
    this.canvas.height = Math.round(height * this.ratio);
    this.canvas.style.height = "auto"; // of its own shape, also where paper is narrower than the screen
    this.svg.setAttribute("viewBox", `0 0 ${full} ${height}`);
    this.svg.replaceChildren(...this.axes());
    this.marks = drawn("g");
    this.svg.append(this.marks);
    this.cursor = drawn("g");
    this.spec.paint(this);
    this.svg.append(this.cursor);
    this.overlay();
  }

  axes() {
    const { left, top, width, height, spec } = this;
    const made = [];
    const line = (x1, y1, x2, y2, name) => drawn("line", { x1, y1, x2, y2, stroke: `var(--${name})` });
    for (const v of this.ticksOf("x", Math.max(2, width / 90))) {
      const x = this.px(v);
      if (!spec.raster) made.push(line(x, top, x, top + height, "grid"));
      made.push(line(x, top + height, x, top + height + 4, "faint"));
      made.push(drawn("text", { x, y: top + height + 16, "text-anchor": "middle", class: "tick-x" }, this.label("x", v)));
    }
    for (const v of this.ticksOf("y", Math.max(2, height / 40))) {
      const y = this.py(v);
      if (!spec.raster) made.push(line(left, y, left + width, y, "grid"));
      made.push(line(left - 4, y, left, y, "faint"));
      made.push(drawn("text", { x: left - 7, y: y + 4, "text-anchor": "end", class: "tick-y" }, this.label("y", v)));
    }
    made.push(line(left, top + height, left + width, top + height, "faint"), line(left, top, left, top + height, "faint"));
    made.push(drawn("text", { x: left + width / 2, y: top + height + 33, "text-anchor": "middle" }, spec.x.text));
    const turned = `rotate(-90 12 ${top + height / 2})`;
    made.push(drawn("text", { x: 12, y: top + height / 2, "text-anchor": "middle", transform: turned }, spec.y.text));
    return made;
  }

  ticksOf(axis, count) {
    const a = this.spec[axis], [low, high] = this.window[axis];
    if (a.names && a.names.length) {
      const every = Math.ceil((high - low) / count);
      return a.names.map((_, i) => i).filter((i) => i >= low && i <= high && (axis === "y" || i % every === 0));
    }
    if (!a.log) return ticks(low, high, count, a.whole);
    const [p, q] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    for (const steps of [[1], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
      const found = [];
      for (let e = p; e <= q; e++) for (const s of steps) found.push(Number((s * 10 ** e).toPrecision(12)));
      const inside = found.filter((v) => v >= low * 0.9999 && v <= high * 1.0001);
      if (inside.length >= 3) return inside;
    }
    return ticks(low, high, count, a.whole);
  }

  overlay() {
    const { cursor, pointer, from } = this;
    if (!cursor) return;
    cursor.replaceChildren();
    if (!pointer) return;
    const line = { stroke: "var(--ink)", "stroke-dasharray": "2 3", "pointer-events": "none" };
    if (from) {
      const tall = this.spec.zoomY && Math.abs(pointer.py - from.py) > 12;
      cursor.append(drawn("rect", {
        x: Math.min(from.px, pointer.px), width: Math.abs(pointer.px - from.px),
        y: tall ? Math.min(from.py, pointer.py) : this.top, height: tall ? Math.abs(pointer.py - from.py) : this.height,
        fill: "var(--accent)", "fill-opacity": ".15", stroke: "var(--accent)",
      }));
    }
    cursor.append(drawn("line", { x1: pointer.px, x2: pointer.px, y1: this.top, y2: this.top + this.height, ...line }));
    if (this.spec.zoomY) cursor.append(drawn("line", { y1: pointer.py, y2: pointer.py, x1: this.left, x2: this.left + this.width, ...line }));
    const said = this.spec.read(this, pointer.x, pointer.y);
    if (said) this.readout.textContent = said;
  }
}
