"use strict";
// A click on a column's title, or Enter on it, sorts by that column; another turns the order round.
const sortBy = (title) => {
  const table = title.closest("table");
  const opposite = { ascending: "descending", descending: "ascending" };
  const order = opposite[title.getAttribute("aria-sort")] || title.dataset.first;
  const sign = order === "ascending" ? 1 : -1;
  const value = (row) => row.cells[title.cellIndex].dataset.value;
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    const difference = Number(x) - Number(y);
    return sign * (Number.isNaN(difference) ? x.localeCompare(y) : difference);
  };
  for (const other of title.parentElement.cells) other.removeAttribute("aria-sort");
  title.setAttribute("aria-sort", order);
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
};
// A click on a line of a legend, or Enter on it, hides that line in all figures, or shows it again.
const hideOrShow = (button) => {
  const shown = button.getAttribute("aria-pressed") === "false";
  for (const one of document.querySelectorAll(`button[data-line="${button.dataset.line}"]`))
    one.setAttribute("aria-pressed", shown);
  for (const line of document.querySelectorAll(`svg.figure .${button.dataset.line}`))
    line.style.display = shown ? "" : "none";
};
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const title = button.closest("table.sortable thead th");
  if (title) sortBy(title);
  if (button.dataset.line) hideOrShow(button);
});
