/** Shows turns as text, each token marked by its source, and lets pointer and keyboard visit the tokens. */

import { element } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

export class OutputView {
  #spans = [];
  #places = new Map();
  #shown = null;

  /**
   * @param {HTMLElement} container
   * @param {import("./token_card.js").TokenCard} card
   */
  constructor(container, card) {
    this.container = container;
    this.card = card;
    container.addEventListener("mouseover", ({ target }) => this.#describe(target));
    container.addEventListener("mouseout", () => this.#describe(document.activeElement));
    container.addEventListener("focusin", ({ target }) => this.#describe(target));
    container.addEventListener("focusout", () => this.card.hide());
    container.addEventListener("click", ({ target }) => this.#visit(this.#places.get(target)?.index));
    container.addEventListener("keydown", (event) => this.#onKey(event));
  }

  clear() {
    this.container.replaceChildren();
    this.card.hide();
    this.#spans = [];
    this.#places.clear();
    this.#shown = null;
  }

  /** Show a turn below the earlier ones. @param {"prompt" | "chat"} kind */
  begin(turn, kind) {
    const input = element("span", { className: "input", textContent: turn.input });
    const output = element("span", { className: "tokens" });
    const form = element("p", { className: "form-name hint", hidden: !turn.formName });
    form.textContent = `Constrained to ${turn.formName}.`;
    const markup = kind === "chat" ? element("div", { className: "markup" }) : null;
    const block = element("div", { className: `turn ${kind}` }, input, form, output);
    if (kind === "chat") {
      output.after(markup);
      input.before(element("h4", { textContent: "You" }));
      form.before(element("h4", { textContent: "Model" }));
    }
    this.container.append(block);
    this.#shown = { turn, output, markup, numTokens: 0 };
    this.update();
  }

  /** Show a chat's answers as tokens with their marks, or as the text that their Markdown describes. */
  set hasMarks(value) {
    this.container.classList.toggle("with-marks", value);
  }

  /** Show the tokens that the last turn got since the previous call. */
  update() {
    if (!this.#shown) return;
    const { turn, output, numTokens } = this.#shown;
    const added = turn.tokens.slice(numTokens).map((token) => this.#spanOf(token));
    output.append(...added);
    this.#shown.numTokens = turn.tokens.length;
    if (this.#shown.markup) this.#renderSoon(this.#shown);
  }

  /** Render the Markdown of a growing text, at most once a frame. */
  #renderSoon(shown) {
    if (shown.isDue) return;
    shown.isDue = true;
    requestAnimationFrame(() => {
      shown.isDue = false;
      shown.markup.replaceChildren(...renderMarkdown(shown.turn.answer), ...shown.turn.calls.map(callElement));
    });
  }

  #spanOf(token) {
    const span = element("span", { className: `token ${token.source}`, textContent: token.text });
    this.#places.set(span, { token, index: this.#spans.length });
    if (!this.#spans.length) span.tabIndex = 0;
    this.#spans.push(span);
    return span;
  }

  #describe(target) {
    const place = this.#places.get(target);
    if (place) this.card.show(target, place.token);
    else this.card.hide();
  }

  #onKey(event) {
    const place = this.#places.get(event.target);
    if (!place || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.#spans.length - 1;
    if (event.key in STEPS) this.#visit(Math.min(last, Math.max(0, place.index + STEPS[event.key])));
    else if (event.key === "Home") this.#visit(0);
    else if (event.key === "End") this.#visit(last);
    else if (event.key === "Escape") this.card.hide();
    else return;
    event.preventDefault();
  }

  /** Move the focus to a token, which becomes the one that Tab reaches. */
  #visit(index) {
    if (index === undefined) return;
    const previous = this.container.querySelector(".token[tabindex='0']");
    if (previous) previous.tabIndex = -1;
    this.#spans[index].tabIndex = 0;
    this.#spans[index].focus();
  }
}

/** Return a call of a tool, as it stands. */
function callElement({ name, arguments: written }) {
  const label = `Call of ${name}`;
  const shown = element("pre", { textContent: written, tabIndex: 0, role: "region", ariaLabel: `Arguments of ${name}` });
  return element("div", { className: "call", role: "group", ariaLabel: label }, element("h5", { textContent: name }), shown);
}
