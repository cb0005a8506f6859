/** Follows one stream to its end, over lost connections, and measures its rate. */

/** Waits before the attempts to resume a stream whose connection was lost. */
const RETRY_DELAYS_MS = [250, 1000, 3000];

/** Rate of a stream: tokens after its first chunk over the time since then. */
export class Meter {
  #beganMs = performance.now();
  #firstMs = 0;
  #lastMs = 0;
  #numTokens = 0;
  #numFirst = 0;

  note(numTokens) {
    if (!numTokens) return;
    this.#lastMs = performance.now();
    if (!this.#firstMs) {
      this.#firstMs = this.#lastMs;
      this.#numFirst = numTokens;
    }
    this.#numTokens += numTokens;
  }

  /** Seconds from the request to the first tokens; null before them. */
  get firstTokenS() {
    return this.#firstMs ? (this.#firstMs - this.#beganMs) / 1000 : null;
  }

  /** Tokens per second; null until a second chunk has come. */
  get rate() {
    const elapsedS = (this.#lastMs - this.#firstMs) / 1000;
    return elapsedS > 0 ? (this.#numTokens - this.#numFirst) / elapsedS : null;
  }
}

/**
 * Read a stream into a turn until it ends. The turn's state is then `finished`, or `stopped` if the signal was given.
 * A lost connection is resumed after the last event. Any other error leaves the turn `failed` and is thrown.
 * @param {import("./turn.js").Turn} turn
 * @param {{open: () => AsyncIterable, reopen: () => AsyncIterable}} stream
 *   open: makes the request; reopen: resumes it after `turn.eventId`
 * @param {AbortSignal} signal
 * @param {(numTokens: number) => void} onTokens called after each chunk
 */
export async function follow(turn, { open, reopen }, signal, onTokens) {
  let events = open();
  for (let attempt = 0; ; attempt++) {
    try {
      for await (const { id, chunk } of events) {
        if (signal.aborted) break;
        onTokens(turn.add(id, chunk));
        attempt = 0;
      }
      if (turn.state !== "finished") turn.state = signal.aborted ? "stopped" : "finished";
      return;
    } catch (error) {
      if (turn.state === "finished") return; // Only what follows the text was lost.
      turn.state = signal.aborted ? "stopped" : "failed";
      if (signal.aborted) return;
      if (!error.isConnectionLoss || !turn.eventId || attempt >= RETRY_DELAYS_MS.length) throw error;
    }
    turn.state = "running";
    await waitOrAbort(RETRY_DELAYS_MS[attempt], signal);
    events = reopen();
  }
}

function waitOrAbort(delayMs, signal) {
  return new Promise((resolve) => {
    setTimeout(resolve, delayMs);
    signal.addEventListener("abort", resolve, { once: true });
  });
}
