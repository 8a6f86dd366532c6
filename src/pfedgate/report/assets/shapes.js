// The kinds of charts.

// Lines: series [{run, label, x, y, thin?, marks?}]; x and y {title, show, low?, high?}.
function lines(svg, width, height, series, x, y) {
  const known = series.filter((line) => line.x.length), shown = known.filter((line) => !hidden.has(line.run));
  if (!known.length) return empty(svg, width, height, "no round is evaluated yet");
  if (!shown.length) return empty(svg, width, height, "all runs are hidden");
  const [xl, xh] = extent(shown.flatMap((l) => l.x), 1e-9), [yl, yh] = extent(shown.flatMap((l) => l.y), y.least || 1e-9);
  const pad = (yh - yl) * 0.06;
  const low = y.low ?? Math.max(y.floor ?? -Infinity, yl - pad), high = y.high ?? Math.min(y.ceiling ?? Infinity, yh + pad);
  const box = { left: 54, right: width - 10, top: 8, bottom: height - 44 };
  const { X, Y } = axes(svg, box, { low: x.low ?? xl, high: xh, ...x }, { ...y, low, high });
  if (x.before) x.before(svg, box, X, Y);
  for (const line of shown) {
    const at = line.x.map((v, i) => [X(v), line.y[i]]).filter(([, v]) => v != null).map(([a, b]) => [a, Y(b)]);
    const ours = colour(line.run), step = (box.right - box.left) / at.length; // dots that touch would hide the pattern
    const path = at.map(([a, b], i) => (i ? "L" : "M") + a.toFixed(1) + "," + b.toFixed(1)).join("");
    svg.append(s("path", {
      d: path, fill: "none", stroke: ours, "stroke-width": line.thin ? 1.2 : 2.2, "stroke-linejoin": "round",
      "stroke-dasharray": dash(line.run), "data-series": line.label,
    }));
    if (step >= 16 && !line.thin) for (const [a, b] of at) svg.append(s("circle", { cx: a, cy: b, r: at.length > 1 ? 2.6 : 4, fill: ours }));
    for (const mark of line.marks || []) {
      svg.append(s("circle", { cx: X(line.x[mark]), cy: Y(line.y[mark]), r: 5.5, fill: ink("card"), stroke: ours, "stroke-width": 2.2 }));
    }
  }
  const cross = s("line", { y1: box.top, y2: box.bottom, stroke: ink("faint"), "stroke-dasharray": "3 3", visibility: "hidden" });
  const dots = s("g");
  svg.append(cross, dots);
  hover(svg, box, (event, px) => {
    const value = (x.low ?? xl) + ((px - box.left) / (box.right - box.left)) * (xh - (x.low ?? xl));
    const near = shown.map((line) => ({ line, at: nearest(line.x, value) })).filter(({ line, at }) => line.y[at] != null);
    if (!near.length) return;
    near.sort((a, b) => b.line.y[b.at] - a.line.y[a.at]);
    const closest = near.reduce((a, b) => (Math.abs(b.line.x[b.at] - value) < Math.abs(a.line.x[a.at] - value) ? b : a));
    const place = X(closest.line.x[closest.at]);
    cross.setAttribute("x1", place); cross.setAttribute("x2", place); cross.setAttribute("visibility", "visible");
    dots.replaceChildren(...near.map(({ line, at }) => s("circle", { cx: X(line.x[at]), cy: Y(line.y[at]), r: 4.5, fill: colour(line.run), stroke: ink("card"), "stroke-width": 1.5 })));
    const same = near.every(({ line, at }) => line.x[at] === closest.line.x[closest.at]);
    showTip(event, same ? x.tip(closest.line.x[closest.at]) : null, near.map(({ line, at }) => ({
      run: line.run, name: line.label + (line.told ? ", " + line.told(at) : ""),
      text: (y.tip || y.show)(line.y[at]) + (same ? "" : " at " + x.tip(line.x[at])),
    })));
  }, { leave: () => { cross.setAttribute("visibility", "hidden"); dots.replaceChildren(); }, xs: [...new Set(shown.flatMap((line) => line.x))].sort((a, b) => a - b).map(X) });
}
function nearest(values, wanted) {
  let best = 0;
  values.forEach((value, at) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = at; });
  return best;
}
// What a pointer, a finger or the arrow keys ask for; xs and ys are the places of values.
function hover(svg, box, move, { leave = () => {}, xs = [(box.left + box.right) / 2], ys = [(box.top + box.bottom) / 2] } = {}) {
  const area = s("rect", {
    x: box.left, y: box.top, width: Math.max(0, box.right - box.left), height: Math.max(0, box.bottom - box.top), fill: "transparent",
    "data-part": "hover", tabindex: 0, role: "application", "aria-label": svg.getAttribute("aria-label") + ": arrow keys go from value to value",
  });
  area.addEventListener("pointermove", (event) => {
    const at = svg.getBoundingClientRect();
    if (leaving !== leave) hideTip();
    leaving = leave;
    move(event, event.clientX - at.left, event.clientY - at.top);
  });
  area.addEventListener("pointerdown", (event) => area.dispatchEvent(new PointerEvent("pointermove", event)));
  area.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hideTip(); });
  // By keyboard: arrows move a pointer that nobody sees.
  const places = [xs, ys], at = [-1, -1];
  area.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, -1], ArrowDown: [1, 1], Home: [0, -Infinity], End: [0, Infinity] }[event.key];
    if (event.key === "Escape") hideTip();
    if (!by) return;
    event.preventDefault();
    const [axis, step] = by, last = places[axis].length - 1;
    at[axis] = at[axis] < 0 && step === -1 ? last : Math.max(0, Math.min(last, at[axis] + step));
    const frame = svg.getBoundingClientRect(), [px, py] = places.map((values, i) => values[Math.max(0, at[i])]);
    area.dispatchEvent(new PointerEvent("pointermove", { clientX: frame.left + px, clientY: frame.top + py }));
  });
  area.addEventListener("blur", () => { if (leaving === leave) hideTip(); });
  svg.append(area);
}

