"use strict";
// The page of a run: live from server-sent events, or frozen, from the story that lies in the page itself.
const MAX = { merges: 400, events: 300, points: 4000 };
const COLOURS = ["--blue", "--green", "--pink", "--amber", "--sky", "--violet", "--olive"]; // of learners alone
const DASHES = ["solid", "dash", "dot", "dashdot"];
const DATA_PARALLEL = ["data parallel", "baseline"]; // as a demo names its curve, and as the process is named
const kept = { merges: [], events: [], loss: {}, training: {}, rewards: {}, speed: [] };
let story = null;

const $ = (id) => document.getElementById(id);
// Plotly reads some HTML in its labels; what other machines said is text.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

function make(tag, attributes = {}, ...children) {
  const space = ["svg", "path", "title"].includes(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(element.style, value);
    else element.setAttribute(key, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function short(value, unit = "") {
  if (value === null || value === undefined) return "–";
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let place = 0;
  while (Math.abs(value) >= 999.5 && place < prefixes.length - 1) { value /= 1000; place += 1; }
  const digits = place === 0 && Number.isInteger(value) ? String(value) : value.toPrecision(3);
  return unit ? `${digits} ${prefixes[place]}${unit}` : `${digits}${prefixes[place]}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const [d, h, m] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${Math.floor(seconds % 60)} s` : `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
}

const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`);
const clock = (t) => new Date(t * 1000).toLocaleTimeString([], { hour12: false });

const learner = (name) => story.learners.find((it) => it.name === name.replace(/'s part$/, ""));

function colour(name) { // the same now, after a reload and in the report
  const it = learner(name);
  return css(it ? COLOURS[it.number % COLOURS.length] : name === "global model" ? "--ink" : "--other");
}

function dash(name) {
  const it = learner(name);
  if (it) return DASHES[(Math.floor(it.number / COLOURS.length) + (name === it.name ? 0 : 1)) % DASHES.length];
  return name === "global model" ? "solid" : DATA_PARALLEL.includes(name) ? "dash" : "dot";
}

const lossLabel = () => (story.demo && !story.groups ? "loss, nats per byte" : "loss"); // of other runs, what their learners log

// --- data

const merged = (before, points) => before.concat(points).sort((a, b) => a[0] - b[0]).slice(-MAX.points);

function take(update) {
  const names = Object.fromEntries(update.learners.map((it) => [it.number, it.name]));
  const named = ({ who, absent, ...it }) => ({ ...it, who: who.map((num) => names[num]), absent: absent.map((num) => names[num]) });
  kept.merges = kept.merges.concat(update.merges.map(named)).slice(-MAX.merges);
  kept.events = kept.events.concat(update.events).slice(-MAX.events).sort((a, b) => a.t - b.t);
  for (const set of ["loss", "training", "rewards"])
    for (const [name, points] of Object.entries(update[set]))
      kept[set][name] = merged(kept[set][name] ?? [], points);
  kept.speed = kept.speed.concat(update.speed).slice(-MAX.points);
  story = update;
  story.learners.sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
  show();
}

// --- what is shown

function show() {
  if (story === null) return;
  const head = story.head;
  document.title = `${head.run || "diloco"}: ${head.state}`;
  $("run").textContent = head.run || "diloco";
  $("lead").textContent = lead(head);
  tiles(head);
  members();
  steer();
  merges();
  heat();
  experts();
  load();
  groups();
  ledger();
  bytes(head);
  events();
  method(head.method);
  if (story.demo) {
    $("run").textContent = story.demo.headline;
    $("lead").textContent = story.demo.text;
  }
  hideEmpty(head);
  charts();
}

function hideEmpty(head) { // a section that has nothing to show isn't there
  const any = (curves) => Object.values(curves).some((points) => points.length);
  const has = {
    loss: any(kept.loss), bytes: head.num_bytes, members: story.learners.length, merges: story.num_merges, heat: story.fragments.length, experts: story.experts.length, load: story.load.length, groups: story.groups, rewards: any(kept.rewards),
    ledger: Object.values(story.ledger).some(Boolean), speed: kept.speed.length, training: any(kept.training), events: kept.events.length,
  };
  for (const [id, shown] of Object.entries(has)) $(id).closest("section").hidden = !shown;
}

const fewer = (ratio, what = " bytes") => {
  const times = Math.max(ratio, 1 / ratio);
  return `${times >= 9.95 ? Math.round(times) : times.toFixed(1)} times ${ratio < 1 ? "more" : "fewer"}${what} than data parallel`;
};

function lead(head) {
  const parts = [`${head.method.name ?? "no method"}, ${head.state}`];
  if (head.live) parts.push(head.planned ? `${head.live} of ${head.planned} learners are live` : head.live === 1 ? "1 learner is live" : `${head.live} learners are live`);
  if (head.loss !== null) parts.push(`held-out loss ${head.loss.toFixed(3)} after ${short(head.loss_at)} tokens`);
  if (head.ratio) parts.push(fewer(head.ratio));
  return `${parts.join("; ")}.`;
}

const tile = (value, text, extra) => make("div", { class: "tile" }, make("b", {}, value), ...(extra ? [extra] : []), make("span", {}, text));

function gaps() { // for each point of the global model: the loss of data parallel at as many tokens, and the gap in percent
  const control = kept.loss[DATA_PARALLEL.find((name) => kept.loss[name])] ?? [];
  return (kept.loss["global model"] ?? []).flatMap(([tokens, loss]) => {
    const end = control.findIndex((point) => point[0] >= tokens);
    if (end < 0 || control[0][0] > tokens) return [];
    const [[x0, y0], [x1, y1]] = [control[Math.max(0, end - 1)], control[end]];
    const other = x1 === x0 ? y1 : y0 + ((y1 - y0) * (tokens - x0)) / (x1 - x0);
    return [{ tokens, loss, other, percent: 100 * (loss / other - 1) }];
  });
}

function reward() { // the newest mean of each task
  const newest = Object.entries(kept.rewards).map(([task, points]) => [task, points.at(-1)[1]]);
  if (!newest.length) return null;
  const mean = newest.reduce((sum, [, value]) => sum + value, 0) / newest.length;
  return tile(mean.toFixed(2), newest.length === 1 ? `mean reward, ${newest[0][0]}` : `mean reward of ${newest.length} tasks`);
}

function recovery(it) { // of the learner that was lost last
  if (it === null) return tile(0, "learners lost");
  return it.seconds === null ? tile("–", `${it.learner} is not back`)
    : tile(duration(it.seconds), `from the ${it.kind === "killed" ? "kill" : "eviction"} of ${it.learner} to its next merge`);
}

function tiles(head) {
  const done = head.budget ? Math.min(1, head.tokens / head.budget) : null;
  const meter = done === null ? null : make("div", { class: "meter" }, make("i", { style: { width: `${100 * done}%` } }));
  const ended = head.state === "ended", passed_s = (ended ? head.ended_at : story.now) - head.started_at;
  const restarts = head.restarts ? `; the syncer was restarted ${head.restarts === 1 ? "once" : `${head.restarts} times`}` : "";
  const speed = ended && passed_s > 0 ? head.tokens / passed_s : head.tokens_per_s;
  const gap = gaps().at(-1), count = ended ? story.learners.length : head.planned || head.live;
  const all = [
    gap ? tile(`${gap.percent > 0 ? "+" : "−"}${Math.abs(gap.percent).toFixed(1)} %`, `${lossLabel()}, against data parallel: ${gap.loss.toFixed(3)} and ${gap.other.toFixed(3)}`)
      : head.loss === null ? reward() : tile(head.loss.toFixed(4), `held-out ${lossLabel()}`),
    tile(short(head.num_bytes, "B"), head.ratio === null ? "on the wire" : `on the wire, ${fewer(head.ratio, "")} (computed, ${short(head.parallel_bytes, "B")})`),
    tile(short(head.tokens), `tokens${done === null ? "" : `, ${percent(done)} of ${short(head.budget)}`}${speed ? `; ${short(speed)} per second` : ""}`, meter),
    ended || head.eta_s === null ? tile(duration(passed_s), (ended ? "from start to end" : "since the start") + restarts)
      : tile(duration(head.eta_s), `to go; ${duration(passed_s)} since the start${restarts}`),
    tile(!ended && head.planned ? `${head.live} of ${count}` : count, `${count === 1 ? "learner" : "learners"} ${ended ? "took part" : "live"}`),
    recovery(head.recovery),
  ];
  $("tiles").replaceChildren(...all.filter(Boolean));
}

const HEADS = ["learner", "state", "step", "s/step", "share", "silence", "tokens", "loss", "sends", "receives", "bytes"];

function members() {
  const rate = (it, value) => (it.state === "gone" ? "–" : `${short(value, "B")}/s`);
  const cells = story.learners.map((it) => [
    it.state === "gone" ? it.reason : it.state, it.step === null ? "–" : it.step.toLocaleString(), it.step_s === null ? "–" : it.step_s.toPrecision(2), percent(it.share),
    it.silent_s === null ? "–" : duration(it.silent_s), short(it.tokens), it.loss === null ? "–" : it.loss.toFixed(3),
    rate(it, it.sent_bytes_per_s), rate(it, it.received_bytes_per_s), short(it.sent_bytes + it.received_bytes, "B"),
  ]);
  const shown = HEADS.slice(1).map((_, index) => cells.length === 0 || cells.some((each) => each[index] !== "–"));
  const rows = story.learners.map((it, row) => {
    const bad = it.state === "lost" || (it.state === "gone" && it.reason !== "left");
    const name = make("td", {}, make("span", { class: "dot", style: { background: colour(it.name) } }), it.name);
    if (it.joined > 1) name.append(` (joined ${it.joined} times)`);
    return make("tr", {}, name, ...cells[row].map((text, index) =>
      make("td", { "data-head": HEADS[index + 1], class: index === 0 ? (bad ? "bad" : "") : "n" }, text)).filter((_, index) => shown[index]));
  });
  const heads = HEADS.map((text, index) => make("th", { scope: "col", class: index > 1 ? "n" : "" }, text))
    .filter((_, index) => index === 0 || shown[index - 1]);
  $("members").replaceChildren(make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));
}

const MAX_NAMES = 8;
const some = (names) => (names.length > MAX_NAMES ? `${names.length} learners` : names.join(", "));

function merges() {
  const lines = kept.merges.slice(-8).reverse().map((merge) => {
    const absent = merge.absent.length ? `; without ${some(merge.absent)}` : "";
    const scale = merge.scale === 1 ? "" : `; a step of ${merge.scale.toFixed(2)}`;
    const text = `version ${merge.version} of fragment ${merge.fragment} by ${some(merge.who)}${absent}${scale}: ${merge.reason || "merged"}`;
    return make("li", {}, make("time", {}, clock(merge.t)), text);
  });
  const rest = story.num_merges - lines.length;
  if (rest > 0) lines.push(make("li", { class: "note" }, `and ${rest.toLocaleString()} before`));
  $("merges").replaceChildren(...lines);
}

function heat() {
  const wide = story.fragments.length > 24;
  const heads = story.fragments.map((_, index) => make("th", { scope: "col", class: "n" }, wide ? "" : index));
  const versions = story.fragments.map((it) => make("td", { class: "cell" }, wide ? "" : it.version));
  const rows = story.learners.filter((it) => it.behind.length).map((it) => {
    const cells = it.behind.map((behind, index) => {
      if (behind === null) return make("td", { class: "cell", title: `${it.name} does not hold fragment ${index}` }, wide ? "" : "–");
      const strength = Math.min(1, behind / 4);
      const style = { background: `color-mix(in srgb, var(--other) ${Math.round(60 * strength)}%, var(--card))` };
      return make("td", { class: "cell", style, title: `${it.name}, fragment ${index}: ${behind} behind` }, wide ? "" : behind);
    });
    return make("tr", {}, make("th", { scope: "row" }, it.name), ...cells);
  });
  $("heat").replaceChildren(
    make("thead", {}, make("tr", {}, make("th", {}, "fragment"), ...heads)),
    make("tbody", {}, make("tr", {}, make("th", { scope: "row" }, "newest version"), ...versions), ...rows));
  $("heat-note").hidden = rows.length === 0;
}

const ranges = (pairs) => pairs.map(([first, stop]) => (stop === first + 1 ? first : `${first}–${stop - 1}`)).join(", ");

function strip(label, title, values, paint, text) { // a cell for each expert, however many there are
  const most = Math.max(1, ...values);
  const cells = values.map((value, expert) => make("i", {
    title: text(expert), style: { background: `color-mix(in srgb, ${paint} ${Math.round((100 * value) / most)}%, var(--line))` },
  }));
  return make("div", { class: "strip" }, make("span", { title }, label), make("div", { role: "img", "aria-label": `${label}: ${title}` }, ...cells));
}

function experts() { // a strip for each quantity
  const mean = ([merges, learners]) => (merges ? learners / merges : 0);
  const told = (expert) => {
    const [merges, , version] = story.experts[expert];
    const times = merges === 1 ? "once" : `${merges} times`;
    return merges ? `expert ${expert}: merged ${times}, by ${mean(story.experts[expert]).toFixed(1)} learners on average, last in version ${version}` : `expert ${expert}: not merged yet`;
  };
  const of = (values) => (values.length ? `${Math.min(...values)} to ${Math.max(...values)}` : "");
  const counts = story.experts.map(([merges]) => merges), means = story.experts.map(mean).map((it) => +it.toFixed(1));
  const rows = story.learners.filter((it) => it.experts.length).map((it) => {
    const own = story.experts.map((_, expert) => +it.experts.some(([first, stop]) => first <= expert && expert < stop));
    return strip(it.name, `${it.holds_part ? "holds and trains" : "trains"} experts ${ranges(it.experts)}`, own, colour(it.name), (expert) => `expert ${expert}: ${own[expert] ? "trained" : it.holds_part ? "not held" : "not trained"} by ${it.name}`);
  });
  $("experts").replaceChildren(
    strip(`merged ${of(counts)} times`, "how often each was merged", counts, "var(--ink)", told),
    strip(`by ${of(means)} learners`, "learners in these merges, on average", means, "var(--ink)", told), ...rows);
  $("untrained").textContent = story.untrained.length ? `No live learner trains experts ${ranges(story.untrained)}: nothing is merged into them.` : "";
}

function load() { // of each block of a mixture
  $("load").replaceChildren(...story.load.map((it) => {
    const idle = it.tokens.filter((tokens) => !tokens).length, total = it.tokens.reduce((sum, tokens) => sum + tokens, 0) || 1;
    const title = `router entropy ${it.entropy.toFixed(2)} nats, ${idle} idle`;
    return strip(`${it.block}: ${it.entropy.toFixed(2)} nats, ${idle} idle`, title, it.tokens, "var(--ink)", (expert) => `expert ${expert}: ${((100 * it.tokens[expert]) / total).toFixed(1)} % of the tokens`);
  }));
}

function shade(key, index) {
  return /^(lost|refused)/.test(key) ? "var(--bad)" : `color-mix(in srgb, var(--ink) ${Math.max(12, 86 - 22 * index)}%, var(--bg))`;
}

function parts(found, told) { // of a whole: a bar, and its keys
  const entries = Object.entries(found).filter(([, value]) => value > 0), total = entries.reduce((sum, [, value]) => sum + value, 0);
  const bar = entries.map(([key, value], index) => make("i", { style: { width: `${(100 * value) / total}%`, background: shade(key, index) }, title: key }));
  const keys = entries.map(([key, value], index) => make("span", {}, make("span", { class: "dot", style: { background: shade(key, index) } }), `${key} ${told(value, total)}`));
  return [make("div", { class: "bar", "aria-hidden": "true" }, ...bar), make("div", { class: "keys" }, ...keys)];
}

function ledger() {
  const found = Object.fromEntries(Object.entries(story.ledger).map(([key, tokens]) => [key.replace("discarded: not merged", "not merged"), tokens]));
  $("ledger").replaceChildren(...parts(found, (tokens, total) => `${((100 * tokens) / total).toFixed(1)} %`));
}

const WORKERS = ["worker", "role", "generated", "scored", "refused", "holds", "version"];

function groups() { // of reinforcement learning
  const it = story.groups;
  if (!it) return;
  const count = (value) => value.toLocaleString();
  const states = parts({ waiting: it.waiting, leased: it.leased, ...it.ended }, count);
  const staleness = parts(Object.fromEntries(Object.entries(it.staleness).map(([versions, num]) => [`${versions} versions old`, num])), count);
  $("groups").replaceChildren(make("p", {}, `${count(it.acknowledged)} acknowledged; ${count(it.prompts)} prompts are generated`), ...states, ...staleness);
  const cell = (text, index) => make("td", { "data-head": WORKERS[index], class: index > 1 ? "n" : "" }, text);
  const rows = it.workers.map((each) => [each.live ? each.name : `${each.name} (absent)`, each.role, count(each.generated), count(each.scored), count(each.refused),
    count(each.holds), each.versions.length ? count(each.versions.reduce((sum, version) => sum + version, 0)) : "–"]);
  const heads = WORKERS.map((text, index) => make("th", { scope: "col", class: index > 1 ? "n" : "" }, text));
  $("workers").replaceChildren(make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell)))));
  $("refusals").replaceChildren(...it.refusals.slice(-5).reverse().map(([worker, why]) => make("li", { class: "bad" }, `${worker}: ${why}`)));
}

