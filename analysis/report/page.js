// Sorts tables, enlarges figures, and opens a run: its configuration and samples.
const dialog = document.getElementById("dialog"), content = document.getElementById("content");
function show(node, large) {
  content.replaceChildren(node);
  dialog.classList.toggle("large", large);
  if (!dialog.open) dialog.showModal();
}
function openRun(name) {
  const run = [...document.querySelectorAll(".run")].find(node => node.dataset.run === name);
  if (!run) return;
  const copy = run.cloneNode(true);
  copy.style.display = "block";
  show(copy, false);
}
function widen(root) { // a thin line is hard to hit: an invisible wide one above it
  for (const line of root.querySelectorAll('g[id^="run:"]')) for (const path of line.querySelectorAll("path")) {
    const wide = path.cloneNode();
    wide.style.cssText = "fill:none;stroke:#000;stroke-width:7;opacity:0;pointer-events:stroke";
    line.append(wide);
    const name = document.createElementNS("http://www.w3.org/2000/svg", "title");
    name.textContent = line.id.slice(4);
    line.append(name);
  }
}
function zoom(svg) { // wheel zooms about the pointer, drag moves, both through the view box
  let box = svg.viewBox.baseVal, from = null;
  svg.addEventListener("wheel", event => {
    event.preventDefault();
    const place = svg.getBoundingClientRect(), k = event.deltaY < 0 ? 0.8 : 1.25;
    const x = box.x + box.width * (event.clientX - place.left) / place.width;
    const y = box.y + box.height * (event.clientY - place.top) / place.height;
    box.x = x - (x - box.x) * k; box.y = y - (y - box.y) * k; box.width *= k; box.height *= k;
  }, {passive: false});
  svg.addEventListener("pointerdown", event => { from = [event.clientX, event.clientY]; });
  addEventListener("pointerup", () => { from = null; });
  svg.addEventListener("pointermove", event => {
    if (!from) return;
    const scale = box.width / svg.getBoundingClientRect().width;
    box.x -= (event.clientX - from[0]) * scale; box.y -= (event.clientY - from[1]) * scale;
    from = [event.clientX, event.clientY];
  });
}
document.addEventListener("click", event => {
  const link = event.target.closest("[data-open]"), line = event.target.closest('g[id^="run:"]');
  if (link) { event.preventDefault(); openRun(link.dataset.open); }
  else if (line) openRun(line.id.slice(4));
  else if (event.target.classList.contains("zoom")) {
    const copy = event.target.parentNode.querySelector(".picture > *").cloneNode(true);
    show(copy, true);
    if (copy.viewBox) zoom(copy);
  }
  const head = event.target.closest("table.sortable th");
  if (!head) return;
  const place = [...head.parentNode.children].indexOf(head), order = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order > 0 ? "ascending" : "descending");
  const key = row => row.children[place].dataset.sort ?? row.children[place].textContent;
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)], [p, q] = [Number(x), Number(y)];
    if (x !== "" && y !== "" && !isNaN(p) && !isNaN(q)) return p - q;
    return (x === "" || x === "nan") - (y === "" || y === "nan") || x.localeCompare(y);
  };
  const body = head.closest("table").tBodies[0];
  body.append(...[...body.rows].sort((a, b) => order * compare(a, b)));
});
widen(document);
