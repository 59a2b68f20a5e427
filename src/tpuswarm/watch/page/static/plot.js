"use strict";
// Curves and shares on canvases, read by the pointer or with the arrow keys.

const si = (value) => {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]])
    if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)}${unit}`;
  return `${+value.toPrecision(3)}`;
};
const figure4 = (value) => (value === null || value === undefined ? "–" : `${+value.toPrecision(4)}`);
const order = new Intl.Collator("en", { numeric: true }).compare;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power, found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

// A canvas with its size in pixels and the point under the pointer.
class Chart {
  constructor(canvas) {
    this.canvas = canvas;
    this.at = null;
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    canvas.parentElement.append(this.tip);
    new ResizeObserver(() => this.redraw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.point(null);
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (step && this.move(...step)) event.preventDefault();
    });
  }
  redraw() { // once per frame, after any number of changes
    this.due ??= requestAnimationFrame(() => { this.due = null; this.draw(); });
  }
  begin() {
    const { canvas } = this, ratio = devicePixelRatio || 1;
    this.width = canvas.clientWidth;
    this.height = canvas.clientHeight;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    this.scale = rem / 16; // lengths below are pixels of a usual font
    pen.font = `${0.75 * rem}px system-ui, sans-serif`;
    return pen;
  }
  say(text, x, y) {
    this.tip.hidden = !text;
    if (!text) return;
    this.tip.textContent = text;
    this.canvas.setAttribute("aria-description", text);
    const box = this.canvas.parentElement, left = this.canvas.offsetLeft + x + 12;
    this.tip.style.left = `${Math.max(4, Math.min(left, box.clientWidth - this.tip.offsetWidth - 6))}px`;
    this.tip.style.top = `${this.canvas.offsetTop + Math.max(0, y - 34)}px`;
  }
}

// Lines over tokens. series: [{name, points: [[x, mean, low, high]], color, dots}]
class Curves extends Chart {
  constructor(canvas, unit) {
    super(canvas);
    this.series = [];
    this.format = unit;
  }
  show(series, xName) {
    this.series = series;
    this.xName = xName;
    const labels = series.filter((one) => one.points.length).map((one) => `${one.name} ${this.format(one.points.at(-1)[1])}`);
    this.canvas.setAttribute("aria-label", labels.join(", ") || "no data yet");
    this.redraw();
  }
  draw() {
    const pen = this.begin(), all = this.series.flatMap((one) => one.points);
    pen.fillStyle = color("--dim");
    if (!all.length || this.width < 80) return void pen.fillText("no data yet", 8, 20 * this.scale);
    const main = this.series[0].points;
    const late = main.length > 40 ? main.slice(Math.ceil(main.length / 40)) : main; // without the first steps, which would flatten the curve
    const tall = [...late, ...this.series.slice(1).flatMap((one) => one.points.slice(main.length > 40 ? 1 : 0))];
    let low = Infinity, high = -Infinity;
    for (const [, mean] of tall.length ? tall : all) { low = Math.min(low, mean); high = Math.max(high, mean); }
    if (this.fromZero) low = 0;
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    low = this.fromZero ? 0 : low - room;
    high += room;
    const right = Math.max(...all.map((point) => point[0]), 1);
    const k = this.scale, box = (this.box = { left: 46 * k, top: 8, right: this.width - 12, bottom: this.height - 34 * k });
    const x = (this.x = (value) => box.left + (value / right) * (box.right - box.left));
    const y = (this.y = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top));
    pen.strokeStyle = color("--grid");
    pen.lineWidth = 1;
    for (const tick of ticks(low, high, 5)) {
      pen.beginPath(); pen.moveTo(box.left, y(tick)); pen.lineTo(box.right, y(tick)); pen.stroke();
      pen.textAlign = "right"; pen.fillText(si(tick), box.left - 6, y(tick) + 4 * k);
    }
    pen.textAlign = "center";
    for (const tick of ticks(0, right, this.width < 420 * k ? 4 : 7))
      if (x(tick) < box.right - 8 || tick === right) pen.fillText(si(tick), x(tick), box.bottom + 15 * k);
    pen.textAlign = "right"; pen.fillText(this.xName, box.right, this.height - 4); pen.textAlign = "left";
    pen.save(); pen.beginPath(); pen.rect(box.left, box.top, box.right - box.left, box.bottom - box.top); pen.clip();
    for (const curve of this.series) this.line(pen, curve);
    pen.restore();
    let legend = box.left;
    for (const curve of this.series.filter((one) => one.points.length)) {
      pen.fillStyle = color(curve.color); pen.fillRect(legend, this.height - 6 * k - 7, 14, 3);
      pen.fillText(curve.name, legend + 19, this.height - 7); legend += 34 + pen.measureText(curve.name).width;
    }
    if (this.at !== null) this.mark(pen);
  }
  line(pen, { points, color: name, dots }) {
    const { x, y } = this;
    if (points.length > 1 && !dots) {
      pen.fillStyle = color("--band"); pen.beginPath();
      points.forEach((point, n) => pen[n ? "lineTo" : "moveTo"](x(point[0]), y(point[3])));
      [...points].reverse().forEach((point) => pen.lineTo(x(point[0]), y(point[2])));
      pen.fill();
    }
    pen.strokeStyle = pen.fillStyle = color(name); pen.lineWidth = 2; pen.lineJoin = "round"; pen.beginPath();
    points.forEach((point, n) => pen[n ? "lineTo" : "moveTo"](x(point[0]), y(point[1])));
    pen.stroke();
    if (dots || points.length === 1) for (const point of points.length > 60 ? points.slice(-1) : points) {
      pen.beginPath(); pen.arc(x(point[0]), y(point[1]), 3, 0, 7); pen.fill();
    }
  }
  mark(pen) {
    const points = this.series[0].points, point = points[this.at];
    if (!point) return this.say("");
    pen.strokeStyle = color("--dim"); pen.lineWidth = 1; pen.beginPath();
    pen.moveTo(this.x(point[0]), this.box.top); pen.lineTo(this.x(point[0]), this.box.bottom); pen.stroke();
    const lines = [`${si(point[0])} ${this.xName}`];
    for (const one of this.series) {
      const near = one.points.filter((other) => other[0] <= point[0] * 1.000001).at(-1);
      if (near) lines.push(`${one.name} ${this.format(near[1])}${near[3] > near[2] ? ` (${this.format(near[2])} to ${this.format(near[3])})` : ""}`);
    }
    this.say(lines.join("\n"), this.x(point[0]), 40);
  }
  point(x) {
    const points = this.series[0]?.points ?? [];
    this.at = x === null || !points.length || !this.x ? null
      : points.reduce((best, point, n) => (Math.abs(this.x(point[0]) - x) < Math.abs(this.x(points[best][0]) - x) ? n : best), 0);
    if (this.at === null) this.say("");
    this.redraw();
  }
  move(by) {
    const last = (this.series[0]?.points.length ?? 0) - 1;
    if (!by || last < 0) return false;
    this.at = Math.max(0, Math.min(last, (this.at ?? last + (by < 0 ? 1 : 0)) + by));
    this.redraw();
    return true;
  }
}

// Members by versions: the colour is the share of the version, a red dot a contribution that was not counted.
class Shares extends Chart {
  show(names, columns, total) {
    this.names = names.map((name, n) => [name, n]).sort((a, b) => order(a[0], b[0]));
    this.columns = columns;
    const tall = Math.max(2.5, Math.min(18, 440 / Math.max(1, names.length)));
    this.canvas.style.height = `${Math.ceil(tall * names.length) + 26}px`;
    const shares = Int32Array.from(columns.flatMap((column) => column[3].filter((one) => one > 0))).sort();
    this.most = Math.max(2, shares.at(-1) ?? 0, 2 * (shares[shares.length >> 1] ?? 0)); // an even share has half the colour
    const last = columns.at(-1);
    this.canvas.setAttribute("aria-label", last ? `version ${last[0]}: ${this.names.filter(([, n]) => last[3][n] > 0).map(([name, n]) => `${name} ${last[3][n] / 10}%`).slice(0, 12).join(", ")}` : "no data yet");
    this.redraw();
  }
  draw() {
    const pen = this.begin(), { columns, names } = this;
    if (!columns?.length || this.width < 80) return;
    const k = this.scale, side = Math.min(110 * k, 8 + Math.max(...names.map(([name]) => pen.measureText(name).width)));
    const box = (this.box = { left: side, top: 6, right: this.width - 6, bottom: this.height - 22 * k });
    const tall = (this.tall = (box.bottom - box.top) / names.length), count = columns.length;
    // A shown version also stands for the hidden ones before it.
    const first = columns[0][0] - (count > 1 ? columns[1][0] - columns[0][0] : 1), last = columns[count - 1][0];
    const place = (version) => box.left + ((version - first) / (last - first)) * (box.right - box.left);
    this.edges = [box.left, ...columns.map((column) => place(column[0]))];
    const [low, high] = [rgb(color("--low")), rgb(color("--high"))], bad = color("--bad");
    const shades = Array.from({ length: 65 }, (_, n) => {
      const [red, green, blue] = low.map((part, k) => Math.round(part + ((high[k] - part) * n) / 64));
      return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    });
    // Pixel by pixel: 80,000 rectangles take a browser a fifth of a second.
    const ratio = devicePixelRatio || 1, wide = Math.round((box.right - box.left) * ratio), missed = [];
    const image = pen.createImageData(wide, Math.round((box.bottom - box.top) * ratio)), cells = new Uint32Array(image.data.buffer);
    const at = this.edges.map((edge) => Math.round((edge - box.left) * ratio));
    names.forEach(([, number], down) => {
      const top = Math.round(down * tall * ratio), end = Math.round(((down + 1) * tall - (tall > 6 ? 1 : 0)) * ratio);
      columns.forEach((column, across) => {
        const share = column[3][number];
        if (share < 0) missed.push([across, down]);
        else if (share !== null && share !== undefined) cells.fill(shades[Math.round((64 * share) / this.most)], top * wide + at[across], top * wide + at[across + 1]);
      });
      for (let y = top + 1; y < end; y++) cells.copyWithin(y * wide, top * wide, (top + 1) * wide);
    });
    pen.putImageData(image, Math.round(box.left * ratio), Math.round(box.top * ratio));
    pen.fillStyle = bad;
    for (const [across, down] of missed) {
      const x = this.edges[across], step = this.edges[across + 1] - x;
      pen.fillRect(x + step / 4, box.top + (down + 1 / 4) * tall, Math.max(1.5, step / 2), Math.max(1.5, tall / 2));
    }
    pen.fillStyle = color("--dim");
    const every = Math.ceil((13 * k) / tall);
    names.forEach(([name], down) => { if (down % every === 0) pen.fillText(name, 0, box.top + down * tall + Math.min(tall, 13 * k) / 2 + 4 * k, side - 6); });
    pen.textAlign = "left"; pen.fillText(`version ${columns[0][0].toLocaleString("en")}`, box.left, this.height - 5);
    pen.textAlign = "right"; pen.fillText(columns.at(-1)[0].toLocaleString("en"), box.right, this.height - 5); pen.textAlign = "left";
    if (this.at) this.mark(pen);
  }
  mark(pen) {
    const [across, down] = this.at, column = this.columns[across], [name, place] = this.names[down] ?? [];
    if (!column || name === undefined) return this.say("");
    const { box, tall } = this, share = column[3][place], left = this.edges[across];
    pen.strokeStyle = color("--ink"); pen.strokeRect(left, box.top + down * tall, this.edges[across + 1] - left, tall);
    const what = share === null || share === undefined ? "nothing" : share < 0 ? "not counted" : `${(share / 10).toFixed(1)}%`;
    this.say(`version ${column[0].toLocaleString("en")}, ${formatTime(column[2])}\n${name}: ${what}`, left, box.top + down * tall + 20);
  }
  point(x, y) {
    this.at = x === null || !this.box || x < this.box.left ? null
      : [Math.max(0, Math.min(this.columns.length, this.edges.filter((edge) => edge <= x).length) - 1), Math.min(this.names.length - 1, Math.max(0, Math.floor((y - this.box.top) / this.tall)))];
    if (!this.at) this.say("");
    this.redraw();
  }
  move(across, down) {
    if (!this.columns?.length) return false;
    const [x, y] = this.at ?? [this.columns.length - 1, 0];
    this.at = [Math.max(0, Math.min(this.columns.length - 1, x + across)), Math.max(0, Math.min(this.names.length - 1, y + down))];
    this.redraw();
    return true;
  }
}

function rgb(text) {
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}
