"use strict";
/* Pictures of a model on canvases: what they share, the buffers, the use of links. */

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

/* What share of a buffer, or of several, is there, as the red, green and blue of a pixel. */
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
    const context = this.sheet.clear(), { ranks, rows } = this.model;
    if (this.column >= 15 && this.row >= 12) this.drawCells(context);
    else this.drawImage(context);
    context.font = font(10.5);
    context.fillStyle = theme.soft;
    context.textBaseline = "middle";
    context.textAlign = "center";
    const every = Math.max(1, 2 ** Math.ceil(Math.log2(24 / this.column)));
    for (let rank = 0; rank < ranks; rank += every) {
      context.fillText(String(rank), this.left + this.column * (rank + 0.5), 8);
    }
    context.textAlign = "right";
    const skip = Math.max(1, 2 ** Math.ceil(Math.log2(13 / this.row)));
    for (let row = 0; row < rows; row += skip) {
      context.fillText(String(row * this.model.perRow), this.left - 6, this.top + this.row * (row + 0.5));
    }
  }

  drawCells(context) {
    const { model } = this;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = font(11, 600);
    for (let rank = 0; rank < model.ranks; rank++) {
      for (let row = 0; row < model.rows; row++) {
        const at = rank * model.rows + row, share = Math.min(1, model.rowShare[at] / model.perRow);
        const isFull = model.rowFull[at] === model.perRow;
        const x = this.left + rank * this.column, y = this.top + row * this.row;
        context.fillStyle = isFull ? theme.good : mix(theme.accent, share ? 0.12 + 0.88 * share : 0);
        context.beginPath();
        context.roundRect(x + 1, y + 1, this.column - 2, this.row - 2, 3);
        context.fill();
        if (model.perRow === 1 && share > 0) {
          context.fillStyle = isFull || share > 0.45 ? theme.panel : theme.ink;
          const count = model.values.count[model.held[rank * model.chunks + row]];
          context.fillText(String(count), x + this.column / 2, y + this.row / 2 + 0.5);
        }
      }
    }
  }

  drawImage(context) {
    const { model } = this, pixels = new Uint32Array(this.image.data.buffer);
    for (let rank = 0; rank < model.ranks; rank++) {
      for (let row = 0; row < model.rows; row++) {
        pixels[row * model.ranks + rank] = this.shades.of(model, rank * model.rows + row, row);
      }
    }
    this.small.getContext("2d").putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.small, this.left, this.top, this.column * model.ranks, this.row * model.rows);
  }

  cellAt([x, y]) {
    const rank = Math.floor((x - this.left) / this.column), row = Math.floor((y - this.top) / this.row);
    const isInside = rank >= 0 && rank < this.model.ranks && row >= 0 && row < this.model.rows;
    return isInside ? [rank, row * this.model.perRow] : null;
  }
}

/* The share of the ranks that are sending, over time, up to the end of the slower schedule. */
class Use {
  constructor(parent, model, duration) {
    Object.assign(this, { model, duration });
    this.sheet = new Sheet(parent, "use", "the share of ranks that are sending, over time");
  }

  resize(width) {
    this.sheet.resize(width, 58);
    this.bins = this.model.use(Math.max(40, Math.min(400, Math.floor(width / 2))));
  }

  draw(time) {
    const context = this.sheet.clear(), { width } = this.sheet, top = 6, floor = 50;
    const all = (width * this.model.duration) / this.duration, step = all / this.bins.length;
    context.fillStyle = theme.sunken;
    context.fillRect(0, top, width, floor - top);
    for (const [from, to, colour, alpha] of [[0, width, theme.accent, 0.3], [0, (width * time) / this.duration, theme.accent, 1]]) {
      context.save();
      context.beginPath();
      context.rect(from, 0, to - from, floor);
      context.clip();
      context.beginPath();
      context.moveTo(0, floor);
      this.bins.forEach((share, bin) => {
        context.lineTo(bin * step, floor - share * (floor - top));
        context.lineTo((bin + 1) * step, floor - share * (floor - top));
      });
      context.lineTo(all, floor);
      context.globalAlpha = alpha;
      context.fillStyle = colour;
      context.fill();
      context.restore();
    }
    context.fillStyle = theme.ink;
    context.fillRect(Math.min(width - 1.5, (width * time) / this.duration), 0, 1.5, floor + 4);
    context.strokeStyle = theme.line;
    context.beginPath();
    context.moveTo(0, floor + 0.5);
    context.lineTo(width, floor + 0.5);
    context.stroke();
  }
}
