// The conversation: its exchanges one below the other.

import { make } from "./element.js";
import { AnswerView, questionView } from "./views.js";

const SAYS = {
  chat: {
    edit: "Edit this message; later messages are removed",
    again: "Generate this answer again; later messages are removed",
    goOn: "Ask the model to continue",
  },
  completion: { edit: "Edit this text", again: "Generate this continuation again", goOn: "Continue after this text" },
};

export class Thread {
  /** `deeds`: what can be done with an exchange: `edit`, `again`, `goOn`, and with a setting at fault: `isSetting`, `mend`. */
  constructor(box, deeds) {
    this.box = box;
    this.deeds = deeds;
  }

  /** Show a conversation in place of what is shown. */
  show(conversation, { showsTokens }) {
    this.conversation = conversation;
    this.showsTokens = showsTokens;
    this.box.dataset.mode = conversation.mode;
    this.box.dataset.tokens = showsTokens ? "yes" : "no";
    this.box.replaceChildren();
    this.views = [];
    for (const exchange of conversation.exchanges) this.add(exchange);
  }

  /** Show an exchange and those that follow it anew; those before it stay as they are. */
  put(exchange) {
    const at = this.conversation.exchanges.indexOf(exchange);
    while (this.box.children.length > at) this.box.lastElementChild.remove();
    this.views.splice(at, Infinity);
    for (const own of this.conversation.exchanges.slice(at)) this.add(own);
  }

  add(exchange) {
    const { deeds, conversation, showsTokens } = this;
    const { question, answer } = exchange;
    const own = {
      again: () => deeds.again(exchange),
      goOn: () => deeds.goOn(exchange),
      says: SAYS[conversation.mode],
      isSetting: deeds.isSetting,
      mend: deeds.mend,
    };
    const prompt = conversation.isChat ? null : question;
    const view = new AnswerView(answer, { showsTokens, prompt, deeds: own });
    this.box.append(make("section", { className: "exchange" },
      questionView(question, { edit: (words) => deeds.edit(exchange, words), says: own.says.edit }), view.element));
    this.views.push(view);
  }
}
