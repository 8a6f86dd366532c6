// Columns of numbers sort on a click, or on Enter: the first time the largest comes first.
function number(text) {
  const found = text.replace(/\s/g, "").replace("−", "-").match(/^[^\d.-]*(-?(?:\d[\d,]*)?\.?\d+)([kMGT]?)/);
  return found ? Number(found[1].replaceAll(",", "")) * { "": 1, k: 1e3, M: 1e6, G: 1e9, T: 1e12 }[found[2]] : NaN;
}

function sortable(table) {
  const body = table.tBodies[0];
  if (!body || body.rows.length < 5 || !table.tHead) return;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => {
    const values = [...body.rows].map((row) => number(row.cells[at]?.textContent ?? ""));
    if (values.filter((value) => !Number.isNaN(value)).length < body.rows.length / 2) return;
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
