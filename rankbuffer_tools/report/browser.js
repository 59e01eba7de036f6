// The buffer browser shows a query, its visits, and for each visit the anchors with the group that was placed among them.

const SHOWN = 400; // number of queries in the list; a search finds the others
let run = null; // { index, blocks }
let found = []; // numbers of the listed queries
let chosen = 0; // number of the query that is marked in the list
let query = null; // { number, page } of the query that is shown: the chosen one, once it is unpacked
let visit = 0; // the last position shows the buffer after the last visit
let wholeTexts = false;
let search = 0; // number of the newest search, so that an older one stops
let playing = null; // the timer that shows one visit after the other
let PLAY = 1200; // milliseconds for which a visit is shown
let opening = 0; // number of the newest query to open, so that an older one stops

async function openRun(number) {
  search++; // stop a search in the run before
  const [head, ...pages] = blocks(`run-data-${number}`);
  run = { index: await unpack(head), pages };
  query = null;
  $("search").value = "";
  list(run.index.queries.map((_, i) => i));
  const figures = document.querySelectorAll(`section.run[data-run="${number}"] .example`);
  for (const [i, example] of run.index.examples.entries()) await showExample(figures[i], example);
  const spreads = run.index.queries.map(({ spread }) => spread);
  await openQuery(spreads.indexOf(Math.max(...spreads)));
}

// Fill the figure of one query's responses before and after training.
async function showExample(figure, example) {
  const page = await unpack(run.pages[run.index.queries.findIndex(({ id }) => id === example.query)]);
  const [prompt, ...texts] = figure.querySelectorAll(".text");
  figure.querySelector("bdi").textContent = visible(example.query);
  prompt.textContent = visible(page.prompt ?? "");
  example.shown.forEach(([number, id], i) => {
    const { step, epoch } = page.visits.at(number);
    const head = figure.querySelectorAll("h4")[i], score = page.quality?.[`${step}-${id}`];
    head.textContent = `epoch ${epoch}, step ${step}`;
    if (score !== undefined) head.textContent += `, ${run.index.measure} ${score}`;
    texts[i].textContent = visible(page.texts[`${step}-${id}`] ?? "");
  });
  figure.hidden = false;
}

function list(numbers) {
  found = numbers;
  const total = run.index.queries.length, of = run.index.of;
  const more = found.length > SHOWN ? `, the first ${SHOWN} are listed` : "";
  const drawn = of > total ? `, drawn from ${of}` : "";
  $("found").textContent = `${found.length} of ${total} queries${drawn}${more}`;
  $("queries").replaceChildren(...found.slice(0, SHOWN).map((number) => {
    const entry = run.index.queries[number];
    const item = element("li");
    item.id = `query-${number}`;
    item.setAttribute("role", "option");
    item.setAttribute("aria-selected", "false");
    const name = element("b", "", entry.id), about = element("small", "", entry.prompt || counts(entry));
    name.dir = about.dir = "auto";
    item.append(name, about);
    item.addEventListener("click", () => openQuery(number).catch(complain));
    return item;
  }));
  markQuery();
}

const counts = (entry) => `${entry.visits} visits, ${entry.anchors} anchors`;

function markQuery() {
  for (const item of $("queries").children)
    item.setAttribute("aria-selected", String(item.id === `query-${chosen}`));
  const item = $(`query-${chosen}`);
  if (item) {
    $("queries").setAttribute("aria-activedescendant", item.id);
    const box = $("queries").getBoundingClientRect(), place = item.getBoundingClientRect();
    if (place.top < box.top) $("queries").scrollTop -= box.top - place.top;
    if (place.bottom > box.bottom) $("queries").scrollTop += place.bottom - box.bottom;
  } else $("queries").removeAttribute("aria-activedescendant");
}

// Search ids and prompts first and list what they hold, then unpack one query after the other and search its responses.
async function find(words) {
  const mine = ++search, needle = words.toLowerCase();
  const entries = run.index.queries;
  const hits = new Set();
  entries.forEach((entry, i) => {
    if (`${entry.id}\n${entry.prompt}`.toLowerCase().includes(needle)) hits.add(i);
  });
  list([...hits]);
  if (needle.length < 2) return;
  for (let i = 0; i < entries.length; i++) {
    if (!hits.has(i)) {
      const page = await unpack(run.pages[i]);
      if (mine !== search) return;
      const texts = [page.prompt || "", ...Object.values(page.texts)];
      if (texts.some((text) => text.toLowerCase().includes(needle))) hits.add(i);
    }
    if (i % 25 === 24) $("found").textContent = `${hits.size} found, ${i + 1} of ${entries.length} queries searched`;
  }
  if (mine === search) list([...hits].sort((a, b) => a - b));
}

