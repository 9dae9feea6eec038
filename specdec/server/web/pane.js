// One answer: its text, its figures, and the run that fills them.

import { events } from "./client.js";
import { Figures, Tally } from "./tally.js";
import { Text } from "./text.js";

const REFRESH_MS = 120;

export class Pane {
  constructor(article, title) {
    this.article = article;
    this.heading = document.createElement("h2");
    this.heading.id = `${article.id}-title`;
    this.figures = new Figures();
    const box = document.createElement("div");
    box.className = "text";
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    const note = document.createElement("p");
    note.className = "note hint";
    this.text = new Text(box, note);
    this.box = box;
    article.append(this.heading, this.figures.list, box, note);
    this.call(title);
  }

  call(title) {
    this.heading.textContent = title;
    this.box.setAttribute("aria-label", `${title}. Arrow keys go from token to token`);
  }

  /** Clear the pane and show what the answer follows on: texts, with a role each in a chat. */
  begin(given) {
    this.text.clear();
    this.figures.show(null);
    this.tally = new Tally();
    for (const { content, role } of given) this.text.give(content, role);
  }

  /** Run a request to its end; tell `watch` of each chunk
      and of the steps that it ended, by what they accepted. What came stays shown, however it ends. */
  async run({ path, body }, options, watch = () => {}) {
    let shownMs = 0;
    const tally = this.tally;
    try {
      for await (const event of events(path, body, options)) {
        const [choice] = event.choices;
        const ended = choice ? this.take(choice, tally) : [];
        if (!choice) tally.settle(event.usage, event.metrics);
        watch(choice, ended);
        if (performance.now() - shownMs < REFRESH_MS) continue;
        shownMs = performance.now();
        this.figures.show(tally);
      }
    } finally {
      this.text.flush();
      this.figures.show(tally);
    }
    return { text: this.text.said, tally };
  }

  take(choice, tally) {
    const text = choice.text ?? choice.delta?.content ?? "";
    const pieces = choice.pieces ?? (text ? [[text, 0]] : []);
    for (const [piece, origin] of pieces) this.text.push(piece, origin);
    return tally.add(choice.origins ?? []);
  }
}
