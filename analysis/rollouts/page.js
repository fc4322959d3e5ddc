// What is chosen, and how another prompt, step or run comes to be chosen.
"use strict";
const $ = id => document.getElementById(id);
const SHOWN_PROMPTS = 300; // of the list; more are found by the search
const chosen = {place: 0, beside: null, partner: null, by: "advantage", rollout: null, t: null, side: 0, folded: null};
const views = [0, 1].map(side => new GroupView($("group-view-" + side), pointed));
let visit = 0, pending = null;

// ---- choose

// Returns the group to begin with: of the last step of the run that kept most about its tokens, the first whose rewards
// differ.
function firstPlace() {
  const most = Math.max(...page.groups.map(group => offered(group).length));
  const {run} = page.groups.find(group => offered(group).length === most), places = groupsOf(run, stepsOf(run).at(-1));
  return places.find(place => new Set(page.groups[place].rewards).size > 1) ?? places[0];
}

// Shows the chosen group, and the one beside it; `marked`: then goes to the chosen token.
async function show(marked = false) {
  const started = ++visit, places = [chosen.place, chosen.beside].filter(place => place !== null);
  const groups = await Promise.all(places.map(rolloutsOf));
  if (started !== visit) return; // another group was chosen meanwhile
  const available = offered(page.groups[chosen.place]);
  if (!available.includes(chosen.by)) chosen.by = available[0];
  mark(null);
  const look = lookOf(groups);
  $("groups").classList.toggle("pair", places.length > 1);
  $("prompt").textContent = page.groups[chosen.place].text;
  views.forEach((view, side) => {
    view.section.hidden = side >= places.length;
    if (side < places.length) view.show(places[side], groups[side], look);
    else view.rollouts = view.charts = [];
  });
  writeControls();
  if (marked) goTo(chosen.side, chosen.rollout, chosen.t);
  else { chosen.rollout = chosen.t = null; tell(null); }
  link();
}

// What both sides share, so that they can be compared: the scale of the colours, and the axes.
function lookOf(groups) {
  const extents = {};
  for (const quantity of ["baseline", "energy"]) {
    let [tokens, low, high] = [1, 0, -Infinity];
    for (const rollouts of groups) for (const rollout of rollouts) {
      const values = rollout[quantity] ?? [];
      tokens = Math.max(tokens, values.length);
      for (const value of values) if (Number.isFinite(value)) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    if (high > -Infinity) extents[quantity] = {tokens, low, high};
  }
  return {by: chosen.by, limit: largest(groups, chosen.by), extents, filters: filters(), folded: chosen.folded};
}

const shownViews = () => views.filter(view => !view.section.hidden);
const currentLook = () => lookOf(shownViews().map(view => view.rollouts));

function choose(place) {
  Object.assign(chosen, {place, beside: null});
  if (chosen.partner) { // what was put beside another prompt, where it has this one too
    const others = partners(place), {run, step} = chosen.partner, wanted = step ?? page.groups[place].step;
    const find = test => others.find(other => page.groups[other].run === run && test(page.groups[other]));
    chosen.beside = find(group => group.step === wanted) ?? find(() => true) ?? null;
  }
  scrollTo(0, Math.min(scrollY, $("groups").offsetTop));
  return show();
}

// Puts a group beside the chosen one; null: none. It is remembered as a run and step, or as a run at the same step.
function putBeside(place) {
  const now = page.groups[chosen.place], other = page.groups[place];
  chosen.beside = place;
  chosen.partner = other ? {run: other.run, step: other.step === now.step ? null : other.step} : null;
}

// Goes to the nearest prompt of a run and step: the same text, else the same number, else the first.
function chooseStep(run, step) {
  const places = groupsOf(run, step), now = page.groups[chosen.place];
  const same = test => places.find(place => test(page.groups[place]));
  choose(same(group => group.text === now.text) ?? same(group => group.prompt === now.prompt) ?? places[0]);
}

function stepsOf(run) {
  return [...new Set(page.groups.filter(group => group.run === run).map(group => group.step))];
}

function nextStep(by) {
  const group = page.groups[chosen.place], steps = stepsOf(group.run), step = steps[steps.indexOf(group.step) + by];
  if (step !== undefined) chooseStep(group.run, step);
}

function nextPrompt(by) {
  const places = listed.places, at = places.indexOf(chosen.place), place = places[at < 0 ? 0 : at + by];
  if (place !== undefined) choose(place);
}

function colourBy(by) {
  if (!by || !offered(page.groups[chosen.place]).includes(by)) return;
  chosen.by = by;
  const look = currentLook();
  for (const view of shownViews()) view.recolour(look);
  writeControls();
  link();
}
