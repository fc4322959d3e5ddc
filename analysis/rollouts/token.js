// The token under the pointer, or the one that is chosen: its mark, its place in the charts, its numbers.
"use strict";
let marked = null; // the span with the mark

function mark(span, kept = false) {
  marked?.classList.remove("marked", "kept");
  marked = span;
  span?.classList.add("marked");
  span?.classList.toggle("kept", kept);
}

// Shows a token under the pointer or, where it is chosen, for good; rollout null: goes back to the chosen one.
function pointed(view, rollout, t, isChosen) {
  if (isChosen) {
    Object.assign(chosen, {side: views.indexOf(view), rollout: rollout.number, t});
    link();
  }
  if (!rollout && chosen.t !== null) {
    view = views[chosen.side];
    [rollout, t] = [view.rollouts.find(one => one.number === chosen.rollout), chosen.t];
  }
  let span = null;
  for (const one of shownViews()) span = one.point(rollout, rollout ? t : undefined, isChosen) ?? span;
  mark(span, rollout?.number === chosen.rollout && t === chosen.t);
  tell(rollout, t);
  return span;
}

// Chooses a token by the number of its rollout, brings it into the window and gives it the focus.
function goTo(side, number, t) {
  const view = views[side], rollout = view.rollouts.find(one => one.number === number);
  if (!rollout || !rollout.own.length) return;
  const at = Math.min(Math.max(t ?? 0, 0), rollout.own.length - 1);
  if (rollout.article.hidden) resetFilters();
  const span = pointed(view, rollout, at, true);
  rollout.area.focus({preventScroll: true});
  span.scrollIntoView({block: "center"});
}

// Writes what is known of a token into the bar at the bottom.
function tell(rollout, t) {
  const facts = [["π", "probability", value => written(value)], ["w", "score norm", value => written(value)],
    ["W", "energy", value => written(value)], ["B", "baseline", value => written(value)],
    ["A", "advantage", value => written(value, true)], ["R", "return", value => written(value)]];
  $("token-values").replaceChildren(...facts.map(([sign, name, write]) => {
    const value = !rollout ? null : name === "return" ? rollout.reward : rollout[name]?.[t];
    return node("div", {}, node("dt", {}, name, " ", node("i", {}, sign)), node("dd", {}, write(value)));
  }));
  const text = $("token-text");
  text.textContent = rollout ? tokenText(rollout, rollout.own[t]) || "∅" : "";
  text.hidden = !rollout;
  $("token-place").textContent = rollout ? `own token ${t + 1} of ${rollout.length}, rollout ${rollout.number}`
    : "Point at a token, or tap it.";
  $("token").classList.toggle("empty", !rollout);
  $("token-link").hidden = !rollout;
  if (rollout) {
    const side = views.findIndex(view => view.rollouts.includes(rollout));
    $("token-link").href = "#" + address({side, rollout: rollout.number, t});
    paint(text, (rollout[chosen.by] ?? [])[t], views[side].look.limit, chosen.by);
  }
}
