// Exact counts of (position, event) pairs by state, for any grid of cells over any window.
//
// The pairs of a rectangle below and left of a corner of the grid are a product of two ramps, so each rectangle adds
// to four corners, and one pass over the grid sums them up: rectangles + cells, however large the rectangles are.

// `shapes`: {since, span, start, length, state}; `grid`: {x0, dx, nx, y0, dy, ny}, whole numbers, cells of dx events by
// dy positions. Gives `counts[state][cell]`, cells row by row, and `of`, the same for state 0 (not yet).
function counted(shapes, grid, nStates) {
  const { x0, dx, nx, y0, dy, ny } = grid;
  const wide = nx + 1;
  const size = wide * (ny + 1);
  // Of every corner: the sums of 1, x, y and x*y over the ramps that begin there.
  const sums = Array.from({ length: nStates }, () => null);
  const right = x0 + dx * nx, above = y0 + dy * ny;
  const { since, span, start, length, state } = shapes;
  // They are in the order of `since`.
  for (let i = 0; i < since.length && since[i] < right; i++) {
    const a = Math.max(since[i], x0) - x0, b = Math.min(since[i] + span[i], right) - x0;
    if (a >= b) continue;
    const c = Math.max(start[i], y0) - y0, d = Math.min(start[i] + length[i], above) - y0;
    if (c >= d) continue;
    const s = sums[state[i]] || (sums[state[i]] = [0, 1, 2, 3].map(() => new Float64Array(size)));
    // A ramp from x counts from the first corner that is not left of it.
    const ia = Math.ceil(a / dx), ib = Math.ceil(b / dx), ic = Math.ceil(c / dy) * wide, id = Math.ceil(d / dy) * wide;
    const [one, xs, ys, xys] = s;
    one[ia + ic] += a * c; xs[ia + ic] -= c; ys[ia + ic] -= a; xys[ia + ic] += 1;
    one[ib + ic] -= b * c; xs[ib + ic] += c; ys[ib + ic] += b; xys[ib + ic] -= 1;
    one[ia + id] -= a * d; xs[ia + id] += d; ys[ia + id] += a; xys[ia + id] -= 1;
    one[ib + id] += b * d; xs[ib + id] -= d; ys[ib + id] -= b; xys[ib + id] += 1;
  }
  return sums.map((s) => s && cells(s, grid));
}

function cells([one, xs, ys, xys], { dx, nx, dy, ny }) {
  const wide = nx + 1;
  for (const sum of [one, xs, ys, xys]) {
    for (let i = 1; i < sum.length; i++) if (i % wide) sum[i] += sum[i - 1];
    for (let i = wide; i < sum.length; i++) sum[i] += sum[i - wide];
  }
  const area = (i, j) => {
    const at = j * wide + i, x = i * dx, y = j * dy;
    return one[at] + xs[at] * x + ys[at] * y + xys[at] * x * y;
  };
  const found = new Float64Array(nx * ny);
  let below = new Float64Array(wide), row = new Float64Array(wide);
  for (let j = 1; j <= ny; j++) {
    for (let i = 0; i <= nx; i++) row[i] = area(i, j);
    for (let i = 0; i < nx; i++) found[(j - 1) * nx + i] = Math.round(row[i + 1] - row[i] - below[i + 1] + below[i]);
    [below, row] = [row, below];
  }
  return found;
}

// The state that a cell is coloured by: the one with the most pairs, of equal ones the one named last. With `kept` a cell
// in which anything is resident or cold shows the most frequent of those states, however much of it is gone.
function majority(counts, grid, nColumns, nPositions, kept) {
  const { x0, dx, nx, y0, dy, ny } = grid;
  const best = new Uint8Array(nx * ny);
  const gone = counts.length - 1;
  for (let j = 0; j < ny; j++) {
    const tall = Math.max(0, Math.min(dy, nPositions - y0 - j * dy));
    for (let i = 0; i < nx; i++) {
      const at = j * nx + i;
      const pairs = tall * Math.max(0, Math.min(dx, nColumns - x0 - i * dx));
      let left = pairs, most = 0, state = 0;
      for (let s = 1; s < counts.length; s++) {
        const n = counts[s] ? counts[s][at] : 0;
        left -= n;
        if (n && n >= most && !(kept && s === gone && state)) { most = n; state = s; }
      }
      best[at] = left > most && !(kept && state && state !== gone) ? 0 : state;
    }
  }
  return best;
}
