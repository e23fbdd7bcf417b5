"use strict";
// Reloads the changing part every second while the page is visible and no text is selected.
// Shows a notice while the node does not respond.
const live = document.getElementById("live");
const lost = document.getElementById("lost");
async function refresh() {
  const isSelecting = String(getSelection()).length > 0;
  if (!document.hidden && !isSelecting) {
    try {
      const answer = await fetch("live", { cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (!answer.ok) throw new Error(String(answer.status));
      live.innerHTML = await answer.text();
      live.dataset.refreshed = String(Number(live.dataset.refreshed || 0) + 1);
      lost.hidden = true;
    } catch {
      lost.hidden = false;
    }
    live.classList.toggle("stale", !lost.hidden);
  }
  setTimeout(refresh, 1000);
}
setTimeout(refresh, 1000);
