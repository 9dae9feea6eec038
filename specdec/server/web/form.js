// What the form says, as a request's body.

import { Trouble } from "./client.js";

const WHOLE = ["max_tokens", "seed", "top_k"];
const NUMBERS = [...WHOLE, "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"];
const SHOWN = { stream: true, stream_options: { include_usage: true }, return_origins: true, return_metrics: true };

export const EXAMPLES = {
  "A header": 'def parse_header(line):\n    """Parse a header line into a name and a value."""\n    name, sep, value = line.partition(":")\n',
  "A stack": 'class Stack:\n    """A stack of items, the last in being the first out."""\n\n    def __init__(self):\n',
  "A walk": "def walk(top):\n    for name in os.listdir(top):\n        path = os.path.join(top, name)\n",
  "A cache": 'class LRUCache:\n    """A mapping that forgets what was not used lately."""\n\n    def __getitem__(self, key):\n',
};
export const QUESTION = "Write a function that reverses a list.";

export const field = (name) => document.getElementById(name === "stop" ? "stop_text" : name);
export const isChat = () => field("chat").checked;
export const key = () => field("key").value.trim();

/** Return the address and the body of the request that the form asks for, after the turns of a chat.
    `again`: in a chat without a new message it is the last one's, whose answer is the last turn. */
export function read(turns, { again = false } = {}) {
  const prompt = field("prompt");
  const isEmpty = !prompt.value.trim();
  const isAgain = again && isChat() && isEmpty && turns.length > 0;
  if (isEmpty && !isAgain) throw new Trouble(isChat() ? "Write a message first." : "Write a prompt first.", { field: "prompt" });
  const body = { ...SHOWN, speculate: field("speculate").checked };
  for (const name of NUMBERS) {
    const value = number(name);
    if (value !== null) body[name] = value;
  }
  if (field("stop").value) body.stop = field("stop").value;
  if (field("ignore_eos").checked) body.ignore_eos = true;
  if (!isChat()) return { path: "v1/completions", body: { ...body, prompt: prompt.value } };
  const system = field("system").value ? [{ role: "system", content: field("system").value }] : [];
  const asked = isAgain ? turns.slice(0, -1) : [...turns, { role: "user", content: prompt.value }];
  return { path: "v1/chat/completions", body: { ...body, messages: [...system, ...asked] } };
}

/** Make sure that there is a seed, so that two requests can write the same text. */
export function settleSeed() {
  if (field("seed").value === "") field("seed").value = crypto.getRandomValues(new Uint32Array(1))[0];
}

function number(name) {
  const input = field(name);
  const label = input.labels[0].firstChild.textContent.trim();
  if (input.validity.badInput) throw new Trouble(`${label} is no number.`, { field: name });
  if (input.value === "") return null;
  const value = Number(input.value);
  if (WHOLE.includes(name) && !Number.isSafeInteger(value)) throw new Trouble(`${label} must be a whole number.`, { field: name });
  return value;
}

/** Mark an input as the one at fault, and go there; null: none is. */
export function blame(name) {
  for (const input of document.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  const input = name && field(name);
  if (!input || !input.matches("input, textarea")) return;
  input.closest("details")?.setAttribute("open", "");
  input.setAttribute("aria-invalid", "true");
  input.focus();
}
