/** The playground: connects the form, the streams, the views and the sessions. See docs/how-to/playground.md. */

import { Api } from "./api.js";
import { byId, showText } from "./dom.js";
import { follow, Meter } from "./follow.js";
import { OutputView } from "./output.js";
import { RoundsView } from "./rounds.js";
import { forgetSession, openSession, rememberOpen, Session, showSessions, storeSession } from "./sessions.js";
import { inputBody, Settings } from "./settings.js";
import { CodeView } from "./snippets.js";
import { followTheme } from "./theme.js";
import { TokenCard } from "./token_card.js";
import { Turn } from "./turn.js";
import { comparison, errorText, rateOf, summary } from "./words.js";

/** Longest time for which tokens are not stored while a stream runs. */
const STORE_INTERVAL_MS = 500;

const api = new Api(document.baseURI);
const settings = new Settings(byId("request"));
const card = new TokenCard(byId("token-card"));
const panes = {
  main: { output: new OutputView(byId("main-output"), card), rate: byId("main-rate"), container: byId("main-output") },
  other: { output: new OutputView(byId("other-output"), card), rate: byId("other-rate"), container: byId("other-output") },
};
const rounds = new RoundsView({
  rounds: byId("rounds").tBodies[0],
  positions: byId("positions").tBodies[0],
  total: byId("acceptance-total"),
});

const code = new CodeView((said) => showText(byId("status"), said));

/** The session on the page; null before the first request. @type {Session | null} */
let session = null;
/** Stops the streams on the page; null while none runs. @type {AbortController | null} */
let running = null;

// ---- streams --------------------------------------------------------------------------------------------------------

/** Start the form's request: a new session, or the next turn of a conversation. */
async function generate() {
  const { kind, input, system } = settings;
  if (kind === "chat" && !input.trim()) return;
  if (session?.kind !== "chat" || kind !== "chat") showSession(new Session(kind));
  session.system = system;
  const turn = new Turn(input, settings.formName);
  const body = {
    ...settings.parameters,
    ...inputBody({ kind, input, system, turns: session.turns }),
    session_id: session.id,
    stream: true,
    stream_options: { include_usage: true },
    return_provenance: true,
  };
  session.turns.push(turn);
  panes.main.output.begin(turn, kind);
  if (kind === "chat") settings.input = "";
  rounds.clear();
  await run(turn, (signal) => api.generate(kind, body, signal), settings.isComparison ? body : null);
}

/** Continue the session's last turn after its last event. */
async function resume() {
  const { id, kind, lastTurn, resumeFrom } = session;
  lastTurn.state = "running";
  await run(lastTurn, (signal) => api.resume(kind, id, resumeFrom, signal), null);
}

/**
 * Run a stream into a turn of the session, beside a target-only one if `compared` is the body of the request.
 * @param {Turn} turn
 * @param {(signal: AbortSignal) => AsyncIterable} open
 * @param {object | null} compared
 */
async function run(turn, open, compared) {
  const own = new AbortController();
  const { signal } = own;
  const { id, kind } = session;
  running = own;
  begin(compared !== null);
  const stream = { open: () => open(signal), reopen: () => api.resume(kind, id, turn.eventId, signal) };
  const streams = [show(panes.main, turn, stream, signal)];
  if (compared) streams.push(compare(compared, kind, turn.input, signal));
  try {
    const [main, other] = await Promise.all(streams);
    if (running !== own) return; // The page has gone on to something else.
    showText(byId("status"), summary(turn, main.meter));
    if (other) byId("comparison").textContent = comparison(main, other, compared.temperature === 0);
  } catch (error) {
    own.abort();
    if (running === own) showError(error);
  } finally {
    if (running === own) end(turn);
  }
}

/** Make the same request target-only, in a session that is deleted afterwards. */
async function compare(body, kind, input, signal) {
  const { id } = new Session(kind);
  const turn = new Turn(input, settings.formName);
  const sent = { ...body, session_id: id, speculation: { mode: "off" } };
  panes.other.output.begin(turn, kind);
  const stream = {
    open: () => api.generate(kind, sent, signal),
    reopen: () => api.resume(kind, id, turn.eventId, signal),
  };
  try {
    return await show(panes.other, turn, stream, signal);
  } finally {
    await api.deleteSession(id).catch(() => {}); // Else it expires on the server.
  }
}

