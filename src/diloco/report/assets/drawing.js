"use strict";
// How every page draws: plotly in the colours of the page's style. A drawing lies in the page, as plotly's JSON, after its place.
const CONFIG = { displayModeBar: false, responsive: true };
const isDark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(layout) {
  const axis = ({ title, ...more } = {}) => ({
    gridcolor: css("--line"), zeroline: false, automargin: true, ticklabelstandoff: 4, ...more, title: { font: { size: 12 }, ...title },
  });
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", hoverlabel: { namelength: -1 },
    font: { color: css("--soft"), family: "system-ui, sans-serif", size: 12 },
    legend: { orientation: "h", traceorder: "normal", maxheight: 0.8, y: 1.02, yanchor: "bottom", x: 0 }, ...layout,
    margin: { l: 10, r: 12, t: 8, b: 42, ...layout.margin }, xaxis: axis({ ticklabelstandoff: 9, ...layout.xaxis }), yaxis: axis(layout.yaxis),
  };
}

function drawings() {
  const coloured = (_, value) => (/^var\(--\w+\)$/.test(value) ? css(value.slice(4, -1)) : value);
  for (const place of document.querySelectorAll(".drawing")) {
    const { data, layout } = JSON.parse(place.nextElementSibling.textContent, coloured);
    const lines = data.map(({ name }) => name.split("<br>").length).reduce((sum, num) => sum + num, 0);
    if (layout.showlegend && place.clientWidth < 560) layout.height += 18 * lines; // there the key has one column
    Plotly.react(place, data, themed(layout), CONFIG);
  }
}

isDark.addEventListener("change", drawings);
drawings();
