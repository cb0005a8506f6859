/** Shows the rounds of a turn: one row a round, and the accepted share by position as bars. */

import { element } from "./dom.js";
import { countByPosition } from "./turn.js";

export class RoundsView {
  /**
   * @param {{rounds: HTMLTableSectionElement, positions: HTMLTableSectionElement, total: HTMLElement}} places
   *   bodies of the two tables, and the line above them
   */
  constructor(places) {
    this.places = places;
    this.bars = [];
  }

  clear() {
    this.places.rounds.replaceChildren();
    this.places.positions.replaceChildren();
    this.places.total.textContent = "no draft tokens yet.";
    this.bars = [];
  }

  /** Show a turn's rounds. Rows that are there already stay. */
  update(turn) {
    const { rounds, total } = this.places;
    const isNew = turn.rounds.length > rounds.rows.length;
    if (!isNew) return;
    for (const round of turn.rounds.slice(rounds.rows.length)) rounds.append(roundRow(rounds.rows.length + 1, round));
    countByPosition(turn.rounds).forEach((counts, position) => this.#showBar(position, counts));
    total.textContent = totalOf(turn);
  }

  #showBar(position, { drafted, accepted }) {
    this.bars[position] ??= this.#addBar(position);
    const { bar, share, counts } = this.bars[position];
    bar.style.width = `${(100 * accepted) / drafted}%`;
    share.textContent = percent(accepted, drafted);
    counts.textContent = `${accepted} of ${drafted}`;
  }

  #addBar(position) {
    const bar = element("span", { className: "bar" });
    const share = element("span", { className: "share" });
    const counts = element("td");
    const track = element("span", { className: "track" }, bar);
    const title = element("th", { scope: "row", textContent: String(position + 1) });
    this.places.positions.append(element("tr", {}, title, element("td", {}, track, share), counts));
    return { bar, share, counts };
  }
}

function roundRow(number, { drafted, accepted, last }) {
  const cells = [drafted, accepted, last === "corrected" ? 1 : 0];
  return element(
    "tr",
    {},
    element("th", { scope: "row", textContent: String(number) }),
    ...cells.map((cell) => element("td", { textContent: String(cell) })),
    element("td", {}, element("span", { className: `token ${last}`, textContent: last })),
  );
}

function totalOf({ rounds, tokens }) {
  const drafted = rounds.reduce((sum, round) => sum + round.drafted, 0);
  const accepted = rounds.reduce((sum, round) => sum + round.accepted, 0);
  if (!drafted) return `${rounds.length} target-only steps, no draft tokens.`;
  const perRound = (tokens.filter((token) => token.round).length / rounds.length).toFixed(2);
  const share = `${accepted} of ${drafted} draft tokens accepted (${percent(accepted, drafted)})`;
  return `${share}; ${perRound} tokens per round over ${rounds.length} rounds.`;
}

function percent(part, whole) {
  return `${Math.round((100 * part) / whole)} %`;
}
