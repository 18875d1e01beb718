"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => { theme.textContent = isDark() ? "light theme" : "dark theme"; };  // what it will make
  theme.hidden = false;
  name();
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  dark.addEventListener("change", name);

  // Paper is white.
  let before;
  addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
  });

  for (const button of document.querySelectorAll("[data-copy]")) {
    const text = button.closest(".code").querySelector("pre");
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "copied";
        setTimeout(() => { button.textContent = "copy"; }, 1500);
      } catch {
        getSelection().selectAllChildren(text);
      }
    });
  }
})();