// A grid of coloured cells as one small picture: values [rows][columns] -> css colour.
function picture(svg, box, values, paint) {
  const rows = values.length, columns = values[0].length;
  const canvas = h("canvas", { width: columns, height: rows }), context = canvas.getContext("2d");
  values.forEach((row, i) => row.forEach((value, j) => { context.fillStyle = paint(value, i, j); context.fillRect(j, i, 1, 1); }));
  const width = box.right - box.left, height = box.bottom - box.top;
  const image = s("image", { x: box.left, y: box.top, width, height, preserveAspectRatio: "none", style: "image-rendering:pixelated" });
  image.setAttribute("href", canvas.toDataURL());
  svg.append(image);
  // Thin gaps between cells, where cells are large enough to have some.
  const gap = (from, to, n, draw) => { const step = (to - from) / n; if (step >= 7) for (let i = 1; i < n; i++) draw(from + i * step); };
  const lines = s("g", { stroke: ink("card"), "stroke-width": 1 });
  gap(box.left, box.right, columns, (x) => lines.append(s("line", { x1: x, x2: x, y1: box.top, y2: box.bottom })));
  gap(box.top, box.bottom, rows, (y) => lines.append(s("line", { x1: box.left, x2: box.right, y1: y, y2: y })));
  svg.append(lines);
}
function mixer(from, to) {
  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const a = rgb(from), b = rgb(to);
  return (share) => { const t = Math.max(0, Math.min(1, share)); return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t)).join(",")})`; };
}
// Three colours: below, at and above the middle.
function diverging(low, middle, high) {
  const down = mixer(middle, low), up = mixer(middle, high);
  return (t) => (t < 0 ? down(-t) : up(t));
}

// Bands between quantiles over rounds.
function fan(svg, width, height, rounds, quantiles, y) {
  if (!rounds.length) return empty(svg, width, height, "not recorded");
  const [low, high] = extent(quantiles.flat(), 0.1);
  const box = { left: 46, right: width - 10, top: 8, bottom: height - 44 }, pad = (high - low) * 0.05;
  const { X, Y } = axes(svg, box, { low: rounds[0], high: rounds[rounds.length - 1], show: String, step: wholeTicks, title: "round" }, { low: low - pad, high: high + pad, show: plain });
  const area = (a, b) => "M" + rounds.map((r, i) => `${X(r).toFixed(1)},${Y(quantiles[i][a]).toFixed(1)}`).join("L") + "L" +
    rounds.map((r, i) => `${X(r).toFixed(1)},${Y(quantiles[i][b]).toFixed(1)}`).reverse().join("L") + "Z";
  if (rounds.length === 1) {
    // A band of no width would be invisible: bars and a line instead.
    const x = (box.left + box.right) / 2, bar = (a, b, opacity) => s("rect", { x: x - 22, width: 44, y: Y(quantiles[0][b]), height: Math.max(1, Y(quantiles[0][a]) - Y(quantiles[0][b])), fill: y.colour, opacity });
    svg.append(bar(0, 4, 0.16), bar(1, 3, 0.3), s("line", { x1: x - 22, x2: x + 22, y1: Y(quantiles[0][2]), y2: Y(quantiles[0][2]), stroke: y.colour, "stroke-width": 2.2 }));
  } else svg.append(s("path", { d: area(0, 4), fill: y.colour, opacity: 0.16 }), s("path", { d: area(1, 3), fill: y.colour, opacity: 0.3 }));
  svg.append(s("path", { d: "M" + rounds.map((r, i) => `${X(r).toFixed(1)},${Y(quantiles[i][2]).toFixed(1)}`).join("L"), fill: "none", stroke: y.colour, "stroke-width": 2.2 }));
  if (y.mark !== undefined && y.mark > low - pad && y.mark < high + pad) {
    svg.append(s("line", { x1: box.left, x2: box.right, y1: Y(y.mark), y2: Y(y.mark), stroke: ink("faint"), "stroke-dasharray": "4 4" }));
  }
  hover(svg, box, (event, px) => {
    const at = nearest(rounds, rounds[0] + ((px - box.left) / (box.right - box.left)) * (rounds[rounds.length - 1] - rounds[0]));
    const names = ["5 %", "25 %", "median", "75 %", "95 %"];
    showTip(event, "round " + rounds[at], names.map((name, i) => ({ name, text: plain(quantiles[at][i]) })).reverse());
  }, { xs: rounds.map(X) });
}

// Histograms one above the other, the last round in front.
function ridges(svg, width, height, rounds, histograms, top, y) {
  if (!rounds.length) return empty(svg, width, height, "not recorded");
  const few = rounds.length <= 9 ? rounds.map((_, i) => i) : Array.from({ length: 9 }, (_, i) => Math.round((i * (rounds.length - 1)) / 8));
  const box = { left: 46, right: width - 10, top: 30, bottom: height - 44 }, bins = histograms[0].length;
  const X = (bin) => box.left + (bin / bins) * (box.right - box.left);
  const row = (box.bottom - box.top - 26) / Math.max(1, few.length - 1), peak = largest(few.flatMap((i) => histograms[i]));
  const base = (n) => box.top + 26 + n * row, tall = Math.min(56, row * 2.2 + 14);
  few.forEach((i, n) => {
    const at = histograms[i].map((count, bin) => `${X(bin + 0.5).toFixed(1)},${(base(n) - (count / peak) * tall).toFixed(1)}`);
    const y0 = base(n);
    svg.append(s("path", { d: `M${X(0)},${y0}L${at.join("L")}L${X(bins)},${y0}Z`, fill: y.colour, "fill-opacity": 0.28 + (0.4 * n) / few.length, stroke: y.colour, "stroke-width": 1.3 }));
    svg.append(text(box.left - 8, y0 + 1, rounds[i], { "text-anchor": "end" }));
  });
  svg.append(text(box.left - 8, 14, "round", { "text-anchor": "end" }));
  for (const tick of ticks(0, top, 4)) svg.append(text(X((tick / top) * bins), box.bottom + 19, plain(tick), { "text-anchor": "middle" }));
  svg.append(text((box.left + box.right) / 2, box.bottom + 37, y.title, { "text-anchor": "middle" }));
  hover(svg, box, (event, px, py) => {
    const n = Math.max(0, Math.min(few.length - 1, Math.round((py - box.top - 26) / (row || 1)))), i = few[n];
    const bin = Math.max(0, Math.min(bins - 1, Math.floor(((px - box.left) / (box.right - box.left)) * bins)));
    const total = histograms[i].reduce((a, b) => a + b, 0);
    showTip(event, "round " + rounds[i], [{ name: `${plain((bin / bins) * top)} to ${plain(((bin + 1) / bins) * top)}`, text: percent(histograms[i][bin] / total) }]);
  }, { xs: histograms[0].map((_, bin) => X(bin + 0.5)), ys: few.map((_, n) => base(n)) });
}
