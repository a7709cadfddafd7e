"use strict";
/* What a schedule does, computed once: which buffer changes when, which messages are in flight.
   A value is the set of ranks whose contributions are in it; 0 stands for an empty buffer. */

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Float32Array(await new Response(stream).arrayBuffer());
}

class Values {
  constructor(ranks) {
    this.words = Math.ceil(ranks / 32);
    this.bits = [new Uint32Array(this.words)];
    this.count = [0];
    this.unions = new Map();
    for (let rank = 0; rank < ranks; rank++) {
      const bits = new Uint32Array(this.words);
      bits[rank >> 5] |= 1 << (rank & 31);
      this.add(bits);
    }
  }

  add(bits) {
    let count = 0;
    for (let word of bits) for (; word; word &= word - 1) count++;
    this.bits.push(bits);
    return this.count.push(count) - 1;
  }

  union(one, other) {
    const key = one * 67108864 + other;
    let found = this.unions.get(key);
    if (found === undefined) {
      found = this.add(this.bits[one].map((word, at) => word | this.bits[other][at]));
      this.unions.set(key, found);
    }
    return found;
  }

  ranks(value) {
    const found = [];
    this.bits[value].forEach((word, at) => {
      for (let bit = 0; bit < 32; bit++) if (word & (1 << bit)) found.push(32 * at + bit);
    });
    return found;
  }
}

class Model {
  constructor(data, times) {
    Object.assign(this, { data, wanted: data.wanted, duration: data.time_s });
    const { ranks, chunks } = data.schedule;
    Object.assign(this, { ranks, chunks, values: new Values(ranks), now: 0, applied: 0 });
    this.rows = Math.min(chunks, 256);
    this.perRow = Math.ceil(chunks / this.rows);
    this.rows = Math.ceil(chunks / this.perRow);
    this.held = new Int32Array(ranks * chunks);
    this.required = new Uint8Array(ranks * chunks);
    this.rowShare = new Float64Array(ranks * this.rows);
    this.rowFull = new Int32Array(ranks * this.rows);
    this.share = new Float64Array(ranks);
    this.done = new Int32Array(ranks);
    this.requiredOf = new Int32Array(ranks);
    this.requiredTotal = this.doneTotal = 0;
    const each = (runs, act) => runs.forEach((of, rank) => of.forEach(([first, many]) => {
      for (let chunk = first; chunk < first + many; chunk++) act(rank, rank * chunks + chunk);
    }));
    each(data.after, (rank, at) => {
      this.required[at] = 1;
      this.requiredOf[rank]++;
      this.requiredTotal++;
    });
    const empty = new Int32Array(ranks * chunks);
    each(data.before, (rank, at) => { empty[at] = rank + 1; });
    const total = data.messages, numbers = () => new Int32Array(total);
    this.messages = {
      begin: times.subarray(0, total), end: times.subarray(total), isFull: new Uint8Array(total).fill(1),
      source: numbers(), destination: numbers(), chunk: numbers(), size: numbers(),
    };
    this.findChanges(empty.slice());
    empty.forEach((value, at) => { if (value) this.put(at, value); });
  }

  /* The steps, as phases store them. */
  * steps() {
    const { ranks, phases } = this.data.schedule;
    for (const phase of phases) {
      for (let time = 0; time < phase.times; time++) {
        yield phase.source.map((source, at) => {
          const within = phase.within, offset = phase.chunk[at] % within;
          const moved = (((offset + phase.shift * time) % within) + within) % within;
          const target = phase.destination[at] + phase.turn * time;
          return {
            source, reduces: phase.reduces[at], count: phase.count[at],
            destination: ((target % ranks) + ranks) % ranks,
            chunk: phase.shift ? phase.chunk[at] - offset + moved : phase.chunk[at],
          };
        });
      }
    }
  }

