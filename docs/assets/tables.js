// Columns of numbers sort on a click, or on Enter: the first time the largest comes first.
function number(text) {
  const found = text.replace(/\s/g, "").replace("−", "-").match(/^[<≤≈~+]*(-?(?:\d[\d,]*)?\.?\d+)([kMGT]?)/);
  return found ? Number(found[1].replaceAll(",", "")) * { "": 1, k: 1e3, M: 1e6, G: 1e9, T: 1e12 }[found[2]] : NaN;
}

function sortable(table) {
  const body = table.tBodies[0];
  if (!body || body.rows.length < 3 || !table.tHead) return;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => {
    const values = [...body.rows].map((row) => number(row.cells[at]?.textContent ?? ""));
    if (at === 0 || values.filter((value) => !Number.isNaN(value)).length < body.rows.length / 2) return;
    [...body.rows].forEach((row) => row.cells[at]?.classList.add("number"));
    head.classList.add("sorts");
    head.tabIndex = 0;
    const sort = () => {
      const up = head.getAttribute("aria-sort") === "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => number(row.cells[at].textContent);
      const last = (value) => (Number.isNaN(value) ? -Infinity : up ? -value : value); // without a number: at the end
      body.append(...[...body.rows].sort((a, b) => last(key(b)) - last(key(a))));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
}

document.querySelectorAll(".md-typeset table:not([class])").forEach(sortable);

// Of a wide table the first columns are shown; a button unfolds the others.
const SHOWN = 6;

function foldable(table) {
  const columns = table.tHead?.rows[0].cells.length ?? 0;
  if (columns < SHOWN + 2) return;
  const button = document.createElement("button");
  button.className = "md-button fold";
  button.type = "button";
  const fold = (folded) => {
    for (const row of table.rows) [...row.cells].slice(SHOWN).forEach((cell) => (cell.hidden = folded));
    button.setAttribute("aria-expanded", String(!folded));
    button.textContent = folded ? `${columns - SHOWN} more columns` : "Fewer columns";
  };
  button.addEventListener("click", () => fold(button.getAttribute("aria-expanded") === "true"));
  fold(true);
  (table.closest(".md-typeset__scrollwrap") ?? table).before(button);
}

document.querySelectorAll(".md-typeset table:not([class])").forEach(foldable);
