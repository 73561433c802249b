// Tells the values under the pointer in the charts of plots/report.py, which are images with an area above their
// axes. The page needs no script to be read. What a record says reaches the page only as textContent.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const areas = [...document.querySelectorAll(".area")];

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

  const written = (value, digits) => value.toLocaleString("en-US", { maximumSignificantDigits: digits });

  function clear() {
    for (const made of document.querySelectorAll(".cross, .tip")) made.remove();
  }

  // Marks the row nearest to x in every chart with the same axis, and tells the values of chart `number`.
  function show(number, x) {
    clear();
    const chart = figures[number];
    const all = chart.lines.map((line) => line.x[nearest(line.x, x)]);
    if (!all.length) return;
    const row = all.reduce((best, each) => Math.abs(each - x) < Math.abs(best - x) ? each : best);
    areas.forEach((area, other) => {
      const [low, high] = figures[other].x;
      if (figures[other].x_name !== chart.x_name || row < low || row > high) return;
      element(area, "div", "cross").style.left = 100 * (row - low) / (high - low) + "%";
    });
    const tip = element(areas[number], "div", "tip");
    const tokens = chart.tokens_per_iter ? `, ${written(row * chart.tokens_per_iter, 15)} tokens` : "";
    element(tip, "b", "", `${chart.x_name} ${written(row, 15)}${tokens}`);
    for (const line of chart.lines) {
      const at = nearest(line.x, row);
      if (Math.abs(line.x[at] - row) > 0.01 * (chart.x[1] - chart.x[0])) continue;
      const told = element(tip, "div", "");
      element(told, "i", "swatch").style.borderColor = line.color;
      element(told, "span", "", line.label);
      element(told, "span", "", written(line.y[at], 6));
    }
    const left = (row - chart.x[0]) / (chart.x[1] - chart.x[0]);
    tip.style[left < 0.5 ? "left" : "right"] = 100 * (left < 0.5 ? left : 1 - left) + 2 + "%";
  }

  areas.forEach((area, number) => {
    const chart = figures[number];
    let at;
    const point = (event) => {
      const box = area.getBoundingClientRect();
      at = chart.x[0] + (event.clientX - box.left) / box.width * (chart.x[1] - chart.x[0]);
      show(number, at);
    };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    area.addEventListener("pointerleave", clear);
    area.addEventListener("blur", clear);
    area.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const x = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
      if (!step || !x.length) return;
      event.preventDefault();
      const place = at === undefined ? x.length - 1 : nearest(x, at) + step;
      at = x[Math.min(Math.max(place, 0), x.length - 1)];
      show(number, at);
    });
  });
  document.documentElement.classList.add("has_script");
})();
