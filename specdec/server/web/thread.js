// The view of a conversation: its exchanges in order.

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
  /** `actions` of an exchange: `edit`, `again`, `goOn`, and for an invalid setting `isSetting`, `mend`. */
  constructor(box, actions) {
    this.box = box;
    this.actions = actions;
  }

  /** Show a conversation, replacing the current one. */
  show(conversation, { showsTokens }) {
    this.conversation = conversation;
    this.showsTokens = showsTokens;
    this.box.dataset.mode = conversation.mode;
    this.box.dataset.tokens = showsTokens ? "yes" : "no";
    this.box.replaceChildren();
    this.views = [];
    for (const exchange of conversation.exchanges) this.add(exchange);
  }

  /** Rebuild the views of an exchange and of all later ones. */
  put(exchange) {
    const at = this.conversation.exchanges.indexOf(exchange);
    while (this.box.children.length > at) this.box.lastElementChild.remove();
    this.views.splice(at, Infinity);
    for (const exchange of this.conversation.exchanges.slice(at)) this.add(exchange);
  }

  add(exchange) {
    const { actions, conversation, showsTokens } = this;
    const { question, answer } = exchange;
    const handlers = {
      again: () => actions.again(exchange),
      goOn: () => actions.goOn(exchange),
      says: SAYS[conversation.mode],
      isSetting: actions.isSetting,
      mend: actions.mend,
    };
    const prompt = conversation.isChat ? null : question;
    const view = new AnswerView(answer, { showsTokens, prompt, actions: handlers });
    this.box.append(make("section", { className: "exchange" },
      questionView(question, { edit: (words) => actions.edit(exchange, words), says: handlers.says.edit }), view.element));
    this.views.push(view);
  }
}
