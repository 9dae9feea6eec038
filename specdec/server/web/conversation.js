// A conversation: questions, each with its answer. Completions are answered one by one, chats with what was said before.

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

  /** Go on as a conversation of its own: what is kept under the name so far is another page's now. */
  part() { this.id = newId(); }

  /** Put a question behind all, or in the place of an exchange: of a chat, which has led to what follows, that is dropped. */
  ask(question, at = this.exchanges.length) {
    const exchange = { question, answer: new Answer() };
    this.exchanges.splice(at, this.isChat ? Infinity : 1, exchange);
    return exchange;
  }

  /** Return a chat's messages up to an exchange's question. What was never answered is left out with its question. */
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
