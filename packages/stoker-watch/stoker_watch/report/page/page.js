// Draws the charts in the colors of the page, and again when the colors change (light, dark, print).
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const narrow = () => window.innerWidth < 600;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // var(--c0) → its current color; plotly does not read CSS variables
  const resolveColors = (value) => {
    if (typeof value === "string") {
      return value.replace(/var\((--[\w-]+)\)/g, (_, name) => css(name));
    }
    if (Array.isArray(value)) {
      return typeof value[0] === "number" ? value : value.map(resolveColors);
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolveColors(inner)]));
    }
    return value;
  };

  const faint = (color) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
    return `rgba(${red},${green},${blue},0.18)`;
  };

  const axis = (own) => ({
    gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true,
    tickfont: { size: 11 }, fixedrange: narrow(), ...own,
    title: { font: { size: 11 }, standoff: 6, ...(own && own.title) },
  });

  // all axes of a chart; a time axis with a range slider can be zoomed on a phone too
  const axes = (own) => Object.fromEntries(Object.entries(own).filter(([key]) => /^[xy]axis\d*$/.test(key)).map(
    ([key, value]) => [key, axis(own.zooms && key === "xaxis" ? { ...value, fixedrange: false } : value)]));

  const layout = (chart) => ({
    ...chart.layout,
    height: chart.height,
    margin: { l: 44, r: 8, t: 8, b: 36 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("--font"), size: 12, color: css("--text") },
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--text") } },
    hovermode: "x unified",
    dragmode: narrow() ? false : "zoom",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left", font: { size: 11 },
              bgcolor: "rgba(0,0,0,0)", ...chart.layout.legend },
    ...axes(chart.layout),
  });

  const draw = () => Promise.all(charts.map((chart) => {
    const own = resolveColors(chart);
    const data = own.data.map((trace) => trace.faint ? { ...trace, fillcolor: faint(trace.fillcolor), opacity: 1 } : trace);
    return Plotly.react(chart.id, data, layout(own), { displayModeBar: false, responsive: true });
  })).then(() => { document.documentElement.dataset.charts = "drawn"; });

  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  // for print: light colors, and all collapsed parts are open
  let collapsed = [];
  window.addEventListener("beforeprint", () => {
    collapsed = [...document.querySelectorAll("details:not([open])")];
    collapsed.forEach((one) => { one.open = true; });
    document.documentElement.classList.add("paper");
    draw();
  });
  window.addEventListener("afterprint", () => {
    collapsed.forEach((one) => { one.open = false; });
    document.documentElement.classList.remove("paper");
    draw();
  });
})();
