// One answer: its text, how it ended, and the request that fills it. Views read it; it has no reference to them.

import { events } from "./client.js";
import { Tally } from "./tally.js";

export class Answer {
  /** Restore a stored answer. The origins of its tokens are not stored. */
  constructor({ text = "", reasoning = "", thoughtMs = null, finish = null, error = null, size = "", drafts = "" } = {}) {
    this.text = text;
    this.reasoning = reasoning;
    this.thoughtMs = thoughtMs;
    /** "stop", "length", or "stopped" by the user; null while streaming and after an error. */
    this.finish = finish;
    this.error = error;
    /** Summaries in words: size and speed, and the drafts' acceptance. */
    this.size = size;
    this.drafts = drafts;
    this.pieces = text ? [[text, null]] : [];
    this.tally = null;
    this.isWriting = false;
  }

  toJSON() {
    const { text, reasoning, thoughtMs, finish, error, size, drafts } = this;
    return { text, reasoning, thoughtMs, finish, error, size, drafts };
  }

  get isThinking() { return this.isWriting && this.reasoning !== "" && this.text === ""; }

  /** Run a request to its end and append to the text; call `watch` with each chunk. */
  async run({ path, body }, options, watch = () => {}) {
    this.isWriting = true;
    this.finish = this.error = null;
    this.tally = new Tally();
    try {
      for await (const event of events(path, body, options)) {
        const [choice] = event.choices;
        if (choice) this.take(choice);
        else this.tally.settle(event.usage, event.metrics);
        watch(choice);
      }
    } finally {
      this.isWriting = false;
      this.rest();
    }
  }

  take({ delta, text, pieces, origins, finish_reason }) {
    const thought = delta?.reasoning_content ?? delta?.reasoning ?? "";
    const added = text ?? delta?.content ?? "";
    if (thought) this.thinkingMs ??= performance.now();
    this.reasoning += thought;
    if (added) this.rest();
    this.text += added;
    this.pieces.push(...pieces ?? (thought || added ? [[thought + added, 0]] : []));
    this.finish = finish_reason ?? this.finish;
    this.tally.add(origins ?? []);
  }

  /** Record the time spent thinking, once. */
  rest() {
    if (this.thinkingMs !== undefined) this.thoughtMs ??= performance.now() - this.thinkingMs;
  }
}
