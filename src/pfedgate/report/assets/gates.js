// Sections about gates and data: blocks, weights over rounds, the tree, the partition.
const gated = everyRun.filter((at) => RUNS[at].gates);
let shownGates = gated[0];
const G = () => RUNS[shownGates].gates;
const gateCharts = [];
// Of many clients only the first are looked at.
const firstOf = (g) => (g.looked < g.of ? `of the first ${g.looked} of ${g.of} ` : "");
const gateChart = (spec) => { const item = chart(spec); gateCharts.push(item); return item.figure; };

function gateChooser() {
  if (gated.length < 2) return null;
  const change = (value) => { shownGates = +value; layer = "all blocks"; refill(); gateCharts.forEach((item) => item.redraw()); };
  return h("p", { class: "note" }, "Run: ", chooser(gated.map((at) => [String(at), RUNS[at].label]), String(shownGates), change, "run whose gates are shown"));
}

// What a run has not got is not offered: `wished` stays for the next run that has it.
const wished = { cells: "kept", order: "client" };
const cells = () => (G()[wished.cells] ? wished.cells : "kept"), order = () => (G().tree ? wished.order : "client");
const noTree = () => G().reason || "fewer than three clients have a gate";
const missing = (name, title, why) => h("div", { class: "card", "data-missing": name }, h("h3", {}, title), h("p", { class: "note" }, why));
// Runs with the same excuse, in one sentence each.
function excuses(what, runs, whyOf) {
  const groups = new Map();
  for (const run of runs) groups.set(whyOf(run), [...(groups.get(whyOf(run)) || []), run.label]);
  return [...groups].map(([why, labels]) => `${what}${labels.length < RUNS.length ? " of " + labels.join(" and ") : ""}: not shown, because ${why}.`).join(" ");
}
function blockMap() {
  const what = switcher([["kept", "kept"], ["weights", "M"], ["importance", "G"]], wished.cells, (v) => { wished.cells = v; gateCharts[0].redraw(); }, "what cells show");
  const rank = chooser([["client", "by client"], ["tree", "by likeness"]], wished.order, (v) => { wished.order = v; gateCharts[0].redraw(); }, "order of clients");
  return gateChart({
    name: "blocks", title: "Which blocks each client keeps", tools: [what, rank],
    caption: () => {
      const g = G(), all = g.kept.length, share = g.blocks.map((_, b) => g.kept.filter((row) => row[b] === "1").length / all);
      const always = share.filter((v) => v === 1).length, never = share.filter((v) => v === 0).length;
      const lost = !g.weights ? ` M and G of single blocks${g.tree ? "" : " and the likeness of gates"} are not available: ${g.reason}.` : g.tree ? "" : ` No order by likeness: ${noTree()}.`;
      const absent = g.looked - all; // of a run that samples clients
      return `${g.blocks.length} blocks in ${g.layers.length} layers, ${all} ${firstOf(g)}clients${absent > 0 ? ` (${absent} more took part in no round and have no gate)` : ""}: ${always} blocks are kept by all, ${never} by none, ${g.blocks.length - always - never} by some. Bars: share of clients that keep a block.` +
        (cells() === "weights" ? " M, the weight of a block: blue above 1, red below; dropped blocks are pale." : cells() === "importance" ? " G, the importance that decides." : "") + lost;
    },
    height: (width) => 96 + Math.max(8, Math.min(20, 640 / G().clients.length)) * G().clients.length,
    draw: (svg, width, height) => {
      const g = G(), n = g.clients.length, blocks = g.blocks.length;
      what.allow((v) => v === "kept" || g[v], cells(), g.reason);
      rank.allow((v) => v === "client" || g.tree, order(), noTree());
      const rows = order() === "tree" ? g.tree.leaves : g.clients.map((_, i) => i);
      const box = { left: gutter(g.clients), right: width - 10, top: 64, bottom: height - 30 };
      const X = (b) => box.left + (b / blocks) * (box.right - box.left), Y = (i) => box.top + (i / n) * (box.bottom - box.top);
      const showing = cells(), values = showing === "kept" ? null : g[showing];
      const strong = mixer(ink("card"), colour(shownGates)), two = diverging(ink("c1"), ink("grid"), ink("c0")), pale = mixer(ink("card"), ink("grid"));
      const paint = (v, i, b) => {
        const on = g.kept[rows[i]][b] === "1";
        if (!values) return on ? strong(0.85) : pale(0.75);
        const colourOf = showing === "weights" ? two(Math.max(-1, Math.min(1, v - 1))) : strong(v);
        return on || showing === "importance" ? colourOf : pale(0.6);
      };
      picture(svg, box, rows.map((row) => g.blocks.map((_, b) => (values ? values[row][b] : 0))), paint);
      for (const at of g.layers) {
        const from = X(at.blocks[0]), to = X(at.blocks[at.blocks.length - 1] + 1);
        svg.append(s("line", { x1: from, x2: from, y1: 20, y2: box.bottom, stroke: ink("soft"), "stroke-width": 1 }));
        const room = Math.floor((to - from) / 6.6);
        if (room > 2) svg.append(text(from + 4, 12, at.name.length > room ? at.name.slice(0, room - 1) + "…" : at.name, { "font-size": 11 }));
      }
      for (let b = 0; b < blocks; b++) {
        const share = g.kept.filter((row) => row[b] === "1").length / n, tall = share * 34;
        svg.append(s("rect", { x: X(b) + 0.5, y: 58 - tall, width: Math.max(0.5, X(b + 1) - X(b) - 1), height: tall, fill: ink("faint"), opacity: 0.55 }));
      }
      const each = (box.bottom - box.top) / n, skip = Math.ceil(11 / each);
      rows.forEach((row, i) => { if (i % skip === 0) svg.append(text(box.left - 8, Y(i + 0.5) + 4, short(g.clients[row]), { "text-anchor": "end", "font-size": 11 })); });
      svg.append(text((box.left + box.right) / 2, height - 10, "blocks of the model", { "text-anchor": "middle" }));
      hover(svg, { ...box, top: 20 }, (event, px, py) => {
        const b = Math.max(0, Math.min(blocks - 1, Math.floor(((px - box.left) / (box.right - box.left)) * blocks)));
        const share = g.kept.filter((row) => row[b] === "1").length / n;
        if (py < box.top) return showTip(event, g.blocks[b], [{ name: "kept by", text: wholePercent(share) + " of clients" }]);
        const row = rows[Math.max(0, Math.min(n - 1, Math.floor(((py - box.top) / (box.bottom - box.top)) * n)))];
        const told = [{ name: g.blocks[b], text: g.kept[row][b] === "1" ? "kept" : "dropped" }];
        if (g.weights) told.push({ name: "weight M", text: plain(g.weights[row][b]) }, { name: "importance G", text: plain(g.importance[row][b]) });
        if (g.density) told.push({ name: "density of the client", text: plain(g.density[row]) });
        showTip(event, "client " + g.clients[row], told);
      }, { xs: g.blocks.map((_, b) => X(b + 0.5)), ys: rows.map((_, i) => Y(i + 0.5)) });
    },
  });
}

