/** Reads the field for the form of an answer: a JSON schema, or tools. */

/**
 * Return what the field adds to a request, with words for it.
 * @param {string} written a JSON schema, a list of tools, or an object of request fields with `tools`
 * @param {"prompt" | "chat"} kind
 * @returns {{fields: object, name: string, problem: string}} problem: why the field cannot be used; "" if it can
 */
export function readForm(written, kind) {
  const nothing = { fields: {}, name: "", problem: "" };
  if (!written.trim()) return nothing;
  let value;
  try {
    value = JSON.parse(written);
  } catch (error) {
    return { ...nothing, problem: `The form is not JSON: ${error.message}` };
  }
  if (typeof value !== "object" || value === null) return { ...nothing, problem: "The form must be an object or a list." };
  if (!Array.isArray(value) && !value.tools) {
    const schema = { type: "json_schema", json_schema: { name: "answer", schema: value, strict: true } };
    return { fields: { response_format: schema }, name: "JSON of a schema", problem: "" };
  }
  if (kind !== "chat") return { ...nothing, problem: "Tools need the kind Chat." };
  const { tools, ...others } = Array.isArray(value) ? { tools: value } : value;
  if (!Array.isArray(tools)) return { ...nothing, problem: "Tools must be a list." };
  return { fields: { tools: tools.map(asTool), ...others }, name: "text, or calls of tools", problem: "" };
}

/** Return a tool as the API has it; a function alone will do. */
function asTool(tool) {
  return tool?.function ? tool : { type: "function", function: tool };
}