function bytes(head) { // bars of true length: 49 times fewer is a sliver
  const longest = Math.max(head.num_bytes, head.parallel_bytes, 1);
  const row = (name, value, paint) => make("div", { class: "row" }, make("span", {}, name),
    make("div", { class: "bar" }, make("i", { style: { width: `${(80 * value) / longest}%`, background: paint, minWidth: "2px" } }), make("span", {}, short(value, "B"))));
  const rows = [row("this run", head.num_bytes, "var(--ink)")];
  if (head.ratio) rows.push(row("data parallel", head.parallel_bytes, "var(--other)"), make("p", {}, `${fewer(head.ratio)}.`));
  $("bytes").replaceChildren(...rows);
}

function events() {
  $("events").replaceChildren(...kept.events.slice().reverse().map((event) =>
    make("li", { class: event.tone === "bad" ? "bad" : "" }, make("time", {}, clock(event.t)), event.text)));
}

function method(values) {
  const text = (value) => value === null ? "–" : typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value).map(([key, inner]) => `${key} ${text(inner)}`).join(", ") : String(value);
  $("method").replaceChildren(...Object.entries(values).map(([key, value]) =>
    make("tr", {}, make("th", { scope: "row" }, key), make("td", {}, text(value)))));
}

// --- charts

const layout = (x, y, height, more = {}) =>
  themed({ height, margin: { l: 50 }, xaxis: { title: { text: x } }, yaxis: { title: { text: y } }, ...more });

