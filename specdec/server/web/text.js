// A text coloured by token origin. Elements are only appended, never changed.

import { literal, spelled } from "./element.js";

export const nameOf = (origin) => origin ? `accepted draft token, depth ${origin}` : "the model's own token";

export class Text {
  /** `box` receives the text, `note` the origin of the token at the pointer or the arrow keys. */
  constructor(box, note) {
    this.box = box;
    this.note = note;
    this.shown = 0;
    this.line = null;
    box.addEventListener("mouseover", ({ target }) => this.tell(target));
    box.addEventListener("keydown", (event) => this.walk(event));
    box.addEventListener("copy", copyPlain);
  }

  /** Show a prompt, before the text. */
  give(text) { this.append(text, "given", null); }

  /** Append the pieces that are not shown yet. */
  update(pieces) {
    const follows = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    for (const [text, origin] of pieces.slice(this.shown)) this.append(text, origin === null ? "kept" : "from", origin);
    this.shown = pieces.length;
    if (follows) this.box.scrollTop = this.box.scrollHeight;
  }

  /** Append text, one element per line: only the last line is laid out again. */
  append(text, name, origin) {
    for (const part of text.split(/(?<=\n)/)) {
      this.line ??= this.box.appendChild(document.createElement("div"));
      const span = this.line.appendChild(document.createElement("span"));
      span.className = name;
      if (origin !== null) span.dataset.origin = origin;
      span.append(...literal(part));
      if (part.endsWith("\n")) this.line = null;
    }
  }

  tell(place) {
    const token = place.closest(".from");
    if (token) this.note.textContent = `${spelled(JSON.stringify(token.textContent))}: ${nameOf(Number(token.dataset.origin))}`;
  }

  /** Move from token to token with the left and right arrow keys; up and down scroll. */
  walk(event) {
    const ahead = { ArrowRight: true, ArrowLeft: false }[event.key];
    if (ahead === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    const tokens = this.box.getElementsByClassName("from");
    const next = this.current?.isConnected ? neighbour(this.current, ahead) : tokens[0];
    if (!next) return;
    event.preventDefault();
    this.current?.classList.remove("current");
    this.current = next;
    next.classList.add("current");
    next.scrollIntoView({ block: "nearest" });
    this.tell(next);
  }
}

/** Copy the characters themselves: the lines' elements would add line breaks. */
function copyPlain(event) {
  const selection = getSelection();
  if (selection.rangeCount !== 1 || !this.contains(selection.getRangeAt(0).commonAncestorContainer)) return;
  event.clipboardData.setData("text/plain", selection.getRangeAt(0).cloneContents().textContent);
  event.preventDefault();
}

function neighbour(token, ahead) {
  const step = ahead ? "nextElementSibling" : "previousElementSibling";
  for (let near = token[step], line = token.parentNode; line; near = ahead ? line?.firstElementChild : line?.lastElementChild) {
    for (; near; near = near[step]) if (near.classList.contains("from")) return near;
    line = line[step];
  }
  return null;
}
