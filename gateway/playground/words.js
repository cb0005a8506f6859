/** Says in words what streams did. */

const REASONS = { length: "the token limit was reached", tool_calls: "the model called a tool" };

/** Return a stream's rate; "" before it is known. @param {import("./follow.js").Meter} meter */
export function rateOf({ rate }) {
  return rate === null ? "" : `${rate.toFixed(1)} tokens/s`;
}

/** Return how a turn ended, with its times. */
export function summary({ state, tokens, finishReason }, meter) {
  const length = `${tokens.length} tokens`;
  if (state === "stopped") return `Stopped after ${length}. Resume continues the text.`;
  const reason = REASONS[finishReason] ?? "the text ended";
  const rate = rateOf(meter);
  const first = meter.firstTokenS === null ? "" : `, first after ${(1000 * meter.firstTokenS).toFixed(0)} ms`;
  return `Finished: ${length}, ${reason}${rate && `, ${rate}`}${first}.`;
}

/** Return how the streams of a comparison differ; "" unless both have ended by themselves. */
export function comparison(main, other, isGreedy) {
  if (main.turn.state !== "finished" || other.turn.state !== "finished") return "";
  const ratio = main.meter.rate && other.meter.rate ? main.meter.rate / other.meter.rate : null;
  const speed = ratio === null ? "" : `Speculation was ${ratio.toFixed(2)} times as fast as target-only. `;
  const shared = "The two streams shared the server, so each was slower than it is alone.";
  return `${speed}${sameness(main.turn.text, other.turn.text, isGreedy)} ${shared}`;
}

function sameness(text, otherText, isGreedy) {
  if (text === otherText) return "Both texts are the same.";
  if (isGreedy) return "The texts differ, which happens at temperature 0 where two tokens are equally likely.";
  return "The texts are two draws from the same distribution.";
}

/** Return an error as one line, with the server's code for it. @param {import("./api.js").ApiError} error */
export function errorText({ message, code }) {
  return code ? `${message} (${code})` : message;
}
