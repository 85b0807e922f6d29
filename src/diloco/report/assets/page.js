"use strict";
// The page of a run: live from server-sent events, or frozen, from the story that lies in the page itself.
const MAX = { merges: 400, events: 300, points: 4000 };
const COLOURS = ["--blue", "--red", "--green", "--pink", "--amber", "--sky", "--violet", "--olive"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const kept = { merges: [], events: [], loss: {}, training: {}, rewards: {}, speed: [], wire: [] };
const FIXED = new Map([["global model", "--ink"], ["data parallel", "--other"]]);
let story = null;

const $ = (id) => document.getElementById(id);
// Plotly reads some HTML in its labels; what other machines said is text.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
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

function colour(name) {
  return css(FIXED.get(name) ?? COLOURS[place(name) % COLOURS.length]);
}
const dash = (name) => DASHES[FIXED.has(name) ? 0 : Math.floor(place(name) / COLOURS.length) % DASHES.length];

function place(name) { // among the colours: the same now, after a reload and in the report
  const numbers = new Map(story.learners.map((it) => [it.name, it.number]));
  if (numbers.has(name)) return numbers.get(name);
  const others = Object.keys({ ...kept.loss, ...kept.training }).filter((it) => !FIXED.has(it) && !numbers.has(it));
  const own = others.indexOf(name); // controls have theirs from the other end
  return own + COLOURS.length - 1 - 2 * (own % COLOURS.length);
}

// --- data

const merged = (before, points) => before.concat(points).sort((a, b) => a[0] - b[0]).slice(-MAX.points);

function take(update) {
  for (const list of ["merges", "events"]) kept[list] = kept[list].concat(update[list]).slice(-MAX[list]);
  for (const set of ["loss", "training", "rewards"])
    for (const [name, points] of Object.entries(update[set]))
      kept[set][name] = merged(kept[set][name] ?? [], points);
  for (const list of ["speed", "wire"]) kept[list] = kept[list].concat(update[list]).slice(-MAX.points);
  story = update;
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

const fewer = (ratio) => {
  const times = Math.max(ratio, 1 / ratio);
  return `${times >= 9.95 ? Math.round(times) : times.toFixed(1)} times ${ratio < 1 ? "more" : "fewer"} bytes than data parallel`;
};

function lead(head) {
  const parts = [`${head.method.name ?? "no method"}, ${head.state}`];
  if (head.live) parts.push(head.planned ? `${head.live} of ${head.planned} learners are live` : head.live === 1 ? "1 learner is live" : `${head.live} learners are live`);
  if (head.loss !== null) parts.push(`held-out loss ${head.loss.toFixed(3)} after ${short(head.loss_at)} tokens`);
  if (head.ratio) parts.push(fewer(head.ratio));
  return `${parts.join("; ")}.`;
}

const tile = (value, text, extra) => make("div", { class: "tile" }, make("b", {}, value), ...(extra ? [extra] : []), make("span", {}, text));

function tiles(head) { // one without a number isn't there
  const done = head.budget ? Math.min(1, head.tokens / head.budget) : null;
  const meter = done === null ? null : make("div", { class: "meter" }, make("i", { style: { width: `${100 * done}%` } }));
  const ended = head.state === "ended", passed_s = (ended ? head.ended_at : story.now) - head.started_at;
  const restarts = head.restarts ? `; the syncer was restarted ${head.restarts === 1 ? "once" : `${head.restarts} times`}` : "";
  const time = ended || head.eta_s === null ? tile(duration(passed_s), (ended ? "from start to end" : "since the start") + restarts)
    : tile(duration(head.eta_s), `to go; ${duration(passed_s)} since the start${restarts}`);
  const speed = ended && passed_s > 0 ? tile(short(head.tokens / passed_s), "tokens per second, on average")
    : head.tokens_per_s === null ? null : tile(short(head.tokens_per_s), "tokens per second");
  const all = [
    head.loss === null ? null : tile(head.loss.toFixed(4), "held-out loss, nats per token"),
    tile(short(head.tokens), head.budget ? `tokens, ${percent(done)} of ${short(head.budget)}` : "tokens trained", meter),
    time,
    speed,
    ended ? tile(story.learners.length, story.learners.length === 1 ? "learner took part" : "learners took part")
      : tile(head.planned ? `${head.live} of ${head.planned}` : head.live, (head.planned || head.live) === 1 ? "learner live" : "learners live"),
    tile(short(head.num_bytes, "B"), head.ratio === null ? "on the wire" : `on the wire; data parallel ${short(head.parallel_bytes, "B")}`),
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

function merges() {
  const lines = kept.merges.slice(-8).reverse().map((merge) => {
    const absent = merge.absent.length ? `; without ${merge.absent.join(", ")}` : "";
    const scale = merge.scale === 1 ? "" : `; a step of ${merge.scale.toFixed(2)}`;
    const text = `version ${merge.version} of fragment ${merge.fragment} by ${merge.who.join(", ")}${absent}${scale}: ${merge.reason || "merged"}`;
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
      const style = { background: `color-mix(in srgb, var(--lost) ${Math.round(85 * strength)}%, var(--card))` };
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
    return strip(it.name, `trains experts ${ranges(it.experts)}`, own, colour(it.name), (expert) => `expert ${expert}: ${own[expert] ? "trained" : "not trained"} by ${it.name}`);
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

function parts(found, paint, told) { // of a whole: a bar, and its keys
  const entries = Object.entries(found).filter(([, value]) => value > 0), total = entries.reduce((sum, [, value]) => sum + value, 0);
  const bar = entries.map(([key, value]) => make("i", { style: { width: `${(100 * value) / total}%`, background: paint(key) }, title: key }));
  const keys = entries.map(([key, value]) => make("span", {}, make("span", { class: "dot", style: { background: paint(key) } }), `${key} ${told(value, total)}`));
  return [make("div", { class: "bar", "aria-hidden": "true" }, ...bar), make("div", { class: "keys" }, ...keys)];
}

function ledger() {
  const paint = (key) => ({ merged: "var(--merged)", pending: "var(--pending)", lost: "var(--lost)" })[key] ?? "var(--other)";
  const found = Object.fromEntries(Object.entries(story.ledger).map(([key, tokens]) => [key.replace("discarded: not merged", "not merged"), tokens]));
  $("ledger").replaceChildren(...parts(found, paint, (tokens, total) => `${((100 * tokens) / total).toFixed(1)} %`));
}

const WORKERS = ["worker", "role", "generated", "scored", "refused", "holds", "version"];

function groups() { // of reinforcement learning
  const it = story.groups;
  if (!it) return;
  const paint = (key) => ({ merged: "var(--merged)", waiting: "var(--pending)", leased: "var(--blue)", stale: "var(--lost)", refused: "var(--red)" })[key] ?? "var(--other)";
  const count = (value) => value.toLocaleString();
  const states = parts({ waiting: it.waiting, leased: it.leased, ...it.ended }, paint, count);
  const staleness = parts(Object.fromEntries(Object.entries(it.staleness).map(([versions, num]) => [`${versions} versions old`, num])),
    (key) => `color-mix(in srgb, var(--ink) ${90 - Math.min(70, 18 * parseInt(key))}%, transparent)`, count);
  $("groups").replaceChildren(make("p", {}, `${count(it.acknowledged)} acknowledged; ${count(it.prompts)} prompts are generated`), ...states, ...staleness);
  const cell = (text, index) => make("td", { "data-head": WORKERS[index], class: index > 1 ? "n" : "" }, text);
  const rows = it.workers.map((each) => [each.live ? each.name : `${each.name} (gone)`, each.role, count(each.generated), count(each.scored), count(each.refused),
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
  const tone = { good: "good", bad: "bad", plain: "" };
  $("events").replaceChildren(...kept.events.slice().sort((a, b) => b.t - a.t).map((event) =>
    make("li", { class: tone[event.tone] }, make("time", {}, clock(event.t)), event.text)));
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
    x: points.map((point) => point[0]), y: points.map((point) => point[1]), name: plain(name), type: "scatter",
    mode: few ? "lines+markers" : "lines", marker: { size: 5, color: colour(name) }, line: { color: colour(name), width: 2, dash: dash(name) },
  }));
}

function charts() {
  const loss = layout("tokens trained by the run", "loss, nats per token", 300, { showlegend: true, ...warmStart() });
  loss.xaxis.rangemode = "tozero";
  draw("loss", lines(kept.loss), loss);
  const tasks = lines(kept.rewards).map((line, index) => {
    const color = css(COLOURS[index % COLOURS.length]);
    return { ...line, marker: { size: 5, color }, line: { color, width: 2 } };
  });
  draw("rewards", tasks, layout("groups scored", "mean reward", 260, { showlegend: true }));
  draw("training", lines(kept.training), layout("inner step", "loss, nats per token", 300, { showlegend: true }));
  const when = (points) => points.map((point) => new Date(point[0] * 1000));
  draw("speed", [{ x: when(kept.speed), y: kept.speed.map((point) => point[1]), type: "scatter", mode: "lines",
    line: { color: css("--accent"), width: 2 }, name: "tokens/s" }], layout("", "tokens per second", 220, { showlegend: false }));
  timeline();
}

function warmStart() { // the tokens that were trained before the run had its model
  const x1 = story.head.began_at;
  if (!Object.values(kept.loss).some((points) => points.some((point) => point[0] < x1))) return {};
  const band = { type: "rect", yref: "paper", x0: 0, x1, y0: 0, y1: 1, fillcolor: css("--line"), opacity: 0.45, line: { width: 0 }, layer: "below" };
  const text = { text: "warm start", x: x1 / 2, yref: "paper", y: 0, yanchor: "bottom", showarrow: false, font: { color: css("--soft") } };
  return { shapes: [band], annotations: [text] };
}

function timeline() {
  const names = story.learners.map((it) => it.name).reverse();
  const why = (merge) => plain(`version ${merge.version} of fragment ${merge.fragment} by ${merge.who.join(", ")}: ${merge.reason || "merged"}`);
  const row = (name, part, marker, label) => {
    const found = kept.merges.filter((merge) => merge[part].includes(name));
    return { x: found.map((merge) => new Date(merge.t * 1000)), y: found.map(() => plain(name)), text: found.map(why),
      hovertemplate: `%{text}<extra>${label}</extra>`, type: "scatter", mode: "markers", marker, showlegend: false };
  };
  const traces = names.flatMap((name) => [
    row(name, "who", { symbol: "line-ns-open", size: 16, color: colour(name), line: { width: 2, color: colour(name) } }, "merged"),
    row(name, "absent", { symbol: "x-thin-open", size: 8, color: css("--bad"), line: { width: 2, color: css("--bad") } }, "missed"),
  ]);
  const mark = (kind, marker, label) => {
    const found = kept.events.filter((event) => event.kind === kind && names.includes(event.learner));
    return { x: found.map((event) => new Date(event.t * 1000)), y: found.map((event) => plain(event.learner)),
      text: found.map((event) => plain(event.text)), hovertemplate: `%{text}<extra></extra>`, type: "scatter", mode: "markers",
      marker: { size: 12, line: { width: 1, color: css("--bg") }, ...marker }, name: label, showlegend: found.length > 0 };
  };
  traces.push(
    mark("evicted", { symbol: "diamond-open", size: 20, line: { width: 2 }, color: css("--bad") }, "evicted: silent, stalled or replaced"),
    mark("joined", { symbol: "triangle-right", color: css("--good") }, "joined"), // inside the diamond, at the same moment
    mark("killed", { symbol: "x", color: css("--bad") }, "killed"),
    mark("left", { symbol: "square", color: css("--soft") }, "left"));
  const shape = layout("", "", 100 + 34 * Math.max(1, names.length));
  shape.yaxis = { ...shape.yaxis, type: "category", categoryarray: names.map(plain), categoryorder: "array", range: [-0.6, names.length - 0.4] };
  draw("timeline", traces, shape);
}

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
  source.addEventListener("begin", () => { Object.assign(kept, { merges: [], events: [], loss: {}, training: {}, speed: [], wire: [] }); });
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
