// The residency map: majority states of cells, exact counts under the pointer.

const STATE_COLOURS = ["none", "resident", "recent", "sink", "cold", "dropped"];

function residencyMap(stage, data, title, describedby) {
  const figure = { byEvent: true };
  let session = null, grid = null, counts = null, kept = false;

  // Cells of whole events and positions, about two pixels wide and tall at least, aligned so that they stay in place.
  function cellsOf(frame) {
    const { about } = session;
    const axis = ([low, high], pixels, most) => {
      const size = Math.max(1, Math.ceil((high - low) / (pixels / 2)));
      const from = Math.floor(low / size) * size;
      return [from, size, Math.max(1, Math.ceil((Math.min(high, most) - from) / size))];
    };
    const [x0, dx, nx] = axis(frame.window.x, frame.width, about.columns);
    const [y0, dy, ny] = axis(frame.window.y, frame.height, about.tape);
    return { x0, dx, nx, y0, dy, ny };
  }

  function paint(frame) {
    grid = cellsOf(frame);
    counts = counted(session.shapes, grid, STATE_COLOURS.length);
    const best = majority(counts, grid, session.about.columns, session.about.tape, kept);
    const rgb = STATE_COLOURS.map((name) => colour(name).match(/[0-9a-f]{2}/gi).map((h) => parseInt(h, 16)));
    const image = new ImageData(grid.nx, grid.ny);
    for (let j = 0; j < grid.ny; j++) {
      for (let i = 0; i < grid.nx; i++) {
        const [r, g, b] = rgb[best[j * grid.nx + i]], at = 4 * ((grid.ny - 1 - j) * grid.nx + i);
        image.data.set([r, g, b, 255], at);
      }
    }
    const small = element("canvas");
    small.width = grid.nx;
    small.height = grid.ny;
    small.getContext("2d").putImageData(image, 0, 0);
    const pen = frame.canvas.getContext("2d");
    pen.scale(frame.ratio, frame.ratio);
    pen.beginPath();
    pen.rect(frame.left, frame.top, frame.width, frame.height);
    pen.clip();
    pen.imageSmoothingEnabled = false;
    const x = frame.px(grid.x0), y = frame.py(grid.y0 + grid.ny * grid.dy);
    pen.drawImage(small, x, y, frame.px(grid.x0 + grid.nx * grid.dx) - x, frame.py(grid.y0) - y);
    const cell = `${grouped(grid.dx * session.about.every)} event${grid.dx * session.about.every > 1 ? "s" : ""}`;
    // Most sinks are four positions.
    const hidden = !kept && session.about.sink > 0 && grid.dy > 2 * session.about.sink ? ` The sink's ${grouped(session.about.sink)} positions are less than half of a cell: zoom in to see them.` : "";
    note.textContent = `Each cell is ${cell} by ${grouped(grid.dy)} tape position${grid.dy > 1 ? "s" : ""}, in the colour of ${kept ? "what is kept in it, however little, else of" : ""} most of its pairs.`.replace("  ", " ") + hidden;
  }

  function read(frame, x, y) {
    const i = Math.floor((x - grid.x0) / grid.dx), j = Math.floor((y - grid.y0) / grid.dy);
    if (i < 0 || j < 0 || i >= grid.nx || j >= grid.ny) return "";
    const { about } = session;
    const a = grid.x0 + i * grid.dx, b = Math.min(a + grid.dx, about.columns);
    const c = grid.y0 + j * grid.dy, d = Math.min(c + grid.dy, about.tape);
    if (a >= b || c >= d) return "";
    const pairs = (b - a) * (d - c);
    const n = counts.map((state) => (state ? state[j * grid.nx + i] : 0));
    n[0] = pairs - n.reduce((sum, v) => sum + v, 0);
    const shares = n.map((v, s) => [v, sessions.about.states[s]]).filter(([v]) => v > 0).sort((p, q) => q[0] - p[0]);
    const where = d - c === 1 ? `position ${grouped(c)}` : `positions ${grouped(c)} to ${grouped(d - 1)}`;
    const states = pairs === 1 ? shares[0][1] : shares.map(([v, s]) => `${grouped(v)} ${s}`).join(", ") + ` of ${grouped(pairs)} pairs`;
    return `${eventsText(about, a, b)}, ${where}: ${states}\n${happenings(session, a, b)}`;
  }

  const note = element("p", { class: "note" });
  const choice = element("select", { id: `${describedby}-cells` },
    element("option", { value: "most" }, "the state of most pairs"),
    element("option", { value: "kept" }, "what is kept, if anything is"));
  choice.addEventListener("change", () => { kept = choice.value === "kept"; figure.frame.draw(); });
  const chooser = element("div", { class: "controls" }, element("label", { for: choice.id }, "A cell shows"), choice);
  const legend = element("ul", { class: "legend", "aria-label": "Colours of the map" });
  figure.show = (next) => {
    session = next;
    // On a tape many times longer than the cache the majority is gone in nearly every cell.
    kept = next.about.tape > 8 * next.events.resident.reduce((m, v) => Math.max(m, v), 1);
    choice.value = kept ? "kept" : "most";
    const x = [0, next.about.columns], y = [0, Math.max(1, next.about.tape)];
    if (figure.frame) return figure.frame.rehome(x, y);
    figure.frame = new Frame(stage, {
      title, describedby, height: 420, zoomY: true, raster: true, paint, read,
      x: { text: "event (seq)", low: x[0], high: x[1], whole: true, least: 4, format: eventNumber },
      y: { text: "tape position", low: y[0], high: y[1], whole: true, least: 4 },
      looked: (w) => sessions.looked(figure, w),
      hint: "Point at a cell, or focus the map and use the arrow keys. Drag a box or turn the wheel over the focused map to zoom; + and - zoom, Shift with arrows moves, 0 resets.",
    });
    stage.append(legend, chooser, note);
    STATE_COLOURS.forEach((name, s) => legend.append(element("li", {}, swatch(name), sessions.about.states[s])));
  };
  const eventNumber = (v) => grouped(v * session.about.every);
  return sessions.join(stage, title, figure, data.summaries, describedby);
}

function swatch(name) {
  return element("i", { style: `background:var(--${name})`, "aria-hidden": "true" });
}
