() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map(), found = [];
  const rgba = (colour) => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      known.set(colour, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  };
  const light = (colour) => colour.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = rgba(getComputedStyle(e).backgroundColor);
      if (colour[3] > 200) return colour;
    }
    return [255, 255, 255, 255];
  };
  for (const e of document.querySelectorAll("article *")) {
    const own = [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!own || !box.width || !box.height || e.closest("svg, .headerlink")) continue;
    if (contrast(rgba(style.color), behind(e)) < 3) found.push("pale: " + e.outerHTML.slice(0, 80));
  }
  const page = behind(document.querySelector("article"));
  for (const shape of document.querySelectorAll("article svg rect")) {
    const whole = shape.closest("svg").getBoundingClientRect(), box = shape.getBoundingClientRect();
    const fill = getComputedStyle(shape).fill;
    if (fill === "none" || !box.width || box.width * box.height < 0.6 * whole.width * whole.height) continue;
    if (rgba(fill)[3] > 200 && contrast(rgba(fill), page) > 3)
      found.push("a block: " + shape.outerHTML.slice(0, 80));
  }
  for (const image of document.querySelectorAll("article img"))
    if (image.complete && !image.naturalWidth) found.push("no picture: " + image.src);
  return found.slice(0, 5);
}
