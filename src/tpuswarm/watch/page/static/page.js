// Show a stream of server-sent events: first the whole view, then changes. A reload loses nothing.

const $ = (id) => document.getElementById(id);
const { token = "", run: chosenRun } = Object.fromEntries(new URLSearchParams(location.search));
const url = (path, about = {}) => `${path}?${new URLSearchParams({ ...(chosenRun && { run: chosenRun }), ...about, token })}`;
const padTwo = (value) => `${value}`.padStart(2, "0");
function formatTime(seconds) {
  const at = new Date(seconds * 1000);
  return `${padTwo(at.getMonth() + 1)}-${padTwo(at.getDate())} ${padTwo(at.getHours())}:${padTwo(at.getMinutes())}:${padTwo(at.getSeconds())}`;
}
function formatDuration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor((s % 3600) / 60);
  return h >= 48 ? `${(h / 24).toFixed(1)} days` : h ? `${h} h ${padTwo(m)} min` : m ? `${m} min ${padTwo(s % 60)} s` : `${s} s`;
}
const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));
const element = (name, text, kind = "") => Object.assign(document.createElement(name), { textContent: text, className: kind });

const COLORS = { running: "good", alive: "good", finished: "good", ended: "dim", evaluating: "good", joining: "warn", stopped: "warn", lost: "bad", failed: "bad", killed: "bad", left: "dim" };
const KINDS = { green: "good", yellow: "warn", red: "bad", dim: "dim" };
const MAX_COLUMNS = 400, MAX_EVENTS = 3000;
const lossPlot = new Curves($("loss"), figure4), speedPlot = new Curves($("speed"), (value) => `${si(value)}/s`), sharesPlot = new Shares($("shares"));
speedPlot.fromZero = true;

let seen = null;
const EMPTY = { losses: [], speeds: [], evaluations: [], names: [], columns: [], events: [], pictures: [], runs: [], members: {}, machines: {}, alarms: [], problems: [], facts: {} };

function view(all) {
  seen = { ...EMPTY, ...all };
  $("events").replaceChildren();
  addEvents(seen.events);
  $("older").hidden = !seen.events.length || seen.events[0][0] === 0;
  draw(Object.keys(seen));
}

function update(news) {
  if (!seen) return;
  for (const [name, value] of Object.entries(news)) {
    if (name === "members" || name === "machines") {
      for (const [key, row] of Object.entries(value)) if (row === null) delete seen[name][key]; else seen[name][key] = row;
    } else if (name === "losses" || name === "speeds") seen[name].splice(value[0], Infinity, ...value[1]);
    else if (name === "evaluations" || name === "columns") seen[name].push(...value);
    else if (name === "events") addEvents(value);
    else seen[name] = value;
  }
  if (seen.columns.length > MAX_COLUMNS) seen.columns = thinColumns(seen.columns);
  draw(Object.keys(news));
}

function thinColumns(columns) { // evenly spaced, with the last one
  const first = columns[0][0], step = (columns.at(-1)[0] - first) / (MAX_COLUMNS / 2 - 1), found = [];
  for (const column of columns) if (column[0] >= first + found.length * step - 1e-6) found.push(column);
  if (found.at(-1) !== columns.at(-1)) found.push(columns.at(-1));
  return found;
}

function draw(changed) {
  const has = (...names) => names.some((name) => changed.includes(name));
  const unit = seen.facts.unit ?? "tokens";
  if (has("facts")) facts(seen.facts);
  for (const name of ["problems", "alarms"]) if (has(name)) $(name).replaceChildren(...seen[name].map((text) => element("p", name === "alarms" ? `alarm: ${text}` : text)));
  $("plots").hidden = !seen.losses.length && !seen.columns.length;
  if (has("losses", "evaluations") && !$("plots").hidden) lossPlot.show([
    { name: "training", points: seen.losses, color: "--one" },
    { name: "held out", points: seen.evaluations.map(([at, loss]) => [at, loss, loss, loss]), color: "--two", dots: true },
  ], unit + (seen.facts.swarm ? " counted" : ""));
  if (has("speeds") && !$("plots").hidden) speedPlot.show([{ name: `${unit}/s`, points: seen.speeds, color: "--one" }], unit);
  $("shares-of").hidden = !seen.columns.length;
  if (has("columns", "names") && seen.columns.length) {
    const last = seen.columns.at(-1)[0];
    const few = last > seen.columns.length ? `${number(seen.columns.length)} of ${number(last)} versions` : "each version";
    sharesPlot.show(seen.names, seen.columns);
    $("shares-name").replaceChildren("Who made each version ", element("span", `${few}; the colour is the share, up to ${(sharesPlot.most / 10).toFixed(1)}%; red was not counted`));
  }
  if (has("members", "facts")) members();
  if (has("machines")) machines();
  if (has("pictures")) pictures();
  if (has("runs")) runs();
  $("events-of").hidden = !$("events").children.length;
}

