// A text in the colours of its tokens. What comes waits until the next frame; nothing shown is touched again.

export const nameOf = (origin) => origin ? `drafted at depth ${origin}, and accepted` : "the verifier's own";

export class Text {
  /** `box` scrolls, `note` says where the token under the pointer or the arrow keys came from. */
  constructor(box, note) {
    this.box = box;
    this.note = note;
    this.waiting = [];
    this.frame = 0;
    this.line = null;
    this.length = 0;
    this.whole = [];
    box.addEventListener("mouseover", ({ target }) => this.tell(target));
    box.addEventListener("keydown", (event) => this.walk(event));
  }

  get said() { return this.whole.join(""); }

  clear() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.waiting = [];
    this.whole = [];
    this.current = null;
    this.note.textContent = "";
    this.box.replaceChildren();
    this.line = null;
  }

  /** Add text that is not streamed: a prompt, or a turn of a chat under its role. */
  give(text, role) {
    if (role) {
      const heading = document.createElement("div");
      heading.className = "role";
      heading.textContent = role;
      this.box.append(heading);
      this.line = null;
    }
    this.append(text, "given", null);
    this.box.scrollTop = this.box.scrollHeight;
  }

  /** Take a token's text; it is shown with the next frame. */
  push(text, origin) {
    this.whole.push(text);
    this.waiting.push([text, origin]);
    this.frame ||= requestAnimationFrame(() => this.flush());
  }

  /** Show what waits, once for all that came since the last frame. */
  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const follows = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    for (const [text, origin] of this.waiting) this.append(text, "from", origin);
    this.waiting = [];
    if (follows) this.box.scrollTop = this.box.scrollHeight;
  }

  /** Each line is an element of its own: what is added changes the layout of the last alone. */
  append(text, name, origin) {
    for (const part of text.split(/(?<=\n)/)) {
      this.line ??= this.box.appendChild(document.createElement("div"));
      const span = this.line.appendChild(document.createElement("span"));
      span.className = name;
      if (origin !== null) span.dataset.origin = origin;
      span.textContent = part;
      if (part.endsWith("\n")) this.line = null;
    }
  }

  tell(token) {
    if (!token.classList.contains("from")) return;
    this.note.textContent = `${JSON.stringify(token.textContent)}: ${nameOf(Number(token.dataset.origin))}`;
  }

  /** Go from token to token with the arrow keys left and right; up and down scroll. */
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

function neighbour(token, ahead) {
  const step = ahead ? "nextElementSibling" : "previousElementSibling";
  for (let near = token[step], line = token.parentNode; line; near = ahead ? line?.firstElementChild : line?.lastElementChild) {
    for (; near; near = near[step]) if (near.classList.contains("from")) return near;
    line = line[step];
  }
  return null;
}