const drawn = {};

function draw(id, traces, shape) {
  const key = JSON.stringify([traces, shape]);
  if (drawn[id] === key || $(id).closest("section").hidden) return;
  drawn[id] = key;
  Plotly.react(id, traces, shape, CONFIG);
}

function lines(curves) {
  const few = Object.values(curves).some((points) => points.length < 60);
  return Object.entries(curves).sort().map(([name, points]) => ({
    x: points.map((point) => point[0]), y: points.map((point) => point[1]), name: plain(DATA_PARALLEL.includes(name) ? DATA_PARALLEL[0] : name), type: "scatter",
    mode: few ? "lines+markers" : "lines", marker: { size: 5, color: colour(name) }, line: { color: colour(name), width: 2, dash: dash(name) },
  }));
}

function charts() {
  const found = gaps(), unit = lossLabel();
  const loss = layout("tokens trained by the run", unit, found.length ? 400 : 300, { showlegend: true, shapes: warmStart() });
  loss.xaxis.rangemode = "tozero";
  $("gap-note").hidden = found.length === 0;
  const traces = lines(kept.loss);
  if (found.length) {
    loss.yaxis.domain = [0.34, 1];
    loss.yaxis2 = { ...loss.yaxis, domain: [0, 0.24], title: { text: "gap, %", font: { size: 12 } }, zeroline: true, zerolinecolor: css("--other"), zerolinewidth: 2, rangemode: "tozero", nticks: 4 };
    loss.xaxis.anchor = "y2";
    const line = lines({ "global model": found.map((it) => [it.tokens, it.percent]) })[0];
    traces.push({ ...line, yaxis: "y2", name: "gap", showlegend: false });
  }
  draw("loss", traces, loss);
  const tasks = lines(kept.rewards).map((line, index) => {
    const color = css(index < DASHES.length ? "--ink" : "--other");
    return { ...line, marker: { size: 5, color }, line: { color, width: 2, dash: DASHES[index % DASHES.length] } };
  });
  draw("rewards", tasks, layout("groups scored", "mean reward", 260, { showlegend: true }));
  const own = lines(kept.training);
  draw("training", own, layout("inner step", unit, 300, { showlegend: own.length <= 12 }));
  const when = (points) => points.map((point) => new Date(point[0] * 1000));
  draw("speed", [{ x: when(kept.speed), y: kept.speed.map((point) => point[1]), type: "scatter", mode: "lines",
    line: { color: css("--ink"), width: 2 }, name: "tokens/s" }], layout("", "tokens per second", 220, { showlegend: false, yaxis: { title: { text: "tokens per second" }, rangemode: "tozero" } }));
  timeline();
}

