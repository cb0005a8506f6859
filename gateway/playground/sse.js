/**
 * Reads server-sent events from the body of a `fetch` response. `EventSource` cannot do it, because it sends neither a
 * request body nor an API key.
 */

/**
 * Yield the events of a stream as `{id, data}`. Comments are skipped, and an event without an id gets the last one.
 * The response is cancelled when the caller stops to iterate.
 * @param {ReadableStream<Uint8Array>} body
 */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  let id = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (unread + value).split("\n");
      unread = lines.pop();
      for (const line of lines) {
        const [field, content] = fieldOf(line.endsWith("\r") ? line.slice(0, -1) : line);
        if (field === "id") id = content;
        else if (field === "data") data.push(content);
        else if (field === "end" && data.length) {
          yield { id, data: data.join("\n") };
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // A stream that has failed cannot be cancelled, and needs no cancelling.
  }
}

/** Return the name and the value of a line; the name is `end` for the empty line after an event. */
function fieldOf(line) {
  if (line === "") return ["end", ""];
  const colon = line.indexOf(":");
  if (colon < 0) return [line, ""];
  const content = line.slice(colon + 1);
  return [line.slice(0, colon), content.startsWith(" ") ? content.slice(1) : content];
}
