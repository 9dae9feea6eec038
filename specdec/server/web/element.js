// Elements, built without a line of HTML: text stays text.

/** Build an element: properties, `data-*` and `aria-*` attributes, then what it holds. */
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

/** Return a text's parts for a place where each character counts: one that changes the direction of what follows has
    its effect in a box of its own, which shows its number, and the text as it is copied stays what it was. */
export function literal(text) {
  if (!CONTROLS.test(text)) return [text];
  return text.split(CONTROLS).map((part, at) =>
    at % 2 ? make("span", { className: "control", "data-code": codeOf(part) }, part) : part);
}

/** Return a text whose controls of direction are numbers. */
export const spelled = (text) => text.split(CONTROLS).map((part, at) => at % 2 ? `⟨${codeOf(part)}⟩` : part).join("");

export function button(label, act, properties = {}) {
  const element = make("button", { type: "button", className: "quiet", ...properties }, label);
  element.addEventListener("click", act);
  return element;
}

const COPIED_MS = 1500;

/** A button that copies what `read` returns, and says so. */
export function copyButton(read, properties = {}) {
  const element = button("Copy", async () => {
    element.textContent = await copy(read()) ? "Copied" : "Not copied";
    setTimeout(() => { element.textContent = "Copy"; }, COPIED_MS);
  }, properties);
  return element;
}

/** The clipboard's interface exists on secure pages alone; a copy event works on all of them. */
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
