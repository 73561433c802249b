// Shows the values under the pointer in the charts of plots/report.py, and hides runs. The charts themselves
// need no script. What a record says reaches the page only as textContent.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const areas = [...document.querySelectorAll(".panel .area")];
  const hidden = new Set();

  function element(parent, tag, classes, text) {
    const made = document.createElement(tag);
    made.className = classes;
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  // the place in x, which grows, that is nearest to a value
  function nearest(x, value) {
    let low = 0, high = x.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] < value) low = middle + 1; else high = middle;
    }
    return low > 0 && value - x[low - 1] <= x[low] - value ? low - 1 : low;
  }

  // a value by the Python format of its chart, such as ",.1f"
  function written(value, format) {
    const digits = Number(format.match(/\.(\d)/)[1]);
    if (format.endsWith("e")) return value.toExponential(digits);
    if (format.endsWith("g")) return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  const count = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });

  function shownLines(panel) {
    return panel.lines.filter((line) => !hidden.has(line.run));
  }

  function place(panel, line, at) {
    const left = 100 * (line.x[at] - panel.x[0]) / (panel.x[1] - panel.x[0]);
    const top = 100 * (panel.y[1] - line.y[at]) / (panel.y[1] - panel.y[0]);
    return [left, Math.min(Math.max(top, 0), 100)];
  }

  function clear() {
    for (const made of document.querySelectorAll(".cross, .dot, .tip")) made.remove();
  }

  // Marks x in every chart with the same axis, and writes the values of the chart that is pointed at.
  function show(pointed, x) {
    clear();
    const panelPointed = figures.panels[pointed];
    const all = shownLines(panelPointed).flatMap((line) => line.x[nearest(line.x, x)]);
    if (!all.length) return;
    const snapped = all.reduce((best, each) => Math.abs(each - x) < Math.abs(best - x) ? each : best);
    areas.forEach((area, number) => {
      const panel = figures.panels[number];
      if (panel.x_name !== panelPointed.x_name) return;
      const left = 100 * (snapped - panel.x[0]) / (panel.x[1] - panel.x[0]);
      element(area, "div", "cross").style.left = left + "%";
      const tip = number === pointed ? element(area, "div", "tip") : null;
      if (tip) {
        let head = `${panel.x_name} ${count(snapped)}`;
        if (panel.tokens_per_iter) head += `, ${count(snapped * panel.tokens_per_iter)} tokens`;
        element(tip, "b", "", head);
      }
      for (const line of shownLines(panel)) {
        const at = nearest(line.x, snapped);
        if (Math.abs(line.x[at] - snapped) > 0.01 * (panel.x[1] - panel.x[0])) continue;
        const dot = element(area, "i", `dot c${line.color}`);
        [dot.style.left, dot.style.top] = place(panel, line, at).map((share) => share + "%");
        if (!tip) continue;
        const row = element(tip, "div", "");
        element(row, "i", `swatch c${line.color} ${line.style}`);
        element(row, "span", "", line.label);
        element(row, "span", "", written(line.y[at], panel.number));
      }
      if (tip) putBeside(tip, area.clientWidth * left / 100, area.clientWidth);
    });
  }

  // to the right of x, to the left where that is too narrow, and always inside the chart
  function putBeside(tip, x, width) {
    const right = x + 10, fits = right + tip.offsetWidth <= width;
    tip.style.left = Math.max(fits ? right : x - 10 - tip.offsetWidth, 0) + "px";
  }

  areas.forEach((area, number) => {
    const panel = figures.panels[number];
    let at;
    const point = (event) => {
      const box = area.getBoundingClientRect();
      at = panel.x[0] + (event.clientX - box.left) / box.width * (panel.x[1] - panel.x[0]);
      show(number, at);
    };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    area.addEventListener("pointerleave", clear);
    area.addEventListener("blur", clear);
    area.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const x = [...new Set(shownLines(panel).flatMap((line) => line.x))].sort((a, b) => a - b);
      if (!x.length) return;
      const place = at === undefined ? x.length - 1 : nearest(x, at) + step;
      at = x[Math.min(Math.max(place, 0), x.length - 1)];
      show(number, at);
    });
  });

  for (const button of document.querySelectorAll(".switch")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      const isHidden = !hidden.delete(run);
      if (isHidden) hidden.add(run);
      button.setAttribute("aria-pressed", String(!isHidden));
      for (const drawn of document.querySelectorAll(`.area .r${run}`)) drawn.style.display = isHidden ? "none" : "";
      clear();
    });
  }
  document.documentElement.classList.add("has_script");
})();
