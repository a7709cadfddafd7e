"use strict";
/* The table of numbers: sorted by a column, filtered by words; and the download of the data. */

const table = document.getElementById("figures");
const lines = [...table.tBodies[0].rows];

function sortBy(head) {
  const column = head.cellIndex;
  const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
  const value = (line) => {
    const cell = line.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const isNumeric = lines.some((line) => line.cells[column].dataset.value !== undefined);
  lines.sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (!isNumeric) return way * a.localeCompare(b);
    // Cells without a number come last in both directions.
    if (typeof a !== "number" || typeof b !== "number") return (typeof b === "number") - (typeof a === "number");
    return way * (a - b);
  });
  table.tBodies[0].append(...lines);
}

function filter() {
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const line of lines) {
    const text = [...line.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
    line.hidden = !words.every((word) => text.includes(word));
    count += !line.hidden;
  }
  document.getElementById("count").textContent = `${count} of ${lines.length} rows`;
}

for (const head of table.tHead.rows[0].cells) head.addEventListener("click", () => sortBy(head));
document.querySelector(".filters").addEventListener("input", filter);
filter();

document.getElementById("download").addEventListener("click", () => {
  const data = JSON.parse(document.getElementById("run").textContent);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
  link.download = "unisono-bench.json";
  link.click();
});
