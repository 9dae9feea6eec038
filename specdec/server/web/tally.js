// An answer's figures: counted while it streams, then replaced by the server's.

/** A step's tokens are the accepted ones and one of the model's own; the first token comes from the prefill. */
export class Tally {
  constructor() {
    this.tokens = 0;
    this.steps = 0;
    this.accepted = 0;
    this.drafted = null;
    this.known = 0;
    this.inStep = 0;
    this.firstMs = null;
    this.rate = null;
    this.startedMs = performance.now();
    this.early = 0;
  }

  /** Count tokens by their origins. */
  add(origins) {
    const nowMs = performance.now();
    for (const origin of origins) {
      this.tokens += 1;
      if (origin > 0) {
        this.accepted += 1;
        this.inStep += 1;
      } else if (this.tokens > 1) {
        this.steps += 1;
        this.inStep = 0;
      }
    }
    if (this.firstMs === null && this.tokens) {
      this.firstMs = nowMs - this.startedMs;
      this.early = this.tokens;
    }
    const sinceMs = nowMs - this.startedMs - this.firstMs;
    if (this.tokens > this.early && sinceMs > 0) this.rate = (this.tokens - this.early) / sinceMs * 1000;
  }

  /** Take the server's figures at the end: its times exclude the network and this page. */
  settle(usage, metrics) {
    const drafts = metrics?.speculative_decoding;
    if (usage) this.tokens = usage.completion_tokens;
    this.known = usage?.completion_tokens_details.accepted_from_outputs ?? 0;
    if (!drafts) return;
    this.steps = drafts.steps;
    this.accepted = drafts.accepted_tokens;
    this.drafted = drafts.drafted_tokens;
    this.exact = drafts.acceptance_length;
    this.firstMs = metrics.time_to_first_token_s * 1000;
    const seconds = metrics.total_s - metrics.time_to_first_token_s;
    this.rate = this.tokens > 1 && seconds > 0 ? (this.tokens - 1) / seconds : null;
  }

  get length() {
    const steps = this.steps + (this.inStep > 0);
    return this.exact ?? (steps ? (this.tokens - 1) / steps : null);
  }
}

const FIGURES = {
  length: ["Acceptance length", (t) => t.length, (v) => v.toFixed(2), "mean tokens per verify step, including the model's own"],
  rate: ["Tokens/s", (t) => t.rate, (v) => v.toFixed(v < 100 ? 1 : 0), "after the first token"],
  tokens: ["Tokens", (t) => t.tokens, String, "generated so far"],
  steps: ["Steps", (t) => t.steps, String, "verify steps"],
  accepted: ["Accepted", (t) => t.accepted, String, "accepted draft tokens"],
  drafted: ["Drafted", (t) => t.drafted, String, "draft tokens verified; known when the answer has ended"],
  first: ["First token", (t) => t.firstMs, (v) => `${v.toFixed(v < 10 ? 1 : 0)} ms`, "after the request was sent"],
};

/** A list of figures; each element has its raw value in `data-value`. */
export class Figures {
  constructor() {
    this.list = document.createElement("dl");
    this.list.className = "figures";
    this.shown = new Map();
    for (const [name, [label, , , says]] of Object.entries(FIGURES)) {
      const [group, term, value] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
      term.textContent = label;
      group.title = says;
      value.dataset.figure = name;
      group.append(term, value);
      this.list.append(group);
      this.shown.set(name, value);
    }
    this.show(null);
  }

  show(tally) {
    for (const [name, [, read, write]] of Object.entries(FIGURES)) {
      const value = tally && read(tally);
      const shown = this.shown.get(name);
      shown.textContent = value === null ? "–" : write(value);
      shown.dataset.value = value ?? "";
    }
  }
}
