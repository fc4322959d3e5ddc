// A chart of one quantity along the own tokens: a line per rollout, in the colours of the figures, and a cursor.
"use strict";
const MARGIN = {left: 46, right: 10, top: 8, bottom: 20}, HEIGHT = 118;

function svg(name, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  element.textContent = text;
  return element;
}

// Returns about `count` round numbers between two values.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find(factor => factor * power >= rough), first = Math.ceil(low / step);
  return Array.from({length: Math.floor(high / step + 1e-9) - first + 1}, (_, i) => +((first + i) * step).toPrecision(12));
}

class Chart {
  // rollouts: that are drawn; extent: {tokens, low, high} of the axes; onPoint(rollout, t, chosen): t counts from 0.
  constructor(host, quantity, rollouts, extent, onPoint) {
    Object.assign(this, {host, quantity, rollouts, extent, onPoint, at: null});
    this.title = (quantity === "energy" ? "realized energy " : quantity + " ") + QUANTITIES[quantity];
    this.svg = svg("svg", {role: "img", "aria-label": `${this.title} along the own tokens of ${rollouts.length} rollouts`});
    this.value = node("span", {className: "chart-value"});
    host.replaceChildren(node("figcaption", {}, this.title, " ", this.value), this.svg);
    this.svg.addEventListener("pointermove", event => this.pointed(event, false));
    this.svg.addEventListener("click", event => this.pointed(event, true));
    this.svg.addEventListener("pointerleave", () => this.onPoint(null));
    this.draw();
  }

  x(t) { return MARGIN.left + (this.width - MARGIN.left - MARGIN.right) * t / Math.max(1, this.extent.tokens - 1); }

  y(value) {
    const {low, high} = this.extent;
    return MARGIN.top + (HEIGHT - MARGIN.top - MARGIN.bottom) * (1 - (value - low) / (high - low || 1));
  }

  draw() {
    this.width = this.host.clientWidth || 300;
    const {low, high, tokens} = this.extent, right = this.width - MARGIN.right, bottom = HEIGHT - MARGIN.bottom;
    const parts = [];
    for (const value of ticks(low, high, 3)) parts.push(
      svg("line", {class: "grid", x1: MARGIN.left, x2: right, y1: this.y(value), y2: this.y(value)}),
      svg("text", {x: MARGIN.left - 6, y: this.y(value) + 4, "text-anchor": "end"}, written(value)));
    const name = this.width > 260 ? svg("text", {x: right, y: bottom + 14, "text-anchor": "end"}, "own token") : null;
    const room = right - (name ? 70 : 15); // for ticks beside the name of the axis
    for (const t of ticks(1, tokens, Math.min(tokens, Math.floor(this.width / 60)))) if (Number.isInteger(t) && this.x(t - 1) < room)
      parts.push(svg("text", {x: this.x(t - 1), y: bottom + 14, "text-anchor": "middle"}, t));
    if (name) parts.push(name);
    this.lines = new Map(this.rollouts.map(rollout => [rollout, svg("path", {
      d: this.path(rollout[this.quantity]), style: `--line: ${rollout.colour}`, class: rollout.reward > 0 ? "line" : "line dashed",
    })]));
    this.cursor = svg("line", {class: "cursor", y1: MARGIN.top, y2: bottom});
    this.dot = svg("circle", {class: "dot", r: 4});
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts, ...this.lines.values(), this.cursor, this.dot);
    this.point(...this.at ?? [null]);
  }

  // Two points a pixel at most: the smallest and the largest value of its tokens.
  path(values) {
    const many = Math.max(1, Math.floor(values.length / this.width)), points = [];
    for (let t = 0; t < values.length; t += many) {
      let low = t, high = t;
      for (let u = t; u < Math.min(t + many, values.length); u++) {
        if (values[u] < values[low]) low = u;
        if (values[u] > values[high]) high = u;
      }
      for (const u of new Set([Math.min(low, high), Math.max(low, high)]))
        if (Number.isFinite(values[u])) points.push(`${this.x(u).toFixed(1)} ${this.y(values[u]).toFixed(1)}`);
    }
    return points.length > 1 ? "M" + points.join("L") : points.length ? `M${points[0]}h3` : "";
  }

  // Moves the cursor to own token t, and to a rollout's line where it is drawn here; null: away.
  point(rollout, t) {
    this.at = rollout || t !== undefined ? [rollout, t] : null;
    const value = this.lines.has(rollout) ? rollout[this.quantity][t] : undefined, known = Number.isFinite(value);
    this.svg.classList.toggle("pointed", this.lines.has(rollout));
    for (const [other, line] of this.lines) line.classList.toggle("on", other === rollout);
    for (const [name, visible] of [["cursor", t !== undefined], ["dot", known]]) this[name].toggleAttribute("hidden", !visible);
    this.value.textContent = value === undefined ? "" : written(value);
    if (t === undefined) return;
    this.cursor.setAttribute("x1", this.x(t));
    this.cursor.setAttribute("x2", this.x(t));
    if (!known) return;
    this.dot.setAttribute("cx", this.x(t));
    this.dot.setAttribute("cy", this.y(value));
    this.dot.style.setProperty("--line", rollout.colour);
  }

  pointed(event, chosen) {
    const box = this.svg.getBoundingClientRect(), inner = this.width - MARGIN.left - MARGIN.right;
    const share = ((event.clientX - box.left) * this.width / box.width - MARGIN.left) / inner;
    const t = Math.round(Math.min(Math.max(share, 0), 1) * (this.extent.tokens - 1)), y = event.clientY - box.top;
    const distance = rollout => Math.abs(this.y(rollout[this.quantity][t]) - y * HEIGHT / box.height);
    const there = this.rollouts.filter(rollout => t < rollout[this.quantity].length);
    if (there.length) this.onPoint(there.reduce((best, rollout) => distance(rollout) < distance(best) ? rollout : best), t, chosen);
  }
}