async function openQuery(number) {
  const mine = ++opening;
  if (number === undefined || number < 0) return;
  stopPlaying();
  chosen = number;
  markQuery();
  const page = await unpack(run.pages[number]);
  if (mine !== opening) return;
  query = { number, page };
  $("query-id").textContent = visible(run.index.queries[number].id);
  $("query-id").dir = "auto";
  const about = [element("p", page.prompt === null ? "soft" : "text", page.prompt ??
    "The store holds no prompts: name the data set (--dataset_name) to see prompts and rubrics here.")];
  if (page.rubrics.length) {
    const rubrics = element("ul");
    rubrics.append(...page.rubrics.map(({ weight, text }) =>
      element("li", "text", `${text} (weight ${weight})`)));
    about.push(rubrics);
  }
  $("query-text").replaceChildren(...about);
  $("visit").max = page.visits.length;
  showVisit(run.index.queries[number].widest);
}

function showVisit(number) {
  const { page } = query, last = page.visits.length, all = run.index.queries[query.number].visits;
  visit = Math.max(0, Math.min(number, last));
  $("visit").value = visit;
  const now = page.visits[visit];
  const title = now
    ? `visit ${now.number} of ${all}: step ${now.step}, epoch ${now.epoch}`
    : `after visit ${all}, the newest buffer`;
  $("when").textContent = title;
  $("visit").setAttribute("aria-valuetext", title);
  $("earlier").disabled = visit === 0;
  $("later").disabled = visit === last;
  $("ladder").replaceChildren(...(now ? rungs(now) : resting(page.visits[last - 1])));
}

// Play the history of a query: from its first visit to the newest buffer, or from the start if it is shown already.
function play() {
  if (playing) return stopPlaying();
  const last = query.page.visits.length;
  if (visit === last) showVisit(0);
  playing = setInterval(() => (visit < last ? showVisit(visit + 1) : stopPlaying()), PLAY);
  $("play").textContent = "Stop";
}

function stopPlaying() {
  clearInterval(playing);
  playing = null;
  $("play").textContent = "Play";
}

function rungs(now) {
  const after = new Map(now.after.map((anchor) => [anchor.id, anchor]));
  const before = new Set(now.before.map(({ id }) => id));
  const added = new Map(now.after.filter(({ id }) => !before.has(id)).map(({ id, source }) => [id, source]));
  const pruned = now.before.filter(({ id }) => !after.has(id));
  $("changes").textContent = `${now.before.length} anchors, ${added.size} added, ${pruned.length} pruned, ` +
    `${now.after.length} for the next visit`;
  const ranks = new Map();
  now.order.flat().forEach((id, i) => ranks.set(id, i));
  const best = [...ranks.keys()].sort((a, b) => ranks.get(b) - ranks.get(a));
  const placed = (p) => best.filter((id) => now.positions[id] === p).map((id) => rollout(now, id, ranks, added));
  const nodes = [];
  for (let p = now.before.length; p > 0; p--) {
    nodes.push(...placed(p));
    const old = now.before[p - 1];
    nodes.push(anchor(`A${p - 1}`, old, now.epoch, after.get(old.id) ?? null));
  }
  nodes.push(...placed(0));
  const free = best.filter((id) => now.positions[id] === undefined);
  if (free.length && now.before.length) nodes.push(element("li", "end", "ranked, but not placed in the buffer"));
  nodes.push(...free.map((id) => rollout(now, id, ranks, added)));
  const rest = now.rewards.map((_, id) => id).filter((id) => !ranks.has(id));
  const silent = rest.filter((id) => query.page.texts[`${now.step}-${id}`] === undefined);
  const failed = rest.filter((id) => !silent.includes(id));
  if (failed.length) nodes.push(element("li", "end", "without a reward: the judge did not answer"));
  nodes.push(...failed.map((id) => rollout(now, id, ranks, added)));
  if (silent.length)
    nodes.push(element("li", "end", `${silent.map((id) => `R${id}`).join(", ")}: no answer, reward −1`));
  return nodes;
}

function resting(now) {
  $("changes").textContent = now.after.length ? `${now.after.length} anchors` : "This method keeps no buffer.";
  return now.after.map((each, i) => anchor(`A${i}`, each, now.epoch, each)).reverse();
}

