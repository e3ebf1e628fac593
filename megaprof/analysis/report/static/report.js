"use strict";
// Draws one pipeline timeline per target: a row per stage, a box per microbatch, what is left of a row is bubble. Beside
// them, one that has a row per role, a box per part of an iteration, and waiting.
// Times are microseconds from the start of the step. All names are shown through textContent or fillText only.
(() => {
  // Black or white, whichever is read more easily on a colour (#rrggbb) that covers a share of the surface: one of them
  // always has a contrast of 4.5:1 or more.
  function inkOn(colour, surface, share) {
    const part = (text, place) => parseInt(text.slice(1 + 2 * place, 3 + 2 * place), 16) / 255;
    const light = [0.2126, 0.7152, 0.0722].reduce((sum, weight, place) => {
      const value = share * part(colour, place) + (1 - share) * part(surface, place);
      return sum + weight * (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    }, 0);
    return 1.05 / (light + 0.05) > (light + 0.05) / 0.05 ? "#ffffff" : "#000000";
  }

  const AXIS = 22, GAP = 2, ROW_MIN = 13, ROW_MAX = 40, ROWS_HEIGHT = 420, FEWEST_US = 20;
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";

  const time = (us) => {
    const ms = us / 1000;
    return (Math.abs(ms) >= 100 ? ms.toFixed(0) : Math.abs(ms) >= 10 ? ms.toFixed(1) : ms.toFixed(2)) + " ms";
  };

  // Flat [start behind the last start, duration, name, microbatch, chunk] to arrays with absolute starts.
  const unpack = (row) => {
    const count = row.boxes.length / 5;
    const boxes = { count, start: new Float64Array(count), end: new Float64Array(count), name: new Uint16Array(count),
      microbatch: new Int32Array(count), chunk: new Int32Array(count) };
    for (let i = 0, now = 0; i < count; i++) {
      now += row.boxes[5 * i];
      boxes.start[i] = now;
      boxes.end[i] = now + row.boxes[5 * i + 1];
      boxes.name[i] = row.boxes[5 * i + 2];
      boxes.microbatch[i] = row.boxes[5 * i + 3];
      boxes.chunk[i] = row.boxes[5 * i + 4];
    }
    const ofRole = typeof row.stage === "string";
    return { ...row, ofRole, name: (ofRole ? "" : "stage ") + row.stage, boxes };
  };

  // Index of the first box that starts at or behind `at`.
  const firstFrom = (starts, at) => {
    let low = 0, high = starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] < at) low = middle + 1; else high = middle;
    }
    return low;
  };

  class Timeline {
    constructor(root, data) {
      this.canvas = root.querySelector("canvas");
      this.peers = [this]; // those that share its time axis
      this.pointers = new Map();
      this.take(data);
      this.listen(root);
      root.addEventListener("boxes", (event) => { this.take(event.detail); this.resize(); });
      this.resize();
    }

    take(data) {
      this.data = data;
      this.rows = data.rows.map(unpack);
      // Below the first rank of its stage, a row shows a slow one.
      this.rows.forEach((row, index) => { row.slow = index > 0 && row.stage === this.rows[index - 1].stage; });
      this.end = Math.max(1, data.end || 0, ...this.rows.map((row) => row.span[1]));
      // No box is longer: how far before the visible part one may begin that reaches into it.
      this.longest = this.rows.map((row) => row.boxes.end.reduce((most, end, i) => Math.max(most, end - row.boxes.start[i]), 0));
      this.from = 0;
      this.to = this.end;
      this.hover = null;
    }

    get rowHeight() {
      return Math.max(ROW_MIN, Math.min(ROW_MAX, Math.floor(ROWS_HEIGHT / this.rows.length)));
    }

    get left() {
      if (this.canvas.clientWidth >= 520) return 62;
      return this.peers.some((each) => each.rows.some((row) => row.slow || row.ofRole)) ? 50 : 30;
    }
    get width() { return Math.max(1, this.canvas.clientWidth - this.left - 1); }
    x(us) { return this.left + ((us - this.from) / (this.to - this.from)) * this.width; }
    us(x) { return this.from + ((x - this.left) / this.width) * (this.to - this.from); }

    resize() {
      const height = AXIS + this.rows.length * this.rowHeight;
      const ratio = window.devicePixelRatio || 1;
      this.canvas.style.height = height + "px";
      this.canvas.width = Math.round(this.canvas.clientWidth * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.draw();
    }

    show(from, to) {
      const length = Math.min(this.end, Math.max(FEWEST_US, to - from));
      const begin = Math.max(0, Math.min(from, this.end - length));
      for (const each of this.peers) {
        each.from = begin;
        each.to = begin + length;
        each.soon();
      }
    }

    zoom(factor, at = (this.from + this.to) / 2) {
      const length = Math.min(this.end, Math.max(FEWEST_US, (this.to - this.from) * factor));
      const part = (at - this.from) / (this.to - this.from);
      this.show(at - part * length, at - part * length + length);
    }

    pan(us) { this.show(this.from + us, this.to + us); }

    soon() {
      if (this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => { this.waiting = false; this.draw(); });
    }

    draw() {
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue("--" + name).trim();
      const pen = this.canvas.getContext("2d");
      const ratio = window.devicePixelRatio || 1;
      const font = getComputedStyle(document.body).fontFamily;
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
      this.drawAxis(pen, colour, font);
      const pattern = this.hatch(pen, colour, ratio);
      const colours = this.data.kinds.map(colour);
      this.rows.forEach((row, index) => this.drawRow(pen, row, index, { colour, colours, pattern, font }));
    }

    drawAxis(pen, colour, font) {
      const rough = (this.to - this.from) / Math.max(2, this.width / 110);
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
      const digits = Math.max(0, -Math.floor(Math.log10(step / 1000) + 1e-9));
      pen.font = "11px " + font;
      pen.textBaseline = "middle";
      pen.textAlign = "center";
      for (let n = Math.ceil(this.from / step); n * step <= this.to; n++) {
        const x = this.x(n * step), text = (n * step / 1000).toFixed(digits) + " ms";
        const half = pen.measureText(text).width / 2;
        pen.fillStyle = colour("line");
        pen.fillRect(x, AXIS - 5, 1, 5);
        pen.fillStyle = colour("muted");
        pen.fillText(text, Math.max(this.left + half, Math.min(this.canvas.clientWidth - half, x)), 8);
      }
    }

    hatch(pen, colour, ratio) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 8;
      const brush = tile.getContext("2d");
      brush.fillStyle = colour("bubble");
      brush.fillRect(0, 0, 8, 8);
      brush.strokeStyle = colour("hatch");
      brush.lineWidth = 1.4;
      for (const shift of [-8, 0, 8]) {
        brush.beginPath();
        brush.moveTo(shift, 8);
        brush.lineTo(shift + 8, 0);
        brush.stroke();
      }
      const pattern = pen.createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(1 / ratio));
      return pattern;
    }

    drawRow(pen, row, index, look) {
      const height = this.rowHeight, top = AXIS + index * height, tall = height - GAP, boxes = row.boxes;
      pen.fillStyle = look.colour("muted");
      pen.font = Math.min(12, height - 1) + "px " + look.font;
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      const wide = this.canvas.clientWidth >= 520;
      const name = row.slow ? "rank " + row.rank : wide ? row.name : row.stage;
      pen.fillText(name, this.left - 8, top + tall / 2, this.left - 8); // squeezed if it is long
      pen.save();
      pen.beginPath();
      pen.rect(this.left, top, this.width, tall);
      pen.clip();
      const begin = this.x(row.span[0]), finish = this.x(row.span[1]);
      pen.fillStyle = look.pattern;
      pen.fillRect(begin, top, finish - begin, tall);
      this.enters(pen, row, look, begin, top, tall);
      const first = firstFrom(boxes.start, this.from - this.longest[index]);
      const behind = firstFrom(boxes.start, this.to);
      // Exchanges are waiting more than moving: a thin line over the bubble.
      for (const exchanges of [true, false]) {
        let drawn = -Infinity;
        for (let i = first; i < behind; i++) {
          const kind = this.data.kinds[boxes.name[i]];
          if ((kind === "exchange") !== exchanges) continue;
          const x = this.x(boxes.start[i]), right = Math.max(this.x(boxes.end[i]), x + 0.6);
          if (right <= drawn + 0.3 || right < this.left) continue;
          drawn = right;
          const thin = Math.max(2, tall * 0.16);
          const [y, size] = exchanges ? [top + (tall - thin) / 2, thin] : [top, tall];
          // Neighbours stay apart where there is room.
          let alpha = 1;
          const wide = right - x - (exchanges || right - x < 4 ? 0 : 1);
          if (!exchanges && this.data.chunks > 1 && boxes.chunk[i] > 0) {
            pen.fillStyle = look.colour("surface");
            pen.fillRect(x, y, wide, size);
            pen.globalAlpha = alpha = 1 - 0.55 * Math.min(1, boxes.chunk[i] / (this.data.chunks - 1));
          }
          pen.fillStyle = look.colours[boxes.name[i]];
          pen.fillRect(x, y, wide, size);
          pen.globalAlpha = 1;
          if (!exchanges && boxes.microbatch[i] >= 0) {
            const ink = inkOn(look.colours[boxes.name[i]], look.colour("surface"), alpha);
            this.label(pen, look, ink, boxes.microbatch[i], x, right, top, tall);
          }
        }
      }
      this.outline(pen, row, index, look, first, behind, top, tall);
      pen.restore();
    }

    // What the blank before a rank's part of the step is, where there is room for it.
    enters(pen, row, look, begin, top, tall) {
      const text = `enters after ${time(row.span[0])}`;
      pen.font = Math.min(11, tall - 2) + "px " + look.font;
      if (tall < 12 || Math.min(begin, this.left + this.width) - this.left < pen.measureText(text).width + 12) return;
      pen.fillStyle = look.colour("muted");
      pen.textAlign = "right";
      pen.fillText(text, Math.min(begin, this.left + this.width) - 6, top + tall / 2 + 0.5);
    }

    label(pen, look, ink, microbatch, x, right, top, tall) {
      const text = String(microbatch);
      if (tall < 12 || right - x < 8 + 6 * text.length) return;
      pen.fillStyle = ink;
      pen.font = Math.min(12, tall - 2) + "px " + look.font;
      pen.textAlign = "center";
      pen.fillText(text, (Math.max(x, this.left) + Math.min(right, this.left + this.width)) / 2, top + tall / 2 + 0.5);
    }

    // The box under the pointer, and the same microbatch in every other row.
    outline(pen, row, index, look, first, behind, top, tall) {
      if (!this.hover) return;
      const boxes = row.boxes;
      pen.strokeStyle = look.colour("text");
      for (let i = first; i < behind; i++) {
        const self = this.hover.row === index && this.hover.box === i;
        const kin = this.hover.microbatch >= 0 && boxes.microbatch[i] === this.hover.microbatch;
        if (!self && !kin) continue;
        pen.lineWidth = self ? 2 : 1;
        const x = this.x(boxes.start[i]);
        pen.strokeRect(x + 0.5, top + 1, Math.max(1, this.x(boxes.end[i]) - x - 1.5), tall - 2);
      }
    }

    // What is at a point of the canvas: the box (phases before exchanges), else the row.
    at(x, y) {
      const index = Math.floor((y - AXIS) / this.rowHeight), row = this.rows[index];
      if (!row || x < this.left) return null;
      const us = this.us(x), slack = this.us(x + 1) - us, boxes = row.boxes;
      let found = -1;
      for (let i = firstFrom(boxes.start, us - this.longest[index] - slack); i < boxes.count && boxes.start[i] <= us + slack; i++) {
        if (boxes.end[i] < us - slack) continue;
        if (found < 0 || this.data.kinds[boxes.name[found]] === "exchange") found = i;
      }
      return { row: index, box: found, us, microbatch: found < 0 ? -1 : boxes.microbatch[found] };
    }

    describe(hit) {
      const row = this.rows[hit.row], boxes = row.boxes;
      const lines = [row.name + (row.rank === null ? "" : `, rank ${row.rank}`)];
      if (hit.box < 0) {
        const early = `not in the step yet: it enters after ${time(row.span[0])}`;
        lines.unshift(hit.us < row.span[0] ? early : hit.us > row.span[1] ? "through with the step" : row.ofRole ? "waiting" : "bubble");
        lines.push(`at ${time(hit.us)}`);
        return lines;
      }
      const i = hit.box;
      lines.unshift(this.data.names[boxes.name[i]].replaceAll("_", " ") +
        (boxes.microbatch[i] < 0 ? "" : ` of microbatch ${boxes.microbatch[i]}`) +
        (boxes.chunk[i] < 0 || this.data.chunks < 2 ? "" : `, chunk ${boxes.chunk[i]}`));
      lines.push(`${time(boxes.end[i] - boxes.start[i])}, from ${time(boxes.start[i])} to ${time(boxes.end[i])}`);
      return lines;
    }

    point(event) {
      const area = this.canvas.getBoundingClientRect();
      const hit = this.at(event.clientX - area.left, event.clientY - area.top);
      const changed = JSON.stringify([hit?.row, hit?.box]) !== JSON.stringify([this.hover?.row, this.hover?.box]);
      this.hover = hit;
      if (changed) this.soon();
      if (!hit) { tip.style.display = "none"; return; }
      tip.textContent = this.describe(hit).join("\n");
      tip.style.display = "block";
      const x = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
      const y = event.clientY + 18 + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
      tip.style.transform = "none";
      tip.style.left = Math.max(4, x) + "px";
      tip.style.top = y + "px";
    }

    leave() {
      this.hover = null;
      tip.style.display = "none";
      this.soon();
    }

    drag(event) {
      const before = [...this.pointers.values()];
      const last = this.pointers.get(event.pointerId);
      this.pointers.set(event.pointerId, event.clientX);
      const scale = (this.to - this.from) / this.width;
      if (before.length === 1) {
        this.pan((last - event.clientX) * scale);
      } else if (before.length === 2) {
        const now = [...this.pointers.values()];
        const apart = (pair) => Math.max(12, Math.abs(pair[0] - pair[1]));
        const middle = (now[0] + now[1]) / 2 - this.canvas.getBoundingClientRect().left;
        this.zoom(apart(before) / apart(now), this.us(middle));
      }
    }

    listen(root) {
      const canvas = this.canvas;
      canvas.addEventListener("wheel", (event) => {
        if (event.ctrlKey || event.metaKey) {
          event.preventDefault();
          this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), this.us(event.offsetX));
        } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
          event.preventDefault();
          this.pan(((event.deltaX || event.deltaY) * (this.to - this.from)) / this.width);
        }
      }, { passive: false });
      canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.us(event.offsetX)));
      canvas.addEventListener("pointerdown", (event) => {
        canvas.setPointerCapture(event.pointerId);
        this.pointers.set(event.pointerId, event.clientX);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (this.pointers.has(event.pointerId)) this.drag(event);
        this.point(event);
      });
      for (const kind of ["pointerup", "pointercancel"]) {
        canvas.addEventListener(kind, (event) => this.pointers.delete(event.pointerId));
      }
      canvas.addEventListener("pointerleave", () => this.leave());
      canvas.addEventListener("keydown", (event) => {
        const part = (this.to - this.from) / 6;
        const does = { ArrowLeft: () => this.pan(-part), ArrowRight: () => this.pan(part), "+": () => this.zoom(0.6),
          "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), 0: () => this.show(0, this.end) }[event.key];
        if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        does();
      });
      const buttons = { in: () => this.zoom(0.6), out: () => this.zoom(1 / 0.6), fit: () => this.show(0, this.end) };
      for (const button of root.querySelectorAll("button")) {
        button.addEventListener("click", buttons[button.dataset.do]);
      }
    }
  }

  const data = JSON.parse(document.getElementById("data").textContent);
  const roots = [...document.querySelectorAll(".timeline")];
  const timelines = roots.map((root) => new Timeline(root, data[Number(root.dataset.target)]));
  timelines.forEach((timeline, place) => {
    const axis = roots[place].dataset.axis;
    if (axis) timeline.peers = timelines.filter((_, other) => roots[other].dataset.axis === axis);
  });
  const all = (does) => timelines.forEach(does);
  new ResizeObserver(() => all((timeline) => timeline.resize())).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all((timeline) => timeline.draw()));
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.theme = "light"; // paper is white
    all((timeline) => { timeline.hover = null; timeline.resize(); });
  });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset.theme;
    all((timeline) => timeline.resize());
  });
})();
