"use strict";
// Text of the run enters the document through textContent only. Blocks of data are deflated JSON in base64.

const $ = (id) => document.getElementById(id);

async function unpack(block) {
  const bytes = Uint8Array.from(atob(block), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const blocks = (id) => $(id).textContent.trim().split("\n");

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = visible(text);
  return node;
}

// Show control characters as symbols. Characters that turn the direction of text act inside their element only (page.css).
function visible(text) {
  return String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g, (c) =>
    String.fromCharCode(0x2400 + c.charCodeAt(0)));
}

const signed = (x) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(2);

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
}
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
$("theme").addEventListener("click", () =>
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

// Advantages at any step: a row per run, with the bins that tables.py counted

function runBins(run, step, axisEnd) {
  const now = run.steps[step];
  const node = element("div", "run-bins");
  const label = now ? `: ${now.levels.toFixed(1)} different rewards in a group, ${now.rollouts} responses` : ": no such step";
  node.append(element("bdi", "name", run.name), label);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 500 76");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const bins = now ? now.bins : [], most = Math.max(...bins.map(({ share }) => share));
  const rect = (x, y, width, height, fill) => {
    const shape = document.createElementNS(svg.namespaceURI, "rect");
    for (const [key, value] of Object.entries({ x, y, width, height, fill })) shape.setAttribute(key, value);
    svg.append(shape);
  };
  rect(0, 75, 500, 1, "var(--line)");
  for (const { advantage, share } of bins) {
    const height = (72 * share) / most;
    rect(250 + (246 * advantage) / axisEnd - 4, 75 - height, 8, height, run.colour);
  }
  node.append(svg);
  return node;
}

async function showAdvantages() {
  const { runs, axis_end: axisEnd } = await unpack(blocks("advantages-data")[0]);
  const steps = [...new Set(runs.flatMap((run) => Object.keys(run.steps).map(Number)))].sort((a, b) => a - b);
  const range = $("advantage-step");
  range.max = steps.length - 1;
  range.value = Math.max(0, steps.indexOf(Number(range.dataset.step)));
  const draw = () => {
    const step = steps[range.value];
    $("advantage-number").textContent = `step ${step}`;
    range.setAttribute("aria-valuetext", `step ${step}`);
    $("advantage-runs").replaceChildren(...runs.map((run) => runBins(run, step, axisEnd)));
  };
  range.addEventListener("input", draw);
  draw();
}

function chooseRun(number) {
  document.querySelectorAll("section.run").forEach((section) => {
    section.hidden = section.dataset.run !== String(number);
  });
  return openRun(number);
}

async function start() {
  await showAdvantages();
  await chooseRun(0);
  $("run").addEventListener("change", () => chooseRun($("run").value).catch(complain));
  document.documentElement.dataset.ready = Math.round(performance.now());
}

function complain(error) {
  $("trouble").hidden = false;
  $("trouble").textContent = typeof DecompressionStream === "undefined"
    ? "This browser is too old for the buffer browser, which needs DecompressionStream (Chrome 80, Firefox 113, Safari 16.4)."
    : `The buffer browser stopped: ${error}`;
}
