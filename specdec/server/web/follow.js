// The page follows the text as it grows, or keeps an element in sight, until the reader scrolls; a button leads back to
// the end.

const NEAR_PX = 40;

export class Follower {
  constructor(box, content, button) {
    this.box = box;
    this.content = content;
    this.button = button;
    this.follows = true;
    /** What is kept in sight from its beginning; null: the end is. */
    this.target = null;
    this.last = 0;
    box.addEventListener("scroll", () => this.look(), { passive: true });
    button.addEventListener("click", () => this.toEnd());
    const watcher = new ResizeObserver(() => this.grow());
    watcher.observe(content);
    watcher.observe(box);
  }

  /** How far the text's end is below what is seen. */
  get rest() { return this.content.getBoundingClientRect().bottom - this.box.getBoundingClientRect().bottom; }

  /** Going up by however little ends the following, coming down near the end begins it. A text that has grown shorter
      moves the place too, but to the end. */
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

  /** Keep an element in sight. */
  hold(element) {
    this.target = element;
    this.grow();
  }
}