/** Follow a stream and show it as it grows. Return the turn and its meter. */
async function show(pane, turn, stream, signal) {
  const meter = new Meter();
  const isMain = pane === panes.main;
  let storedMs = performance.now();
  pane.container.ariaBusy = "true";
  try {
    await follow(turn, stream, signal, (numTokens) => {
      meter.note(numTokens);
      pane.output.update();
      pane.rate.textContent = rateOf(meter);
      if (isMain) rounds.update(turn);
      if (isMain) stayAtEnd();
      if (isMain && performance.now() - storedMs > STORE_INTERVAL_MS) {
        storeSession(session);
        storedMs = performance.now();
      }
    });
  } finally {
    pane.container.ariaBusy = "false";
  }
  return { turn, meter };
}

function begin(isCompared) {
  storeSession(session);
  showText(byId("error"), "");
  showText(byId("status"), "Generating …");
  byId("comparison").textContent = "";
  byId("other-pane").hidden = !isCompared;
  if (!isCompared) panes.other.output.clear();
  for (const pane of Object.values(panes)) pane.rate.textContent = "";
  showState();
}

function end(turn) {
  running = null;
  if (turn.state === "running") turn.state = "failed";
  if (turn.state === "failed" && !turn.tokens.length) takeBack(turn);
  else storeSession(session);
  showState();
}

/** Take a message that was not answered out of its session, and give it back to the form. */
function takeBack(turn) {
  session.turns.pop();
  if (session.kind === "chat" && !settings.input) settings.input = turn.input;
  if (session.turns.length) storeSession(session);
  else forgetSession(session.id);
  showTurns();
}

/** Stop the streams on the page, because it goes on to something else. */
function leave() {
  if (running === null) return;
  running.abort();
  running = null;
  session.lastTurn.state = "stopped";
  storeSession(session);
}

function showError(error) {
  if (error.status === 401) byId("key-form").hidden = false;
  if (error.status === 401) byId("key").focus();
  showText(byId("error"), errorText(error));
  showText(byId("status"), "The request failed.");
}

// ---- sessions -------------------------------------------------------------------------------------------------------

/** Show a session and no other; null for an empty page. */
function showSession(shown) {
  leave();
  session = shown;
  rememberOpen(session);
  showTurns();
}

/** Show the turns of the session anew. */
function showTurns() {
  for (const pane of Object.values(panes)) {
    pane.output.clear();
    pane.rate.textContent = "";
  }
  rounds.clear();
  byId("other-pane").hidden = true;
  byId("comparison").textContent = "";
  for (const turn of session?.turns ?? []) panes.main.output.begin(turn, session.kind);
  if (session?.lastTurn) rounds.update(session.lastTurn);
}

/** Show a stored session, and continue its last turn unless that has ended or was stopped before a reload. */
async function open(stored, { isReload = false } = {}) {
  showSession(stored);
  settings.kind = stored.kind;
  settings.system = stored.system ?? "";
  showText(byId("error"), "");
  showState();
  const isResumed = stored.resumeFrom && (!isReload || stored.lastTurn.state === "running");
  if (isResumed) await resume();
  else showText(byId("status"), await describeKept(stored));
}

/** Return what the server still holds of a session. */
async function describeKept({ id }) {
  try {
    const record = await api.session(id);
    return `The server holds this session with ${record.num_tokens} tokens.`;
  } catch (error) {
    if (error.status === 404) return "The server no longer holds this session; this browser still has its text.";
    return errorText(error);
  }
}

async function remove(stored) {
  if (stored.id === session?.id) showSession(null);
  try {
    await api.deleteSession(stored.id);
    forgetSession(stored.id);
    showText(byId("status"), `Deleted the session “${stored.title}”.`);
  } catch (error) {
    showError(error);
  }
  showState();
  byId("sessions-title").focus(); // The button that had the focus is gone.
}

