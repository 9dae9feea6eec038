// The views of a question and of its answer.

import { button, copyButton, make } from "./element.js";
import { Markdown } from "./markdown.js";
import { TokenView } from "./tokens.js";

const ENDS = {
  length: "Cut off by max tokens.",
  thinking: "Cut off by max tokens while it was thinking.",
  stopped: "Stopped.",
  open: "Not finished: the page was closed or reloaded, or another tab is still generating it.",
};
/** Share of the time that rendering Markdown may take while a long answer streams. */
const SHARE = 0.1;

/** Build a question; `edit` receives the new text, `says` is the tooltip of the button. */
export function questionView(question, { edit, says }) {
  const bubble = make("div", { className: "bubble" }, question);
  const tools = make("div", { className: "tools" });
  const element = make("div", { className: "question" }, bubble, tools);

  const change = () => {
    const box = make("textarea", { value: question, rows: Math.min(12, question.split("\n").length + 1), ariaLabel: "Edit the message" });
    const leave = () => { form.replaceWith(bubble, tools); tools.firstElementChild.focus(); };
    const form = make("form", { className: "edit" }, box,
      make("div", { className: "tools" }, make("button", { type: "submit", className: "main" }, "Send"), button("Cancel", leave)));
    form.addEventListener("submit", (event) => { event.preventDefault(); edit(box.value); });
    box.addEventListener("keydown", (event) => {
      if (isSending(event)) { event.preventDefault(); form.requestSubmit(); }
      if (event.key === "Escape") { event.stopPropagation(); leave(); }
    });
    bubble.remove();
    tools.replaceWith(form);
    box.focus();
  };
  tools.append(button("Edit", change, { title: says }),
    copyButton(() => question, { ariaLabel: "Copy the message" }));
  return element;
}

/** Return how a finished answer ended; "open" if its page was closed first. */
function endOf({ finish, error, text, reasoning }) {
  if (finish === "length" && reasoning && !text) return "thinking";
  return finish ?? (error ? "error" : "open");
}

/** Return whether a key press sends: Enter, unless it makes a new line or ends an input method's composition. */
export function isSending(event) {
  return event.key === "Enter" && !event.shiftKey && !event.altKey && !event.isComposing && event.keyCode !== 229;
}

export class AnswerView {
  /** `showsTokens`: colour tokens by origin; `prompt`: the text that a completion continues; `actions`: what its buttons
      do, and their tooltips. */
  constructor(answer, { showsTokens, prompt, actions }) {
    this.answer = answer;
    this.actions = actions;
    this.showsTokens = showsTokens;
    this.thoughts = make("div", { className: "thoughts" });
    this.summary = make("summary");
    this.thinking = make("details", { className: "thinking", hidden: true }, this.summary, this.thoughts);
    this.trouble = make("p", { className: "trouble", role: "alert", hidden: true });
    this.waiting = make("p", { className: "waiting" }, "Waiting for the first token …");
    this.end = make("span", { className: "end" });
    this.tools = make("div", { className: "tools", hidden: true });
    this.element = make("article", { className: "answer", ariaLabel: "Answer" }, this.thinking);
    if (showsTokens || prompt !== null) this.asTokens(prompt);
    else this.asProse();
    this.element.append(this.waiting, this.trouble, this.tools);
    this.wasThinking = false;
    this.update();
  }

  asTokens(prompt) {
    const view = new TokenView("Answer");
    if (prompt !== null) view.text.give(prompt);
    this.element.append(...this.showsTokens ? view.parts : [view.box]);
    this.show = () => view.update(this.answer);
  }

  asProse() {
    const prose = make("div", { className: "prose" });
    const markdown = new Markdown(prose);
    this.element.append(prose);
    let length = 0, nextMs = 0, later = 0;
    this.show = () => {
      const { text, isWriting } = this.answer;
      const startMs = performance.now();
      if (text.length === length) return;
      if (isWriting && startMs < nextMs) {
        later ||= setTimeout(() => { later = 0; this.show(); }, nextMs - startMs);
        return;
      }
      markdown.show(text);
      length = text.length;
      nextMs = performance.now() + (performance.now() - startMs) / SHARE;
    };
  }

  /** Show new text. */
  update() {
    const { answer } = this;
    const { isWriting, isThinking } = answer;
    this.element.ariaBusy = isWriting;
    this.waiting.hidden = !isWriting || answer.pieces.length > 0;
    this.think(isThinking);
    this.show();
    this.trouble.hidden = !answer.error;
    this.trouble.textContent = answer.error?.message ?? "";
    this.tools.hidden = isWriting;
    if (!isWriting) this.offer();
  }

  /** Open thinking while it streams and fold it once; the user's choice after that is kept. */
  think(isThinking) {
    const { reasoning, thoughtMs, text } = this.answer;
    if (!reasoning) return;
    this.thinking.hidden = false;
    if (isThinking !== this.wasThinking) this.thinking.open = isThinking || text === "";
    this.wasThinking = isThinking;
    const seconds = thoughtMs === null ? "" : ` for ${(thoughtMs / 1000).toFixed(1)} s`;
    this.summary.textContent = isThinking ? "Thinking …" : `Thought${seconds}`;
    const shown = this.thoughts.textContent.length;
    if (reasoning.length > shown) this.thoughts.append(reasoning.slice(shown));
  }

  /** Show how it ended, and the buttons. */
  offer() {
    const { answer, actions } = this;
    const { error, text, size, drafts } = answer;
    const end = endOf(answer);
    this.end.textContent = [ENDS[end], size, this.showsTokens && drafts].filter(Boolean).join(" ");
    const tools = [];
    if (text) tools.push(copyButton(() => answer.text, { ariaLabel: "Copy the answer" }));
    if (text && end in ENDS) tools.push(button("Continue", actions.goOn, { title: actions.says.goOn }));
    tools.push(button(error ? "Retry" : "Regenerate", actions.again, { title: actions.says.again }));
    if (actions.isSetting(error?.field)) tools.push(button("Settings", () => actions.mend(error)));
    this.tools.replaceChildren(...tools, this.end);
  }
}