let layer = "all blocks", view = "quantiles", refill = () => {};
function overRounds() {
  const names = () => Object.keys(G().over_rounds).map((name) => [name, name]);
  const pick = chooser(names(), layer, (v) => { layer = v; both(); }, "layer");
  refill = () => { pick.replaceChildren(...names().map(([value, t]) => h("option", { value }, t))); };
  const both = () => gateCharts.filter((item) => item.spec.name.startsWith("gate-")).forEach((item) => item.redraw());
  const part = (path, title, tools, extra) => gateChart({
    name: "gate-" + path, title, size: "half", tools, height: (w) => (w < 520 ? 270 : 310),
    caption: () => `Over ${G().looked < G().of ? `the first ${G().looked} of ${G().of} ` : ""}clients and blocks${view === "quantiles" ? ": median, 25 to 75 %, 5 to 95 %" : ", at a few evaluated rounds"}.`,
    draw: (svg, width, height) => {
      const g = G(), found = (g.over_rounds[layer] || {})[path];
      if (!found) return empty(svg, width, height, "no gates.jsonl in this run");
      if (view === "quantiles") fan(svg, width, height, g.rounds, found.quantiles, extra);
      else ridges(svg, width, height, g.rounds, found.histogram, found.top, extra);
    },
  });
  const how = switcher([["quantiles", "quantiles"], ["histograms", "histograms"]], view, (v) => { view = v; both(); }, "how values are shown");
  return [
    part("M", "Gate weights M over rounds", [pick], { get colour() { return colour(shownGates); }, mark: 1, title: "M" }),
    part("G", "Importances G over rounds", [how], { get colour() { return ink("c3"); }, title: "G" }),
  ];
}

