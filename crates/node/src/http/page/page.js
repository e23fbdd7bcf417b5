"use strict";
// Fetches the changing part each second while somebody looks; says so when the node is away.
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
