// An answer as its tokens: figures, the text in their colours, and where the one under the pointer came from.

import { make } from "./element.js";
import { Figures } from "./tally.js";
import { Text } from "./text.js";

const REFRESH_MS = 120;

export class TokenView {
  constructor(title) {
    this.figures = new Figures();
    const note = make("p", { className: "note hint" });
    const label = `${title}. Arrow keys go from token to token`;
    this.box = make("div", { className: "text", tabIndex: 0, role: "group", "aria-label": label });
    this.text = new Text(this.box, note);
    this.parts = [this.figures.list, this.box, note];
    this.shownMs = 0;
  }

  /** Show what has come; the figures change slowly enough to be read. */
  update(answer) {
    this.text.update(answer.pieces);
    if (answer.isWriting && performance.now() - this.shownMs < REFRESH_MS) return;
    this.shownMs = performance.now();
    this.figures.show(answer.tally);
  }
}
