// The served models, their states, and the chosen one's settings.

import { get } from "./client.js";
import { field, key } from "./settings.js";

const KEPT = "specdec.model";
const STATES = {
  warm: "warm",
  resting: "resting: the next request wakes it",
  loading: "loading …",
  unloaded: "not loaded: the next request loads it",
  failed: "failed: the next request returns the error",
};

export class Models {
  /** `changed` is called when another model is chosen. */
  constructor(storage, changed) {
    this.storage = storage;
    this.line = document.getElementById("model");
    this.picker = field("models");
    /** `/server_info` of the chosen model; null before the first answer, and after a failed one. */
    this.served = null;
    this.looks = 0;
    this.picker.addEventListener("change", () => {
      try {
        storage.setItem(KEPT, this.picker.value);
      } catch { /* a full storage keeps the conversations; the choice lasts as long as the page */ }
      changed();
    });
  }

  get isWarm() { return this.served?.models[this.served.model] === "warm"; }

  /** Fetch and show the models; return the error, or null. A server with keys answers nothing without one. */
  async look() {
    const look = this.looks += 1;
    try {
      const { data } = await get("v1/models", key());
      if (look === this.looks) this.offer(data);
      const name = field("models").value;
      const served = await get(name ? `server_info?model=${encodeURIComponent(name)}` : "server_info", key());
      if (look === this.looks) this.tell(served);
      return null;
    } catch (error) {
      if (look === this.looks) {
        this.served = null;
        this.line.textContent = error.status === 401 ? "This server requires an API key." : error.message;
      }
      return error;
    }
  }

  /** Show the model menu if there are several models. */
  offer(cards) {
    const { picker } = this;
    const shown = cards.length < 2 ? [] : cards;
    document.getElementById("models-label").hidden = shown.length === 0;
    if (shown.map(({ id }) => id).join("\n") !== [...picker.options].map(({ value }) => value).join("\n")) {
      const chosen = picker.value || this.storage.getItem(KEPT);
      picker.replaceChildren(...shown.map(({ id }) => new Option(id, id)));
      if (shown.some(({ id }) => id === chosen)) picker.value = chosen;
    }
    for (const [at, { id, state }] of shown.entries()) picker.options[at].label = state === "warm" ? id : `${id} (${state})`;
  }

  tell(served) {
    this.served = served;
    const state = served.models[served.model];
    const isOne = this.picker.options.length === 0;
    const runs = served.dtype && `${served.dtype} on ${served.device} · drafts: ${served.drafters.join(", ") || "none"}`;
    this.line.textContent = [isOne && served.model, !(isOne && state === "warm") && STATES[state], runs].filter(Boolean).join(" · ");
    this.line.title = this.line.textContent;
  }
}
