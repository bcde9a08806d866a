// Before anything is drawn: the theme that was chosen, if one was. Without a choice the system's holds.
"use strict";
(() => {
  let chosen = "";
  try { chosen = localStorage.getItem("theme") || ""; } catch { /* no storage: the system's theme */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
