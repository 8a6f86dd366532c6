"use strict";
// Draws the cards' specifications with Vega, and answers choices, legends, themes, fingers and keys.
const PAGE = JSON.parse(document.getElementById("content").textContent);
const root = document.documentElement;
const items = [], chosen = {}, hidden = new Set(); // cards; values by the name of a choice; runs switched off in all charts

function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) name.startsWith("on") ? node.addEventListener(name.slice(2), value) : node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const keyOf = (run) => document.querySelectorAll("#summary tbody .key")[PAGE.runs.indexOf(run)].cloneNode(true);

// A specification with its rows from the pool. Buttons of the page stand for the legend of runs, except in saved pictures.
function resolve(part, legends) {
  if (Array.isArray(part)) return part.map((one) => resolve(one, legends));
  if (!part || typeof part !== "object") return part;
  if ("$" in part) return resolve(PAGE.pool[part.$], legends);
  const whole = Object.fromEntries(Object.entries(part).map(([name, value]) => [name, resolve(value, legends)]));
  return part.field === "run" && !legends ? { ...whole, legend: null } : whole;
}
const embed = (node, spec, config) => vegaEmbed(node, spec, { mode: "vega-lite", actions: false, ast: true, logLevel: 1, tooltip: showTip, config: { ...PAGE.configs[root.dataset.theme], ...config }, ...(spec.usermeta || {}).embedOptions });

// The view of what is chosen; where there is none, the one that agrees with the first choices.
const matches = (card, view, last) => card.choices.slice(0, last).every((name, at) => !(name in chosen) || chosen[name] === view.choice[at]);
function current(card) {
  for (let last = card.choices.length; last >= 0; last--) {
    const view = card.views.find((one) => matches(card, one, last));
    if (view) return view;
  }
}
function choose(name, value) {
  chosen[name] = value;
  return Promise.all(items.filter((item) => item.card.choices.includes(name)).map(draw));
}
function tools(item, view) {
  item.tools.replaceChildren(...item.card.choices.flatMap((name, at) => {
    const options = [...new Set(item.card.views.map((one) => one.choice[at]))];
    const first = items.find((one) => one.card.choices.includes(name)) === item; // one control for all cards
    if (options.length < 2 || !first) return [];
    const possible = (value) => item.card.views.some((one) => one.choice[at] === value && one.choice.slice(0, at).every((other, n) => other === view.choice[n]));
    const look = (value) => ({ "data-value": value, ...(possible(value) ? {} : { disabled: "", title: "Not available for this run" }) });
    if (options.length > 3 || name.includes("run")) {
      const box = h("select", { "aria-label": name, onchange: () => choose(name, box.value) }, ...options.map((value) => h("option", { value, ...look(value) }, value)));
      box.value = view.choice[at];
      return [box];
    }
    return [h("span", { class: "switch", role: "group", "aria-label": name }, ...options.map((value) => h("button", { type: "button", "aria-pressed": value === view.choice[at], ...look(value), onclick: () => choose(name, value) }, value)))];
  }));
}

async function draw(item) {
  const view = current(item.card), spec = resolve(view.spec), focused = item.tools.contains(document.activeElement) && document.activeElement.dataset.value;
  item.shown = view;
  item.title.textContent = view.title || item.card.title;
  item.caption.textContent = view.caption;
  item.caption.hidden = !view.caption;
  tools(item, view);
  if (focused) [...item.tools.querySelectorAll("button")].find((one) => one.dataset.value === focused)?.focus();
  if (item.vega) item.vega.finalize();
  item.vega = (await embed(item.plot, spec, {})).view;
  item.toggles = (spec.params || []).some((one) => one.name === "hidden");
  if (item.toggles) item.vega.signal("hidden", [...hidden]);
  const runs = item.toggles ? [...new Set(spec.data.values.map((row) => row.run))] : [];
  item.legend.replaceChildren(...(PAGE.runs.length > 1 ? runs : []).map((run) => h("button", { type: "button", title: "Show or hide", "data-run": run, "aria-pressed": !hidden.has(run), onclick: () => toggle(run) }, keyOf(run), run)));
  item.plot.setAttribute("aria-label", `${item.title.textContent}: arrow keys go from value to value`);
  item.width = 0;
  await fit(item);
  item.figure.dataset.drawn = "true";
}
function toggle(run) {
  if (!hidden.delete(run)) hidden.add(run);
  for (const item of items.filter((one) => one.toggles)) item.vega.signal("hidden", [...hidden]).runAsync();
  for (const button of document.querySelectorAll(".legend button")) button.setAttribute("aria-pressed", !hidden.has(button.dataset.run));
}

