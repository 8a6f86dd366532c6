// Sections about scores: summary, curves, clients, cost.
const RUNS = DATA.runs;
const everyRun = RUNS.map((_, at) => at);
const METRICS = { accuracy: "accuracy", bottom_decile: "bottom decile", loss: "loss" };
let metric = "accuracy";

function section(id, title, lead, ...content) {
  const shown = content.filter(Boolean);
  if (!shown.length) return;
  document.querySelector("main").append(h("section", { id }, h("h2", {}, title), lead ? h("p", { class: "lead" }, lead) : null, ...shown));
  document.querySelector("nav").append(h("a", { href: "#" + id }, title));
}
const grid = (...cards) => { const shown = cards.filter(Boolean); return shown.length ? h("div", { class: "grid" }, ...shown) : null; };
const draw = (spec) => chart(spec).figure;

async function toClipboard(content) {
  try { await navigator.clipboard.writeText(content); } catch {
    // Without the clipboard interface (an old browser, a page without focus): select and copy.
    const area = h("textarea", {});
    area.value = content;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
function copies(table) {
  const said = h("span", { role: "status" });
  const copy = (content, name) => async () => {
    await toClipboard(content);
    said.textContent = name + " copied";
    setTimeout(() => { said.textContent = ""; }, 2500);
  };
  const formats = [["latex", "LaTeX"], ["markdown", "Markdown"], ["csv", "CSV"]].filter(([name]) => name in table);
  if (!formats.length) return null;
  return h("div", { class: "copies" }, "Copy as", ...formats.map(([key, name]) => h("button", { class: "small", "data-copy": key, onclick: copy(table[key], name) }, name)), said);
}
function tableOf(table, keys, words) {
  const kind = words ? { class: "words" } : table.head.length > 10 ? { class: "dense" } : {};
  const head = h("tr", {}, h("th", { scope: "col" }, table.first), ...table.head.map((c) => h("th", { scope: "col", title: c.why || c.title }, c.title.replace(/ %/g, "\u00a0%"))));
  const rows = table.rows.map((row, at) => h("tr", {},
    h("td", { title: row.name }, h("div", { class: "name" }, keys ? key(at) : null, h("span", {}, row.name))),
    ...row.cells.map((cell) => h("td", cell.best ? { class: "best", title: "best" } : {}, cell.best ? h("span", {}, cell.text) : cell.text))));
  return h("div", { class: "scroll" }, h("table", kind, h("thead", {}, head), h("tbody", {}, ...rows)));
}

function unfinished() {
  const going = RUNS.filter((run) => !run.finished).map((run) => `${run.label} (${run.rounds} of ${run.planned} rounds)`);
  return going.length ? h("p", { class: "note", "data-missing": "rounds" }, `Not finished, numbers so far: ${going.join("; ")}.`) : null;
}

function seedsNote() {
  const going = DATA.seeds.unfinished;
  return h("p", { class: "note", "data-missing": "seeds" }, "The best is marked among settings with the same seeds." + (going.length ? ` Not finished, so not counted: ${going.join("; ")}.` : ""));
}
// What marks mean where not all runs can win against all others.
function leagues() {
  const known = new Set(RUNS.map((run) => run.league));
  known.delete(null);
  return known.size > 1 ? h("p", { class: "note", "data-missing": "best" }, "The best is marked among runs on the same data and of the same number of rounds.") : null;
}

// What the numbers say, in four tiles.
function tiles() {
  const able = everyRun.filter((at) => RUNS[at].league !== null);
  if (new Set(able.map((at) => RUNS[at].league)).size > 1) return null; // on other data, or in fewer rounds, nobody wins or loses
  const against = (key, at, how) => {
    const base = RUNS[at].baseline === null ? null : RUNS[RUNS[at].baseline];
    if (!base || base.summary[key] == null || base.league === null || (how !== "points" && !base.summary[key])) return "";
    return how === "points" ? `, ${points(RUNS[at].summary[key] - base.summary[key])} points to ${base.label}` : `, ${(RUNS[at].summary[key] / base.summary[key]).toFixed(2)} of ${base.label}`;
  };
  const several = able.length > 1;
  const made = [
    [several ? "Highest accuracy, last round" : "Accuracy, last round", "accuracy", percent, "points"],
    [several ? "Highest bottom decile, last round" : "Bottom decile, last round", "bottom_decile", percent, "points"],
    [several ? "Smallest upload" : "Uploaded", "bytes_up", bytes, "share"],
    [several ? "Least compute" : "Compute", "flops", (v) => scaled(v, "FLOP"), "share"],
  ];
  return grid(...made.map(([what, key_, show, how]) => {
    // Winners are those of the table, so that both say the same of a tie.
    const column = DATA.table.head.findIndex((c) => c.key === key_), known = able.filter((at) => RUNS[at].summary[key_] != null);
    const won = known.filter((at) => DATA.table.rows[at].cells[column].best), first = won.length ? won[0] : known[0];
    if (first === undefined) return null;
    const told = won.length === 1 || known.length === 1 ? RUNS[first].label + against(key_, first, how)
      : won.length ? won.map((at) => RUNS[at].label).join(" and ") : `the same for all ${known.length} runs`;
    const alone = won.length === 1 || known.length === 1;
    const who = h("div", { class: "who", title: told }, alone ? key(first) : null, h("span", {}, told));
    return h("div", { class: "card tile quarter" }, h("div", { class: "what" }, what), h("div", { class: "value" }, show(RUNS[first].summary[key_])), who);
  }));
}

function curve(name, title, key, x, size, height) {
  return draw({
    name, title, size, height, legend: () => (size ? [] : everyRun),
    tools: size ? [] : [switcher(Object.entries(METRICS), metric, (value) => { metric = value; redrawAll(); }, "what is shown")],
    draw: (svg, width, tall) => {
      const share = metric !== "loss";
      const series = RUNS.map((run, at) => ({ run: at, label: run.label, x: run.curves[key], y: run.curves[metric] }));
      lines(svg, width, tall, series, x, { show: share ? wholePercent : plain, tip: share ? percent : plain, floor: 0, ceiling: share ? 1 : Infinity, least: 0.01 });
    },
  });
}
const big = (width) => (width < 520 ? 280 : 360), small = (width) => (width < 520 ? 240 : 270);

const scored = (run) => run.clients.filter((c) => c.accuracy != null).sort((a, b) => a.accuracy - b.accuracy); // some have no test data
function sortedClients() {
  const having = everyRun.filter((at) => scored(RUNS[at]).length);
  if (!having.length) return null;
  return draw({
    name: "clients-sorted", title: "Accuracy of every client, worst first", legend: () => having, height: big,
    caption: "In the last round. Each run sorted on its own. Rings: the bottom decile, the client at the worst tenth; shaded: those below it.",
    draw: (svg, width, height) => {
      const series = having.map((at) => {
        const order = scored(RUNS[at]);
        return {
          run: at, label: RUNS[at].label, x: order.map((_, i) => i + 1), y: order.map((c) => c.accuracy),
          marks: [Math.floor(order.length / 10)], told: (i) => "client " + order[i].client,
        };
      });
      const most = largest(series.map((line) => line.x.length));
      lines(svg, width, height, series, {
        title: "clients, by accuracy", show: (v) => String(v), tip: (v) => `client ${v} of ${most} from below`, ticks: ticks(1, most, Math.min(10, most)).filter(Number.isInteger),
        before: (to, box, X) => to.append(s("rect", { x: box.left, y: box.top, width: Math.max(0, X(Math.floor(most / 10) + 1) - box.left), height: box.bottom - box.top, fill: ink("mark"), opacity: 0.1 })),
      }, { show: wholePercent, tip: percent, floor: 0, ceiling: 1.005, least: 0.02 });
    },
  });
}

function clientDifferences() {
  const others = everyRun.filter((at) => RUNS[at].baseline !== null && scored(RUNS[at]).length && scored(RUNS[RUNS[at].baseline]).length);
  if (!others.length) return null;
  let chosen = others[0], base = RUNS[RUNS[chosen].baseline];
  const pairs = () => {
    base = RUNS[RUNS[chosen].baseline];
    const order = scored(base), theirs = new Map(order.map((c) => [c.client, c.accuracy]));
    // By rank, as the rings of the chart above: clients that tie with the one at the worst tenth are not all in it.
    const worst = new Set(order.slice(0, Math.floor(order.length / 10) + 1).map((c) => c.client));
    return scored(RUNS[chosen]).filter((c) => theirs.has(c.client))
      .map((c) => ({ id: c.client, own: c.accuracy, base: theirs.get(c.client), by: c.accuracy - theirs.get(c.client), low: worst.has(c.client) }))
      .sort((a, b) => a.by - b.by || (a.id < b.id ? -1 : 1));
  };
  const item = chart({
    name: "clients-difference", title: () => `Difference to ${RUNS[RUNS[chosen].baseline].label}, client by client`, height: big,
    tools: others.length > 1 ? [chooser(others.map((at) => [String(at), RUNS[at].label]), String(chosen), (v) => { chosen = +v; item.redraw(); }, "run")] : [],
    caption: () => {
      const found = pairs(), up = found.filter((p) => p.by > 0).length, down = found.filter((p) => p.by < 0).length;
      const mean = found.reduce((a, p) => a + p.by, 0) / found.length;
      return `In the last round, ${RUNS[chosen].label} against ${base.label}: ${up} clients better, ${down} worse, ${found.length - up - down} equal; ${points(mean)} points on average over clients. ${found.filter((p) => p.low).length > 1 ? `Triangles: the client at the worst tenth of ${base.label}, and those below it.` : `Triangle: the worst client of ${base.label}.`}`;
    },
    draw: (svg, width, height) => {
      const found = pairs(), [low, high] = extent([0, ...found.map((p) => p.by)], 0.02), pad = (high - low) * 0.08;
      const step = (width - 64) / found.length, wide = largest(found.map((p) => widthOf(short(p.id), 10.5)));
      // Names stand side by side, or on their heads, or are left to the tooltip.
      const upright = wide + 4 <= step, turned = !upright && step >= 12, room = upright ? 16 : turned ? wide + 8 : 0;
      const box = { left: 54, right: width - 10, top: 8, bottom: height - 38 - room };
      const { Y } = axes(svg, box, { low: 0, high: 1, ticks: [], show: String }, { low: low - pad, high: high + pad, show: (v) => points(v).replace(/\.0$/, "") });
      const bar = Math.max(1, Math.min(26, step * 0.72));
      found.forEach((p, i) => {
        const x = box.left + (i + 0.5) * step, top = Math.min(Y(0), Y(p.by));
        svg.append(s("rect", { x: x - bar / 2, y: top, width: bar, height: Math.max(1.5, Math.abs(Y(p.by) - Y(0))), rx: Math.min(2, bar / 3), fill: p.by < 0 ? ink("c1") : p.by > 0 ? ink("c0") : ink("faint"), "data-client": p.id }));
        if (p.low) { const t = Math.max(2.5, Math.min(5, step / 2)); svg.append(s("path", { d: `M${x - t},${box.bottom + 9 + t}L${x + t},${box.bottom + 9 + t}L${x},${box.bottom + 9 - t}Z`, fill: ink("mark") })); }
        const foot = box.bottom + 18;
        if (upright) svg.append(text(x, foot + 10, short(p.id), { "text-anchor": "middle", "font-size": 10.5, "data-part": "client" }));
        if (turned) svg.append(text(0, 0, short(p.id), { transform: `translate(${x + 4},${foot}) rotate(-90)`, "text-anchor": "end", "font-size": 10.5, "data-part": "client" }));
      });
      svg.append(s("line", { x1: box.left, x2: box.right, y1: Y(0), y2: Y(0), stroke: ink("soft") }));
      svg.append(text(box.right, height - 6, "clients, by difference; points of accuracy", { "text-anchor": "end", "font-size": 11 }));
      hover(svg, { ...box, bottom: height }, (event, px) => {
        const p = found[Math.max(0, Math.min(found.length - 1, Math.floor((px - box.left) / step)))];
        showTip(event, "client " + p.id + (p.low ? " (worst tenth of " + base.label + ")" : ""), [
          { run: chosen, name: RUNS[chosen].label, text: percent(p.own) }, { run: RUNS[chosen].baseline, name: base.label, text: percent(p.base) }, { name: "difference", text: points(p.by) + " points" },
        ]);
      }, { xs: found.map((_, i) => box.left + (i + 0.5) * step) });
    },
  });
  return item.figure;
}

function costs(name, title, key, show, size, caption) {
  const having = everyRun.filter((at) => (RUNS[at].training[key] || []).some((v) => v != null));
  if (!having.length) return null;
  return draw({
    name, title, size, height: small, legend: () => having, caption,
    draw: (svg, width, height) => lines(svg, width, height, having.map((at) => ({ run: at, label: RUNS[at].label, x: RUNS[at].training.round, y: RUNS[at].training[key] })),
      { title: "round", show: String, step: wholeTicks, tip: (v) => "round " + v }, { show, least: key === "bytes_up" ? 1 : 0.05, floor: 0, low: key === "bytes_up" ? 0 : undefined }),
  });
}
