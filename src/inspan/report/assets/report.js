"use strict";
// Moving over a chart shows the values of the nearest update in its legend.
for (const figure of document.querySelectorAll("[data-chart]")) {
  const { x, lines } = JSON.parse(figure.dataset.chart);
  const svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const labels = [...figure.querySelectorAll(".key b")];
  const last = labels.map((label) => label.textContent);
  const caption = figure.querySelector("figcaption");
  const title = caption.textContent;
  const [left, right] = [Number(figure.dataset.left), Number(figure.dataset.right)];
  const span = x[x.length - 1] - x[0] || 1;
  const show = (v) => (v === null ? "–" : Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(3)));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const wanted = x[0] + ((at - left) / (right - left)) * span;
    let near = 0;
    for (let i = 1; i < x.length; i++) if (Math.abs(x[i] - wanted) < Math.abs(x[near] - wanted)) near = i;
    const place = x.length > 1 ? left + ((x[near] - x[0]) / span) * (right - left) : (left + right) / 2;
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.style.visibility = "visible";
    labels.forEach((label, i) => (label.textContent = show(lines[i][near])));
    caption.textContent = `${title}, update ${x[near]}`;
  });
  svg.addEventListener("pointerleave", () => {
    cursor.style.visibility = "hidden";
    labels.forEach((label, i) => (label.textContent = last[i]));
    caption.textContent = title;
  });
}
