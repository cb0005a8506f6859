/** Sessions that this browser knows: kept in `localStorage`, one entry each, and shown as a list. */

import { element } from "./dom.js";
import { Turn } from "./turn.js";

const PREFIX = "specdec.session.";
const MAX_SESSIONS = 30;
/** Session that this tab shows. Another tab shows its own. */
const OPEN = "specdec.open";

export class Session {
  /** @param {"prompt" | "chat"} kind */
  constructor(kind) {
    this.id = `s-${randomHex(12)}`;
    this.kind = kind;
    this.createdMs = Date.now();
    /** @type {Turn[]} */
    this.turns = [];
  }

  get lastTurn() {
    return this.turns.at(-1);
  }

  get title() {
    return this.turns[0]?.input.trim().replace(/\s+/g, " ").slice(0, 60) || "(empty)";
  }

  /** Whether the last turn may still grow. */
  get isUnfinished() {
    return this.lastTurn !== undefined && this.lastTurn.state !== "finished";
  }

  /** Id of the event after which the last turn can be resumed; "" where that cannot be told. */
  get resumeFrom() {
    if (!this.isUnfinished) return "";
    // Before its first event a later turn may not be stored yet: resuming would repeat the turn before it.
    const isFirst = this.turns.length === 1 && this.lastTurn.state === "running";
    return this.lastTurn.eventId || (isFirst ? `${this.id}:0` : "");
  }

  static fromJSON(stored) {
    return Object.assign(new Session(stored.kind), stored, { turns: stored.turns.map(Turn.fromJSON) });
  }
}

function randomHex(numBytes) {
  const bytes = crypto.getRandomValues(new Uint8Array(numBytes));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Return the stored sessions, newest first. */
export function storedSessions() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const sessions = keys.map((key) => Session.fromJSON(JSON.parse(localStorage.getItem(key))));
  return sessions.sort((one, other) => other.createdMs - one.createdMs);
}

/** Store a session; the oldest ones make room for it. */
export function storeSession(session) {
  const older = storedSessions().filter(({ id }) => id !== session.id);
  for (const { id } of older.splice(MAX_SESSIONS - 1)) forgetSession(id);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + session.id, JSON.stringify(session));
      return;
    } catch {
      if (!older.length) return; // Storage is off or too small: the session lives as long as the page.
      forgetSession(older.pop().id);
    }
  }
}

export function forgetSession(id) {
  localStorage.removeItem(PREFIX + id);
}

/** Remember which session this tab shows; null for none. */
export function rememberOpen(session) {
  sessionStorage.setItem(OPEN, session?.id ?? "");
}

/** Return the session that this tab showed before it was reloaded. */
export function openSession() {
  const id = sessionStorage.getItem(OPEN);
  return storedSessions().find((session) => session.id === id);
}

/** Show the stored sessions. @param {{onOpen: (session: Session) => void, onDelete: (session: Session) => void}} actions */
export function showSessions(list, current, { onOpen, onDelete }) {
  const items = storedSessions().map((session) => {
    const name = element("span", { className: "title", textContent: session.title });
    const state = element("span", { className: "hint", textContent: describe(session) });
    const open = element("button", { type: "button", textContent: session.resumeFrom ? "Resume" : "Open" });
    const remove = element("button", { type: "button", textContent: "Delete" });
    open.setAttribute("aria-label", `${open.textContent} session ${session.title}`);
    remove.setAttribute("aria-label", `Delete session ${session.title}`);
    open.onclick = () => onOpen(session);
    remove.onclick = () => onDelete(session);
    const item = element("li", {}, element("div", {}, name, state), open, remove);
    if (session.id === current?.id) item.setAttribute("aria-current", "true");
    return item;
  });
  list.replaceChildren(...(items.length ? items : [element("li", { className: "hint", textContent: "None yet." })]));
}

function describe({ kind, turns, createdMs, lastTurn }) {
  const numTokens = turns.reduce((sum, turn) => sum + turn.tokens.length, 0);
  const time = new Date(createdMs).toLocaleTimeString();
  return `${kind}, ${numTokens} tokens, ${lastTurn?.state ?? "empty"}, ${time}`;
}
