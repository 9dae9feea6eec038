// A conversation as a file: Markdown, or JSON that `/load` of `specdec chat` reads.

import { make } from "./element.js";

const REVOKE_MS = 60_000;
const ROLES = { system: "System", user: "User", assistant: "Assistant" };

export function asJson(conversation, system) {
  const { title, isChat, exchanges } = conversation;
  const content = isChat
    ? { messages: messages(exchanges, system) }
    : { completions: exchanges.map(({ question, answer }) => ({ prompt: question, text: answer.text })) };
  return `${JSON.stringify({ title, ...content }, null, 2)}\n`;
}

export function asMarkdown(conversation, system) {
  const { title, isChat, exchanges } = conversation;
  const parts = isChat
    ? messages(exchanges, system).flatMap(({ role, content, reasoning_content: thoughts }) =>
      [`## ${ROLES[role]}`, ...thoughts ? [quoted(thoughts)] : [], content])
    : exchanges.map(({ question, answer }) => fenced(question + answer.text));
  return `${[`# ${title}`, ...parts].join("\n\n")}\n`;
}

/** Save a text under a name made of a title. */
export function download(title, extension, text) {
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  make("a", { href: url, download: `${name}.${extension}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), REVOKE_MS);
}

function messages(exchanges, system) {
  return [
    ...system ? [{ role: "system", content: system }] : [],
    ...exchanges.flatMap(({ question, answer: { text, reasoning } }) => [
      { role: "user", content: question },
      ...text || reasoning ? [{ role: "assistant", content: text, ...reasoning && { reasoning_content: reasoning } }] : [],
    ]),
  ];
}

const quoted = (text) => text.trim().split("\n").map((line) => `> ${line}`).join("\n");

/** Fence a text with more backticks than it has in a row. */
function fenced(text) {
  const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}
