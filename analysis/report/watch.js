// Renews the page once the command that watches has written a new one, and keeps the reader's place.
const key = "place in " + location.pathname, version = document.body.dataset.version;
const watched = document.getElementById("watched"), goesOn = watched.textContent;
const controls = text => [...document.querySelectorAll("a, button, summary")].filter(one => one.textContent === text);
function movable() { // what opens, scrolls or sorts, named by the heading above it
  const found = {};
  let head = "", count = 0;
  for (const node of document.querySelectorAll(":is(h2, h3, h4)[id], main > details, main > .wide, details > .wide")) {
    if (node.id) { head = node.id; count = 0; }
    else found[`${head} ${count++}`] = node;
  }
  return found;
}
function keepPlace() {
  const text = document.activeElement.textContent, kept = {top: scrollY, boxes: {}};
  kept.focus = [text, controls(text).indexOf(document.activeElement)]; // of several with this text the n-th
  const head = [...document.querySelectorAll(":is(h2, h3, h4)[id]")].findLast(one => one.getBoundingClientRect().top < 2);
  if (head) kept.head = [head.id, head.getBoundingClientRect().top];
  for (const [name, node] of Object.entries(movable())) {
    const sorted = node.querySelector("th[aria-sort]");
    kept.boxes[name] = {open: node.open, left: node.scrollLeft, top: node.scrollTop,
      column: sorted?.textContent, order: sorted?.getAttribute("aria-sort")};
  }
  sessionStorage.setItem(key, JSON.stringify(kept));
}
function findPlace() {
  const kept = JSON.parse(sessionStorage.getItem(key));
  if (!kept) return;
  for (const [name, node] of Object.entries(movable())) {
    const box = kept.boxes[name] ?? {};
    if (box.open) node.open = true;
    const head = [...node.querySelectorAll("th")].find(one => one.textContent === box.column);
    for (let clicks = 0; head && clicks < 2 && head.getAttribute("aria-sort") !== box.order; clicks++) head.click();
    node.scrollTo(box.left ?? 0, box.top ?? 0);
  }
  controls(kept.focus[0])[kept.focus[1]]?.focus({preventScroll: true});
  const head = kept.head && document.getElementById(kept.head[0]);
  scrollTo(0, head ? scrollY + head.getBoundingClientRect().top - kept.head[1] : kept.top);
}
function renewed(now) { // called by report.version.js
  watched.textContent = now ? goesOn : "This page is not renewed any more: the command that watched the runs has ended.";
  const isBusy = dialog.open || !getSelection().isCollapsed;
  if (!now || now === version || isBusy) return;
  keepPlace();
  location.reload();
}
function look() {
  const script = document.createElement("script");
  script.onload = script.onerror = () => script.remove();
  script.src = `report.version.js?${Date.now()}`;
  document.head.append(script);
}
history.scrollRestoration = "manual";
findPlace();
addEventListener("load", () => { findPlace(); sessionStorage.removeItem(key); });
setInterval(look, 2000);