// ---- page -----------------------------------------------------------------------------------------------------------

function showState() {
  const isRunning = running !== null;
  byId("generate").disabled = isRunning;
  byId("stop").disabled = !isRunning;
  byId("resume").hidden = isRunning || !session?.resumeFrom;
  showSessions(byId("sessions"), session, { onOpen: open, onDelete: remove });
  showCode();
}

function showKind() {
  const isChat = settings.kind === "chat";
  byId("input-label").textContent = isChat ? "Message" : "Prompt";
  byId("generate").textContent = isChat ? "Send" : "Generate";
  byId("input-help").textContent = isChat ? "Enter sends, Shift+Enter begins a new line." : "Ctrl+Enter generates.";
  byId("system-label").hidden = !isChat;
  byId("marks-label").hidden = !isChat;
  for (const pane of Object.values(panes)) pane.output.hasMarks = settings.hasMarks;
  showCode();
}

/** Send or generate by the keys of the kind; from any field of the form with Ctrl. */
function onKeyDown(event) {
  if (event.key !== "Enter" || event.isComposing) return;
  const isSend = settings.kind === "chat" && event.target === byId("input") && !event.shiftKey && !event.altKey;
  if (!isSend && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  byId("request").requestSubmit();
}

/** Keep the end of a growing output in view, unless the user has scrolled away from it. */
function stayAtEnd() {
  const output = byId("main-output");
  const { bottom } = output.getBoundingClientRect();
  const composerTop = document.querySelector(".composer").getBoundingClientRect().top;
  if (bottom > composerTop && bottom < composerTop + innerHeight / 4) scrollBy(0, bottom - composerTop);
}

/** Return the request that the page shows: the form's, or in a chat without a new message the one that was sent last. */
function shownRequest() {
  const { kind, input, system } = settings;
  const turns = kind === "chat" && session?.kind === "chat" ? session.turns : [];
  if (input || !turns.length) return { kind, input, system, turns };
  return { kind, input: turns.at(-1).input, system, turns: turns.slice(0, -1) };
}

/** Write the shown request as code, if that is unfolded. */
function showCode() {
  if (!byId("code").open) return;
  const { kind, parameters } = settings;
  code.show({ api, kind, body: { ...parameters, ...inputBody(shownRequest()) } });
}

/** Ask for the models and offer them. Return whether the server answered. */
async function showServer() {
  try {
    const models = await api.models();
    const { pools = [], max_gamma: maxGamma } = models[0]?.specdec ?? {};
    const drafts = pools.filter((pool) => pool.role === "draft").map((pool) => pool.name);
    settings.offer({ models: models.map((model) => model.id), pools: drafts, maxGamma });
    byId("key-form").hidden = true;
    byId("server").textContent = `Model: ${models[0]?.id}. Draft pools: ${drafts.join(", ") || "none"}.`;
    return true;
  } catch (error) {
    byId("server").textContent = "The models are not known.";
    showError(error);
    return false;
  }
}

async function onKey(event) {
  event.preventDefault();
  api.key = byId("key").value;
  if (!(await showServer())) return;
  showText(byId("error"), "");
  showText(byId("status"), "The server takes the key.");
  byId("input").focus();
}

function onNewSession() {
  showSession(null);
  showText(byId("status"), "The next request starts a new session.");
  showState();
  byId("input").focus();
}

function listen() {
  const form = byId("request");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null) generate();
  });
  form.addEventListener("change", showKind);
  form.addEventListener("input", showCode);
  form.addEventListener("keydown", onKeyDown);
  byId("key-form").addEventListener("submit", onKey);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("resume").addEventListener("click", resume);
  byId("new-session").addEventListener("click", onNewSession);
  byId("code").addEventListener("toggle", showCode);
  addEventListener("pagehide", () => running && storeSession(session));
}

async function start() {
  followTheme(byId("theme"));
  byId("options").open = matchMedia("(min-width: 48rem)").matches;
  listen();
  showKind();
  showState();
  const stored = openSession();
  if ((await showServer()) && stored) await open(stored, { isReload: true });
}

start();
