/** The card that shows source, p and q of the token under the pointer or with the focus. */

import { element } from "./dom.js";

const MARGIN_PX = 8;

const MEANINGS = {
  accepted: "accepted draft token",
  forced: "the only one that the form of the answer allows",
  corrected: "in place of a rejected draft token",
  bonus: "after a wholly accepted draft",
  target: "target-only step",
  unknown: "replayed, source not stored",
};

export class TokenCard {
  /** @param {HTMLElement} card */
  constructor(card) {
    this.card = card;
    this.span = null;
    // Focus may scroll the page: the card then goes with its token.
    addEventListener("scroll", () => this.span && this.#place(), { passive: true });
  }

  /** Show the card of `token` beside its span, which it describes. */
  show(span, token) {
    this.hide();
    this.span = span;
    const rows = rowsOf(token).map(([name, value]) =>
      element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })),
    );
    this.card.replaceChildren(element("dl", {}, ...rows));
    this.card.hidden = false;
    this.#place();
    span.setAttribute("aria-describedby", this.card.id);
  }

  hide() {
    this.card.hidden = true;
    this.span?.removeAttribute("aria-describedby");
    this.span = null;
  }

  #place() {
    const token = this.span.getClientRects()[0] ?? this.span.getBoundingClientRect();
    const { width, height } = this.card.getBoundingClientRect();
    const left = Math.min(token.left, document.documentElement.clientWidth - width - MARGIN_PX);
    const fitsBelow = token.bottom + MARGIN_PX + height < innerHeight;
    const top = fitsBelow ? token.bottom + MARGIN_PX : token.top - MARGIN_PX - height;
    this.card.style.left = `${Math.max(MARGIN_PX, left)}px`;
    this.card.style.top = `${Math.max(MARGIN_PX, top)}px`;
  }
}

function rowsOf({ text, source, p, q, pool, round }) {
  const rows = [
    ["Token", JSON.stringify(text)],
    ["Source", `${source === "unknown" ? "" : `${source}: `}${MEANINGS[source]}`],
  ];
  if (source === "unknown") return rows;
  rows.push(["p, target", probability(p)]);
  if (source !== "forced") rows.push(["q, draft", draftProbability(source, q)]);
  if (pool) rows.push(["Draft pool", pool]);
  rows.push(["Round", String(round)]);
  return rows;
}

/** Return q in words where there is no number: greedy and coupled drafts come without their distribution. */
function draftProbability(source, q) {
  if (q > 0) return probability(q);
  return source === "accepted" ? "not sent (greedy or coupled draft)" : "none";
}

/** Return a probability with three significant digits. */
function probability(value) {
  if (value >= 0.9995) return "1.000";
  return value >= 0.001 ? value.toPrecision(3) : value.toExponential(1);
}