function maskChanges() {
  if (!gated.some((at) => RUNS[at].gates.changes.length)) return null;
  return draw({
    name: "changes", title: "How different masks are", height: small, legend: () => gated,
    caption: "Thick: share of blocks on which two clients disagree. Thin: share that changed for a client since the evaluation before.",
    draw: (svg, width, height) => lines(svg, width, height, gated.flatMap((at) => {
      const c = RUNS[at].gates.changes, x = c.map((p) => p.round), base = { run: at, x };
      return [{ ...base, label: RUNS[at].label + ", between clients", y: c.map((p) => p.between) }, { ...base, label: RUNS[at].label + ", since before", y: c.map((p) => p.moved), thin: true }];
    }), { title: "round", show: String, step: wholeTicks, tip: (v) => "round " + v }, { show: wholePercent, floor: 0, least: 0.02 }),
  });
}

// Shares of classes of each client of a run, or null.
function labelsOf(run) {
  const partition = run.partition === null ? null : DATA.partitions[run.partition];
  if (!partition) return null;
  const at = new Map(partition.clients.map((client, i) => [client, i]));
  return { classes: partition.classes, of: (client) => (at.has(client) ? partition.counts[at.get(client)] : null) };
}
function dendrogram() {
  const title = "Which gates are alike, and the classes their clients hold";
  if (!gated.some((at) => RUNS[at].gates.tree)) return missing("tree", title, excuses("The tree of gates", gated.map((at) => RUNS[at]), (run) => run.gates.reason || "fewer than three clients have a gate"));
  return gateChart({
    name: "tree", title,
    caption: () => {
      if (!G().tree) return `The tree of gates of ${RUNS[shownGates].label}: not shown, because ${noTree()}.`;
      const beside = labelsOf(RUNS[shownGates]) ? "; beside each client its classes, darker where it has more samples" : "";
      return `Ward's clustering of the gates' parameters${beside}. ` + (G().from_labels
        ? "In this run every gate started from its client's class frequencies (algorithm.start = \"labels\"), so that clients with similar classes are close from the start: the tree shows mixes of labels largely by construction. A run with start = \"random\" leaves that out."
        : "Only the parameters are compared, not the classes.");
    },
    height: (width) => !G().tree ? 60 : 70 + Math.max(8, Math.min(20, 900 / G().clients.length)) * G().clients.length,
    draw: (svg, width, height) => {
      const g = G();
      if (!g.tree) return empty(svg, width, height, "no tree for this run");
      const n = g.clients.length, labels = labelsOf(RUNS[shownGates]), strip = labels ? Math.min(width * 0.5, labels.classes.length * 30) : 0;
      const box = { left: 8, right: width - strip - gutter(g.clients) - 4, top: 30, bottom: height - 34 }, top = largest(g.tree.height.flat()) || 1;
      const X = (v) => box.right - (v / top) * (box.right - box.left), Y = (i) => box.top + ((i + 0.5) / n) * (box.bottom - box.top);
      g.tree.across.forEach((a, k) => {
        const hgt = g.tree.height[k], d = a.map((v, i) => `${i ? "L" : "M"}${X(hgt[i]).toFixed(1)},${Y(v).toFixed(1)}`).join("");
        svg.append(s("path", { d, fill: "none", stroke: colour(shownGates), "stroke-width": 1.5, "stroke-linejoin": "round" }));
      });
      for (const tick of ticks(0, top, Math.max(2, (box.right - box.left) / 110))) {
        svg.append(s("line", { x1: X(tick), x2: X(tick), y1: box.bottom + 2, y2: box.bottom + 7, stroke: ink("faint") }), text(X(tick), box.bottom + 20, plain(tick), { "text-anchor": "middle", "font-size": 11 }));
      }
      svg.append(text(box.left, 14, "distance between gates"));
      const each = (box.bottom - box.top) / n, skip = Math.ceil(11 / each);
      g.tree.leaves.forEach((leaf, i) => { if (i % skip === 0) svg.append(text(box.right + 8, Y(i) + 4, short(g.clients[leaf]), { "font-size": 11 })); });
      if (!labels) return;
      const cellsBox = { left: width - strip - 4, right: width - 4, top: box.top, bottom: box.bottom }, shade = mixer(ink("grid"), ink("c2"));
      const counts = g.tree.leaves.map((leaf) => labels.of(g.clients[leaf]) || labels.classes.map(() => 0));
      const shares = counts.map((row) => { const most = Math.max(...row, 1); return row.map((v) => v / most); });
      picture(svg, cellsBox, shares, (v) => (v ? shade(0.15 + 0.85 * v) : shade(0)));
      const wide = strip / labels.classes.length, each2 = Math.ceil(20 / wide);
      svg.append(text(cellsBox.left, 14, "classes"));
      labels.classes.forEach((name, c) => { if (c % each2 === 0) svg.append(text(cellsBox.left + (c + 0.5) * wide, box.bottom + 18, name.length > 5 ? name.slice(0, 4) + "…" : name, { "text-anchor": "middle", "font-size": 11 })); });
      hover(svg, { ...box, right: width - 4 }, (event, px, py) => {
        const i = Math.max(0, Math.min(n - 1, Math.floor(((py - box.top) / (box.bottom - box.top)) * n))), row = counts[i];
        const most = row.map((count, c) => [count, labels.classes[c]]).filter(([count]) => count).sort((a, b) => b[0] - a[0]).slice(0, 6);
        showTip(event, "client " + g.clients[g.tree.leaves[i]], most.map(([count, name]) => ({ name: "class " + name, text: count + " samples" })));
      }, { ys: g.clients.map((_, i) => Y(i)) });
    },
  });
}