function warmStart() { // the tokens that were trained before the run had its model
  const x1 = story.head.began_at;
  if (!Object.values(kept.loss).some((points) => points.some((point) => point[0] < x1))) return [];
  return [{ type: "rect", yref: "paper", x0: 0, x1, y0: 0, y1: 1, fillcolor: css("--line"), opacity: 0.45, line: { width: 0 }, layer: "below",
    name: "warm start", showlegend: true }];
}

const CELL = 10; // pixels of a box of the timeline, and of a mark
const MARKS = { // a shape for each kind; that of a loss is in the colour of a warning
  killed: ["bad", "M1 1l8 8m0-8l-8 8", "killed"], evicted: ["bad", "M5 1l4 4-4 4-4-4z", "evicted: silent, stalled or replaced"],
  joined: ["full", "M5 1l4 8h-8z", "joined"], left: ["", "M1 1h8l-4 8z", "left"],
  merged: ["full", "M2 0h6v11h-6z", "merged"], missed: ["", "M2 0h6v11h-6z", "missed"],
};
const canvas = (width, height, ...inner) => make("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, ...inner);
const mark = (kind, at, text) => make("path", { class: `${kind} ${MARKS[kind][0]}`, d: MARKS[kind][1], transform: `translate(${at * CELL} 0)` }, make("title", {}, text));

function timeline() { // a row for each learner: its events above boxes, each of which has the merges of a short time
  const place = $("timeline"), isWhole = story.num_merges === kept.merges.length;
  if (!place.clientWidth || !kept.merges.length) return;
  const events = kept.events.filter((it) => MARKS[it.kind] && learner(it.learner) && (isWhole || it.t >= kept.merges[0].t));
  const times = [...kept.merges, ...events].map((it) => it.t), first = Math.min(...times), last = Math.max(...times);
  const num = Math.floor((place.clientWidth - (matchMedia("(max-width: 560px)").matches ? 0 : 190)) / CELL);
  const bin = (t) => Math.min(num - 1, Math.floor((num * (t - first)) / (last - first || 1)));
  const box = (at, height) => `M${at * CELL + 2} 26v${-height}h6v${height}z`;
  const rows = story.learners.map(({ name }) => {
    const count = (part) => kept.merges.filter((it) => it[part].includes(name)).reduce((sums, it) => { sums[bin(it.t)] += 1; return sums; }, Array(num).fill(0));
    const merged = count("who"), missed = count("absent"), taken = new Set();
    const total = (counts) => counts.reduce((sum, it) => sum + it, 0);
    const marks = events.filter((it) => it.learner === name).slice(-num).map((it) => {
      let at = bin(it.t);
      for (let way = 1; taken.has(at); at += way) if (at === num - 1) way = -1; // the next place that is free
      taken.add(at);
      return mark(it.kind, at, `${clock(it.t)} ${it.text}`);
    });
    return make("div", { class: "strip" }, make("span", { title: name }, name), canvas(num * CELL, 28,
      make("title", {}, `${name}: in ${total(merged)} merges, missed ${total(missed)}`),
      make("path", { class: "missed", d: missed.map((it, at) => (it ? box(at, 12) : "")).join("") }),
      make("path", { class: "merged full", style: { fill: colour(name) }, d: merged.map((it, at) => (it ? box(at, (12 * it) / (it + missed[at])) : "")).join("") }), ...marks));
  });
  place.replaceChildren(...rows);
  const kinds = ["merged", "missed", ...new Set(events.map((it) => it.kind))];
  $("marks").replaceChildren(...kinds.map((kind) => make("span", { class: "mark" }, canvas(CELL, 12, mark(kind, 0, "")), MARKS[kind][2])));
  const when = (t) => (last - first < 86400 ? clock(t) : new Date(t * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" }));
  $("times").replaceChildren(make("span"), make("div", { class: "times", style: { width: `${num * CELL}px` } }, ...[first, (first + last) / 2, last].map((t) => make("span", {}, when(t)))));
}

addEventListener("resize", () => { if (story) timeline(); });

// --- orders of an admin

const token = document.querySelector("meta[name=orders]")?.content ?? "";
const ORDERS = { // what will happen, as a question
  drain: (who) => `Drain ${who}? It sends its last work, saves and leaves, and may not join again before it is admitted.`,
  evict: (who) => `Evict ${who}? What it has not sent is lost. It joins again by itself.`,
  ban: (who) => `Evict and ban ${who}? What it has not sent is lost, and it may not join again before it is admitted.`,
  admit: (who) => `Admit ${who}? It may join again.`,
  pause: () => "Pause the run? Nothing is merged, and every learner stops after its next step.",
  resume: () => "Resume the run?",
  quorum: (_, number) => `Set the quorum to ${number}? No round is merged with fewer learners.`,
  end: () => "End the run? Every learner sends its last work, saves and leaves, and none may join.",
};
const OF_LEARNERS = ["drain", "evict", "ban", "admit"];

function steer() {
  $("steer").hidden = token === "";
  const names = story.learners.map((it) => it.name), shown = [...$("whom").options].map((it) => it.value);
  if (JSON.stringify(names) === JSON.stringify(shown)) return;
  const chosen = $("whom").value;
  $("whom").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(chosen)) $("whom").value = chosen;
}

function ask(kind) {
  const who = $("whom").value, number = Number($("at-least").value);
  $("what").textContent = ORDERS[kind](who, number);
  $("why").value = "";
  $("confirm").returnValue = "no";
  $("confirm").onclose = () => {
    if ($("confirm").returnValue !== "yes") return;
    const order = { what: kind === "ban" ? "evict" : kind, bans: kind === "ban", reason: $("why").value };
    if (OF_LEARNERS.includes(kind)) order.learner = who;
    if (kind === "quorum") order.at_least = number;
    give(order);
  };
  $("confirm").showModal();
}

async function give(order) {
  $("answer").textContent = "…";
  try {
    const answer = await fetch("orders", { method: "POST", headers: { "X-Diloco-Token": token }, body: JSON.stringify(order) });
    const text = await answer.text();
    let told = { error: text };
    if ((answer.headers.get("content-type") ?? "").startsWith("application/json")) told = JSON.parse(text);
    $("answer").textContent = told.said ?? told.error;
    $("answer").className = told.said ? "good" : "bad";
  } catch (error) {
    $("answer").textContent = `The syncer was not reached (${error.message}); look at the events before you try again.`;
    $("answer").className = "bad";
  }
}

for (const button of document.querySelectorAll("[data-order]")) button.addEventListener("click", () => ask(button.dataset.order));

// --- where it comes from

function follow() {
  const source = new EventSource("updates");
  const say = (text, kind) => { $("link").textContent = text; $("link").className = `chip ${kind}`; };
  source.addEventListener("begin", () => { Object.assign(kept, { merges: [], events: [], loss: {}, training: {}, rewards: {}, speed: [] }); });
  source.onmessage = (message) => { say("live", "live"); take(JSON.parse(message.data)); };
  source.addEventListener("failed", () => { source.close(); say("stopped: the syncer's log has the reason", "gone"); });
  source.onerror = () => {
    if (story?.head.state === "ended") say("ended", "");
    else if (source.readyState !== EventSource.CLOSED) say("not connected; trying again", "gone");
    else say("no longer let in: reload the page, or ask for a new link with `diloco page`", "gone");
  };
}

isDark.addEventListener("change", show);
const frozen = $("frozen").textContent.trim();
if (frozen) take(JSON.parse(frozen));
else follow();