  findChanges(held) {
    const { messages, chunks, values } = this;
    let total = 0;
    const of = this.data.schedule.phases;
    for (const phase of of) total += phase.times * phase.count.reduce((sum, count) => sum + count, 0);
    const when = new Float32Array(total), where = new Int32Array(total);
    const before = new Int32Array(total), after = new Int32Array(total);
    this.stepEnds = [];
    let change = 0, message = 0, number = 0;
    for (const step of this.steps()) {
      const numbers = new Map();
      for (const transfer of step) {
        const pair = transfer.source * this.ranks + transfer.destination;
        if (!numbers.has(pair)) {
          messages.source[message] = transfer.source;
          messages.destination[message] = transfer.destination;
          messages.chunk[message] = transfer.chunk;
          numbers.set(pair, message++);
        }
        transfer.message = numbers.get(pair);
        messages.size[transfer.message] += transfer.count;
        const from = transfer.source * chunks + transfer.chunk;
        transfer.sent = held.slice(from, from + transfer.count);
        if (transfer.sent.some((value) => values.count[value] < this.wanted)) {
          messages.isFull[transfer.message] = 0;
        }
      }
      // Everything has been read; now it is written, in order of arrival.
      step.sort((one, other) => messages.end[one.message] - messages.end[other.message]);
      let end = this.stepEnds.length ? this.stepEnds[number - 1] : 0;
      for (const transfer of step) {
        const at = transfer.destination * chunks + transfer.chunk, time = messages.end[transfer.message];
        end = Math.max(end, time);
        transfer.sent.forEach((sent, offset) => {
          const had = held[at + offset];
          when[change] = time;
          where[change] = at + offset;
          before[change] = had;
          held[at + offset] = after[change] = transfer.reduces ? values.union(had, sent) : sent;
          change++;
        });
      }
      this.stepEnds.push(end);
      number++;
    }
    const order = new Uint32Array(total).map((_, at) => at);
    order.sort((one, other) => when[one] - when[other] || one - other);
    this.changes = { order, when, where, before, after };
    this.byBegin = new Uint32Array(message).map((_, at) => at);
    this.byBegin.sort((one, other) => messages.begin[one] - messages.begin[other]);
    this.longest = 0;
    for (let at = 0; at < message; at++) {
      this.longest = Math.max(this.longest, messages.end[at] - messages.begin[at]);
    }
    this.duration = Math.max(this.duration, this.stepEnds[number - 1] || 0);
  }

  put(at, value) {
    const rank = Math.floor(at / this.chunks), chunk = at % this.chunks;
    const row = rank * this.rows + Math.floor(chunk / this.perRow);
    const old = this.values.count[this.held[at]], fresh = this.values.count[value];
    this.held[at] = value;
    const more = (fresh - old) / this.wanted;
    this.rowShare[row] += more;
    this.share[rank] += more / this.chunks;
    const full = (fresh >= this.wanted) - (old >= this.wanted);
    this.rowFull[row] += full;
    if (this.required[at]) {
      this.done[rank] += full;
      this.doneTotal += full;
    }
  }

  seek(time) {
    const { order, when, where, before, after } = this.changes;
    while (this.applied < order.length && when[order[this.applied]] <= time) {
      const change = order[this.applied++];
      this.put(where[change], after[change]);
    }
    while (this.applied > 0 && when[order[this.applied - 1]] > time) {
      const change = order[--this.applied];
      this.put(where[change], before[change]);
    }
    this.now = time;
  }

  /* The messages in flight now. */
  underWay() {
    const { begin, end } = this.messages, found = [];
    let low = 0, high = this.byBegin.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (begin[this.byBegin[middle]] <= this.now) low = middle + 1; else high = middle;
    }
    for (let at = low - 1; at >= 0; at--) {
      const message = this.byBegin[at];
      if (begin[message] < this.now - this.longest) break;
      if (end[message] > this.now) found.push(message);
    }
    return found;
  }

  stepsDone() {
    let done = 0;
    while (done < this.stepEnds.length && this.stepEnds[done] <= this.now) done++;
    return done;
  }
}