function facts(now) {
  const name = now.run || now.fleet || "tpuswarm";
  document.title = `${name}${now.loss != null ? ` · ${figure4(now.loss)}` : ""}`;
  $("run").textContent = name;
  $("what").textContent = [now.recipe, now.devices, now.run && now.fleet && `on ${now.fleet}`, now.phase, now.people].filter(Boolean).join(" · ");
  $("state").textContent = [now.state, now.message].filter(Boolean).join(": ").slice(0, 120);
  $("state").hidden = !now.state;
  $("state").className = `pill ${COLORS[now.state] ?? ""}`;
  $("commits-of").hidden = !now.swarm;
  $("progress").hidden = !now.horizon;
  if (now.horizon) {
    $("bar").value = Math.min(1, now.tokens / now.horizon);
    $("done").textContent = `${(100 * Math.min(1, now.tokens / now.horizon)).toFixed(1)}% · ${number(now.tokens)} of ${number(now.horizon)} ${now.unit}`;
  }
  const tiles = [
    ["loss", now.loss != null && figure4(now.loss), now.swarm ? "last 20 steps of each" : ""],
    ["held-out loss", now.eval_loss != null && figure4(now.eval_loss), now.eval_version != null ? `version ${number(now.eval_version)}` : ""],
    [`${now.unit}/s`, now.state === "running" && now.tokens_per_s && si(now.tokens_per_s), ""],
    ["goodput", now.goodput != null && `${(100 * now.goodput).toFixed(1)}%`, now.swarm ? `${si(now.lost)} lost, ${si(now.dropped)} dropped` : ""],
    ["version", now.version != null && number(now.version), now.swarm ? `${si(now.outstanding)} ${now.unit} in flight` : ""],
    ["step", now.steps && !now.swarm && number(now.step), now.steps ? `of ${number(now.steps)}` : ""],
    ["time left", now.left != null && formatDuration(now.left), now.elapsed ? `${formatDuration(now.elapsed)} so far` : ""],
    ["cost", now.dollars, now.hourly ? `${now.hourly} an hour` : ""],
  ].filter(([, value]) => value);
  $("tiles").replaceChildren(...tiles.map(([label, value, small]) => {
    const tile = document.createElement("div"), shown = element("dd", value);
    if (small) shown.append(element("small", small));
    tile.append(element("dt", label), shown);
    return tile;
  }));
}

function table(target, heads, rows) {
  const head = document.createElement("tr");
  head.append(...heads.map(([name, kind]) => Object.assign(element("th", name, kind), { scope: "col" })));
  target.replaceChildren(head, ...rows);
}
const logButton = (name) => { const button = element("button", name); button.type = "button"; button.dataset.log = name; return button; };
function cells(row, values, kinds) {
  row.append(...values.map((value, n) => { const cell = element("td", "", kinds[n]); cell.append(value ?? "–"); return cell; }));
  return row;
}

