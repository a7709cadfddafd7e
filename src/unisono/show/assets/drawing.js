"use strict";
/* Pictures of a model on canvases: what they share, and the buffers. */

const theme = {
  read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ink", "soft", "faint", "line", "panel", "sunken", "accent", "good", "empty"]) {
      this[name] = style.getPropertyValue(`--${name}`).trim();
    }
  },
};

function mix(colour, share) {
  return `color-mix(in oklab, ${colour} ${Math.round(share * 100)}%, ${theme.empty})`;
}

/* A canvas that fills its parent's width, sharp on every screen. */
class Sheet {
  constructor(parent, className, label) {
    this.canvas = document.createElement("canvas");
    this.canvas.className = className;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", label);
    parent.append(this.canvas);
    this.context = this.canvas.getContext("2d");
    this.width = this.height = 0;
  }

  resize(width, height) {
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    Object.assign(this, { width, height });
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
  }

  clear() {
    this.context.clearRect(0, 0, this.width, this.height);
    return this.context;
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

function font(size, weight = 400) {
  return `${weight} ${size}px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif`;
}

/* The filled share of a buffer, or of several, as the red, green and blue of a pixel. */
class Shades {
  constructor() {
    const one = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const pixel = (colour) => {
      one.fillStyle = colour;
      one.fillRect(0, 0, 1, 1);
      return new Uint32Array(one.getImageData(0, 0, 1, 1).data.buffer)[0];
    };
    this.full = pixel(theme.good);
    this.parts = Array.from({ length: 101 }, (_, at) => pixel(mix(theme.accent, at ? 0.12 + (0.88 * at) / 100 : 0)));
  }

  of(model, at, row) {
    const of = Math.min(model.perRow, model.chunks - row * model.perRow);
    if (model.rowFull[at] === of) return this.full;
    return this.parts[Math.round(Math.min(1, model.rowShare[at] / of) * 100)];
  }
}

/* Every buffer: a column for each rank, a row for each chunk, or for several. */
class Buffers {
  constructor(parent, model) {
    this.model = model;
    this.sheet = new Sheet(parent, "buffers", "how many contributions each chunk of each rank has");
    this.small = document.createElement("canvas");
    this.small.width = model.ranks;
    this.small.height = model.rows;
    this.image = new ImageData(model.ranks, model.rows);
  }

  resize(width) {
    const { ranks, rows } = this.model;
    this.left = 14 + 7 * String(this.model.chunks).length;
    this.column = Math.min(64, (width - this.left) / ranks);
    this.row = Math.max(Math.min(22, 300 / rows), rows > 150 ? 1 : 2);
    this.top = 18;
    this.sheet.resize(width, this.top + this.row * rows + 2);
    this.shades = new Shades();
  }

  draw() {
    const context = this.sheet.clear(), { ranks, rows, perRow } = this.model;
    const pixels = new Uint32Array(this.image.data.buffer);
    for (let at = 0; at < ranks * rows; at++) {
      pixels[(at % rows) * ranks + Math.floor(at / rows)] = this.shades.of(this.model, at, at % rows);
    }
    this.small.getContext("2d").putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.small, this.left, this.top, this.column * ranks, this.row * rows);
    context.textBaseline = "middle";
    context.textAlign = "center";
    if (perRow === 1 && this.column >= 15 && this.row >= 12) this.drawCounts(context);
    context.font = font(10.5);
    context.fillStyle = theme.soft;
    const every = Math.max(1, 2 ** Math.ceil(Math.log2(24 / this.column)));
    for (let rank = 0; rank < ranks; rank += every) {
      context.fillText(String(rank), this.left + this.column * (rank + 0.5), 8);
    }
    context.textAlign = "right";
    const skip = Math.max(1, 2 ** Math.ceil(Math.log2(13 / this.row)));
    for (let row = 0; row < rows; row += skip) {
      context.fillText(String(row * perRow), this.left - 6, this.top + this.row * (row + 0.5));
    }
  }

  /* Lines between the buffers, and the number of contributions in each. */
  drawCounts(context) {
    const { model } = this;
    context.strokeStyle = theme.panel;
    context.lineWidth = 2;
    context.font = font(11, 600);
    for (let rank = 0; rank < model.ranks; rank++) {
      for (let chunk = 0; chunk < model.chunks; chunk++) {
        const x = this.left + rank * this.column, y = this.top + chunk * this.row;
        context.strokeRect(x, y, this.column, this.row);
        const count = model.values.count[model.held[rank * model.chunks + chunk]];
        context.fillStyle = count > 0.45 * model.wanted ? theme.panel : theme.ink;
        if (count) context.fillText(String(count), x + this.column / 2, y + this.row / 2 + 0.5);
      }
    }
  }

  cellAt([x, y]) {
    const rank = Math.floor((x - this.left) / this.column), row = Math.floor((y - this.top) / this.row);
    const isInside = rank >= 0 && rank < this.model.ranks && row >= 0 && row < this.model.rows;
    return isInside ? [rank, row * this.model.perRow] : null;
  }
}
