"use strict";
// Drawing by hand: SVG elements, scales, ticks, one tooltip, charts that redraw when their width or the theme changes.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const hidden = new Set(); // runs switched off, in all charts at once
const charts = [];

function s(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
// A run has a colour and a pattern, because not everybody sees colours: forty differ in one or the other.
const DASHES = ["none", "8 4", "2.5 3", "11 3.5 2.5 3.5", "15 3 2.5 3 2.5 3"];
const COLOURS = 8;
const colour = (at) => ink("c" + (at % COLOURS)), dash = (at) => DASHES[at % DASHES.length];
const key = (at) => s("svg", { class: "key", viewBox: "0 0 28 6", "aria-hidden": "true" },
  s("line", { x1: 0, x2: 28, y1: 3, y2: 3, style: `stroke:var(--c${at % COLOURS})`, "stroke-width": 3, "stroke-dasharray": dash(at) }));
const largest = (values) => values.reduce((a, b) => (b > a ? b : a), -Infinity); // a call has no room for 100,000 arguments

function ticks(low, high, wanted) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= raw - 1e-12);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(+(at * step).toPrecision(12));
  return found;
}
// Ticks at whole numbers.
const wholeTicks = (low, high, wanted) => ticks(low, high, Math.min(wanted, high - low)).filter(Number.isInteger);
// Ticks of seconds at whole parts of minutes and hours.
function timeTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find((v) => v >= raw);
  if (raw < 1 || !step) return ticks(low, high, wanted);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, at) => at * step).filter((v) => v >= low);
}
const percent = (value) => (100 * value).toFixed(Math.abs(value) < 0.0995 ? 2 : 1) + " %";
const wholePercent = (value) => +(100 * value).toFixed(1) + " %";
const points = (value) => (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(100 * value).toFixed(1);
const plain = (value) => String(+value.toPrecision(3)).replace("-", "−");
function scaled(value, unit) {
  let at = 0;
  const prefixes = ["", "k", "M", "G", "T", "P"];
  while (Math.abs(value) >= 999.5 && at < 5) { value /= 1000; at++; }
  return +value.toPrecision(3) + " " + prefixes[at] + unit;
}
const bytes = (value) => scaled(value, "B");
function clock(seconds) {
  if (seconds < 60) return +seconds.toPrecision(3) + " s";
  return seconds < 5400 ? +(seconds / 60).toPrecision(3) + " min" : +(seconds / 3600).toPrecision(3) + " h";
}

const tip = h("div", { id: "tip", role: "status" });
function showTip(event, head, rows) {
  tip.replaceChildren();
  if (head) tip.append(h("div", {}, h("b", {}, head)));
  for (const row of rows) {
    tip.append(h("div", { class: "row" }, row.run === undefined ? null : key(row.run), h("span", {}, row.name), h("b", {}, row.text)));
  }
  tip.classList.add("on");
  const box = tip.getBoundingClientRect();
  let left = event.clientX + 14, top = event.clientY + 14;
  if (left + box.width > innerWidth - 6) left = Math.max(6, event.clientX - box.width - 14);
  if (top + box.height > innerHeight - 6) top = Math.max(6, event.clientY - box.height - 14);
  tip.style.left = left + "px";
  tip.style.top = top + "px";
}
let leaving = null; // what clears the marks of the chart that the tooltip speaks of
function hideTip() {
  tip.classList.remove("on");
  if (leaving) leaving();
  leaving = null;
}
// A finger leaves a chart by lifting, and what it asked for should stay: until the next tap elsewhere, or scrolling.
addEventListener("scroll", hideTip, { passive: true, capture: true });
addEventListener("pointerdown", (event) => { if (!event.target.closest || !event.target.closest("[data-part=hover]")) hideTip(); });

// A chart: name, title, caption (text or function), tools (nodes), legend (runs), height(width), draw(svg, width, height).
function chart(spec) {
  const plot = h("div", { class: "plot" }), legend = h("div", { class: "legend" }), caption = h("figcaption");
  const save = h("button", { class: "small", title: "Save this picture as SVG", onclick: () => download(item) }, "SVG");
  const titled = () => (typeof spec.title === "function" ? spec.title() : spec.title), title = h("h3", {}, titled());
  const head = h("header", {}, title, h("div", { class: "tools" }, ...(spec.tools || [])), save);
  const figure = h("figure", { class: "card " + (spec.size || ""), "data-chart": spec.name }, head, legend, plot, caption);
  const item = { figure, width: 0, height: 0, svg: null, spec, titled };
  item.redraw = () => {
    const width = Math.floor(plot.clientWidth);
    if (!width) return;
    item.width = width;
    const height = (item.height = spec.height(width));
    title.textContent = titled();
    item.svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": titled() });
    spec.draw(item.svg, width, height);
    plot.replaceChildren(item.svg);
    drawLegend(legend, spec);
    const text = typeof spec.caption === "function" ? spec.caption() : spec.caption;
    caption.textContent = text || "";
    caption.hidden = !text;
    figure.dataset.drawn = item.svg.childElementCount > 0 ? "true" : "false";
  };
  new ResizeObserver(() => { if (Math.floor(plot.clientWidth) !== item.width) item.redraw(); }).observe(plot);
  charts.push(item);
  return item;
}
const redrawAll = () => charts.forEach((item) => item.redraw());

function drawLegend(box, spec) {
  const shown = spec.legend ? spec.legend() : [];
  box.hidden = !shown.length || RUNS.length < 2;
  const focused = [...box.children].indexOf(document.activeElement);
  box.replaceChildren(...shown.map((at) => h(
    "button",
    {
      "aria-pressed": String(!hidden.has(at)), "data-run": DATA.runs[at].label, title: "Show or hide",
      onclick: () => { hidden.has(at) ? hidden.delete(at) : hidden.add(at); hideTip(); redrawAll(); },
    },
    key(at), DATA.runs[at].label,
  )));
  if (focused >= 0 && box.children[focused]) box.children[focused].focus();
}

function download(item) {
  const copy = item.svg.cloneNode(true), margin = 28; // labels may overhang the plot, which a page shows and a file cuts
  // Title and legend are no part of the picture on the page, but of one that stands alone.
  const names = (item.spec.legend && RUNS.length > 1 ? item.spec.legend() : []).filter((at) => !hidden.has(at));
  const above = s("g", { "data-part": "legend" }, text(0, 0, item.titled(), { "font-size": 14, "font-weight": 600, fill: ink("ink") }));
  let x = 0, y = 0;
  for (const at of names) {
    const wide = 46 + widthOf(DATA.runs[at].label, 12);
    if (!y || x + wide > item.width) { x = 0; y += 20; }
    above.append(s("line", { x1: x, x2: x + 28, y1: y - 4, y2: y - 4, stroke: colour(at), "stroke-width": 3, "stroke-dasharray": dash(at) }), text(x + 34, y, DATA.runs[at].label));
    x += wide;
  }
  const top = y + 36;
  above.setAttribute("transform", `translate(0,${20 - top})`);
  copy.prepend(above);
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("viewBox", `${-margin} ${-top} ${item.width + 2 * margin} ${item.height + top}`);
  copy.setAttribute("width", item.width + 2 * margin);
  copy.setAttribute("height", item.height + top);
  copy.setAttribute("font-family", "Helvetica, Arial, sans-serif");
  const link = h("a", { download: item.spec.name + ".svg" });
  link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function switcher(options, chosen, change, label) {
  const box = h("span", { class: "switch", role: "group", "aria-label": label });
  const buttons = options.map(([value, text]) => h("button", {
    "aria-pressed": String(value === chosen), "data-value": value,
    onclick: () => { buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.value === value))); change(value); },
  }, text));
  box.append(...buttons);
  // What can be chosen now, and why the rest cannot; `shown` is what is drawn, whatever was wished for.
  box.allow = (allowed, shown, why) => buttons.forEach((b) => {
    b.disabled = !allowed(b.dataset.value);
    b.title = b.disabled ? "Not available: " + why : "";
    b.setAttribute("aria-pressed", String(b.dataset.value === shown));
  });
  return box;
}
function chooser(options, chosen, change, label) {
  const box = h("select", { "aria-label": label, onchange: () => change(box.value) });
  for (const [value, text] of options) box.append(h("option", { value, ...(value === chosen ? { selected: "" } : {}) }, text));
  box.allow = (allowed, shown, why) => {
    for (const option of box.options) option.disabled = !allowed(option.value);
    box.disabled = [...box.options].filter((option) => !option.disabled).length < 2;
    box.title = [...box.options].some((option) => option.disabled) ? "Not available: " + why : "";
    box.value = shown;
  };
  return box;
}

