// The page, from top to bottom.
function configs() {
  const boxes = RUNS.map((run) => {
    const where = run.environment[run.environment.length - 1];
    const facts = [["folder", run.path]];
    if (where) facts.push(["started", run.environment[0].started], ["command", where.command.join(" ")], ["pfedgate", where.pfedgate + (where.commit ? ", " + where.commit.slice(0, 12) : "")],
      ["Python", where.python + ", " + Object.entries(where.packages).map((p) => p.join(" ")).join(", ")],
      ["machine", `${where.machine.cpu}, ${where.machine.cores} cores, ${bytes(where.machine.memory_bytes || 0)}` + (where.machine.accelerators.length ? ", " + where.machine.accelerators.join(", ") : "")]);
    const told = h("table", { class: "words" }, h("tbody", {}, ...facts.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", { style: "white-space:normal" }, value)))));
    const copy = h("button", { class: "small", onclick: () => toClipboard(run.config) }, "Copy");
    return h("details", {}, h("summary", {}, run.label + (run.finished ? "" : ` (so far: ${run.rounds} of ${run.planned} rounds)`)), h("div", { class: "scroll" }, told), h("pre", {}, run.config), h("p", {}, copy));
  });
  return h("div", { class: "card" }, ...boxes);
}

function page() {
  document.body.append(tip);
  const theme = document.querySelector(".theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = (name) => { document.documentElement.dataset.theme = name; theme.textContent = name === "dark" ? "Light" : "Dark"; redrawAll(); };
  theme.addEventListener("click", () => apply(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => apply(dark.matches ? "dark" : "light"));
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  theme.textContent = dark.matches ? "Light" : "Dark";

  section("summary", "Summary", null, tiles(),
    h("div", { class: "card", style: "margin-top:16px" }, tableOf(DATA.table, true), unfinished(), leagues(), copies(DATA.table)),
    DATA.seeds.rows ? h("div", { class: "card", style: "margin-top:16px" }, h("h3", {}, "Over seeds: mean ± standard deviation"), tableOf(DATA.seeds), seedsNote(), copies(DATA.seeds)) : null,
    DATA.left_out ? h("p", { class: "note", "data-missing": "size" }, `Left out to keep this file small: ${DATA.left_out.join("; ")}. The folders of the runs have it all.`) : null);
  section("learning", "Learning", "Accuracy of each client's own model on its test data, after the broadcast, weighted by test samples.", grid(
    curve("accuracy-rounds", "Over rounds", "round", { title: "round", show: String, step: wholeTicks, tip: (v) => "round " + v }, "", big),
    curve("accuracy-bytes", "Over bytes sent and received", "bytes", { title: "all clients, both ways", show: bytes, tip: bytes, low: 0 }, "half", small),
    curve("accuracy-seconds", "Over time", "seconds", { title: "time of training", show: clock, tip: clock, low: 0, step: timeTicks }, "half", small)));
  section("clients", "Clients", "A good mean can hide clients that are served badly: every client counts once here.", grid(sortedClients(), clientDifferences()),
    DATA.clients.rows ? h("details", { style: "margin-top:8px" }, h("summary", {}, "All clients as a table"), h("div", { class: "card", style: "margin-top:12px" }, tableOf(DATA.clients), copies(DATA.clients))) : null);
  section("cost", "Cost", "What clients compute with and send.", grid(
    costs("density", "Density: share of the model in use", "density", plain, "half", "In training, mean over the clients of a round."),
    costs("q", "q: share of the model sent back", "q", plain, "half", "A block is sent if it was live in at least one step of the round."),
    costs("uploaded", "Uploaded in each round", "bytes_up", bytes, "", "")));
  const ungated = RUNS.filter((run) => run.no_gates);
  if (gated.length || ungated.length) {
    const lost = ungated.length ? h("p", { class: "note", "data-missing": "gates" }, excuses("Gates", ungated, (run) => run.no_gates)) : null;
    section("gates", "Gates", "A private gate looks at a client's data, weighs every block of the shared model (M) and keeps the most important ones (G) that fit the budget.",
      lost, gated.length ? gateChooser() : null, gated.length ? grid(blockMap(), ...overRounds(), maskChanges(), dendrogram()) : null);
  }
  const unknown = RUNS.filter((run) => run.partition === null && run.no_partition);
  section("data", "Data", null,
    unknown.length ? h("p", { class: "note", "data-missing": "data" }, excuses("Samples by client and class", unknown, (run) => run.no_partition)) : null,
    grid(...DATA.partitions.map(partitionChart)));
  section("settings", "Settings", "Enough to run it again.",
    DATA.differences.rows ? h("div", { class: "card", style: "margin-bottom:16px" }, h("h3", {}, "Where the runs differ"), tableOf(DATA.differences, false, true), copies(DATA.differences)) : null, configs());
  redrawAll();
  document.documentElement.dataset.ready = "true";
}
page();
