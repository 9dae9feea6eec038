// Light, dark, or the system's theme. Runs before the first paint, so that nothing flashes.
"use strict";
(() => {
  const THEMES = ["system", "light", "dark"];
  const root = document.documentElement;
  // If storage is unavailable the choice lasts as long as the page.
  const saved = { get: () => { try { return localStorage.getItem("theme"); } catch { return null; } },
    set: (name) => { try { localStorage.setItem("theme", name); } catch { /* kept nowhere */ } } };
  let theme = THEMES.includes(saved.get()) ? saved.get() : "system";

  function show(button) {
    if (theme === "system") delete root.dataset.theme;
    else root.dataset.theme = theme;
    if (button) button.textContent = `Theme: ${theme}`;
  }

  show(null);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    show(button);
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      saved.set(theme);
      show(button);
    });
  });
})();
