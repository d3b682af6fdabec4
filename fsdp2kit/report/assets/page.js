// Draws the payload: runs, charts (uPlot), tables, samples. With `data-follows` it asks data.json for what is new.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const COLORS = 8, POLL_MS = 2000;
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  const view = { axis: "step", smooth: 0, log: false, zoom: null, hidden: new Set() };
  const isOpen = new Map(); // by what a <details> is called: whether the reader opened or closed it
  let payload, charts = [], colors = {}, shown = {}, onAxis = new WeakMap();

  // --- elements and numbers -----------------------------------------------------------------------------------------

  function el(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in made && name !== "role") made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children); // text is never read as HTML
    return made;
  }

  function details(key, summary, content, open) {
    const made = el("details", { open: isOpen.get(key) ?? open }, el("summary", {}, summary), content);
    made.addEventListener("toggle", () => isOpen.set(key, made.open));
    return made;
  }

  function number(value) {
    const size = Math.abs(value);
    if (size >= 1e4) {
      const [unit, name] = size >= 1e12 ? [1e12, "T"] : size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
      return `${+(value / unit).toPrecision(4)}${name}`;
    }
    if (size !== 0 && size < 1e-3) return (+value.toPrecision(3)).toExponential();
    return String(+value.toPrecision(4));
  }

  function duration(seconds) {
    if (seconds < 120) return `${+seconds.toPrecision(3)} s`;
    return seconds < 7200 ? `${+(seconds / 60).toPrecision(3)} min` : `${+(seconds / 3600).toPrecision(3)} h`;
  }

  function format(value, form) {
    if (value === null || value === undefined) return "–";
    if (form === "share") return `${+(value * 100).toPrecision(3)}%`;
    if (form === "seconds") return duration(value);
    return number(value) + (form === "GiB" ? " GiB" : "");
  }

  // --- curves -------------------------------------------------------------------------------------------------------

  const summed = (differences) => { let sum = 0; return differences.map((one) => (sum += one)); };

  function decode(run) {
    const xs = run.xs.map(summed);
    for (const curve of Object.values(run.curves)) {
      curve.x = xs[curve.x];
      if (curve.mx !== undefined) curve.mx = xs[curve.mx];
    }
    run.axes.step = summed(run.axes.step);
    run.axes.tokens = summed(run.axes.tokens);
    return run;
  }

  /** Steps of a run as places on the x axis: interpolated where not every step's tokens and hours are known. */
  function places(run, steps) {
    if (view.axis === "step") return steps;
    if (!onAxis.has(steps)) {
      const known = run.axes.step, values = run.axes[view.axis];
      let at = 0;
      onAxis.set(steps, steps.map((step) => {
        while (at < known.length - 2 && known[at + 1] < step) at++;
        if (known.length < 2) return values[0];
        const share = (step - known[at]) / (known[at + 1] - known[at]);
        return values[at] + share * (values[at + 1] - values[at]);
      }));
    }
    return onAxis.get(steps);
  }

  /** An exponential moving average without the pull of its beginning. */
  function smoothed(values, weight) {
    let average = 0, sum = 0;
    return values.map((value) => {
      average = weight * average + (1 - weight) * value;
      sum = weight * sum + 1 - weight;
      return average / sum;
    });
  }

  const isSparse = (curve) => curve.x.length < 40 || curve.isPlan;

  function curveOf(run, key) {
    if (!key.startsWith("plan:")) return run.curves[key];
    const steps = run.axes.step, gib = run.plan[key.slice(5)];
    if (gib === undefined || !steps.length) return undefined;
    return { x: [steps[0], steps[steps.length - 1]], y: [gib, gib], isPlan: true };
  }

  /** For each line two columns: what is drawn, and behind a smoothed or shortened one the values as they are. */
  function tablesOf(line) {
    const curve = curveOf(line.run, line.key), x = places(line.run, curve.x);
    const isSmooth = view.smooth && !isSparse(curve) && !line.key.startsWith("eval_");
    if (!isSmooth && !curve.mx) return [[x, curve.y], [[], []]];
    const [from, values] = curve.mx ? [places(line.run, curve.mx), curve.my] : [x, curve.y];
    return [[from, isSmooth ? smoothed(values, view.smooth) : values], [x, curve.y]];
  }

  function extent() {
    const known = payload.runs.filter((run) => run.axes.step.length).map((run) => run.axes[view.axis]);
    const low = Math.min(...known.map((values) => values[0]));
    const high = Math.max(...known.map((values) => values[values.length - 1]));
    return low < high ? [low, high] : [low - 1, high + 1];
  }

  // --- charts -------------------------------------------------------------------------------------------------------

  const color = (name) => colors[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function linesOf(spec) {
    const several = payload.runs.length > 1, found = [];
    spec.lines.forEach(({ key, label }, nth) => payload.runs.forEach((run, place) => {
      const curve = curveOf(run, key);
      if (!curve) return;
      const shown = several ? (spec.lines.length > 1 ? `${run.name}, ${label}` : run.name) : label;
      const of = curve.isPlan ? spec.lines.findIndex((one) => `plan:${one.key}` === key) : nth;
      const hue = (several ? place : of) % COLORS, dash = curve.isPlan ? 2 : several ? nth % DASHES.length : 0;
      found.push({ run, place, key, label: shown, hue, dash });
    }));
    return found;
  }

  function build(spec, isFirst) {
    const lines = linesOf(spec);
    if (!lines.length) return null;
    const chart = { spec, lines, at: el("span", { className: "at" }) };
    const id = `chart-${spec.title}`.replace(/[^\w-]+/g, "-");
    const title = el("h3", { id }, spec.title, el("span", { className: "unit" }, spec.unit ? `, ${spec.unit}` : ""));
    chart.values = lines.map(() => el("b"));
    const legend = el("ul", { className: "legend" }, ...lines.map((line, index) => el("li", {},
      el("span", { className: `swatch k${line.hue} d${line.dash}` }), line.label, chart.values[index])));
    chart.plot = el("div", { className: "plot", tabIndex: 0, role: "application", "aria-labelledby": id,
      "aria-roledescription": "chart", "aria-describedby": "keys" });
    const numbers = details(`numbers of ${spec.title}`, "Numbers", el("div", { className: "scroll", tabIndex: 0,
      role: "region", "aria-label": `Numbers of ${spec.title}` }), false);
    chart.numbers = numbers;
    numbers.addEventListener("toggle", () => showNumbers(chart));
    chart.figure = el("figure", { className: isFirst ? "first" : "" }, el("div", { className: "top" }, title, chart.at),
      spec.note ? el("p", { className: "note" }, spec.note) : "", legend, chart.plot, numbers);
    chart.plot.addEventListener("keydown", (event) => onKey(chart, event));
    return chart;
  }

  function showNumbers(chart) {
    if (!chart.numbers.open) return;
    const rows = chart.lines.map((line) => {
      const { x, y } = curveOf(line.run, line.key), form = chart.spec.form;
      let low = 0, high = 0;
      y.forEach((value, index) => { if (value < y[low]) low = index; if (value > y[high]) high = index; });
      return [line.label, format(y[0], form), format(y[y.length - 1], form),
        `${format(y[low], form)} (step ${x[low]})`, `${format(y[high], form)} (step ${x[high]})`];
    });
    chart.numbers.lastChild.replaceChildren(table(["", "first", "last", "lowest", "highest"], rows));
  }

  function options(chart) {
    const axis = { stroke: () => color("soft"), grid: { stroke: () => color("grid"), width: 1 }, ticks: { show: false },
      font: "11px system-ui, sans-serif" };
    const series = chart.lines.flatMap((line) => {
      const shown = { stroke: () => color(`c${line.hue}`), spanGaps: true, show: !view.hidden.has(line.place) };
      const curve = curveOf(line.run, line.key);
      const points = { show: isSparse(curve) && !curve.isPlan, size: 4, fill: shown.stroke };
      return [{ ...shown, width: 1.5, dash: DASHES[line.dash], points },
        { ...shown, width: 1, alpha: 0.3, points: { show: false } }];
    });
    return {
      width: Math.max(120, chart.plot.clientWidth), height: chart.plot.clientHeight, padding: [8, 12, 0, 0],
      legend: { show: false }, series: [{}, ...series],
      scales: { x: { time: false }, y: { distr: isLog(chart) ? 3 : 1, range: (u, low, high) => rangeOf(low, high, isLog(chart)) } },
      axes: [{ ...axis, size: 24, gap: 2, space: 60, values: (u, marks) => marks.map((one) => number(one)) },
        { ...axis, size: 52, gap: 2, space: 26, values: (u, marks) => marks.map((one) => one === null ? "" : format(one, chart.spec.form)) }],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 5 },
        sync: { key: "x", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        bind: { dblclick: () => () => zoomTo(null) } },
      hooks: { setLegend: [(u) => readOut(chart, u)], draw: [drawMarks], setSelect: [onSelect] },
    };
  }

  function rangeOf(low, high, log) {
    if (low === null || low === undefined) return log ? [0.1, 1] : [0, 1];
    if (log) return uPlot.rangeLog(low, high, 10, false);
    const around = Math.abs(low) * 0.1;
    return low < high ? uPlot.rangeNum(low, high, 0.1, true) : low ? [low - around, low + around] : [0, 1];
  }

  function isLog(chart) {
    const all = chart.lines.flatMap((line) => curveOf(line.run, line.key).y);
    return view.log && all.filter((value) => value > 0).length > all.length / 2;
  }

  function dataOf(chart) {
    const data = uPlot.join(chart.lines.flatMap(tablesOf));
    if (!isLog(chart)) return data;
    return data.map((column, index) => index ? Array.from(column, (value) => (value > 0 ? value : null)) : column);
  }

  function draw(chart) {
    chart.u?.destroy();
    chart.u = new uPlot(options(chart), [[0], ...chart.lines.flatMap(() => [[null], [null]])], chart.plot);
    refresh(chart);
  }

  function refresh(chart) {
    const [min, max] = view.zoom ?? extent();
    chart.u.setData(dataOf(chart), false);
    chart.u.setScale("x", { min, max });
    readOut(chart, chart.u);
    showNumbers(chart);
  }

  /** The value at the cursor or the last one before it. */
  function valueAt(column, index) {
    while (index >= 0 && (column[index] === null || column[index] === undefined)) index--;
    return column[index];
  }

  function readOut(chart, u) {
    const at = u.cursor.idx, unit = { step: "step", tokens: "tokens", hours: "h" }[view.axis];
    const isAt = at !== null && at !== undefined && u.cursor.left >= 0;
    chart.lines.forEach((line, nth) => {
      const value = isAt ? valueAt(u.data[2 * nth + 1], at) : curveOf(line.run, line.key).y.at(-1);
      chart.values[nth].textContent = format(value, chart.spec.form);
    });
    chart.at.textContent = isAt ? `${unit} ${view.axis === "step" ? u.data[0][at] : number(u.data[0][at])}` : "";
  }

  /** Starts as vertical lines, saves as ticks on the x axis. */
  function drawMarks(u) {
    const { ctx, bbox } = u, several = payload.runs.length > 1;
    ctx.save();
    payload.runs.forEach((run, place) => {
      if (view.hidden.has(place)) return;
      ctx.strokeStyle = several ? color(`c${place % COLORS}`) : color("soft");
      ctx.lineWidth = devicePixelRatio;
      const mark = (place, height, dash) => {
        const x = u.valToPos(place, "x", true), bottom = bbox.top + bbox.height;
        if (x < bbox.left || x > bbox.left + bbox.width) return;
        ctx.setLineDash(dash);
        ctx.beginPath();
        ctx.moveTo(x, bottom - height);
        ctx.lineTo(x, bottom);
        ctx.stroke();
      };
      const size = devicePixelRatio;
      for (const start of places(run, run.starts)) mark(start, bbox.height, [3 * size, 3 * size]);
      for (const save of places(run, run.saves)) mark(save, 5 * size, []);
    });
    ctx.restore();
  }

  function onSelect(u) {
    if (u.select.width > 4) zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  function zoomTo(range) {
    view.zoom = range;
    $("reset").disabled = !range;
    const [min, max] = range ?? extent();
    for (const chart of charts) chart.u.setScale("x", { min, max });
  }

  function onKey(chart, event) {
    const { u } = chart, xs = u.data[0], { min, max } = u.scales.x;
    const first = xs.findIndex((x) => x >= min), last = xs.findLastIndex((x) => x <= max);
    const at = u.cursor.left >= 0 && u.cursor.idx !== null ? u.cursor.idx : last + 1;
    const far = event.shiftKey ? Math.max(1, Math.round((last - first) / 20)) : 1;
    const moved = { ArrowLeft: at - far, ArrowRight: at + far, Home: first, End: last }[event.key];
    const middle = xs[Math.min(Math.max(at, first), last)], wide = { "+": 0.25, "-": 1 }[event.key];
    if (moved !== undefined) moveTo(chart, Math.min(Math.max(moved, first), last));
    else if (wide) zoomTo(within([middle - wide * (max - min), middle + wide * (max - min)]));
    else if (event.key === "0" || event.key === "Escape") zoomTo(null);
    else return;
    event.preventDefault();
  }

  function within([low, high]) {
    const [first, last] = extent();
    return low <= first && high >= last ? null : [Math.max(low, first), Math.min(high, last)];
  }

  function moveTo(chart, index) {
    chart.u.setCursor({ left: chart.u.valToPos(chart.u.data[0][index], "x"), top: 1 });
    const values = chart.lines.map((line, nth) => `${line.label} ${chart.values[nth].textContent}`);
    $("said").textContent = `${chart.at.textContent}: ${values.join(", ")}`;
  }

  // --- everything else ----------------------------------------------------------------------------------------------

  function table(head, rows) {
    const cell = (value, index) => index ? el("td", {}, value instanceof Node ? value : String(value))
      : el("th", { scope: "row" }, value instanceof Node ? value : String(value));
    const heading = (one) => one ? el("th", { scope: "col" }, one) : el("td");
    return el("table", {},
      head.some(Boolean) ? el("thead", {}, el("tr", {}, ...head.map(heading))) : "",
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell)))));
  }

  const scrolling = (label, content) => el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": label }, content);

  function nameOf(run, place) {
    if (payload.runs.length < 2) return run.name;
    const box = el("input", { type: "checkbox", checked: !view.hidden.has(place) });
    box.addEventListener("change", () => {
      view.hidden[box.checked ? "delete" : "add"](place);
      charts.forEach(draw);
    });
    return el("label", { className: "name" }, box, el("span", { className: `swatch k${place % COLORS}` }), run.name);
  }

  function showRuns() {
    const labels = [...new Set(payload.runs.flatMap((run) => run.figures.map(([label]) => label)))];
    const rows = payload.runs.map((run, place) => {
      const figures = new Map(run.figures.map(([label, value, form]) => [label, format(value, form)]));
      const steps = run.total_steps ? `${run.step} of ${run.total_steps}` : run.step;
      return [nameOf(run, place), el("span", { className: `state ${run.state}` }, run.state), steps, run.recipe || "–",
        run.model || "–", ...labels.map((label) => figures.get(label) ?? "–")];
    });
    const said = payload.runs.filter((run) => run.message).map((run) =>
      el("p", { className: "message" }, el("span", { className: `state ${run.state}` }, `${run.name} ${run.state}: `), run.message));
    const head = ["run", "state", "steps", "recipe", "model", ...labels];
    const pairs = (row) => row.flatMap((value, index) => el("div", {}, el("dt", {}, head[index]), el("dd", {}, value)));
    const content = rows.length > 1 ? scrolling("Runs", table(head, rows)) : el("dl", { className: "figures" }, ...pairs(rows[0]));
    const marks = payload.runs.some((run) => run.starts.length || run.saves.length)
      ? el("p", { className: "note" }, "In the charts, dashed vertical lines are restarts, ticks on the x axis are saves.") : "";
    fill("runs", el("div", { className: "card" }, content, ...said, marks));
    $("title").textContent = payload.runs.map((run) => run.name).join(" · ");
  }

  /** Replaces a part of the page; what had the focus there has it again. */
  function fill(id, ...content) {
    const place = $(id).lastElementChild, reached = () => [...place.querySelectorAll("input, summary, [tabindex]")];
    const focused = reached().indexOf(document.activeElement);
    $(id).hidden = !content.length;
    place.replaceChildren(...content);
    reached()[focused]?.focus({ preventScroll: true });
  }

  function showWarnings() {
    const counts = new Map();
    payload.runs.forEach((run) => run.warnings.forEach(({ step, text }) => {
      const key = (payload.runs.length > 1 ? `${run.name}: ` : "") + text, steps = counts.get(key) ?? [];
      counts.set(key, [...steps, step]);
    }));
    const items = [...counts].map(([text, steps]) => {
      const known = steps.filter(Number.isInteger), times = steps.length > 1 ? `${steps.length} times, last ` : "";
      return el("li", {}, text, known.length ? el("span", { className: "note" }, ` (${times}step ${known.at(-1)})`) : "");
    });
    fill("warnings", ...(items.length ? [el("div", { className: "card" }, el("ul", {}, ...items))] : []));
  }

  function showTables() {
    $("tables").classList.toggle("several", payload.runs.length > 1);
    fill("tables", ...payload.tables.map((one) => {
      const content = scrolling(one.title, table(one.head, one.rows));
      return el("div", { className: "card" }, details(one.title, el("h3", {}, one.title), content, one.is_open));
    }));
  }

  function showSamples() {
    const cards = payload.runs.filter((run) => run.samples.length).map((run) => {
      const steps = [...new Set(run.samples.map((sample) => sample.step))].reverse();
      const groups = steps.map((step, place) => details(`samples of ${run.name} ${step}`, `step ${step ?? "–"}`, el("div", {},
        ...run.samples.filter((sample) => sample.step === step).map(sampleOf)), place === 0));
      return el("div", { className: "card" }, payload.runs.length > 1 ? el("h3", {}, run.name) : "", ...groups);
    });
    fill("samples", ...cards);
  }

  function sampleOf({ prompt, answer, also }) {
    const rows = [["prompt", prompt], ["answer", answer || "(an empty answer)"], ...Object.entries(also)];
    return el("dl", { className: "sample" }, ...rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
  }

  /** Whether a part of the page has something else to show than before; it keeps focus and selection if not. */
  function isNew(part, content) {
    const text = JSON.stringify(content), before = shown[part];
    shown[part] = text;
    return text !== before;
  }

  function showTexts() {
    const { runs, tables } = payload;
    if (isNew("runs", runs.map(({ figures, step, state, message, starts }) => [figures, step, state, message, starts]))) showRuns();
    if (isNew("warnings", runs.map((run) => run.warnings))) showWarnings();
    if (isNew("tables", tables)) showTables();
    if (isNew("samples", runs.map((run) => run.samples))) showSamples();
    const time = new Date(payload.written).toLocaleString();
    $("live").textContent = document.body.dataset.follows === "true" ? `live · ${time}` : time;
    for (const option of $("axis").options) {
      option.disabled = option.value !== "step" && payload.runs.some((run) => !run.axes[option.value].at(-1));
    }
  }

  function showCharts() {
    for (const chart of charts) chart.u.destroy();
    charts = [];
    const sections = payload.sections.map(({ title, charts: specs }, place) => {
      const built = specs.map((spec, nth) => build(spec, place === 0 && nth === 0)).filter(Boolean);
      charts.push(...built);
      return el("section", {}, el("h2", {}, title), el("div", { className: "grid" }, ...built.map((chart) => chart.figure)));
    });
    const keys = "Left and right arrow: move; with shift: further; Home, End; plus and minus: zoom; 0: all.";
    $("charts").replaceChildren(el("p", { id: "keys", className: "hidden" }, keys), ...sections);
    charts.forEach(draw);
  }

  // --- controls, theme, following -----------------------------------------------------------------------------------

  const THEMES = ["auto", "light", "dark"], prefersDark = matchMedia("(prefers-color-scheme: dark)");
  let theme = "auto";

  function applyTheme() {
    const isDark = theme === "auto" ? prefersDark.matches : theme === "dark";
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    $("theme").textContent = `Theme: ${theme}`;
    colors = {};
    for (const chart of charts) chart.u.redraw(false);
  }

  function listen() {
    $("axis").addEventListener("change", () => {
      view.axis = $("axis").value;
      onAxis = new WeakMap();
      zoomTo(null);
      charts.forEach(refresh);
    });
    $("smooth").addEventListener("input", () => {
      view.smooth = +$("smooth").value;
      $("smoothed").textContent = view.smooth;
      charts.forEach(refresh);
    });
    $("log").addEventListener("change", () => { view.log = $("log").checked; charts.forEach(draw); });
    $("reset").addEventListener("click", () => zoomTo(null));
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    $("theme").addEventListener("click", () => { theme = THEMES[(THEMES.indexOf(theme) + 1) % 3]; applyTheme(); });
    prefersDark.addEventListener("change", applyTheme);
    new ResizeObserver(() => charts.forEach(({ u, plot }) => {
      if (u.width !== plot.clientWidth) u.setSize({ width: plot.clientWidth, height: plot.clientHeight });
    })).observe($("charts"));
  }

  function append(old, now) {
    for (const [key, curve] of Object.entries(now.curves)) {
      const before = old.curves[key];
      curve.x = before.x.concat(curve.x);
      curve.y = before.y.concat(curve.y);
      if (before.mx) Object.assign(curve, { mx: before.mx, my: before.my });
    }
    now.curves = { ...old.curves, ...now.curves };
    for (const name of Object.keys(now.axes)) now.axes[name] = old.axes[name].concat(now.axes[name]);
    return now;
  }

  async function poll() {
    const after = payload.runs.map((run) => run.axes.step.at(-1) ?? 0).join(",");
    try {
      const answer = await fetch(`data.json?version=${payload.version}&after=${after}`, { cache: "no-store" });
      if (answer.status === 200) take(await answer.json());
    } catch {
      $("live").textContent = "The report's server has ended; this is what it showed last.";
    }
    setTimeout(poll, POLL_MS);
  }

  function take(now) {
    now.runs.forEach(decode);
    if (!now.is_whole) now.runs = now.runs.map((run, place) => append(payload.runs[place], run));
    const before = payload;
    payload = now;
    onAxis = new WeakMap();
    showTexts();
    if (now.is_whole) return showCharts();
    for (const chart of charts) {
      for (const line of chart.lines) line.run = payload.runs[line.place];
    }
    if (now.runs.some((run, place) => run.step !== before.runs[place].step || run.saves.length !== before.runs[place].saves.length)) charts.forEach(refresh);
  }

  payload = JSON.parse($("payload").textContent);
  payload.runs.forEach(decode);
  applyTheme();
  showTexts();
  showCharts();
  listen();
  document.body.dataset.drawn = charts.length; // for tests
  if (document.body.dataset.follows === "true") setTimeout(poll, POLL_MS);
})();
