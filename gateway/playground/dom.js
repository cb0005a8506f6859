/** Makes elements. Text reaches the page only as text nodes, never as markup. */

/**
 * Return a new element.
 * @param {string} name
 * @param {Record<string, unknown>} properties set on the element: `className`, `textContent`, `onclick` and so on
 * @param {...(Node | string)} children
 */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Return the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Show a text in an element that is hidden while it has none. */
export function showText(target, text) {
  target.textContent = text;
  target.hidden = text === "";
}
