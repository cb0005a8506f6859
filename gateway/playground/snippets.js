/** Writes a request as a curl command and as a program for the OpenAI client. The API key is never written. */

import { byId } from "./dom.js";

/** Fields that the OpenAI client has no parameter for. */
const EXTRA = ["top_k", "min_p", "speculation"];
const KEY_VARIABLE = "SPECDEC_API_KEY";

/** The two texts on the page, and the buttons that copy them. */
export class CodeView {
  /** @param {(said: string) => void} say shows what came of a copy */
  constructor(say) {
    this.say = say;
    for (const button of document.querySelectorAll("[data-copy]")) {
      button.addEventListener("click", () => this.#copy(byId(button.dataset.copy)));
    }
  }

  /** @param {{api: import("./api.js").Api, kind: string, body: object}} request */
  show({ api, kind, body }) {
    const hasKey = api.key !== "";
    byId("curl-code").textContent = asCurl({ url: api.urlOfKind(kind), body, hasKey });
    byId("python-code").textContent = asPython({ base: api.urlOf("v1"), kind, body, hasKey });
  }

  async #copy(text) {
    try {
      await navigator.clipboard.writeText(text.textContent);
      this.say("Copied.");
    } catch {
      // Browsers offer the clipboard only to pages from https or from this machine.
      getSelection().selectAllChildren(text);
      this.say("The code is selected: copy it with Ctrl+C.");
    }
  }
}

/** Return a shell command. @param {{url: string, body: object, hasKey: boolean}} request */
function asCurl({ url, body, hasKey }) {
  const lines = [`curl -N ${quoted(url)}`, "  -H 'Content-Type: application/json'"];
  if (hasKey) lines.push(`  -H "Authorization: Bearer $${KEY_VARIABLE}"`);
  lines.push(`  -d ${quoted(JSON.stringify({ ...body, stream: true }, null, 2))}`);
  return lines.join(" \\\n");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Return a Python program. @param {{base: string, kind: string, body: object, hasKey: boolean}} request */
function asPython({ base, kind, body, hasKey }) {
  const names = kind === "chat" ? EXTRA : [...EXTRA, "response_format"];
  const known = Object.entries(body).filter(([name]) => !names.includes(name));
  const extra = Object.entries(body).filter(([name]) => names.includes(name));
  const fields = known.map(([name, value]) => `    ${name}=${literal(value, 1)},\n`);
  if (!("model" in body)) fields.unshift('    model="",\n');
  if (extra.length) fields.push(`    extra_body=${literal(Object.fromEntries(extra), 1)},\n`);
  const [method, piece] = kind === "chat" ? ["chat.completions", "delta.content"] : ["completions", "text"];
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(base)}, api_key=${hasKey ? `os.environ["${KEY_VARIABLE}"]` : '"none"'})`,
    `stream = client.${method}.create(\n${fields.join("")}    stream=True,\n)`,
    "for chunk in stream:",
    "    if chunk.choices:",
    `        print(chunk.choices[0].${piece} or "", end="", flush=True)`,
    "",
  ].join("\n");
}

/** Return a JSON value as a Python literal. A JSON string is a Python string too. */
function literal(value, depth = 0) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const items = isList
    ? value.map((item) => literal(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, depth + 1)}`);
  const indent = "    ".repeat(depth);
  const lines = items.map((item) => `${indent}    ${item},\n`).join("");
  return isList ? `[\n${lines}${indent}]` : `{\n${lines}${indent}}`;
}
