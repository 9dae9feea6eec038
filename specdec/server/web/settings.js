// The settings: read them as request fields, store them, show which is invalid.

import { Trouble } from "./client.js";

const WHOLE = ["max_tokens", "seed", "top_k"];
const NUMBERS = [...WHOLE, "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"];
const KEPT = "specdec.settings";
const SHOWN = { stream: true, stream_options: { include_usage: true }, return_origins: true, return_metrics: true };
/** Without `max_tokens` a completion has 16 tokens, as in OpenAI's API: too few to look at. A model that is not trained
    for chat rarely ends an answer, and the server's default, 4096 tokens, is too long. */
const COMPLETION_TOKENS = 256;

export const field = (name) => document.getElementById(name === "stop" ? "stop_text" : name);
export const key = () => field("key").value.trim();

export class Settings {
  constructor(storage) {
    this.storage = storage;
    this.dialog = document.getElementById("settings");
    this.fault = document.getElementById("fault");
    /** Request fields for settings that are empty. */
    this.defaults = {};
    const inputs = [...this.dialog.querySelectorAll("input, select, textarea")].filter(({ id }) => id !== "key");
    this.saved = [...inputs, field("view"), field("speculate")];
    this.recall();
    this.dialog.addEventListener("change", () => this.keep());
    // The event is delayed: an error may have reopened the dialog by then.
    this.dialog.addEventListener("close", () => { if (!this.dialog.open) this.blame(null); });
    document.getElementById("settings-open").addEventListener("click", () => this.dialog.showModal());
  }

  /** Set the defaults for a mode; `isUnsuited`: a chat with a model that is not trained for chat. */
  suit({ isChat, isUnsuited }) {
    const isServers = isChat && !isUnsuited;
    this.defaults = isServers ? {} : { max_tokens: COMPLETION_TOKENS };
    field("max_tokens").placeholder = isServers ? "server default" : COMPLETION_TOKENS;
  }

  /** Return the fields of every request; throw a Trouble that names an invalid field. */
  read() {
    const body = { ...SHOWN, speculate: field("speculate").checked };
    for (const name of NUMBERS) {
      const value = number(name);
      if (value !== null) body[name] = value;
    }
    if (field("stop").value) body.stop = field("stop").value;
    if (field("ignore_eos").checked) body.ignore_eos = true;
    if (field("models").value) body.model = field("models").value;
    return body;
  }

  /** Return the request for an exchange of a chat, or for a completion; `goesOn`: continue its text. */
  request(conversation, exchange, fields, { goesOn = false } = {}) {
    if (conversation.isChat) {
      const thinking = field("thinking").value;
      const variables = thinking && { chat_template_kwargs: { enable_thinking: thinking === "on" } };
      const messages = conversation.messages(exchange, field("system").value);
      return { path: "v1/chat/completions", body: { ...this.defaults, ...fields, ...variables, messages } };
    }
    const prompt = exchange.question + (goesOn ? exchange.answer.text : "");
    return { path: "v1/completions", body: { ...this.defaults, ...fields, prompt } };
  }

  /** Open the dialog at an invalid field; null clears the error. */
  blame(error) {
    for (const input of document.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
    this.fault.hidden = !error;
    this.fault.textContent = error?.message ?? "";
    if (!error) return;
    const input = field(error.field);
    if (!this.dialog.open) this.dialog.showModal();
    input.closest("details")?.setAttribute("open", "");
    input.setAttribute("aria-invalid", "true");
    input.focus();
  }

  holds(name) { return Boolean(name && this.dialog.contains(field(name))); }

  keep() {
    const values = this.saved.map((input) => [input.id, input.type === "checkbox" ? input.checked : input.value]);
    try {
      this.storage.setItem(KEPT, JSON.stringify(Object.fromEntries(values)));
    } catch { /* a full storage keeps the conversations; the settings last as long as the page */ }
  }

  recall() {
    let values;
    try {
      values = JSON.parse(this.storage.getItem(KEPT)) ?? {};
    } catch {
      return;
    }
    for (const input of this.saved) {
      if (!(input.id in values)) continue;
      if (input.type === "checkbox") input.checked = values[input.id] === true;
      else input.value = String(values[input.id]);
    }
  }
}

function number(name) {
  const input = field(name);
  const label = input.labels[0].firstChild.textContent.trim();
  if (input.validity.badInput) throw new Trouble(`${label} is not a number.`, { field: name });
  if (input.value === "") return null;
  const value = Number(input.value);
  if (WHOLE.includes(name) && !Number.isSafeInteger(value)) throw new Trouble(`${label} must be an integer.`, { field: name });
  return value;
}
