// Accepted drafts by step, as bars. However long a text gets, there are at most so many: they are merged in pairs.

const BARS = 120, WIDTH = 120, HEIGHT = 40;

export class Curve {
  constructor(svg, note) {
    this.svg = svg;
    this.note = note;
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

  draw() {
    if (!this.steps) return;
    const wide = WIDTH / Math.max(this.sums.length, 40);
    const bars = this.sums.map((sum, i) => {
      const count = i === this.sums.length - 1 ? this.inLast : this.per;
      const high = HEIGHT * sum / count / Math.max(this.most, 1);
      return `M${i * wide} ${HEIGHT}v${-high}h${wide * .85}v${high}z`;
    });
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", bars.join(""));
    this.svg.replaceChildren(path);
    const each = this.per > 1 ? `; each bar the mean of ${this.per} steps` : "";
    this.note.textContent = `${this.steps} steps: ${(this.total / this.steps).toFixed(2)} accepted on average, ${this.most} at most${each}`;
    this.svg.setAttribute("aria-label", `Accepted drafts by step. ${this.note.textContent}`);
  }
}