function members() {
  const all = Object.entries(seen.members), wanted = $("filter").value.trim().toLowerCase(), focused = document.activeElement?.dataset?.log;
  $("members-of").hidden = !all.length;
  if (!all.length) return;
  const counts = {}, word = (state) => (state === "left" && seen.facts.state !== "running" ? "ended" : state);
  for (const [, [state]] of all) counts[word(state)] = (counts[word(state)] ?? 0) + 1;
  const states = Object.entries(counts), total = `${all.length} member${all.length > 1 ? "s" : ""}`;
  $("members-count").textContent = states.length > 1 ? `${total}: ${states.map(([state, count]) => `${count} ${state}`).join(", ")}`
    : `${total}, ${all.length > 1 ? "all " : ""}${states[0][0]}`;
  const byName = all.sort(([a], [b]) => order(a, b)), byNeed = [...all].sort(([, x], [, y]) => (x[1] ?? 1e9) - (y[1] ?? 1e9));
  $("dots").replaceChildren(...byName.map(([name, row]) => Object.assign(element("i", "", `${COLORS[row[0]] ?? "dim"}${row[1] !== null ? " look" : ""}`), { title: `${name}: ${word(row[0])}` })));
  const unit = seen.facts.unit ?? "tokens";
  const linked = all.some(([, row]) => row[10]);
  const kinds = ["", "", "n", "n", "n more", "n more", "n more", "n more", "more", ...(linked ? ["more"] : []), "why"];
  const heads = ["member", "state", `${unit}/s`, "loss", "commit", "behind", unit, "pid", "incarnation", ...(linked ? ["link"] : []), "why"].map((name, n) => [name, kinds[n]]);
  const rows = byNeed.filter(([name, row]) => `${name} ${row[0]} ${row[2]}`.toLowerCase().includes(wanted)).map(([name, row]) => {
    const [state, , why, speed, loss, base, lag, tokens, pid, incarnation, link] = row, made = document.createElement("tr");
    return cells(made, [logButton(name), element("span", word(state), COLORS[word(state)]), number(speed), figure4(loss), number(base), number(lag), number(tokens), pid === null ? "–" : `${pid}`, incarnation || "–", ...(linked ? [link || "–"] : []), why], kinds);
  });
  table($("members-table"), heads, rows);
  $("no-match").hidden = rows.length > 0;
  if (focused) document.querySelector(`#members-table [data-log="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

function machines() {
  const all = Object.entries(seen.machines);
  $("machines-of").hidden = !seen.facts.fleet;
  $("machines-count").textContent = `${all.filter(([, row]) => row[3] === "ready").length} of ${seen.facts.wanted ?? 0} ready`;
  const kinds = ["", "more", "more", "more", "", "", "", "n more", "n more", "n more", "n more", "why"];
  const heads = ["machine", "pool", "type", "zone", "state", "busy", "HBM", "age", "lost", "$/h", "cost, $", "what and why"].map((name, n) => [name, kinds[n]]);
  const rows = all.map(([name, [pool, type, zone, state, shade, kind, kindShade, why, age, lost, hourly, cost, busy, memory]]) => {
    const meter = document.createElement("span"), fill = document.createElement("i"), both = document.createElement("span");
    if (busy !== null) { meter.className = "meter"; fill.style.width = `${busy}%`; meter.append(fill); both.append(meter, `${busy}%`); } else both.append("–");
    const what = document.createElement("span");
    if (kind) what.append(element("b", kind, KINDS[kindShade]), why ? `: ${why}` : ""); else what.append(why ?? "");
    const gib = memory ? `${(memory[0] / 2 ** 30).toFixed(1)}/${(memory[1] / 2 ** 30).toFixed(0)} GiB` : "–";
    return cells(document.createElement("tr"), [state === "missing" ? "–" : logButton(name), pool, type || "–", zone || "–", element("span", state, KINDS[shade]), both, gib, age, lost ? `${lost}` : "", hourly === 0 ? "free" : hourly === null ? "–" : hourly.toFixed(2), cost === null ? "–" : cost.toFixed(2), what], kinds);
  });
  table($("machines-table"), heads, rows);
}

function runs() {
  const kinds = ["", "", "n", "n"], link = (target, query, text) => Object.assign(target, { href: `?${new URLSearchParams(query)}`, textContent: text });
  $("runs-of").hidden = seen.runs.length < 2 && !chosenRun;
  link($("newest"), { token }, $("newest").textContent).hidden = !chosenRun;
  table($("runs-table"), ["run", "state", "loss", "step"].map((name, n) => [name, kinds[n]]), seen.runs.map(([name, state, loss, step, steps]) =>
    cells(document.createElement("tr"), [state === "damaged" ? name : link(document.createElement("a"), { token, run: name }, name), element("span", state, COLORS[state]), figure4(loss), step === null ? "–" : `${number(step)} of ${number(steps)}`], kinds)));
}

function addEvents(events) {
  const list = $("events");
  list.prepend(...events.map(line).reverse());
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
}
function line([at, time, kind, text]) {
  const item = element("li", "", kind), stamp = element("time", formatTime(time));
  item.dataset.at = at;
  item.append(stamp, element("span", text));
  return item;
}
$("older").addEventListener("click", async () => {
  const last = $("events").lastChild?.dataset.at ?? 0;
  const found = await (await fetch(url("events", { before: last }))).json();
  for (const event of found.events.reverse()) $("events").append(line(event));
  $("older").hidden = found.at === 0;
});
const hideCommits = () => $("events").classList.toggle("few", !$("commits").checked);
$("commits").addEventListener("change", hideCommits);
hideCommits();
$("filter").addEventListener("input", () => seen && members());
addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.matches("input") && !$("members-of").hidden) { event.preventDefault(); $("filter").focus(); }
});

function pictures() {
  const all = seen.pictures, at = $("picture-at"), last = +at.max === +at.value;
  $("pictures-of").hidden = !all.length;
  at.max = Math.max(0, all.length - 1);
  if (last) at.value = at.max;
  if (all.length) picture();
}
function picture() {
  const step = seen.pictures[+$("picture-at").value], word = seen.facts.swarm ? "version" : "step";
  $("picture-unit").textContent = word;
  $("picture-step").textContent = number(step);
  if ($("picture").dataset.step !== `${step}`) {
    $("picture").dataset.step = step;
    $("picture").alt = `a grid of pictures at ${word} ${step}`;
    $("picture").src = url("picture", { step });
  }
}
$("picture-at").addEventListener("input", picture);

// The log of a process or of a machine's jobs, while its dialog is open.
let reading = null; // the open log; late answers for another one are ignored
document.addEventListener("click", (event) => { const name = event.target.dataset?.log; if (name) openLog(name); });
$("log-close").addEventListener("click", () => $("log").close());
$("log").addEventListener("close", () => { if (!$("log").open) reading = null; });
function openLog(name) {
  $("log-name").textContent = name;
  $("log-text").textContent = "…";
  $("log").showModal();
  const mine = (reading = { name });
  const look = async () => {
    const text = await fetch(url("log", { of: name })).then((answer) => answer.text(), () => null);
    if (reading !== mine) return;
    const box = $("log-text"), below = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (text !== null && text !== box.textContent) {
      box.textContent = text;
      if (below) box.scrollTop = box.scrollHeight;
    }
    setTimeout(() => reading === mine && look(), 2000);
  };
  look();
}

// Reconnect until the server answers; it then sends the whole view.
let stream = null, lastMessageAt = 0, reconnectTimer = null;
const SILENCE_TIMEOUT_MS = 25000, RECONNECT_MS = 1500;
function connect() {
  clearTimeout(reconnectTimer);
  reconnectTimer = null;
  stream?.close();
  lastMessageAt = Date.now();
  stream = new EventSource(url("stream"));
  const on = (kind, take) => stream.addEventListener(kind, (event) => {
    lastMessageAt = Date.now();
    $("link").textContent = "live";
    $("link").className = "pill good";
    take(event.data);
  });
  on("view", (data) => view(JSON.parse(data)));
  on("update", (data) => update(JSON.parse(data)));
  on("beat", () => {});
  stream.onerror = reconnect;
}
function reconnect() {
  stream?.close();
  $("link").textContent = "connection lost, trying again";
  $("link").className = "pill bad";
  reconnectTimer ??= setTimeout(connect, RECONNECT_MS);
}
setInterval(() => { if (!reconnectTimer && Date.now() - lastMessageAt > SILENCE_TIMEOUT_MS) reconnect(); }, 2000);
addEventListener("online", connect);
connect();
