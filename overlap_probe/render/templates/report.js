// Sorts and filters the table of collectives; without it the table is complete, in order of rank and time.
// Row i of the table is data.rows[i], column j of it data.columns[j]: values to compare, not texts to show.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const table = document.getElementById("table"), body = table.tBodies[0], form = document.getElementById("filters");
  if (!data.rows.length) return;
  const rows = data.rows.map((values, i) => ({ values, row: body.rows[i], text: body.rows[i].textContent.toLowerCase() }));

  const label = (text, control) => {
    const element = document.createElement("label");
    element.append(text, control);
    form.append(element);
    return control;
  };
  const choices = data.filters.map((name) => {
    const column = data.columns.indexOf(name), select = document.createElement("select");
    const values = [...new Set(rows.map((r) => String(r.values[column])))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    select.append(new Option("all"), ...values.map((v) => new Option(v || "none", v)));
    return { column, select: label(name, select) };
  });
  const search = document.createElement("input");
  search.type = "search";
  label("contains", search);
  const shown = document.createElement("output");
  shown.className = "quiet";
  form.append(shown);

  const filter = () => {
    const words = search.value.toLowerCase();
    let count = 0;
    for (const { values, row, text } of rows) {
      row.hidden = !text.includes(words)
        || choices.some(({ column, select }) => select.selectedIndex > 0 && select.value !== String(values[column]));
      count += !row.hidden;
    }
    shown.textContent = `${count} of ${rows.length}`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
  form.hidden = false;

  const compare = (a, b) => typeof a === "number" && typeof b === "number"
    ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => {
      const descending = cell.getAttribute("aria-sort") === "ascending", sign = descending ? -1 : 1;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      // What is absent comes last in both directions.
      const order = [...rows].sort(({ values: { [column]: a } }, { values: { [column]: b } }) =>
        (a === null) - (b === null) || (a === null ? 0 : sign * compare(a, b)));
      body.append(...order.map((r) => r.row));
    });
  });
})();
