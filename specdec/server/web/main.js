// The page's actions. One conversation is shown, and one request runs at a time.

import { Answer } from "./answer.js";
import { Trouble } from "./client.js";
import { Comparison } from "./compare.js";
import { Conversation } from "./conversation.js";
import { Drafts } from "./drafts.js";
import { button, make } from "./element.js";
import { asJson, asMarkdown, download } from "./export.js";
import { Follower } from "./follow.js";
import { History, openStorage } from "./history.js";
import { Models } from "./models.js";
import { decision, summary } from "./outcome.js";
import { field, key, Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Thread } from "./thread.js";
import { isSending } from "./views.js";
import { CHAT_EXAMPLES, COMPLETION_EXAMPLES, MODES } from "./words.js";

/** Polling interval for the state of a model that a request waits for. */
const LOOK_MS = 1000;
const find = (id) => document.getElementById(id);
const storage = openStorage();
const history = new History(storage);
const settings = new Settings(storage);
const models = new Models(storage, () => refreshServed({ isNew: true }));
const drafts = new Drafts();
const comparison = new Comparison();
const follower = new Follower(find("scroll"), find("column"), find("to-end"));
const sidebar = new Sidebar({ open, manage, remove, begin: () => show(new Conversation({ mode: conversation.mode })) });
const thread = new Thread(find("thread"), {
  edit: (exchange, words) => ask(words, exchange),
  again: (exchange) => ask(exchange.question, exchange),
  goOn: (exchange) => conversation.isChat ? ask("Continue.") : answer(exchange, { goesOn: true }),
  isSetting: (name) => settings.holds(name),
  mend: (error) => settings.blame(error),
});
const form = find("form"), prompt = field("prompt");
const showsTokens = () => find("view").checked;
let conversation = history.load(location.hash.slice(1)) ?? new Conversation();
let running = null;

/** Show a notice above the input, with a button for `act`. */
function notice(says, act = null) {
  find("notice").replaceChildren(...says ? [make("bdi", {}, says)] : [], ...act ? [button(act.label, () => { notice(""); act.do(); })] : []);
}

/** Show another conversation; abort a request of the current one. */
function show(next) {
  running?.abort();
  conversation = next;
  field(conversation.mode).checked = true;
  comparison.clear();
  drafts.clear();
  notice("");
  render();
  follower.toEnd();
  prompt.focus();
}

function render() {
  thread.show(conversation, { showsTokens: showsTokens() });
  updateControls();
  list();
}

/** Update the controls around the conversation for its mode and the chosen model. */
function updateControls() {
  const { isChat, isEmpty } = conversation;
  const mode = MODES[conversation.mode];
  const isUnsuited = isChat && models.served?.writes === "completions";
  find("welcome").hidden = !isEmpty;
  find("welcome-title").textContent = mode.title;
  find("welcome-says").textContent = isUnsuited ? mode.unsuited : mode.says;
  find("examples").replaceChildren(...(isChat ? CHAT_EXAMPLES : COMPLETION_EXAMPLES).map((text) => {
    const [first, ...rest] = text.split("\n");
    const fill = () => { prompt.value = text; grow(); prompt.focus(); };
    return button(rest.length ? `${first} …` : first, fill, { className: "example", title: text });
  }));
  find("speculate").disabled = models.served?.drafters?.length === 0;
  find("prompt-label").textContent = prompt.placeholder = mode.label;
  find("mode-says").textContent = isUnsuited && !isEmpty ? mode.unsuited : mode.hint;
  prompt.spellcheck = isChat;
  settings.suit({ isChat, isUnsuited });
  document.body.dataset.mode = conversation.mode;
  document.body.dataset.view = showsTokens() ? "tokens" : "text";
}

/** List the stored conversations; put the shown one into the address, so that a reload finds it. */
function list() {
  sidebar.show(history.list(), conversation.id);
  globalThis.history.replaceState(null, "", conversation.isEmpty ? location.pathname : `#${conversation.id}`);
}

/** Store a conversation, unless it is empty or was deleted. A deleted one that is shown is stored again with its next
    question. */
function keep(chat) {
  if (chat.isGone || chat.isEmpty) return;
  try {
    const gone = history.save(chat);
    if (gone) notice(`Deleted the ${gone === 1 ? "oldest conversation" : `${gone} oldest conversations`} to make room for this one.`);
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    notice(error.message);
  }
  list();
}

function open(id) {
  if (id === conversation.id) return;
  const found = history.load(id);
  if (found) show(found);
  else list();
}

