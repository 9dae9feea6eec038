// What the buttons and keys do: one run at a time, of one request or of two that are compared.

import { get, Trouble } from "./client.js";
import { Drafts } from "./drafts.js";
import { blame, EXAMPLES, field, isChat, key, QUESTION, read, settleSeed } from "./form.js";
import { summary, verdict } from "./outcome.js";
import { Pane } from "./pane.js";
import { nameOf } from "./text.js";

const find = (id) => document.getElementById(id);
const [form, send, stop, anew] = ["form", "send", "stop", "anew"].map(find);
const BEGINNERS = [send, find("compare"), anew];
const first = new Pane(find("first"), "Answer");
const second = new Pane(find("second"), "Without speculation");
const drafts = new Drafts();
const WRITING = "Writing …";
let turns = [];
let running = null;
let served = null;

/** Show what a run has come to; null hides it. */
function tell(status, { trouble = null, verdict = null } = {}) {
  find("status").textContent = status;
  find("trouble").hidden = trouble === null;
  find("trouble").textContent = trouble ?? "";
  find("verdict").hidden = verdict === null;
}

/** Do something that can be stopped, and say in plain words how it ended. */
async function attempt(work) {
  if (running) return;
  running = new AbortController();
  const { signal } = running;
  const begun = document.activeElement;
  stop.disabled = false;
  for (const button of BEGINNERS) button.disabled = true;
  // A button that is switched off loses the focus; who works by keys goes on at the one that is on.
  if (BEGINNERS.includes(begun)) stop.focus();
  blame(null);
  tell("Waiting for the first token …");
  // On a phone the answer stands below the form.
  if (find("answer").getBoundingClientRect().top > innerHeight * .7) find("answer").scrollIntoView();
  try {
    await work({ key: key(), signal });
  } catch (error) {
    if (signal.aborted) tell(`Stopped after ${first.tally.tokens} tokens.`);
    else if (error instanceof Trouble) fail(error);
    else {
      fail(new Trouble(`The page itself failed: ${error.message}`));
      throw error;
    }
  } finally {
    running = null;
    for (const button of BEGINNERS) button.disabled = false;
    if (document.activeElement === stop) (BEGINNERS.includes(begun) ? begun : send).focus();
    stop.disabled = true;
  }
}

function fail(error) {
  tell("", { trouble: error.message });
  blame(error.field);
}

const given = ({ messages, prompt }) =>
  messages ? [...messages, { role: "assistant", content: "" }] : [{ content: prompt }];

/** Show one pane, with what its answer will follow on. */
function single(given) {
  find("second").hidden = true;
  first.call("Answer");
  first.begin(given);
  drafts.clear();
}

async function ask(options) {
  const request = read(turns);
  const { messages, speculate } = request.body;
  single(given(request.body));
  const wanted = { ...request, body: { ...request.body, return_drafts: true } };
  const { text, tally } = await first.run(wanted, options, (choice, ended) => {
    if (find("status").textContent !== WRITING) tell(WRITING);
    drafts.watch(choice, ended);
  }).finally(() => drafts.refresh());
  if (messages) {
    turns = [...messages.filter(({ role }) => role !== "system"), { role: "assistant", content: text }];
    // Who has begun the next message while this was answered keeps it.
    if (field("prompt").value === messages.at(-1).content) field("prompt").value = "";
  }
  const asked = { speculate, drafters: served?.drafters };
  const done = summary(tally, asked);
  tell(done);
  // What the server has decided on is told where it is still of interest: the run's end does not wait for it.
  get("server_info", key()).then(({ speculation }) => {
    if (find("status").textContent === done) tell(summary(tally, { ...asked, outlook: speculation }));
  }, () => {});
}

/** Write one text twice, in turn so that neither takes the other's time, each under a salt of its own: what was
    written or read before, by the other one too, serves neither. */
async function compare(options) {
  settleSeed();
  const request = read(turns, { again: true });
  const runs = [[first, true], [second, false]];
  find("second").hidden = false;
  first.call("With speculation");
  drafts.clear();
  for (const [pane] of runs) pane.begin(given(request.body));
  const done = [];
  for (const [pane, speculate] of runs) {
    tell(speculate ? "Writing with speculation …" : "Writing without speculation …");
    pane.begin(given(request.body));
    const cache_salt = `${Date.now()} ${Math.random()}`;
    done.push(await pane.run({ ...request, body: { ...request.body, speculate, cache_salt } }, options));
  }
  const { dtype, drafters } = served ?? {};
  const found = verdict(...done, { dtype, drafters });
  tell("Done.", { verdict: found });
  const remarks = document.createElement("span");
  remarks.textContent = found.remarks;
  find("verdict").replaceChildren(found.says, remarks);
  find("verdict").dataset.same = found.isSame;
  find("verdict").dataset.ratio = found.ratio ?? "";
}

function switchMode() {
  const chats = isChat();
  find("prompt-label").textContent = chats ? "Message" : "Prompt";
  find("prompt").value = chats ? QUESTION : Object.values(EXAMPLES)[0];
  find("examples").parentNode.hidden = chats;
  anew.hidden = find("again-help").hidden = !chats;
  turns = [];
}

/** Learn what is served; a server that wants a key says nothing without. */
async function meet() {
  const model = find("model");
  try {
    const info = await get("server_info", key());
    model.textContent = `${info.model} · ${info.dtype} on ${info.device} · drafts: ${info.drafters.join(", ") || "none"}`;
    served = info;
  } catch (error) {
    served = null;
    model.textContent = error.status === 401 ? "This server wants a key." : error.message;
  }
}

/** Open in the mode that the model is made for, unless the user has started in another. */
function suit() {
  if (served?.writes !== "chats" || form.dataset.touched) return;
  field("chat").checked = true;
  switchMode();
}

for (const name of Object.keys(EXAMPLES)) find("examples").append(new Option(name));
for (const origin of [0, 1, 2, 3, 4, 5, 6, 7, 8]) {
  const entry = document.createElement("li");
  entry.className = "from";
  entry.dataset.origin = origin;
  entry.textContent = origin === 0 ? nameOf(0) : origin === 8 ? "8 and deeper" : origin;
  if (origin === 1) {
    const words = document.createElement("li");
    words.className = "plain";
    words.textContent = "accepted from a draft, at depth";
    find("legend").append(words);
  }
  find("legend").append(entry);
}
form.addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(ask);
});
find("compare").addEventListener("click", () => attempt(compare));
stop.addEventListener("click", () => running?.abort());
anew.addEventListener("click", () => {
  turns = [];
  single([]);
  tell("A new chat.");
  field("prompt").focus();
});
for (const name of ["prompt", "examples", "completion", "chat"]) {
  field(name).addEventListener("input", () => { form.dataset.touched = "yes"; });
}
field("examples").addEventListener("change", ({ target }) => { field("prompt").value = EXAMPLES[target.value]; });
for (const mode of ["completion", "chat"]) field(mode).addEventListener("change", switchMode);
field("key").addEventListener("change", () => meet().then(suit));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  }
});
switchMode();
await meet().then(suit);
document.body.dataset.ready = "yes";