// Plots take the width that axes leave of the card. Axes are measured: a title wider than a plot only seems to need room.
async function fit(item) {
  const room = item.plot.clientWidth;
  if (!item.vega || !room || room === item.width) return;
  item.width = room;
  for (let pass = 0, axes = Infinity; pass < 2; pass++) {
    const signals = item.vega.getState({ signals: (name) => /(^|_)width$/.test(name), data: () => false }).signals;
    const names = Object.keys(signals), parts = names.length > 1 ? names.filter((name) => name !== "width") : names;
    const plots = parts.reduce((sum, name) => sum + signals[name], 0);
    axes = Math.min(axes, item.plot.querySelector("svg, canvas").getBoundingClientRect().width - plots);
    for (const name of parts) item.vega.signal(name, Math.max(8, Math.floor(signals[name] * (room - axes) / plots)));
    await item.vega.resize().runAsync();
  }
}

// Tooltips: rows of text, never HTML. A finger leaves by lifting, and its tooltip stays until a tap elsewhere or scrolling.
const tip = h("div", { id: "tip", role: "status" }), hideTip = () => tip.classList.remove("on");
function showTip(handler, event, item, value) {
  if (!value || typeof value !== "object") return event && event.pointerType === "touch" ? undefined : hideTip();
  const shown = Object.entries(value).filter(([, part]) => part !== null && part !== undefined && !Number.isNaN(part));
  tip.replaceChildren(...shown.map(([name, part]) => {
    const run = PAGE.runs.find((one) => name === one || name.startsWith(one + ", "));
    return h("div", { class: "row" }, run === undefined ? "" : keyOf(run), h("span", {}, name), h("b", {}, typeof part === "number" ? String(+part.toPrecision(4)).replace("-", "−") : String(part)));
  }));
  tip.classList.add("on");
  const box = tip.getBoundingClientRect(), beside = (at, length, most) => Math.max(6, at + 14 + length > most - 6 ? at - length - 14 : at + 14);
  tip.style.left = beside(event.clientX, box.width, innerWidth) + "px";
  tip.style.top = beside(event.clientY, box.height, innerHeight) + "px";
}
addEventListener("scroll", hideTip, { passive: true, capture: true });
addEventListener("pointerdown", (event) => { if (!event.target.closest(".plot")) hideTip(); });

// Arrow keys move a pointer that is not seen over the plot, in steps of its width and height; a tap moves it, too.
function pointTo(item, clientX, clientY) {
  (document.elementFromPoint(clientX, clientY) || item.plot).dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, bubbles: true }));
}
function answer(item) {
  let at = [-1, 0.5];
  item.plot.addEventListener("pointerdown", (event) => pointTo(item, event.clientX, event.clientY));
  item.plot.addEventListener("blur", hideTip);
  item.plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-99, 0], End: [99, 0] }[event.key];
    if (!by) return;
    event.preventDefault();
    const box = item.plot.querySelector(".role-frame .background, canvas").getBoundingClientRect();
    at = at[0] < 0 ? [by[0] === -1 || by[0] > 1 ? 1 : 0, 0.5] : at.map((share, axis) => Math.max(0, Math.min(1, share + by[axis] / 50)));
    pointTo(item, box.left + 1 + at[0] * (box.width - 2), box.top + 1 + at[1] * (box.height - 2));
  });
}

async function save(item) {
  const spec = { title: item.title.textContent, padding: 16, ...resolve(item.shown.spec, true) };
  const { view } = await embed(h("div", {}), spec, { background: getComputedStyle(item.figure).backgroundColor });
  const link = h("a", { download: item.card.name + ".svg", href: URL.createObjectURL(new Blob([await view.toSVG()], { type: "image/svg+xml" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
async function copy(button) {
  const content = button.dataset.table ? PAGE.copies[button.dataset.table][button.dataset.copy] : button.closest("details").querySelector("pre").textContent;
  try { await navigator.clipboard.writeText(content); } catch {
    // Without the clipboard interface (an old browser, a page without focus): select and copy.
    const area = h("textarea", {});
    area.value = content;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const status = button.parentNode.querySelector("[role=status]");
  if (status) status.textContent = button.textContent + " copied";
  setTimeout(() => { if (status) status.textContent = ""; }, 2500);
}

async function page() {
  document.body.append(tip);
  const theme = document.querySelector(".theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = (name) => { root.dataset.theme = name; theme.textContent = name === "dark" ? "Light" : "Dark"; return Promise.all(items.map(draw)); };
  for (const card of PAGE.cards) {
    const figure = document.querySelector(`[data-chart="${card.name}"]`), part = (name) => figure.querySelector(name);
    const item = { card, figure, title: part("h3"), tools: part(".tools"), legend: part(".legend"), plot: part(".plot"), caption: part("figcaption") };
    for (const [name, value] of [["tabindex", 0], ["role", "application"]]) item.plot.setAttribute(name, value);
    part(".save").addEventListener("click", () => save(item));
    answer(item);
    items.push(item);
  }
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
  theme.addEventListener("click", () => apply(root.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => apply(dark.matches ? "dark" : "light"));
  await apply(dark.matches ? "dark" : "light");
  for (const item of items) new ResizeObserver(() => fit(item)).observe(item.plot);
  root.dataset.ready = "true";
}
page();
