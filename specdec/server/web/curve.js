// A bar chart of accepted draft tokens per step. At BARS bars, neighbours are merged in pairs.

import { make } from "./element.js";

const BARS = 120, WIDTH = 120, HEIGHT = 40;
const SVG = "http://www.w3.org/2000/svg";

export class Curve {
  /** `plot` receives the chart and its axes, `note` a summary in words. */
  constructor(plot, note) {
    this.note = note;
    this.svg = document.createElementNS(SVG, "svg");
    const about = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    for (const [name, value] of Object.entries(about)) this.svg.setAttribute(name, value);
    [this.highest, this.lastStep] = [make("span", { className: "highest" }), make("span", { className: "last" })];
    plot.append(
      make("span", { className: "up" }, "tokens accepted"), this.highest, make("span", { className: "zero" }, "0"), this.svg,
      make("span", { className: "first" }, "1"), make("span", { className: "along" }, "verify step"), this.lastStep);
    this.clear();
  }

  clear() {
    this.sums = [];
    this.per = 1;
    this.inLast = 0;
    this.steps = 0;
    this.total = 0;
    this.most = 0;
    this.svg.replaceChildren();
    this.note.textContent = "";
  }

  add(accepted) {
    this.steps += 1;
    this.total += accepted;
    this.most = Math.max(this.most, accepted);
    if (this.inLast % this.per === 0) {
      this.sums.push(0);
      this.inLast = 0;
    }
    this.sums[this.sums.length - 1] += accepted;
    this.inLast += 1;
    if (this.sums.length === BARS && this.inLast === this.per) {
      this.sums = this.sums.filter((_, i) => i % 2 === 0).map((sum, i) => sum + this.sums[2 * i + 1]);
      this.per *= 2;
      this.inLast = this.per;
    }
  }

  /** Draw the bars over the whole width; the right end is the last step. */
  draw() {
    if (!this.steps) return;
    const wide = WIDTH * this.per / this.steps, top = Math.max(this.most, 1);
    const bars = this.sums.map((sum, i) => {
      const count = i === this.sums.length - 1 ? this.inLast : this.per;
      const high = HEIGHT * sum / count / top;
      return `M${i * wide} ${HEIGHT}v${-high}h${wide * .85 * count / this.per}v${high}z`;
    });
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", bars.join(""));
    this.svg.replaceChildren(path);
    this.highest.textContent = top;
    this.lastStep.textContent = this.steps;
    const each = this.per > 1 ? `; each bar is the mean of ${this.per} steps` : "";
    this.note.textContent = `${this.steps} steps: ${(this.total / this.steps).toFixed(2)} accepted on average, ${this.most} at most${each}.`;
    this.svg.setAttribute("aria-label", `Accepted draft tokens per verify step. ${this.note.textContent}`);
  }
}