function partitionChart(p, at) {
  const n = p.clients.length, classes = p.classes.length, bubbles = n <= 40 && classes <= 20;
  const more = p.all_clients > n ? ` The first ${n} of ${p.all_clients} clients.` : "";
  const own = DATA.partitions.length > 1 ? "Runs " + RUNS.filter((run) => run.partition === at).map((run) => run.label).join("; ") + ". " : "";
  return draw({
    name: "partition-" + at, title: `${p.name}: samples of each client by class`,
    caption: own + `${p.how}${p.alpha ? ", α = " + p.alpha : ""}.` + (bubbles ? " Areas: numbers of samples." : " Darker: a larger share of the client's samples.") + (p.novel.some(Boolean) ? " The second colour: novel clients, held out of training." : "") + more,
    height: (width) => 74 + Math.max(9, Math.min(26, 620 / classes)) * classes,
    draw: (svg, width, height) => {
      const box = { left: gutter(p.classes), right: width - 10, top: 8, bottom: height - 44 };
      const dx = (box.right - box.left) / n, dy = (box.bottom - box.top) / classes, peak = largest(p.counts.flat());
      const totals = p.counts.map((row) => row.reduce((a, b) => a + b, 0));
      if (bubbles) {
        for (let c = 0; c < classes; c++) svg.append(s("line", { x1: box.left, x2: box.right, y1: box.top + (c + 0.5) * dy, y2: box.top + (c + 0.5) * dy, stroke: ink("grid") }));
        p.counts.forEach((row, i) => row.forEach((count, c) => {
          if (count) svg.append(s("circle", { cx: box.left + (i + 0.5) * dx, cy: box.top + (c + 0.5) * dy, r: Math.max(1, Math.sqrt(count / peak) * Math.min(dx * 0.62, dy * 0.62, 15)), fill: p.novel[i] ? ink("c1") : ink("c0"), opacity: 0.78 }));
        }));
      } else {
        const trained = mixer(ink("card"), ink("c0")), held = mixer(ink("card"), ink("c1"));
        const shares = p.classes.map((_, c) => p.counts.map((row, i) => row[c] / (totals[i] || 1)));
        picture(svg, box, shares, (v, c, i) => (p.novel[i] ? held : trained)(Math.sqrt(v)));
      }
      const skipX = Math.ceil((10 + 6.2 * largest(p.clients.map((name) => short(name).length))) / dx), skipY = Math.ceil(12 / dy);
      p.clients.forEach((name, i) => { if (i % skipX === 0) svg.append(text(box.left + (i + 0.5) * dx, box.bottom + 16, short(name), { "text-anchor": "middle", "font-size": 11 })); });
      p.classes.forEach((name, c) => { if (c % skipY === 0) svg.append(text(box.left - 8, box.top + (c + 0.5) * dy + 4, short(name), { "text-anchor": "end", "font-size": 11 })); });
      svg.append(text((box.left + box.right) / 2, height - 8, "client", { "text-anchor": "middle" }));
      hover(svg, box, (event, px, py) => {
        const i = Math.max(0, Math.min(n - 1, Math.floor((px - box.left) / dx))), c = Math.max(0, Math.min(classes - 1, Math.floor((py - box.top) / dy)));
        showTip(event, "client " + p.clients[i] + (p.novel[i] ? ", novel" : ""), [{ name: "class " + p.classes[c], text: `${p.counts[i][c]} of ${totals[i]} samples` }]);
      }, { xs: p.clients.map((_, i) => box.left + (i + 0.5) * dx), ys: p.classes.map((_, c) => box.top + (c + 0.5) * dy) });
    },
  });
}
