/** Calls the gateway's HTTP API. Every failure is an `ApiError` with a message for the user, or an `AbortError`. */

import { readEvents } from "./sse.js";

const KEY = "specdec.key";

/** Route and resumed object of each kind of request. */
const KINDS = {
  chat: { path: "v1/chat/completions", object: "chat.completion" },
  prompt: { path: "v1/completions", object: "text_completion" },
};

export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string, isConnectionLoss?: boolean}} details
   *   status: HTTP status; 0 without a response. isConnectionLoss: the stream can be resumed where it broke off.
   */
  constructor(message, { status = 0, code = "", isConnectionLoss = false } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.isConnectionLoss = isConnectionLoss;
  }
}

export class Api {
  /** @param {string} base URL of the page; the routes of the API are relative to it. */
  constructor(base) {
    this.base = base;
  }

  /** API key of this tab; "" for none. */
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    sessionStorage.setItem(KEY, value);
  }

  urlOf(path) {
    return new URL(path, this.base).href;
  }

  /** Return the URL that a request of this kind is posted to. */
  urlOfKind(kind) {
    return this.urlOf(KINDS[kind].path);
  }

  async models() {
    return (await (await this.#call("v1/models")).json()).data;
  }

  /** Return the server's record of a session. */
  async session(sessionId) {
    return (await this.#call(`v1/sessions/${encodeURIComponent(sessionId)}`)).json();
  }

  /** Delete a session on the server. A session that the server does not know is fine. */
  async deleteSession(sessionId) {
    try {
      await this.#call(`v1/sessions/${encodeURIComponent(sessionId)}`, { method: "DELETE" });
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }

  /** Yield `{id, chunk}` for each event of a new request. */
  generate(kind, body, signal) {
    // The server adds event ids only for clients that name event streams.
    const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
    return this.#stream(KINDS[kind].path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  /** Yield `{id, chunk}` for each event of a session's last request after the event `eventId`. */
  resume(kind, sessionId, eventId, signal) {
    const path = `v1/sessions/${encodeURIComponent(sessionId)}?object=${KINDS[kind].object}&return_provenance=true`;
    return this.#stream(path, { headers: { Accept: "text/event-stream", "Last-Event-ID": eventId }, signal });
  }

  async *#stream(path, options) {
    const response = await this.#call(path, options);
    const events = readEvents(response.body);
    for (;;) {
      const { value, done } = await this.#next(events);
      if (done) throw connectionLoss("The stream ended before the text did.");
      if (value.data === "[DONE]") return;
      const chunk = JSON.parse(value.data);
      if (chunk.error) throw new ApiError(chunk.error.message, { code: chunk.error.code ?? "" });
      yield { id: value.id, chunk };
    }
  }

  async #next(events) {
    try {
      return await events.next();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw connectionLoss("The connection to the server was lost.");
    }
  }

  async #call(path, options = {}) {
    const headers = { ...options.headers, ...(this.key && { Authorization: `Bearer ${this.key}` }) };
    let response;
    try {
      response = await fetch(this.urlOf(path), { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw connectionLoss(`The server at ${new URL(this.base).host} does not answer. Check that it is running.`);
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

function connectionLoss(message) {
  return new ApiError(message, { isConnectionLoss: true });
}

/** Return the error of a response that is not a success: the server's own words where it sent some. */
async function refusal(response) {
  const { error } = await response.json().catch(() => ({}));
  const said = error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
  const waitS = response.headers.get("Retry-After");
  const advice = waitS ? ` Try again in ${waitS} s.` : "";
  return new ApiError(said + advice, { status: response.status, code: error?.code ?? "" });
}
