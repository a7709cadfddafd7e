"use strict";
/* The ranks of a model, at their places in the layout, and what moves between them. */

/* The ranks, at their places in the layout, and the messages between them. */
class Stage {
  constructor(parent, model) {
    this.model = model;
    this.layout = model.data.layout;
    this.second = new Set(this.layout.second);
    this.sheet = new Sheet(parent, "stage", `${model.ranks} ranks and the messages between them`);
  }

  heightFor(width) {
    const tallest = Math.min(640, Math.max(300, window.innerHeight * 0.72));
    return Math.min(tallest, Math.max(240, width / this.layout.aspect));
  }

  resize(width, height) {
    this.sheet.resize(width, height);
    const isRound = this.layout.kind === "circle", least = Math.min(width, height);
    const across = isRound ? least : width, down = isRound ? least : height;
    const left = (width - across) / 2, top = (height - down) / 2;
    for (let round = 0, margin = 24; round < 3; round++) {
      const side = margin + (this.layout.arcs.length ? 18 : 0);
      this.scale = ([x, y]) => [left + side + x * (across - 2 * side), top + side + y * (down - 2 * side)];
      this.points = this.layout.places.map((place) => place.points.map(this.scale));
      this.size = this.sizeOf(this.points[0]);
      margin = this.size.isCard ? Math.max(this.size.width, this.size.height) / 2 + 8 : this.size.radius + 16;
    }
    this.middle = this.scale([0.5, 0.5]);
    this.radius = this.scale([1, 0.5])[0] - this.middle[0];
    const [first, second] = this.points[0];
    this.between = second ? Math.hypot(second[0] - first[0], second[1] - first[1]) : 1;
  }

  /* Cards with chunks where there is room, otherwise dots. */
  sizeOf(points) {
    let closest = Infinity;
    const all = this.points.flat();
    let across = Infinity;
    all.forEach(([x, y], at) => {
      for (let other = at + 1; other < all.length; other++) {
        const dx = Math.abs(all[other][0] - x), dy = Math.abs(all[other][1] - y);
        closest = Math.min(closest, Math.hypot(dx, dy));
        // Boxes overlap only where they are near in both directions.
        if (dy < 44) across = Math.min(across, dx || Infinity);
      }
    });
    if (points.length === 1) closest = across = 200;
    const width = Math.min(104, Math.min(across, closest * 1.3) - 12);
    if (width >= 40 && closest >= 46) {
      return { isCard: true, width, height: Math.min(54, Math.max(34, closest - 14)) };
    }
    return { isCard: false, radius: Math.max(2, Math.min(17, closest * 0.4)) };
  }

  draw() {
    const context = this.sheet.clear();
    this.drawHosts(context);
    this.drawPairs(context);
    const active = this.model.underWay();
    for (const message of active) this.drawWay(context, message, active.length);
    this.points.forEach((points, place) => points.forEach((point, rank) => {
      if (this.size.isCard) this.drawCard(context, rank, point, place);
      else this.drawDot(context, rank, point);
    }));
    for (const message of active) this.drawMessage(context, message, active.length);
    return active.length;
  }

  drawHosts(context) {
    const outer = Math.max(0, this.radius + (this.size.isCard ? this.size.height / 2 : this.size.radius) + 10);
    context.lineWidth = 3;
    context.font = font(11.5, 600);
    context.textAlign = "center";
    context.textBaseline = "middle";
    this.layout.arcs.forEach(([begin, end], number) => {
      context.beginPath();
      context.arc(...this.middle, outer, begin, end);
      context.strokeStyle = number % 2 ? theme.faint : theme.soft;
      context.stroke();
      if ((end - begin) * outer < 34) return;
      const angle = (begin + end) / 2;
      context.save();
      context.translate(this.middle[0] + (outer + 10) * Math.cos(angle), this.middle[1] + (outer + 10) * Math.sin(angle));
      context.rotate(angle + Math.PI / 2 + (Math.sin(angle) > 0.01 ? Math.PI : 0));
      context.fillStyle = theme.soft;
      context.fillText(`host ${number}`, 0, 0);
      context.restore();
    });
  }

  drawPairs(context) {
    context.strokeStyle = theme.line;
    context.lineWidth = 1.2;
    this.layout.places.forEach((place, number) => {
      context.globalAlpha = place.pairs.length > 600 ? 0.25 : place.pairs.length > 120 ? 0.5 : 1;
      context.beginPath();
      for (const [one, other] of place.pairs) {
        const [from, bend, to] = this.way(this.points[number][one], this.points[number][other], 0);
        context.moveTo(...from);
        context.quadraticCurveTo(...bend, ...to);
      }
      context.stroke();
    });
    context.globalAlpha = 1;
  }

  /* From one point to another, bent around ranks in between, and a little to the right, so that
     two ways between the same ranks can be told apart. */
  way(from, to, aside) {
    const dx = to[0] - from[0], dy = to[1] - from[1], length = Math.hypot(dx, dy) || 1;
    const bend = this.layout.kind === "grid" && length > 1.6 * this.between ? 0.16 * length : 0;
    const sign = dx + dy * 0.5 > 0 ? 1 : -1;
    const x = (from[0] + to[0]) / 2 + (dy / length) * bend * sign - (dy / length) * aside * 2;
    const y = (from[1] + to[1]) / 2 - (dx / length) * bend * sign + (dx / length) * aside * 2;
    return [from, [x, y], to];
  }

