"use strict";
// What every drawing uses: colours of the theme, elements, numbers as text, and the way back from packed columns.

const dataOf = (id) => JSON.parse(document.getElementById(id).textContent);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children); // strings become text, never markup
  return made;
}

const element = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

const SVG = "http://www.w3.org/2000/svg";
const drawn = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

const grouped = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });

function short(value) {
  if (!Number.isFinite(value)) return "unknown";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return grouped(value);
  return Math.abs(value) >= 10000 ? grouped(value) : String(Number(value.toPrecision(4)));
}

function duration(ns) {
  if (ns < 0) return "not measured";
  if (ns === 0) return "0 s";
  const [unit, size] = ns >= 1e9 ? ["s", 1e9] : ns >= 1e6 ? ["ms", 1e6] : ns >= 1e3 ? ["µs", 1e3] : ["ns", 1];
  return short(ns / size) + " " + unit;
}

// One, two or five times a power of ten, about `count` of them between the ends.
function ticks(low, high, count, whole) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

async function inflated(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Columns of `rows` values each, one behind the other; see packing.py.
async function unpacked(id, rows, names) {
  const bytes = await inflated(id);
  const columns = {};
  let at = 0;
  for (const name of names) {
    const column = (columns[name] = new Float64Array(rows));
    let value = 0;
    for (let i = 0; i < rows; i++) {
      let zigzag = 0;
      for (let scale = 1; ; scale *= 128) {
        const byte = bytes[at++];
        zigzag += (byte & 127) * scale;
        if (byte < 128) break;
      }
      value += zigzag % 2 ? -(zigzag + 1) / 2 : zigzag / 2;
      column[i] = value;
    }
  }
  return columns;
}

// Drawings are made anew when colours or widths change.
const redraws = new Set();
function redrawAll() {
  for (const redraw of redraws) redraw();
}
