// The draft trees of an answer: the newest while it streams, or the one that the slider selects.

import { Curve } from "./curve.js";
import { make } from "./element.js";
import { nameOf } from "./text.js";
import { draw } from "./tree.js";

const REFRESH_MS = 350;
const DEPTHS = ["1", "2", "3", "4", "5", "6", "7", "8+"];
const SAYS = {
  none: "Draft trees and the chart are shown for answers generated while this view is on.",
  undrafted: "Nothing was drafted for the last answer.",
  compared: "Compare records no draft trees, as that takes time. Send the text to see them.",
  before: "Tree and chart show the last answer. Compare records none, as that takes time.",
};

export class Drafts {
  constructor() {
    const find = (id) => document.getElementById(id);
    [this.section, this.svg, this.slider, this.label] = ["drafts", "tree", "step", "step-label"].map(find);
    [this.curvePart, this.none] = ["curve-part", "drafts-none"].map(find);
    this.curve = new Curve(find("curve"), find("curve-note"));
    this.slider.addEventListener("input", () => this.show(Number(this.slider.value)));
    const scale = DEPTHS.map((depth, at) => make("span", { className: "from", "data-origin": at + 1 }, depth));
    find("legend").append(
      make("li", { className: "from", "data-origin": 0 }, nameOf(0)),
      make("li", { className: "depths" }, make("span", {}, "accepted draft token, by depth"),
        make("span", { className: "scale" }, ...scale)));
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
    this.say(SAYS.none);
  }

  say(words) {
    this.none.hidden = !words;
    this.none.textContent = words;
  }

  /** After a comparison, explain which answer the trees belong to, or why there are none. */
  compared() { this.say(this.isDrafted ? SAYS.before : SAYS.compared); }

  /** Add a chunk's trees; redraw at most every REFRESH_MS. */
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

  /** Draw the chart and the newest step, unless the user selected another; nothing until a token was drafted. */
  refresh() {
    if (this.trees.length && !this.isDrafted) this.say(SAYS.undrafted);
    if (!this.isDrafted) return;
    this.section.hidden = this.curvePart.hidden = false;
    this.say("");
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
