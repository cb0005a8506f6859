/** The choice between light, dark and the system's colours. The browser remembers it. */

const THEME = "specdec.theme";

/** Apply the remembered theme, and let the user change it. @param {HTMLSelectElement} select */
export function followTheme(select) {
  select.value = localStorage.getItem(THEME) ?? "";
  document.documentElement.dataset.theme = select.value;
  select.addEventListener("change", () => {
    localStorage.setItem(THEME, select.value);
    document.documentElement.dataset.theme = select.value;
  });
}
