// Markdown as elements. The library only finds the parts; each is built here as an element of a known kind that holds
// text, so nothing that a model writes is ever read as HTML, run, or loaded.

import { copyButton, literal, make } from "./element.js";
import { lexer } from "./vendor/marked.js";

const OPTIONS = { gfm: true, breaks: true };
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
/** The library takes minutes for runs of spaces as long as this. */
const BLANKS = /[ \t]{2000}/;
const BREAK = /^<br\s*\/?>\s*$/i;

/** A growing text: each update rebuilds only the blocks that changed. */
export class Markdown {
  constructor(box) {
    this.box = box;
    this.keys = [];
  }

  show(text) {
    const tokens = blocks(text);
    const keys = tokens.map((token) => JSON.stringify(token));
    const same = keys.findIndex((key, i) => key !== this.keys[i]);
    const from = same < 0 ? keys.length : same;
    while (this.box.children.length > from) this.box.lastElementChild.remove();
    for (const token of tokens.slice(from)) this.box.append(block(token));
    this.keys = keys;
  }
}

/** Return the text's blocks. Input that the library fails on, such as thousands of nested quotes, is one block of text. */
function blocks(text) {
  if (BLANKS.test(text)) return [{ type: "text", text }];
  try {
    return [...lexer(text, OPTIONS)].filter(({ type }) => type !== "space" && type !== "def");
  } catch {
    return [{ type: "text", text }];
  }
}

function block(token) {
  switch (token.type) {
    case "heading": return make("h3", { "data-depth": token.depth }, ...inline(token.tokens));
    case "paragraph": return make("p", {}, ...inline(token.tokens));
    case "code": return code(token);
    case "blockquote": return make("blockquote", {}, ...within(token.tokens));
    case "list": return list(token);
    case "table": return table(token);
    case "hr": return make("hr");
    default: return make("p", {}, ...(token.tokens ? inline(token.tokens) : [plain(token)]));
  }
}

const within = (tokens) => tokens.filter(({ type }) => type !== "space" && type !== "def").map(block);

function code({ text, lang }) {
  const language = (lang ?? "").match(/^\S*/)[0];
  const head = make("figcaption", {}, make("span", {}, ...literal(language)), copyButton(() => text, { ariaLabel: "Copy the code" }));
  return make("figure", { className: "code" }, head, make("pre", { tabIndex: 0 }, make("code", {}, ...literal(text))));
}

function list({ ordered, start, items }) {
  const element = make(ordered ? "ol" : "ul");
  if (ordered && start !== 1) element.start = start;
  for (const { tokens } of items) {
    // A tight list item has its text without a paragraph.
    const parts = tokens.flatMap((token) => token.type === "space" ? [] : token.type === "checkbox" ? inline([token])
      : token.type === "text" ? inline(token.tokens ?? [token]) : [block(token)]);
    const isTask = tokens.some(({ type }) => type === "checkbox");
    element.append(make("li", { className: isTask ? "task" : "" }, ...parts));
  }
  return element;
}

function table({ header, rows }) {
  const row = (cells, tag) => make("tr", {}, ...cells.map(({ align, tokens }) =>
    make(tag, { className: align ?? "" }, ...inline(tokens))));
  const body = make("tbody", {}, ...rows.map((cells) => row(cells, "td")));
  return make("div", { className: "wide", tabIndex: 0 }, make("table", {}, make("thead", {}, row(header, "th")), body));
}

function inline(tokens) {
  return tokens.map((token) => {
    switch (token.type) {
      case "strong": case "em": case "del": return make(token.type, {}, ...inline(token.tokens));
      case "codespan": return make("code", {}, ...literal(token.text));
      case "br": return make("br");
      case "html": return BREAK.test(token.raw) ? make("br") : token.raw;
      case "checkbox": return token.checked ? "☑ " : "☐ ";
      // An image becomes a link: loading it would leak the conversation.
      case "image": return link(token.href, [token.text || token.href]) ?? token.raw;
      case "link": return link(token.href, inline(token.tokens)) ?? token.raw;
      default: return token.tokens ? make("span", {}, ...inline(token.tokens)) : plain(token);
    }
  });
}

/** Return a link, or null for an address with another scheme. */
function link(href, parts) {
  if (!URL.canParse(href) || !SCHEMES.has(new URL(href).protocol)) return null;
  return make("a", { href: new URL(href).href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...parts);
}

/** Return a token's text. */
function plain({ type, raw, text }) {
  if (type === "html") return raw.trim();
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]+));/gi, (whole, decimal, hex, name) => {
    const point = decimal ? Number(decimal) : hex ? parseInt(hex, 16) : null;
    if (point === null) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    return point <= 0x10ffff ? String.fromCodePoint(point) : whole;
  });
}
