/** One turn of a session: its input, its tokens with their sources, and its rounds. */

/** Sources of a token; `unknown` stands for tokens that the server replayed from its log, which keeps no source. */
export const SOURCES = ["accepted", "forced", "corrected", "bonus", "target"];
/** Name under which the server shows tokens that the form of the answer forces. */
const GRAMMAR_POOL = "grammar";

export class Turn {
  /**
   * @param {string} input prompt, or the user's message
   * @param {string} formName form of the answer in words; "" for free text
   */
  constructor(input, formName = "") {
    this.input = input;
    this.formName = formName;
    /** `running`, `stopped` (by the user), `failed` or `finished`. */
    this.state = "running";
    this.finishReason = "";
    /** Id of the last event received; "" before the first. */
    this.eventId = "";
    /** @type {{text: string, source: string, p: number, q: number, pool: string, round: number}[]} */
    this.tokens = [];
    /** Draft tokens and accepted tokens of each round. @type {{drafted: number, accepted: number}[]} */
    this.rounds = [];
    /** Text of the answer without its calls. */
    this.content = "";
    /** Calls of tools. @type {{id: string, name: string, arguments: string}[]} */
    this.calls = [];
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** The answer without calls; all of the text if there are none. */
  get answer() {
    return this.calls.length ? this.content : this.text;
  }

  /** Add one streamed chunk. Return the number of tokens in it. */
  add(eventId, chunk) {
    this.eventId = eventId || this.eventId;
    const choice = chunk.choices?.[0];
    const numBefore = this.tokens.length;
    for (const each of chunk.choices ?? []) this.#addDelta(each.delta ?? {});
    if (chunk.specdec) this.#addTokens(chunk.specdec);
    else this.#addText(choice?.delta?.content ?? choice?.text ?? "");
    if (choice?.finish_reason) {
      this.finishReason = choice.finish_reason;
      this.state = "finished";
    }
    return this.tokens.length - numBefore;
  }

  #addDelta({ content, tool_calls: toolCalls }) {
    this.content += content ?? "";
    for (const { index, id, function: called } of toolCalls ?? []) {
      const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
      call.id ||= id ?? "";
      call.name ||= called?.name ?? "";
      call.arguments += called?.arguments ?? "";
    }
  }

  #addTokens({ tokens, round }) {
    if (!tokens?.length) return;
    const sources = tokens.map(sourceOf);
    const isKnown = !sources.includes("unknown");
    if (isKnown) this.rounds.push(roundOf(sources, round));
    tokens.forEach((token, index) => {
      const { text, p, q, draft_pool: pool } = token;
      this.tokens.push({ text, source: sources[index], p, q, pool: pool ?? "", round: isKnown ? this.rounds.length : 0 });
    });
  }

  /** Add text that came without its tokens. */
  #addText(text) {
    if (text) this.tokens.push({ text, source: "unknown", p: 0, q: 0, pool: "", round: 0 });
  }

  toJSON() {
    const tokens = this.tokens.map(({ text, source, p, q, pool, round }) => [text, source, p, q, pool, round]);
    return { ...this, tokens };
  }

  static fromJSON(stored) {
    const tokens = stored.tokens.map(([text, source, p, q, pool, round]) => ({ text, source, p, q, pool, round }));
    return Object.assign(new Turn(stored.input), stored, { tokens });
  }
}

/** Return a token's source. A token that the server replayed from its log has null. */
function sourceOf({ source, draft_pool: pool }) {
  if (source === "accepted" && pool === GRAMMAR_POOL) return "forced";
  return SOURCES.includes(source) ? source : "unknown";
}

function roundOf(sources, round) {
  const accepted = sources.filter((source) => source === "accepted" || source === "forced").length;
  return {
    drafted: round?.num_draft_tokens ?? accepted + sources.filter((source) => source === "corrected").length,
    accepted: round?.num_accepted_tokens ?? accepted,
    last: sources.at(-1),
  };
}

/** Return, for each position of a draft, how many tokens were drafted there and how many of them were accepted. */
export function countByPosition(rounds) {
  const numPositions = Math.max(0, ...rounds.map((round) => round.drafted));
  return Array.from({ length: numPositions }, (_, position) => ({
    drafted: rounds.filter((round) => round.drafted > position).length,
    accepted: rounds.filter((round) => round.accepted > position).length,
  }));
}
