// Building elements without HTML: text stays text.

/** Build an element from properties, `data-*` and `aria-*` attributes, and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

const CONTROLS = /([\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069])/;
const codeOf = (control) => `U+${control.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

/** Return a text's parts with each direction control in an element of its own, which isolates its effect and shows its
    code point. The copied text is unchanged. */
export function literal(text) {
  if (!CONTROLS.test(text)) return [text];
  return text.split(CONTROLS).map((part, at) =>
    at % 2 ? make("span", { className: "control", "data-code": codeOf(part) }, part) : part);
}

/** Return a text with direction controls replaced by their code points. */
export const spelled = (text) => text.split(CONTROLS).map((part, at) => at % 2 ? `⟨${codeOf(part)}⟩` : part).join("");

export function button(label, act, properties = {}) {
  const element = make("button", { type: "button", className: "quiet", ...properties }, label);
  element.addEventListener("click", act);
  return element;
}

const COPIED_MS = 1500;

/** Build a button that copies what `read` returns and confirms it. */
export function copyButton(read, properties = {}) {
  const element = button("Copy", async () => {
    element.textContent = await copy(read()) ? "Copied" : "Not copied";
    setTimeout(() => { element.textContent = "Copy"; }, COPIED_MS);
  }, properties);
  return element;
}

/** Copy a text. The clipboard API needs a secure context; a copy event works without. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const give = (event) => {
      event.clipboardData.setData("text/plain", text);
      event.preventDefault();
      event.stopImmediatePropagation();
    };
    document.addEventListener("copy", give, { capture: true });
    const done = document.execCommand("copy");
    document.removeEventListener("copy", give, { capture: true });
    return done;
  }
}