function remove(id) {
  const gone = history.load(id);
  history.remove(id);
  if (id === conversation.id) {
    conversation.isGone = true;
    show(new Conversation({ mode: conversation.mode }));
  } else list();
  if (gone) notice("Conversation deleted. ", { label: "Undo", do: () => { keep(gone); open(gone.id); } });
}

/** Open the dialog that renames and exports a conversation. */
function manage(id) {
  const shown = held(id);
  if (!shown) return void list();
  const dialog = find("manage"), title = field("title");
  title.value = shown.title;
  find("manage-form").onsubmit = ({ submitter }) => {
    dialog.close();  // before the list is rebuilt: the focus returns to its button
    const chat = held(id), kind = submitter.value;
    if (!chat) return;
    if (title.value !== chat.title) {
      chat.name = title.value.trim();
      keep(chat);
    }
    if (kind === "md") download(chat.title, "md", asMarkdown(chat, field("system").value));
    if (kind === "json") download(chat.title, "json", asJson(chat, field("system").value));
  };
  dialog.showModal();
}

/** Return a conversation: the shown object, or another one from the storage. */
function held(id) { return id === conversation.id ? conversation : history.load(id); }

/** Show what another tab did to the conversation that is shown here. */
function onStorage({ key: name }) {
  list();
  if (conversation.isEmpty || !history.holds(name, conversation)) return;
  const found = history.load(conversation.id);
  if (!found) {
    conversation.isGone = true;
    notice("This conversation was deleted in another tab. ", { label: "Keep it", do: revive });
  } else if (running) {
    conversation.part();
    keep(conversation);
    notice("Another tab changed this conversation: this answer goes into a copy.");
  } else {
    conversation = found;
    render();
  }
}

function revive() {
  conversation.isGone = false;
  keep(conversation);
}

/** Append a question, or replace an exchange; removed exchanges can be restored. */
function ask(words, exchange) {
  if (running || !words.trim()) return false;
  const fields = readFields();
  if (!fields) return false;
  const chat = conversation, before = [...chat.exchanges];
  const at = exchange && before.indexOf(exchange);
  chat.isGone = false;
  answer(chat.ask(words, at), { fields });
  const dropped = before.length - chat.exchanges.length;
  if (dropped > 0) notice(`${dropped} later ${dropped === 1 ? "message was" : "messages were"} dropped. `, { label: "Undo", do: () => restore(chat, before) });
  return true;
}

function restore(chat, exchanges) {
  running?.abort();
  chat.exchanges = exchanges;
  keep(chat);
  if (chat === conversation) render();
}

/** Return the settings as request fields, or null after showing what is invalid. */
function readFields() {
  try {
    return settings.read();
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    settings.blame(error);
    return null;
  }
}

/** Answer an exchange's question; `goesOn`: continue its text. */
async function answer(exchange, { fields = readFields(), goesOn = false }) {
  if (!fields || running) return;
  const chat = conversation, { answer } = exchange;
  const { path, body } = settings.request(chat, exchange, fields, { goesOn });
  comparison.clear();
  drafts.clear();
  updateControls();
  let frame = 0;
  // The view may have been rebuilt, and another conversation may be shown.
  const update = () => { if (chat === conversation) thread.views[chat.exchanges.indexOf(exchange)]?.update(); };
  await attempt(async (options) => {
    const wanted = { path, body: showsTokens() ? { ...body, return_drafts: true } : body };
    const written = answer.run(wanted, options, (choice) => {
      drafts.watch(choice);
      frame ||= requestAnimationFrame(() => { frame = 0; update(); });
    });
    thread.put(exchange);
    if (exchange === chat.last) follower.toEnd();
    keep(chat);
    try {
      await written;
      const { size, drafts: gave } = summary(answer.tally, { speculate: body.speculate, drafters: models.served?.drafters });
      [answer.size, answer.drafts] = [size, gave];
    } catch (error) {
      blame(answer, error, options.signal);
    } finally {
      cancelAnimationFrame(frame);
      update();
      if (chat === conversation) drafts.refresh();
      keep(chat);
    }
  });
}

/** Record in an answer why it ended early. */
function blame(answer, error, signal) {
  const tokens = answer.tally.tokens;
  [answer.size, answer.drafts] = [tokens ? `${tokens} tokens.` : "", ""];
  if (signal.aborted) {
    answer.finish = "stopped";
    return;
  }
  const known = error instanceof Trouble ? error : new Trouble(`The page itself failed: ${error.message}`);
  answer.error = { message: known.message, field: known.field };
  if (known !== error) throw error;
}

