// A question and its answer as they stand in the conversation.

import { button, copyButton, make } from "./element.js";
import { Markdown } from "./markdown.js";
import { TokenView } from "./tokens.js";

const ENDS = {
  length: "Cut off by max tokens.",
  thinking: "Cut off by max tokens while it was thinking.",
  stopped: "Stopped.",
  open: "Not finished: the page was closed or reloaded, or another tab is still generating it.",
};
/** Of the time, the share that reading markdown anew may take while a long answer comes. */
const SHARE = 0.1;

/** Build a question: `edit` gets its new words, `says` what that does. */
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

/** Return how an answer ended that is not being written here; where the page itself ended, it says nothing. */
function endOf({ finish, error, text, reasoning }) {
  if (finish === "length" && reasoning && !text) return "thinking";
  return finish ?? (error ? "error" : "open");
}

/** Tell whether a key sends: Enter, but not where it ends a new line, or a word that an input method composes. */
export function isSending(event) {
  return event.key === "Enter" && !event.shiftKey && !event.altKey && !event.isComposing && event.keyCode !== 229;
}

export class AnswerView {
  /** `showsTokens`: as tokens, where they can be told apart; `prompt`: what a completion follows on; `deeds`: what its
      buttons do, and say. */
  constructor(answer, { showsTokens, prompt, deeds }) {
    this.answer = answer;
    this.deeds = deeds;
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

  /** Show what has come since. */
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

  /** Thoughts are open while they come, and folded once: who opens or closes them keeps them so. */
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

  /** Say how it ended, and what can be done now. */
  offer() {
    const { answer, deeds } = this;
    const { error, text, size, drafts } = answer;
    const end = endOf(answer);
    this.end.textContent = [ENDS[end], size, this.showsTokens && drafts].filter(Boolean).join(" ");
    const tools = [];
    if (text) tools.push(copyButton(() => answer.text, { ariaLabel: "Copy the answer" }));
    if (text && end in ENDS) tools.push(button("Continue", deeds.goOn, { title: deeds.says.goOn }));
    tools.push(button(error ? "Retry" : "Regenerate", deeds.again, { title: deeds.says.again }));
    if (deeds.isSetting(error?.field)) tools.push(button("Settings", () => deeds.mend(error)));
    this.tools.replaceChildren(...tools, this.end);
  }
}
