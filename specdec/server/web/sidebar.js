// The list of conversations; on a narrow page an overlay until one is chosen.

import { button, make } from "./element.js";

export class Sidebar {
  /** `actions`: `open`, `manage`, `remove` and `begin`. */
  constructor(actions) {
    const find = (id) => document.getElementById(id);
    [this.nav, this.items, this.opener, this.page] = ["history", "chats", "history-open", "page"].map(find);
    this.actions = actions;
    this.opener.addEventListener("click", () => this.toggle(true));
    find("history-close").addEventListener("click", () => this.toggle(false));
    find("anew").addEventListener("click", () => this.leave(actions.begin));
    this.nav.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.isOpen) return;
      event.stopPropagation();
      this.toggle(false);
    });
  }

  get isOpen() { return this.opener.ariaExpanded === "true"; }

  /** Show or hide the overlay; on a wide page the list is always visible. */
  toggle(isOpen) {
    this.opener.ariaExpanded = isOpen;
    this.nav.classList.toggle("open", isOpen);
    this.page.inert = isOpen;
    (isOpen ? document.getElementById("anew") : this.opener).focus();
  }

  leave(act) {
    if (this.isOpen) this.toggle(false);
    act();
  }

  /** List the conversations; the focus stays on the button that had it. */
  show(conversations, current) {
    const { conversation, action } = document.activeElement.dataset;
    this.items.replaceChildren(...conversations.map(({ id, title }) => {
      const name = title || "Untitled";
      const by = (action) => ({ "data-conversation": id, "data-action": action });
      const open = button(name, () => this.leave(() => this.actions.open(id)), { className: "open", title: name, ...by("open") });
      if (id === current) open.setAttribute("aria-current", "page");
      return make("li", {}, open,
        button("⋯", () => this.actions.manage(id), { ariaLabel: `Rename or export ${name}`, title: "Rename or export", ...by("manage") }),
        button("✕", () => this.actions.remove(id), { ariaLabel: `Delete ${name}`, title: "Delete", ...by("remove") }));
    }));
    if (conversation) this.items.querySelector(`[data-conversation="${conversation}"][data-action="${action}"]`)?.focus();
  }
}
