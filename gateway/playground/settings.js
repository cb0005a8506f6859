/** Reads the request's form, remembers its fields, and makes the body of a request from them. */

import { readForm } from "./form.js";

const SETTINGS = "specdec.settings";
const SAMPLING = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"];

export class Settings {
  /** @param {HTMLFormElement} form */
  constructor(form) {
    this.form = form;
    this.#restore();
    form.addEventListener("change", () => this.#remember());
    form.addEventListener("input", () => this.#checkForm());
    form.addEventListener("change", () => this.#checkForm());
    this.#checkForm();
  }

  /** @returns {"prompt" | "chat"} */
  get kind() {
    return this.form.elements.kind.value;
  }

  set kind(value) {
    this.form.elements.kind.value = value;
    this.form.dispatchEvent(new Event("change"));
  }

  get input() {
    return this.form.elements.input.value;
  }

  set input(value) {
    this.form.elements.input.value = value;
  }

  /** System prompt of a chat; "" for none. */
  get system() {
    return this.form.elements.system.value.trim();
  }

  set system(value) {
    this.form.elements.system.value = value;
  }

  /** Form of the answer in words; "" for free text. */
  get formName() {
    return this.#form.name;
  }

  get hasMarks() {
    return this.kind === "prompt" || this.form.elements.marks.checked;
  }

  get isComparison() {
    return this.form.elements.compare.checked;
  }

  /** Return the parameters that the user set; the server chooses the others. */
  get parameters() {
    const { elements } = this.form;
    const parameters = {};
    if (elements.model.value) parameters.model = elements.model.value;
    for (const name of SAMPLING) if (elements[name].value) parameters[name] = Number(elements[name].value);
    const stop = elements.stop_strings.value.split("\n").filter((line) => line !== "");
    if (stop.length) parameters.stop = stop;
    const speculation = {};
    if (elements.mode.value) speculation.mode = elements.mode.value;
    if (elements.gamma.value) speculation.gamma = Number(elements.gamma.value);
    if (elements.draft_pool.value) speculation.draft_pool = elements.draft_pool.value;
    if (Object.keys(speculation).length) parameters.speculation = speculation;
    return { ...parameters, ...this.#form.fields };
  }

  /** Offer the models and draft pools of the server. */
  offer({ models, pools, maxGamma }) {
    const { model, draft_pool: pool, gamma } = this.form.elements;
    model.replaceChildren(...models.map((name) => new Option(name, name)));
    pool.replaceChildren(pool.options[0], ...pools.map((name) => new Option(name, name)));
    if (maxGamma) gamma.max = maxGamma;
    this.#restore();
  }

  get #form() {
    return readForm(this.form.elements.form.value, this.kind);
  }

  /** Let the browser tell a form that cannot be used, before anything is sent. */
  #checkForm() {
    this.form.elements.form.setCustomValidity(this.#form.problem);
  }

  #remember() {
    const fields = [...this.form.elements].filter((field) => field.name && field.type !== "radio");
    const values = fields.map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]);
    localStorage.setItem(SETTINGS, JSON.stringify({ ...Object.fromEntries(values), kind: this.kind }));
  }

  #restore() {
    const stored = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
    for (const [name, value] of Object.entries(stored)) {
      const field = this.form.elements[name];
      if (field?.type === "checkbox") field.checked = value;
      else if (field && !isMissingOption(field, value)) field.value = value;
    }
  }
}

/** Return whether a list has no such option, for instance because the pool is gone. */
function isMissingOption(field, value) {
  return field instanceof HTMLSelectElement && ![...field.options].some((option) => option.value === value);
}

/**
 * Return the text of a request as its body holds it: the prompt, or the conversation with the new message.
 * @param {{kind: string, input: string, system: string, turns: import("./turn.js").Turn[]}} request
 *   turns: the conversation before the message
 */
export function inputBody({ kind, input, system, turns }) {
  if (kind === "prompt") return { prompt: input };
  const answered = turns.filter((turn) => turn.tokens.length);
  const first = system ? [{ role: "system", content: system }] : [];
  const messages = answered.flatMap((turn) => [
    { role: "user", content: turn.input },
    answerOf(turn),
  ]);
  return { messages: [...first, ...messages, { role: "user", content: input }] };
}

/** Return an answer as the next request has it. */
function answerOf({ answer, calls }) {
  if (!calls.length) return { role: "assistant", content: answer };
  const toolCalls = calls.map(({ id, name, arguments: written }) => (
    { id, type: "function", function: { name, arguments: written } }
  ));
  return { role: "assistant", content: answer || null, tool_calls: toolCalls };
}