  wayOf(message) {
    const { source, destination, chunk } = this.model.messages;
    const place = this.points.length > 1 && this.second.has(chunk[message]) ? 1 : 0;
    const points = this.points[place];
    const aside = this.size.isCard ? 5 : Math.min(3, this.size.radius / 2);
    return this.way(points[source[message]], points[destination[message]], aside);
  }

  colourOf(message) {
    return this.model.messages.isFull[message] ? theme.good : theme.accent;
  }

  drawWay(context, message, total) {
    const [from, bend, to] = this.wayOf(message);
    context.beginPath();
    context.moveTo(...from);
    context.quadraticCurveTo(...bend, ...to);
    context.strokeStyle = this.colourOf(message);
    context.globalAlpha = total > 400 ? 0.12 : total > 60 ? 0.3 : 0.5;
    context.lineWidth = total > 60 ? 1.2 : 2;
    context.stroke();
    context.globalAlpha = 1;
  }

  drawMessage(context, message, total) {
    const { begin, end, chunk, size } = this.model.messages;
    const part = (this.model.now - begin[message]) / (end[message] - begin[message] || 1);
    const [from, bend, to] = this.wayOf(message), rest = 1 - part;
    const at = (axis) => rest * rest * from[axis] + 2 * rest * part * bend[axis] + part * part * to[axis];
    const [x, y] = [at(0), at(1)];
    context.fillStyle = this.colourOf(message);
    context.beginPath();
    if (this.size.isCard && total <= 20) {
      const last = chunk[message] + size[message] - 1;
      const name = size[message] > 1 ? `${chunk[message]}–${last}` : `${chunk[message]}`;
      context.font = font(11, 650);
      const wide = Math.max(20, context.measureText(name).width + 10);
      context.roundRect(x - wide / 2, y - 9, wide, 18, 9);
      context.fill();
      context.strokeStyle = theme.panel;
      context.lineWidth = 1.5;
      context.stroke();
      context.fillStyle = theme.panel;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(name, x, y + 0.5);
    } else {
      context.arc(x, y, total > 400 ? 1.6 : Math.max(2.2, Math.min(5, this.size.radius ? this.size.radius * 0.5 : 5)), 0, 7);
      context.fill();
      if (!this.size.isCard && total <= 400) {
        context.lineWidth = 1;
        context.strokeStyle = theme.panel;
        context.stroke();
      }
    }
  }

  drawCard(context, rank, [x, y], place) {
    const { model } = this, { width, height } = this.size;
    const left = x - width / 2, top = y - height / 2;
    const isDone = model.requiredOf[rank] > 0 && model.done[rank] === model.requiredOf[rank];
    context.beginPath();
    context.roundRect(left, top, width, height, 7);
    context.fillStyle = theme.panel;
    context.fill();
    context.lineWidth = 1.3;
    context.strokeStyle = isDone ? theme.good : theme.faint;
    context.stroke();
    context.font = font(12, 650);
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = isDone ? theme.good : theme.ink;
    context.fillText(String(rank), left + 7, top + 10.5);
    if (isDone) {
      context.textAlign = "right";
      context.fillText("✓", left + width - 6, top + 10.5);
    }
    // Two trees have a card each for their own chunks.
    const rows = [];
    for (let row = 0; row < model.rows; row++) {
      if (this.points.length < 2 || this.second.has(row * model.perRow) === (place === 1)) rows.push(row);
    }
    const inner = width - 12, columns = Math.min(rows.length, Math.floor(inner / 2));
    const step = inner / columns, floor = top + height - 5, room = height - 24;
    for (let column = 0; column < columns; column++) {
      const from = Math.floor((column * rows.length) / columns);
      const to = Math.max(from + 1, Math.floor(((column + 1) * rows.length) / columns));
      let share = 0, full = 0, of = 0;
      for (let at = from; at < to; at++) {
        share += model.rowShare[rank * model.rows + rows[at]];
        full += model.rowFull[rank * model.rows + rows[at]];
        of += Math.min(model.perRow, model.chunks - rows[at] * model.perRow);
      }
      const gap = step > 5 ? 1.5 : step > 3 ? 0.6 : 0;
      context.fillStyle = theme.empty;
      context.fillRect(left + 6 + column * step, floor - room, step - gap, room);
      context.fillStyle = full === of ? theme.good : theme.accent;
      const tall = Math.min(1, share / of) * room;
      context.fillRect(left + 6 + column * step, floor - tall, step - gap, tall);
    }
  }

  drawDot(context, rank, [x, y]) {
    const { model } = this, { radius } = this.size;
    const isDone = model.requiredOf[rank] > 0 && model.done[rank] === model.requiredOf[rank];
    context.beginPath();
    context.arc(x, y, radius, 0, 7);
    const share = Math.min(1, model.share[rank]);
    context.fillStyle = isDone ? theme.good : mix(theme.accent, share ? 0.15 + 0.85 * share : 0);
    context.fill();
    context.textAlign = "center";
    context.textBaseline = "middle";
    if (radius >= 9) {
      context.font = font(Math.min(12, radius), 600);
      context.fillStyle = isDone || share > 0.45 ? theme.panel : theme.ink;
      context.fillText(String(rank), x, y + 0.5);
    } else if (this.layout.kind === "circle" && rank % (2 ** Math.max(0, Math.ceil(Math.log2(model.ranks / 32)))) === 0) {
      const dx = x - this.middle[0], dy = y - this.middle[1], length = Math.hypot(dx, dy) || 1;
      const away = this.layout.arcs.length ? -radius - 11 : radius + 12;
      context.font = font(10.5);
      context.fillStyle = theme.soft;
      context.fillText(String(rank), x + (dx / length) * away, y + (dy / length) * away);
    }
  }
}