/** Answer the input, or the last question if it is empty, with and without drafts. Neither answer is stored. */
async function compare() {
  const fields = readFields();
  if (!fields || running) return;
  const isNew = prompt.value.trim() !== "";
  if (!isNew && conversation.isEmpty) return void notice("Write something first: Compare answers it twice.");
  const asked = isNew ? { question: prompt.value, answer: new Answer() } : conversation.last;
  const copy = new Conversation({ mode: conversation.mode });
  copy.exchanges = isNew ? [...conversation.exchanges, asked] : conversation.exchanges;
  const chat = conversation;
  await attempt(async (options) => {
    const tell = (says) => { if (chat === conversation) notice(says); };
    const hold = (element) => { if (chat === conversation) follower.hold(element); };
    find("welcome").hidden = true;
    drafts.compared();
    try {
      await comparison.run(settings.request(copy, asked, fields), options, { served: models.served ?? {}, tell, hold });
      tell("");
    } catch (error) {
      if (!options.signal.aborted) tell(error.message);
      else tell("The comparison was stopped.");
      if (!options.signal.aborted && !(error instanceof Trouble)) throw error;
    }
  });
}

/** Run one abortable task at a time; meanwhile show the state of a model that must be loaded first. */
async function attempt(work) {
  const controller = running = new AbortController();
  const looking = models.isWarm ? 0 : setInterval(() => models.isWarm ? clearInterval(looking) : refreshServed(), LOOK_MS);
  busy(true);
  try {
    await work({ key: key(), signal: controller.signal });
  } finally {
    clearInterval(looking);
    if (running === controller) {
      running = null;
      busy(false);
      refreshServed();
    }
  }
}

/** Swap Send and Stop; the focus moves to the one that is shown. */
function busy(isBusy) {
  const [from, to] = isBusy ? [find("send"), find("stop")] : [find("stop"), find("send")];
  const hadFocus = document.activeElement === from;
  [from.hidden, to.hidden] = [true, false];
  find("compare").disabled = isBusy;
  if (hadFocus) to.focus();
}

/** Fetch the models, the chosen one's state, and its current drafts; `isNew`: another model was chosen. */
async function refreshServed({ isNew = false } = {}) {
  const refusal = await models.look();
  const { served } = models;
  find("key-wanted").hidden = refusal?.status !== 401;
  find("outlook").textContent = decision(served?.speculation);
  // Open in the mode that the model is made for, unless the user has started typing.
  if (isNew && served && conversation.isEmpty && !form.dataset.touched) switchMode(served.writes === "chats" ? "chat" : "completion");
  else updateControls();
}

/** Switch the mode of an empty conversation, or start a new one. */
function switchMode(mode) {
  if (conversation.isEmpty) {
    conversation.mode = mode;
    field(mode).checked = true;
    render();
  } else show(new Conversation({ mode }));
}

/** Make the input as tall as its text, up to the style sheet's maximum. */
function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!ask(prompt.value)) return;
  prompt.value = "";
  grow();
});
prompt.addEventListener("input", () => { form.dataset.touched = "yes"; grow(); });
prompt.addEventListener("keydown", (event) => {
  if (!isSending(event)) return;
  event.preventDefault();
  form.requestSubmit();
});
find("stop").addEventListener("click", () => running?.abort());
find("compare").addEventListener("click", compare);
find("view").addEventListener("change", () => { settings.keep(); render(); refreshServed(); });
find("speculate").addEventListener("change", () => settings.keep());
find("manage-close").addEventListener("click", () => find("manage").close());
find("key-wanted").addEventListener("click", () => { settings.dialog.showModal(); field("key").focus(); });
for (const mode of Object.keys(MODES)) {
  field(mode).addEventListener("change", () => { form.dataset.touched = "yes"; switchMode(mode); });
}
field("key").addEventListener("change", () => refreshServed({ isNew: true }));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
});
// Store a partial answer before the page is closed, or a phone ends it in the background.
addEventListener("pagehide", () => { if (running) keep(conversation); });
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refreshServed();
  else if (running) keep(conversation);
});
addEventListener("storage", onStorage);
if (storage.isFleeting) find("kept").textContent = "This browser stores nothing for this page: conversations last until it is closed.";
field(conversation.mode).checked = true;
render();
await refreshServed({ isNew: true });
document.body.dataset.ready = "yes";
prompt.focus();
