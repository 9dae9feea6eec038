// Conversations in the browser's storage, one entry each. Beyond the limits the oldest are deleted.

import { Trouble } from "./client.js";
import { Conversation } from "./conversation.js";

const PREFIX = "specdec.chat.";
const MOST = 100, MOST_CHARACTERS = 2_000_000;

/** Return the browser's storage or, if it is unavailable, one that `isFleeting`: it lasts as long as the page. */
export function openStorage() {
  try {
    localStorage.getItem(PREFIX);
    return localStorage;
  } catch {
    const entries = new Map();
    return {
      isFleeting: true,
      get length() { return entries.size; },
      key: (at) => [...entries.keys()][at],
      getItem: (name) => entries.get(name) ?? null,
      setItem: (name, value) => { entries.set(name, value); },
      removeItem: (name) => { entries.delete(name); },
    };
  }
}

export class History {
  constructor(storage) { this.storage = storage; }

  /** Return the stored conversations, newest first: id, title, mode, time and size. */
  list() {
    const names = Array.from({ length: this.storage.length }, (_, at) => this.storage.key(at));
    const found = names.filter((name) => name.startsWith(PREFIX)).map((name) => this.read(name)).filter(Boolean);
    return found.sort((a, b) => b.updated - a.updated);
  }

  load(id) {
    const found = this.read(PREFIX + id);
    return found && new Conversation(found);
  }

  /** Return whether a storage event's key concerns a conversation; null concerns all. */
  holds(name, { id }) { return name === null || name === PREFIX + id; }

  /** Store a conversation; return how many others were deleted for it. If it still does not fit, they are restored. */
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

  /** Return an entry's conversation, or null if it is none. */
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
