"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  // Plotly's own buttons would stand inside what is an image to a screen reader; ours stand above it.
  const config = {responsive: true, displaylogo: false, plotlyServerURL: "", typesetMath: false, displayModeBar: false};
  // With more arms than this their bands hide each other.
  const BANDS = 4;

  // Colors as the style sheet has them now.
  const color = (name) => {
    const probe = document.createElement("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  const palette = () => ({ink: color("ink"), soft: color("soft"), line: color("line"), paper: color("paper")});

  const figures = [...document.querySelectorAll("[data-figure]")].map((place) => {
    const spec = JSON.parse(document.getElementById(place.dataset.figure).textContent);
    return {place, spec, box: place.closest("figure"), resets: 0, hidden: new Set(),
      // A finger that drags scrolls the page, until it is told to do other things.
      state: {...spec.state, drag: coarse.matches ? "" : "zoom"}};
  });

  // Whether a trace belongs to the curve, the lines and the arms that are chosen.
  const shown = ({state, hidden}, {what, view, arm} = {}) =>
    (what === undefined || what === state.what) &&
    (view === undefined || state.view === "both" || view === state.view) &&
    !hidden.has(arm);

  const bands = ({spec, hidden}) =>
    new Set(spec.data.map(({meta}) => meta?.arm).filter((arm) => arm !== undefined && !hidden.has(arm))).size <= BANDS;

  const traces = (figure, colors) => figure.spec.data.map((given) => {
    const trace = {...given, visible: shown(figure, given.meta) && (!given.meta?.band || bands(figure))};
    if (figure.state.x === "flops") trace.x = given.customdata.map((point) => point[2]);
    if (given.meta?.ink) {
      if (given.line && !given.meta.band) trace.line = {...given.line, color: colors.soft};
      if (given.marker) trace.marker = {...given.marker, color: colors.soft};
    }
    return trace;
  });

  const layout = ({spec, state, resets}, colors) => {
    const themed = {gridcolor: colors.line, zerolinecolor: colors.soft, linecolor: colors.soft, tickcolor: colors.soft};
    const made = {...spec.layout, font: {...spec.layout.font, color: colors.ink, family: getComputedStyle(document.body).fontFamily},
      hoverlabel: {bgcolor: colors.paper, bordercolor: colors.soft, font: {color: colors.ink}, align: "left"},
      dragmode: state.drag || false,
      uirevision: JSON.stringify([state.what, state.x, state.xtype, state.ytype, resets])};
    for (const name of Object.keys(spec.layout)) {
      if (/^[xy]axis\d*$/.test(name)) made[name] = {...spec.layout[name], ...themed};
    }
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
    if (!window.Plotly) return undefined;
    const colors = palette();
    return Plotly.react(figure.place, traces(figure, colors), layout(figure, colors), config);
  };

  const press = (figure) => {
    for (const one of figure.box.querySelectorAll("[data-sets]")) {
      one.setAttribute("aria-pressed", String(figure.state[one.dataset.sets] === one.dataset.value));
    }
  };

  // Plotly is in the page compressed: it is a third of its size so.
  const load = async () => {
    const packed = document.getElementById("plotly");
    if (!packed) return;
    const bytes = Uint8Array.from(atob(packed.textContent), (one) => one.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.body.append(script);
    for (const figure of figures) {
      press(figure);
      figure.box.querySelector(".controls").hidden = false;
      draw(figure);
    }
  };

  for (const figure of figures) {
    figure.box.addEventListener("click", ({target}) => {
      const button = target.closest("button");
      if (button?.dataset.sets) {
        const {sets, value} = button.dataset;
        figure.state[sets] = sets === "drag" && figure.state.drag === value ? "" : value;
        press(figure);
        draw(figure);
      } else if (button?.hasAttribute("data-reset")) {
        figure.resets += 1;
        draw(figure);
      } else if (button?.hasAttribute("data-save")) {
        Plotly.downloadImage(figure.place, {format: "png", scale: 2, filename: figure.place.dataset.figure});
      } else if (button?.dataset.arm) {
        const arm = Number(button.dataset.arm);
        if (!figure.hidden.delete(arm)) figure.hidden.add(arm);
        button.setAttribute("aria-pressed", String(!figure.hidden.has(arm)));
        draw(figure);
      }
    });
  }
  load().catch(() => {
    for (const {place} of figures) place.textContent = "This browser cannot draw the figure; the tables have its numbers.";
  });

  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => { theme.textContent = isDark() ? "light theme" : "dark theme"; };  // what it will make
  const redraw = () => {
    name();
    figures.forEach(draw);
  };
  theme.hidden = false;
  name();
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
