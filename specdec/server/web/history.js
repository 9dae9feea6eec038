// Conversations in the browser's storage, each under its own key. There are bounds; the oldest make room.

import { Trouble } from "./client.js";
import { Conversation } from "./conversation.js";

const PREFIX = "specdec.chat.";
const MOST = 100, MOST_CHARACTERS = 2_000_000;

/** The browser's storage, or where it keeps nothing for this page, one that `isFleeting`: it lasts as long as the page. */
export function openStorage() {
  try {
    localStorage.getItem(PREFIX);
    return localStorage;
  } catch {
    const kept = new Map();
    return {
      isFleeting: true,
      get length() { return kept.size; },
      key: (at) => [...kept.keys()][at],
      getItem: (name) => kept.get(name) ?? null,
      setItem: (name, value) => { kept.set(name, value); },
      removeItem: (name) => { kept.delete(name); },
    };
  }
}

export class History {
  constructor(storage) { this.storage = storage; }

  /** Return what is kept, the newest first: id, title, mode, time and size. */
  list() {
    const names = Array.from({ length: this.storage.length }, (_, at) => this.storage.key(at));
    const found = names.filter((name) => name.startsWith(PREFIX)).map((name) => this.read(name)).filter(Boolean);
    return found.sort((a, b) => b.updated - a.updated);
  }

  load(id) {
    const found = this.read(PREFIX + id);
    return found && new Conversation(found);
  }

  /** Tell whether a name in the storage is that of a conversation; null, as an event has it, is that of all. */
  holds(name, { id }) { return name === null || name === PREFIX + id; }

  /** Keep a conversation; return how many others had to go. Where it finds no room all the same, they stay. */
  save(conversation) {
    const text = JSON.stringify(conversation);
    if (text.length > MOST_CHARACTERS) throw new Trouble("This conversation is too long to be stored: it is lost when the page is closed.");
    const others = this.list().filter(({ id }) => id !== conversation.id);
    let characters = text.length + others.reduce((sum, { size }) => sum + size, 0);
    const gone = [];
    for (;;) {
      if (others.length < MOST && characters <= MOST_CHARACTERS && this.put(conversation.id, text)) return gone.length;
      const oldest = others.pop();
      if (!oldest) break;
      gone.push([oldest.id, this.storage.getItem(PREFIX + oldest.id)]);
      characters -= oldest.size;
      this.remove(oldest.id);
    }
    for (const [id, was] of gone) this.put(id, was);
    throw new Trouble("The browser's storage is full: the latest changes are lost when the page is closed.");
  }

  remove(id) { this.storage.removeItem(PREFIX + id); }

  put(id, text) {
    try {
      this.storage.setItem(PREFIX + id, text);
      return true;
    } catch {
      return false;
    }
  }

  /** Return what an entry holds; anything else than a conversation counts as none. */
  read(entry) {
    const text = this.storage.getItem(entry);
    try {
      const { id, mode, name, title, updated, exchanges } = JSON.parse(text);
      return PREFIX + id === entry && Array.isArray(exchanges) ? { id, mode, name, title, updated, exchanges, size: text.length } : null;
    } catch {
      return null;
    }
  }
}
