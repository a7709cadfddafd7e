() => {
  const found = [], right = innerWidth;
  if (document.documentElement.scrollWidth > right) found.push("the page is wider than the window");
  const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const scroller = (e) => { for (e = e.parentElement; e; e = e.parentElement) if (scrolls(e)) return e; };
  for (const e of document.querySelectorAll("article *")) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!box.width || !box.height || e.closest("svg, .headerlink, .visually-hidden")) continue;
    const hidden = ["hidden", "clip"].includes(style.overflowX) && e.scrollWidth > e.clientWidth + 1;
    const told = e.tagName + " " + e.textContent.trim().slice(0, 50);
    if (hidden || (box.right > right + 1 && !scroller(e))) found.push("cut: " + told);
    if (scrolls(e) && e.scrollWidth > e.clientWidth + 1 && !style.backgroundImage.includes("gradient"))
      found.push("scrolls without a cue: " + told);
  }
  for (const drawing of document.querySelectorAll("article svg")) {
    const boxes = [...drawing.querySelectorAll("text")].filter((t) => t.textContent.trim())
      .map((t) => [t.textContent, t.getBoundingClientRect()]).filter(([, box]) => box.width);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      if (p.left + 2 < q.right && q.left + 2 < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom)
        found.push(`labels overlap: ${a} and ${b}`);
    }));
  }
  return found.slice(0, 5);
}
