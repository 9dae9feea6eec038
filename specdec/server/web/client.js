// Requests to the server of this page, and their errors in plain words.

export class Trouble extends Error {
  /** `field` names the invalid input, `status` is the HTTP status; either may be missing. */
  constructor(message, { field = null, status = 0 } = {}) {
    super(message);
    this.field = field;
    this.status = status;
  }
}

const GONE = "The server cannot be reached. Is it still running?";
const BROKEN = "The connection was lost during the answer. The text received so far is shown.";

export async function get(path, key) {
  const response = await reach(path, { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Yield a stream's events. Leaving early, or the signal, disconnects, which ends the request on the server. */
export async function* events(path, body, { key, signal }) {
  const response = await reach(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw signal.aborted ? error : new Trouble(BROKEN);
      });
      if (done) throw new Trouble(BROKEN);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Trouble(`The server ended the answer with an error: ${event.error.message}`);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function reach(path, options) {
  try {
    return await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    // A key with characters that a header cannot hold fails before the request is sent.
    if (options.signal?.aborted) throw error;
    if (/[^\x20-\x7e\xa0-\xff]/.test(options.headers.Authorization ?? "")) throw new Trouble("An API key cannot contain these characters.", { field: "key" });
    throw new Trouble(GONE);
  }
}

async function refusal(response) {
  const { error } = await response.json().catch(() => ({}));
  const message = error?.message ?? `The server answered ${response.status}.`;
  const after = response.headers.get("Retry-After");
  const again = after ? ` Try again in ${after} s.` : " Try again later.";
  switch (response.status) {
    case 401:
      return new Trouble("The server requires a valid API key. Enter it in the field API key.", { field: "key", status: 401 });
    case 429:
      return new Trouble(`The server is busy.${again}`, { status: 429 });
    case 503:
      return new Trouble(`${message}${after ? again : ""}`, { status: 503 });
    default:
      return new Trouble(message, { field: error?.param, status: response.status });
  }
}