const short = (name) => (name.length > 9 ? name.slice(0, 8) + "…" : name);
const gutter = (names) => Math.max(46, 16 + 6.6 * largest(names.map((name) => short(name).length))); // room for names
const pen = document.createElement("canvas").getContext("2d");
function widthOf(content, size) {
  pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(content).width;
}
const text = (x, y, content, more) => s("text", { x, y, "font-size": 12, fill: ink("soft"), ...more }, content);

// Axes of a plot; returns scales. The y axis names its ticks, the x axis also what it counts.
function axes(svg, box, x, y) {
  const X = (v) => box.left + ((v - x.low) / (x.high - x.low || 1)) * (box.right - box.left);
  const Y = (v) => box.bottom - ((v - y.low) / (y.high - y.low || 1)) * (box.bottom - box.top);
  const layer = s("g", { "data-part": "axes" });
  for (const tick of y.ticks || ticks(y.low, y.high, Math.max(3, (box.bottom - box.top) / 52))) {
    layer.append(s("line", { x1: box.left, x2: box.right, y1: Y(tick), y2: Y(tick), stroke: ink("grid") }));
    layer.append(text(box.left - 8, Y(tick) + 4, y.show(tick), { "text-anchor": "end" }));
  }
  for (const tick of x.ticks || (x.step || ticks)(x.low, x.high, Math.max(2, (box.right - box.left) / 88))) {
    layer.append(s("line", { x1: X(tick), x2: X(tick), y1: box.bottom, y2: box.bottom + 5, stroke: ink("faint") }));
    layer.append(text(X(tick), box.bottom + 19, x.show(tick), { "text-anchor": "middle" }));
  }
  layer.append(s("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: ink("faint") }));
  if (x.title) layer.append(text((box.left + box.right) / 2, box.bottom + 37, x.title, { "text-anchor": "middle" }));
  svg.append(layer);
  return { X, Y };
}
function extent(values, least) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v != null && isFinite(v)) { low = v < low ? v : low; high = v > high ? v : high; }
  if (low > high) return [0, 1];
  if (high - low < least) { const middle = (low + high) / 2; low = middle - least / 2; high = middle + least / 2; }
  return [low, high];
}
const empty = (svg, width, height, why) => svg.append(text(width / 2, height / 2, why, { "text-anchor": "middle", fill: ink("faint") }));
