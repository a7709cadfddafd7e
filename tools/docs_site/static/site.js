// A player in a frame tells its height.
addEventListener("message", (event) => {
  for (const frame of document.querySelectorAll(".player iframe"))
    if (frame.contentWindow === event.source && event.data.playerHeight)
      frame.style.height = `${event.data.playerHeight + 2}px`;
});

// Search shows a line of what it finds.
const results = document.querySelector("#search-results");
if (results)
  new MutationObserver(() => {
    for (const link of results.querySelectorAll("li > a:not([data-told])")) {
      link.dataset.told = "";
      const place = link.getAttribute("href").replace(/\?[^#]*/, "");
      const summary = SUMMARIES[place] ?? SUMMARIES[place.split("#")[0]];
      if (summary) link.insertAdjacentElement("afterend", Object.assign(document.createElement("p"), { className: "summary", textContent: summary }));
    }
  }).observe(results, { childList: true, subtree: true });
