// Scroll along with a growing text, or keep an element in view, until the user scrolls. A button leads back to the end.

const NEAR_PX = 40;

export class Follower {
  constructor(box, content, button) {
    this.box = box;
    this.content = content;
    this.button = button;
    this.follows = true;
    /** The element whose top is kept in view; null: the end of the text. */
    this.target = null;
    this.last = 0;
    box.addEventListener("scroll", () => this.look(), { passive: true });
    button.addEventListener("click", () => this.toEnd());
    const watcher = new ResizeObserver(() => this.grow());
    watcher.observe(content);
    watcher.observe(box);
  }

  /** Pixels between the bottom of the view and the end of the text. */
  get rest() { return this.content.getBoundingClientRect().bottom - this.box.getBoundingClientRect().bottom; }

  /** Stop following when the user scrolls up, resume near the end. A text that got shorter also scrolls up, but to
      its end. */
  look() {
    const { scrollTop } = this.box;
    if (this.target) {
      if (scrollTop === this.last) return;
      this.target = null;
      this.follows = false;
    }
    const isUp = scrollTop < this.last;
    if (this.rest < 2) this.follows = true;
    else if (isUp) this.follows = false;
    else if (this.rest < NEAR_PX) this.follows = true;
    this.last = scrollTop;
    this.tell();
  }

  grow() {
    if (this.target) this.target.scrollIntoView({ block: "start" });
    else if (this.follows && this.rest > 0) this.box.scrollTop += Math.ceil(this.rest);
    this.last = this.box.scrollTop;
    this.tell();
  }

  tell() { this.button.hidden = this.follows || this.target || this.rest < NEAR_PX; }

  toEnd() {
    this.target = null;
    this.follows = true;
    this.grow();
  }

  /** Keep an element in view. */
  hold(element) {
    this.target = element;
    this.grow();
  }
}
