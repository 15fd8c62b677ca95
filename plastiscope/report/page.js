"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const loaded = new Map();
const blank = { run: 0, compare: "", metric: "", level: "whole", subject: "", tokens: "",
  parameters: "", show: "value", block: "", component: "", head: "", from: "", to: "", row: "",
  at: "" };
const state = { ...blank, ...data.start };
let view = null;
const PAGE = [700, 850];
const printing = () => document.documentElement.classList.contains("printing");

// Names come from files: they are text everywhere, and plotly.js reads < and & as markup.
const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;")
  .replace(/>/g, "&gt;");
const words = (text) => String(text).replace(/_/g, " ").replace(/(residual|norm)([12])/, "$1 $2");
const digits = (value) => value === null ? "no value" : String(value);
const order = ("embedding norm1 q k v attention attention_output residual1 norm2 router gate fc1 " +
  "experts conv fc norm activation fc2 residual2 final_norm head network").split(" ");

function say(text) { $("message").textContent = text; $("message").hidden = !text; }

async function chunk(number) {
  if (!loaded.has(number)) {
    if (typeof DecompressionStream === "undefined") {
      throw new Error("This browser is too old for the explorer (it needs DecompressionStream).");
    }
    const raw = atob($("chunk-" + number).textContent.trim());
    const bytes = Uint8Array.from(raw, (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    loaded.set(number, JSON.parse(await new Response(stream).text()).series);
  }
  return loaded.get(number);
}

const chunksOf = (metric) => data.chunks.map((c, n) => ({ ...c, number: n }))
  .filter((c) => c.metric === metric);
const runName = (number) => data.runs[number].name;
const variantKey = (v) => [v.subject, v.tokens, v.parameters, v.probe].join("\u0001");
function variantName(v) {
  const tokens = { all: "all tokens", cls: "CLS token", patch: "patch tokens" }[v.tokens] || v.tokens;
  return [v.subject, tokens, v.parameters].filter(Boolean).join(", ");
}
const subjects = ["feature", "unit", "attention", "weight"];
// What is shown unasked: features of all tokens, the usual threshold.
function rank(v) {
  const place = subjects.indexOf(v.subject) < 0 ? subjects.length : subjects.indexOf(v.subject);
  return 10 * place + (v.tokens === "cls" ? 5 : 0) - (v.parameters === "tau=0.025" ? 1 : 0);
}
function stepName(run, place) {
  const { steps, checkpoints } = data.runs[run];
  return steps[place] === null ? checkpoints[place] : "step " + steps[place];
}
function rowKey(s) {
  return [s.b === null ? "" : s.b, s.c, s.h === null ? "" : s.h, s.i === null ? "" : s.i].join("|");
}
function rowName(s, short) {
  const parts = [];
  if (s.b !== null) parts.push((short ? "" : "block ") + s.b + (short ? ":" : ""));
  parts.push(words(s.c));
  if (s.h !== null) parts.push((short ? "h" : "head ") + s.h);
  if (s.i !== null) parts.push("no. " + s.i);
  return parts.join(" ");
}
function depth(s) {
  const place = order.indexOf(s.c) < 0 ? order.length : order.indexOf(s.c);
  const outer = s.b === null ? (s.c === "embedding" ? -1 : 1e6) : s.b;
  return [outer, place, s.h === null ? -1 : s.h, s.i === null ? -1 : s.i];
}
function byDepth(a, b) {
  const [x, y] = [depth(a), depth(b)];
  for (let n = 0; n < x.length; n += 1) if (x[n] !== y[n]) return x[n] - y[n];
  return a.c < b.c ? -1 : 1;
}

function options(id, entries, chosen) {
  const select = $(id);
  select.replaceChildren(...entries.map(([value, text]) => new Option(text, value)));
  const values = entries.map(([value]) => String(value));
  select.value = values.includes(String(chosen)) ? String(chosen) : values[0];
  select.disabled = entries.length < 2;
  return select.value;
}

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (![...given.keys()].some((key) => key in state)) return false;
  Object.assign(state, blank);
  for (const [key, value] of given) if (key in state) state[key] = value;
  return true;
}
function writeHash() {
  const kept = Object.entries(state).filter(([, value]) => value !== "");
  history.replaceState(null, "", "#" + new URLSearchParams(kept.map(([k, v]) => [k, String(v)])));
}

async function refresh() {
  try {
    say("");
    await fillControls();
    drawMap();
    drawCourse();
    writeHash();
  } catch (error) { say(error.message); }
}

async function fillControls() {
  state.run = Number(options("run", data.runs.map((r, n) => [n, r.name]), state.run));
  const others = data.runs.map((r, n) => [String(n), r.name]).filter(([n]) => Number(n) !== state.run);
  state.compare = options("compare", [["", "no other run"], ...others], state.compare);
  const metrics = [...new Set(data.chunks.map((c) => c.metric))];
  state.metric = options("metric", metrics.map((m) => [m, words(m)]), state.metric);
  const chunks = chunksOf(state.metric);
  const levels = chunks.map((c) => [c.level, c.level === "heads" ? "single heads" : "whole components"]);
  state.level = options("level", levels, state.level);
  const current = chunks.find((c) => c.level === state.level);
  const all = await chunk(current.number);
  const used = new Set(all.filter((s) => s.r === state.run).map((s) => s.v));
  const variants = current.variants.map((v, n) => ({ ...v, n })).filter((v) => used.has(v.n));
  if (!variants.length) throw new Error("This run has no " + words(state.metric) + ".");
  const fits = (v) => v.subject === state.subject && v.tokens === state.tokens
    && v.parameters === state.parameters;
  variants.sort((a, b) => rank(a) - rank(b));
  const variant = variants.find(fits)
    || variants.find((v) => v.subject === state.subject && v.parameters === state.parameters)
    || variants.find((v) => v.subject === state.subject) || variants[0];
  options("variant", variants.map((v) => [v.n, variantName(v)]), variant.n);
  [state.subject, state.tokens, state.parameters] = [variant.subject, variant.tokens, variant.parameters];
  const shows = [["value", "the value"], ["change", "change from the first checkpoint"]];
  if (state.compare !== "") shows.push(["difference", "difference to the other run"]);
  state.show = options("show", shows, state.show);
  const mine = all.filter((s) => s.r === state.run && s.v === variant.n).sort(byDepth);
  const blocks = [...new Set(mine.map((s) => s.b).filter((b) => b !== null))].sort((a, b) => a - b);
  state.block = options("block", [["", "all"], ...blocks.map((b) => [b, "block " + b])], state.block);
  const components = [...new Set(mine.map((s) => s.c))];
  state.component = options("component", [["", "all"], ...components.map((c) => [c, words(c)])],
    state.component);
  const heads = [...new Set(mine.map((s) => s.h).filter((h) => h !== null))].sort((a, b) => a - b);
  state.head = options("head", [["", "all"], ...heads.map((h) => [h, "head " + h])], state.head);
  const steps = data.runs[state.run].checkpoints.map((_, p) => [p, stepName(state.run, p)]);
  state.from = options("from", [["", "the first"], ...steps], state.from);
  state.to = options("to", [["", "the last"], ...steps], state.to);
  const rows = mine.filter((s) => (state.block === "" || s.b === Number(state.block))
    && (state.component === "" || s.c === state.component)
    && (state.head === "" || s.h === Number(state.head)));
  const first = state.from === "" ? 0 : Number(state.from);
  const last = state.to === "" ? steps.length - 1 : Number(state.to);
  const places = steps.map((_, p) => p).filter((p) => p >= Math.min(first, last) && p <= Math.max(first, last));
  const twins = new Map(state.compare === "" ? [] : all.filter((s) => s.r === Number(state.compare)
    && variantKey({ ...current.variants[s.v], probe: "" }) === variantKey({ ...variant, probe: "" }))
    .map((s) => [rowKey(s), s]));
  view = { rows, places, twins, variant, probeOf: (s) => current.variants[s.v].probe };
  explain();
}

function explain() {
  const texts = data.explanations[state.metric];
  $("about").hidden = !texts;
  const parts = Object.entries(texts || {}).filter(([, text]) => text);
  $("meaning").replaceChildren(...parts.flatMap(([name, text]) => {
    const [term, body] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name; body.textContent = text;
    return [term, body];
  }));
}

// The other run's value at the same step; null when it has none there.
function twinValue(s, place) {
  const twin = view.twins.get(rowKey(s));
  if (!twin || !twin.y) return null;
  const step = data.runs[state.run].steps[place];
  const there = data.runs[Number(state.compare)].steps.indexOf(step);
  return there < 0 || step === null ? null : twin.y[there];
}
function shown(s, place) {
  const value = s.y ? s.y[place] : null;
  if (value === null || state.show === "value") return value;
  if (state.show === "change" && s.g && s.g[place] !== s.g[0]) return null;
  const other = state.show === "change" ? s.y[0] : twinValue(s, place);
  return other === null ? null : Number((value - other).toPrecision(5));
}
function cellText(s, place) {
  const [value, error] = [s.y ? s.y[place] : null, s.e ? s.e[place] : null];
  let text = rowName(s) + ", " + stepName(state.run, place) + ": " + digits(value);
  if (error !== null && value !== null) text += " ± " + error;
  if (s.s[place]) text += " (" + words(s.s[place]) + ")";
  if (state.show !== "value") {
    const name = { change: "change", difference: "difference" }[state.show];
    text += "; " + name + " " + digits(shown(s, place));
  }
  return text;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function layout(extra) {
  const [ink, line] = [colour("--ink"), colour("--line")];
  const axis = { color: ink, gridcolor: line, zeroline: false, automargin: true };
  return { paper_bgcolor: colour("--paper"), plot_bgcolor: colour("--paper"), font: { color: ink,
    size: 12 }, margin: { l: 60, r: 16, t: 32, b: 50 }, showlegend: false, hovermode: "closest",
    hoverlabel: { bgcolor: colour("--soft"), font: { color: ink } },
    width: printing() ? PAGE[0] : $("map").clientWidth,
    ...extra, xaxis: { ...axis, ...extra.xaxis }, yaxis: { ...axis, ...extra.yaxis } };
}
const config = { responsive: true, displaylogo: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
function thin(names, room, size) {
  const stride = Math.max(1, Math.ceil(names.length * size / Math.max(room, 1)));
  const places = names.map((_, n) => n).filter((n) => n % stride === 0);
  return { tickmode: "array", tickvals: places, ticktext: places.map((n) => safe(names[n])) };
}
// White at zero: plotly.js's own RdBu is grey there, which would read as "no value".
const diverging = [[0, "#053061"], [0.25, "#4393c3"], [0.5, "#f7f7f7"], [0.75, "#d6604d"],
  [1, "#67001f"]];
function limits(values) {
  const known = values.flat().filter((v) => v !== null);
  if (!known.length) return { zmin: 0, zmax: 1 };
  const most = known.reduce((m, v) => Math.max(m, Math.abs(v)), 0) || 1;
  if (state.show !== "value") return { zmin: -most, zmax: most, colorscale: diverging };
  const [low, high] = known.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  return { zmin: low, zmax: high > low ? high : low + 1, colorscale: "Viridis" };
}

function title() {
  const what = { value: "", change: ", change from the first checkpoint",
    difference: ", difference to " + (state.compare === "" ? "" : runName(Number(state.compare))) };
  return words(state.metric) + " (" + variantName(view.variant) + ")" + what[state.show] + ", "
    + runName(state.run) + probes();
}
// Levels on two probes aren't comparable: say it where they are compared.
function probes() {
  const other = [...view.twins.values()][0];
  return other && view.probeOf(other) !== view.variant.probe ? " (measured on different probes)" : "";
}

function drawMap() {
  const { rows, places } = view;
  const narrow = window.innerWidth < 700;
  const names = rows.map((s) => rowName(s, true));
  const z = rows.map((s) => places.map((p) => shown(s, p)));
  const text = rows.map((s) => places.map((p) => safe(cellText(s, p))));
  const height = Math.min(Math.max(rows.length * 15 + 112, 240),
    printing() ? PAGE[1] : narrow ? 920 : 1500);
  const scale = limits(z);
  const trace = { type: "heatmap", z, text, hoverinfo: "text", ...scale, xgap: places.length > 80 ? 0 : 1,
    ygap: rows.length > 60 ? 0 : 1, colorbar: { thickness: narrow ? 8 : 14, outlinewidth: 0,
      tickfont: { size: narrow ? 10 : 12 } } };
  const wide = $("map").clientWidth || 800;
  const longest = Math.max(...names.map((n) => n.length), 4) * 6.6;
  const steps = places.map((p) => stepName(state.run, p).replace("step ", ""));
  const label = Math.max(...steps.map((n) => n.length), 2) * 7.5 + 8;
  const extra = { height, plot_bgcolor: colour("--grey"), shapes: cursor(),
    xaxis: { ...thin(steps, wide - longest - 90, label), showgrid: false,
      title: { text: "training step" }, tickangle: 0 },
    yaxis: { ...thin(names, height - 92, 13), showgrid: false, autorange: "reversed" } };
  $("map").style.height = height + "px";
  $("map-title").textContent = title();
  $("map").setAttribute("aria-label", "Map of " + title() + ": " + rows.length + " rows, "
    + places.length + " checkpoints. The table below holds its numbers.");
  Plotly.react("map", [trace], layout(extra), config);
  if (!$("map").dataset.ready) {
    $("map").dataset.ready = "yes";
    $("map").on("plotly_click", (event) => {
      // A heatmap's point names its row and column in pointIndex.
      const [row, column] = event.points[0].pointIndex || [event.points[0].y, event.points[0].x];
      choose(row, column);
    });
    $("map").on("plotly_hover", (event) => { $("reading").textContent = hovered(event); });
  }
  if ($("map-details").open) fillTable("map-table", mapRows());
}
function hovered(event) {
  const [row, column] = event.points[0].pointIndex || [event.points[0].y, event.points[0].x];
  return view.rows[row] ? cellText(view.rows[row], view.places[column]) : "";
}
function selected() {
  const row = view.rows.findIndex((s) => rowKey(s) === state.row);
  const column = view.places.indexOf(state.at === "" ? -1 : Number(state.at));
  return [row, column < 0 ? view.places.length - 1 : column];
}
function cursor() {
  const [row, column] = selected();
  if (row < 0) return [];
  return [{ type: "rect", x0: column - 0.5, x1: column + 0.5, y0: row - 0.5, y1: row + 0.5,
    line: { color: "#ff00c8", width: 2 } }];
}
function choose(row, column) {
  const [rows, places] = [view.rows, view.places];
  row = Math.min(Math.max(row, 0), rows.length - 1);
  column = Math.min(Math.max(column, 0), places.length - 1);
  [state.row, state.at] = [rowKey(rows[row]), String(places[column])];
  $("reading").textContent = cellText(rows[row], places[column]);
  Plotly.relayout("map", { shapes: cursor() });
  drawCourse();
  writeHash();
}

function band(x, y, e, tone) {
  const parts = [[]];
  x.forEach((at, n) => {
    if (y[n] === null || e === 0 || e[n] === null) parts.push([]);
    else parts[parts.length - 1].push([at, y[n] - e[n], y[n] + e[n]]);
  });
  return parts.filter((p) => p.length > 1).map((p) => ({ type: "scatter", mode: "lines",
    x: [...p.map((q) => q[0]), ...p.map((q) => q[0]).reverse()],
    y: [...p.map((q) => q[1]), ...p.map((q) => q[2]).reverse()],
    fill: "toself", fillcolor: tone + "33", line: { width: 0 }, hoverinfo: "skip",
    showlegend: false }));
}
function courseOf(s, run, places) {
  const x = places.map((p) => data.runs[run].steps[p] === null ? p : data.runs[run].steps[p]);
  return { x, y: places.map((p) => s.y ? s.y[p] : null), e: s.e ? places.map((p) => s.e[p]) : 0 };
}
function line(s, run, places, tone, dash) {
  const { x, y, e } = courseOf(s, run, places);
  const text = places.map((p, n) => safe(runName(run) + ", " + rowName(s) + ", " + stepName(run, p)
    + ": " + digits(y[n]) + (e && e[n] !== null ? " ± " + e[n] : "")));
  const shade = band(x, y, e, tone);
  // A change of shape ends a course: what was measured on either side isn't compared.
  for (let n = places.length - 1; s.g && n > 0; n -= 1) {
    if (s.g[places[n]] !== s.g[places[n - 1]]) {
      x.splice(n, 0, x[n]); y.splice(n, 0, null); text.splice(n, 0, "");
    }
  }
  return [...shade, { type: "scatter", mode: "lines+markers", x, y, text,
    hoverinfo: "text", name: safe(runName(run)), connectgaps: false, showlegend: true,
    line: { color: tone, dash, width: 2 }, marker: { size: places.length > 60 ? 3 : 6 } }];
}
function course() {
  const found = view.rows.find((s) => rowKey(s) === state.row) || view.rows[0];
  return found ? { s: found, twin: view.twins.get(rowKey(found)) } : null;
}
function drawCourse() {
  const found = course();
  if (!found) { $("course-title").textContent = "Nothing to show."; Plotly.purge("course"); return; }
  const { s, twin } = found;
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--paper").includes("15181c");
  const [one, two] = dark ? ["#56b4e9", "#e69f00"] : ["#0072b2", "#b25900"];
  const traces = line(s, state.run, view.places, one, "solid");
  if (twin) {
    const run = Number(state.compare);
    traces.push(...line(twin, run, data.runs[run].checkpoints.map((_, p) => p), two, "dash"));
  }
  const name = words(state.metric) + " of " + rowName(s) + " (" + variantName(view.variant) + ")";
  $("course-title").textContent = name + ", " + runName(state.run) + (twin ? " and " + runName(Number(state.compare)) : "");
  const known = s.y ? view.places.map((p) => s.y[p]).filter((v) => v !== null) : [];
  $("course").setAttribute("aria-label", "Course of " + name + (known.length
    ? ": from " + known[0] + " to " + known[known.length - 1] : ": no value"));
  const at = state.at === "" ? null : data.runs[state.run].steps[Number(state.at)];
  const mark = at === null || at === undefined ? [] : [{ type: "line", x0: at, x1: at, yref: "paper",
    y0: 0, y1: 1, line: { color: colour("--quiet"), dash: "dot", width: 1 } }];
  Plotly.react("course", traces, layout({ height: 320, shapes: mark, showlegend: Boolean(twin),
    legend: { orientation: "h", y: 1.12 }, xaxis: { title: { text: "training step" } },
    yaxis: { title: { text: safe(words(state.metric)) } } }), config);
  if ($("course-details").open) fillTable("course-table", courseRows());
}

function mapRows() {
  const head = ["block", "component", "head", "index",
    ...view.places.map((p) => stepName(state.run, p))];
  return [head, ...view.rows.map((s) => [s.b, s.c, s.h, s.i, ...view.places.map((p) => shown(s, p))])];
}
function courseRows() {
  const head = ["run", "checkpoint", "step", "task", "block", "component", "head", "value",
    "standard_error", "status"];
  const found = course();
  if (!found) return [head];
  const pairs = [[found.s, state.run, view.places]];
  if (found.twin) {
    const run = Number(state.compare);
    pairs.push([found.twin, run, data.runs[run].checkpoints.map((_, p) => p)]);
  }
  return [head, ...pairs.flatMap(([s, run, places]) => places.map((p) => [runName(run),
    data.runs[run].checkpoints[p], data.runs[run].steps[p], data.runs[run].tasks[p], s.b, s.c, s.h,
    s.y ? s.y[p] : null, s.e ? s.e[p] : null, s.s[p] || "ok"]))];
}
function csv(rows) {
  const cell = (v) => v === null || v === undefined ? "" : /[",\n\r]/.test(String(v))
    ? '"' + String(v).replace(/"/g, '""') + '"' : String(v);
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}
function fillTable(id, rows) {
  const table = document.createElement("table");
  rows.forEach((row, n) => {
    const tr = table.insertRow();
    row.forEach((value) => {
      const cell = document.createElement(n ? "td" : "th");
      if (!n) cell.scope = "col";
      cell.textContent = value === null ? "" : value;
      tr.append(cell);
    });
  });
  $(id).replaceChildren(table);
}
function download(name, rows) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv(rows)], { type: "text/csv" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
async function copy(text, button) {
  const before = button.dataset.name || (button.dataset.name = button.textContent);
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Could not copy";
    area.remove();
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

for (const id of ["run", "compare", "metric", "level", "show", "block", "component", "head", "from", "to"]) {
  $(id).addEventListener("change", (event) => {
    state[id] = event.target.value;
    if (id === "compare" && event.target.value !== "") state.show = "difference";
    refresh();
  });
}
$("variant").addEventListener("change", (event) => {
  const current = chunksOf(state.metric).find((c) => c.level === state.level);
  const v = current.variants[Number(event.target.value)];
  [state.subject, state.tokens, state.parameters] = [v.subject, v.tokens, v.parameters];
  refresh();
});
$("map").addEventListener("keydown", (event) => {
  const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!move || !view) return;
  event.preventDefault();
  const [row, column] = selected();
  choose(row < 0 ? 0 : row + move[0], row < 0 ? view.places.length - 1 : column + move[1]);
});
$("map-download").addEventListener("click", () => download("map-" + state.metric + ".csv", mapRows()));
$("course-download").addEventListener("click", () => download("course-" + state.metric + ".csv", courseRows()));
$("map-copy").addEventListener("click", (event) => copy(csv(mapRows()), event.target));
$("course-copy").addEventListener("click", (event) => copy(csv(courseRows()), event.target));
$("link-copy").addEventListener("click", (event) => copy(location.href, event.target));
$("map-details").addEventListener("toggle", () => { if ($("map-details").open) fillTable("map-table", mapRows()); });
$("course-details").addEventListener("toggle", () => { if ($("course-details").open) fillTable("course-table", courseRows()); });
$("theme").addEventListener("change", (event) => {
  document.documentElement.dataset.theme = event.target.value;
  refresh();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
let width = window.innerWidth;
let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (view && window.innerWidth !== width) { width = window.innerWidth; drawMap(); drawCourse(); }
  }, 200);
});
// On paper: light, and the pictures as wide as a page.
let before = "";
function dress(theme, paper) {
  document.documentElement.dataset.theme = theme;
  document.documentElement.classList.toggle("printing", paper);
  if (!view) return;
  drawMap();
  drawCourse();
}
addEventListener("beforeprint", () => {
  before = document.documentElement.dataset.theme || "";
  dress("light", true);
});
addEventListener("afterprint", () => dress(before, false));
addEventListener("hashchange", () => {
  if (readHash()) { refresh(); $("explorer").scrollIntoView(); }
});
$("controls").addEventListener("submit", (event) => event.preventDefault());
readHash();
refresh().then(() => { document.documentElement.dataset.ready = "yes"; });
})();
