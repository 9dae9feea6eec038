// An answer as tokens: figures, coloured text, and the origin of the token at the pointer.

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

  /** Show new text at once, figures at most every REFRESH_MS so that they can be read. */
  update(answer) {
    this.text.update(answer.pieces);
    if (answer.isWriting && performance.now() - this.shownMs < REFRESH_MS) return;
    this.shownMs = performance.now();
    this.figures.show(answer.tally);
  }
}
