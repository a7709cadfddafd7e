// A player in a frame tells its height.
addEventListener("message", (event) => {
  for (const frame of document.querySelectorAll(".player iframe"))
    if (frame.contentWindow === event.source && event.data.playerHeight)
      frame.style.height = `${event.data.playerHeight + 2}px`;
});
