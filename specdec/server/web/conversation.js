// A conversation: questions with their answers. A completion is sent alone, a chat with all earlier messages.

import { Answer } from "./answer.js";

const LONGEST_TITLE = 60;
const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

export class Conversation {
  constructor({ id = newId(), mode = "chat", name = "", exchanges = [] } = {}) {
    this.id = id;
    this.mode = mode;
    /** The title that the user gave; empty: the first question is the title. */
    this.name = name;
    this.exchanges = exchanges.map(({ question, answer }) => ({ question: String(question), answer: new Answer(answer ?? {}) }));
  }

  get isChat() { return this.mode === "chat"; }
  get isEmpty() { return this.exchanges.length === 0; }
  get last() { return this.exchanges.at(-1); }

  get title() {
    if (this.name) return this.name;
    const words = (this.exchanges[0]?.question ?? "").trim().replace(/\s+/g, " ");
    return words.length > LONGEST_TITLE ? `${words.slice(0, LONGEST_TITLE - 1)}…` : words;
  }

  /** Continue as a copy with a new id: another page owns the stored one. */
  part() { this.id = newId(); }

  /** Append a question, or replace an exchange. In a chat later exchanges depend on it and are removed. */
  ask(question, at = this.exchanges.length) {
    const exchange = { question, answer: new Answer() };
    this.exchanges.splice(at, this.isChat ? Infinity : 1, exchange);
    return exchange;
  }

  /** Return a chat's messages up to an exchange's question, without unanswered questions. */
  messages(exchange, system) {
    const before = this.exchanges.slice(0, this.exchanges.indexOf(exchange)).filter(({ answer }) => answer.text);
    return [
      ...system ? [{ role: "system", content: system }] : [],
      ...before.flatMap(({ question, answer }) => [
        { role: "user", content: question }, { role: "assistant", content: answer.text }]),
      { role: "user", content: exchange.question },
    ];
  }

  toJSON() {
    const { id, mode, name, exchanges, title } = this;
    return { id, mode, name, title, exchanges, updated: Date.now() };
  }
}
