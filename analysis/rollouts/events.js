// What the reader does: controls, pointer and keys. The last script; it also makes the page show its first group.
"use strict";
const KEYS = {
  n: () => nextPrompt(1), p: () => nextPrompt(-1), "]": () => nextStep(1), "[": () => nextStep(-1),
  "/": () => $("search").focus(), "?": () => $("keys").showModal(), Escape: () => forget(),
};
Object.keys(QUANTITIES).forEach((by, i) => KEYS[i + 1] = () => colourBy(by));

function forget() {
  Object.assign(chosen, {rollout: null, t: null});
  pointed(null, null);
  link();
}

// Moves the chosen token inside a rollout, or to the same place of the rollout above or below.
function move(event, area) {
  const view = views.find(view => view.rollouts.includes(area.rollout)), side = views.indexOf(view);
  const here = chosen.side === side && chosen.rollout === area.rollout.number ? chosen.t : null;
  const along = {ArrowRight: (here ?? -1) + 1, ArrowLeft: (here ?? 1) - 1, Home: 0, End: Infinity}[event.key];
  const across = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (along === undefined && across === undefined) return;
  event.preventDefault();
  const rollout = across ? view.visible[view.visible.indexOf(area.rollout) + across] : area.rollout;
  if (!rollout?.own.length) return;
  const t = Math.min(Math.max(along ?? here ?? 0, 0), rollout.own.length - 1);
  const span = pointed(view, rollout, t, true);
  if (across) rollout.area.focus({preventScroll: true});
  span.scrollIntoView({block: "nearest"});
}

addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("dialog")) return;
  const area = event.target.closest(".tokens");
  if (area) move(event, area);
  if (event.key === "Enter" && event.target === $("search")) nextPrompt(0);
  if (event.key === "Escape" && event.target.closest("input, select")) event.target.blur();
  if (event.target.closest("input:not([type=radio]), select") || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

for (const view of views) {
  const tokenOf = event => event.target.closest(".t"), rolloutOf = span => span.closest(".tokens").rollout;
  view.section.addEventListener("pointerover", event => {
    const span = tokenOf(event);
    if (span) pointed(view, rolloutOf(span), span.t);
  });
  view.section.addEventListener("pointerout", event => {
    if (tokenOf(event) && !event.relatedTarget?.closest?.(".t")) pointed(view, null);
  });
  view.section.addEventListener("click", event => {
    const span = tokenOf(event);
    if (span) pointed(view, rolloutOf(span), span.t, true);
  });
  view.section.addEventListener("focusin", event => {
    const area = event.target.closest(".tokens");
    if (area?.matches(":focus-visible") && area.rollout.own.length && chosen.rollout !== area.rollout.number)
      pointed(view, area.rollout, 0, true);
  });
}

$("run").addEventListener("change", event => {
  const run = +event.target.value, steps = stepsOf(run), {step} = page.groups[chosen.place];
  chooseStep(run, steps.includes(step) ? step : steps.at(-1));
});
$("step").addEventListener("change", event => chooseStep(page.groups[chosen.place].run, event.target.value));
$("beside").addEventListener("change", event => {
  putBeside(event.target.value === "" ? null : +event.target.value);
  show();
});
for (const input of document.getElementsByName("by")) input.addEventListener("change", () => colourBy(input.value));
for (const [id, action] of Object.entries({
  earlier: () => nextStep(-1), later: () => nextStep(1), "previous-prompt": () => nextPrompt(-1), "next-prompt": () => nextPrompt(1),
  "show-all": resetFilters, "show-keys": () => $("keys").showModal(), fold: () => fold(true), unfold: () => fold(false),
})) $(id).addEventListener("click", action);
$("search").addEventListener("input", writeList);
$("filters").addEventListener("input", filter);
$("filters").addEventListener("submit", event => event.preventDefault());

function fold(folded) {
  chosen.folded = folded;
  for (const view of shownViews()) {
    view.look.folded = folded;
    for (const details of view.section.querySelectorAll("details.tool")) details.open = !folded;
  }
}

addEventListener("hashchange", follow);
dark.addEventListener("change", () => colourBy(chosen.by));
new ResizeObserver(() => { for (const view of shownViews()) view.redraw(); }).observe($("groups"));
$("filter-fold").open = innerWidth >= 900;
chosen.place = firstPlace();
$("too-old").hidden = "DecompressionStream" in window;
follow();
