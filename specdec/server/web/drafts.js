// The draft trees of an answer: the newest while it comes, any of them by the slider.

import { Curve } from "./curve.js";
import { draw } from "./tree.js";

const REFRESH_MS = 350;

export class Drafts {
  constructor() {
    const find = (id) => document.getElementById(id);
    [this.section, this.svg, this.slider, this.label] = ["drafts", "tree", "step", "step-label"].map(find);
    [this.curvePart, this.none] = ["curve-part", "drafts-none"].map(find);
    this.curve = new Curve(find("curve"), find("curve-note"));
    this.slider.addEventListener("input", () => this.show(Number(this.slider.value)));
    this.clear();
  }

  clear() {
    this.trees = [];
    this.isDrafted = false;
    this.shown = this.drawnMs = 0;
    this.drawn = null;
    this.slider.max = this.slider.value = 1;
    this.curve.clear();
    this.section.hidden = this.curvePart.hidden = true;
    this.none.hidden = false;
    this.none.textContent = "Draft trees and the curve are shown for answers that are written while this view is on.";
  }

  /** Take what a chunk brought; draw now and then, slowly enough to be looked at. */
  watch(choice) {
    for (const tree of choice?.drafts ?? []) {
      this.trees.push(tree);
      this.curve.add(tree.accepted.length);
      this.isDrafted ||= tree.texts.length > 1;
    }
    if (performance.now() - this.drawnMs < REFRESH_MS) return;
    this.drawnMs = performance.now();
    this.refresh();
  }

  /** Draw the newest step, unless the reader chose another, and the curve; nothing while nothing was drafted. */
  refresh() {
    if (this.trees.length && !this.isDrafted) this.none.textContent = "Nothing was drafted for the last answer.";
    if (!this.isDrafted) return;
    this.section.hidden = this.curvePart.hidden = false;
    this.none.hidden = true;
    const follows = !this.shown || this.shown === Number(this.slider.max);
    this.slider.max = this.trees.length;
    if (follows) this.slider.value = this.trees.length;
    this.show(Number(this.slider.value));
    this.curve.draw();
  }

  show(step) {
    const tree = this.trees[step - 1];
    if (!tree) return;
    this.label.textContent = `Step ${step} of ${this.trees.length}`;
    if (this.drawn === tree) return;
    this.drawn = tree;
    this.shown = step;
    draw(this.svg, tree);
    this.svg.dataset.step = step;
    this.slider.setAttribute("aria-valuetext", `step ${step}: ${tree.accepted.length} of ${tree.texts.length - 1} accepted`);
  }
}
