"use strict";
/* The page: one clock, its controls, and a part for each schedule. */

const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4, 8];

function formatTime(seconds) {
  for (const [unit, factor] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
    if (seconds >= factor) return `${(seconds / factor).toPrecision(3)} ${unit}`;
  }
  return `${(seconds * 1e6).toFixed(2)} us`;
}

/* 0–3, 5, 7 of [0, 1, 2, 3, 5, 7] */
function nameRanks(ranks) {
  const runs = [];
  for (const rank of ranks) {
    const last = runs[runs.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank; else runs.push([rank, rank]);
  }
  return runs.map(([first, last]) => (first === last ? first : last === first + 1 ? `${first}, ${last}` : `${first}–${last}`)).join(", ");
}

const ICONS = {
  play: "M4 2.5v11l9-5.5z", pause: "M4 3h3v10H4zM9 3h3v10H9z", first: "M3 3h2v10H3zM13 3v10L6 8z",
  back: "M11.5 3v10L4 8z", next: "M4.5 3v10L12 8z", last: "M11 3h2v10h-2zM3 3v10l7-5z",
};

function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
  drawing.setAttribute("viewBox", "0 0 16 16");
  path.setAttribute("d", ICONS[name]);
  drawing.append(path);
  return drawing;
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value; else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

class Part {
  constructor(parent, model) {
    this.model = model;
    const some = model.wanted > 1;
    this.root = make("section", { class: "part panel", "aria-label": model.data.title });
    parent.append(this.root);
    this.facts = {};
    const facts = make("dl", { class: "facts" });
    for (const [name, label] of [["step", "steps done"], ["done", "in place"], ["sending", "in flight"], ["ends", "takes"]]) {
      this.facts[name] = make("dd", { "data-fact": name });
      facts.append(make("div", {}, make("dt", { text: label }), this.facts[name]));
    }
    this.root.append(make("div", { class: "part-head" }, make("h2", { text: model.data.schedule.algorithm }), facts));
    this.stage = new Stage(this.root, model);
    const what = some ? `Contributions in each chunk, of ${model.wanted}` : "Chunks that each rank has";
    this.root.append(make("h3", { class: "label", text: `${what}: ranks across, chunks down` }));
    this.buffers = new Buffers(this.root, model);
    const legend = make("ul", { class: "legend" });
    if (some) legend.append(make("li", { class: "part-sum", text: "a part of the sum" }));
    legend.append(make("li", { class: "full", text: some ? "the whole sum" : "there" }), make("li", { class: "empty", text: "nothing yet" }));
    this.tip = make("div", { class: "tip", role: "status", hidden: "" });
    this.root.append(legend, this.tip);
    const { canvas } = this.buffers.sheet;
    for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, (event) => this.showCell(event));
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  width() {
    const style = getComputedStyle(this.root);
    return this.root.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  }

  resize(height) {
    const width = this.width();
    this.stage.resize(width, height);
    this.buffers.resize(width);
  }

  show(time) {
    const { model, facts } = this;
    model.seek(time);
    const active = this.stage.draw();
    this.buffers.draw();
    facts.step.textContent = `${model.stepsDone()} of ${model.stepEnds.length}`;
    facts.done.textContent = `${Math.floor((100 * model.doneTotal) / (model.requiredTotal || 1))}%`;
    facts.sending.textContent = active === 1 ? "1 message" : `${active} messages`;
    facts.ends.textContent = formatTime(model.data.time_s);
    this.root.classList.toggle("is-done", model.doneTotal === model.requiredTotal);
  }

  showCell(event) {
    const { model } = this, cell = this.buffers.cellAt(this.buffers.sheet.at(event));
    this.tip.hidden = !cell;
    if (!cell) return;
    const [rank, chunk] = cell, from = model.values.ranks(model.held[rank * model.chunks + chunk]);
    const what = from.length ? `from ${from.length === 1 ? "rank" : "ranks"} ${nameRanks(from)}` : "nothing yet";
    this.tip.textContent = `rank ${rank}, chunk ${chunk}: ${what}`;
    const box = this.root.getBoundingClientRect();
    const left = Math.min(event.clientX - box.left + 14, box.width - this.tip.offsetWidth - 8);
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${event.clientY - box.top + 18}px`;
  }
}

const player = {
  async start() {
    theme.read();
    document.querySelector("header").hidden = location.hash !== "";
    const data = JSON.parse(document.getElementById("schedules").textContent);
    const models = await Promise.all(data.map(async (of) => new Model(of, await unpack(of.times))));
    this.duration = Math.max(...models.map((model) => model.duration), 1e-9);
    this.time = 0;
    this.isPlaying = false;
    this.boundaries = [...new Set([0, ...models.flatMap((model) => model.stepEnds), this.duration])].sort((one, other) => one - other);
    // A long schedule plays longer, up to a limit.
    const steps = Math.max(...models.map((model) => model.stepEnds.length), 1);
    this.seconds = Math.min(30, Math.max(6, steps * 0.9));
    const main = document.getElementById("player");
    this.controls(main);
    const parts = make("div", { class: models.length > 1 ? "parts two" : "parts" });
    main.append(parts);
    this.parts = models.map((model) => new Part(parts, model));
    this.keys();
    new ResizeObserver(() => this.resize()).observe(parts);
    window.addEventListener("resize", () => this.resize());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.resize());
    this.resize();
    document.documentElement.dataset.ready = "yes";
    if (location.hash === "#play" && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.play();
  },

  controls(main) {
    const button = (name, label, act) => {
      const made = make("button", { type: "button", "data-do": name, "aria-label": label, title: label }, icon(name));
      made.addEventListener("click", act);
      return made;
    };
    this.playButton = button("play", "play (space)", () => this.toggle());
    this.scrubber = make("input", { type: "range", min: 0, max: 10000, value: 0, step: 1, "aria-label": "time" });
    this.scrubber.addEventListener("input", () => {
      this.setPlaying(false);
      this.seek((this.scrubber.value / 10000) * this.duration);
    });
    this.clock = make("output", { class: "clock", "aria-live": "off" });
    this.speed = make("select", { "aria-label": "speed (+ and -)", title: "speed (+ and -)" });
    for (const speed of SPEEDS) this.speed.append(make("option", { value: speed, text: `${speed}×` }));
    this.speed.value = "1";
    main.append(make("div", { class: "controls panel", role: "group", "aria-label": "playing" },
      button("first", "to the beginning (home)", () => this.jump(0)),
      button("back", "a step back (left arrow)", () => this.step(-1)),
      this.playButton,
      button("next", "a step on (right arrow)", () => this.step(1)),
      button("last", "to the end (end)", () => this.jump(this.duration)),
      this.scrubber, this.clock, this.speed));
  },

  keys() {
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const isRange = event.target === this.scrubber;
      const acts = {
        ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1),
        Home: () => this.jump(0), End: () => this.jump(this.duration),
        "+": () => this.faster(1), "=": () => this.faster(1), "-": () => this.faster(-1),
        k: () => this.toggle(),
      };
      // The space bar presses a button that has the focus, as everywhere.
      if (event.target.tagName !== "BUTTON" && event.target.tagName !== "SUMMARY") acts[" "] = () => this.toggle();
      const act = event.target.tagName === "SELECT" ? undefined : acts[event.key];
      if (act && !(isRange && event.key.startsWith("Arrow") && event.shiftKey)) {
        event.preventDefault();
        act();
      }
    });
  },

  faster(by) {
    const at = SPEEDS.indexOf(Number(this.speed.value)) + by;
    this.speed.value = String(SPEEDS[Math.max(0, Math.min(SPEEDS.length - 1, at))]);
  },

  toggle() {
    if (this.isPlaying) this.setPlaying(false); else this.play();
  },

  play() {
    if (this.time >= this.duration) this.seek(0);
    this.setPlaying(true);
    let before = null;
    const frame = (now) => {
      if (!this.isPlaying) return;
      // A tab in the background gets no frames: it continues where it was.
      const gone = before === null ? 0 : Math.min(0.1, (now - before) / 1000);
      before = now;
      this.seek(Math.min(this.duration, this.time + (gone * Number(this.speed.value) * this.duration) / this.seconds));
      if (this.time >= this.duration) this.setPlaying(false); else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  },

  setPlaying(isPlaying) {
    this.isPlaying = isPlaying;
    this.playButton.replaceChildren(icon(isPlaying ? "pause" : "play"));
    this.playButton.setAttribute("aria-label", isPlaying ? "pause (space)" : "play (space)");
  },

  jump(time) {
    this.setPlaying(false);
    this.seek(time);
  },

  step(by) {
    const near = this.duration * 1e-6;
    const next = by > 0 ? this.boundaries.find((time) => time > this.time + near) : this.boundaries.findLast((time) => time < this.time - near);
    this.jump(next ?? (by > 0 ? this.duration : 0));
  },

  seek(time) {
    this.time = time;
    this.scrubber.value = String(Math.round((time / this.duration) * 10000));
    this.clock.textContent = `${formatTime(time)} / ${formatTime(this.duration)}`;
    this.parts.forEach((part) => part.show(time));
  },

  resize() {
    theme.read();
    const height = Math.max(...this.parts.map((part) => part.stage.heightFor(part.width())));
    this.parts.forEach((part) => part.resize(height));
    this.seek(this.time);
  },
};

player.start();
