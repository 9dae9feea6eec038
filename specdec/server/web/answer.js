// One answer: what was written, how it ended, and the run that fills it. Views read it; it knows none of them.

import { events } from "./client.js";
import { Tally } from "./tally.js";

export class Answer {
  /** `kept` is what an answer was kept as: the origins of its tokens are not. */
  constructor({ text = "", reasoning = "", thoughtMs = null, finish = null, error = null, size = "", drafts = "" } = {}) {
    this.text = text;
    this.reasoning = reasoning;
    this.thoughtMs = thoughtMs;
    /** Why it ended: "stop", "length", "stopped" by the user; null while it comes and where an error ended it. */
    this.finish = finish;
    this.error = error;
    /** What it has come to, in words: size and speed, and what its drafts gave. */
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

  /** Run a request to its end, behind what is there; tell `watch` of each chunk. */
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
    const said = text ?? delta?.content ?? "";
    if (thought) this.thinkingMs ??= performance.now();
    this.reasoning += thought;
    if (said) this.rest();
    this.text += said;
    this.pieces.push(...pieces ?? (thought || said ? [[thought + said, 0]] : []));
    this.finish = finish_reason ?? this.finish;
    this.tally.add(origins ?? []);
  }

  /** Note how long it has thought, once. */
  rest() {
    if (this.thinkingMs !== undefined) this.thoughtMs ??= performance.now() - this.thinkingMs;
  }
}
