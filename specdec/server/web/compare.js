// One request answered twice, with drafts and without, side by side.

import { Answer } from "./answer.js";
import { make } from "./element.js";
import { verdict } from "./outcome.js";
import { TokenView } from "./tokens.js";

export class Comparison {
  constructor() {
    const find = (id) => document.getElementById(id);
    [this.section, this.panes, this.verdict] = ["comparison", "panes", "verdict"].map(find);
    find("comparison-close").addEventListener("click", () => this.clear());
  }

  clear() { this.section.hidden = true; }

  /** Generate one text twice, one after the other so that they do not compete for time. Each has its own salt, so that
      neither reuses cached prefixes or earlier outputs. `tell` shows the progress, `hold` keeps an element in sight. */
  async run({ path, body }, options, { served, tell, hold }) {
    this.section.hidden = false;
    this.verdict.hidden = true;
    const sides = [pane("first", "With drafts", body.prompt), pane("second", "Without drafts", body.prompt)];
    this.panes.replaceChildren(...sides.map(({ article }) => article));
    const isStacked = sides[0].article.offsetTop !== sides[1].article.offsetTop;
    const seed = body.seed ?? crypto.getRandomValues(new Uint32Array(1))[0];
    for (const [at, { article, view, answer }] of sides.entries()) {
      hold(at === 1 && isStacked ? article : this.section);
      tell(at === 0 ? "Generating with drafts …" : "Generating without drafts …");
      const wanted = { ...body, seed, speculate: at === 0, cache_salt: `${Date.now()} ${Math.random()}` };
      await answer.run({ path, body: wanted }, options, () => view.update(answer)).finally(() => view.update(answer));
    }
    this.say(verdict(sides[0].answer, sides[1].answer, served));
    hold(this.section);
  }

  say({ isSame, ratio, says, remarks }) {
    this.verdict.hidden = false;
    this.verdict.replaceChildren(says, make("span", {}, remarks));
    this.verdict.dataset.same = isSame;
    this.verdict.dataset.ratio = ratio ?? "";
  }
}

function pane(id, title, prompt) {
  const view = new TokenView(title);
  if (prompt) view.text.give(prompt);
  const heading = make("h3", { id: `${id}-title` }, title);
  const article = make("article", { id, className: "pane", "aria-labelledby": heading.id }, heading, ...view.parts);
  return { article, view, answer: new Answer() };
}
