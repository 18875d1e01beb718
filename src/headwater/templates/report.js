"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  // Every button is named: one of plotly's own would send the figure to a server.
  const config = {responsive: true, displaylogo: false, plotlyServerURL: "", typesetMath: false,
    displayModeBar: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]};
  // With more arms than this their bands hide each other.
  const BANDS = 4;

  // Colours as the style sheet has them now.
  const colour = (name) => {
    const probe = document.createElement("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  const palette = () => ({ink: colour("ink"), soft: colour("soft"), line: colour("line"), paper: colour("paper")});

  const figures = [...document.querySelectorAll("[data-figure]")].map((place) => {
    const spec = JSON.parse(document.getElementById(place.dataset.figure).textContent);
    return {place, spec, box: place.closest("figure"), state: {...spec.state}, hidden: new Set()};
  });

  // Whether a trace belongs to the curve, the lines and the arms that are chosen.
  const shown = ({state, hidden}, {what, view, arm} = {}) =>
    (what === undefined || what === state.what) &&
    (view === undefined || state.view === "both" || view === state.view) &&
    !hidden.has(arm);

  const bands = ({spec, hidden}) =>
    new Set(spec.data.map(({meta}) => meta?.arm).filter((arm) => arm !== undefined && !hidden.has(arm))).size <= BANDS;

  const traces = (figure, colours) => figure.spec.data.map((given) => {
    const trace = {...given, visible: shown(figure, given.meta) && (!given.meta?.band || bands(figure))};
    if (figure.state.x === "flops") trace.x = given.customdata.map((point) => point[2]);
    if (given.meta?.ink) {
      if (given.line && !given.meta.band) trace.line = {...given.line, color: colours.soft};
      if (given.marker) trace.marker = {...given.marker, color: colours.soft};
    }
    return trace;
  });

  const layout = ({spec, state}, colours) => {
    const themed = {gridcolor: colours.line, zerolinecolor: colours.soft, linecolor: colours.soft, tickcolor: colours.soft};
    const made = {...spec.layout, font: {...spec.layout.font, color: colours.ink, family: getComputedStyle(document.body).fontFamily},
      hoverlabel: {bgcolor: colours.paper, bordercolor: colours.soft, font: {color: colours.ink}, align: "left"},
      modebar: {bgcolor: "rgba(0,0,0,0)", color: colours.soft, activecolor: colours.ink},
      dragmode: coarse.matches ? false : "zoom",
      uirevision: JSON.stringify([state.what, state.x, state.xtype, state.ytype])};
    made.xaxis = {...spec.layout.xaxis, ...themed};
    made.yaxis = {...spec.layout.yaxis, ...themed};
    const titled = (axis, text) => { axis.title = {...axis.title, text}; };
    if (spec.titles.x) titled(made.xaxis, spec.titles.x[state.x]);
    if (spec.titles.what) titled(made.yaxis, spec.titles.what[state.what]);
    if (spec.titles.y) titled(made.yaxis, spec.titles.y[""]);
    if (state.xtype) made.xaxis.type = state.xtype;
    if (state.ytype) made.yaxis.type = state.ytype;
    const limits = spec.limits[state.what];
    if (limits && (state.ytype !== "log" || limits[0] > 0)) {
      made.yaxis.range = state.ytype === "log" ? limits.map(Math.log10) : limits;
    }
    return made;
  };

  const draw = (figure) => {
    const colours = palette();
    return Plotly.react(figure.place, traces(figure, colours), layout(figure, colours), config);
  };

  for (const figure of figures) {
    figure.box.addEventListener("click", ({target}) => {
      const button = target.closest("button");
      if (button?.dataset.sets) {
        const {sets, value} = button.dataset;
        figure.state[sets] = value;
        for (const one of figure.box.querySelectorAll(`[data-sets="${sets}"]`)) {
          one.setAttribute("aria-pressed", String(one === button));
        }
        draw(figure);
      } else if (button?.dataset.arm) {
        const arm = Number(button.dataset.arm);
        if (!figure.hidden.delete(arm)) figure.hidden.add(arm);
        button.setAttribute("aria-pressed", String(!figure.hidden.has(arm)));
        draw(figure);
      }
    });
    draw(figure);
  }

  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const redraw = () => {
    theme.setAttribute("aria-pressed", String(isDark()));
    figures.forEach(draw);
  };
  theme.hidden = false;
  theme.setAttribute("aria-pressed", String(isDark()));
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    redraw();
  });
  dark.addEventListener("change", redraw);

  // Paper is white.
  let before;
  addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; redraw(); });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    redraw();
  });

  for (const button of document.querySelectorAll("[data-copy]")) {
    const text = button.closest(".code").querySelector("pre");
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "copied";
        setTimeout(() => { button.textContent = "copy"; }, 1500);
      } catch {
        getSelection().selectAllChildren(text);
      }
    });
  }
})();