function anchor(name, { id, source, epoch, h }, today, next) {
  const node = element("li", next ? "anchor" : "anchor gone");
  node.style.setProperty("--source", run.index.colours[source] || "var(--soft)");
  const line = element("div", "line");
  const idle = next && next.h !== h ? `unused for ${h} → ${next.h} epochs` : h ? `unused for ${h} epochs` : "";
  const age = today - epoch;
  line.append(
    element("span", "name", name),
    element("span", "chip", run.index.labels[source] || source),
    element("span", "soft", `from epoch ${epoch}, ${age} ${age === 1 ? "epoch" : "epochs"} old`),
    element("span", "soft", idle),
    ...quality(id));
  line.children[3].title = "epochs in a row in which no response was placed next to this anchor";
  if (!next) line.append(element("span", "badge minus", "pruned"));
  node.append(line, response(id));
  return node;
}

function rollout(now, id, ranks, added) {
  const node = element("li", "rollout"), line = element("div", "line"), key = `${now.step}-${id}`;
  const reward = now.rewards[id];
  line.append(element("span", "name", `R${id}`));
  if (reward === null) line.append(element("span", "badge minus", "no reward"));
  else {
    const bar = element("span", "bar"), fill = element("i");
    fill.style.left = `${50 + 50 * Math.min(reward, 0)}%`;
    fill.style.width = `${Math.max(50 * Math.abs(reward), 2)}%`;
    bar.append(fill);
    line.append(bar, element("span", "", `reward ${signed(reward)}`));
    const tied = now.order.find((tier) => tier.includes(id));
    if (tied && tied.length > 1) line.append(element("span", "badge", `tied with ${tied.length - 1}`));
  }
  line.append(...quality(key));
  const source = added.get(key);
  if (source) {
    node.style.setProperty("--source", run.index.colours[source] || "var(--soft)");
    line.append(element("span", "badge plus", `becomes an anchor: ${run.index.labels[source] || source}`));
  }
  node.append(line, response(key));
  return node;
}

function quality(id) {
  const value = query.page.quality?.[id];
  return value === undefined ? [] : [element("span", "soft", `${run.index.measure} ${value}`)];
}

function response(id) {
  const button = element("button", "response"), text = element("span", "text", query.page.texts[id] ?? "");
  button.type = "button";
  button.setAttribute("aria-expanded", String(wholeTexts));
  button.append(text);
  button.addEventListener("click", () => {
    if (!getSelection().isCollapsed) return; // a part of the text is being selected
    button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") !== "true"));
  });
  return button;
}

function move(by) {
  const place = found.indexOf(chosen);
  const next = found[Math.max(0, Math.min(place + by, Math.min(found.length, SHOWN) - 1))];
  if (next !== undefined) openQuery(next).catch(complain);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target, typing = target.matches("input[type=search], select");
  const keys = {
    "/": () => !typing && $("search").focus(),
    e: () => !typing && showWhole(!wholeTexts),
    p: () => !typing && play(),
    ArrowDown: () => (target === $("search") || target === $("queries")) && (move(1), $("queries").focus()),
    ArrowUp: () => target === $("queries") && move(-1),
    ArrowLeft: () => !typing && target.type !== "range" && showVisit(visit - 1),
    ArrowRight: () => !typing && target.type !== "range" && showVisit(visit + 1),
    Home: () => inBrowser(target) && showVisit(0),
    End: () => inBrowser(target) && showVisit(Infinity),
    Enter: () => target === $("search") && (move(0), $("queries").focus()),
  };
  if (query && Object.hasOwn(keys, event.key) && keys[event.key]() !== false) event.preventDefault();
}

const inBrowser = (target) => !target.matches("input") && $("browser").contains(target);

function showWhole(whole) {
  wholeTexts = whole;
  document.querySelectorAll(".response").forEach((node) => node.setAttribute("aria-expanded", String(whole)));
}

let pause = 0;
$("search").addEventListener("input", () => {
  clearTimeout(pause);
  pause = setTimeout(() => find($("search").value.trim()).catch(complain), 150);
});
$("visit").addEventListener("input", () => showVisit(Number($("visit").value)));
$("play").addEventListener("click", play);
$("earlier").addEventListener("click", () => showVisit(visit - 1));
$("later").addEventListener("click", () => showVisit(visit + 1));
document.addEventListener("keydown", onKey);
start().catch(complain);
